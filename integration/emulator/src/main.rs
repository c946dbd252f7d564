//! The emulated driver as a program: `serve`, `ctl`, `replay`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use gpuslice_emulator::{CONTROL_SOCKET, DEFAULT_VERSION, Emulator, Gpu, Options, model, replay, start};
use nix::sys::signal::{SigSet, Signal};

/// An NVIDIA driver without a GPU, for tests.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves until SIGTERM or SIGINT. Prints one line of JSON when it is ready.
    Serve {
        /// Directory for nodes, procfs files and sockets.
        #[arg(long)]
        root: PathBuf,
        /// The cards, one --gpu each: MODEL or MODEL:MIB (h200, a10, small).
        #[arg(long = "gpu", default_value = "h200")]
        gpus: Vec<String>,
        /// Driver version.
        #[arg(long, default_value = DEFAULT_VERSION)]
        driver: String,
        /// Fixes the UUIDs.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Sends one request to a running emulator and prints the answer.
    Ctl {
        /// Directory of the running emulator.
        #[arg(long)]
        root: PathBuf,
        /// A JSON object such as {"do":"usage"}, or just a name such as usage.
        request: String,
    },
    /// Replays a recording on a fresh emulator; exit status 1 where an answer differs.
    Replay {
        /// The recording (see integration/gpu/record.c); - for standard input.
        file: PathBuf,
        /// Directory for the emulator's files, on a tmpfs.
        #[arg(long, default_value = "/dev/shm")]
        scratch: PathBuf,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Serve { root, gpus, driver, seed } => serve(root, &gpus, driver, seed),
        Command::Ctl { root, request } => ctl(&root, &request),
        Command::Replay { file, scratch } => replay_file(&file, &scratch),
    }
}

fn cards(texts: &[String], seed: u64) -> Result<Vec<Gpu>> {
    let mut cards = Vec::new();
    for (minor, text) in texts.iter().enumerate() {
        let (key, memory) = match text.split_once(':') {
            Some((key, mib)) => (key, Some(mib.parse::<u64>().context("memory in MiB")? << 20)),
            None => (text.as_str(), None),
        };
        let Some(model) = model(key) else { bail!("no model {key:?}: h200, a10 or small") };
        cards.push(Gpu::new(model, u32::try_from(minor)?, memory, seed));
    }
    Ok(cards)
}

fn serve(root: PathBuf, gpus: &[String], version: String, seed: u64) -> Result<()> {
    let mut ends = SigSet::empty();
    ends.add(Signal::SIGTERM);
    ends.add(Signal::SIGINT);
    ends.thread_block()?;
    let gpus = cards(gpus, seed)?;
    let uuids: Vec<String> = gpus.iter().map(Gpu::uuid_text).collect();
    let options = Options { root: root.clone(), gpus, version };
    let emulator =
        Arc::new(Emulator::new(options).with_context(|| format!("nodes under {}", root.display()))?);
    start(&emulator)?;
    println!("{}", serde_json::json!({"ready": true, "root": root, "gpus": uuids}));
    std::io::stdout().flush()?;
    ends.wait()?;
    emulator.nodes().remove();
    Ok(())
}

fn ctl(root: &std::path::Path, request: &str) -> Result<()> {
    let socket = root.join(CONTROL_SOCKET);
    let mut stream =
        UnixStream::connect(&socket).with_context(|| format!("no emulator at {}", socket.display()))?;
    let line = if request.trim_start().starts_with('{') {
        request.to_owned()
    } else {
        serde_json::json!({"do": request}).to_string()
    };
    writeln!(stream, "{line}")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    print!("{answer}");
    let parsed: serde_json::Value = serde_json::from_str(&answer)?;
    if parsed.get("ok") != Some(&serde_json::Value::Bool(true)) {
        bail!("refused");
    }
    Ok(())
}

fn replay_file(file: &std::path::Path, scratch: &std::path::Path) -> Result<()> {
    let recording: Box<dyn BufRead> = if file.as_os_str() == "-" {
        Box::new(BufReader::new(std::io::stdin()))
    } else {
        Box::new(BufReader::new(std::fs::File::open(file).with_context(|| file.display().to_string())?))
    };
    let root = scratch.join(format!("gpuslice-replay.{}", std::process::id()));
    let summary = replay(recording, root.clone());
    std::fs::remove_dir_all(&root).with_context(|| format!("remove {}", root.display()))?;
    let summary = summary?;
    for difference in &summary.different {
        println!("{}", serde_json::to_string(difference)?);
    }
    let ok = summary.different.is_empty();
    println!("{}", serde_json::json!({"ok": ok, "calls": summary.calls, "equal": summary.equal}));
    if !ok {
        bail!("{} calls were answered otherwise", summary.different.len());
    }
    Ok(())
}
