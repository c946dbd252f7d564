//! Events for containerd, in the order in which they happened.
//!
//! Owns: a queue in memory and one task that sends it. Promises: the head of the queue stays there until the
//! daemon took it, so no event overtakes another and none is lost while the daemon is away; what the daemon
//! refuses for good (a malformed event) is dropped with a line in the log. While the daemon is away the task
//! waits ever longer, up to two seconds, and is woken at once when the daemon is heard of again; with an empty
//! queue it sleeps. The queue is bounded: beyond it the oldest are dropped, with a line in the log.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use containerd_shim_protos::events::task;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim_protos::protobuf::{Message, MessageField};
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim_async::{Client, EventsClient};
use containerd_shim_protos::ttrpc::{self, Code, context};
use tokio::sync::Notify;

use crate::report::log;

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
const DEADLINE: Duration = Duration::from_secs(10);
/// About 300 bytes each.
const MOST_KEPT: usize = 20_000;

/// What happened to a container.
pub(crate) enum Event {
    Create(task::TaskCreate),
    Start(task::TaskStart),
    ExecAdded(task::TaskExecAdded),
    ExecStarted(task::TaskExecStarted),
    Exit(task::TaskExit),
    Delete(task::TaskDelete),
    Oom(task::TaskOOM),
    Paused(task::TaskPaused),
    Resumed(task::TaskResumed),
}

impl Event {
    fn encode(&self) -> (&'static str, &'static str, Option<Vec<u8>>) {
        fn bytes<M: Message>(message: &M) -> Option<Vec<u8>> {
            message.write_to_bytes().ok()
        }
        match self {
            Event::Create(event) => ("/tasks/create", "containerd.events.TaskCreate", bytes(event)),
            Event::Start(event) => ("/tasks/start", "containerd.events.TaskStart", bytes(event)),
            Event::ExecAdded(event) => ("/tasks/exec-added", "containerd.events.TaskExecAdded", bytes(event)),
            Event::ExecStarted(event) => {
                ("/tasks/exec-started", "containerd.events.TaskExecStarted", bytes(event))
            }
            Event::Exit(event) => ("/tasks/exit", "containerd.events.TaskExit", bytes(event)),
            Event::Delete(event) => ("/tasks/delete", "containerd.events.TaskDelete", bytes(event)),
            Event::Oom(event) => ("/tasks/oom", "containerd.events.TaskOOM", bytes(event)),
            Event::Paused(event) => ("/tasks/paused", "containerd.events.TaskPaused", bytes(event)),
            Event::Resumed(event) => ("/tasks/resumed", "containerd.events.TaskResumed", bytes(event)),
        }
    }
}

/// A time as the wire has it.
pub(crate) fn timestamp(at: SystemTime) -> MessageField<Timestamp> {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    MessageField::some(Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or(0),
        ..Timestamp::default()
    })
}

/// How sending an event ended, if not well.
#[derive(Debug)]
pub(crate) enum SendError {
    /// The daemon isn't there or can't just now: try again.
    Later,
    /// The daemon will never take it.
    Never(String),
}

/// Where events go.
pub(crate) trait Sink: Send + 'static {
    /// Sends one event.
    fn send(&mut self, event: &Envelope) -> impl Future<Output = Result<(), SendError>> + Send;
}

/// containerd's event service.
pub(crate) struct Daemon {
    address: String,
    client: Option<EventsClient>,
}

impl Daemon {
    /// The daemon that listens at `address`, a path.
    pub(crate) fn new(address: &str) -> Daemon {
        let address = if address.contains("://") { address.to_owned() } else { format!("unix://{address}") };
        Daemon { address, client: None }
    }
}

impl Sink for Daemon {
    async fn send(&mut self, event: &Envelope) -> Result<(), SendError> {
        let client = match &self.client {
            Some(client) => client,
            None => {
                let client = Client::connect(&self.address).await.map_err(|_| SendError::Later)?;
                self.client.insert(EventsClient::new(client))
            }
        };
        let request =
            ForwardRequest { envelope: MessageField::some(event.clone()), ..ForwardRequest::default() };
        match client.forward(context::with_duration(DEADLINE), &request).await {
            Ok(_) => Ok(()),
            Err(ttrpc::Error::RpcStatus(status)) => match status.code.enum_value() {
                Ok(
                    Code::INVALID_ARGUMENT
                    | Code::UNIMPLEMENTED
                    | Code::NOT_FOUND
                    | Code::FAILED_PRECONDITION,
                ) => Err(SendError::Never(status.message)),
                Ok(_) | Err(_) => {
                    self.client = None;
                    Err(SendError::Later)
                }
            },
            Err(_) => {
                self.client = None;
                Err(SendError::Later)
            }
        }
    }
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<VecDeque<Envelope>>,
    /// An event came in, or the daemon was heard of.
    wake: Notify,
    /// The queue became empty.
    empty: Notify,
}

