//! What CUDA asked of an H200 passes the sandbox: the recorded calls, made by a tenant, dispatched by the sandbox's
//! policy and performed by the emulated driver, are answered as the card answered them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a helper of a test fails the test"
)]

use std::collections::BTreeMap;
use std::io::BufReader;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use gpuslice_emulator::{Answer, Emulator, Install, Node, Recording, start};
use gpuslice_node::{Connections, EmulatedDriver};
use gpuslice_policy::Branch;
use gpuslice_proto::{ContainerId, GpuSettings, GpuUuid, SandboxSettings};
use gpuslice_sandbox::dispatch::{Outcome, OwnFiles, Sandbox};
use gpuslice_sandbox::driver::Node as SandboxNode;
use gpuslice_sandbox::tenant::{Caller, PinError, Pinned};
use gpuslice_sys::SharedMapping;
use nix::errno::Errno;

const QUOTA: u64 = 16 << 30;

/// This process as the tenant.
#[derive(Default)]
struct Tenant {
    installed: Mutex<Vec<(Option<u32>, OwnedFd)>>,
}

fn process() -> gpuslice_emulator::Caller {
    gpuslice_emulator::Caller::new(std::process::id()).unwrap()
}

impl Caller for Tenant {
    fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let bytes = process().read(addr, buf.len()).map_err(|_| Errno::EFAULT)?;
        buf.copy_from_slice(&bytes);
        Ok(())
    }
    fn write(&self, addr: u64, buf: &[u8]) -> Result<(), Errno> {
        process().write(addr, buf).map_err(|_| Errno::EFAULT)
    }
    fn file(&self, n: i32) -> Result<OwnedFd, Errno> {
        process().file(n).map_err(|_| Errno::EBADF)
    }
    fn tgid(&self) -> u32 {
        std::process::id()
    }
    fn still_waiting(&self) -> bool {
        true
    }
    fn pinned(&self, _addr: u64, length: u64) -> Result<Pinned, PinError> {
        let file = gpuslice_sys::memory::memfd("pinned", length).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), 0, usize::try_from(length).unwrap(), true).unwrap();
        Ok(Pinned { address: mapping.address(), keep: Arc::new(mapping) })
    }
    fn install(&self, file: OwnedFd, at: Option<u32>) -> Result<u32, Errno> {
        self.installed.lock().unwrap().push((at, file));
        Ok(at.unwrap_or(u32::MAX))
    }
}

fn open(emulator: &Emulator, node: Node) -> OwnedFd {
    let path = emulator.root().join("dev").join(node.file_name());
    std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap().into()
}

fn usage(emulator: &Emulator) -> serde_json::Value {
    serde_json::from_str(&gpuslice_emulator::ask(emulator, r#"{"do":"usage"}"#)).unwrap()
}

fn sandbox(emulator: &Emulator) -> Sandbox<EmulatedDriver> {
    let card = usage(emulator)["gpus"][0].clone();
    let minor = u32::try_from(card["minor"].as_u64().unwrap()).unwrap();
    let uuid = GpuUuid::try_from(card["uuid"].as_str().unwrap().to_owned()).unwrap();
    let settings = SandboxSettings {
        container: ContainerId::try_from("test/recordings".to_owned()).unwrap(),
        gpus: vec![GpuSettings { uuid, minor, memory_hard: QUOTA }],
        driver: "580.159.04".to_owned(),
        uvm_major: gpuslice_emulator::UVM_MAJOR,
        killable: false,
    };
    let own = OwnFiles {
        control: open(emulator, Node::Control),
        uvm: Some(open(emulator, Node::Uvm)),
        gpus: vec![open(emulator, Node::Gpu(minor))],
    };
    let connections = Connections::open(emulator.root(), 4).unwrap();
    let driver = EmulatedDriver::new(connections, &settings, &own).unwrap();
    let table = Branch::for_version(&settings.driver).unwrap();
    Sandbox::new(driver, table, &settings, own).unwrap()
}

fn node_of(node: Node) -> SandboxNode {
    match node {
        Node::Control => SandboxNode::Control,
        Node::Gpu(minor) => SandboxNode::Gpu { minor },
        Node::Uvm => SandboxNode::Uvm,
        Node::UvmTools => SandboxNode::UvmTools,
    }
}

/// Plays a recording through the sandbox; the differences by what they were about and what was answered.
fn play(name: &str) -> BTreeMap<(String, Option<u32>), u32> {
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpu/results/traces");
    let mut unpack = Command::new("xz")
        .arg("-dc")
        .arg(traces.join(name).with_extension("jsonl.xz"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("xz (Debian package xz-utils) unpacks the recordings");
    let recording = Recording::read(BufReader::new(unpack.stdout.take().unwrap())).unwrap();
    assert!(unpack.wait().unwrap().success());
    let root = tempfile::Builder::new().prefix("recordings").tempdir_in("/dev/shm").unwrap();
    let emulator = Arc::new(recording.emulator(root.path().to_owned()).unwrap());
    start(&emulator).unwrap();
    let sandbox = sandbox(&emulator);
    let tenant = Tenant::default();
    let mut perform = |file: &OwnedFd, node: Node, cmd: u32, address: u64| {
        let outcome = sandbox.ioctl(&tenant, file, node_of(node), cmd, address);
        let (value, errno) = match outcome {
            Outcome::Return(value) => (value, 0),
            Outcome::Error(errno) => (-1, number(errno)),
            Outcome::Restart => panic!("a call was restarted: nothing is moved here"),
        };
        let installed = tenant.installed.lock().unwrap().pop();
        let install = installed
            .map(|(at, file)| Install { at: at.and_then(|at| i32::try_from(at).ok()).unwrap_or(-1), file });
        Answer { value, errno, install }
    };
    let summary = recording.play(&emulator, &mut perform).unwrap();
    assert!(summary.calls >= 40);
    let state = usage(&emulator);
    assert_eq!(state["violations"].as_array().unwrap().len(), 0, "{}", state["violations"]);
    let mut different = BTreeMap::new();
    for one in summary.different {
        let what = one.what.unwrap_or(one.cmd);
        *different.entry((what, one.emulated.2)).or_default() += 1;
    }
    different
}

#[allow(clippy::as_conversions, reason = "nix gives an errno's number by cast alone")]
fn number(errno: Errno) -> i32 {
    errno as i32
}

/// Answers that a tenant gets otherwise than root without gpuslice; CUDA goes on with each.
fn expected((what, status): &(String, Option<u32>)) -> bool {
    match what.as_str() {
        // MIG sessions need a capability of the node's.
        "0xc639" | "0xc640" => *status == Some(0x1b),
        // UVM_MM_INITIALIZE: nothing to do where several processes share the address space.
        "0x4b" => *status == Some(0x1_0006),
        _ => false,
    }
}

macro_rules! recordings {
    ($($test:ident: $name:literal;)*) => {
        $(#[test]
        fn $test() {
            let different = play($name);
            let unexpected: Vec<_> = different.iter().filter(|(one, _)| !expected(one)).collect();
            assert!(unexpected.is_empty(), "{unexpected:#x?}");
        })*
    };
}

recordings! {
    plain_cuda_passes_the_sandbox: "context";
    cupy_passes_the_sandbox: "cupy";
    cuda_graphs_passes_the_sandbox: "graph";
    cuda_ipc_passes_the_sandbox: "ipc";
    jax_passes_the_sandbox: "jax";
    managed_memory_passes_the_sandbox: "managed";
    pinned_memory_passes_the_sandbox: "pinned";
    training_passes_the_sandbox: "train";
    virtual_memory_segments_passes_the_sandbox: "vmm";
}
