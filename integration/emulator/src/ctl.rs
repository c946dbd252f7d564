//! What tests ask of the driver: state, journal, faults, a lost card, another version.
//!
//! Requests are `{"do": NAME, ...}`; answers carry `"ok"` and, where it is false, `"error"`.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::caller::Caller;
use crate::emulator::Emulator;
use crate::faults::Fault;
use crate::memory::Place;
use crate::state::{Detail, State};

/// One request.
#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
enum Ask {
    /// Cards, processes, clients, open files, mappings, violations.
    Usage,
    /// Calls after number `after`.
    Journal {
        #[serde(default)]
        after: u64,
        #[serde(default = "many")]
        most: usize,
    },
    /// Plants a fault.
    Fault(Fault),
    /// Releases a fault, or all.
    Release {
        #[serde(default)]
        id: Option<u64>,
    },
    /// Another driver version from now on.
    Driver { version: String },
    /// A card falls off the bus, or is back.
    GpuLost {
        minor: u32,
        #[serde(default = "yes")]
        lost: bool,
    },
    /// Channels with their state.
    Channels,
    /// Pinned ranges with what stands in them now.
    Pinned,
}

fn many() -> usize {
    10_000
}

fn yes() -> bool {
    true
}

/// The answer to one line.
pub(crate) fn answer(emulator: &Emulator, line: &str) -> Value {
    match serde_json::from_str(line) {
        Ok(ask) => perform(emulator, ask).unwrap_or_else(|error| json!({"ok": false, "error": error})),
        Err(error) => json!({"ok": false, "error": format!("not a request: {error}")}),
    }
}

/// The answer to one line, as text: what a test in the emulator's own process asks.
pub fn ask(emulator: &Emulator, line: &str) -> String {
    answer(emulator, line).to_string()
}

fn perform(emulator: &Emulator, ask: Ask) -> Result<Value, String> {
    match ask {
        Ask::Usage => {
            let hanging = emulator.faults.hanging();
            Ok(emulator.look(|state, journal| usage(state, journal.last(), hanging)))
        }
        Ask::Journal { after, most } => Ok(emulator.look(
            |_, journal| json!({"ok": true, "last": journal.last(), "calls": journal.after(after, most)}),
        )),
        Ask::Fault(fault) => Ok(json!({"ok": true, "id": emulator.faults.plant(fault)})),
        Ask::Release { id } => {
            emulator.faults.release(id);
            Ok(json!({"ok": true}))
        }
        Ask::Driver { version } => {
            let gpus = emulator.look(|state, _| {
                state.version.clone_from(&version);
                state.gpus.clone()
            });
            emulator.nodes().write_proc(&gpus, &version).map_err(|error| error.to_string())?;
            Ok(json!({"ok": true}))
        }
        Ask::GpuLost { minor, lost } => emulator.look(|state, _| {
            let gpu = state.gpus.iter_mut().find(|gpu| gpu.minor == minor);
            gpu.ok_or_else(|| format!("no card with minor number {minor}"))?.lost = lost;
            Ok(json!({"ok": true}))
        }),
        Ask::Channels => Ok(emulator.look(|state, _| channels(state))),
        Ask::Pinned => Ok(emulator.look(|state, _| pinned(state))),
    }
}

fn usage(state: &mut State, last: u64, hanging: u32) -> Value {
    let gpus: Vec<Value> = state.gpus.iter().enumerate().map(|(index, gpu)| {
        let by_pid: Vec<Value> = state.store.by_owner(index).iter()
            .map(|(pid, bytes)| json!({"pid": pid, "bytes": bytes})).collect();
        json!({
            "minor": gpu.minor, "uuid": gpu.uuid_text(), "name": gpu.model.name, "pci": gpu.pci_text(),
            "total": gpu.memory, "heap": state.store.size(index), "used": state.store.used(index), "by_pid": by_pid, "lost": gpu.lost,
        })
    }).collect();
    let clients: Vec<Value> = state
        .clients
        .iter()
        .map(|(handle, client)| {
            json!({"handle": handle, "pid": client.pid, "uid": client.uid, "file": client.file.0,
               "objects": client.objects.len()})
        })
        .collect();
    let files: Vec<Value> = state
        .files
        .all()
        .map(|(id, file)| {
            json!({"id": id.0, "node": file.node.name(), "control": file.control.map(|one| one.0),
               "exports": file.exports.len()})
        })
        .collect();
    let mappings: Vec<Value> = state
        .mappings
        .iter()
        .map(|(number, mapping)| {
            let on_card =
                state.store.find(mapping.memory).is_some_and(|one| matches!(one.place, Place::Card(_)));
            json!({"number": number, "bytes": mapping.length, "card": on_card})
        })
        .collect();
    json!({
        "ok": true, "driver": state.version, "gpus": gpus, "clients": clients, "files": files,
        "mappings": mappings, "uvm_spaces": state.spaces.len(), "os_events": state.os_events.len(),
        "allocations": state.store.count(), "violations": state.violations, "calls": last, "hanging": hanging,
    })
}

fn pinned(state: &State) -> Value {
    let ranges: Vec<Value> = state
        .store
        .pinned()
        .map(|(pid, address, size)| {
            let head = Caller::new(pid).ok().and_then(|owner| owner.read(address, 16).ok());
            let head = head.map(|bytes| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
            json!({"pid": pid, "address": address, "bytes": size, "head": head})
        })
        .collect();
    json!({"ok": true, "pinned": ranges})
}

fn channels(state: &State) -> Value {
    let mut found = Vec::new();
    for (client, owner) in &state.clients {
        for (handle, object) in &owner.objects {
            match &object.detail {
                Detail::Channel(channel) => found.push(json!({
                    "client": client, "handle": handle, "pid": owner.pid, "group": object.parent, "id": channel.id,
                    "engine": channel.engine, "scheduled": channel.scheduled, "disabled": channel.disabled,
                    "privileged": channel.privileged, "consumed": channel.consumed,
                })),
                Detail::Group(group) => found.push(json!({
                    "client": client, "handle": handle, "pid": owner.pid, "engine": group.engine,
                    "timeslice": group.timeslice, "interleave": group.interleave, "scheduled": group.scheduled,
                })),
                Detail::Plain | Detail::Memory(_) => {}
            }
        }
    }
    json!({"ok": true, "channels": found})
}
