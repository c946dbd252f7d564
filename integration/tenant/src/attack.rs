//! Ways past a proxy, each a small program. Every case prints what came back.
//!
//! A case counts as *reached* when the driver did what was asked, or when the kernel executed the call outside
//! the proxy: an emulated node is a regular file, so a call that escaped is answered ENOTTY there, and FIGETBSZ
//! succeeds. With GPUSLICE_TENANT_DIRECT set the same cases show what an unprotected driver does with them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use serde_json::json;

use crate::bytes::Block;
use crate::context::Context;
use crate::driver::{self, Trouble, direct, frontend};
use crate::race;
use crate::report::{self, Outcome};
use crate::rm::{Client, control_block};
use crate::share::in_child;

/// Names in the order of `all`.
const NAMES: &[&str] = &[
    "sizes",
    "pointers",
    "files",
    "handles",
    "abi32",
    "x32",
    "io-uring",
    "high-bits",
    "type-bytes",
    "xfer",
    "swap",
    "clone",
    "raw",
];

/// `attack NAME`.
pub(crate) fn run(name: &str) -> Result<Outcome, Trouble> {
    if name == "all" {
        let mut worst = Outcome::Done;
        for name in NAMES {
            if one(name)? == Outcome::Reached {
                worst = Outcome::Reached;
            }
        }
        return Ok(worst);
    }
    one(name)
}

fn one(name: &str) -> Result<Outcome, Trouble> {
    let reached = match name {
        "sizes" => sizes()?,
        "pointers" => pointers()?,
        "files" => files()?,
        "handles" => handles()?,
        "abi32" => abi32()?,
        "x32" => x32()?,
        "io-uring" => io_uring()?,
        "high-bits" => high_bits()?,
        "type-bytes" => type_bytes()?,
        "xfer" => xfer()?,
        "swap" => race::swap()?,
        "clone" => race::clones()?,
        "raw" => raw()?,
        other => return Err(Trouble::Machine(format!("no attack {other:?}: {}", NAMES.join(" ")))),
    };
    report::line(&json!({"attack": name, "reached": reached, "direct": direct().is_some()}));
    Ok(if reached { Outcome::Reached } else { Outcome::Done })
}

/// Performs one case and prints it; true when it got through.
fn case(
    attack: &str,
    what: &str,
    file: BorrowedFd<'_>,
    cmd: u32,
    block: &mut Block,
    status_at: Option<usize>,
) -> bool {
    let result = driver::ioctl(file, cmd, block);
    let status = status_at.map(|at| block.u32(at));
    let errno = result.as_ref().err().and_then(std::io::Error::raw_os_error);
    let escaped = direct().is_none() && errno == Some(libc::ENOTTY) && is_node(file);
    let reached = escaped || (result.is_ok() && status.is_none_or(|status| status == 0));
    report::line(&json!({
        "attack": attack, "case": what, "cmd": format!("{cmd:#010x}"), "errno": errno, "status": status,
        "escaped": escaped, "reached": reached,
    }));
    reached
}

/// Whether the file is one of the driver's nodes, by its name under /dev.
pub(crate) fn is_node(file: BorrowedFd<'_>) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    link.is_ok_and(|path| {
        path.starts_with(driver::directory()) && path.to_str().is_some_and(|text| text.contains("nvidia"))
    })
}

fn sizes() -> Result<bool, Trouble> {
    let client = Client::new()?;
    let (control, card) = (client.control.as_fd(), client.card.as_fd());
    let mut reached = false;
    for (what, nr, size) in [
        ("control, 31 bytes", 0x2a, 31_usize),
        ("control, 40 bytes", 0x2a, 40),
        ("control, no bytes", 0x2a, 0),
        ("allocate, 40 bytes", 0x2b, 40),
        ("allocate, 0 bytes", 0x2b, 0),
        ("free, 12 bytes", 0x29, 12),
        ("map, 48 bytes", 0x4e, 48),
        ("card info, 71 bytes", 0xc8, 71),
        ("version, 64 bytes", 0xd2, 64),
        ("registry, 72 bytes", 0x4d, 72),
        ("largest", 0x2a, 16383),
    ] {
        reached |= case("sizes", what, control, frontend(nr, size), &mut Block::zeroed(16384), None);
    }
    for (what, nr, size) in [
        ("register, 8 bytes", 0xc9, 8_usize),
        ("register, 0 bytes", 0xc9, 0),
        ("wait open, 0 bytes", 0xda, 0),
        ("wait open, 4 bytes", 0xda, 4),
        ("interrupt, 4 bytes", 0xd5, 4),
        ("legacy, 48 bytes", 0x27, 48),
    ] {
        reached |= case("sizes", what, card, frontend(nr, size), &mut Block::zeroed(16384), None);
    }
    for size in [0_usize, 1, 383, 385, 4096] {
        let parameters = Block::zeroed(size);
        let mut block = control_block(client.handle, client.handle, 0x214, &parameters);
        reached |= case(
            "sizes",
            &format!("control 0x214 with {size} bytes of parameters"),
            control,
            frontend(0x2a, 32),
            &mut block,
            Some(28),
        );
    }
    Ok(reached)
}

