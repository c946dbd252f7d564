//! The way of a container's seccomp listeners from the OCI runtime to this shim.
//!
//! Owns: the checks on what arrives at a container's listener socket. Trusts: root alone can connect; the state
//! message's pid and bundle are never used (crun's exec says 0 and "."). Promises: a file that [`receive`]
//! returns is a seccomp listener that the runtime made for this container's profile. Failure: one connection is
//! dropped, the socket stays.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use gpuslice_sys::socket::{StateListener, StateStream};
use serde::Deserialize;

/// What the kernel calls a listener's inode.
const LISTENER_INODE: &str = "anon_inode:seccomp notify";
/// What the runtime spec calls the one file of a state message.
const LISTENER_FILE: &str = "seccompFd";

/// Why a connection to the listener socket was dropped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenerError {
    #[error(
        "the runtime sent no seccomp listener at create: use runc (crun sends none before the start where noNewPrivileges is set)"
    )]
    Late,
    #[error("listener socket: {step}")]
    Io { step: &'static str, source: std::io::Error },
    #[error("a process of uid {uid} connected to the listener socket")]
    Peer { uid: u32 },
    #[error("the state message is no ContainerProcessState: {reason}")]
    Form { reason: String },
    #[error("the state message is for container {found:?}, not {expected:?}")]
    Container { found: String, expected: String },
    #[error("the state message doesn't carry this container's nonce")]
    Nonce,
    #[error("the file in the state message is {found:?}, not a seccomp listener")]
    File { found: String },
}

/// What a state message must say.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    /// The container's id as the runtime knows it.
    pub(crate) id: String,
    /// What `listenerMetadata` was set to.
    pub(crate) nonce: String,
}

#[derive(Deserialize)]
struct ProcessState {
    fds: Vec<String>,
    #[serde(default)]
    metadata: String,
    state: State,
}

#[derive(Deserialize)]
struct State {
    id: String,
}

/// 128 random bits in hex.
///
/// # Errors
/// Those of reading the kernel's random numbers.
pub(crate) fn nonce() -> std::io::Result<String> {
    let mut bytes = [0_u8; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Accepts connections until one brings a listener of the container.
///
/// # Errors
/// The last [`ListenerError`] met before `deadline`.
pub(crate) fn accept(
    listening: &StateListener,
    expected: &Expected,
    deadline: Instant,
) -> Result<OwnedFd, ListenerError> {
    let mut last = ListenerError::Late;
    loop {
        let stream = match listening.accept(deadline) {
            Ok(stream) => stream,
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => return Err(last),
            Err(source) => return Err(ListenerError::Io { step: "accept", source }),
        };
        match receive(stream, expected, deadline) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
}

/// Takes the listener from one connection.
///
/// # Errors
/// [`ListenerError`]; the connection and what it brought are closed.
pub(crate) fn receive(
    stream: StateStream,
    expected: &Expected,
    deadline: Instant,
) -> Result<OwnedFd, ListenerError> {
    let peer = stream.peer().map_err(|source| ListenerError::Io { step: "peer", source })?;
    if peer.uid != 0 {
        return Err(ListenerError::Peer { uid: peer.uid });
    }
    let (state, file) =
        stream.receive(deadline).map_err(|source| ListenerError::Io { step: "receive the state", source })?;
    check_state(&state, expected)?;
    let found = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(|source| ListenerError::Io { step: "identify the file", source })?;
    if found.as_os_str() != LISTENER_INODE {
        return Err(ListenerError::File { found: found.to_string_lossy().chars().take(100).collect() });
    }
    Ok(file)
}

fn check_state(json: &[u8], expected: &Expected) -> Result<(), ListenerError> {
    // runc and crun may end the text with a newline or a NUL.
    let end =
        json.iter().rposition(|byte| !matches!(byte, 0 | b'\n')).map_or(0, |last| last.saturating_add(1));
    let state: ProcessState = serde_json::from_slice(json.get(..end).unwrap_or_default())
        .map_err(|error| ListenerError::Form { reason: error.to_string() })?;
    if state.fds != [LISTENER_FILE] {
        return Err(ListenerError::Form {
            reason: format!("{} files named, one {LISTENER_FILE} expected", state.fds.len()),
        });
    }
    if state.state.id != expected.id {
        let found = state.state.id.chars().take(100).collect();
        return Err(ListenerError::Container { found, expected: expected.id.clone() });
    }
    if state.metadata != expected.nonce {
        return Err(ListenerError::Nonce);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn expected() -> Expected {
        Expected { id: "c1".into(), nonce: "abc".into() }
    }

    fn state(fds: &[&str], id: &str, metadata: &str) -> Vec<u8> {
        json!({
            "ociVersion": "1.0.2", "fds": fds, "pid": 0, "metadata": metadata,
            "state": { "ociVersion": "1.0.2", "id": id, "status": "creating", "pid": 7, "bundle": "." },
        })
        .to_string()
        .into_bytes()
    }

    #[test]
    fn a_state_of_either_runtime_passes() {
        check_state(&state(&["seccompFd"], "c1", "abc"), &expected()).unwrap();
        for end in [b"\n".as_slice(), b"\0", b"\n\0"] {
            let mut text = state(&["seccompFd"], "c1", "abc");
            text.extend_from_slice(end);
            check_state(&text, &expected()).unwrap();
        }
    }

    #[test]
    fn another_container_nonce_or_set_of_files_is_refused() {
        let check = |text: Vec<u8>| check_state(&text, &expected()).unwrap_err();
        assert!(matches!(check(state(&["seccompFd"], "c2", "abc")), ListenerError::Container { .. }));
        assert!(matches!(check(state(&["seccompFd"], "c1", "abd")), ListenerError::Nonce));
        assert!(matches!(check(state(&["seccompFd"], "c1", "")), ListenerError::Nonce));
        for files in [vec![], vec!["seccompFd", "seccompFd"], vec!["pidFd"]] {
            assert!(matches!(check(state(&files, "c1", "abc")), ListenerError::Form { .. }));
        }
        assert!(matches!(check(b"{}".to_vec()), ListenerError::Form { .. }));
        assert!(matches!(check(Vec::new()), ListenerError::Form { .. }));
    }

    #[test]
    fn two_nonces_are_never_the_same() {
        let (one, two) = (nonce().unwrap(), nonce().unwrap());
        assert!(one != two && one.len() == 32);
    }

    #[test]
    fn a_connection_without_a_file_or_after_the_deadline_brings_no_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("n.sock");
        let listening = StateListener::bind(&path).unwrap();
        let deadline = || Instant::now() + Duration::from_millis(50);
        assert!(matches!(accept(&listening, &expected(), deadline()), Err(ListenerError::Late)));
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(&state(&["seccompFd"], "c1", "abc")).unwrap();
        drop(stream);
        assert!(matches!(accept(&listening, &expected(), deadline()), Err(ListenerError::Io { .. })));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(check_state(&bytes, &expected()).is_err());
        }
    }
}
