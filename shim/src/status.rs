//! The only map from this shim's errors to the codes that containerd acts on.
//!
//! containerd decides by code and by a few texts: NotFound for what is gone, AlreadyExists for an id in use,
//! FailedPrecondition for the wrong state. Everything else is Unknown, as from containerd's own shim, with the
//! whole chain of causes as text.

use containerd_shim_protos::ttrpc::{self, Code, get_status};

use crate::bundle::BundleError;
use crate::cgroup::CgroupError;
use crate::gpu::GpuError;
use crate::io::IoError;
use crate::mounts::MountError;
use crate::options::OptionsError;
use crate::report::chain;
use crate::runc::RuncError;

/// Why a task request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TaskError {
    #[error("container {id} not found: not created in this shim")]
    NoContainer { id: String },
    #[error("process {exec} not found in container {id}")]
    NoProcess { id: String, exec: String },
    #[error("id {id} already exists")]
    Exists { id: String },
    #[error("process already finished")]
    Finished,
    #[error("no such container: the runtime doesn't have it")]
    Vanished,
    #[error("cannot {verb} a {state} process")]
    State { verb: &'static str, state: &'static str },
    #[error("{what} is missing or malformed")]
    Request { what: &'static str },
    #[error("{what} is not supported by this shim")]
    Unsupported { what: &'static str },
    #[error("options")]
    Options(#[source] OptionsError),
    #[error("bundle")]
    Bundle(#[source] BundleError),
    #[error("root file system")]
    Mount(#[source] MountError),
    #[error("io")]
    Io(#[source] IoError),
    #[error(transparent)]
    Gpu(GpuError),
    #[error("cgroup")]
    Cgroup(#[source] CgroupError),
    #[error(transparent)]
    Runc(RuncError),
    #[error("{first}; and cleaning up failed: {cleanup}")]
    Cleanup { first: Box<TaskError>, cleanup: String },
}

impl TaskError {
    fn code(&self) -> Code {
        match self {
            TaskError::NoContainer { .. }
            | TaskError::NoProcess { .. }
            | TaskError::Finished
            | TaskError::Vanished => Code::NOT_FOUND,
            TaskError::Exists { .. } => Code::ALREADY_EXISTS,
            TaskError::State { .. } => Code::FAILED_PRECONDITION,
            TaskError::Request { .. } | TaskError::Options(_) => Code::INVALID_ARGUMENT,
            TaskError::Unsupported { .. } => Code::UNIMPLEMENTED,
            TaskError::Bundle(_)
            | TaskError::Mount(_)
            | TaskError::Io(_)
            | TaskError::Gpu(_)
            | TaskError::Cgroup(_)
            | TaskError::Runc(_) => Code::UNKNOWN,
            TaskError::Cleanup { first, .. } => first.code(),
        }
    }

    /// The text that a user sees.
    pub(crate) fn text(&self) -> String {
        match self {
            TaskError::Cleanup { first, cleanup } => {
                format!("{}; and cleaning up failed: {cleanup}", first.text())
            }
            other => chain(other),
        }
    }
}

impl From<TaskError> for ttrpc::Error {
    fn from(error: TaskError) -> Self {
        ttrpc::Error::RpcStatus(get_status(error.code(), error.text()))
    }
}

/// What the runtime's answer to a signal means.
pub(crate) fn kill_error(error: RuncError) -> TaskError {
    if error.is_finished() {
        TaskError::Finished
    } else if error.is_absent() {
        TaskError::Vanished
    } else {
        TaskError::Runc(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(message: &str) -> RuncError {
        RuncError::Failed { what: "OCI runtime kill", message: message.into() }
    }

    #[test]
    fn a_signal_to_what_is_gone_is_not_found() {
        for text in ["os: process already finished", "container not running", "no such process"] {
            let error = kill_error(failed(text));
            assert_eq!(error.code(), Code::NOT_FOUND, "{text}");
            assert_eq!(error.text(), "process already finished");
        }
        assert_eq!(kill_error(failed("container does not exist")).code(), Code::NOT_FOUND);
        let other = kill_error(failed("permission denied"));
        assert_eq!(
            (other.code(), other.text().as_str()),
            (Code::UNKNOWN, "OCI runtime kill failed: permission denied")
        );
    }

    #[test]
    fn an_error_names_its_causes_and_what_cleanup_failed() {
        let first = Box::new(TaskError::Mount(MountError::Option { option: "loop".into() }));
        let error = TaskError::Cleanup { first, cleanup: "unmount /x".into() };
        let text = error.text();
        assert!(text.starts_with("root file system: mount option \"loop\""), "{text}");
        assert!(text.ends_with("cleaning up failed: unmount /x"), "{text}");
    }
}
