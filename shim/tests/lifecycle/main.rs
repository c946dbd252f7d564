//! The shim's own binary under a client of ours, with the machine's runc: what no `ctr` command shows, such as
//! new limits, several waiters, a daemon that is away, the order of events.
//!
//! Needs root, runc and a static busybox.

#[cfg(test)]
mod cases;
#[cfg(test)]
mod daemon;
