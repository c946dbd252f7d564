//! Memory in more than one place: a second process, a second client, a child that inherited the files.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork, pipe, read, write};
use serde_json::json;

use crate::bytes::Block;
use crate::driver::{self, Trouble, frontend, step};
use crate::memory::size;
use crate::report::{self, Outcome};
use crate::rm::Client;

fn machine(error: nix::errno::Errno) -> Trouble {
    Trouble::Machine(error.to_string())
}

/// Runs `child` in a forked process and returns its exit status, or 128 and the signal that ended it.
///
/// Only for a process with one thread.
pub(crate) fn in_child(child: impl FnOnce() -> i32) -> Result<i32, Trouble> {
    // SAFETY: fork in a process with one thread: the child has every lock free and may run any code.
    match unsafe { fork() }.map_err(machine)? {
        ForkResult::Child => {
            let status = child();
            // SAFETY: _exit takes an integer and does not return; the child must not run the parent's exit code.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => match waitpid(child, None).map_err(machine)? {
            WaitStatus::Exited(_, status) => Ok(status),
            WaitStatus::Signaled(_, signal, _) => Ok(signalled(signal)),
            other => Err(Trouble::Machine(format!("child: {other:?}"))),
        },
    }
}

#[allow(clippy::as_conversions, reason = "nix gives a signal's number by cast alone")]
fn signalled(signal: nix::sys::signal::Signal) -> i32 {
    128 + signal as i32
}

fn export(client: &Client, memory: u32, file: &OwnedFd) -> Result<(), Trouble> {
    let mut parameters = Block::words(&[1, client.device, client.device, memory, 0, 0]);
    parameters.set(16, &file.as_raw_fd().to_le_bytes());
    client.control_with(client.handle, 0x3d05, &mut parameters)
}

fn import(client: &mut Client, file: &OwnedFd) -> Result<u32, Trouble> {
    let wanted = client.fresh();
    let mut parameters = Block::words(&[0, 1, client.device, client.device, wanted]);
    parameters.set(0, &file.as_raw_fd().to_le_bytes());
    client.control_with(client.handle, 0x3d06, &mut parameters)?;
    Ok(parameters.u32(16))
}

/// `ipc`: the importer holds the memory when the exporter has freed it.
pub(crate) fn ipc(text: &str) -> Result<Outcome, Trouble> {
    let wanted = size(text)?;
    let mut client = Client::new()?;
    let (memory, got) = client.card_memory(wanted)?;
    let file = driver::open("nvidiactl")?;
    export(&client, memory, &file)?;
    let (ready_read, ready_write) = pipe().map_err(machine)?;
    let (go_read, go_write) = pipe().map_err(machine)?;
    let status = {
        // SAFETY: fork in a process with one thread: the child has every lock free and may run any code.
        match unsafe { fork() }.map_err(machine)? {
            ForkResult::Child => {
                let result = importer(&file, &ready_write, &go_read);
                if let Err(error) = &result {
                    report::failure(error);
                }
                // SAFETY: _exit takes an integer and does not return.
                unsafe { libc::_exit(i32::from(result.is_err())) }
            }
            ForkResult::Parent { child } => {
                drop(ready_write);
                let mut byte = [0];
                let told = read(&ready_read, &mut byte).map_err(machine)?;
                client.free(memory)?;
                drop(file);
                let (_, _, held) = client.memory_sizes()?;
                report::line(&json!({
                    "ok": told == 1, "exporter": true, "bytes": got, "free_while_imported": held,
                }));
                write(&go_write, &[1]).map_err(machine)?;
                waitpid(child, None).map_err(machine)?
            }
        }
    };
    std::thread::sleep(std::time::Duration::from_millis(100));
    let (_, _, free) = client.memory_sizes()?;
    let fine = matches!(status, WaitStatus::Exited(_, 0));
    report::line(&json!({"ok": fine, "free_after": free}));
    Ok(if fine { Outcome::Done } else { Outcome::Refused })
}

fn importer(file: &OwnedFd, ready: &OwnedFd, go: &OwnedFd) -> Result<(), Trouble> {
    let mut client = Client::new()?;
    let handle = import(&mut client, file)?;
    report::line(&json!({"ok": true, "importer": true, "handle": handle}));
    write(ready, &[1]).map_err(machine)?;
    let mut byte = [0];
    read(go, &mut byte).map_err(machine).map(drop)
}

/// `dup`: the memory lives as long as the last of two handles.
pub(crate) fn dup(text: &str) -> Result<Outcome, Trouble> {
    let mut first = Client::new()?;
    let mut second = first.sibling()?;
    let (_, _, before) = first.memory_sizes()?;
    let (memory, got) = first.card_memory(size(text)?)?;
    let wanted = second.fresh();
    let mut block = Block::words(&[second.handle, second.device, wanted, first.handle, memory, 0, 0]);
    step("duplicate", &second.control, frontend(0x34, 28), &mut block, 24)?;
    let (_, _, both) = first.memory_sizes()?;
    first.free(memory)?;
    let (_, _, one) = first.memory_sizes()?;
    second.free(block.u32(8))?;
    let (_, _, none) = first.memory_sizes()?;
    report::line(&json!({
        "ok": true, "bytes": got, "free_before": before, "free_both": both, "free_one": one, "free_none": none,
    }));
    Ok(Outcome::Done)
}

/// `fork-alloc`: a child uses the client it inherited, then makes one of its own.
pub(crate) fn fork_alloc(text: &str) -> Result<Outcome, Trouble> {
    let wanted = size(text)?;
    let mut client = Client::new()?;
    let (_, _, before) = client.memory_sizes()?;
    let status = in_child(|| {
        let inherited = client.card_memory(wanted);
        // The driver maps for the process that made the client alone: 0x23, unless one process makes all calls.
        let mapped = inherited.as_ref().ok().map(|(memory, got)| client.map(client.subdevice, *memory, *got));
        let mapped = mapped.map(|result| result.err().and_then(|error| error.status()).unwrap_or(0));
        let own = Client::new().and_then(|mut own| own.card_memory(wanted));
        report::line(&json!({
            "ok": inherited.is_ok() && own.is_ok(), "child": true,
            "inherited": inherited.as_ref().err().map(ToString::to_string),
            "own": own.as_ref().err().map(ToString::to_string), "map_status": mapped,
        }));
        i32::from(inherited.is_err() || own.is_err())
    })?;
    std::thread::sleep(std::time::Duration::from_millis(100));
    let (_, _, after) = client.memory_sizes()?;
    report::line(
        &json!({"ok": status == 0, "free_before": before, "free_after_child": after, "bytes": wanted}),
    );
    Ok(if status == 0 { Outcome::Done } else { Outcome::Refused })
}
