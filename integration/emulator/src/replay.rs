//! Replays driver calls that were recorded on a real card, and compares what the emulator answers.
//!
//! A recording is one JSON object a line: a call with its bytes before and after and the buffers behind its
//! pointers, an open, or a close (the format of `integration/gpu/record.c`). The replayer is the calling process:
//! it opens the emulator's nodes, rebuilds each block in its own memory and puts the emulator's client handles
//! and its own file numbers and addresses in the place of the recorded ones. Compared are the call's value, its
//! errno and the driver's status.

use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;
use crate::caller::Caller;
use crate::emulator::{Answer, DEFAULT_VERSION, Emulator, Options};
use crate::faults::status_at;
use crate::model::{Gpu, model};
use crate::nodes::Node;
use crate::state::FIRST_CLIENT;
use crate::table::escape;

/// One line of a recording.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Line {
    Call(Recorded),
    Open { open: i32, pid: u32, node: String },
    Close { close: i32, pid: u32 },
}

#[derive(Clone, Debug, Deserialize)]
struct Recorded {
    seq: u64,
    pid: u32,
    file: i32,
    node: String,
    cmd: String,
    ret: i32,
    errno: i32,
    #[serde(rename = "in")]
    before: String,
    out: String,
    #[serde(default)]
    links: Vec<Link>,
}

#[derive(Clone, Debug, Deserialize)]
struct Link {
    at: usize,
    #[serde(rename = "in")]
    before: String,
    out: String,
    #[serde(default)]
    links: Vec<Link>,
}

/// A call that was answered otherwise.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// Number in the recording.
    pub seq: u64,
    /// The command.
    pub cmd: String,
    /// Class, control or UVM command.
    pub what: Option<String>,
    /// Value, errno and status as recorded.
    pub recorded: (i32, i32, Option<u32>),
    /// The same as the emulator answers.
    pub emulated: (i32, i32, Option<u32>),
}

/// What came of a replay.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Calls replayed.
    pub calls: u64,
    /// Those answered with the same value, errno and status.
    pub equal: u64,
    /// The others.
    pub different: Vec<Difference>,
}

