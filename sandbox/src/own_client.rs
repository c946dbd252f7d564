//! Our own client of the driver: which GPUs were granted, and which of the tenant's clients still live.
//!
//! Owns: one root client with a device and a subdevice per granted GPU, on files that the sandbox was passed.
//! Trusts: the driver. Promises: never acts on a tenant's object except to ask whether its client lives and to
//! keep memory that the tenant maps.
//! Failure: [`StartError`] at start; later an unanswered question counts as "lives".

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use gpuslice_policy::status;
use gpuslice_proto::SandboxSettings;
use gpuslice_sys::Arg;

use crate::bytes::{get32, put32};
use crate::dispatch::{OwnFiles, StartError};
use crate::driver::{Driver, Node};
use crate::objects::Name;

/// A granted GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Card {
    /// Minor number of its node.
    pub(crate) minor: u32,
    /// The driver's id of it.
    pub(crate) id: u32,
    /// Its device instance.
    pub(crate) instance: u32,
}

/// The client.
pub(crate) struct OwnClient {
    control: OwnedFd,
    /// The driver wants the caller to have each GPU open.
    _gpus: Vec<OwnedFd>,
    _uvm: Option<OwnedFd>,
    handle: u32,
    subdevice: u32,
    cards: Vec<Card>,
    /// Handle of the next duplicate.
    next: AtomicU32,
}

/// A command of the front end as the sandbox issues it.
pub(crate) const fn escape_command(nr: u8, size: u32) -> u32 {
    0xc000_0000 | size << 16 | 0x4600 | nr as u32
}

pub(crate) const NR_CONTROL: u8 = 0x2a;
pub(crate) const NR_ALLOC: u8 = 0x2b;
pub(crate) const NR_FREE: u8 = 0x29;
pub(crate) const NR_DUP: u8 = 0x34;
pub(crate) const NR_CARD_INFO: u8 = 0xc8;
/// Bytes of one card in the driver's list, and how many cards we ask for.
pub(crate) const CARD_BYTES: u32 = 72;
pub(crate) const CARDS: u32 = 32;

const ROOT_CLIENT: u32 = 0x41;
const DEVICE: u32 = 0x80;
const SUBDEVICE: u32 = 0x2080;
const GET_PROBED_IDS: u32 = 0x214;
const ATTACH_IDS: u32 = 0x215;
const GET_ID_INFO_V2: u32 = 0x205;
const GROUP_UNIQUE_ID_INFO: u32 = 0x2080_1123;
const GROUP_UNIQUE_ID_INFO_BYTES: usize = 1552;
/// Handles of ours; the driver keeps them apart from every other client's.
const FIRST_HANDLE: u32 = 0x6770_0000;
const FIRST_DUPLICATE: u32 = 0x6771_0000;

fn failed(step: &'static str, cause: impl ToString) -> StartError {
    StartError::Driver { step, cause: cause.to_string() }
}

fn zeros(length: u32) -> Vec<u8> {
    vec![0; crate::bytes::index(length)]
}

/// Handle of the device of granted card `index`; the subdevice's follows it.
fn device_handle(index: usize) -> u32 {
    FIRST_HANDLE | u32::try_from(index).unwrap_or(0).saturating_mul(2)
}

impl OwnClient {
    pub(crate) fn new<D: Driver>(
        driver: &D,
        settings: &SandboxSettings,
        files: OwnFiles,
    ) -> Result<Self, StartError> {
        if files.gpus.len() != settings.gpus.len() {
            return Err(StartError::Files { files: files.gpus.len(), gpus: settings.gpus.len() });
        }
        let mut own = OwnClient {
            control: files.control,
            _gpus: files.gpus,
            _uvm: files.uvm,
            handle: 0,
            subdevice: 0,
            cards: Vec::new(),
            next: AtomicU32::new(FIRST_DUPLICATE),
        };
        let known = own.card_list(driver)?;
        own.handle = own.alloc(driver, "the root client", 0, 0, ROOT_CLIENT, Vec::new())?;
        for gpu in &settings.gpus {
            let id = known.iter().find(|(minor, _)| *minor == gpu.minor).map(|(_, id)| *id);
            let Some(id) = id else {
                let found = known.iter().map(|(minor, _)| *minor).collect();
                return Err(StartError::NoSuchGpu { minor: gpu.minor, found });
            };
            own.cards.push(Card { minor: gpu.minor, id, instance: 0 });
        }
        own.attach(driver)?;
        for index in 0..own.cards.len() {
            own.add_card(driver, index)?;
        }
        Ok(own)
    }

    /// Minor number and id of every card that the driver lists.
    fn card_list<D: Driver>(&self, driver: &D) -> Result<Vec<(u32, u32)>, StartError> {
        let step = "the list of cards";
        let mut arg = Arg::flat(zeros(CARD_BYTES * CARDS));
        let cmd = escape_command(NR_CARD_INFO, CARD_BYTES * CARDS);
        driver.ioctl(self.control.as_fd(), Node::Control, cmd, &mut arg).map_err(|e| failed(step, e))?;
        let cards = arg.bytes.chunks_exact(crate::bytes::index(CARD_BYTES));
        cards
            .filter(|card| card.first().is_some_and(|valid| *valid != 0))
            .map(|card| Ok((get32(card, 56)?, get32(card, 16)?)))
            .collect::<Result<_, nix::errno::Errno>>()
            .map_err(|e| failed(step, e))
    }

    fn attach<D: Driver>(&self, driver: &D) -> Result<(), StartError> {
        let step = "attaching the GPUs";
        let mut probed = zeros(384);
        self.control(driver, self.handle, GET_PROBED_IDS, &mut probed).map_err(|e| failed(step, e))?;
        let mut ids = vec![0xff; 128];
        for (card, at) in self.cards.iter().zip((0..).step_by(4)) {
            put32(&mut ids, at, card.id).map_err(|e| failed(step, e))?;
        }
        ids.extend([0; 4]);
        self.control(driver, self.handle, ATTACH_IDS, &mut ids).map_err(|e| failed(step, e))
    }

