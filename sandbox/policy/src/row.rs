//! What a row of the table can say.
//!
//! Offsets and sizes are bytes of the driver's own structures. A row describes a command completely: each
//! pointer, file number and handle in its parameters, and what is done with it. What a row doesn't say can't
//! reach the driver.

/// A handle field that must name something this container made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handle {
    /// A client of this container.
    Client {
        /// Where.
        at: u32,
        /// Zero is allowed.
        optional: bool,
    },
    /// An object of the calling client, or of the client named at `client`.
    Object {
        /// Where.
        at: u32,
        /// Where the client is named; `None`: the client that makes the call.
        client: Option<u32>,
        /// Zero is allowed.
        optional: bool,
        /// How the new object (or the one called) is tied to it.
        tie: Tie,
    },
}

/// How one object is tied to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tie {
    /// Not at all.
    None,
    /// It keeps the other's memory allocated as long as it lives.
    Holds,
    /// The driver frees it together with the other.
    Depends,
}

/// An own object of the calling client.
pub const fn own(at: u32) -> Handle {
    Handle::Object { at, client: None, optional: false, tie: Tie::None }
}
/// An own object of the calling client, or zero.
pub const fn own_or_none(at: u32) -> Handle {
    Handle::Object { at, client: None, optional: true, tie: Tie::None }
}
/// An own object of the client named at `client`.
pub const fn own_in(at: u32, client: u32) -> Handle {
    Handle::Object { at, client: Some(client), optional: false, tie: Tie::None }
}
/// An own object of the client named at `client`, or zero.
pub const fn own_in_or_none(at: u32, client: u32) -> Handle {
    Handle::Object { at, client: Some(client), optional: true, tie: Tie::None }
}
/// Own memory that stays allocated as long as the new object lives, or zero.
pub const fn holds(at: u32) -> Handle {
    Handle::Object { at, client: None, optional: true, tie: Tie::Holds }
}
/// An own object that takes the new one along when it is freed, or zero.
pub const fn depends(at: u32) -> Handle {
    Handle::Object { at, client: None, optional: true, tie: Tie::Depends }
}
/// An own client.
pub const fn client(at: u32) -> Handle {
    Handle::Client { at, optional: false }
}
/// An own client, or zero.
pub const fn client_or_none(at: u32) -> Handle {
    Handle::Client { at, optional: true }
}

/// An embedded pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// Where the pointer stands in its structure.
    pub at: u32,
    /// How long what it points at is.
    pub length: Length,
    /// Which way the bytes go.
    pub direction: Direction,
}

/// Length of what a pointer points at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// A 32-bit count at `count`, of elements of `element` bytes, at most `most` elements.
    List {
        /// Where the count stands.
        count: u32,
        /// Bytes an element.
        element: u32,
        /// Most elements.
        most: u32,
    },
    /// The square of a 32-bit count at `count`, of elements of `element` bytes, the count at most `most`.
    Square {
        /// Where the count stands.
        count: u32,
        /// Bytes an element.
        element: u32,
        /// Largest count.
        most: u32,
    },
    /// This many bytes.
    Fixed(u32),
    /// The driver never follows it: it gets null, whatever the tenant put there.
    Never,
}

/// Which way bytes go through a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the driver.
    In,
    /// From the driver.
    Out,
    /// Both ways.
    Both,
}

/// A list behind a pointer: count, pointer, element size, most elements; bytes go both ways.
pub const fn list(count: u32, at: u32, element: u32, most: u32) -> Pointer {
    Pointer { at, length: Length::List { count, element, most }, direction: Direction::Both }
}

/// A file number in parameters, in the caller's own table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileField {
    /// Where, 32 bits.
    pub at: u32,
    /// What the file must be.
    pub kind: FileKind,
    /// Negative numbers pass through ("none").
    pub optional: bool,
}

/// Kinds of file that a command takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// The control node.
    Control,
    /// The control node or a granted GPU's.
    Frontend,
    /// The UVM node.
    Uvm,
}

/// Which nodes a front-end command is accepted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// The control node.
    Control,
    /// A GPU's node.
    Gpu,
    /// Either.
    Any,
}

/// Which sizes a front-end command may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// This one.
    Exact(u32),
    /// One of two.
    Either(u32, u32),
    /// A multiple of `unit`, at least one, at most `most` of them.
    Multiple {
        /// The unit.
        unit: u32,
        /// Most units.
        most: u32,
    },
}

impl Size {
    /// Whether `size` is accepted.
    pub const fn accepts(self, size: u32) -> bool {
        match self {
            Size::Exact(only) => size == only,
            Size::Either(one, other) => size == one || size == other,
            Size::Multiple { unit, most } => size != 0 && size.is_multiple_of(unit) && size / unit <= most,
        }
    }
}

