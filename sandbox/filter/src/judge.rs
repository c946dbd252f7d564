//! The judgement of the programs that a created container really carries.
//!
//! Owns: the promises that a container's filter must keep. Trusts nothing in the programs: they are read from
//! the kernel, and made by a runtime and a library that are known to drop rules without an error.
//! Promises: exact over all 2^32 ioctl commands, every high word and every value of the other arguments; a
//! program that can't be followed keeps no promise. Failure: a [`Hole`]; the container must not start.

use gpuslice_sys::Instruction;

use crate::cube::Cube;
use crate::dispatch::trapped;
use crate::interpret::{Action, Call, NATIVE_ARCH};
use crate::profile::SHARED_FILE;
use crate::symbolic::{ARCH, Calls, NR, Unclear, follow, low_word};

/// What kind of container the programs are judged for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// It was granted a GPU: the driver's commands and shared file mappings go to its sandbox.
    Notify,
    /// It was not: the driver's commands fail.
    Errno,
}

/// A promise that no program of the container keeps.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Hole {
    /// There is no program.
    #[error(
        "the container's first process carries no seccomp filter; the runtime must be built with seccomp"
    )]
    NoFilter,
    /// Calls that must not get through do.
    #[error(
        "the compiled seccomp filter lets {what} through ({action:?}): call {}, architecture {:#x}, arguments {:x?}, from {:#x}",
        .call.nr, .call.arch, .call.args, .call.instruction_pointer
    )]
    Open {
        /// What the calls do.
        what: &'static str,
        /// What the filter does with them.
        action: Action,
        /// An example.
        call: Call,
    },
    /// The program can't be judged.
    #[error("the compiled seccomp filter can't be judged for {what}: {reason}")]
    Unclear {
        /// The promise that was looked at.
        what: &'static str,
        /// Why.
        reason: String,
    },
}

impl Hole {
    /// The call that gets through.
    pub fn example(&self) -> Option<Call> {
        match self {
            Hole::Open { call, .. } => Some(*call),
            Hole::NoFilter | Hole::Unclear { .. } => None,
        }
    }
}

const MMAP: u32 = 9;
const IOCTL: u32 = 16;
const REMAP_FILE_PAGES: u32 = 216;
const IO_URING: [u32; 3] = [425, 426, 427];
/// Bit 30 of the number: an x32 call.
const X32: Cube = Cube::new(0x4000_0000, 0x4000_0000);
/// The number that is no call at all, in no architecture.
const NO_CALL: u32 = u32::MAX;

/// Calls that must not get through, but for some values of one word.
struct Promise {
    what: &'static str,
    calls: Calls,
    /// The word, and the values of it for which anything may happen.
    except: (usize, &'static [u32]),
}

/// Judges the programs of one process, which all apply at once.
///
/// # Errors
/// Which promise no program keeps, with an example.
pub fn judge(programs: &[Vec<Instruction>], kind: Kind) -> Result<(), Hole> {
    if programs.is_empty() {
        return Err(Hole::NoFilter);
    }
    for promise in promises(kind) {
        let mut first = None;
        let kept = programs.iter().any(|program| match keeps(program, &promise) {
            Ok(()) => true,
            Err(hole) => {
                first.get_or_insert(hole);
                false
            }
        });
        if let (false, Some(hole)) = (kept, first) {
            return Err(hole);
        }
    }
    Ok(())
}

fn promises(kind: Kind) -> Vec<Promise> {
    const NOTHING: (usize, &[u32]) = (NR, &[]);
    let native = Calls::default().with(ARCH, vec![Cube::word(NATIVE_ARCH)]);
    let call =
        |numbers: &[u32]| native.clone().with(NR, numbers.iter().map(|number| Cube::word(*number)).collect());
    let mut foreign = Vec::new();
    Cube::ALL.without(Cube::word(NATIVE_ARCH), |cube| foreign.push(cube));
    let mut promises = vec![
        Promise {
            what: "an ioctl that the NVIDIA driver acts on",
            calls: call(&[IOCTL]).with(low_word(1), trapped()),
            except: (low_word(1), gpuslice_policy::harmless()),
        },
        Promise {
            what: "a call of another architecture",
            calls: Calls::default().with(ARCH, foreign),
            except: NOTHING,
        },
        Promise { what: "an x32 call", calls: native.clone().with(NR, vec![X32]), except: (NR, &[NO_CALL]) },
        Promise { what: "io_uring", calls: call(&IO_URING), except: NOTHING },
    ];
    if kind == Kind::Notify {
        let shared = call(&[MMAP]).with(low_word(3), vec![SHARED_FILE]);
        promises.push(Promise { what: "a shared file mapping", calls: shared, except: NOTHING });
        let remap = call(&[REMAP_FILE_PAGES]);
        promises.push(Promise { what: "remap_file_pages", calls: remap, except: NOTHING });
    }
    promises
}

fn keeps(program: &[Instruction], promise: &Promise) -> Result<(), Hole> {
    let (word, values) = promise.except;
    let points: Vec<Cube> = values.iter().map(|value| Cube::word(*value)).collect();
    let mut hole = None;
    let result = follow(program, promise.calls.clone(), |calls, action| {
        if hole.is_some() || !action.lets_through() {
            return;
        }
        let rest = calls.word(word).iter().find_map(|cube| cube.without_all(&points).first().copied());
        hole = rest.map(|value| Hole::Open { what: promise.what, action, call: calls.example(word, value) });
    });
    match (result, hole) {
        (_, Some(hole)) => Err(hole),
        (Err(reason), None) => Err(unclear(promise.what, reason)),
        (Ok(()), None) => Ok(()),
    }
}

fn unclear(what: &'static str, reason: Unclear) -> Hole {
    Hole::Unclear { what, reason: reason.to_string() }
}

#[cfg(test)]
mod tests;
