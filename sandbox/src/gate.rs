//! A value that threads wait for.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Closed until [`Gate::open`] puts a value behind it.
#[derive(Debug)]
pub(crate) struct Gate<T> {
    value: Mutex<Option<T>>,
    opened: Condvar,
}

impl<T: Clone> Gate<T> {
    pub(crate) fn new() -> Self {
        Gate { value: Mutex::new(None), opened: Condvar::new() }
    }

    /// Blocks until the gate is open.
    pub(crate) fn wait(&self) -> T {
        let mut value = locked(&self.value);
        loop {
            if let Some(value) = &*value {
                return value.clone();
            }
            value = self.opened.wait(value).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Opens the gate; false if it was open.
    pub(crate) fn open(&self, value: T) -> bool {
        let mut held = locked(&self.value);
        if held.is_some() {
            return false;
        }
        *held = Some(value);
        self.opened.notify_all();
        true
    }
}

/// Locks `mutex`. A poisoned one can't be met: a panic ends the process (tests excepted).
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Blocks for ever: for a thread that has nothing left to do. Threads don't end in a confined process.
pub(crate) fn rest() -> ! {
    loop {
        std::thread::park();
    }
}