fn pointers() -> Result<bool, Trouble> {
    let client = Client::new()?;
    let control = client.control.as_fd();
    let mut reached = false;
    for address in [1_u64, 0xdead_0000, 0x7fff_ffff_f000, 0xffff_8880_0000_0000, u64::MAX - 8] {
        for cmd in [frontend(0x2a, 32), frontend(0x2b, 48), frontend(0xd2, 72)] {
            let result = driver::ioctl_at(control, cmd, address);
            let errno = result.as_ref().err().and_then(std::io::Error::raw_os_error);
            report::line(&json!({
                "attack": "pointers", "case": format!("argument at {address:#x}"), "cmd": format!("{cmd:#010x}"),
                "errno": errno, "reached": result.is_ok(),
            }));
            reached |= result.is_ok();
        }
        let mut block = control_block(client.handle, client.handle, 0x214, &Block::zeroed(384));
        block.set_u64(16, address);
        reached |= case(
            "pointers",
            &format!("parameters at {address:#x}"),
            control,
            frontend(0x2a, 32),
            &mut block,
            Some(28),
        );
        let mut nested = Block::zeroed(40);
        nested.set_u32(0, 80);
        nested.set_u64(8, address);
        nested.set_u64(16, address);
        nested.set_u64(24, address);
        let mut block = control_block(client.handle, client.handle, 0x101, &nested);
        reached |= case(
            "pointers",
            &format!("strings at {address:#x}"),
            control,
            frontend(0x2a, 32),
            &mut block,
            Some(28),
        );
    }
    let mut list = Block::zeroed(16);
    list.set_u32(0, u32::MAX);
    list.set_u64(8, list.address());
    let mut block = control_block(client.handle, client.subdevice, 0x2080_1301, &list);
    reached |=
        case("pointers", "four billion list entries", control, frontend(0x2a, 32), &mut block, Some(28));
    Ok(reached)
}

fn files() -> Result<bool, Trouble> {
    let client = Client::new()?;
    let open = |path: &str| {
        std::fs::File::open(path).map(OwnedFd::from).map_err(|error| Trouble::Machine(error.to_string()))
    };
    let (null, own) = (open("/dev/null")?, open("/proc/self/exe")?);
    let (reader, writer) = nix::unistd::pipe().map_err(|error| Trouble::Machine(error.to_string()))?;
    let mut reached = false;
    for (what, file) in [("/dev/null", &null), ("a program", &own), ("a pipe", &reader), ("a pipe", &writer)]
    {
        for cmd in [frontend(0x2a, 32), frontend(0xd6, 8), 37, 2] {
            reached |= case("files", what, file.as_fd(), cmd, &mut Block::zeroed(64), None);
        }
    }
    for (what, number) in [("/dev/null", null.as_raw_fd()), ("nothing", 999), ("minus one", -1)] {
        let file = driver::open(&client.node)?;
        let mut block = Block(number.to_le_bytes().to_vec());
        reached |= case(
            "files",
            &format!("register a card with {what}"),
            file.as_fd(),
            frontend(0xc9, 4),
            &mut block,
            None,
        );
    }
    Ok(reached)
}

