//! Commands about memory: what the card says it has, how much it gives, mappings, pinned and managed memory.

use std::os::fd::AsFd;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::bytes::Block;
use crate::driver::{self, Trouble, frontend, step};
use crate::report::{self, Outcome};
use crate::rm::Client;

/// A size such as 64K, 3M, 2G or plain bytes.
pub(crate) fn size(text: &str) -> Result<u64, Trouble> {
    let (number, shift) = match text.as_bytes().last() {
        Some(b'K') => (text.strip_suffix('K'), 10),
        Some(b'M') => (text.strip_suffix('M'), 20),
        Some(b'G') => (text.strip_suffix('G'), 30),
        _ => (Some(text), 0),
    };
    let number = number.and_then(|digits| digits.parse::<u64>().ok()).and_then(|n| n.checked_mul(1 << shift));
    number.ok_or_else(|| Trouble::Machine(format!("bad size {text:?}: a number with K, M or G")))
}

/// A count or a time.
pub(crate) fn number(text: &str) -> Result<u64, Trouble> {
    text.parse().map_err(|_| Trouble::Machine(format!("bad number {text:?}")))
}

/// A shared mapping of this process, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<libc::c_void>,
    length: usize,
}

impl Mapping {
    /// Maps `length` bytes of nothing, shared with children.
    pub(crate) fn shared(length: u64) -> Result<Self, Trouble> {
        Self::of_kind(libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, length, 0, 0)
    }

    /// Maps `length` bytes of a file, or of nothing.
    pub(crate) fn new(file: Option<&impl AsFd>, length: u64, at: u64, offset: i64) -> Result<Self, Trouble> {
        let kind = match (file.is_some(), at) {
            (true, 0) => libc::MAP_SHARED,
            (true, _) => libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE,
            (false, _) => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        };
        let number = file.map_or(-1, |file| file.as_fd().as_raw_fd());
        Self::of_kind(kind, number, length, at, offset)
    }

    fn of_kind(kind: i32, number: i32, length: u64, at: u64, offset: i64) -> Result<Self, Trouble> {
        let length = usize::try_from(length).map_err(|_| Trouble::Machine("too long".to_owned()))?;
        let wanted = std::ptr::with_exposed_provenance_mut(usize::try_from(at).unwrap_or(0));
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: mmap without MAP_FIXED replaces no mapping of this process (FIXED_NOREPLACE fails instead);
        // the range it returns is owned by the value made here alone.
        let start = unsafe { libc::mmap(wanted, length, protection, kind, number, offset) };
        if start == libc::MAP_FAILED {
            let error = std::io::Error::last_os_error();
            return Err(Trouble::Call { what: "mmap".to_owned(), error });
        }
        let start = NonNull::new(start).ok_or_else(|| Trouble::Machine("mmap at 0".to_owned()))?;
        Ok(Mapping { start, length })
    }

    /// Its first address.
    pub(crate) fn address(&self) -> u64 {
        u64::try_from(self.start.as_ptr().expose_provenance()).unwrap_or(0)
    }

    fn word(&self, at: usize) -> Option<*mut u32> {
        (at.checked_add(4)? <= self.length && at.is_multiple_of(4)).then(|| {
            let start: *mut u8 = self.start.as_ptr().cast();
            start.wrapping_add(at).cast()
        })
    }

    /// Reads a word.
    pub(crate) fn read(&self, at: usize) -> u32 {
        let Some(word) = self.word(at) else { return 0 };
        // SAFETY: read_volatile needs an aligned address valid for reads: `word` checked alignment and that it
        // lies in this mapping, which is readable as long as `self` lives.
        unsafe { word.read_volatile() }
    }

    /// Writes a word.
    pub(crate) fn write(&self, at: usize, value: u32) {
        let Some(word) = self.word(at) else { return };
        // SAFETY: write_volatile needs an aligned address valid for writes: `word` checked alignment and that it
        // lies in this mapping, which is writable as long as `self` lives.
        unsafe { word.write_volatile(value) }
    }

