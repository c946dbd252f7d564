//! From exec to serving.

use std::io;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpuslice_policy::Branch;
use gpuslice_proto::{Receiver, SandboxSettings, SandboxToShim, ShimToSandbox};
use gpuslice_sys::resident::Code;
use gpuslice_sys::{Socket, jail};

use crate::activity::Activity;
use crate::caller::Services;
use crate::confine::{self, ConfineError, Confined};
use crate::crew::Crew;
use crate::dispatch::{OwnFiles, Sandbox, StartError};
use crate::driver::Driver;
use crate::link::{LinkError, Shim};
use crate::log;
use crate::serve::Server;
use crate::supervise::{EndError, supervise};

/// The control socket's number.
const CONTROL: u32 = 3;
/// Longest wait for `Start`.
const START: Duration = Duration::from_secs(60);

/// Why the sandbox ended or did not start.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(
        "arguments {found:?}: expected a uid above 0 and a container id; this program is started by the shim"
    )]
    Arguments { found: Vec<String> },
    #[error("{step}")]
    Step { step: &'static str, source: io::Error },
    #[error(transparent)]
    Confine(ConfineError),
    #[error("waiting for Start")]
    Link(#[source] LinkError),
    #[error("the first message is not Start")]
    NotStart,
    #[error("driver {found}")]
    Unknown { found: String, source: gpuslice_policy::UnknownDriver },
    #[error("setting up the driver")]
    Driver(#[source] StartError),
    #[error("serving")]
    Serve(#[source] EndError),
}

fn at(step: &'static str) -> impl FnOnce(io::Error) -> RunError {
    move |source| RunError::Step { step, source }
}

/// Runs the sandbox: confines the process, then serves until the shim closes the control socket.
///
/// `files` is how many files the process was started with, the control socket (3) among them; others are
/// closed. `before_confinement` may open what `make_driver` needs: nothing can be opened afterwards.
pub fn run<T, D: Driver + 'static>(
    files: u32,
    before_confinement: impl FnOnce() -> io::Result<T>,
    make_driver: impl FnOnce(T, &SandboxSettings, &OwnFiles) -> io::Result<D>,
) -> ExitCode {
    match run_to_end(files, before_confinement, make_driver) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            let mut text = failed.to_string();
            let mut cause = std::error::Error::source(&failed);
            while let Some(next) = cause {
                text = format!("{text}: {next}");
                cause = next.source();
            }
            log::line(format_args!("{text}"));
            ExitCode::FAILURE
        }
    }
}

fn run_to_end<T, D: Driver + 'static>(
    files: u32,
    before_confinement: impl FnOnce() -> io::Result<T>,
    make_driver: impl FnOnce(T, &SandboxSettings, &OwnFiles) -> io::Result<D>,
) -> Result<(), RunError> {
    let uid = arguments()?;
    jail::close_from(files).map_err(at("closing files"))?;
    jail::quiet_malloc(HEAPS).map_err(at("setting up malloc"))?;
    let control = jail::inherited_file(CONTROL).map_err(at("taking the control socket"))?;
    let code = Code::find().map_err(at("finding the code in memory"))?;
    let prepared = before_confinement().map_err(at("preparing the driver"))?;
    confine::drop_rights(uid).map_err(RunError::Confine)?;
    let activity = Activity::new().map_err(at("making a socket pair"))?;
    let crew = Crew::start().map_err(at("starting threads"))?;
    let confined = confine::install_program(&Branch::every_command()).map_err(RunError::Confine)?;
    serve(&confined, (control, activity, code), &crew, |settings, files| {
        make_driver(prepared, settings, files)
    })
}

/// Heaps that the threads share: the main one, which grows by brk. Giving memory of any other one back makes glibc
/// open `/proc/sys/vm/overcommit_memory`, which the filter punishes with death.
const HEAPS: i32 = 1;

/// Uid and container from the command line.
fn arguments() -> Result<u32, RunError> {
    let found: Vec<String> = std::env::args().skip(1).collect();
    let [uid, container] = found.as_slice() else { return Err(RunError::Arguments { found }) };
    let digits = !uid.is_empty() && uid.bytes().all(|byte| byte.is_ascii_digit());
    match uid.parse::<u32>() {
        Ok(number) if digits && number != 0 && number != u32::MAX => {
            log::name(container);
            Ok(number)
        }
        _ => Err(RunError::Arguments { found }),
    }
}

fn serve<D: Driver + 'static>(
    _confined: &Confined,
    (control, activity, code): (OwnedFd, Activity, Code),
    crew: &Arc<Crew<D>>,
    make_driver: impl FnOnce(&SandboxSettings, &OwnFiles) -> io::Result<D>,
) -> Result<(), RunError> {
    let shim = Shim::new(Socket::from_fd(control));
    let mut receiver = Receiver::<ShimToSandbox>::default();
    let (message, files) = shim.receive(&mut receiver, Instant::now() + START).map_err(RunError::Link)?;
    let ShimToSandbox::Start(settings) = message else { return Err(RunError::NotStart) };
    let table = Branch::for_version(&settings.driver)
        .map_err(|source| RunError::Unknown { found: settings.driver.clone(), source })?;
    let mut files = files.into_iter();
    let (Some(control), Some(uvm)) = (files.next(), files.next()) else { return Err(RunError::NotStart) };
    let uvm = (settings.uvm_major != 0).then_some(uvm);
    let own = OwnFiles { control, uvm, gpus: files.collect() };
    let driver = make_driver(&settings, &own).map_err(at("making the driver"))?;
    let sandbox = Sandbox::new(driver, table, &settings, own).map_err(RunError::Driver)?;
    let server = Arc::new(Server {
        sandbox,
        services: Services {
            shim,
            threads: crate::threads::Threads::default(),
            moves: crate::pinned::Moves::default(),
            closer: crate::closer::Closer::default(),
        },
        activity,
    });
    crew.begin(Arc::clone(&server));
    server.services.shim.send(&SandboxToShim::Ready).map_err(RunError::Link)?;
    let end = supervise(&server, crew, receiver, code).map_err(RunError::Serve);
    server.sandbox.ended();
    end
}