fn handles() -> Result<bool, Trouble> {
    let client = Client::new()?;
    let mut victim = Client::new()?;
    let (memory, _) = victim.card_memory(1 << 20)?;
    let control = client.control.as_fd();
    let mut reached = false;
    let free = Block::words(&[0xdead_beef, 0xdead_beef, 0xdead_beef, 0]);
    reached |= case(
        "handles",
        "free in an unknown client",
        control,
        frontend(0x29, 16),
        &mut free.clone(),
        Some(12),
    );
    let mut foreign = Block::words(&[victim.handle, victim.device, memory, 0]);
    reached |= case(
        "handles",
        "free through another client's file",
        control,
        frontend(0x29, 16),
        &mut foreign,
        Some(12),
    );
    let mut parameters = Block::zeroed(384);
    let mut block = control_block(victim.handle, victim.handle, 0x214, &parameters);
    reached |= case(
        "handles",
        "control of another file's client",
        control,
        frontend(0x2a, 32),
        &mut block,
        Some(28),
    );
    parameters.set_u32(0, 0);
    for step in 0..64_u32 {
        let wanted = 0x6100_0000_u32.wrapping_add(step);
        let source = 0xc1d0_0000_u32.wrapping_add(step);
        if source == client.handle || source == victim.handle {
            continue;
        }
        let mut dup = Block::words(&[client.handle, client.device, wanted, source, 0x5c00_0004, 0, 0]);
        if driver::ioctl(control, frontend(0x34, 28), &mut dup).is_ok() && dup.u32(24) == 0 {
            report::line(
                &json!({"attack": "handles", "case": "duplicate a stranger's memory", "client": source, "reached": true}),
            );
            reached = true;
        }
    }
    let uvm = crate::memory::uvm(&victim)?;
    let context = Context::new(&mut victim, uvm, 0x2_0060_0000)?;
    let mut disable = Block::zeroed(536);
    disable.set_u32(0, 1);
    disable.set_u32(4, 1);
    disable.set_u32(24, victim.handle);
    disable.set_u32(280, context.channel);
    let mut block = control_block(client.handle, client.subdevice, 0x2080_110b, &disable);
    reached |= case(
        "handles",
        "disable another client's channel",
        control,
        frontend(0x2a, 32),
        &mut block,
        Some(28),
    );
    let mut ask = Block::zeroed(1552);
    ask.set_u32(0, victim.handle);
    ask.set_u32(4, context.channel);
    let mut block = control_block(client.handle, client.subdevice, 0x2080_1123, &ask);
    reached |= case("handles", "ask for a channel's ids", control, frontend(0x2a, 32), &mut block, Some(28));
    Ok(reached)
}

/// Runs a system call in a child, so that a filter's kill shows as the child's signal.
pub(crate) fn in_jail(attack: &str, what: &str, call: impl FnOnce() -> i64) -> Result<bool, Trouble> {
    const ESCAPED: i32 = 42;
    let status = in_child(|| {
        let result = call();
        report::line(&json!({"attack": attack, "case": what, "result": result}));
        if result >= 0 || result == -i64::from(libc::ENOTTY) { ESCAPED } else { 0 }
    })?;
    let killed = (status > 128).then(|| status.wrapping_sub(128));
    report::line(&json!({"attack": attack, "case": what, "signal": killed, "reached": status == ESCAPED}));
    Ok(status == ESCAPED)
}

fn abi32() -> Result<bool, Trouble> {
    const IOCTL: u32 = 54;
    const GETPID: u32 = 20;
    let control = driver::open("nvidiactl")?;
    let number = u32::try_from(control.as_raw_fd()).unwrap_or(0);
    let first = in_jail("abi32", "getpid by int 0x80", || race::int80(GETPID, 0, 0, 0))?;
    let second =
        in_jail("abi32", "ioctl by int 0x80", || race::int80(IOCTL, number, frontend(0xd6, 8), 0x1000))?;
    Ok(first || second)
}

fn x32() -> Result<bool, Trouble> {
    const X32: i64 = 0x4000_0000;
    const IOCTL: i64 = 514;
    let control = driver::open("nvidiactl")?;
    let mut block = Block::zeroed(8);
    let address = i64::try_from(block.address()).unwrap_or(0);
    let mut reached = false;
    for (what, number) in
        [("ioctl of the x32 table", X32 + IOCTL), ("ioctl with the x32 bit", X32 + libc::SYS_ioctl)]
    {
        reached |= in_jail("x32", what, || {
            race::syscall3(number, i64::from(control.as_raw_fd()), i64::from(frontend(0xd6, 8)), address)
        })?;
    }
    block.set_u32(0, 0);
    Ok(reached)
}

fn io_uring() -> Result<bool, Trouble> {
    let mut reached = false;
    for (what, number) in [("setup", 425), ("enter", 426), ("register", 427)] {
        let parameters = Block::zeroed(120);
        let address = i64::try_from(parameters.address()).unwrap_or(0);
        // A number that the kernel has and refuses for its arguments was still let through.
        let status = in_child(|| {
            let result = race::syscall3(number, 4, address, 0);
            report::line(&json!({"attack": "io-uring", "case": what, "result": result}));
            let stopped = result == -i64::from(libc::ENOSYS) || result == -i64::from(libc::EPERM);
            if stopped { 0 } else { 42 }
        })?;
        reached |= status == 42;
        report::line(&json!({"attack": "io-uring", "case": what, "reached": status == 42}));
    }
    Ok(reached)
}

