//! A driver that accepts everything and counts `NV_ESC_SYS_PARAMS`, whose answer is the count. It gives clients
//! numbers in turn and knows which live; some allocations and frees of them take long.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpuslice_sandbox::dispatch::OwnFiles;
use gpuslice_sandbox::driver::{Done, Driver, Node};
use gpuslice_sys::{Arg, FileIdentity, identify};

pub const SYS_PARAMS: u32 = 0xc008_46d6;
pub const ALLOC: u32 = 0xc030_462b;
pub const FREE: u32 = 0xc010_4629;
pub const CONTROL: u32 = 0xc020_462a;
pub const ALLOC_MEMORY: u32 = 0xc038_4627;
const CARD_INFO: u32 = 0xc8;

pub struct Counting {
    control: FileIdentity,
    gpu: FileIdentity,
    uvm: FileIdentity,
    calls: AtomicU64,
    handles: AtomicU64,
    living: Mutex<BTreeSet<u32>>,
}

impl Counting {
    pub fn new(files: &OwnFiles) -> io::Result<Counting> {
        Ok(Counting {
            control: identify(files.control.as_fd())?,
            gpu: identify(files.gpus[0].as_fd())?,
            uvm: identify(files.uvm.as_ref().unwrap().as_fd())?,
            calls: AtomicU64::new(0),
            handles: AtomicU64::new(0xc1d0_0000),
            living: Mutex::default(),
        })
    }
}

/// Shorter and longer than the pace of a storm of signals.
fn take_time(number: u32) {
    let micros = [0, 300, 1500, 4000][usize::try_from(number % 4).unwrap()];
    if micros != 0 {
        std::thread::sleep(Duration::from_micros(micros));
    }
}

fn set(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
}

impl Driver for Counting {
    fn node_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<Node>> {
        let found = identify(file)?;
        Ok(match found {
            found if found == self.control => Some(Node::Control),
            found if found == self.gpu => Some(Node::Gpu { minor: 0 }),
            found if found == self.uvm => Some(Node::Uvm),
            _ => None,
        })
    }

    fn ioctl(&self, _file: BorrowedFd<'_>, _node: Node, cmd: u32, arg: &mut Arg) -> io::Result<Done> {
        match cmd {
            SYS_PARAMS => {
                let wait = u64::from_ne_bytes(arg.bytes[..8].try_into().unwrap()) >> 48;
                if wait != 0 {
                    std::thread::sleep(Duration::from_micros(wait));
                }
                let count = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
                arg.bytes[..8].copy_from_slice(&count.to_ne_bytes());
            }
            cmd if cmd & 0xff == CARD_INFO => {
                arg.bytes[0] = 1;
                set(&mut arg.bytes, 16, 5);
            }
            ALLOC if arg.bytes[8..12] == [0; 4] => {
                let handle = u32::try_from(self.handles.fetch_add(1, Ordering::SeqCst)).unwrap();
                take_time(handle);
                self.living.lock().unwrap().insert(handle);
                set(&mut arg.bytes, 8, handle);
            }
            FREE => {
                let handle = u32::from_ne_bytes(arg.bytes[8..12].try_into().unwrap());
                take_time(handle / 4);
                let lived = self.living.lock().unwrap().remove(&handle);
                set(&mut arg.bytes, 12, if lived { 0 } else { 0x33 });
            }
            _ => {}
        }
        Ok(Done::default())
    }
}
