//! A container without a GPU under this runtime behaves as under the stock shim, under which these tests pass too:
//! `cargo xtask test --stock --only lifecycle`.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpuslice_harness::wait::{SOON, until, until_true};
use gpuslice_harness::{Node, process, run};

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn output_and_exit_status_come_through() -> Result<()> {
    let node = Node::plain()?;
    let ended = node.container("a").shell("echo to-stdout; echo to-stderr >&2; exit 7").run()?;
    ensure!(ended.status == 7, "status {}: {}", ended.status, ended.stderr);
    ensure!(ended.stdout == "to-stdout\n", "stdout {:?}", ended.stdout);
    ensure!(ended.stderr.contains("to-stderr"), "stderr {:?}", ended.stderr);
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_megabyte_of_output_arrives_whole() -> Result<()> {
    let node = Node::plain()?;
    let ended = node.container("a").shell("yes 0123456789abcde | head -c 1048576").run()?.success()?;
    ensure!(ended.stdout.len() == 1_048_576, "{} bytes arrived", ended.stdout.len());
    ensure!(ended.stdout.lines().all(|line| line == "0123456789abcde"), "the output is damaged");
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn input_reaches_the_program_and_its_end_is_seen() -> Result<()> {
    let node = Node::plain()?;
    let mut command = node.container("a").shell("read line; echo $line; cat; echo end").attached()?;
    let log = node.directory().join("log/echo");
    let mut ctr = command.stdin(Stdio::piped()).stdout(std::fs::File::create(&log)?).spawn()?;
    let mut input = ctr.stdin.take().context("no stdin")?;
    std::io::Write::write_all(&mut input, b"first\n")?;
    // ctr passes the end of its input on only once the task is there.
    until_true("the first line comes back", SOON, || {
        std::fs::read(&log).is_ok_and(|text| text == b"first\n")
    })?;
    std::io::Write::write_all(&mut input, b"second\n")?;
    drop(input);
    run::finish(ctr, "ctr run")?;
    let output = std::fs::read_to_string(&log)?;
    ensure!(output == "first\nsecond\nend\n", "{output:?}");
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_program_that_does_not_exist_is_an_error_that_leaves_nothing() -> Result<()> {
    let node = Node::plain()?;
    let ended = node.container("a").args(&["/bin/nothing-here"]).run()?;
    ended.refused(&["nothing-here"])?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_killed_container_reports_the_signal() -> Result<()> {
    let node = Node::plain()?;
    let running = node.container("a").args(&["/bin/sleep", "1000"]).start()?;
    running.kill("SIGKILL")?;
    let ended = running.ended()?;
    ensure!(ended.status == 137, "status {}", ended.status);
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_signal_can_be_handled_by_the_program() -> Result<()> {
    let node = Node::plain()?;
    let line = "trap 'echo got-it; exit 5' TERM; echo ready; while true; do sleep 0.05; done";
    let running = node.container("a").shell(line).start()?;
    running.wait_for_output("ready")?;
    running.kill("SIGTERM")?;
    let ended = running.ended()?;
    ensure!(ended.status == 5 && ended.stdout.contains("got-it"), "{ended:?}");
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn exec_runs_beside_the_first_program() -> Result<()> {
    let node = Node::plain()?;
    let running = node.container("a").args(&["/bin/sleep", "1000"]).start()?;
    let ended = running.exec(&["/bin/sh", "-c", "echo in-exec; echo $$; exit 3"])?;
    ensure!(ended.status == 3 && ended.stdout.contains("in-exec"), "{ended:?}");
    let many: Vec<_> =
        (0..4).map(|i| running.exec(&["/bin/sh", "-c", &format!("echo {i}; exit {i}")])).collect();
    for (i, output) in many.into_iter().enumerate() {
        let output = output?;
        ensure!(usize::try_from(output.status).ok() == Some(i), "exec {i}: {output:?}");
    }
    let failed = running.exec(&["/bin/nothing-here"])?;
    ensure!(failed.status != 0 && failed.stderr.contains("nothing-here"), "{failed:?}");
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn execs_at_once_all_report_their_own_status() -> Result<()> {
    let node = Node::plain()?;
    let running = node.container("a").args(&["/bin/sleep", "1000"]).start()?;
    let mut children = Vec::new();
    for i in 0..6 {
        let mut command = running.exec_command(&["/bin/sh", "-c", &format!("sleep 0.2; exit {}", 10 + i)]);
        children.push(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    }
    for (i, child) in children.iter_mut().enumerate() {
        let status = run::status_within(child, "ctr tasks exec", run::LIMIT)?.code();
        ensure!(status.and_then(|code| usize::try_from(code).ok()) == Some(10 + i), "exec {i}: {status:?}");
    }
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn pause_stops_the_program_and_resume_lets_it_go_on() -> Result<()> {
    let node = Node::plain()?;
    let running = node.container("a").shell("while true; do echo tick; sleep 0.02; done").start()?;
    running.wait_for_output("tick")?;
    running.task("pause", &[])?;
    ensure!(running.status()?.as_deref() == Some("PAUSED"), "status {:?}", running.status()?);
    std::thread::sleep(Duration::from_millis(200));
    let before = running.stdout().len();
    std::thread::sleep(Duration::from_millis(300));
    ensure!(running.stdout().len() == before, "it ran while it was paused");
    running.task("resume", &[])?;
    until_true("it goes on", SOON, || running.stdout().len() > before)?;
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn statistics_show_the_memory_of_the_container() -> Result<()> {
    let node = Node::plain()?;
    let running = node.container("a").args(&["/bin/sleep", "1000"]).memory_limit(64 << 20).start()?;
    let text = running.task("metrics", &[])?;
    ensure!(text.contains("memory"), "no memory in {text}");
    ensure!(text.contains("67108864"), "the limit is not in {text}");
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn processes_of_the_container_are_listed() -> Result<()> {
    let node = Node::plain()?;
    let running = node.container("a").shell("sleep 1000 & sleep 1000; true").start()?;
    let pid = running.pid()?;
    until("two sleeps run", SOON, || {
        let listed: Vec<u32> = running
            .task("ps", &[])?
            .lines()
            .filter_map(|line| line.split_whitespace().next()?.parse().ok())
            .collect();
        Ok((listed.contains(&pid) && listed.len() == 3).then_some(()))
    })?;
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_terminal_is_a_terminal() -> Result<()> {
    let node = Node::plain()?;
    let ended = node
        .container("a")
        .shell("tty; stty size; test -t 0 && echo is-terminal")
        .terminal()
        .on_terminal()?;
    ensure!(ended.contains("/dev/pts/0") && ended.contains("is-terminal"), "{ended:?}");
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn an_exec_can_have_a_terminal() -> Result<()> {
    let node = Node::plain()?;
    let running = node.container("a").args(&["/bin/sleep", "1000"]).start()?;
    let line = ["/bin/sh", "-c", "tty; test -t 1 && echo is-terminal"];
    let shown = run::on_terminal(&running.exec_with(&["--tty"], &line))?;
    ensure!(shown.contains("/dev/pts/0") && shown.contains("is-terminal"), "{shown:?}");
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn many_containers_run_side_by_side() -> Result<()> {
    let node = Node::plain()?;
    let mut running = Vec::new();
    for i in 0..5 {
        running.push(
            node.container(&format!("c{i}")).shell(&format!("sleep 0.3; exit {}", 20 + i)).background(&[])?,
        );
    }
    for (i, one) in running.into_iter().enumerate() {
        let ended = one.ended()?;
        ensure!(usize::try_from(ended.status).ok() == Some(20 + i), "container {i}: {ended:?}");
    }
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn the_same_id_can_be_used_again() -> Result<()> {
    let node = Node::plain()?;
    for _ in 0..3 {
        node.container("again").run()?.success()?;
    }
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn events_come_in_order() -> Result<()> {
    let node = Node::plain()?;
    let mut ctr = node.ctr();
    let log = node.directory().join("log/events");
    let mut events = ctr.arg("events").stdout(std::fs::File::create(&log)?).spawn()?;
    std::thread::sleep(Duration::from_millis(300));
    let running = node.container("a").args(&["/bin/sleep", "1000"]).start()?;
    running.exec(&["/bin/true"])?.success()?;
    running.stop()?;
    let read = || std::fs::read_to_string(&log).unwrap_or_default();
    let waited = until_true("the last event", SOON, || read().contains("/tasks/delete"));
    events.kill()?;
    events.wait()?;
    waited?;
    let text = read();
    let order: Vec<&str> = text.split_whitespace().filter_map(|word| word.strip_prefix("/tasks/")).collect();
    let expected = ["create", "start", "exec-added", "exec-started", "exit", "exit", "delete"];
    ensure!(order == expected, "events came as {order:?}");
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_restarted_daemon_finds_its_containers_again() -> Result<()> {
    let node = Node::plain()?;
    let running = node.container("a").args(&["/bin/sleep", "1000"]).detach()?;
    let pid = running.pid()?;
    node.stop_containerd()?;
    ensure!(process::runs(pid), "the container ended with the daemon");
    node.start_containerd()?;
    ensure!(running.status()?.as_deref() == Some("RUNNING"), "status {:?}", running.status()?);
    ensure!(running.pid()? == pid, "another process");
    running.exec(&["/bin/true"])?.success()?;
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_container_that_ended_while_the_daemon_was_down_is_not_lost() -> Result<()> {
    let node = Node::plain()?;
    let running = node.container("a").shell("sleep 1; exit 9").detach()?;
    let pid = running.pid()?;
    node.stop_containerd()?;
    until_true("the container ends", SOON, || !process::runs(pid))?;
    node.start_containerd()?;
    if node.daemon_major() >= 2 {
        // containerd 2 deletes such a task by itself while it starts.
        until("the task is deleted", SOON, || Ok(running.status()?.is_none().then_some(())))?;
        node.ctr_ok(&["containers", "rm", "a"])?;
        return node.finish();
    }
    let ended = running.delete()?;
    // ctr 1.6 says it in words only.
    ensure!(ended.status == 9 || ended.stderr.contains("non-zero exit code 9"), "{ended:?}");
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn orphans_of_a_container_end_with_it() -> Result<()> {
    let node = Node::plain()?;
    let ended = node.container("a").shell("(sleep 1000 &) ; (sleep 1000 &) ; exit 4").run()?;
    ensure!(ended.status == 4, "{ended:?}");
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn containers_of_one_pod_share_a_shim() -> Result<()> {
    let node = Node::plain()?;
    let member = |id: &str, kind: &str| {
        node.container(id)
            .annotation("io.kubernetes.cri.container-type", kind)
            .annotation("io.kubernetes.cri.sandbox-id", "pod")
            .args(&["/bin/sleep", "1000"])
    };
    let pause = member("pod", "sandbox").start()?;
    let (one, two) = (member("one", "container").start()?, member("two", "container").start()?);
    let shims = [pause.shim()?, one.shim()?, two.shim()?];
    ensure!(shims[0] == shims[1] && shims[0] == shims[2], "shims {shims:?}");
    one.stop()?;
    ensure!(two.exec(&["/bin/true"])?.success().is_ok(), "the other container still works");
    two.stop()?;
    pause.stop()?;
    node.finish()
}
