//! A driver and a tenant in small, for tests of dispatch.

mod driver;
mod tenant;

pub(crate) use driver::FakeDriver;
pub(crate) use tenant::{FakeCaller, PARAMS, Tenant};

use std::os::fd::OwnedFd;

use gpuslice_policy::Branch;
use gpuslice_proto::{ContainerId, GpuSettings, GpuUuid, SandboxSettings};

use crate::dispatch::{OwnFiles, Sandbox};

/// An open file that nothing else is.
pub(crate) fn file() -> OwnedFd {
    tempfile::tempfile().unwrap().into()
}

/// A sandbox over a fake driver with three cards, of which those with minor numbers 0 and 2 are granted.
pub(crate) fn sandbox(quota: u64) -> Sandbox<FakeDriver> {
    let driver = FakeDriver::new(3);
    let gpus = [0u32, 2];
    let settings = SandboxSettings {
        container: ContainerId::try_from("test/one".to_owned()).unwrap(),
        gpus: gpus
            .iter()
            .map(|minor| GpuSettings {
                uuid: GpuUuid::try_from(format!("GPU-00000000-0000-0000-0000-00000000000{minor}")).unwrap(),
                minor: *minor,
                memory_hard: quota,
            })
            .collect(),
        driver: "580.159.04".to_owned(),
        uvm_major: 238,
        killable: false,
    };
    let files = OwnFiles {
        control: driver.open(crate::driver::Node::Control),
        uvm: None,
        gpus: gpus.iter().map(|minor| driver.open(crate::driver::Node::Gpu { minor: *minor })).collect(),
    };
    Sandbox::new(driver, Branch::for_version("580.159.04").unwrap(), &settings, files).unwrap()
}
