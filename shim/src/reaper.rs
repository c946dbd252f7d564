//! The one place where children are collected.
//!
//! Owns: the exit of every child of this process, its own and those that it inherits as subreaper. Promises:
//! each exit is given once, to whoever claimed the pid, also when the process ended before the claim as long
//! as a [`Hold`] was alive; exits that nobody asked for are dropped. Looks before it takes (`WNOWAIT`), and
//! only at exits, so a tracer's stops stay the tracer's. Sleeps until SIGCHLD; never polls.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::spawn::Program;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exit {
    /// Exit code, or 128 and the signal.
    pub(crate) status: u32,
    /// When it was seen.
    pub(crate) at: SystemTime,
}

/// A child that the reaper knows.
pub(crate) struct Child {
    /// Its pid, which stays its own until the exit was collected.
    pub(crate) pid: Pid,
    /// Its exit.
    pub(crate) exit: oneshot::Receiver<Exit>,
}

#[derive(Default)]
struct Known {
    claimed: HashMap<Pid, oneshot::Sender<Exit>>,
    unclaimed: HashMap<Pid, Exit>,
    holds: usize,
}

/// Handle to the reaper; clones share it.
#[derive(Clone, Default)]
pub(crate) struct Reaper {
    known: Arc<Mutex<Known>>,
}

/// While one of these lives, exits of unknown children are kept: their pids may yet be claimed.
pub(crate) struct Hold {
    reaper: Reaper,
}

impl Reaper {
    /// Starts collecting, in a task of the current runtime.
    pub(crate) fn start() -> io::Result<Reaper> {
        let mut children = signal(SignalKind::child())?;
        let reaper = Reaper::default();
        let collector = reaper.clone();
        tokio::spawn(async move {
            loop {
                collector.collect();
                if children.recv().await.is_none() {
                    break;
                }
            }
        });
        Ok(reaper)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes every exit that is there.
    fn collect(&self) {
        loop {
            let peek = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            let pid = match waitid(Id::All, peek) {
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) => pid,
                Err(nix::errno::Errno::EINTR) => continue,
                Ok(_) | Err(_) => return,
            };
            // Lock before the pid is given back to the kernel: a start in another thread may get it again.
            let mut known = self.known();
            let status = match waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(_, code)) => u32::try_from(code).unwrap_or(255),
                Ok(WaitStatus::Signaled(_, signal, _)) => {
                    128_u32.saturating_add(u32::try_from(signal as i32).unwrap_or(0))
                }
                Ok(_) | Err(_) => continue,
            };
            let exit = Exit { status, at: SystemTime::now() };
            match known.claimed.remove(&pid) {
                Some(owner) => drop(owner.send(exit)),
                None if known.holds > 0 => drop(known.unclaimed.insert(pid, exit)),
                None => {}
            }
        }
    }

    /// Starts a program whose exit is claimed from the first moment.
    pub(crate) fn spawn(&self, program: &Program<'_>) -> io::Result<Child> {
        let mut known = self.known();
        let pid = program.start()?;
        let (owner, exit) = oneshot::channel();
        known.claimed.insert(pid, owner);
        Ok(Child { pid, exit })
    }

    /// Keeps the exits of unknown children while it lives.
    pub(crate) fn hold(&self) -> Hold {
        let mut known = self.known();
        known.holds = known.holds.saturating_add(1);
        Hold { reaper: self.clone() }
    }

    /// The exit of a process that somebody else started and this process inherits. Needs a [`Hold`] taken
    /// before the process could end.
    pub(crate) fn claim(&self, pid: Pid, _hold: &Hold) -> Child {
        let mut known = self.known();
        let (owner, exit) = oneshot::channel();
        match known.unclaimed.remove(&pid) {
            Some(seen) => drop(owner.send(seen)),
            None => drop(known.claimed.insert(pid, owner)),
        }
        Child { pid, exit }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut known = self.reaper.known();
        known.holds = known.holds.saturating_sub(1);
        if known.holds == 0 {
            known.unclaimed.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::fd::AsFd;

    fn shell(reaper: &Reaper, script: &str) -> Child {
        let null = std::fs::File::open("/dev/null").unwrap();
        let arguments = ["sh", "-c", script].map(|word| CString::new(word).unwrap()).to_vec();
        let program = Program {
            path: c"/bin/sh".into(),
            arguments,
            environment: &[],
            files: vec![null.as_fd(), null.as_fd(), null.as_fd()],
        };
        reaper.spawn(&program).unwrap()
    }

    /// A reaper takes every child, also those of other tests: this one runs in a process of its own.
    #[test]
    fn exits_reach_their_owners_with_code_and_signal() {
        let me = std::env::current_exe().unwrap();
        let name = "reaper::tests::exits_in_a_process_of_their_own";
        let ran = std::process::Command::new(me).args(["--exact", name, "--ignored"]).output().unwrap();
        let text = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && text.contains("1 passed"), "{text}");
    }

    #[tokio::test]
    #[ignore = "run by the test above, in a process of its own"]
    async fn exits_in_a_process_of_their_own() {
        nix::sys::prctl::set_child_subreaper(true).unwrap();
        let reaper = Reaper::start().unwrap();
        let coded = shell(&reaper, "exit 7");
        let killed = shell(&reaper, "kill -9 $$");
        assert_eq!(coded.exit.await.unwrap().status, 7);
        assert_eq!(killed.exit.await.unwrap().status, 137);

        // An inherited process that ends before anybody knows its pid.
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        let hold = reaper.hold();
        let parent =
            shell(&reaper, &format!("sh -c 'echo $$ > {0}; exit 5' & exec sleep 0.2", file.display()));
        parent.exit.await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        let pid: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        let orphan = reaper.claim(Pid::from_raw(pid), &hold);
        let exit = tokio::time::timeout(std::time::Duration::from_secs(5), orphan.exit).await;
        assert_eq!(exit.unwrap().unwrap().status, 5);
    }
}
