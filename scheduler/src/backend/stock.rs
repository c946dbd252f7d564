//! The driver as it is shipped: the scheduler is a client of its own, with the rights of root.
//!
//! Owns: a control file, a file of each card (a card must be open in the process that makes a device on it),
//! one device and subdevice per card. A card that can't be set up is left out, so nothing starts on it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::path::Path;

use gpuslice_config::Node;

use super::rm::{Client, put_u32, u32_at, u64_at};
use super::{Backend, BackendError, Card, Holding, KernelRm, Rm};
use crate::log::{chain, log};

const FB_GET_INFO_V2: u32 = 0x2080_1303;
const FB_SIZE: usize = 1028;
/// Total, heap, usable, in KiB each: the least of those that the chip reports is what clients can have.
const FB_INDICES: [u32; 3] = [0x08, 0x09, 0x20];

const GPU_GET_PIDS: u32 = 0x2080_018d;
const PIDS_SIZE: usize = 3812;
const PIDS_MOST: usize = 950;

const GPU_GET_PID_INFO: u32 = 0x2080_018e;
const PID_INFO_SIZE: usize = 14408;
const PID_INFO_MOST: usize = 200;
const PID_INFO_ENTRY: usize = 72;

const NV20_SUBDEVICE_0: u32 = 0x2080;
/// No such object: what the driver says of a process without a client.
const OBJECT_NOT_FOUND: u32 = 0x57;

struct Opened {
    card: Card,
    subdevice: u32,
    /// Kept open as long as the subdevice is used.
    _file: File,
}

/// The stock driver.
pub struct Stock<R = KernelRm> {
    driver: String,
    client: Client<R>,
    cards: Vec<Opened>,
}

impl Stock<KernelRm> {
    /// The kernel's driver.
    ///
    /// # Errors
    /// [`BackendError`]: no driver, or no card that can be used.
    pub fn kernel() -> Result<Stock<KernelRm>, BackendError> {
        Stock::new(&Node::kernel(), KernelRm)
    }
}

impl<R: Rm> Stock<R> {
    /// The driver of `node`, reached through `rm`.
    ///
    /// # Errors
    /// [`BackendError`]: no driver, or no card that can be used.
    pub fn new(node: &Node, rm: R) -> Result<Stock<R>, BackendError> {
        let driver = node.driver_version().map_err(BackendError::Node)?;
        let client = Client::new(rm, open(&node.control())?)?;
        // Opening a card makes the driver set it up; before that it has no UUID to be found by.
        let mut files: BTreeMap<u32, File> = BTreeMap::new();
        let ids = client.card_ids()?;
        for (minor, _) in &ids {
            match open(&node.gpu(*minor)) {
                Ok(file) => drop(files.insert(*minor, file)),
                Err(error) => log!("nvidia{minor} left out: {}", chain(&error)),
            }
        }
        let mut cards = Vec::new();
        for gpu in node.scan().map_err(BackendError::Node)? {
            let gpu = match gpu {
                Ok(gpu) => gpu,
                Err(error) => {
                    log!("a GPU left out: {}", chain(&error));
                    continue;
                }
            };
            let id = ids.iter().find(|(minor, _)| *minor == gpu.minor).map(|(_, id)| *id);
            let (Some(id), Some(file)) = (id, files.remove(&gpu.minor)) else {
                log!("{} (nvidia{}) left out: the driver doesn't list it", gpu.uuid, gpu.minor);
                continue;
            };
            match prepare(&client, gpu.minor, id) {
                Ok((subdevice, memory)) => {
                    let card = Card { uuid: gpu.uuid, minor: gpu.minor, memory };
                    cards.push(Opened { card, subdevice, _file: file });
                }
                Err(error) => log!("{} (nvidia{}) left out: {}", gpu.uuid, gpu.minor, chain(&error)),
            }
        }
        if cards.is_empty() {
            let found = format!("no usable GPU of {} listed", ids.len());
            return Err(BackendError::Answer { what: "list cards", found });
        }
        Ok(Stock { driver, client, cards })
    }
}

