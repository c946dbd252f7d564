use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use gpuslice_sys::SharedMapping;
use nix::errno::Errno;

use super::FakeDriver;
use crate::bytes::{get32, put32, put64};
use crate::dispatch::{Outcome, Sandbox};
use crate::driver::Node;
use crate::tenant::{Caller, PinError, Pinned};

/// Where the tenant's memory begins, and its size.
pub(crate) const BASE: u64 = 0x7e5a_0000_0000;
const SIZE: usize = 1 << 18;

/// A tenant's thread with memory and files.
pub(crate) struct FakeCaller {
    pub(crate) memory: Mutex<Vec<u8>>,
    pub(crate) files: Mutex<HashMap<i32, OwnedFd>>,
    /// Ranges read in this call.
    pub(crate) reads: Mutex<Vec<(u64, u64)>>,
    /// What is read changes right afterwards.
    pub(crate) treacherous: bool,
    pub(crate) process: u32,
    /// The next pins are answered with a restart.
    pub(crate) moving: Mutex<u32>,
    pub(crate) cancelled: bool,
}

impl FakeCaller {
    pub(crate) fn new() -> Self {
        FakeCaller {
            memory: Mutex::new(vec![0; SIZE]),
            files: Mutex::default(),
            reads: Mutex::default(),
            treacherous: false,
            process: 100,
            moving: Mutex::new(0),
            cancelled: false,
        }
    }

    pub(crate) fn put(&self, addr: u64, bytes: &[u8]) {
        self.memory.lock().unwrap()[at(addr)..][..bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn get(&self, addr: u64, length: usize) -> Vec<u8> {
        self.memory.lock().unwrap()[at(addr)..][..length].to_vec()
    }

    fn range(addr: u64, length: usize) -> Result<usize, Errno> {
        let start = addr.checked_sub(BASE).and_then(|start| usize::try_from(start).ok());
        let start = start.filter(|start| start.checked_add(length).is_some_and(|end| end <= SIZE));
        start.ok_or(Errno::EFAULT)
    }
}

fn at(addr: u64) -> usize {
    usize::try_from(addr - BASE).unwrap()
}

impl Caller for FakeCaller {
    fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let start = Self::range(addr, buf.len())?;
        let mut memory = self.memory.lock().unwrap();
        let range = &mut memory[start..start + buf.len()];
        buf.copy_from_slice(range);
        if self.treacherous {
            range.iter_mut().for_each(|byte| *byte ^= 0xff);
        }
        self.reads.lock().unwrap().push((addr, addr + buf.len() as u64));
        Ok(())
    }
    fn write(&self, addr: u64, buf: &[u8]) -> Result<(), Errno> {
        let start = Self::range(addr, buf.len())?;
        self.memory.lock().unwrap()[start..start + buf.len()].copy_from_slice(buf);
        Ok(())
    }
    fn file(&self, n: i32) -> Result<OwnedFd, Errno> {
        self.files.lock().unwrap().get(&n).map(|file| file.try_clone().unwrap()).ok_or(Errno::EBADF)
    }
    fn tgid(&self) -> u32 {
        self.process
    }
    fn still_waiting(&self) -> bool {
        !self.cancelled
    }
    fn pinned(&self, _addr: u64, length: u64) -> Result<Pinned, PinError> {
        let mut moving = self.moving.lock().unwrap();
        if *moving > 0 {
            *moving -= 1;
            return Err(PinError::Restart);
        }
        let memfd = gpuslice_sys::memory::memfd("pin", length).map_err(|_| PinError::Errno(Errno::ENOMEM))?;
        let length = usize::try_from(length).map_err(|_| PinError::Errno(Errno::ENOMEM))?;
        let keep = SharedMapping::new(std::os::fd::AsFd::as_fd(&memfd), 0, length, true)
            .map_err(|_| PinError::Errno(Errno::ENOMEM))?;
        Ok(Pinned { address: keep.address(), keep: Arc::new(keep) })
    }
    fn install(&self, file: OwnedFd, at: Option<u32>) -> Result<u32, Errno> {
        let number = at.unwrap_or(77);
        self.files.lock().unwrap().insert(i32::try_from(number).unwrap(), file);
        Ok(number)
    }
}

/// A tenant that knows the ABI.
pub(crate) struct Tenant<'a> {
    pub(crate) sandbox: &'a Sandbox<FakeDriver>,
    pub(crate) caller: FakeCaller,
    pub(crate) control: OwnedFd,
    pub(crate) gpu: OwnedFd,
    pub(crate) uvm: OwnedFd,
    pub(crate) client: u32,
}

