//! Faults on demand: a matching call gets another status, an errno, a delay, or hangs until released.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;
use crate::caller::Caller;
use crate::nodes::Node;
use crate::table::escape;

/// Which calls a fault hits. A field left out matches everything.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Match {
    /// Node name: `ctl`, `gpuN`, `uvm`.
    #[serde(default)]
    pub node: Option<String>,
    /// Escape number (low byte), or the whole UVM command.
    #[serde(default)]
    pub nr: Option<u32>,
    /// Class or control.
    #[serde(default)]
    pub what: Option<u32>,
    /// Calling process.
    #[serde(default)]
    pub pid: Option<u32>,
}

/// What happens to it. Several may be given.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Effect {
    /// The call is not performed and fails with this errno.
    #[serde(default)]
    pub errno: Option<i32>,
    /// The call is not performed; this status is written where the command has one.
    #[serde(default)]
    pub status: Option<u32>,
    /// Milliseconds of delay before it.
    #[serde(default)]
    pub delay_ms: Option<u64>,
    /// It waits until the fault is released.
    #[serde(default)]
    pub hang: bool,
}

/// A fault as planted.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Which calls.
    #[serde(rename = "match", default)]
    pub matches: Match,
    /// What happens.
    pub effect: Effect,
    /// How many calls, 0 for all.
    #[serde(default)]
    pub times: u32,
}

/// What a call must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Perform,
    /// Fail with this errno.
    Errno(i32),
    /// Answer this status.
    Status(u32),
}

#[derive(Debug)]
struct Planted {
    id: u64,
    fault: Fault,
    hits: u32,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    planted: Vec<Planted>,
    hanging: u32,
}

/// All faults planted now.
#[derive(Debug, Default)]
pub struct Faults {
    table: Mutex<Table>,
    changed: Condvar,
}

impl Faults {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Plants a fault; its number releases it.
    pub fn plant(&self, fault: Fault) -> u64 {
        let mut table = self.table();
        table.next = table.next.wrapping_add(1);
        let id = table.next;
        table.planted.push(Planted { id, fault, hits: 0 });
        id
    }

    /// Takes away one fault, or all for `None`; calls that hang on it go on.
    pub fn release(&self, id: Option<u64>) {
        self.table().planted.retain(|one| id.is_some_and(|id| id != one.id));
        self.changed.notify_all();
    }

    /// How many calls hang now.
    pub fn hanging(&self) -> u32 {
        self.table().hanging
    }

    /// What becomes of this call; may block.
    pub fn judge(&self, caller: &Caller, node: Node, cmd: u32, address: u64) -> Verdict {
        let mut table = self.table();
        if table.planted.is_empty() {
            return Verdict::Perform;
        }
        let what = peek(caller, node, cmd, address);
        let found = table.planted.iter_mut().find(|one| {
            let unused = one.fault.times == 0 || one.hits < one.fault.times;
            unused && hits(&one.fault.matches, caller.pid, node, cmd, what)
        });
        let Some(found) = found else { return Verdict::Perform };
        found.hits = found.hits.saturating_add(1);
        let (id, effect) = (found.id, found.fault.effect.clone());
        if effect.hang {
            table.hanging = table.hanging.saturating_add(1);
            while table.planted.iter().any(|one| one.id == id) {
                table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
            }
            table.hanging = table.hanging.saturating_sub(1);
        }
        drop(table);
        if let Some(delay) = effect.delay_ms {
            std::thread::sleep(Duration::from_millis(delay));
        }
        match (effect.errno, effect.status) {
            (Some(errno), _) => Verdict::Errno(errno),
            (None, Some(status)) => Verdict::Status(status),
            (None, None) => Verdict::Perform,
        }
    }
}

fn hits(matches: &Match, pid: u32, node: Node, cmd: u32, what: Option<u32>) -> bool {
    let nr = if matches!(node, Node::Control | Node::Gpu(_)) { cmd & 0xff } else { cmd };
    matches.node.as_ref().is_none_or(|name| *name == node.name())
        && matches.nr.is_none_or(|wanted| wanted == nr)
        && matches.what.is_none_or(|wanted| what == Some(wanted))
        && matches.pid.is_none_or(|wanted| wanted == pid)
}

/// Class or control of a call before it is performed.
fn peek(caller: &Caller, node: Node, cmd: u32, address: u64) -> Option<u32> {
    if !matches!(node, Node::Control | Node::Gpu(_)) {
        return Some(cmd);
    }
    let at = match cmd & 0xff {
        escape::RM_CONTROL | escape::RM_VID_HEAP_CONTROL => 8,
        escape::RM_ALLOC | escape::RM_ALLOC_MEMORY => 12,
        _ => return None,
    };
    caller.read(address, 16).ok().map(|head| Bytes(head).u32(at))
}

/// Where a command has its status.
pub(crate) fn status_at(node: Node, cmd: u32) -> Option<usize> {
    if !matches!(node, Node::Control | Node::Gpu(_)) {
        return crate::table::uvm_command(cmd)?.status;
    }
    let size = (cmd >> 16) & 0x3fff;
    Some(match cmd & 0xff {
        escape::RM_CONTROL => 28,
        escape::RM_ALLOC if size == 48 => 40,
        escape::RM_ALLOC => 28,
        escape::RM_FREE => 12,
        escape::RM_ALLOC_MEMORY | escape::RM_MAP_MEMORY => 40,
        escape::RM_UNMAP_MEMORY | escape::RM_DUP_OBJECT => 24,
        escape::RM_VID_HEAP_CONTROL => 20,
        escape::ALLOC_OS_EVENT | escape::FREE_OS_EVENT => 12,
        _ => return None,
    })
}
