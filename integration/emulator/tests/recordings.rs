//! What an H200 answered, the emulator answers too.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a helper of a test fails the test"
)]

use std::io::BufReader;
use std::path::Path;
use std::process::{Command, Stdio};

fn recording(name: &str) {
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpu/results/traces");
    let mut unpack = Command::new("xz")
        .arg("-dc")
        .arg(traces.join(name).with_extension("jsonl.xz"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("xz (Debian package xz-utils) unpacks the recordings");
    let output = BufReader::new(unpack.stdout.take().unwrap());
    let root = tempfile::Builder::new().prefix("replay").tempdir_in("/dev/shm").unwrap();
    let summary = gpuslice_emulator::replay(output, root.path().to_owned()).unwrap();
    assert!(unpack.wait().unwrap().success());
    assert!(summary.calls >= 40, "only {} calls in {name}", summary.calls);
    assert!(summary.different.is_empty(), "{name}: {:#?}", summary.different);
}

macro_rules! recordings {
    ($($test:ident: $name:literal;)*) => {
        $(#[test]
        fn $test() {
            recording($name);
        })*
    };
}

recordings! {
    plain_cuda_is_answered_as_the_card_did: "context";
    cupy_is_answered_as_the_card_did: "cupy";
    cuda_graphs_is_answered_as_the_card_did: "graph";
    cuda_ipc_is_answered_as_the_card_did: "ipc";
    jax_is_answered_as_the_card_did: "jax";
    managed_memory_is_answered_as_the_card_did: "managed";
    pinned_memory_is_answered_as_the_card_did: "pinned";
    nvidia_smi_is_answered_as_the_card_did: "smi";
    nvidia_smi_l_is_answered_as_the_card_did: "smil";
    nvidia_smi_q_is_answered_as_the_card_did: "smiq";
    training_is_answered_as_the_card_did: "train";
    virtual_memory_segments_is_answered_as_the_card_did: "vmm";
}