    /// Fills each page's first word with its number and a mark.
    pub(crate) fn fill(&self, mark: u32) {
        for (page, at) in (0..self.length).step_by(4096).enumerate() {
            self.write(at, mark.wrapping_add(u32::try_from(page).unwrap_or(0)));
        }
    }

    /// How many pages hold what [`Mapping::fill`] wrote.
    pub(crate) fn filled(&self, mark: u32) -> usize {
        let pages = (0..self.length).step_by(4096).enumerate();
        pages
            .filter(|(page, at)| self.read(*at) == mark.wrapping_add(u32::try_from(*page).unwrap_or(0)))
            .count()
    }

    /// How many pages it has.
    pub(crate) fn pages(&self) -> usize {
        self.length.div_ceil(4096)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: munmap needs a range that nothing uses any more: this value owned it and is being dropped.
        let result = unsafe { libc::munmap(self.start.as_ptr(), self.length) };
        if result != 0 {
            eprintln!("munmap: {}", std::io::Error::last_os_error());
        }
    }
}

/// `info`.
pub(crate) fn info() -> Result<Outcome, Trouble> {
    let client = Client::new()?;
    let (total, heap, free) = client.memory_sizes()?;
    let mut name = Block::zeroed(132);
    client.control_with(client.subdevice, 0x2080_0110, &mut name)?;
    let ids = client.control(client.handle, 0x214, 384)?;
    let ids: Vec<u32> = (0..32).map(|i| ids.u32(i * 4)).take_while(|id| *id != u32::MAX).collect();
    let uuid: String = client.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut cards = Block::zeroed(72 * 32);
    let listed = driver::ioctl(client.control.as_fd(), frontend(0xc8, 72 * 32), &mut cards);
    let cards: Vec<u32> =
        (0..32).filter(|i| cards.0.get(i * 72) == Some(&1)).map(|i| cards.u32(i * 72 + 56)).collect();
    let mut asked = Block::zeroed(3812);
    asked.set_u32(4, 0x80);
    let pids = client.control_with(client.subdevice, 0x2080_018d, &mut asked).map(|()| asked.u32(8));
    report::line(&json!({
        "ok": true, "total": total, "heap": heap, "free": free, "name": name.text(4, 64), "gpu_ids": ids,
        "uuid": uuid, "minors": cards, "card_info": listed.is_ok(), "processes": pids.ok(), "client": client.handle,
    }));
    Ok(Outcome::Done)
}

/// `alloc`.
pub(crate) fn alloc(text: &str, most: Option<&str>) -> Result<Outcome, Trouble> {
    let (each, most) = (size(text)?, most.map_or(Ok(u64::MAX), number)?);
    let mut client = Client::new()?;
    let (total, _, free) = client.memory_sizes()?;
    let (mut count, mut got, mut status) = (0_u64, 0_u64, None);
    while count < most {
        match client.card_memory(each) {
            Ok((_, size)) => {
                count = count.saturating_add(1);
                got = got.saturating_add(size);
            }
            Err(Trouble::Status { status: found, .. }) => {
                status = Some(found);
                break;
            }
            Err(error) => return Err(error),
        }
    }
    let (_, _, left) = client.memory_sizes()?;
    report::line(&json!({
        "ok": true, "each": each, "count": count, "bytes": got, "status": status, "total": total,
        "free_before": free, "free_after": left,
    }));
    Ok(if status.is_some() { Outcome::Refused } else { Outcome::Done })
}

/// `hold`.
pub(crate) fn hold(text: &str, seconds: &str) -> Result<Outcome, Trouble> {
    let (wanted, seconds) = (size(text)?, number(seconds)?);
    let mut client = Client::new()?;
    let (_, got) = client.card_memory(wanted)?;
    let (total, _, free) = client.memory_sizes()?;
    report::line(
        &json!({"ok": true, "holding": got, "total": total, "free": free, "pid": std::process::id()}),
    );
    std::thread::sleep(Duration::from_secs(seconds));
    let (_, _, free) = client.memory_sizes()?;
    report::line(&json!({"ok": true, "free": free, "end": true}));
    Ok(Outcome::Done)
}

