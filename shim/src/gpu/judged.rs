//! The judgement of the seccomp programs that a process really carries.
//!
//! Owns: reading them, and the node's memory of programs that passed (`judged/` in the run directory). Trusts:
//! what this very shim binary judged before; a file's whole content is compared, never a hash alone. Promises:
//! no process of a container goes on with a program in which a hole was found. Failure: an error, and the
//! container does not start; not being able to remember costs time only.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use gpuslice_filter::{Hole, Kind, judge};
use gpuslice_sys::{Instruction, process};

/// Most programs remembered on a node.
const MOST_REMEMBERED: usize = 256;

/// Why a process may not go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JudgeError {
    #[error("can't read the seccomp programs of process {pid}")]
    Read { pid: u32, source: std::io::Error },
    #[error("process {pid} is not confined as it must be")]
    Hole { pid: u32, source: Hole },
    #[error("process {pid} of an exec doesn't carry the seccomp program of the container's first process")]
    Differs { pid: u32 },
}

/// Programs of a container's first process, which passed.
#[derive(Clone, Debug)]
pub(crate) struct Passed(Vec<Vec<Instruction>>);

/// Judges the programs of a created container's first process.
///
/// # Errors
/// [`JudgeError`].
pub(crate) fn judge_init(pid: u32, kind: Kind, run_dir: &Path) -> Result<Passed, JudgeError> {
    let programs = process::program_of(pid).map_err(|source| JudgeError::Read { pid, source })?;
    let memory = Memory::of(run_dir, kind, &programs);
    if !memory.as_ref().is_some_and(Memory::knows) {
        judge(&programs, kind).map_err(|source| JudgeError::Hole { pid, source })?;
        if let Some(memory) = memory {
            memory.keep();
        }
    }
    Ok(Passed(programs))
}

impl Passed {
    /// Checks that an exec'ed process runs under the same programs; it may have added some of its own. A process
    /// that has ended is no error.
    ///
    /// # Errors
    /// [`JudgeError::Read`] or [`JudgeError::Differs`].
    pub(crate) fn check_exec(&self, pid: u32) -> Result<(), JudgeError> {
        let programs = match process::program_of(pid) {
            Ok(programs) => programs,
            Err(_) if ended(pid) => return Ok(()),
            Err(source) => return Err(JudgeError::Read { pid, source }),
        };
        if self.0.iter().all(|program| programs.contains(program)) {
            Ok(())
        } else {
            Err(JudgeError::Differs { pid })
        }
    }
}

/// Whether a process is gone, or waits to be collected: then it can't be traced any more.
fn ended(pid: u32) -> bool {
    // The state follows the name, which may hold any character.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// The place of one set of programs in the node's memory.
struct Memory {
    path: PathBuf,
    content: Vec<u8>,
}

impl Memory {
    fn of(run_dir: &Path, kind: Kind, programs: &[Vec<Instruction>]) -> Option<Memory> {
        // The verdict is this binary's: another build may know other commands.
        let build = fs::metadata("/proc/self/exe").ok()?;
        let mut content = Vec::new();
        let mut number = |value: u64| content.extend_from_slice(&value.to_le_bytes());
        number(build.dev());
        number(build.ino());
        number(build.size());
        number(build.mtime().cast_unsigned());
        number(build.mtime_nsec().cast_unsigned());
        number(u64::from(kind == Kind::Notify));
        for program in programs {
            number(u64::try_from(program.len()).ok()?);
            for instruction in program {
                number(
                    u64::from(instruction.code) << 48
                        | u64::from(instruction.jt) << 40
                        | u64::from(instruction.jf) << 32
                        | u64::from(instruction.k),
                );
            }
        }
        let mut hasher = DefaultHasher::new();
        content.hash(&mut hasher);
        let path = run_dir.join("judged").join(format!("{:016x}", hasher.finish()));
        Some(Memory { path, content })
    }

    fn knows(&self) -> bool {
        fs::read(&self.path).is_ok_and(|content| content == self.content)
    }

    fn keep(&self) {
        let Some(folder) = self.path.parent() else { return };
        match fs::DirBuilder::new().recursive(true).mode(0o700).create(folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return,
            _ => {}
        }
        if fs::read_dir(folder).map_or(MOST_REMEMBERED, Iterator::count) >= MOST_REMEMBERED {
            return;
        }
        // Replaced as a whole; half a file would merely not compare equal.
        let fresh = self.path.with_extension(std::process::id().to_string());
        if fs::write(&fresh, &self.content).and_then(|()| fs::rename(&fresh, &self.path)).is_err() {
            drop(fs::remove_file(&fresh));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_remembered_by_its_whole_content_and_kind() {
        let folder = tempfile::tempdir().unwrap();
        let program = vec![vec![Instruction { code: 6, jt: 0, jf: 0, k: 0x7fff_0000 }]];
        let memory = |kind| Memory::of(folder.path(), kind, &program).unwrap();
        assert!(!memory(Kind::Notify).knows());
        memory(Kind::Notify).keep();
        assert!(memory(Kind::Notify).knows());
        assert!(!memory(Kind::Errno).knows());
        let other = vec![vec![Instruction { code: 6, jt: 0, jf: 0, k: 0x7fff_0001 }]];
        let other = Memory::of(folder.path(), Kind::Notify, &other).unwrap();
        assert!(!other.knows());
        fs::copy(memory(Kind::Notify).path, &other.path).unwrap();
        assert!(!other.knows(), "another program's file in the place of this one");
    }

    #[test]
    fn a_process_without_a_filter_is_a_hole() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("10").spawn().unwrap();
        let verdict = judge_init(child.id(), Kind::Errno, folder.path());
        child.kill().unwrap();
        // Not collected yet, and then gone: both are no error of an exec.
        let begun = std::time::Instant::now();
        while !ended(child.id()) && begun.elapsed().as_secs() < 5 {}
        let passed = Passed(vec![vec![Instruction::default()]]);
        passed.check_exec(child.id()).unwrap();
        child.wait().unwrap();
        passed.check_exec(child.id()).unwrap();
        assert!(matches!(verdict, Err(JudgeError::Hole { source: Hole::NoFilter, .. })), "{verdict:?}");
    }
}