const OUTER: u64 = BASE + 0x100;
pub(crate) const PARAMS: u64 = BASE + 0x1000;

pub(crate) fn escape(nr: u32, size: u32) -> u32 {
    0xc000_0000 | size << 16 | 0x4600 | nr
}

impl<'a> Tenant<'a> {
    /// With a client, a device of the first granted card (handle 1) and its subdevice (2).
    pub(crate) fn new(sandbox: &'a Sandbox<FakeDriver>) -> Self {
        let driver = sandbox.driver();
        let mut tenant = Tenant {
            sandbox,
            caller: FakeCaller::new(),
            control: driver.open(Node::Control),
            gpu: driver.open(Node::Gpu { minor: 0 }),
            uvm: driver.open(Node::Uvm),
            client: 0,
        };
        tenant.client = tenant.new_client();
        assert_eq!(tenant.alloc(tenant.client, 1, 0x80, &[0; 56]), 0);
        assert_eq!(tenant.alloc(1, 2, 0x2080, &[0; 4]), 0);
        tenant
    }

    pub(crate) fn call(&self, nr: u32, bytes: &[u8]) -> (Outcome, Vec<u8>) {
        self.call_on(&self.control, Node::Control, escape(nr, u32::try_from(bytes.len()).unwrap()), bytes)
    }

    pub(crate) fn call_on(&self, file: &OwnedFd, node: Node, cmd: u32, bytes: &[u8]) -> (Outcome, Vec<u8>) {
        self.caller.reads.lock().unwrap().clear();
        self.caller.put(OUTER, bytes);
        let outcome = self.sandbox.ioctl(&self.caller, file, node, cmd, OUTER);
        (outcome, self.caller.get(OUTER, bytes.len()))
    }

    pub(crate) fn uvm(&self, cmd: u32, bytes: &[u8]) -> (Outcome, Vec<u8>) {
        self.call_on(&self.uvm, Node::Uvm, cmd, bytes)
    }

    pub(crate) fn new_client(&self) -> u32 {
        let mut bytes = vec![0; 48];
        put32(&mut bytes, 12, 0x41).unwrap();
        let (outcome, bytes) = self.call(0x2b, &bytes);
        assert_eq!((outcome, get32(&bytes, 40)), (Outcome::Return(0), Ok(0)));
        get32(&bytes, 8).unwrap()
    }

    pub(crate) fn alloc_outer(&self, parent: u32, handle: u32, class: u32) -> Vec<u8> {
        let mut bytes = vec![0; 48];
        for (at, value) in [(0, self.client), (4, parent), (8, handle), (12, class)] {
            put32(&mut bytes, at, value).unwrap();
        }
        put64(&mut bytes, 16, PARAMS).unwrap();
        bytes
    }

    /// The status.
    pub(crate) fn alloc(&self, parent: u32, handle: u32, class: u32, params: &[u8]) -> u32 {
        self.caller.put(PARAMS, params);
        let (outcome, bytes) = self.call(0x2b, &self.alloc_outer(parent, handle, class));
        assert_eq!(outcome, Outcome::Return(0));
        get32(&bytes, 40).unwrap()
    }

    pub(crate) fn memory(&self, parent: u32, handle: u32, size: u64) -> u32 {
        let mut params = vec![0; 128];
        put64(&mut params, 64, size).unwrap();
        self.alloc(parent, handle, 0x40, &params)
    }

