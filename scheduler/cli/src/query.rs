//! One question to the scheduler, over its socket.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::time::Instant;

use gpuslice_config::Config;
use gpuslice_proto::{
    FrameError, MAX_FRAME, Receiver, SchedulerToTool, Sender, StatusGpu, StatusTenant, ToolToScheduler,
};
use gpuslice_sys::Socket;

/// What the scheduler says.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) driver: String,
    pub(crate) uptime: u64,
    pub(crate) gpus: Vec<StatusGpu>,
    pub(crate) tenants: Vec<StatusTenant>,
}

/// Why it says nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueryError {
    #[error("can't reach gpuslice-scheduler at {}: {}", path.display(), remedy(source))]
    Connect { path: PathBuf, source: io::Error },
    #[error("gpuslice-scheduler at {} didn't answer", path.display())]
    Socket { path: PathBuf, source: io::Error },
    #[error("gpuslice-scheduler at {} closed the connection before its last row", path.display())]
    Closed { path: PathBuf },
    #[error("gpuslice-scheduler at {}", path.display())]
    Frame { path: PathBuf, source: FrameError },
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::PermissionDenied => "run this as root",
        _ => "is it running (systemctl status gpuslice-scheduler)? GPU containers start only with it",
    }
}

/// Asks for the state of the node.
pub(crate) fn ask(config: &Config) -> Result<Answer, QueryError> {
    let path = config.scheduler_socket();
    let deadline = Instant::now() + config.deadline();
    let socket = Socket::connect(&path, deadline)
        .map_err(|source| QueryError::Connect { path: path.clone(), source })?;
    let io_failed = |source| QueryError::Socket { path: path.clone(), source };
    let frame_failed = |source| QueryError::Frame { path: path.clone(), source };
    let frame = Sender::default().encode(&ToolToScheduler::Status).map_err(frame_failed)?;
    socket.send(&frame, &[], deadline).map_err(io_failed)?;
    let mut receiver = Receiver::default();
    let mut answer = Answer { driver: String::new(), uptime: 0, gpus: Vec::new(), tenants: Vec::new() };
    let mut buffer = [0; MAX_FRAME];
    loop {
        let (length, _) = socket.recv(&mut buffer, 0, deadline).map_err(io_failed)?;
        if length == 0 {
            return Err(QueryError::Closed { path });
        }
        match receiver.decode(buffer.get(..length).unwrap_or_default(), 0).map_err(frame_failed)? {
            SchedulerToTool::Gpu(gpu) => answer.gpus.push(gpu),
            SchedulerToTool::Tenant(tenant) => answer.tenants.push(tenant),
            SchedulerToTool::End { driver, uptime } => {
                answer.driver = driver;
                answer.uptime = uptime;
                return Ok(answer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn config(directory: &std::path::Path) -> Config {
        gpuslice_config::parse(&format!("run_dir = {:?}\n[scheduler]\ndeadline = 1\n", directory)).unwrap()
    }

    #[test]
    fn a_scheduler_that_is_not_there_is_named_with_its_socket() {
        let directory = tempfile::tempdir().unwrap();
        let error = ask(&config(directory.path())).unwrap_err().to_string();
        assert!(error.contains("scheduler.sock") && error.contains("is it running"), "{error}");
    }

    /// Answers one question with `rows`, and closes.
    fn answered(rows: Vec<SchedulerToTool>) -> Result<Answer, QueryError> {
        let directory = tempfile::tempdir().unwrap();
        let config = config(directory.path());
        let listening = Socket::listen(&config.scheduler_socket()).unwrap();
        let server = std::thread::spawn(move || {
            let deadline = Instant::now() + Duration::from_secs(5);
            let socket = listening.accept(deadline).unwrap();
            let mut buffer = [0; MAX_FRAME];
            let (length, _) = socket.recv(&mut buffer, 0, deadline).unwrap();
            assert_eq!(Receiver::default().decode(&buffer[..length], 0), Ok(ToolToScheduler::Status));
            let mut sender = Sender::default();
            for row in rows {
                socket.send(&sender.encode(&row).unwrap(), &[], deadline).unwrap();
            }
        });
        let answer = ask(&config);
        server.join().unwrap();
        answer
    }

    #[test]
    fn rows_come_until_the_end_and_an_early_end_is_an_error() {
        let end = || SchedulerToTool::End { driver: "580.1".into(), uptime: 7 };
        let answer = answered(vec![end()]).unwrap();
        assert_eq!((answer.driver.as_str(), answer.uptime), ("580.1", 7));
        assert!(matches!(answered(vec![]), Err(QueryError::Closed { .. })));
    }

    #[test]
    fn a_silent_scheduler_is_given_up_at_the_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let config = config(directory.path());
        let _listening = Socket::listen(&config.scheduler_socket()).unwrap();
        let begun = Instant::now();
        assert!(matches!(ask(&config), Err(QueryError::Socket { .. })));
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
}
