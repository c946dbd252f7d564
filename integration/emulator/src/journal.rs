//! What reached the driver: one entry a call, kept for tests that prove what never reached it.

use std::collections::VecDeque;

use serde::Serialize;

/// One call.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// Its number, from 1.
    pub seq: u64,
    /// The calling process.
    pub pid: u32,
    /// The node: `ctl`, `gpuN`, `uvm`, `uvm-tools`.
    pub node: String,
    /// The whole command number.
    pub cmd: u32,
    /// Class, control or function, where the command has one.
    pub what: Option<u32>,
    /// The driver's name for that.
    pub name: Option<&'static str>,
    /// Client named.
    pub client: u32,
    /// Object named or made.
    pub object: u32,
    /// The driver's status, where the command has one.
    pub status: Option<u32>,
    /// Errno, 0 for none.
    pub errno: i32,
    /// Nanoseconds inside the driver.
    pub ns: u64,
}

/// The last calls.
#[derive(Debug, Default)]
pub struct Journal {
    entries: VecDeque<Entry>,
    last: u64,
}

const KEPT: usize = 200_000;

impl Journal {
    /// Adds an entry and numbers it.
    pub fn add(&mut self, mut entry: Entry) {
        self.last = self.last.wrapping_add(1);
        entry.seq = self.last;
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    /// Number of the last entry.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Entries after number `after`, at most `most`.
    pub fn after(&self, after: u64, most: usize) -> Vec<Entry> {
        self.entries.iter().filter(|entry| entry.seq > after).take(most).cloned().collect()
    }
}
