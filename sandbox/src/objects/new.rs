//! An object that the driver has just made, before it is entered into the graph.

use std::sync::Arc;

use gpuslice_sys::SharedMapping;

use super::{Id, Kind, Name};
use crate::ledger::Charge;

/// A new object.
#[derive(Debug)]
pub(crate) struct New {
    /// Its client and handle.
    pub(crate) name: Name,
    /// Its parent's handle; unused for a client.
    pub(crate) parent: u32,
    /// Its class.
    pub(crate) class: u32,
    /// Its kind.
    pub(crate) kind: Kind,
    /// The granted GPU that it begins (a device's).
    pub(crate) gpu: Option<usize>,
    /// Its own memory.
    pub(crate) charge: Option<Charge>,
    /// Memory of other objects that it keeps.
    pub(crate) holds: Vec<Id>,
    /// Objects that take it along.
    pub(crate) depends: Vec<Id>,
    /// Shared pages that the driver has pinned for its memory; kept as long as the charge.
    pub(crate) mapping: Option<Arc<SharedMapping>>,
}

impl New {
    /// One that begins no GPU, has no memory of its own, keeps nobody's and depends on its parent alone.
    pub(crate) fn plain(name: Name, parent: u32, class: u32) -> New {
        let (gpu, charge, mapping) = (None, None, None);
        New {
            name,
            parent,
            class,
            kind: Kind::Other,
            gpu,
            charge,
            holds: Vec::new(),
            depends: Vec::new(),
            mapping,
        }
    }
}
