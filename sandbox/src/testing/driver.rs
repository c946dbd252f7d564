use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use gpuslice_sys::Arg;

use crate::bytes::{get32, get64, put32, put64};
use crate::driver::{Done, Driver, Node};
use crate::ledger::rounded;

type Name = (u32, u32);

#[derive(Default)]
struct Object {
    class: u32,
    parent: Name,
    depends: Vec<Name>,
    memory: Option<u64>,
    holds: Vec<u64>,
    gpu: Option<u32>,
}

#[derive(Default)]
pub(crate) struct State {
    objects: BTreeMap<Name, Object>,
    /// Size and card of each allocation of video memory that something keeps.
    memory: HashMap<u64, (u64, u32)>,
    maps: Vec<(u64, u64)>,
    exports: HashMap<u32, u64>,
    next: u32,
    next_memory: u64,
    /// Every call: command and parameters as the driver would see them.
    pub(crate) calls: Vec<(u32, Arg)>,
    /// Status to answer to the next control instead of "done".
    pub(crate) refuse: Option<u32>,
    /// Size that the next allocation is rounded up to.
    pub(crate) grow: Option<u64>,
}

/// A naive driver: clients, objects, memory, dups, UVM maps, exports.
pub(crate) struct FakeDriver {
    nodes: Mutex<HashMap<(u64, u32, u32), Node>>,
    pub(crate) state: Mutex<State>,
    cards: u32,
}

impl State {
    fn free(&mut self, name: Name) {
        let Some(_object) = self.objects.remove(&name) else { return };
        let gone: Vec<Name> = self
            .objects
            .iter()
            .filter(|(key, object)| {
                object.parent == name
                    || object.depends.contains(&name)
                    || (name.0 == name.1 && key.0 == name.0)
            })
            .map(|(key, _)| *key)
            .collect();
        for name in gone {
            self.free(name);
        }
        self.collect();
    }

    /// Memory that nothing refers to is gone.
    fn collect(&mut self) {
        let used: BTreeSet<u64> = self
            .objects
            .values()
            .flat_map(|object| object.memory.into_iter().chain(object.holds.iter().copied()))
            .chain(self.maps.iter().map(|(_, memory)| *memory))
            .chain(self.exports.values().copied())
            .collect();
        self.memory.retain(|memory, _| used.contains(memory));
    }

    fn memory_of(&self, name: Name) -> Option<u64> {
        self.objects.get(&name).and_then(|object| object.memory)
    }

    fn alloc(&mut self, arg: &mut Arg, status_at: u32, cards: u32) {
        let word = |arg: &Arg, at| get32(&arg.bytes, at).unwrap();
        let (client, parent, mut handle, class) = (word(arg, 0), word(arg, 4), word(arg, 8), word(arg, 12));
        if handle == 0 {
            self.next += 1;
            handle = 0xc1d0_0000 + self.next;
        }
        let is_client = class == 0x41;
        let name = if is_client { (handle, handle) } else { (client, handle) };
        let status = if self.objects.contains_key(&name) {
            0x19
        } else if !is_client && !self.objects.contains_key(&(client, parent)) {
            0x36
        } else {
            let mut object = Object { class, parent: (client, parent), ..Object::default() };
            object.gpu = self.objects.get(&(client, parent)).and_then(|parent| parent.gpu);
            let params = arg.links.first_mut().map(|link| &mut link.bytes);
            match (class, params) {
                (0x80, Some(params)) => object.gpu = Some(get32(params, 0).unwrap_or(0) % cards),
                (0x40, Some(params)) => {
                    let size = self.grow.take().unwrap_or(rounded(get64(params, 64).unwrap()));
                    put64(params, 64, size).unwrap();
                    self.next_memory += 1;
                    self.memory.insert(self.next_memory, (size, object.gpu.unwrap_or(99)));
                    object.memory = Some(self.next_memory);
                }
                (0xc86f, Some(params)) => {
                    let userd = get32(params, 32).unwrap();
                    object.holds.extend(self.memory_of((client, userd)));
                    for at in [24, 28] {
                        let handle = get32(params, at).unwrap();
                        if handle != 0 {
                            object.depends.push((client, handle));
                        }
                    }
                }
                _ => {}
            }
            self.objects.insert(name, object);
            0
        };
        put32(&mut arg.bytes, 8, handle).unwrap();
        put32(&mut arg.bytes, status_at, status).unwrap();
    }