fn open(path: &Path) -> Result<File, BackendError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(|source| BackendError::Open { path: path.to_owned(), source })
}

/// Subdevice and memory of a card.
fn prepare<R: Rm>(client: &Client<R>, minor: u32, id: u32) -> Result<(u32, u64), BackendError> {
    const WHAT: &str = "read memory size";
    let subdevice = client.subdevice(minor, id)?;
    let mut ask = vec![0; FB_SIZE];
    put_u32(&mut ask, 0, u32::try_from(FB_INDICES.len()).unwrap_or(0));
    for (entry, index) in FB_INDICES.iter().enumerate() {
        put_u32(&mut ask, 4 + 8 * entry, *index);
    }
    let answer = client.control(WHAT, subdevice, FB_GET_INFO_V2, ask)?;
    let sizes = (0..FB_INDICES.len()).map(|entry| u64::from(u32_at(&answer, 8 + 8 * entry)) << 10);
    let least = sizes.filter(|size| *size > 0).min();
    let memory = least.ok_or_else(|| BackendError::Answer { what: WHAT, found: "no size".to_owned() })?;
    Ok((subdevice, memory))
}

impl<R: Rm> Backend for Stock<R> {
    fn driver(&self) -> &str {
        &self.driver
    }

    fn cards(&self) -> Vec<Card> {
        self.cards.iter().map(|opened| opened.card.clone()).collect()
    }

    fn audit(&mut self, minor: u32, sandboxes: &[u32]) -> Result<BTreeMap<u32, Holding>, BackendError> {
        let found = self.cards.iter().find(|opened| opened.card.minor == minor);
        let subdevice = found.map(|opened| opened.subdevice).ok_or_else(|| BackendError::Answer {
            what: "audit",
            found: format!("nvidia{minor} is not set up"),
        })?;
        let mut holdings: BTreeMap<u32, Holding> = BTreeMap::new();
        let mut ask = vec![0; PIDS_SIZE];
        // By class: every process with a subdevice object on this card.
        put_u32(&mut ask, 4, NV20_SUBDEVICE_0);
        let answer = self.client.control("list processes", subdevice, GPU_GET_PIDS, ask)?;
        let count = usize::try_from(u32_at(&answer, 8)).unwrap_or(PIDS_MOST).min(PIDS_MOST);
        let listed: Vec<u32> = (0..count).map(|n| u32_at(&answer, 12 + 4 * n)).collect();
        for pid in sandboxes.iter().filter(|pid| listed.contains(pid)) {
            holdings.entry(*pid).or_default().listed = true;
        }
        for some in sandboxes.chunks(PID_INFO_MOST) {
            self.memory_of(subdevice, some, &mut holdings)?;
        }
        Ok(holdings)
    }
}

impl<R: Rm> Stock<R> {
    fn memory_of(
        &self,
        subdevice: u32,
        pids: &[u32],
        holdings: &mut BTreeMap<u32, Holding>,
    ) -> Result<(), BackendError> {
        const WHAT: &str = "read memory of processes";
        let mut ask = vec![0; PID_INFO_SIZE];
        put_u32(&mut ask, 0, u32::try_from(pids.len()).unwrap_or(0));
        for (n, pid) in pids.iter().enumerate() {
            // Index 0 at +4: device memory.
            put_u32(&mut ask, 8 + PID_INFO_ENTRY * n, *pid);
        }
        let answer = self.client.control(WHAT, subdevice, GPU_GET_PID_INFO, ask)?;
        for (n, pid) in pids.iter().enumerate() {
            let at = 8 + PID_INFO_ENTRY * n;
            match u32_at(&answer, at + 8) {
                0 => {}
                OBJECT_NOT_FOUND => continue,
                status => return Err(BackendError::Status { what: WHAT, status }),
            }
            // Private and owned-shared; what it only shares is charged to its owner. The same for protected.
            let bytes =
                [16, 24, 40, 48].iter().fold(0, |sum: u64, o| sum.saturating_add(u64_at(&answer, at + o)));
            if bytes > 0 {
                holdings.entry(*pid).or_default().bytes = bytes;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