/// Handle to the queue; clones share it.
#[derive(Clone)]
pub(crate) struct Publisher {
    namespace: String,
    queue: Arc<Queue>,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<Envelope>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Publisher {
    /// Starts sending to `sink`, in a task of the current runtime.
    pub(crate) fn start(namespace: &str, sink: impl Sink) -> Publisher {
        let publisher = Publisher { namespace: namespace.to_owned(), queue: Arc::default() };
        tokio::spawn(send_all(publisher.queue.clone(), sink));
        publisher
    }

    /// Puts an event at the end of the queue.
    pub(crate) fn publish(&self, event: &Event) {
        let (topic, kind, bytes) = event.encode();
        let Some(value) = bytes else {
            log("events", &format!("event {topic} can't be encoded"));
            return;
        };
        let envelope = Envelope {
            timestamp: timestamp(SystemTime::now()),
            namespace: self.namespace.clone(),
            topic: topic.to_owned(),
            event: MessageField::some(Any { type_url: kind.to_owned(), value, ..Any::default() }),
            ..Envelope::default()
        };
        let mut waiting = self.queue.waiting();
        if waiting.len() >= MOST_KEPT {
            waiting.pop_front();
            log("events", "the daemon is away too long: the oldest event is dropped");
        }
        waiting.push_back(envelope);
        drop(waiting);
        self.queue.wake.notify_one();
    }

    /// The daemon was heard of: whatever waits is tried again now.
    pub(crate) fn daemon_is_there(&self) {
        if !self.queue.waiting().is_empty() {
            self.queue.wake.notify_one();
        }
    }

    /// Whether every event was taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.waiting().is_empty()
    }

    /// Resolves once every event was taken.
    pub(crate) async fn drained(&self) {
        loop {
            let empty = self.queue.empty.notified();
            if self.is_empty() {
                return;
            }
            empty.await;
        }
    }
}

async fn send_all(queue: Arc<Queue>, mut sink: impl Sink) {
    let mut pause = FIRST_PAUSE;
    loop {
        let head = queue.waiting().front().cloned();
        let Some(envelope) = head else {
            queue.empty.notify_waiters();
            queue.wake.notified().await;
            continue;
        };
        match sink.send(&envelope).await {
            Ok(()) => {
                pause = FIRST_PAUSE;
                drop(queue.waiting().pop_front());
            }
            Err(SendError::Never(reason)) => {
                log("events", &format!("containerd refuses event {}: {reason}", envelope.topic));
                drop(queue.waiting().pop_front());
            }
            Err(SendError::Later) => {
                // A new event is no news of the daemon, but trying once more for it does no harm.
                drop(tokio::time::timeout(pause, queue.wake.notified()).await);
                pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails as told, then takes; remembers what it took.
    struct Scripted {
        failures: VecDeque<SendError>,
        taken: Arc<Mutex<Vec<(String, String)>>>,
    }

    impl Sink for Scripted {
        async fn send(&mut self, event: &Envelope) -> Result<(), SendError> {
            match self.failures.pop_front() {
                Some(error) => Err(error),
                None => {
                    let any = event.event.clone().unwrap();
                    let exit = task::TaskExit::parse_from_bytes(&any.value).unwrap();
                    self.taken.lock().unwrap().push((event.topic.clone(), exit.container_id));
                    Ok(())
                }
            }
        }
    }

    fn exit(id: &str) -> Event {
        Event::Exit(task::TaskExit { container_id: id.into(), ..Default::default() })
    }

    async fn run(failures: Vec<SendError>, events: &[&str]) -> Vec<String> {
        let taken = Arc::new(Mutex::new(Vec::new()));
        let publisher = Publisher::start("ns", Scripted { failures: failures.into(), taken: taken.clone() });
        for id in events {
            publisher.publish(&exit(id));
            tokio::task::yield_now().await;
        }
        publisher.drained().await;
        let taken = taken.lock().unwrap();
        taken.iter().map(|(_, id)| id.clone()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn events_stay_in_order_over_a_daemon_that_is_away() {
        let failures = (0..7).map(|_| SendError::Later).collect();
        assert_eq!(run(failures, &["a", "b", "c", "d"]).await, ["a", "b", "c", "d"]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_that_is_refused_for_good_is_the_only_one_lost() {
        assert_eq!(run(vec![SendError::Never("malformed".into())], &["a", "b", "c"]).await, ["b", "c"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_is_heard_of_gets_its_events_at_once() {
        let taken = Arc::new(Mutex::new(Vec::new()));
        let failures = (0..12).map(|_| SendError::Later).collect();
        let publisher = Publisher::start("ns", Scripted { failures, taken: taken.clone() });
        publisher.publish(&exit("a"));
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert!(taken.lock().unwrap().is_empty());
        let before = tokio::time::Instant::now();
        for _ in 0..8 {
            publisher.daemon_is_there();
            tokio::task::yield_now().await;
            tokio::task::yield_now().await;
        }
        publisher.drained().await;
        assert!(before.elapsed() < Duration::from_secs(2));
    }
}