    fn control(&mut self, arg: &mut Arg, cards: u32) {
        let word = |arg: &Arg, at| get32(&arg.bytes, at).unwrap();
        let (client, cmd) = (word(arg, 0), word(arg, 8));
        let mut status = self.refuse.take().unwrap_or(0);
        let params = arg.links.first_mut().map(|link| &mut link.bytes);
        match (cmd, params) {
            (0x205, Some(params)) => {
                let id = get32(params, 0).unwrap();
                put32(params, 8, id / 0x100).unwrap();
            }
            (0x214 | 0x201, Some(params)) => {
                for (at, place) in (0..128).step_by(4).zip(1u32..) {
                    put32(params, at, if place <= cards { (place - 1) * 0x100 + 7 } else { u32::MAX })
                        .unwrap();
                }
            }
            (0x2080_1123, Some(params)) => {
                let asked = get32(params, 0).unwrap();
                status = if self.objects.contains_key(&(asked, asked)) { 0x57 } else { 0x33 };
            }
            (0x2080_1303, Some(params)) => {
                for at in (4..28).step_by(8) {
                    put32(params, at + 4, 140 << 20).unwrap();
                }
            }
            (0x503c_0104, Some(params)) => {
                let memory = self.memory_of((client, get32(params, 0).unwrap()));
                if let Some(object) = self.objects.get_mut(&(client, get32(&arg.bytes, 4).unwrap())) {
                    object.holds.extend(memory);
                }
            }
            (0x503c_0105, Some(params)) => {
                let memory = self.memory_of((client, get32(params, 0).unwrap()));
                if let Some(object) = self.objects.get_mut(&(client, get32(&arg.bytes, 4).unwrap())) {
                    let at = object.holds.iter().position(|held| Some(*held) == memory);
                    at.map(|at| object.holds.remove(at));
                }
                self.collect();
            }
            (0x3d05, Some(params)) => {
                if let Some(memory) = self.memory_of((client, get32(params, 12).unwrap())) {
                    self.exports.insert(0, memory);
                }
            }
            (0x3d06, Some(params)) => {
                let (parent, handle) = (get32(params, 12).unwrap(), get32(params, 16).unwrap());
                let memory = self.exports.get(&0).copied();
                let object = Object { class: 0x40, parent: (client, parent), memory, ..Object::default() };
                self.objects.insert((client, handle), object);
            }
            _ => {}
        }
        put32(&mut arg.bytes, 28, status).unwrap();
    }

    fn dup(&mut self, arg: &mut Arg) {
        let word = |at| get32(&arg.bytes, at).unwrap();
        let (client, parent, handle, source) = (word(0), word(4), word(8), (word(12), word(16)));
        let status = match self.objects.get(&source) {
            _ if self.objects.contains_key(&(client, handle)) => 0x19,
            Some(found) if self.objects.contains_key(&(client, parent)) => {
                let (class, memory) = (found.class, found.memory);
                let object = Object { class, parent: (client, parent), memory, ..Object::default() };
                self.objects.insert((client, handle), object);
                0
            }
            _ => 0x57,
        };
        put32(&mut arg.bytes, 24, status).unwrap();
    }

    fn uvm(&mut self, cmd: u32, arg: &mut Arg) {
        let (at, status) = match cmd {
            33 => {
                let name = (get32(&arg.bytes, 9252).unwrap(), get32(&arg.bytes, 9256).unwrap());
                let memory = self.memory_of(name);
                self.maps.extend(memory.map(|memory| (get64(&arg.bytes, 0).unwrap(), memory)));
                (9260, if self.objects.contains_key(&name) { 0 } else { 0x57 })
            }
            34 => {
                let base = get64(&arg.bytes, 0).unwrap();
                self.maps.retain(|(start, _)| *start != base);
                self.collect();
                (16, 0)
            }
            0x3000_0001 => (8, 0),
            73 => (16, 0),
            _ => return,
        };
        put32(&mut arg.bytes, at, status).unwrap();
    }
}

