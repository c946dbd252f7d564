//! What the loop does on its own: audits, pings, end of quarantines.
//!
//! A round asks the driver first and the sandboxes afterwards: a report that comes after the driver's figure
//! can be compared with it.

use std::time::Duration;

use super::{RunError, Server};
use crate::core::Verdict;
use crate::log::log;
use crate::peer::Phase;
use crate::processes::uids_in_use;

/// A driver call that takes longer marks its card unhealthy.
const DRIVER_STUCK: Duration = Duration::from_secs(10);
/// A sandbox that doesn't answer a ping for so long gets its container stopped.
const SANDBOX_SILENT: Duration = Duration::from_secs(5);
/// How soon a round follows when somebody leaves, and how many follow so fast.
const HURRY: Duration = Duration::from_millis(50);
const HURRIED_ROUNDS: u32 = 20;
/// Failed rounds in a row that make a card unhealthy.
const FAILED_ROUNDS: u32 = 3;

/// When the next round is due.
pub(super) struct Rounds {
    interval: Duration,
    next: Duration,
    hurried: u32,
    /// Failed rounds in a row, by minor number.
    failed: std::collections::BTreeMap<u32, u32>,
    /// The card of a driver call that hangs.
    stuck: Option<u32>,
}

impl Rounds {
    pub(super) fn new(interval: Duration) -> Rounds {
        Rounds { interval, next: Duration::ZERO, hurried: 0, failed: Default::default(), stuck: None }
    }

    pub(super) fn next_event(&self) -> Duration {
        self.next
    }

    /// Somebody left: ask soon, and again until the driver has let go.
    pub(super) fn hurry(&mut self, now: Duration) {
        self.hurried = HURRIED_ROUNDS;
        self.next = self.next.min(now);
    }
}

impl Server {
    /// Starts a round when one is due, and looks for what should have happened.
    pub(super) fn run_rounds(&mut self, now: Duration) {
        if now < self.rounds.next {
            return;
        }
        self.rounds.next = now + self.rounds.interval;
        if self.core.leaving() && self.rounds.hurried > 0 {
            self.rounds.hurried -= 1;
            self.rounds.next = now + HURRY.min(self.rounds.interval);
        }
        self.stop_the_silent(now);
        self.end_quarantines();
        if !self.auditor.ask(now, self.core.sandboxes()) {
            self.look_for_stuck(now);
            self.ping_all(now);
        }
    }

    fn look_for_stuck(&mut self, now: Duration) {
        let Some((began, minor)) = self.auditor.waiting() else { return };
        if now.saturating_sub(began) < DRIVER_STUCK || self.rounds.stuck == Some(minor) {
            return;
        }
        self.rounds.stuck = Some(minor);
        log!("nvidia{minor}: unhealthy: a driver call hangs");
        self.core.set_health(minor, Some(format!("a driver call is unanswered for {DRIVER_STUCK:?}")));
    }

    /// The auditor has something.
    pub(super) fn round_answered(&mut self, now: Duration) -> Result<(), RunError> {
        let Some(round) = self.auditor.take().map_err(|_| RunError::AuditorDied)? else { return Ok(()) };
        self.rounds.stuck = None;
        let mut figures = std::collections::BTreeMap::new();
        for (minor, answer) in round.cards {
            let failed = self.rounds.failed.entry(minor).or_default();
            match answer {
                Ok(card) => {
                    *failed = 0;
                    figures.insert(minor, card);
                    if self.core.set_health(minor, None) {
                        log!("nvidia{minor}: healthy again");
                    }
                }
                Err(error) => {
                    *failed = failed.saturating_add(1);
                    if *failed == 1 {
                        log!("nvidia{minor}: audit failed: {error}");
                    }
                    if *failed >= FAILED_ROUNDS && self.core.set_health(minor, Some(error)) {
                        log!("nvidia{minor}: unhealthy after {FAILED_ROUNDS} failed audits");
                    }
                }
            }
        }
        let verdicts = self.core.audited(&round.asked, &figures);
        self.carry_out(verdicts);
        self.ping_all(now);
        Ok(())
    }

    pub(super) fn carry_out(&mut self, verdicts: Vec<Verdict>) {
        for verdict in verdicts {
            match verdict {
                Verdict::Stop { lease, detail } => self.stop(lease, &detail),
                Verdict::Note { detail } => log!("{detail}"),
                Verdict::Freed { lease } => log!("lease {lease}: freed"),
            }
        }
    }

    fn ping_all(&mut self, now: Duration) {
        let tokens: Vec<_> = self.sessions.values().copied().collect();
        for token in tokens {
            let pinged = self.peers.get_mut(&token).map_or(Ok(()), |peer| peer.ping(now));
            if let Err(ended) = pinged {
                self.close(token, &ended, now);
            }
        }
    }

    fn stop_the_silent(&mut self, now: Duration) {
        let silent = |phase: &Phase| match phase {
            Phase::Sandbox(session) => session
                .pinged
                .filter(|pinged| now.saturating_sub(*pinged) >= SANDBOX_SILENT)
                .map(|_| session.lease),
            Phase::New | Phase::Held(_) | Phase::Shim(_) | Phase::Closing => None,
        };
        let leases: Vec<_> = self.peers.values().filter_map(|peer| silent(&peer.phase)).collect();
        for lease in leases {
            self.stop(lease, &format!("its sandbox didn't answer for {SANDBOX_SILENT:?}"));
        }
    }

    fn end_quarantines(&mut self) {
        let quarantined = self.core.quarantined();
        if quarantined.is_empty() {
            return;
        }
        let in_use = uids_in_use(self.uids);
        for uid in quarantined.into_iter().filter(|uid| !in_use.contains_key(uid)) {
            self.core.end_quarantine(uid);
        }
    }
}
