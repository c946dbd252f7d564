//! The shim proper: serves the task API on the socket that `start` bound, until it is over.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use containerd_shim::Flags;
use containerd_shim_protos::shim_async::{Task, create_task};
use containerd_shim_protos::ttrpc::r#async::Server;
use containerd_shim_protos::ttrpc::asynchronous::transport::Listener;
use futures_core::Stream;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};

use super::ServiceError;
use crate::Node;
use crate::container::Place;
use crate::events::{Daemon, Publisher};
use crate::pod::Pod;
use crate::reaper::Reaper;
use crate::report::log;
use crate::task::Service;

/// Blocking work is a mount, a log file, a step of the slice: few at a time, none needs much stack.
const STACK: usize = 256 << 10;
const THREADS: usize = 32;

/// Connections of root; others are closed unheard.
struct Root(UnixListener);

impl Stream for Root {
    type Item = io::Result<UnixStream>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            return match self.0.poll_accept(context) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(Err(error)) => Poll::Ready(Some(Err(error))),
                Poll::Ready(Ok((stream, _))) => match stream.peer_cred() {
                    Ok(peer) if peer.uid() == 0 => Poll::Ready(Some(Ok(stream))),
                    Ok(_) | Err(_) => continue,
                },
            };
        }
    }
}

pub(super) fn serve(node: Node, flags: &Flags) -> Result<(), ServiceError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_stack_size(STACK)
        .max_blocking_threads(THREADS)
        .thread_keep_alive(Duration::from_secs(1))
        .build()
        .map_err(ServiceError::Server)?;
    let served = runtime.block_on(serve_on(node, flags));
    drop(std::fs::remove_file(&flags.socket));
    // A thread that hangs in the kernel must not keep the shim.
    runtime.shutdown_background();
    served.map_err(ServiceError::Server)
}

async fn serve_on(node: Node, flags: &Flags) -> io::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)?;
    let reaper = Reaper::start()?;
    ignore_termination()?;
    let listener = take_listener()?;
    let events = std::env::var("TTRPC_ADDRESS").unwrap_or_default();
    let socket = PathBuf::from(&flags.socket);
    let pod = Arc::new(Pod::new(Place {
        node,
        namespace: flags.namespace.clone(),
        socket: flags.socket.clone(),
        socket_directory: socket.parent().unwrap_or(Path::new("/")).to_owned(),
        reaper,
        events: Publisher::start(&flags.namespace, Daemon::new(&events)),
    }));
    let mut server = Server::new().add_listener(Listener::new(Root(listener)));
    // The two versions of the API differ in their name only; containerd takes the one it was told or knows.
    for name in ["containerd.task.v2.Task", "containerd.task.v3.Task"] {
        let service: Arc<dyn Task + Send + Sync> = Arc::new(Service(pod.clone()));
        let methods = create_task(service).into_values().map(|service| (name.to_owned(), service)).collect();
        server = server.register_service(methods);
    }
    server.start().await.map_err(io::Error::other)?;
    let resting = pod.clone();
    tokio::spawn(async move { resting.rest().await });
    pod.over().await;
    // From here on a start finds no shim and makes one. Then let the answer to Shutdown out.
    drop(std::fs::remove_file(&socket));
    for _ in 0..32 {
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// The listener came as standard input; children get the null device there.
fn take_listener() -> io::Result<UnixListener> {
    let stdin = io::stdin();
    let listener = std::os::unix::net::UnixListener::from(stdin.as_fd().try_clone_to_owned()?);
    listener.set_nonblocking(true)?;
    nix::unistd::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    UnixListener::from_std(listener)
}

/// A shim ends when its containers do; a signal meant for containerd's group must not take them along.
fn ignore_termination() -> io::Result<()> {
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        let mut signals = signal(kind)?;
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                log("shim", "asked to terminate by a signal: it ends when its last container is deleted");
            }
        });
    }
    Ok(())
}
