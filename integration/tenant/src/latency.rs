//! How long a driver call takes, seen from the program that makes it.

use std::os::fd::AsFd;
use std::time::Instant;

use serde_json::json;

use crate::bytes::Block;
use crate::driver::{self, Trouble, frontend};
use crate::memory::number;
use crate::report::{self, Outcome};
use crate::rm::{Client, control_block};

fn percentile(sorted: &[u64], part: usize) -> u64 {
    sorted.get(sorted.len().saturating_mul(part) / 1000).or(sorted.last()).copied().unwrap_or(0)
}

fn measure(name: &str, count: usize, mut call: impl FnMut() -> bool) {
    let mut times = Vec::with_capacity(count);
    let mut failed = 0_u64;
    for round in 0..count.saturating_add(count / 10) {
        let start = Instant::now();
        let done = call();
        let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // The first tenth warms up.
        if round >= count / 10 {
            times.push(took);
            failed = failed.saturating_add(u64::from(!done));
        }
    }
    times.sort_unstable();
    report::line(&json!({
        "ok": failed == 0, "case": name, "n": times.len(), "p50_ns": percentile(&times, 500),
        "p90_ns": percentile(&times, 900), "p99_ns": percentile(&times, 990), "failed": failed,
    }));
}

/// `latency`: getppid, NV_ESC_SYS_PARAMS, NV_ESC_CHECK_VERSION_STR, a control (0x214 or the one named).
pub(crate) fn run(count: &str, control: Option<&str>) -> Result<Outcome, Trouble> {
    let count = usize::try_from(number(count)?).map_err(|_| Trouble::Machine("too many".to_owned()))?;
    measure("clock", count, || true);
    // SAFETY: getppid takes nothing and always succeeds.
    measure("getppid", count, || unsafe { libc::syscall(libc::SYS_getppid) } >= 0);
    let client = Client::new()?;
    let mut system = Block::zeroed(8);
    system.set_u64(0, 0x4000_0000);
    measure("sys_params", count, || {
        driver::ioctl(client.control.as_fd(), frontend(0xd6, 8), &mut system).is_ok()
    });
    let mut version = Block::zeroed(72);
    version.set_u32(0, u32::from(b'2'));
    measure("check_version", count, || {
        driver::ioctl(client.control.as_fd(), frontend(0xd2, 72), &mut version).is_ok()
    });
    let (cmd, size) = match control {
        None => (0x214, 384),
        Some("0x20801303") => (0x2080_1303, 1028),
        Some(other) => return Err(Trouble::Machine(format!("no size known for control {other}"))),
    };
    let object = if cmd == 0x214 { client.handle } else { client.subdevice };
    let mut parameters = Block::zeroed(size);
    if cmd == 0x2080_1303 {
        parameters.set_u32(0, 1);
        parameters.set_u32(4, 8);
    }
    let mut block = control_block(client.handle, object, cmd, &parameters);
    measure(&format!("control_{cmd:#x}"), count, || {
        driver::ioctl(client.control.as_fd(), frontend(0x2a, 32), &mut block).is_ok() && block.u32(28) == 0
    });
    Ok(Outcome::Done)
}
