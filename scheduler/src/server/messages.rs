//! What each message does.

use std::os::fd::OwnedFd;
use std::time::Duration;

use gpuslice_proto::{
    LeaseId, Reason, Register, SandboxToScheduler, SchedulerToShim, SchedulerToTool, ShimToScheduler,
    ToolToScheduler,
};

use super::{Server, Token};
use crate::core::Refusal;
use crate::log::log;
use crate::peer::{Ended, Message, Phase, Shim};
use crate::processes::check_sandbox;

/// A sandbox is started and confined between the lease and its announcement: several steps, one deadline.
const ANNOUNCE_STEPS: u32 = 5;

impl Server {
    /// Deals with one message. An error closes the connection.
    pub(super) fn message(&mut self, token: Token, message: Message, now: Duration) -> Result<(), Ended> {
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        let done = match (&mut peer.phase, message) {
            (Phase::New, Message::Shim(ShimToScheduler::Register(register), _)) => {
                if register.adopt.is_none() && self.settling(now) {
                    self.hold(token, register);
                    return Ok(());
                }
                self.register(token, register, now)
            }
            (Phase::New, Message::Shim(ShimToScheduler::OpenSandbox { lease }, _)) => {
                self.open_sandbox(token, lease, now)
            }
            (Phase::New, Message::Tool(ToolToScheduler::Status)) => return self.status(token, now),
            (Phase::Shim(shim), Message::Shim(ShimToScheduler::SandboxStarted { pid }, Some(file))) => {
                let lease = shim.lease;
                self.started(token, lease, pid, file)
            }
            (
                Phase::Sandbox(session),
                Message::Sandbox(SandboxToScheduler::Usage { ping, gpus, refused }),
            ) => {
                let lease = session.lease;
                let answer = session.answered(ping);
                if ping != 0 && !answer {
                    return Err(Ended::Misbehaved(format!("answers ping {ping}, which wasn't sent")));
                }
                let verdicts = self.core.usage(lease, gpus, refused, answer);
                return match verdicts {
                    Ok(verdicts) => {
                        self.carry_out(verdicts);
                        Ok(())
                    }
                    Err(refusal) => Err(Ended::Misbehaved(refusal.detail)),
                };
            }
            (_, message) => Err(Refusal::new(Reason::OutOfOrder, format!("not legal now: {message:.80?}"))),
        };
        if let Err(Refusal { reason, detail }) = done {
            self.refuse(token, reason, detail, now);
        }
        Ok(())
    }

    /// Containers of before a restart may still come.
    fn settling(&self, now: Duration) -> bool {
        now < self.settled_at && !self.core.quarantined().is_empty()
    }

    fn hold(&mut self, token: Token, register: Register) {
        if let Some(peer) = self.peers.get_mut(&token) {
            peer.phase = Phase::Held(register);
            peer.due = None;
        }
    }

    /// Answers those that were held, once everybody of before is back or had time enough.
    pub(super) fn release_held(&mut self, now: Duration) {
        if self.settling(now) {
            return;
        }
        let held = |phase: &Phase| matches!(phase, Phase::Held(_));
        let tokens: Vec<Token> =
            self.peers.iter().filter(|(_, peer)| held(&peer.phase)).map(|(token, _)| *token).collect();
        for token in tokens {
            let Some(peer) = self.peers.get_mut(&token) else { continue };
            if let Phase::Held(register) = std::mem::replace(&mut peer.phase, Phase::New)
                && let Err(Refusal { reason, detail }) = self.register(token, register, now)
            {
                self.refuse(token, reason, detail, now);
            }
        }
    }

    fn register(&mut self, token: Token, register: Register, now: Duration) -> Result<(), Refusal> {
        let lease = self.core.register(&register)?;
        let how = if register.adopt.is_some() { "adopted" } else { "granted" };
        log!("lease {}: {how} to {}, uid {}", lease.lease, register.container, lease.uid);
        self.shims.insert(lease.lease, token);
        // The container came back before its old sandbox was seen to end: its new connection watches it.
        self.orphans.remove(&lease.lease);
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        peer.phase =
            Phase::Shim(Shim { lease: lease.lease, sandbox: None, announced: false, stopped: false });
        peer.due = Some((now + self.deadline * ANNOUNCE_STEPS, "announcement of a sandbox"));
        if let Err(ended) = peer.tell_shim(&SchedulerToShim::Granted(lease)) {
            self.close(token, &ended, now);
        }
        Ok(())
    }

    /// The same announcement may come many times: each is answered.
    fn started(&mut self, token: Token, lease: LeaseId, pid: u32, file: OwnedFd) -> Result<(), Refusal> {
        let uid = self.core.uid(lease)?;
        check_sandbox(&file, pid, uid).map_err(|detail| Refusal::new(Reason::NoLease, detail))?;
        self.core.started(lease, pid)?;
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        if let Phase::Shim(shim) = &mut peer.phase
            && !shim.announced
        {
            log!("lease {lease}: sandbox is pid {pid}");
            shim.announced = true;
            shim.sandbox = Some(file);
        }
        peer.due = None;
        // A shim that can't take the answer asks again, or is closed.
        peer.tell_shim(&SchedulerToShim::Acknowledged).ok();
        Ok(())
    }

    fn open_sandbox(&mut self, token: Token, lease: LeaseId, now: Duration) -> Result<(), Refusal> {
        self.core.active(lease)?;
        let owner = self.shims.get(&lease).and_then(|shim| self.peers.get(shim)).map(|peer| peer.pid);
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        if owner != Some(peer.pid) {
            return Err(Refusal::new(
                Reason::NoLease,
                format!(
                    "process {} opens a session for lease {lease}, which another process registered",
                    peer.pid
                ),
            ));
        }
        if let Err(ended) = peer.tell_shim(&SchedulerToShim::Acknowledged) {
            self.close(token, &ended, now);
            return Ok(());
        }
        peer.become_sandbox(lease, now);
        // Behind the answer: the shim reads that alone, the sandbox reads this.
        let pinged = peer.ping(now);
        if let Some(old) = self.sessions.insert(lease, token) {
            self.peers.remove(&old);
        }
        if let Err(ended) = pinged {
            self.close(token, &ended, now);
        }
        Ok(())
    }

    fn status(&mut self, token: Token, now: Duration) -> Result<(), Ended> {
        let (gpus, tenants) = self.core.status();
        let end = SchedulerToTool::End { driver: self.core.driver().to_owned(), uptime: now.as_secs() };
        let rows = gpus.into_iter().map(SchedulerToTool::Gpu);
        let rows = rows.chain(tenants.into_iter().map(SchedulerToTool::Tenant)).chain([end]);
        let deadline = self.deadline;
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        for row in rows {
            peer.tell_tool(&row)?;
        }
        peer.finish(now + deadline);
        Ok(())
    }
}
