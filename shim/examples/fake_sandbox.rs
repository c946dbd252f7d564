//! A program in the place of the sandbox, for the tests of the shim: it confines itself and speaks the protocol, but
//! serves nothing. The first word of its container's name says how it behaves.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use gpuslice_proto::{
    MAX_FRAME, PrivilegedRequest, PrivilegedResult, Receiver, SandboxToShim, Sender, ShimToSandbox,
};
use gpuslice_sys::jail::{self, Limits};
use gpuslice_sys::{Instruction, Socket, bpf};

struct Link {
    socket: Socket,
    sender: Sender<SandboxToShim>,
    receiver: Receiver<ShimToSandbox>,
}

impl Link {
    fn say(&mut self, message: &SandboxToShim) {
        if let Ok(frame) = self.sender.encode(message) {
            self.bytes(&frame);
        }
    }

    fn bytes(&self, bytes: &[u8]) {
        if self.socket.send(bytes, &[], Instant::now() + Duration::from_secs(5)).is_err() {
            eprintln!("the shim is gone");
        }
    }

    fn hear(&mut self) -> Option<(ShimToSandbox, Vec<OwnedFd>)> {
        let mut buffer = [0; MAX_FRAME];
        let hour = Instant::now() + Duration::from_secs(3600);
        let (length, files) = self.socket.recv(&mut buffer, 18, hour).ok()?;
        let message = self.receiver.decode(buffer.get(..length)?, files.len()).ok()?;
        Some((message, files))
    }

    fn ask(&mut self, ask: PrivilegedRequest) -> String {
        self.say(&SandboxToShim::Request { request: 1, ask });
        match self.hear() {
            Some((ShimToSandbox::Result { result: PrivilegedResult::Failed { errno, .. }, .. }, _)) => {
                format!("failed {errno}")
            }
            Some((ShimToSandbox::Result { result, .. }, files)) => {
                format!("{result:?} with {} files", files.len())
            }
            other => format!("{other:?}"),
        }
    }
}

fn confine(uid: u32) -> std::io::Result<()> {
    const ALLOW: Instruction = Instruction { code: 6, jt: 0, jf: 0, k: 0x7fff_0000 };
    jail::namespaces()?;
    jail::limits(Limits { files: 64, file_size: 1 << 20 })?;
    jail::drop_to(uid)?;
    jail::not_dumpable()?;
    jail::no_new_privileges()?;
    bpf::install(&[ALLOW])
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, uid, container] = arguments.as_slice() else { return ExitCode::from(2) };
    let manner = container.rsplit('/').next().and_then(|name| name.split('-').next()).unwrap_or("");
    if manner == "early" {
        eprintln!("no driver here");
        return ExitCode::from(3);
    }
    if std::env::vars_os().next().is_some() {
        eprintln!("the environment is not empty");
        return ExitCode::from(4);
    }
    if manner != "loose"
        && let Err(error) = uid.parse().map_err(std::io::Error::other).and_then(confine)
    {
        eprintln!("can't confine myself: {error}");
        return ExitCode::from(5);
    }
    let Ok(socket) = jail::inherited_file(3) else { return ExitCode::from(6) };
    let link =
        Link { socket: Socket::from_fd(socket), sender: Sender::default(), receiver: Receiver::default() };
    serve(link, manner);
    ExitCode::SUCCESS
}

fn serve(mut link: Link, manner: &str) {
    let mut kept = Vec::new();
    while let Some((message, files)) = link.hear() {
        kept.extend(files);
        match message {
            ShimToSandbox::Start(_) if manner == "mute" => {}
            ShimToSandbox::Start(_) => link.say(&SandboxToShim::Ready),
            ShimToSandbox::Listener { serial } => {
                link.say(&SandboxToShim::Serving { serial });
                match manner {
                    "mortal" => {
                        std::thread::sleep(Duration::from_millis(200));
                        return eprintln!("I am dying");
                    }
                    "stops" => link.say(&SandboxToShim::Stop { detail: "three foreign\nfiles".into() }),
                    "babbles" => link.bytes(b"hello"),
                    "asks" => {
                        let foreign = link.ask(PrivilegedRequest::Thread { tid: 1 });
                        let ranges = link.ask(PrivilegedRequest::UvmRanges);
                        link.say(&SandboxToShim::Stop { detail: format!("{foreign}; {ranges}") });
                    }
                    _ => eprintln!("serving {serial}"),
                }
            }
            ShimToSandbox::Scheduler => eprintln!("a scheduler"),
            ShimToSandbox::Result { .. } => {}
        }
    }
}