/// `map`: a mapping that is undone before the memory goes.
pub(crate) fn map(text: &str) -> Result<Outcome, Trouble> {
    let mut client = Client::new()?;
    let (memory, got) = client.card_memory(size(text)?)?;
    let (file, cookie) = client.map(client.subdevice, memory, got)?;
    let mapping = Mapping::new(Some(&file), got, 0, 0)?;
    mapping.fill(0xa000_0000);
    let (pages, own) = (mapping.pages(), mapping.filled(0xa000_0000));
    drop(mapping);
    drop(file);
    client.unmap(client.subdevice, memory, cookie)?;
    client.free(memory)?;
    let (_, _, free) = client.memory_sizes()?;
    report::line(&json!({"ok": own == pages, "bytes": got, "pages": pages, "own": own, "free": free}));
    Ok(Outcome::Done)
}

/// `stale`: memory freed while it is mapped. Reports what the card says is free before and after the mapping
/// goes: with the mapping kept, a careful driver doesn't hand the memory on.
pub(crate) fn stale(text: &str) -> Result<Outcome, Trouble> {
    let mut client = Client::new()?;
    let (_, _, at_first) = client.memory_sizes()?;
    let (memory, got) = client.card_memory(size(text)?)?;
    let (file, cookie) = client.map(client.subdevice, memory, got)?;
    let mapping = Mapping::new(Some(&file), got, 0, 0)?;
    mapping.fill(0xa000_0000);
    client.unmap(client.subdevice, memory, cookie)?;
    client.free(memory)?;
    let (_, _, kept) = client.memory_sizes()?;
    let own = mapping.filled(0xa000_0000);
    drop(mapping);
    drop(file);
    std::thread::sleep(Duration::from_millis(1500));
    let (_, _, gone) = client.memory_sizes()?;
    report::line(&json!({
        "ok": true, "bytes": got, "own_pages": own, "free_at_first": at_first, "free_while_mapped": kept,
        "free_after": gone,
    }));
    Ok(Outcome::Done)
}

/// Registers memory of this process.
fn pin(client: &mut Client, mapping: &Mapping) -> Result<u32, Trouble> {
    let handle = client.fresh();
    let mut block = Block::zeroed(56);
    block.set_u32(0, client.handle);
    block.set_u32(4, client.device);
    block.set_u32(8, handle);
    block.set_u32(12, 0x71);
    block.set_u32(16, 0x4000_1010);
    block.set_u64(24, mapping.address());
    block.set_u64(32, u64::try_from(mapping.length).unwrap_or(0).wrapping_sub(1));
    block.set(48, &(-1_i32).to_le_bytes());
    step("pin memory", &client.card, frontend(0x27, 56), &mut block, 40)?;
    Ok(handle)
}

/// `pinned`: registers anonymous memory, checks that it keeps its contents, goes on writing.
pub(crate) fn pinned(text: &str, hold: &str) -> Result<Outcome, Trouble> {
    let (wanted, hold) = (size(text)?, number(hold)?);
    let mut client = Client::new()?;
    let mapping = Mapping::new(None::<&std::os::fd::OwnedFd>, wanted, 0, 0)?;
    mapping.fill(0xb000_0000);
    let handle = pin(&mut client, &mapping)?;
    let kept = mapping.filled(0xb000_0000);
    mapping.fill(0xc000_0000);
    report::line(&json!({
        "ok": kept == mapping.pages(), "bytes": wanted, "pages": mapping.pages(), "kept": kept, "handle": handle,
        "pid": std::process::id(),
    }));
    std::thread::sleep(Duration::from_millis(hold));
    client.free(handle)?;
    let after = mapping.filled(0xc000_0000);
    report::line(&json!({"ok": after == mapping.pages(), "freed": true, "kept": after}));
    Ok(if kept == mapping.pages() && after == kept { Outcome::Done } else { Outcome::Reached })
}

