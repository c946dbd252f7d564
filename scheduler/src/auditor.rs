//! The one thread that asks a backend.
//!
//! A driver call can hang: it must not take the poll loop with it. The loop asks, the thread answers card by
//! card and wakes the loop through a pipe; a card that is asked and never answers is known by its number.
//! Ends when the loop drops its side, or with the process if it hangs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use nix::fcntl::OFlag;

use crate::backend::{Backend, Holding};
use crate::log::chain;

/// The driver's answer about one card.
pub(crate) type CardFigures = Result<BTreeMap<u32, Holding>, String>;

/// A round of questions that was answered.
#[derive(Debug)]
pub(crate) struct Round {
    /// When it was asked for.
    pub(crate) began: Duration,
    /// The sandboxes it asked about.
    pub(crate) asked: Vec<u32>,
    /// By minor number.
    pub(crate) cards: BTreeMap<u32, CardFigures>,
}

/// A round that is under way.
struct Pending {
    round: Round,
    /// Cards not answered yet, in the order in which they are asked.
    left: Vec<u32>,
}

/// The loop's side of the thread.
pub(crate) struct Auditor {
    minors: Vec<u32>,
    questions: SyncSender<Vec<u32>>,
    answers: Receiver<(u32, CardFigures)>,
    wake: File,
    pending: Option<Pending>,
}

impl Auditor {
    /// Starts the thread.
    pub(crate) fn start(mut backend: Box<dyn Backend>) -> io::Result<Auditor> {
        let minors: Vec<u32> = backend.cards().iter().map(|card| card.minor).collect();
        let (questions, asked) = sync_channel::<Vec<u32>>(1);
        let (answer, answers) = sync_channel(minors.len().max(1));
        let (wake, bell) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let mut bell = File::from(bell);
        let cards = minors.clone();
        std::thread::Builder::new().name("auditor".into()).spawn(move || {
            while let Ok(sandboxes) = asked.recv() {
                for minor in &cards {
                    let figures = backend.audit(*minor, &sandboxes).map_err(|error| chain(&error));
                    if answer.send((*minor, figures)).is_err() {
                        return;
                    }
                    // A full pipe wakes the loop as well.
                    bell.write_all(&[1]).ok();
                }
            }
        })?;
        Ok(Auditor { minors, questions, answers, wake: File::from(wake), pending: None })
    }

    /// Becomes readable when there is an answer.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Asks for a round, unless one is under way.
    pub(crate) fn ask(&mut self, now: Duration, sandboxes: Vec<u32>) -> bool {
        if self.pending.is_some() || self.questions.try_send(sandboxes.clone()).is_err() {
            return false;
        }
        let round = Round { began: now, asked: sandboxes, cards: BTreeMap::new() };
        self.pending = Some(Pending { round, left: self.minors.clone() });
        true
    }

    /// When the round under way was asked for, and the card that it waits for.
    pub(crate) fn waiting(&self) -> Option<(Duration, u32)> {
        let pending = self.pending.as_ref()?;
        pending.left.first().map(|minor| (pending.round.began, *minor))
    }

    /// Takes the answers that have come; the round when it is complete. `Err`: the thread died.
    pub(crate) fn take(&mut self) -> Result<Option<Round>, AuditorDied> {
        let mut buffer = [0; 64];
        while self.wake.read(&mut buffer).is_ok_and(|count| count > 0) {}
        loop {
            match self.answers.try_recv() {
                Ok((minor, figures)) => {
                    let Some(pending) = &mut self.pending else { continue };
                    pending.left.retain(|left| *left != minor);
                    pending.round.cards.insert(minor, figures);
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(AuditorDied),
            }
        }
        let complete = self.pending.as_ref().is_some_and(|pending| pending.left.is_empty());
        Ok(if complete { self.pending.take().map(|pending| pending.round) } else { None })
    }
}

/// The thread panicked: the process ends, and systemd starts the next one.
#[derive(Debug, thiserror::Error)]
#[error("the audit thread died")]
pub(crate) struct AuditorDied;
