use std::time::Duration;

use containerd_shim_protos::api::{
    CheckpointTaskRequest, CreateTaskRequest, DeleteResponse, ExecProcessRequest, PauseRequest, PidsRequest,
    ResumeRequest, ShutdownRequest, StateRequest, StatsRequest, Status, UpdateTaskRequest,
};
use containerd_shim_protos::cgroups::metrics::Metrics;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{Message, MessageField};
use containerd_shim_protos::shim_async::TaskClient;
use containerd_shim_protos::ttrpc::Code;

use crate::daemon::{Daemon, code, delete, kill, soon, start, wait};

async fn status(task: &TaskClient, id: &str) -> Status {
    let request = StateRequest { id: id.into(), ..StateRequest::default() };
    task.state(soon(), &request).await.unwrap().status.unwrap()
}

async fn add_exec(task: &TaskClient, id: &str, exec: &str, script: &str) {
    let process = serde_json::json!({
        "user": { "uid": 0, "gid": 0 }, "args": ["/bin/sh", "-c", script], "env": ["PATH=/bin"], "cwd": "/",
    });
    let spec = Any { value: process.to_string().into_bytes(), ..Any::default() };
    let request = ExecProcessRequest {
        id: id.into(),
        exec_id: exec.into(),
        spec: MessageField::some(spec),
        ..ExecProcessRequest::default()
    };
    task.exec(soon(), &request).await.unwrap();
}

async fn limit(task: &TaskClient, id: &str, resources: &str) {
    let update = UpdateTaskRequest {
        id: id.into(),
        resources: MessageField::some(Any { value: resources.into(), ..Any::default() }),
        ..UpdateTaskRequest::default()
    };
    task.update(soon(), &update).await.unwrap();
}

