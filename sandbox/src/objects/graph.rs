//! The graph itself: plain data, no waiting.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use gpuslice_sys::SharedMapping;

use super::{Name, New};
use crate::ledger::Charge;

/// An object, for as long as it lives; never used again afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id(u64);

/// Memory that is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct MemoryId(u64);

/// What bounds apply to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A client.
    Client,
    /// A GPU address space.
    AddressSpace,
    /// A channel group.
    ChannelGroup,
    /// A channel.
    Channel,
    /// Anything else.
    Other,
}

/// Most clients, address spaces, channel groups and channels of a container: each takes memory of the card that no
/// allocation shows. And most objects of any kind, for the host's sake.
const MOST: [(Kind, usize); 5] = [
    (Kind::Client, 1024),
    (Kind::AddressSpace, 1024),
    (Kind::ChannelGroup, 1024),
    (Kind::Channel, 4096),
    (Kind::Other, 1 << 18),
];

/// Too many objects of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit;

/// What fell out of the graph; dropping it returns charges and unmaps memory.
#[derive(Debug, Default)]
pub(crate) struct Freed {
    charges: Vec<Charge>,
    mappings: Vec<Arc<SharedMapping>>,
}

impl Freed {
    #[cfg(test)]
    pub(crate) fn charges(&self) -> usize {
        self.charges.len()
    }
    fn append(&mut self, mut other: Freed) {
        self.charges.append(&mut other.charges);
        self.mappings.append(&mut other.mappings);
    }
}

/// What a call pinned: objects, and the client of each.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    pub(super) ids: Vec<Id>,
    clients: Vec<Id>,
}

#[derive(Debug)]
struct Node {
    name: Name,
    class: u32,
    kind: Kind,
    gpu: Option<usize>,
    parent: Option<Id>,
    children: BTreeSet<Id>,
    depends: Vec<Id>,
    dependants: BTreeSet<Id>,
    memory: Option<MemoryId>,
    holds: Vec<MemoryId>,
    registered: Vec<(u32, MemoryId)>,
    timeslice: u64,
    pins: u32,
    /// What is being freed or asked about and takes it along: itself, or something above.
    freeing: Option<Id>,
}

#[derive(Debug)]
struct Memory {
    charge: Charge,
    references: u32,
    class: u32,
    mapping: Option<Arc<SharedMapping>>,
}

/// The graph.
#[derive(Default)]
pub(crate) struct Graph {
    nodes: HashMap<Id, Node>,
    names: HashMap<Name, Id>,
    memory: HashMap<MemoryId, Memory>,
    next: u64,
    counts: [usize; 5],
}

fn slot(kind: Kind) -> usize {
    MOST.iter().position(|(known, _)| *known == kind).unwrap_or(MOST.len() - 1)
}

impl Graph {
    /// The object of this name.
    pub(crate) fn find(&self, name: Name) -> Option<Id> {
        self.names.get(&name).copied()
    }

    /// Its class.
    pub(crate) fn class(&self, id: Id) -> Option<u32> {
        self.nodes.get(&id).map(|node| node.class)
    }

    /// Its name.
    pub(crate) fn name(&self, id: Id) -> Option<Name> {
        self.nodes.get(&id).map(|node| node.name)
    }

    /// Its parent's name.
    pub(crate) fn parent(&self, id: Id) -> Option<Name> {
        self.nodes.get(&id).and_then(|node| node.parent).and_then(|parent| self.name(parent))
    }

    /// The granted GPU that it stands under.
    pub(crate) fn gpu(&self, id: Id) -> Option<usize> {
        self.nodes.get(&id).and_then(|node| node.gpu)
    }

    /// The charged memory that it refers to.
    pub(crate) fn memory(&self, id: Id) -> Option<MemoryId> {
        self.nodes.get(&id).and_then(|node| node.memory)
    }

    /// All clients.
    pub(crate) fn clients(&self) -> Vec<u32> {
        let clients = self.nodes.values().filter(|node| node.kind == Kind::Client);
        clients.map(|node| node.name.client).collect()
    }