/// A command of the front end (control and GPU nodes), chosen by its number byte.
#[derive(Clone, Copy, Debug)]
pub struct Escape {
    /// The number byte.
    pub nr: u8,
    /// The driver's name.
    pub name: &'static str,
    /// Sizes accepted.
    pub size: Size,
    /// Nodes accepted.
    pub on: On,
    /// Where the driver writes its status, if it has one.
    pub status: Option<u32>,
    /// Handles that must be own.
    pub handles: &'static [Handle],
    /// What is done.
    pub rule: EscapeRule,
}

impl Escape {
    /// The ioctl number of this command with parameters of `size` bytes, as the driver's headers form it.
    pub const fn command(&self, size: u32) -> u32 {
        (3 << 30) | (size << 16) | ((b'F' as u32) << 8) | self.nr as u32
    }

    /// Every size accepted.
    pub fn sizes(&self) -> impl Iterator<Item = u32> {
        let (unit, list) = match self.size {
            Size::Exact(only) => (0, [Some(only), None]),
            Size::Either(one, other) => (0, [Some(one), Some(other)]),
            Size::Multiple { unit, .. } => (unit, [None, None]),
        };
        let most = match self.size {
            Size::Multiple { most, .. } => most,
            Size::Exact(_) | Size::Either(..) => 0,
        };
        list.into_iter().flatten().chain((1..=most).map(move |count| count * unit))
    }
}

/// What is done with a front-end command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EscapeRule {
    /// Forwarded after the checks of its row.
    Forward,
    /// Refused: with status "not supported", or `EINVAL` where there is no status field.
    Deny,
    /// Unwrapped into the command it carries.
    Transfer,
    /// `RM_CONTROL`: second dispatch.
    Control,
    /// `RM_ALLOC`: second dispatch by class.
    Alloc,
    /// The older allocation; only OS-descriptor (pinned) memory.
    AllocMemory,
    /// `RM_FREE`.
    Free,
    /// `RM_DUP_OBJECT`.
    Dup,
    /// `RM_SHARE`.
    Share,
    /// `RM_MAP_MEMORY`.
    MapMemory,
    /// `RM_UNMAP_MEMORY`.
    UnmapMemory,
    /// `RM_GET_EVENT_DATA`.
    EventData,
    /// The list of cards: those not granted are blanked.
    CardInfo,
    /// Binds a file to a control file.
    RegisterFile,
    /// A list of GPU ids that must be granted.
    AttachGpus,
}

/// A command of the UVM node.
#[derive(Clone, Copy, Debug)]
pub struct Uvm {
    /// The whole command number.
    pub cmd: u32,
    /// The driver's name.
    pub name: &'static str,
    /// Bytes of its parameters.
    pub size: u32,
    /// Where the driver writes its status.
    pub status: u32,
    /// File numbers in it.
    pub files: &'static [FileField],
    /// Handles that must be own.
    pub handles: &'static [Handle],
    /// What is done.
    pub rule: UvmRule,
}

/// What is done with a UVM command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UvmRule {
    /// Forwarded after the checks of its row.
    Forward,
    /// Refused with status "not supported".
    Deny,
    /// `UVM_INITIALIZE`: the multi-process mode is added, and hidden.
    Initialize,
    /// An external range begins to exist: `base` at 0, `length` at 8.
    CreateRange,
    /// Memory is mapped into a range and kept: `base` at 0, `length` at 8, client and memory as said.
    MapExternal {
        /// Where the client is named.
        client: u32,
        /// Where the memory is named.
        memory: u32,
    },
    /// Mappings within `base` at 0, `length` at 8 go, for the GPU whose UUID is at 16.
    UnmapExternal,
    /// The range that begins at `base` (at 0) goes, with what is mapped in it.
    FreeRange,
}

/// How memory of a class is accounted. A memory class can't be written down without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Account {
    /// GPU memory, charged to the quota of the GPU that the object stands under.
    Gpu {
        /// Where the size stands, in and out.
        size: u32,
    },
    /// Host memory that the driver allocates, bounded for the container.
    Host {
        /// Where the size stands, in and out.
        size: u32,
    },
    /// Address space only.
    Virtual,
}

/// A class of objects.
#[derive(Clone, Copy, Debug)]
pub struct Class {
    /// Its number.
    pub id: u32,
    /// The driver's name.
    pub name: &'static str,
    /// Bytes of its parameters; the driver ignores the size that the caller gives.
    pub size: u32,
    /// Handles in its parameters that must be own.
    pub handles: &'static [Handle],
    /// What is done.
    pub rule: ClassRule,
}

