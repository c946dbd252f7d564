//! The simulated engine: consumes GP_PUT of every scheduled channel and advances GP_GET.
//!
//! It reads and writes the USERD words in the contents that CPU mappings show, so it works for channels whose
//! USERD the tenant has mapped. A channel that is disabled, or whose group isn't scheduled, stands still.

use std::os::unix::fs::FileExt;

use crate::state::{Detail, State};

/// GP_GET within USERD (Turing to Hopper).
const GET: u64 = 0x88;
/// GP_PUT within USERD.
const PUT: u64 = 0x8c;

/// One step of every channel.
pub(crate) fn step(state: &mut State) {
    let State { clients, store, .. } = state;
    for client in clients.values_mut() {
        let scheduled: Vec<u32> = client
            .objects
            .iter()
            .filter(|(_, object)| matches!(&object.detail, Detail::Group(group) if group.scheduled))
            .map(|(handle, _)| *handle)
            .collect();
        for object in client.objects.values_mut() {
            let runs = scheduled.contains(&object.parent);
            let Detail::Channel(channel) = &mut object.detail else { continue };
            let Some((memory, offset)) = channel.userd else { continue };
            if channel.disabled || !(runs || channel.scheduled) {
                continue;
            }
            let Some(contents) = store.existing_contents(memory) else { continue };
            let mut word = [0; 4];
            if contents.read_exact_at(&mut word, offset.saturating_add(PUT)).is_err() {
                continue;
            }
            let put = u32::from_le_bytes(word);
            if put != channel.consumed && contents.write_all_at(&word, offset.saturating_add(GET)).is_ok() {
                channel.consumed = put;
            }
        }
    }
}