    /// Whether another object of this kind is allowed.
    pub(crate) fn room(&self, kind: Kind) -> Result<(), Limit> {
        let slot = slot(kind);
        let most = MOST.get(slot).map_or(0, |(_, most)| *most);
        let all: usize = self.counts.iter().sum();
        let all_most = MOST.last().map_or(0, |(_, most)| *most);
        if self.counts.get(slot).is_some_and(|count| *count < most) && all < all_most {
            Ok(())
        } else {
            Err(Limit)
        }
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Enters an object that the driver made. What had the handle before is proven gone: it is removed, and
    /// objects under it that this doesn't prove gone are kept under the client.
    pub(crate) fn insert(&mut self, new: New) -> (Id, Freed) {
        let New { name, parent, class, kind, gpu, charge, holds, depends, mapping } = new;
        let freed = self.names.get(&name).copied().map(|old| self.replace(old)).unwrap_or_default();
        let parent = (kind != Kind::Client).then(|| self.parent_of(name.client, parent));
        let id = Id(self.id());
        let gpu = gpu.or_else(|| parent.and_then(|parent| self.gpu(parent)));
        let memory = charge.map(|charge| self.add_memory(charge, class, mapping));
        let holds: Vec<MemoryId> = holds.iter().filter_map(|id| self.memory(*id)).collect();
        for held in &holds {
            self.keep(*held);
        }
        if let Some(node) = parent.and_then(|parent| self.nodes.get_mut(&parent)) {
            node.children.insert(id);
        }
        for other in &depends {
            if let Some(node) = self.nodes.get_mut(other) {
                node.dependants.insert(id);
            }
        }
        self.count(kind, true);
        self.names.insert(name, id);
        self.nodes.insert(
            id,
            Node {
                name,
                class,
                kind,
                gpu,
                parent,
                children: BTreeSet::new(),
                depends,
                dependants: BTreeSet::new(),
                memory,
                holds,
                registered: Vec::new(),
                timeslice: 0,
                pins: 0,
                freeing: None,
            },
        );
        (id, freed)
    }

    /// The node that a new object hangs under: its parent, else its client. A client that isn't known (it was
    /// freed while the call ran) is entered, so that a sweep finds out.
    fn parent_of(&mut self, client: u32, parent: u32) -> Id {
        let root = Name { client, handle: client };
        if let Some(id) = self.find(Name { client, handle: parent }).or_else(|| self.find(root)) {
            return id;
        }
        self.insert(New { kind: Kind::Client, ..New::plain(root, 0, 0) }).0
    }

    fn replace(&mut self, old: Id) -> Freed {
        let Some(node) = self.nodes.get(&old) else { return Freed::default() };
        let (children, client) = (node.children.clone(), node.name.client);
        if node.kind == Kind::Client || node.freeing.is_some() {
            return self.remove(old);
        }
        let root = self.find(Name { client, handle: client });
        for child in children {
            if let Some(node) = self.nodes.get_mut(&child) {
                node.parent = root;
            }
            if let Some(root) = root.and_then(|root| self.nodes.get_mut(&root)) {
                root.children.insert(child);
            }
        }
        self.remove_one(old)
    }

    fn count(&mut self, kind: Kind, up: bool) {
        if let Some(count) = self.counts.get_mut(slot(kind)) {
            *count = if up { count.saturating_add(1) } else { count.saturating_sub(1) };
        }
    }

    /// Memory with one reference.
    fn add_memory(&mut self, charge: Charge, class: u32, mapping: Option<Arc<SharedMapping>>) -> MemoryId {
        let id = MemoryId(self.id());
        self.memory.insert(id, Memory { charge, references: 1, class, mapping });
        id
    }

    /// Makes `id` another handle of the same memory (a duplicate or an import).
    pub(crate) fn refer(&mut self, id: Id, memory: MemoryId) {
        if let Some(node) = self.nodes.get_mut(&id)
            && node.memory.is_none()
        {
            node.memory = Some(memory);
            self.keep(memory);
        }
    }

    /// Class of the object that the memory was allocated as.
    pub(crate) fn memory_class(&self, memory: MemoryId) -> Option<u32> {
        self.memory.get(&memory).map(|memory| memory.class)
    }

    /// One reference more.
    pub(crate) fn keep(&mut self, memory: MemoryId) {
        if let Some(memory) = self.memory.get_mut(&memory) {
            memory.references = memory.references.saturating_add(1);
        }
    }

    /// One reference less; the last one frees.
    pub(crate) fn release(&mut self, id: MemoryId) -> Freed {
        let mut freed = Freed::default();
        if let Some(memory) = self.memory.get_mut(&id) {
            memory.references = memory.references.saturating_sub(1);
            if memory.references == 0
                && let Some(memory) = self.memory.remove(&id)
            {
                freed.charges.push(memory.charge);
                freed.mappings.extend(memory.mapping);
            }
        }
        freed
    }

    /// `object` keeps memory until it unregisters it (by `handle`) or goes.
    pub(crate) fn register(&mut self, object: Id, handle: u32, memory: MemoryId) {
        if let Some(node) = self.nodes.get_mut(&object) {
            node.registered.push((handle, memory));
            self.keep(memory);
        }
    }

    /// Ends a registration.
    pub(crate) fn unregister(&mut self, object: Id, handle: u32) -> Freed {
        let found = self.nodes.get_mut(&object).and_then(|node| {
            let at = node.registered.iter().position(|(known, _)| *known == handle)?;
            Some(node.registered.swap_remove(at).1)
        });
        found.map(|memory| self.release(memory)).unwrap_or_default()
    }

    /// `object` goes together with `other` from now on.
    pub(crate) fn depend(&mut self, object: Id, other: Id) {
        if let Some(node) = self.nodes.get_mut(&other) {
            node.dependants.insert(object);
            if let Some(node) = self.nodes.get_mut(&object) {
                node.depends.push(other);
            }
        }
    }

    /// The timeslice that the tenant set last, microseconds; 0 = never.
    pub(crate) fn timeslice(&self, id: Id) -> u64 {
        self.nodes.get(&id).map_or(0, |node| node.timeslice)
    }

    /// Remembers it.
    pub(crate) fn set_timeslice(&mut self, id: Id, microseconds: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.timeslice = microseconds;
        }
    }