impl FakeDriver {
    pub(crate) fn new(cards: u32) -> Self {
        FakeDriver { nodes: Mutex::default(), state: Mutex::default(), cards }
    }

    /// A new open file of a node.
    pub(crate) fn open(&self, node: Node) -> OwnedFd {
        let file = super::file();
        self.nodes.lock().unwrap().insert(key(file.as_fd()), node);
        file
    }

    /// Bytes of video memory that the driver has allocated on a card.
    pub(crate) fn in_use(&self, card: u32) -> u64 {
        let state = self.state.lock().unwrap();
        state.memory.values().filter(|(_, gpu)| *gpu == card).map(|(size, _)| size).sum()
    }

    /// A client that somebody else made.
    pub(crate) fn foreign_client(&self) -> u32 {
        let handle = 0xc1d0_9999;
        self.state.lock().unwrap().objects.insert((handle, handle), Object::default());
        handle
    }

    pub(crate) fn has(&self, client: u32, handle: u32) -> bool {
        self.state.lock().unwrap().objects.contains_key(&(client, handle))
    }

    /// The last copy of a client's file was closed.
    pub(crate) fn drop_client(&self, client: u32) {
        self.state.lock().unwrap().free((client, client));
    }

    pub(crate) fn calls(&self) -> Vec<(u32, Arg)> {
        std::mem::take(&mut self.state.lock().unwrap().calls)
    }
}

fn key(file: BorrowedFd<'_>) -> (u64, u32, u32) {
    let identity = gpuslice_sys::identify(file).unwrap();
    (identity.inode, identity.dev.0, identity.dev.1)
}

impl Driver for FakeDriver {
    fn node_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<Node>> {
        Ok(self.nodes.lock().unwrap().get(&key(file)).copied())
    }

    fn ioctl(&self, _file: BorrowedFd<'_>, node: Node, cmd: u32, arg: &mut Arg) -> io::Result<Done> {
        let mut state = self.state.lock().unwrap();
        // As the driver would see it: each named field is an address of the sandbox's.
        let mut seen = arg.clone();
        for link in arg.links.clone() {
            let parent = match link.parent {
                None => &mut seen.bytes,
                Some(index) => &mut seen.links[index].bytes,
            };
            put64(parent, u32::try_from(link.at).unwrap(), 0).unwrap();
        }
        for link in arg.links.clone() {
            let parent = match link.parent {
                None => &mut arg.bytes,
                Some(index) => &mut arg.links[index].bytes,
            };
            put64(parent, u32::try_from(link.at).unwrap(), 0).unwrap();
        }
        state.calls.push((cmd, seen));
        if node == Node::Uvm {
            state.uvm(cmd, arg);
            return Ok(Done::default());
        }
        match cmd & 0xff {
            0x2b => state.alloc(arg, if arg.bytes.len() == 48 { 40 } else { 28 }, self.cards),
            0x2a => state.control(arg, self.cards),
            0x29 => {
                let name = (get32(&arg.bytes, 0).unwrap(), get32(&arg.bytes, 8).unwrap());
                state.free(name);
            }
            0x34 => state.dup(arg),
            0xc8 => {
                for card in 0..self.cards {
                    let base = card * 72;
                    arg.bytes[usize::try_from(base).unwrap()] = 1;
                    put32(&mut arg.bytes, base + 16, card * 0x100 + 7).unwrap();
                    put32(&mut arg.bytes, base + 56, card).unwrap();
                }
            }
            0x27 => {
                let name = (get32(&arg.bytes, 0).unwrap(), get32(&arg.bytes, 8).unwrap());
                let parent = (name.0, get32(&arg.bytes, 4).unwrap());
                state.objects.insert(name, Object { class: 0x71, parent, ..Object::default() });
            }
            _ => {}
        }
        Ok(Done::default())
    }
}
