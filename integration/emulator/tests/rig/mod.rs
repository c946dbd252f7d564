//! A driver in this process and calls on it, for the tests beside.
#![allow(dead_code, reason = "each test program uses a part")]

use std::os::fd::{AsRawFd, OwnedFd};

use gpuslice_emulator::{Answer, Caller, Emulator, Gpu, Node, Options, model};
use serde_json::Value;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const OK: u32 = 0;

pub(crate) struct Rig {
    pub(crate) emulator: Emulator,
    pub(crate) caller: Caller,
    _root: tempfile::TempDir,
}

/// A block of 32-bit words.
pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(block[at..at + 4].try_into().unwrap())
}

pub(crate) fn long(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(block[at..at + 8].try_into().unwrap())
}

pub(crate) fn set(block: &mut [u8], at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}

pub(crate) fn frontend(nr: u32, size: usize) -> u32 {
    0xc000_4600 | (u32::try_from(size).unwrap() << 16) | nr
}

pub(crate) fn address(block: &[u8]) -> u64 {
    if block.is_empty() { 0 } else { block.as_ptr().expose_provenance().try_into().unwrap() }
}

impl Rig {
    /// Cards of these sizes in MiB.
    pub(crate) fn new(cards: &[u64]) -> Rig {
        let root = tempfile::Builder::new().prefix("emulator").tempdir_in("/dev/shm").unwrap();
        let small = model("small").unwrap();
        let gpus = (0..).zip(cards).map(|(minor, mib)| Gpu::new(small, minor, Some(mib * MIB), 1)).collect();
        let options = Options { root: root.path().to_owned(), gpus, version: "580.159.04".to_owned() };
        let emulator = Emulator::new(options).unwrap();
        Rig { emulator, caller: Caller::new(std::process::id()).unwrap(), _root: root }
    }

    pub(crate) fn open(&self, node: Node) -> OwnedFd {
        let name = node.file_name();
        let path = self.emulator.root().join("dev").join(name);
        std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap().into()
    }

    pub(crate) fn ioctl(&self, file: &OwnedFd, cmd: u32, block: &mut [u8]) -> Answer {
        self.emulator.ioctl(&self.caller, file, cmd, address(block))
    }

    /// A call that must not fail by errno; its status.
    pub(crate) fn call(&self, file: &OwnedFd, nr: u32, block: &mut [u8], status_at: usize) -> u32 {
        let answer = self.ioctl(file, frontend(nr, block.len()), block);
        assert_eq!((answer.value, answer.errno), (0, 0), "escape {nr:#x}");
        word(block, status_at)
    }

    pub(crate) fn usage(&self) -> Value {
        serde_json::from_str(&gpuslice_emulator::ask(&self.emulator, r#"{"do":"usage"}"#)).unwrap()
    }

    pub(crate) fn used(&self, card: usize) -> u64 {
        self.usage()["gpus"][card]["used"].as_u64().unwrap()
    }

    pub(crate) fn clients(&self) -> usize {
        self.usage()["clients"].as_array().unwrap().len()
    }

    pub(crate) fn violations(&self) -> usize {
        self.usage()["violations"].as_array().unwrap().len()
    }
}

/// A client with a device and a subdevice.
pub(crate) struct Client<'a> {
    pub(crate) rig: &'a Rig,
    pub(crate) control: OwnedFd,
    pub(crate) card: OwnedFd,
    pub(crate) handle: u32,
}

pub(crate) const DEVICE: u32 = 0x10;
pub(crate) const SUBDEVICE: u32 = 0x11;

impl<'a> Client<'a> {
    pub(crate) fn bare(rig: &'a Rig) -> Client<'a> {
        let control = rig.open(Node::Control);
        let mut block = words(&[0, 0, 0, 0x41, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rig.call(&control, 0x2b, &mut block, 40), OK);
        Client { rig, control, card: rig.open(Node::Gpu(0)), handle: word(&block, 8) }
    }

    pub(crate) fn new(rig: &'a Rig) -> Client<'a> {
        let client = Client::bare(rig);
        let mut register = client.control.as_raw_fd().to_le_bytes();
        assert_eq!(rig.ioctl(&client.card, frontend(0xc9, 4), &mut register).errno, 0);
        assert_eq!(client.alloc(client.handle, DEVICE, 0x80, &mut [0; 56]), OK);
        assert_eq!(client.alloc(DEVICE, SUBDEVICE, 0x2080, &mut [0; 4]), OK);
        client
    }

    pub(crate) fn alloc_on(
        &self,
        file: &OwnedFd,
        parent: u32,
        new: u32,
        class: u32,
        parameters: &mut [u8],
    ) -> u32 {
        let mut block = words(&[self.handle, parent, new, class, 0, 0, 0, 0, 0, 0, 0, 0]);
        set(&mut block, 16, &address(parameters).to_le_bytes());
        self.rig.call(file, 0x2b, &mut block, 40)
    }

    pub(crate) fn alloc(&self, parent: u32, new: u32, class: u32, parameters: &mut [u8]) -> u32 {
        self.alloc_on(&self.control, parent, new, class, parameters)
    }

    pub(crate) fn memory(&self, new: u32, size: u64) -> u32 {
        let mut parameters = [0; 128];
        set(&mut parameters, 0, &self.handle.to_le_bytes());
        set(&mut parameters, 64, &size.to_le_bytes());
        self.alloc(DEVICE, new, 0x40, &mut parameters)
    }

    pub(crate) fn free(&self, handle: u32) -> u32 {
        self.rig.call(&self.control, 0x29, &mut words(&[self.handle, DEVICE, handle, 0]), 12)
    }

    pub(crate) fn control(&self, object: u32, cmd: u32, parameters: &mut [u8]) -> u32 {
        let size = u32::try_from(parameters.len()).unwrap();
        let mut block = words(&[self.handle, object, cmd, 0, 0, 0, size, 0]);
        set(&mut block, 16, &address(parameters).to_le_bytes());
        self.rig.call(&self.control, 0x2a, &mut block, 28)
    }

    pub(crate) fn dup(&self, new: u32, source: &Client<'_>, from: u32) -> u32 {
        let mut block = words(&[self.handle, DEVICE, new, source.handle, from, 0, 0]);
        self.rig.call(&self.control, 0x34, &mut block, 24)
    }

    /// Maps; the file to mmap and the cookie.
    pub(crate) fn map(&self, memory: u32, length: u64) -> Result<(OwnedFd, u64), u32> {
        let file = self.rig.open(Node::Gpu(0));
        let mut block = words(&[self.handle, SUBDEVICE, memory, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        set(&mut block, 24, &length.to_le_bytes());
        set(&mut block, 48, &file.as_raw_fd().to_le_bytes());
        let answer = self.rig.ioctl(&self.control, frontend(0x4e, 56), &mut block);
        assert_eq!(answer.errno, 0);
        match (word(&block, 40), answer.install) {
            (OK, Some(install)) => {
                assert_eq!(install.at, file.as_raw_fd());
                Ok((install.file, long(&block, 32)))
            }
            (status, _) => Err(status),
        }
    }

    pub(crate) fn unmap(&self, memory: u32, cookie: u64) -> u32 {
        let mut block = words(&[self.handle, SUBDEVICE, memory, 0, 0, 0, 0, 0]);
        set(&mut block, 16, &cookie.to_le_bytes());
        self.rig.call(&self.control, 0x4f, &mut block, 24)
    }
}
