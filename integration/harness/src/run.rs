//! Runs a program to its end, with a deadline.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::wait::until;

/// How long a command of a test may take.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Output of `command`, which is killed after [`LIMIT`].
///
/// # Errors
/// When it can't be started or doesn't end in time.
pub fn output(command: &mut Command) -> Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {name}"))?;
    finish(child, &name)
}

/// Runs `command` to its end on a terminal of its own; what the terminal showed. Its environment is not kept.
///
/// # Errors
/// When it can't be started or doesn't end in time.
pub fn on_terminal(command: &Command) -> Result<String> {
    let mut line = shell_word(command.get_program());
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&shell_word(arg));
    }
    // `script` gives it the terminal that ctr insists on.
    let mut script = Command::new(crate::programs::system("script")?);
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    Ok(String::from_utf8_lossy(&output(&mut script)?.stdout).into_owned())
}

/// What is left to read of `child`, once it has ended.
///
/// # Errors
/// When it doesn't end in time.
pub fn finish(mut child: Child, name: &str) -> Result<Output> {
    let stdout = child.stdout.take().map(reader);
    let stderr = child.stderr.take().map(reader);
    let status = status_within(&mut child, name, LIMIT)?;
    let text = |reader: Option<std::thread::JoinHandle<Vec<u8>>>| -> Result<Vec<u8>> {
        match reader.map(std::thread::JoinHandle::join) {
            None => Ok(Vec::new()),
            Some(Ok(bytes)) => Ok(bytes),
            Some(Err(_)) => bail!("the reader of {name} failed"),
        }
    };
    Ok(Output { status, stdout: text(stdout)?, stderr: text(stderr)? })
}

/// Status of `child`, which is killed after `limit`.
///
/// # Errors
/// When it doesn't end in time.
pub fn status_within(child: &mut Child, name: &str, limit: Duration) -> Result<ExitStatus> {
    let ended = until(&format!("{name} ends"), limit, || child.try_wait().context("wait for a program"));
    if ended.is_err() {
        child.kill().context("kill a program")?;
        child.wait().context("wait for a program")?;
    }
    ended
}

fn reader(mut pipe: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // A pipe that breaks shows as output cut short.
        if let Err(error) = pipe.read_to_end(&mut bytes) {
            eprintln!("harness: {error}");
        }
        bytes
    })
}

fn shell_word(word: &std::ffi::OsStr) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"))
}
