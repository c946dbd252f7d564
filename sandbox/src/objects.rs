//! The container's objects as the driver has them, and what memory each keeps allocated.
//!
//! Owns: clients, objects, their parents and dependants, and the references that hold each charge. Trusts: the
//! driver's answers only; an object is entered when the driver made it and removed when the driver freed it.
//! Promises: a charge lives as long as anything that keeps its memory allocated. Two calls that could confuse
//! the order (freeing what another call is using) wait for each other: a call that changes the graph pins what
//! it names until its answer is entered, and a free waits for pins and holds back new ones. One lock, never
//! held across a driver call or an access to tenant memory. What falls out of the graph is returned to the
//! caller and dropped outside the lock.

mod graph;
mod new;

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use graph::Pinned;
pub(crate) use graph::{Freed, Graph, Id, Kind, MemoryId};
pub(crate) use new::New;

/// A handle in a client: what the driver's tables are keyed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Name {
    /// The client.
    pub(crate) client: u32,
    /// The handle in it; a client names itself.
    pub(crate) handle: u32,
}

/// The graph, shared by all workers.
#[derive(Default)]
pub(crate) struct Objects {
    graph: Mutex<Graph>,
    changed: Condvar,
}

impl Objects {
    /// The graph, for one short step.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Graph> {
        self.graph.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `name` is an object of this container.
    pub(crate) fn has(&self, name: Name) -> bool {
        self.lock().find(name).is_some()
    }

    /// Keeps the named objects from being freed until the pins are dropped. Waits for frees in flight.
    /// Answers the first name that isn't there otherwise.
    pub(crate) fn pin(&self, names: &[Name]) -> Result<Pins<'_>, Name> {
        let mut graph = self.lock();
        loop {
            match graph.try_pin(names)? {
                Some(pinned) => return Ok(Pins { objects: self, pinned }),
                None => graph = self.changed.wait(graph).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Holds back calls that change a client until it is known whether it lives: nothing can be entered under a
    /// dead one, nor a new one of the same number be taken for it. `None`: there is none, or it is being freed.
    pub(crate) fn ask(&self, client: u32) -> Option<Asking<'_>> {
        let mut graph = self.lock();
        let id = graph.find(Name { client, handle: client })?;
        if graph.is_freeing(id) {
            return None;
        }
        graph.set_freeing(id, true);
        // Every pin counts at its client too.
        while graph.is_pinned(id) {
            graph = self.changed.wait(graph).unwrap_or_else(PoisonError::into_inner);
        }
        Some(Asking { objects: self, client: id })
    }

    /// Begins to free `name`, with all that goes with it: waits until nobody uses any of it, and keeps others
    /// from it until the answer is dropped or [finished](Freeing::finish).
    pub(crate) fn begin_free(&self, name: Name) -> Option<Freeing<'_>> {
        let mut graph = self.lock();
        let mut marked = None;
        loop {
            let root = graph.find(name)?;
            if marked == Some(root) || !graph.is_freeing(root) {
                // Marked first, so that no new pins come while we wait for the old ones to go.
                if graph.mark(root) {
                    return Some(Freeing { objects: self, root });
                }
                marked = graph.is_freeing(root).then_some(root);
            }
            graph = self.changed.wait(graph).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A client that is asked about.
pub(crate) struct Asking<'a> {
    objects: &'a Objects,
    client: Id,
}

impl Asking<'_> {
    /// It is gone, with all its objects.
    pub(crate) fn gone(self) -> Freed {
        self.objects.lock().remove(self.client)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.objects.lock().set_freeing(self.client, false);
        self.objects.changed.notify_all();
    }
}

/// Objects in use by a call.
pub(crate) struct Pins<'a> {
    objects: &'a Objects,
    pinned: Pinned,
}

impl Pins<'_> {
    /// The pinned objects, in the order asked for.
    pub(crate) fn ids(&self) -> &[Id] {
        &self.pinned.ids
    }
}

impl Drop for Pins<'_> {
    fn drop(&mut self) {
        self.objects.lock().unpin(&self.pinned);
        self.objects.changed.notify_all();
    }
}

/// A free in flight.
pub(crate) struct Freeing<'a> {
    objects: &'a Objects,
    root: Id,
}

impl Freeing<'_> {
    /// The driver freed it.
    pub(crate) fn finish(self) -> Freed {
        self.objects.lock().remove(self.root)
        // Dropping `self` clears marks of what is left (nothing) and wakes the waiters.
    }
}

impl Drop for Freeing<'_> {
    fn drop(&mut self) {
        self.objects.lock().unmark(self.root);
        self.objects.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