    pub(crate) fn control_outer(&self, object: u32, cmd: u32, size: usize) -> Vec<u8> {
        let mut bytes = vec![0; 32];
        let size = u32::try_from(size).unwrap();
        for (at, value) in [(0, self.client), (4, object), (8, cmd), (24, size)] {
            put32(&mut bytes, at, value).unwrap();
        }
        put64(&mut bytes, 16, PARAMS).unwrap();
        bytes
    }

    /// Status and parameters.
    pub(crate) fn control(&self, object: u32, cmd: u32, params: &[u8]) -> (u32, Vec<u8>) {
        self.caller.put(PARAMS, params);
        let (outcome, bytes) = self.call(0x2a, &self.control_outer(object, cmd, params.len()));
        assert_eq!(outcome, Outcome::Return(0));
        (get32(&bytes, 28).unwrap(), self.caller.get(PARAMS, params.len()))
    }

    pub(crate) fn free(&self, handle: u32) -> u32 {
        let mut bytes = vec![0; 16];
        put32(&mut bytes, 0, self.client).unwrap();
        put32(&mut bytes, 8, handle).unwrap();
        let (outcome, bytes) = self.call(0x29, &bytes);
        assert_eq!(outcome, Outcome::Return(0));
        get32(&bytes, 12).unwrap()
    }

    pub(crate) fn dup(&self, parent: u32, handle: u32, source: (u32, u32)) -> u32 {
        let mut bytes = vec![0; 28];
        for (at, value) in [(0, self.client), (4, parent), (8, handle), (12, source.0), (16, source.1)] {
            put32(&mut bytes, at, value).unwrap();
        }
        let (outcome, bytes) = self.call(0x34, &bytes);
        assert_eq!(outcome, Outcome::Return(0));
        get32(&bytes, 24).unwrap()
    }

    /// Maps memory into the process. The status.
    pub(crate) fn map(&self, handle: u32) -> u32 {
        let mut bytes = vec![0; 56];
        for (at, value) in [(0, self.client), (4, 1), (8, handle), (48, u32::MAX)] {
            put32(&mut bytes, at, value).unwrap();
        }
        let (outcome, bytes) = self.call(0x4e, &bytes);
        assert_eq!(outcome, Outcome::Return(0));
        get32(&bytes, 40).unwrap()
    }

    pub(crate) fn uvm_initialize(&self) {
        let (outcome, _) = self.uvm(0x3000_0001, &[0; 16]);
        assert_eq!(outcome, Outcome::Return(0));
    }

    /// The status.
    pub(crate) fn uvm_map(&self, base: u64, memory: u32) -> u32 {
        self.uvm_map_on(base, memory, &[1])
    }

    /// On the cards whose UUIDs begin with these bytes.
    pub(crate) fn uvm_map_on(&self, base: u64, memory: u32, cards: &[u8]) -> u32 {
        let mut range = vec![0; 24];
        put64(&mut range, 0, base).unwrap();
        put64(&mut range, 8, 1 << 21).unwrap();
        self.uvm(73, &range);
        let mut bytes = vec![0; 9264];
        bytes[..24].copy_from_slice(&range);
        for (place, card) in cards.iter().enumerate() {
            bytes[24 + 36 * place] = *card;
        }
        put64(&mut bytes, 9240, cards.len() as u64).unwrap();
        put32(&mut bytes, 9248, u32::MAX).unwrap();
        put32(&mut bytes, 9252, self.client).unwrap();
        put32(&mut bytes, 9256, memory).unwrap();
        let (outcome, bytes) = self.uvm(33, &bytes);
        assert_eq!(outcome, Outcome::Return(0));
        get32(&bytes, 9260).unwrap()
    }

    pub(crate) fn uvm_free(&self, base: u64) -> u32 {
        let mut range = vec![0; 24];
        put64(&mut range, 0, base).unwrap();
        let (outcome, bytes) = self.uvm(34, &range);
        assert_eq!(outcome, Outcome::Return(0));
        get32(&bytes, 16).unwrap()
    }

    pub(crate) fn used(&self) -> u64 {
        self.sandbox.usage()[0].used
    }
}