/// What is done with an allocation of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassRule {
    /// Refused with this status.
    Deny(u32),
    /// A client of the driver.
    Client,
    /// A device: the GPU instance named at 0 must be granted.
    Device,
    /// Memory of a kind.
    Memory(Account),
    /// An event: only OS events, whose file number is a match key and passes through.
    Event,
    /// A channel group; of the graphics engine it is charged a context's fixed sum.
    ChannelGroup {
        /// Where the engine is named.
        engine: u32,
    },
    /// A channel: the privileged flag is cleared.
    Channel {
        /// Where the flags stand.
        flags: u32,
    },
    /// The doorbell page: the byte at `privileged`, where there is one, is cleared.
    UserMode {
        /// Where.
        privileged: Option<u32>,
    },
    /// The driver's page shared by all clients: replaced by host memory of our own under the same handle.
    SharedData,
    /// An address space.
    AddressSpace,
    /// Anything else: forwarded after the checks of its row.
    Plain,
}

/// A control.
#[derive(Clone, Copy, Debug)]
pub struct Control {
    /// Its number.
    pub cmd: u32,
    /// The driver's name.
    pub name: &'static str,
    /// Bytes of its parameters, exactly.
    pub size: u32,
    /// Embedded pointers.
    pub pointers: &'static [Pointer],
    /// File numbers.
    pub files: &'static [FileField],
    /// Handles that must be own.
    pub handles: &'static [Handle],
    /// What is done.
    pub rule: ControlRule,
}

impl Control {
    /// A control without pointers, files or handles in its parameters.
    pub(crate) const fn new(cmd: u32, name: &'static str, size: u32, rule: ControlRule) -> Self {
        Control { cmd, name, size, pointers: &[], files: &[], handles: &[], rule }
    }
    /// The same with these pointers.
    pub(crate) const fn pointers(self, pointers: &'static [Pointer]) -> Self {
        Control { pointers, ..self }
    }
    /// The same with these file numbers.
    pub(crate) const fn files(self, files: &'static [FileField]) -> Self {
        Control { files, ..self }
    }
    /// The same with these handles.
    pub(crate) const fn handles(self, handles: &'static [Handle]) -> Self {
        Control { handles, ..self }
    }
}

/// What is done with a control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlRule {
    /// Forwarded after the checks of its row.
    Forward,
    /// Answered "done" without asking the driver; parameters stay as they are.
    Answer,
    /// Answered "done" with parameters of zeros.
    AnswerZeros,
    /// Forwarded; then GPU ids that aren't granted are taken out of the `lists` lists of `count` ids from `at` on,
    /// each filled up with `0xffffffff`.
    FilterIds {
        /// Where the first list starts.
        at: u32,
        /// Length of each in ids.
        count: u32,
        /// How many lists follow one another.
        lists: u32,
    },
    /// Forwarded; then entries of `stride` bytes whose first field is an id that isn't granted are taken out of a
    /// list at `at`, and its 32-bit count at 0 is set to what is left.
    FilterEntries {
        /// Where the list starts.
        at: u32,
        /// Bytes an entry.
        stride: u32,
    },
    /// Answered with the mask of granted device instances, 32 bits at 0.
    DeviceMask,
    /// Forwarded when each of the ids in the list at `at` (at most `count`, or as many as the 32-bit field at `used`
    /// says) is granted.
    RequireIds {
        /// Where the list starts.
        at: u32,
        /// Most ids.
        count: u32,
        /// Where their number stands; `None`: all until `0xffffffff`.
        used: Option<u32>,
    },
    /// Two lists of at most eight ids, at 8 and 40, their lengths at 0 and 4; each id must be granted.
    RequireIdMatrix,
    /// List of ids at 0 until `0xffffffff`; "all" is replaced by the granted ones.
    AttachIds,
    /// Memory figures by index, inline: count at 0, entries from 4.
    MemoryInfo,
    /// Memory figures by index, behind the row's one pointer.
    MemoryInfoList,
    /// Size of video memory, KiB, at 8 and 16.
    MemorySize,
    /// Processes on the GPU: answered with none.
    Processes,
    /// Figures of processes: answered with zeros.
    ProcessInfo,
    /// Preemption mode of a channel: wait-for-idle is never set.
    PreemptionMode,
    /// Starts or stops a channel or group: forwarded when it starts, answered when it stops.
    Schedule,
    /// Timeslice: remembered, never forwarded.
    SetTimeslice,
    /// Timeslice: answered from memory.
    GetTimeslice,
    /// Channels named by the list behind the row's first pointer (count at 0) must be own.
    ChannelList,
    /// Channels named inline (count at 0, handles from 4) must be own.
    InlineChannels,
    /// A third party keeps the memory named at 0 until it is unregistered or the object goes.
    RegisterMemory,
    /// The registration of the memory named at 0 ends.
    UnregisterMemory,
    /// Prepares a file that will carry exports.
    CreateExport,
    /// Exports one object (handle at 12) to the file.
    ExportOne,
    /// Exports objects (handles from 76, number at 2124, first slot at 2126) to the file.
    ExportMany,
    /// Reads what a file carries.
    ExportInfo,
    /// Imports one object (parent at 12, handle at 16) from a file.
    ImportOne,
    /// Imports objects (parent at 4, handles from 8, number at 648, first slot at 650) from a file.
    ImportMany,
}