fn high_bits() -> Result<bool, Trouble> {
    let control = driver::open("nvidiactl")?;
    let mut reached = false;
    for high in [1_u64 << 32, 1 << 63, 0xffff_ffff << 32] {
        let mut block = Block::words(&[0, 0, 0, 0x41, 0, 0, 0, 0, 0, 0, 0, 0]);
        let cmd = frontend(0x2b, 48);
        let result = if direct().is_some() {
            // The kernel drops the high half before the driver sees the number.
            driver::ioctl(control.as_fd(), cmd, &mut block)
        } else {
            driver::native(control.as_raw_fd(), high | u64::from(cmd), block.address())
        };
        let errno = result.as_ref().err().and_then(std::io::Error::raw_os_error);
        let escaped = direct().is_none() && errno == Some(libc::ENOTTY);
        report::line(&json!({
            "attack": "high-bits", "case": format!("{high:#x}"), "errno": errno, "status": block.u32(40),
            "escaped": escaped, "reached": escaped || result.is_ok(),
        }));
        reached |= escaped || result.is_ok();
    }
    Ok(reached)
}

fn type_bytes() -> Result<bool, Trouble> {
    let control = driver::open("nvidiactl")?;
    let uvm = driver::open("nvidia-uvm")?;
    let mut reached = false;
    for kind in [0_u32, u32::from(b'T'), u32::from(b'G'), 0xff] {
        for direction in [0_u32, 1, 2, 3] {
            let cmd = direction << 30 | 48 << 16 | kind << 8 | 0x2b;
            let mut block = Block::words(&[0, 0, 0, 0x41, 0, 0, 0, 0, 0, 0, 0, 0]);
            reached |= case("type-bytes", "allocate a client", control.as_fd(), cmd, &mut block, Some(40));
        }
    }
    reached |= case(
        "type-bytes",
        "TUNSETDEBUG on the control node",
        control.as_fd(),
        0x4004_54c9,
        &mut Block::zeroed(4),
        None,
    );
    reached |= case("type-bytes", "FIGETBSZ on the UVM node", uvm.as_fd(), 2, &mut Block::zeroed(4), None);
    Ok(reached)
}

fn xfer() -> Result<bool, Trouble> {
    let control = driver::open("nvidiactl")?;
    let mut reached = false;
    for (what, inner, size) in [
        ("a client", 0x2b_u32, 48_u32),
        ("itself", 0xd3, 16),
        ("16 KiB", 0x2a, 16384),
        ("17 KiB", 0x2a, 17408),
    ] {
        let nested = Block(
            Block::words(&[0, 0, 0, 0x41]).0.into_iter().chain(std::iter::repeat_n(0, 20000)).collect(),
        );
        let mut block = Block::words(&[inner, size, 0, 0]);
        block.set_u64(8, nested.address());
        reached |= case("xfer", what, control.as_fd(), frontend(0xd3, 16), &mut block, None);
    }
    Ok(reached)
}

/// Commands that no tenant has any business with.
fn raw() -> Result<bool, Trouble> {
    let client = Client::new()?;
    let control = client.control.as_fd();
    let mut reached = false;
    for (what, object, cmd, size) in [
        ("disable the watchdog", client.subdevice, 0x2080_220a_u32, 0_usize),
        ("scheduling policy", client.subdevice, 0x2080_1115, 8),
        ("all channels of the card", client.subdevice, 0x2080_1119, 516),
        ("register operations", client.subdevice, 0x2080_0122, 48),
        ("flush the cache", client.subdevice, 0x2080_130e, 4024),
        ("an unknown firmware control", client.subdevice, 0x2080_8fff, 16),
        ("an unknown control", client.subdevice, 0x2080_7fff, 16),
    ] {
        let parameters = Block::zeroed(size);
        let mut block = control_block(client.handle, object, cmd, &parameters);
        reached |= case("raw", what, control, frontend(0x2a, 32), &mut block, Some(28));
    }
    for (what, class, size) in [
        ("whole card memory", 0xc2_u32, 24_usize),
        ("deferred controls", 0x5080, 4),
        ("fabric memory", 0xf8, 48),
        ("a page list", 0x82, 152),
        ("the console", 0x76, 0),
        ("no class", 0xdead, 8),
    ] {
        let parameters = Block::zeroed(size);
        let mut block =
            Block::words(&[client.handle, client.device, 0x7000_0001, class, 0, 0, 0, 0, 0, 0, 0, 0]);
        block.set_u64(16, parameters.address());
        reached |= case("raw", what, control, frontend(0x2b, 48), &mut block, Some(40));
    }
    for (what, nr, size) in [
        ("registry", 0x4d_u32, 72_usize),
        ("bus", 0x39, 32),
        ("diagnostics", 0x5f, 15412),
        ("object without class", 0x28, 20),
    ] {
        reached |= case("raw", what, control, frontend(nr, size), &mut Block::zeroed(16384), None);
    }
    Ok(reached)
}