    fn add_card<D: Driver>(&mut self, driver: &D, index: usize) -> Result<(), StartError> {
        let step = "a granted GPU's device";
        let Some(card) = self.cards.get(index).copied() else { return Ok(()) };
        let mut info = zeros(32);
        put32(&mut info, 0, card.id).map_err(|e| failed(step, e))?;
        self.control(driver, self.handle, GET_ID_INFO_V2, &mut info).map_err(|e| failed(step, e))?;
        let instance = get32(&info, 8).map_err(|e| failed(step, e))?;
        if let Some(card) = self.cards.get_mut(index) {
            card.instance = instance;
        }
        let device = device_handle(index);
        let mut params = zeros(56);
        put32(&mut params, 0, instance).map_err(|e| failed(step, e))?;
        self.alloc(driver, step, self.handle, device, DEVICE, params)?;
        let subdevice = self.alloc(driver, step, device, device | 1, SUBDEVICE, zeros(4))?;
        if index == 0 {
            self.subdevice = subdevice;
        }
        Ok(())
    }

    fn alloc<D: Driver>(
        &self,
        driver: &D,
        step: &'static str,
        parent: u32,
        handle: u32,
        class: u32,
        params: Vec<u8>,
    ) -> Result<u32, StartError> {
        let mut bytes = zeros(48);
        for (at, value) in [(0, self.handle), (4, parent), (8, handle), (12, class)] {
            put32(&mut bytes, at, value).map_err(|e| failed(step, e))?;
        }
        let mut arg = Arg::flat(bytes);
        arg.link(None, 16, params);
        let cmd = escape_command(NR_ALLOC, 48);
        driver.ioctl(self.control.as_fd(), Node::Control, cmd, &mut arg).map_err(|e| failed(step, e))?;
        match get32(&arg.bytes, 40) {
            Ok(status::OK) => get32(&arg.bytes, 8).map_err(|e| failed(step, e)),
            Ok(status) => Err(failed(step, format!("status {status:#x}"))),
            Err(error) => Err(failed(step, error)),
        }
    }

    /// A control of ours; the error says the errno or the status.
    fn control<D: Driver>(
        &self,
        driver: &D,
        object: u32,
        cmd: u32,
        params: &mut Vec<u8>,
    ) -> Result<(), String> {
        match self.ask(driver, object, cmd, params) {
            Ok(status::OK) => Ok(()),
            Ok(status) => Err(format!("control {cmd:#x}: status {status:#x}")),
            Err(error) => Err(format!("control {cmd:#x}: {error}")),
        }
    }

    fn ask<D: Driver>(
        &self,
        driver: &D,
        object: u32,
        cmd: u32,
        params: &mut Vec<u8>,
    ) -> Result<u32, std::io::Error> {
        let length = u32::try_from(params.len()).unwrap_or(u32::MAX);
        let mut bytes = zeros(32);
        for (at, value) in [(0, self.handle), (4, object), (8, cmd), (24, length)] {
            put32(&mut bytes, at, value)?;
        }
        let mut arg = Arg::flat(bytes);
        arg.link(None, 16, std::mem::take(params));
        driver.ioctl(self.control.as_fd(), Node::Control, escape_command(NR_CONTROL, 32), &mut arg)?;
        if let Some(link) = arg.links.pop() {
            *params = link.bytes;
        }
        Ok(get32(&arg.bytes, 28)?)
    }

    /// Whether the driver has this client.
    pub(crate) fn lives<D: Driver>(&self, driver: &D, client: u32) -> bool {
        let mut params = vec![0; GROUP_UNIQUE_ID_INFO_BYTES];
        if put32(&mut params, 0, client).is_err() {
            return true;
        }
        // An unknown client is an invalid handle; a known one, asked for object 0, is some other error.
        !matches!(
            self.ask(driver, self.subdevice, GROUP_UNIQUE_ID_INFO, &mut params),
            Ok(status::INVALID_OBJECT_HANDLE)
        )
    }

    /// Another handle, of ours, of the memory `name`, under the device of card `gpu`. `None`: the driver refused.
    pub(crate) fn duplicate<D: Driver>(&self, driver: &D, gpu: usize, name: Name) -> Option<u32> {
        let device = device_handle(gpu);
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let mut bytes = zeros(28);
        let fields = [(0, self.handle), (4, device), (8, handle), (12, name.client), (16, name.handle)];
        for (at, value) in fields {
            put32(&mut bytes, at, value).ok()?;
        }
        let mut arg = Arg::flat(bytes);
        driver.ioctl(self.control.as_fd(), Node::Control, escape_command(NR_DUP, 28), &mut arg).ok()?;
        (get32(&arg.bytes, 24) == Ok(status::OK)).then_some(handle)
    }

    /// Frees a handle of ours.
    pub(crate) fn free<D: Driver>(&self, driver: &D, handle: u32) -> bool {
        let mut bytes = zeros(16);
        for (at, value) in [(0, self.handle), (8, handle)] {
            if put32(&mut bytes, at, value).is_err() {
                return false;
            }
        }
        let mut arg = Arg::flat(bytes);
        let done = driver.ioctl(self.control.as_fd(), Node::Control, escape_command(NR_FREE, 16), &mut arg);
        done.is_ok() && get32(&arg.bytes, 12) == Ok(status::OK)
    }

    /// The granted GPUs, in the order of the settings.
    pub(crate) fn cards(&self) -> &[Card] {
        &self.cards
    }
}
