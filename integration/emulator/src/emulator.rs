//! The driver as a whole: one lock, one entry point for an ioctl, and what tests ask about it.
//!
//! Lock order: faults, then the driver's state. A call that a fault holds up holds neither. The state's lock is
//! held across copies from and to the caller, as the driver holds its own.
//! Failure: a poisoned lock is taken over; a caller that is gone fails its copies with EFAULT.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::call::{About, Call, Install};
use crate::caller::Caller;
use crate::faults::{self, Faults, Verdict};
use crate::files::Files;
use crate::journal::{Entry, Journal};
use crate::model::Gpu;
use crate::nodes::{Node, Nodes};
use crate::state::State;
use crate::{engine, escape, table, uvm};

/// What comes of an ioctl.
#[derive(Debug)]
pub struct Answer {
    /// Value or, where `errno` isn't 0, -1.
    pub value: i32,
    /// Errno, 0 for none.
    pub errno: i32,
    /// A file to put in the place of one of the caller's.
    pub install: Option<Install>,
}

/// What an emulated machine is made of.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where nodes and sockets are.
    pub root: PathBuf,
    /// The cards.
    pub gpus: Vec<Gpu>,
    /// Driver version.
    pub version: String,
}

/// The version that the emulator speaks unless told otherwise.
pub const DEFAULT_VERSION: &str = "580.159.04";

#[derive(Debug)]
struct Core {
    state: State,
    journal: Journal,
    swept: Instant,
}

/// The emulated driver.
#[derive(Debug)]
pub struct Emulator {
    root: PathBuf,
    nodes: Nodes,
    core: Mutex<Core>,
    /// Faults planted by tests.
    pub faults: Faults,
}

/// Shortest time between two looks for closed files.
const SWEEP: Duration = Duration::from_millis(2);

impl Emulator {
    /// A driver just loaded, with its nodes in place.
    ///
    /// # Errors
    /// The nodes can't be made.
    pub fn new(options: Options) -> io::Result<Self> {
        std::fs::create_dir_all(&options.root)?;
        let nodes = Nodes::create(&options.root, &options.gpus, &options.version)?;
        let mut names = vec![Node::Control, Node::Uvm, Node::UvmTools];
        names.extend(options.gpus.iter().map(|gpu| Node::Gpu(gpu.minor)));
        let files = Files::new(&nodes, &names)?;
        let state = State::new(&options.version, options.gpus, files);
        let core = Core { state, journal: Journal::default(), swept: Instant::now() };
        Ok(Emulator { root: options.root, nodes, core: Mutex::new(core), faults: Faults::default() })
    }

    /// Where nodes and sockets are.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The nodes.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Performs one ioctl of `caller` on `file`.
    pub fn ioctl(&self, caller: &Caller, file: &OwnedFd, cmd: u32, address: u64) -> Answer {
        let Some(node) = self.nodes.of(file) else { return Answer::failed(Errno::ENOTTY) };
        let verdict = self.faults.judge(caller, node, cmd, address);
        let start = Instant::now();
        let mut core = self.core();
        let core = &mut *core;
        if core.swept.elapsed() > SWEEP {
            core.state.sweep();
            core.swept = Instant::now();
        }
        let mut about = About::default();
        let result = match verdict {
            Verdict::Errno(errno) => Err(Errno::from_raw(errno)),
            Verdict::Status(status) => {
                about.status = Some(status);
                answer_status(caller, node, cmd, address, status)
            }
            Verdict::Perform => self.perform(core, caller, file, node, (cmd, address), &mut about),
        };
        let (value, errno, install) = match result {
            Ok((value, install)) => (value, 0, install),
            Err(errno) => (-1, errno_number(errno), None),
        };
        core.journal.add(Entry {
            seq: 0,
            pid: caller.pid,
            node: node.name(),
            cmd,
            what: about.what,
            name: about.what.and_then(|what| name_of(node, cmd, what)),
            client: about.client,
            object: about.object,
            status: about.status,
            errno,
            ns: u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
        });
        Answer { value, errno, install }
    }

    fn perform(
        &self,
        core: &mut Core,
        caller: &Caller,
        file: &OwnedFd,
        node: Node,
        (cmd, address): (u32, u64),
        about: &mut About,
    ) -> Result<(i32, Option<Install>), Errno> {
        let id = core.state.files.identify(file, node)?;
        let mut call = Call {
            caller,
            state: &mut core.state,
            nodes: &self.nodes,
            file: id,
            node,
            about: About::default(),
            install: None,
        };
        let result = match node {
            Node::Control | Node::Gpu(_) => escape::perform(&mut call, cmd, address),
            Node::Uvm | Node::UvmTools => uvm::perform(&mut call, cmd, address),
        };
        *about = call.about;
        let install = call.install.take();
        result.map(|value| (value, install))
    }

    /// Looks for closed files, dead ranges and work; called every few milliseconds.
    pub fn tick(&self, slow: bool) {
        let mut core = self.core();
        core.state.sweep();
        core.swept = Instant::now();
        engine::step(&mut core.state);
        if slow {
            uvm::drop_zombies(&mut core.state, &self.nodes);
        }
    }

    /// Looks at the state and the journal.
    pub fn look<R>(&self, look: impl FnOnce(&mut State, &Journal) -> R) -> R {
        let mut core = self.core();
        let core = &mut *core;
        core.state.sweep();
        look(&mut core.state, &core.journal)
    }
}

/// The driver's name for a class, control or UVM command.
fn name_of(node: Node, cmd: u32, what: u32) -> Option<&'static str> {
    if matches!(node, Node::Uvm | Node::UvmTools) {
        return table::uvm_command(what).map(|row| row.name);
    }
    match cmd & 0xff {
        table::escape::RM_CONTROL => table::control(what).map(|row| row.name),
        table::escape::RM_ALLOC | table::escape::RM_ALLOC_MEMORY => table::class(what).map(|row| row.name),
        _ => None,
    }
}

impl Answer {
    fn failed(errno: Errno) -> Self {
        Answer { value: -1, errno: errno_number(errno), install: None }
    }
}

#[allow(clippy::as_conversions, reason = "nix gives an errno's number by cast alone")]
fn errno_number(errno: Errno) -> i32 {
    errno as i32
}

fn answer_status(
    caller: &Caller,
    node: Node,
    cmd: u32,
    address: u64,
    status: u32,
) -> Result<(i32, Option<Install>), Errno> {
    let at = faults::status_at(node, cmd).ok_or(Errno::EINVAL)?;
    let at = u64::try_from(at).map_err(|_| Errno::EINVAL)?;
    caller.write(address.wrapping_add(at), &status.to_le_bytes()).map_err(|_| Errno::EFAULT)?;
    Ok((0, None))
}
