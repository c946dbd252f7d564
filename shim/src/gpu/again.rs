//! Dialling a scheduler that was started anew.
//!
//! Owns: nothing but the try. Promises: tries until the container ends or is adopted under the lease and uid that it
//! has; a refusal for good is a reason to kill it, for nobody accounts for it any more.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Weak;
use std::time::Duration;

use gpuslice_proto::{Lease, Reason, Register};

use super::control::{Handle, Order};
use super::reserve::Reserved;
use super::scheduler::{self, Connection, SchedulerError};
use crate::report;

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The new connections.
#[derive(Debug)]
pub(crate) struct Adopted {
    pub(crate) connection: Connection,
    pub(crate) sandbox: OwnedFd,
}

/// What the new scheduler is told.
pub(crate) struct Again {
    name: String,
    path: PathBuf,
    patience: Duration,
    register: Register,
    lease: Lease,
    pidfd: OwnedFd,
}

impl Again {
    /// From a running container and its sandbox's pidfd.
    ///
    /// # Errors
    /// No file could be had.
    pub(crate) fn of(reserved: &Reserved, sandbox: BorrowedFd<'_>) -> io::Result<Again> {
        Ok(Again {
            name: reserved.name.clone(),
            path: reserved.scheduler_path.clone(),
            patience: reserved.patience,
            register: Register { adopt: Some(reserved.lease), ..reserved.register.clone() },
            lease: reserved.lease,
            pidfd: sandbox.try_clone_to_owned()?,
        })
    }

    /// Tries until it is adopted, refused for good, or nobody listens to the result any more.
    pub(crate) fn dial(&self, handle: &Weak<Handle>) {
        let mut pause = FIRST_PAUSE;
        loop {
            std::thread::sleep(pause);
            if handle.strong_count() == 0 {
                return;
            }
            let order = match self.once() {
                Ok(adopted) => Order::Adopted(adopted),
                Err(error) if for_good(&error) => {
                    Order::Kill(format!("not adopted by the new scheduler: {}", report::chain(&error)))
                }
                Err(error) => {
                    if pause < LONGEST_PAUSE && pause * 2 >= LONGEST_PAUSE {
                        report::log(
                            &self.name,
                            &format!("still without a scheduler: {}", report::chain(&error)),
                        );
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    continue;
                }
            };
            if let Some(handle) = handle.upgrade() {
                handle.send(order);
            }
            return;
        }
    }

    fn once(&self) -> Result<Adopted, SchedulerError> {
        let mut connection = Connection::open(&self.path, self.patience)?;
        let lease = connection.register(self.register.clone())?;
        if (lease.lease, lease.uid) != (self.lease.lease, self.lease.uid) {
            return Err(SchedulerError::Stopped {
                detail: format!(
                    "lease {} with uid {} became {} with {}",
                    self.lease.lease, self.lease.uid, lease.lease, lease.uid
                ),
            });
        }
        connection.announce(self.lease.sandbox_pid, self.pidfd.as_fd())?;
        let sandbox = scheduler::open_for_sandbox(&self.path, lease.lease, self.patience)?;
        Ok(Adopted { connection, sandbox })
    }
}

/// Whether trying again is of no use. A duplicate is this container's own old connection; it goes.
fn for_good(error: &SchedulerError) -> bool {
    match error {
        SchedulerError::Refused { reason, .. } => !matches!(reason, Reason::Duplicate | Reason::Stopping),
        SchedulerError::Stopped { .. } => true,
        _ => false,
    }
}