/// `pinned-shared`: registers shared memory whose pages don't exist yet, and registers it once more.
pub(crate) fn pinned_shared(text: &str) -> Result<Outcome, Trouble> {
    let wanted = size(text)?;
    let mut client = Client::new()?;
    let mapping = Mapping::shared(wanted)?;
    let began = Instant::now();
    let handle = pin(&mut client, &mapping)?;
    let first = began.elapsed();
    mapping.fill(0xb000_0000);
    let began = Instant::now();
    let again = pin(&mut client, &mapping)?;
    let second = began.elapsed();
    let kept = mapping.filled(0xb000_0000);
    report::line(&json!({
        "ok": kept == mapping.pages(), "bytes": wanted, "kept": kept, "first_us": first.as_micros(),
        "again_us": second.as_micros(),
    }));
    client.free(again)?;
    client.free(handle)?;
    Ok(if kept == mapping.pages() { Outcome::Done } else { Outcome::Reached })
}

/// An initialised UVM file with the card registered.
#[derive(Debug)]
pub(crate) struct Uvm {
    file: std::os::fd::OwnedFd,
    /// Ties the address space to this process's memory as long as it is open.
    _memory: std::os::fd::OwnedFd,
}

impl AsFd for Uvm {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Opens and initialises UVM as CUDA does.
pub(crate) fn uvm(client: &Client) -> Result<Uvm, Trouble> {
    const NOTHING_TO_DO: u32 = 0x1_0006;
    let file = driver::open("nvidia-uvm")?;
    step("UVM_INITIALIZE", &file, 0x3000_0001, &mut Block::zeroed(16), 8)?;
    let memory = driver::open("nvidia-uvm")?;
    let mut name = Block::zeroed(8);
    name.set(0, &file.as_raw_fd().to_le_bytes());
    match step("UVM_MM_INITIALIZE", &memory, 75, &mut name, 4) {
        // The answer where several processes share the address space.
        Ok(()) | Err(Trouble::Status { status: NOTHING_TO_DO, .. }) => {}
        Err(error) => return Err(error),
    }
    let mut register = Block::zeroed(40);
    register.set(0, &client.uuid);
    register.set(24, &(-1_i32).to_le_bytes());
    step("UVM_REGISTER_GPU", &file, 37, &mut register, 36)?;
    Ok(Uvm { file, _memory: memory })
}

/// `managed`: the mapping is the allocation; the driver learns of it by a later command.
pub(crate) fn managed(text: &str, hold: &str) -> Result<Outcome, Trouble> {
    const WHERE: u64 = 0x0200_0000_0000;
    let (wanted, hold) = (size(text)?, number(hold)?);
    let mut client = Client::new()?;
    let (_, _, before) = client.memory_sizes()?;
    let file = uvm(&client)?;
    crate::context::address_space(&mut client, &file)?;
    let mapping = Mapping::new(Some(&file), wanted, WHERE, i64::try_from(WHERE).unwrap_or(0))?;
    let mut validate = Block::zeroed(24);
    validate.set_u64(0, WHERE);
    validate.set_u64(8, wanted);
    step("UVM_VALIDATE_VA_RANGE", &file, 72, &mut validate, 16)?;
    mapping.write(0, 0xd000_0001);
    let mut migrate = Block::zeroed(80);
    migrate.set_u64(0, WHERE);
    migrate.set_u64(8, wanted);
    migrate.set(16, &client.uuid);
    step("UVM_MIGRATE", &file, 51, &mut migrate, 72)?;
    let (_, _, during) = client.memory_sizes()?;
    report::line(&json!({
        "ok": mapping.read(0) == 0xd000_0001, "bytes": wanted, "free_before": before, "free": during,
    }));
    std::thread::sleep(Duration::from_millis(hold));
    Ok(Outcome::Done)
}
