//! systemd's notification protocol: ready, alive, stopping.
//!
//! The socket's address comes with the environment; without it nothing is sent. A message that can't be sent
//! is dropped: systemd notices by itself.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Where the service manager listens, if there is one.
pub(crate) struct Readiness(Option<(UnixDatagram, SocketAddr)>);

impl Readiness {
    /// From `NOTIFY_SOCKET`: a path, or an abstract name behind `@`.
    pub(crate) fn from_env() -> Readiness {
        let name = std::env::var("NOTIFY_SOCKET").ok();
        Readiness(name.and_then(|name| {
            let address = match name.strip_prefix('@') {
                Some(name) => SocketAddr::from_abstract_name(name).ok()?,
                None => SocketAddr::from_pathname(name).ok()?,
            };
            let socket = UnixDatagram::unbound().ok()?;
            socket.set_nonblocking(true).ok()?;
            Some((socket, address))
        }))
    }

    /// Sends one message, as in `READY=1`.
    pub(crate) fn tell(&self, message: &str) {
        if let Some((socket, address)) = &self.0 {
            socket.send_to_addr(message.as_bytes(), address).ok();
        }
    }
}