/// Why a recording can't be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A line is not as the format says.
    #[error("line {line}: {reason}")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The recording can't be read.
    #[error("reading the recording")]
    Read(#[source] io::Error),
    /// The emulator or its nodes.
    #[error("setting up the emulator")]
    Setup(#[source] io::Error),
}

/// A recording, read and checked for its form.
#[derive(Clone, Debug)]
pub struct Recording {
    lines: Vec<Line>,
}

/// Who performs the calls of a replay: file, node, command, address of the parameters.
pub type Perform<'a> = dyn FnMut(&OwnedFd, Node, u32, u64) -> Answer + 'a;

impl Recording {
    /// Reads one.
    ///
    /// # Errors
    /// [`ReplayError`]: a line that is not as the format says.
    pub fn read(recording: impl BufRead) -> Result<Self, ReplayError> {
        let mut lines = Vec::new();
        for (index, text) in recording.lines().enumerate() {
            let text = text.map_err(ReplayError::Read)?;
            if text.trim().is_empty() {
                continue;
            }
            let bad = |reason: String| ReplayError::Line { line: index + 1, reason };
            lines.push(serde_json::from_str::<Line>(&text).map_err(|error| bad(error.to_string()))?);
        }
        Ok(Recording { lines })
    }

    /// An emulator under `root` with the cards that the recording saw.
    ///
    /// # Errors
    /// Its nodes can't be made.
    pub fn emulator(&self, root: PathBuf) -> io::Result<Emulator> {
        let version = DEFAULT_VERSION.to_owned();
        Emulator::new(Options { root, gpus: cards(&self.lines), version })
    }

    /// Plays it: each call goes to `perform`.
    ///
    /// # Errors
    /// A node can't be opened, or a line makes no sense.
    pub fn play(&self, emulator: &Emulator, perform: &mut Perform<'_>) -> io::Result<Summary> {
        let mut player = Player {
            emulator,
            perform,
            files: BTreeMap::new(),
            clients: BTreeMap::new(),
            kept: Vec::new(),
            mapped: Vec::new(),
            summary: Summary::default(),
        };
        for line in &self.lines {
            player.line(line)?;
        }
        Ok(player.summary)
    }
}

/// Replays a recording on a fresh emulator under `root` (on a tmpfs, or as root).
///
/// # Errors
/// [`ReplayError`].
pub fn replay(recording: impl BufRead, root: PathBuf) -> Result<Summary, ReplayError> {
    let recording = Recording::read(recording)?;
    let emulator = recording.emulator(root).map_err(ReplayError::Setup)?;
    let caller = Caller::new(std::process::id()).map_err(ReplayError::Setup)?;
    let mut perform =
        |file: &OwnedFd, _: Node, cmd: u32, address: u64| emulator.ioctl(&caller, file, cmd, address);
    recording.play(&emulator, &mut perform).map_err(ReplayError::Setup)
}

/// The cards that the recording saw: their ids, instances and UUIDs are in its answers.
fn cards(lines: &[Line]) -> Vec<Gpu> {
    let mut gpus: Vec<Gpu> = Vec::new();
    let Some(h200) = model("h200") else { return gpus };
    let mut uuid = None;
    for call in lines.iter().filter_map(as_call) {
        let (Some(out), Some(link)) = (hex(&call.out), call.links.first()) else { continue };
        let Some(answer) = hex(&link.out) else { continue };
        match out.u32(8) {
            0x205 if call.node == "ctl" && gpus.iter().all(|gpu| gpu.id() != answer.u32(0)) => {
                let minor = u32::try_from(gpus.len()).unwrap_or(0);
                let mut gpu = Gpu::new(h200, minor, None, 1);
                gpu.bus = answer.u8(0);
                gpu.instance = answer.u32(8);
                gpus.push(gpu);
            }
            0x2080_014a if answer.u32(8) == 16 => uuid = answer.slice(12, 16).try_into().ok(),
            _ => {}
        }
    }
    if gpus.is_empty() {
        gpus.push(Gpu::new(h200, 0, None, 1));
    }
    if let (Some(uuid), Some(gpu)) = (uuid, gpus.first_mut()) {
        gpu.uuid = uuid;
    }
    let node = lines.iter().find_map(|line| match line {
        Line::Open { node, .. } => node.strip_prefix("gpu")?.parse().ok(),
        Line::Call(_) | Line::Close { .. } => None,
    });
    if let (Some(minor), Some(gpu)) = (node, gpus.first_mut()) {
        gpu.minor = minor;
    }
    gpus
}

fn as_call(line: &Line) -> Option<&Recorded> {
    match line {
        Line::Call(call) => Some(call),
        Line::Open { .. } | Line::Close { .. } => None,
    }
}

fn hex(text: &str) -> Option<Bytes> {
    let digits = text.as_bytes();
    let pairs = digits.chunks(2).map(|pair| {
        let text = std::str::from_utf8(pair).ok()?;
        u8::from_str_radix(text, 16).ok()
    });
    pairs.collect::<Option<Vec<u8>>>().map(Bytes)
}

struct Player<'a, 'b> {
    emulator: &'a Emulator,
    perform: &'a mut Perform<'b>,
    /// Open files by process and recorded number.
    files: BTreeMap<(u32, i32), OwnedFd>,
    /// Recorded client handle to the emulator's.
    clients: BTreeMap<u32, u32>,
    /// Memory that stays registered, and files handed out.
    kept: Vec<Vec<u8>>,
    mapped: Vec<OwnedFd>,
    summary: Summary,
}

impl Player<'_, '_> {
    fn line(&mut self, line: &Line) -> io::Result<()> {
        match line {
            Line::Open { open, pid, node } => {
                if let Some(node) = Node::named(node) {
                    let file = self.emulator.nodes().open(node)?;
                    self.files.insert((*pid, *open), OwnedFd::from(file));
                }
            }
            Line::Close { close, pid } => {
                self.files.remove(&(*pid, *close));
                self.emulator.tick(false);
            }
            Line::Call(call) => self.call(call)?,
        }
        Ok(())
    }

    fn call(&mut self, call: &Recorded) -> io::Result<()> {
        let bad = || io::Error::new(io::ErrorKind::InvalidData, format!("call {}", call.seq));
        let number = call.cmd.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let (cmd, node) = (number.ok_or_else(bad)?, Node::named(&call.node).ok_or_else(bad)?);
        let mut block = hex(&call.before).ok_or_else(bad)?;
        let recorded = hex(&call.out).ok_or_else(bad)?;
        let mut buffers = Vec::new();
        self.rebuild(&mut block, &call.links, &mut buffers).ok_or_else(bad)?;
        self.adapt(call, node, cmd, &mut block, &mut buffers);
        let Some(file) = self.files.get(&(call.pid, call.file)) else { return Ok(()) };
        let address = if block.is_empty() { 0 } else { pointer(&block.0) };
        let answer = (self.perform)(file, node, cmd, address);
        if let Some(install) = answer.install {
            self.mapped.push(install.file);
        }
        let status = status_at(node, cmd);
        if cmd & 0xff == escape::RM_ALLOC && recorded.u32(12) == 0x41 && recorded.u32(8) >= FIRST_CLIENT {
            self.clients.insert(recorded.u32(8), block.u32(8));
        }
        let emulated = (answer.value, answer.errno, status.map(|at| block.u32(at)));
        let expected = (call.ret, call.errno, status.map(|at| recorded.u32(at)));
        self.summary.calls = self.summary.calls.wrapping_add(1);
        if emulated == expected {
            self.summary.equal = self.summary.equal.wrapping_add(1);
        } else {
            let what = match (node, cmd & 0xff) {
                (Node::Control | Node::Gpu(_), escape::RM_CONTROL) => Some(recorded.u32(8)),
                (Node::Control | Node::Gpu(_), escape::RM_ALLOC | escape::RM_ALLOC_MEMORY) => {
                    Some(recorded.u32(12))
                }
                _ => None,
            };
            self.summary.different.push(Difference {
                seq: call.seq,
                cmd: call.cmd.clone(),
                what: what.map(|what| format!("{what:#x}")),
                recorded: expected,
                emulated,
            });
        }
        Ok(())
    }

    /// Puts each linked buffer into memory and its address into the pointer field.
    fn rebuild(&self, block: &mut Bytes, links: &[Link], buffers: &mut Vec<Bytes>) -> Option<()> {
        self.translate(block);
        for link in links {
            let mut inner = hex(&link.before)?;
            self.rebuild(&mut inner, &link.links, buffers)?;
            if inner.is_empty() {
                block.set_u64(link.at, 0);
            } else {
                block.set_u64(link.at, pointer(&inner.0));
                buffers.push(inner);
            }
        }
        Some(())
    }

    /// Replaces recorded client handles, wherever they stand.
    fn translate(&self, block: &mut Bytes) {
        for at in (0..block.len()).step_by(4) {
            if let Some(handle) = self.clients.get(&block.u32(at)) {
                block.set_u32(at, *handle);
            }
        }
    }

    /// Replaces file numbers and addresses of the recorded process by ones of this process.
    fn adapt(&mut self, call: &Recorded, node: Node, cmd: u32, block: &mut Bytes, buffers: &mut [Bytes]) {
        if matches!(node, Node::Uvm | Node::UvmTools) {
            match cmd {
                75 => self.file_at(call.pid, block, 0),
                25 | 27 => self.file_at(call.pid, block, 16),
                33 => self.file_at(call.pid, block, 9248),
                37 => self.file_at(call.pid, block, 24),
                42..=47 | 72 => self.managed(block.u64(0), block.u64(8)),
                _ => {}
            }
            return;
        }
        match (cmd & 0xff, block.u32(8)) {
            (escape::REGISTER_FD, _) => self.file_at(call.pid, block, 0),
            (escape::RM_MAP_MEMORY, _) => self.fresh_file(block, 48),
            (escape::RM_ALLOC_MEMORY, _) if block.u32(12) == 0x71 => self.pin(block),
            (escape::RM_CONTROL, control) => {
                let at = match control {
                    0x3d05 => 16,
                    0x3d06 | 0x3d08 | 0x3d0b | 0x3d0c => 0,
                    _ => return,
                };
                if let Some(parameters) = buffers.last_mut() {
                    self.file_at(call.pid, parameters, at);
                }
            }
            _ => {}
        }
    }

    fn file_at(&self, pid: u32, block: &mut Bytes, at: usize) {
        if let Some(file) = self.files.get(&(pid, block.i32(at))) {
            block.set(at, &file.as_raw_fd().to_le_bytes());
        }
    }

    /// A file that only carries a mapping sees no ioctl of its own, so its open isn't recorded.
    fn fresh_file(&mut self, block: &mut Bytes, at: usize) {
        let minor = self.emulator.look(|state, _| state.gpus.first().map_or(0, |gpu| gpu.minor));
        if let Ok(file) = self.emulator.nodes().open(Node::Gpu(minor)) {
            block.set(at, &file.as_raw_fd().to_le_bytes());
            self.mapped.push(OwnedFd::from(file));
        }
    }

    /// Memory of this process in the place of what the recorded one registered.
    fn pin(&mut self, block: &mut Bytes) {
        const PAGE: usize = 4096;
        let length = usize::try_from(block.u64(32)).unwrap_or(0).saturating_add(1 + 2 * PAGE);
        let memory = vec![0_u8; length];
        let inside = block.u64(24) & 4095;
        block.set_u64(24, pointer(&memory).next_multiple_of(4096).wrapping_add(inside));
        self.kept.push(memory);
    }

    /// The mmap that made a managed range is no ioctl, so it isn't recorded: it is made when it is first named.
    fn managed(&self, base: u64, length: u64) {
        let (Ok(start), Ok(length)) = (usize::try_from(base), usize::try_from(length)) else { return };
        let (Some(start), Some(length), Ok(offset)) =
            (std::num::NonZeroUsize::new(start), std::num::NonZeroUsize::new(length), i64::try_from(base))
        else {
            return;
        };
        let Ok(file) = self.emulator.nodes().open(Node::Uvm) else { return };
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let kind = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED_NOREPLACE;
        // SAFETY: mmap with FIXED_NOREPLACE replaces no mapping of this process; nothing ever refers to the new
        // range, which stays until the process ends.
        let made: nix::Result<NonNull<_>> = unsafe { mmap(Some(start), length, rights, kind, &file, offset) };
        if let Err(error) = made
            && error != nix::errno::Errno::EEXIST
        {
            eprintln!("gpuslice-emulator: mmap of {base:#x}: {error}");
        }
    }
}

fn pointer(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.as_ptr().expose_provenance()).unwrap_or(0)
}