async fn shut_down(daemon: &Daemon, task: &TaskClient, id: &str) {
    drop(task.shutdown(soon(), &ShutdownRequest { id: id.into(), ..Default::default() }).await);
    let sockets = daemon.path("run/s");
    for _ in 0..200 {
        let left = std::fs::read_dir(&sockets).unwrap().flatten().filter(|entry| entry.file_name() != "lock");
        if left.count() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the shim left its socket");
}

#[tokio::test]
async fn a_containers_life_is_told_in_order_and_its_states_refuse_what_does_not_fit() {
    let mut daemon = Daemon::new();
    daemon.listen().await;
    let (task, pid) = daemon.create("one", "sleep 100").await;
    assert!(pid > 1);
    assert_eq!(status(&task, "one").await, Status::CREATED);
    let again = CreateTaskRequest { id: "one".into(), bundle: "/x".into(), ..Default::default() };
    assert_eq!(code(task.create(soon(), &again).await), Code::ALREADY_EXISTS);
    assert_eq!(start(&task, "one", "").await, pid);
    assert_eq!(status(&task, "one").await, Status::RUNNING);
    assert_eq!(code(delete(&task, "one", "").await), Code::FAILED_PRECONDITION);
    assert_eq!(code(kill(&task, "two", "", 9).await), Code::NOT_FOUND);
    assert_eq!(code(kill(&task, "one", "none", 9).await), Code::NOT_FOUND);
    let checkpoint = CheckpointTaskRequest { id: "one".into(), ..Default::default() };
    assert_eq!(code(task.checkpoint(soon(), &checkpoint).await), Code::UNIMPLEMENTED);

    add_exec(&task, "one", "e", "sleep 50").await;
    let exec = start(&task, "one", "e").await;
    let pids = task.pids(soon(), &PidsRequest { id: "one".into(), ..Default::default() }).await.unwrap();
    let named: Vec<u32> = pids.processes.iter().filter(|one| one.info.is_some()).map(|one| one.pid).collect();
    assert_eq!(named, [exec]);

    task.pause(soon(), &PauseRequest { id: "one".into(), ..Default::default() }).await.unwrap();
    assert_eq!(status(&task, "one").await, Status::PAUSED);
    task.resume(soon(), &ResumeRequest { id: "one".into(), ..Default::default() }).await.unwrap();
    let resume = ResumeRequest { id: "one".into(), ..Default::default() };
    assert_eq!(code(task.resume(soon(), &resume).await), Code::FAILED_PRECONDITION);

    // Several waiters, some of them early, see the same; init's exit takes the exec's along and is told last.
    let waiters: Vec<_> = (0..5)
        .map(|_| {
            let task = task.clone();
            tokio::spawn(async move { wait(&task, "one", "").await })
        })
        .collect();
    kill(&task, "one", "", 9).await.unwrap();
    for waiter in waiters {
        assert_eq!(waiter.await.unwrap(), 137);
    }
    assert_eq!(wait(&task, "one", "").await, 137);
    assert_eq!(code(kill(&task, "one", "", 9).await), Code::NOT_FOUND);
    assert_eq!(delete(&task, "one", "e").await.unwrap(), 137);
    assert_eq!(delete(&task, "one", "").await.unwrap(), 137);
    assert_eq!(code(delete(&task, "one", "").await), Code::NOT_FOUND);
    let expected = [
        "/tasks/create",
        "/tasks/start",
        "/tasks/exec-added",
        "/tasks/exec-started",
        "/tasks/paused",
        "/tasks/resumed",
        "/tasks/exit e 137",
        "/tasks/exit one 137",
        "/tasks/delete",
    ];
    assert_eq!(daemon.events("/tasks/delete").await, expected);
    shut_down(&daemon, &task, "one").await;
}

#[tokio::test]
async fn new_limits_hold_and_figures_show_them() {
    let mut daemon = Daemon::new();
    daemon.listen().await;
    let (task, _) = daemon.create("limits", "sleep 100").await;
    start(&task, "limits", "").await;
    limit(&task, "limits", r#"{"memory":{"limit":67108864},"pids":{"limit":33}}"#).await;
    let stats =
        task.stats(soon(), &StatsRequest { id: "limits".into(), ..Default::default() }).await.unwrap();
    let stats = stats.stats.unwrap();
    if stats.type_url == "io.containerd.cgroups.v1.Metrics" {
        let metrics = Metrics::parse_from_bytes(&stats.value).unwrap();
        assert_eq!(metrics.memory.usage.limit, 67_108_864);
        assert!(metrics.memory.usage.usage > 0);
        assert_eq!(metrics.pids.limit, 33);
        assert!(metrics.pids.current > 0);
        assert!(metrics.cpu.usage.total > 0);
    } else {
        assert_eq!(stats.type_url, "io.containerd.cgroups.v2.Metrics");
    }
    kill(&task, "limits", "", 9).await.unwrap();
    assert_eq!(wait(&task, "limits", "").await, 137);
    delete(&task, "limits", "").await.unwrap();
    shut_down(&daemon, &task, "limits").await;
}

#[tokio::test]
async fn a_kill_for_memory_is_told_before_the_exit_that_it_causes() {
    let mut daemon = Daemon::new();
    daemon.listen().await;
    let (task, _) = daemon.create("oom", "exec dd if=/dev/zero of=/dev/null bs=200M count=1").await;
    limit(&task, "oom", r#"{"memory":{"limit":16777216}}"#).await;
    start(&task, "oom", "").await;
    assert_eq!(wait(&task, "oom", "").await, 137);
    delete(&task, "oom", "").await.unwrap();
    let mut events = daemon.events("/tasks/delete").await;
    events.dedup();
    let expected = ["/tasks/create", "/tasks/start", "/tasks/oom", "/tasks/exit oom 137", "/tasks/delete"];
    assert_eq!(events, expected);
    shut_down(&daemon, &task, "oom").await;
}

#[tokio::test]
async fn events_wait_for_a_daemon_that_is_away_and_keep_their_order() {
    let mut daemon = Daemon::new();
    daemon.listen().await;
    let (task, _) = daemon.create("away", "exit 7").await;
    assert_eq!(daemon.events("/tasks/create").await, ["/tasks/create"]);
    daemon.leave().await;
    start(&task, "away", "").await;
    assert_eq!(wait(&task, "away", "").await, 7);
    assert_eq!(delete(&task, "away", "").await.unwrap(), 7);
    tokio::time::sleep(Duration::from_millis(300)).await;
    daemon.listen().await;
    let expected = ["/tasks/create", "/tasks/start", "/tasks/exit away 7", "/tasks/delete"];
    assert_eq!(daemon.events("/tasks/delete").await, expected);
    shut_down(&daemon, &task, "away").await;
}

#[tokio::test]
async fn a_container_that_was_never_started_can_be_deleted() {
    let mut daemon = Daemon::new();
    daemon.listen().await;
    let (task, _) = daemon.create("never", "exit 0").await;
    add_exec(&task, "never", "unstarted", "true").await;
    assert_eq!(delete(&task, "never", "unstarted").await.unwrap(), 0);
    assert_eq!(delete(&task, "never", "").await.unwrap(), 137);
    shut_down(&daemon, &task, "never").await;
}

#[tokio::test]
async fn a_killed_shims_container_is_taken_away_by_its_bundle_alone() {
    let mut daemon = Daemon::new();
    daemon.listen().await;
    let (task, pid) = daemon.create("orphan", "sleep 100").await;
    start(&task, "orphan", "").await;
    let request = containerd_shim_protos::api::ConnectRequest { id: "orphan".into(), ..Default::default() };
    let shim = task.connect(soon(), &request).await.unwrap();
    assert_eq!(shim.task_pid, pid);
    let shim = nix::unistd::Pid::from_raw(i32::try_from(shim.shim_pid).unwrap());
    nix::sys::signal::kill(shim, nix::sys::signal::Signal::SIGKILL).unwrap();
    let answer = daemon.shim(&daemon.path("orphan"), "orphan", "delete", &[]);
    let answer = DeleteResponse::parse_from_bytes(&answer).unwrap();
    assert_eq!((answer.pid, answer.exit_status), (pid, 137));
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z "), "{state}");
    let left: Vec<_> = std::fs::read_dir(daemon.path("run/s")).unwrap().flatten().collect();
    assert!(left.iter().all(|entry| entry.file_name() == "lock"), "{left:?}");
    assert_eq!(std::fs::read_dir(daemon.path("runc/test")).unwrap().count(), 0);
}