    /// The object, its children and its dependants, and theirs.
    pub(crate) fn subtree(&self, root: Id) -> Vec<Id> {
        let mut seen = BTreeSet::from([root]);
        let mut order = vec![root];
        let mut next = 0;
        while let Some(id) = order.get(next) {
            if let Some(node) = self.nodes.get(id) {
                for child in node.children.iter().chain(&node.dependants) {
                    if seen.insert(*child) {
                        order.push(*child);
                    }
                }
            }
            next += 1;
        }
        order
    }

    /// Removes an object with all that goes with it.
    pub(crate) fn remove(&mut self, root: Id) -> Freed {
        let mut freed = Freed::default();
        for id in self.subtree(root) {
            freed.append(self.remove_one(id));
        }
        freed
    }

    fn remove_one(&mut self, id: Id) -> Freed {
        let mut freed = Freed::default();
        let Some(node) = self.nodes.remove(&id) else { return freed };
        self.count(node.kind, false);
        if self.names.get(&node.name) == Some(&id) {
            self.names.remove(&node.name);
        }
        if let Some(parent) = node.parent.and_then(|parent| self.nodes.get_mut(&parent)) {
            parent.children.remove(&id);
        }
        for other in node.depends {
            if let Some(other) = self.nodes.get_mut(&other) {
                other.dependants.remove(&id);
            }
        }
        let registered = node.registered.into_iter().map(|(_, memory)| memory);
        for memory in node.memory.into_iter().chain(node.holds).chain(registered) {
            freed.append(self.release(memory));
        }
        freed
    }

    /// Pins all of `names`, or none: `None` while one of them, or its client, is being freed.
    pub(super) fn try_pin(&mut self, names: &[Name]) -> Result<Option<Pinned>, Name> {
        let mut pinned = Pinned::default();
        for name in names {
            let id = self.find(*name).ok_or(*name)?;
            let client = self.find(Name { client: name.client, handle: name.client });
            if self.is_freeing(id) || client.is_some_and(|client| self.is_freeing(client)) {
                return Ok(None);
            }
            pinned.ids.push(id);
            pinned.clients.extend(client);
        }
        for id in pinned.ids.iter().chain(&pinned.clients) {
            if let Some(node) = self.nodes.get_mut(id) {
                node.pins = node.pins.saturating_add(1);
            }
        }
        Ok(Some(pinned))
    }

    pub(super) fn unpin(&mut self, pinned: &Pinned) {
        for id in pinned.ids.iter().chain(&pinned.clients) {
            if let Some(node) = self.nodes.get_mut(id) {
                node.pins = node.pins.saturating_sub(1);
            }
        }
    }

    pub(super) fn is_pinned(&self, id: Id) -> bool {
        self.nodes.get(&id).is_some_and(|node| node.pins != 0)
    }

    pub(super) fn set_freeing(&mut self, id: Id, freeing: bool) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.freeing = freeing.then_some(id);
        }
    }

    pub(super) fn is_freeing(&self, id: Id) -> bool {
        self.nodes.get(&id).is_some_and(|node| node.freeing.is_some())
    }

    /// Marks a subtree as being freed; false while something in it is pinned, or is being freed on its own: were that
    /// refused, it could be used again while it goes with the subtree. Then nothing stays marked, so that of two
    /// that meet none waits for the other.
    pub(super) fn mark(&mut self, root: Id) -> bool {
        let subtree = self.subtree(root);
        let others = |node: &Node| node.freeing.is_some_and(|owner| owner != root);
        if subtree.iter().any(|id| self.nodes.get(id).is_some_and(others)) {
            self.unmark(root);
            return false;
        }
        let mut unused = true;
        for id in subtree {
            if let Some(node) = self.nodes.get_mut(&id) {
                node.freeing = Some(root);
                unused &= node.pins == 0;
            }
        }
        unused
    }

    pub(super) fn unmark(&mut self, root: Id) {
        for id in self.subtree(root) {
            if let Some(node) = self.nodes.get_mut(&id)
                && node.freeing == Some(root)
            {
                node.freeing = None;
            }
        }
    }

    /// Objects known.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }
    /// Memory known.
    #[cfg(test)]
    pub(crate) fn memories(&self) -> usize {
        self.memory.len()
    }
}
