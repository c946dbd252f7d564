//! Calls of NVIDIA's resource manager, as a client of it makes them.
//!
//! Owns: the four calls that the scheduler needs, as bytes. Numbers, sizes and offsets are those of branch
//! 580; they have not moved from 535 to 595. Trusts the driver; checks every status.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use gpuslice_sys::Arg;

use super::BackendError;

/// One driver call on an open device file.
pub trait Rm: Send {
    /// As ioctl(2), with the parameters in `arg`.
    ///
    /// # Errors
    /// The call's errno.
    fn ioctl(&self, file: BorrowedFd<'_>, cmd: u32, arg: &mut Arg) -> io::Result<i32>;
}

/// The kernel's driver.
#[derive(Debug, Default)]
pub struct KernelRm;

impl Rm for KernelRm {
    fn ioctl(&self, file: BorrowedFd<'_>, cmd: u32, arg: &mut Arg) -> io::Result<i32> {
        gpuslice_sys::ioctl(file, cmd, arg)
    }
}

const ALLOC: (u32, usize) = (0x2b, 48);
const CONTROL: (u32, usize) = (0x2a, 32);
const CARD_INFO: (u32, usize) = (0xc8, 72 * 32);
const CARD_ENTRY: usize = 72;

const NV01_ROOT_CLIENT: u32 = 0x41;
const NV01_DEVICE_0: u32 = 0x80;
const NV20_SUBDEVICE_0: u32 = 0x2080;
const GPU_GET_ID_INFO_V2: u32 = 0x205;

/// Handles of our own objects: any number but 0 does, below a client of our own.
const DEVICES: u32 = 0x6770_0000;

/// Read and write, magic 'F': the driver itself looks at number and size alone.
fn command((number, size): (u32, usize)) -> u32 {
    let size = u32::try_from(size).unwrap_or(0);
    3 << 30 | size << 16 | 0x46 << 8 | number
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

pub(super) fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    if let Some(to) = bytes.get_mut(at..at + 4) {
        to.copy_from_slice(&value.to_le_bytes());
    }
}

/// A client of the resource manager, on a control file of its own. Ends with that file.
pub(super) struct Client<R> {
    rm: R,
    control: File,
    handle: u32,
}

impl<R: Rm> Client<R> {
    pub(super) fn new(rm: R, control: File) -> Result<Client<R>, BackendError> {
        let mut client = Client { rm, control, handle: 0 };
        client.handle = client.alloc("allocate client", 0, 0, NV01_ROOT_CLIENT, &[])?;
        Ok(client)
    }

    fn call(&self, what: &'static str, number: (u32, usize), arg: &mut Arg) -> Result<(), BackendError> {
        self.rm
            .ioctl(self.control.as_fd(), command(number), arg)
            .map(|_| ())
            .map_err(|source| BackendError::Call { what, source })
    }

    /// Returns the new object's handle.
    fn alloc(
        &self,
        what: &'static str,
        parent: u32,
        handle: u32,
        class: u32,
        parameters: &[u8],
    ) -> Result<u32, BackendError> {
        let mut arg = Arg::flat(vec![0; ALLOC.1]);
        for (at, value) in [(0, self.handle), (4, parent), (8, handle), (12, class)] {
            put_u32(&mut arg.bytes, at, value);
        }
        if !parameters.is_empty() {
            put_u32(&mut arg.bytes, 32, u32::try_from(parameters.len()).unwrap_or(0));
            arg.link(None, 16, parameters.to_vec());
        }
        self.call(what, ALLOC, &mut arg)?;
        match u32_at(&arg.bytes, 40) {
            0 => Ok(u32_at(&arg.bytes, 8)),
            status => Err(BackendError::Status { what, status }),
        }
    }

    /// Returns the parameters as the driver left them.
    pub(super) fn control(
        &self,
        what: &'static str,
        object: u32,
        cmd: u32,
        parameters: Vec<u8>,
    ) -> Result<Vec<u8>, BackendError> {
        let mut arg = Arg::flat(vec![0; CONTROL.1]);
        for (at, value) in [(0, self.handle), (4, object), (8, cmd)] {
            put_u32(&mut arg.bytes, at, value);
        }
        put_u32(&mut arg.bytes, 24, u32::try_from(parameters.len()).unwrap_or(0));
        let link = arg.link(None, 16, parameters);
        self.call(what, CONTROL, &mut arg)?;
        match u32_at(&arg.bytes, 28) {
            0 => Ok(arg.links.into_iter().nth(link).map_or_else(Vec::new, |link| link.bytes)),
            status => Err(BackendError::Status { what, status }),
        }
    }

    /// The driver's id of each card: (minor, id).
    pub(super) fn card_ids(&self) -> Result<Vec<(u32, u32)>, BackendError> {
        let mut arg = Arg::flat(vec![0; CARD_INFO.1]);
        self.call("list cards", CARD_INFO, &mut arg)?;
        let entries = arg.bytes.chunks_exact(CARD_ENTRY);
        Ok(entries.filter(|e| e.first() == Some(&1)).map(|e| (u32_at(e, 56), u32_at(e, 16))).collect())
    }

    /// A device and a subdevice object for the card; returns the subdevice. This process must hold an open
    /// file of the card.
    pub(super) fn subdevice(&self, minor: u32, id: u32) -> Result<u32, BackendError> {
        let mut ask = vec![0; 32];
        put_u32(&mut ask, 0, id);
        let answer = self.control("look up card", self.handle, GPU_GET_ID_INFO_V2, ask)?;
        let mut parameters = vec![0; 56];
        put_u32(&mut parameters, 0, u32_at(&answer, 8));
        let wanted = DEVICES + 2 * minor;
        let device = self.alloc("allocate device", self.handle, wanted, NV01_DEVICE_0, &parameters)?;
        let subdevice = u32_at(&answer, 12).to_le_bytes();
        self.alloc("allocate subdevice", device, wanted + 1, NV20_SUBDEVICE_0, &subdevice)
    }
}
