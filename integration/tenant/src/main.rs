//! A GPU program in small: makes the driver calls that CUDA makes, and those that an attacker would.
//!
//! Static, for a container that has nothing but busybox. Prints one JSON object a line. Exit status: 0 done as
//! asked (for attacks: every case refused), 3 the driver refused, 10 an attack got through, 2 bad usage or the
//! machine. With GPUSLICE_TENANT_DIRECT=SOCKET every driver call goes straight to an emulated driver's socket:
//! that stands for the driver under a container without gpuslice.

mod attack;
mod bytes;
mod context;
mod driver;
mod latency;
mod memory;
mod race;
mod report;
mod rm;
mod share;
mod signals;

use std::process::ExitCode;

use report::Outcome;

const USAGE: &str = "gpuslice-tenant COMMAND
  info                     cards and memory as the driver tells them
  alloc SIZE [MOST]        allocates SIZE (64K, 1M, 2G) until refused, at most MOST times
  hold SIZE SECONDS        allocates and stays
  context [run]            device, address space, channel group, channel, USERD mapping, doorbell
  contexts N               N contexts in one process
  pinned SIZE [HOLD_MS]    registers its own memory with the card
  pinned-shared SIZE       the same of shared memory that it never touched
  managed SIZE [HOLD_MS]   managed memory by mmap of nvidia-uvm
  map SIZE                 maps card memory, writes, reads, unmaps, frees
  stale SIZE               frees mapped card memory and keeps the mapping
  ipc SIZE                 exports memory to a second process
  dup SIZE                 duplicates memory into a second client
  fork-alloc SIZE          a child allocates through files it inherited
  storm N                  N allocations under a storm of signals
  latency N [CONTROL]      times driver calls and getppid: p50 and p99 in ns
  attack NAME              one of: sizes pointers files handles abi32 x32 io-uring high-bits type-bytes
                           xfer swap clone raw all";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["info"] => memory::info(),
        ["alloc", size] => memory::alloc(size, None),
        ["alloc", size, most] => memory::alloc(size, Some(most)),
        ["hold", size, seconds] => memory::hold(size, seconds),
        ["map", size] => memory::map(size),
        ["stale", size] => memory::stale(size),
        ["context"] => context::one(false),
        ["context", "run"] => context::one(true),
        ["contexts", count] => context::many(count),
        ["pinned", size] => memory::pinned(size, "0"),
        ["pinned", size, hold] => memory::pinned(size, hold),
        ["pinned-shared", size] => memory::pinned_shared(size),
        ["managed", size] => memory::managed(size, "0"),
        ["managed", size, hold] => memory::managed(size, hold),
        ["ipc", size] => share::ipc(size),
        ["dup", size] => share::dup(size),
        ["fork-alloc", size] => share::fork_alloc(size),
        ["storm", count] => signals::storm(count),
        ["latency", count] => latency::run(count, None),
        ["latency", count, control] => latency::run(count, Some(control)),
        ["attack", name] => attack::run(name),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Refused) => ExitCode::from(3),
        Ok(Outcome::Reached) => ExitCode::from(10),
        Err(error) => {
            report::failure(&error);
            ExitCode::from(2)
        }
    }
}
