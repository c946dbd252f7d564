use std::fmt::Debug;

use proptest::prelude::*;

use crate::*;

const UUID: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";

fn container(text: &str) -> ContainerId {
    ContainerId::try_from(text.to_owned()).unwrap()
}

fn uuid() -> GpuUuid {
    GpuUuid::try_from(UUID.to_owned()).unwrap()
}

fn slice() -> GpuSlice {
    GpuSlice { uuid: uuid(), minor: u32::MAX, memory_hard: u64::MAX, memory_soft: u64::MAX, weight: u32::MAX }
}

fn lease() -> Lease {
    Lease { lease: LeaseId(u64::MAX), uid: u32::MAX, sandbox_pid: u32::MAX }
}

fn usage() -> GpuUsage {
    GpuUsage { minor: u32::MAX, used: u64::MAX, peak: u64::MAX, denied: u64::MAX }
}

fn register() -> Register {
    Register {
        container: container(&"c".repeat(200)),
        pod: Some(container(&"p".repeat(200))),
        gpus: vec![slice(); 16],
        driver: "580.159.04".into(),
        adopt: Some(lease()),
    }
}

fn shim_to_scheduler() -> Vec<ShimToScheduler> {
    vec![
        ShimToScheduler::Register(register()),
        ShimToScheduler::SandboxStarted { pid: u32::MAX },
        ShimToScheduler::OpenSandbox { lease: LeaseId(u64::MAX) },
    ]
}

fn scheduler_to_shim() -> Vec<SchedulerToShim> {
    vec![
        SchedulerToShim::Granted(lease()),
        SchedulerToShim::Refused { reason: Reason::LedgerMismatch, detail: "d".repeat(2000) },
        SchedulerToShim::Acknowledged,
        SchedulerToShim::Stop { detail: "d".repeat(2000) },
    ]
}

fn sandbox_to_scheduler() -> Vec<SandboxToScheduler> {
    vec![SandboxToScheduler::Usage { ping: u32::MAX, gpus: vec![usage(); 16], refused: u64::MAX }]
}

fn scheduler_to_sandbox() -> Vec<SchedulerToSandbox> {
    vec![SchedulerToSandbox::Ping { ping: u32::MAX }]
}

fn range() -> MemoryRange {
    MemoryRange { start: u64::MAX, length: u64::MAX }
}

fn shim_to_sandbox() -> Vec<ShimToSandbox> {
    let settings = SandboxSettings {
        container: container(&"c".repeat(200)),
        gpus: vec![GpuSettings { uuid: uuid(), minor: u32::MAX, memory_hard: u64::MAX }; 16],
        driver: "580.159.04".into(),
        uvm_major: u32::MAX,
        killable: true,
    };
    let results = [
        PrivilegedResult::Thread { tgid: u32::MAX, thread: true },
        PrivilegedResult::Stopping,
        PrivilegedResult::Moved,
        PrivilegedResult::Shared { offset: u64::MAX, absent: true },
        PrivilegedResult::Private,
        PrivilegedResult::UvmRanges { ranges: vec![(u32::MAX, range()); 128], total: u64::MAX },
        PrivilegedResult::Failed { errno: i32::MIN, detail: "d".repeat(2000) },
        PrivilegedResult::Populated,
    ];
    let mut all = vec![
        ShimToSandbox::Start(settings),
        ShimToSandbox::Scheduler,
        ShimToSandbox::Listener { serial: u32::MAX },
    ];
    all.extend(results.map(|result| ShimToSandbox::Result { request: u32::MAX, result }));
    all
}

fn sandbox_to_shim() -> Vec<SandboxToShim> {
    let asks = [
        PrivilegedRequest::Thread { tid: u32::MAX },
        PrivilegedRequest::MoveRange { tid: u32::MAX, range: range(), tenant_file: u32::MAX },
        PrivilegedRequest::SharedRange { tid: u32::MAX, range: range() },
        PrivilegedRequest::UvmRanges,
        PrivilegedRequest::PopulateRange { tid: u32::MAX, range: range() },
    ];
    let mut all = vec![
        SandboxToShim::Ready,
        SandboxToShim::Serving { serial: u32::MAX },
        SandboxToShim::ListenerClosed { serial: u32::MAX },
    ];
    all.extend(asks.map(|ask| SandboxToShim::Request { request: u32::MAX, ask }));
    all.push(SandboxToShim::Stop { detail: "d".repeat(2000) });
    all
}

fn tool_to_scheduler() -> Vec<ToolToScheduler> {
    vec![ToolToScheduler::Status]
}

fn scheduler_to_tool() -> Vec<SchedulerToTool> {
    vec![
        SchedulerToTool::Gpu(StatusGpu {
            uuid: uuid(),
            minor: u32::MAX,
            memory: u64::MAX,
            guaranteed: u64::MAX,
            used: u64::MAX,
            tenants: u32::MAX,
        }),
        SchedulerToTool::Tenant(StatusTenant {
            container: container(&"c".repeat(200)),
            lease: lease(),
            gpus: vec![slice(); 16],
            usage: vec![usage(); 16],
            audited: vec![u64::MAX; 16],
            refused: u64::MAX,
        }),
        SchedulerToTool::End { driver: "580.159.04".into(), uptime: u64::MAX },
    ]
}

/// Every message, at its largest, there and back; returns the frames.
fn round_trip<M: Carries + Clone + PartialEq + Debug>(messages: &[M]) -> Vec<Vec<u8>> {
    let (mut sender, mut receiver) = (Sender::<M>::default(), Receiver::<M>::default());
    let mut frames = Vec::new();
    for message in messages {
        let frame = sender.encode(message).unwrap();
        assert_eq!(peek_link(&frame), Ok(M::LINK));
        assert_eq!(receiver.decode(&frame, message.files()).as_ref(), Ok(message));
        frames.push(frame);
    }
    frames
}

fn all_frames() -> Vec<Vec<u8>> {
    [
        round_trip(&shim_to_scheduler()),
        round_trip(&scheduler_to_shim()),
        round_trip(&sandbox_to_scheduler()),
        round_trip(&scheduler_to_sandbox()),
        round_trip(&shim_to_sandbox()),
        round_trip(&sandbox_to_shim()),
        round_trip(&tool_to_scheduler()),
        round_trip(&scheduler_to_tool()),
    ]
    .concat()
}

#[test]
fn every_message_at_its_largest_fits_a_frame_and_comes_back_equal() {
    assert_eq!(all_frames().len(), 3 + 4 + 1 + 1 + 11 + 9 + 1 + 3);
}

/// Frame header: magic (5 bytes), version, link, sequence; then the message's own number.
#[test]
fn numbers_on_the_wire_are_pinned() {
    fn number<M: Carries>(message: &M) -> Vec<u8> {
        Sender::<M>::default().encode(message).unwrap()[..9].to_vec()
    }
    fn pinned<M: Carries>(messages: &[M], link: u8) {
        let expected: Vec<_> = (0..u8::try_from(messages.len()).unwrap())
            .map(|n| vec![0xec, 0xe6, 0xc1, 0xbb, 6, 1, link, 0, n])
            .collect();
        assert_eq!(messages.iter().map(number).collect::<Vec<_>>(), expected);
    }
    pinned(&shim_to_scheduler(), 0);
    pinned(&scheduler_to_shim(), 0);
    pinned(&sandbox_to_scheduler(), 1);
    pinned(&scheduler_to_sandbox(), 1);
    pinned(&shim_to_sandbox()[..4], 2);
    pinned(&sandbox_to_shim()[..4], 2);
    assert_eq!(number(&sandbox_to_shim()[8])[8], 4);
    pinned(&tool_to_scheduler(), 3);
    pinned(&scheduler_to_tool(), 3);
}

#[test]
fn the_numbers_of_results_and_requests_are_pinned() {
    let results: Vec<u8> =
        shim_to_sandbox()[3..].iter().map(|message| Sender::default().encode(message).unwrap()[14]).collect();
    assert_eq!(results, [0, 1, 2, 3, 4, 5, 6, 7]);
    let asks: Vec<u8> = sandbox_to_shim()[3..8]
        .iter()
        .map(|message| Sender::default().encode(message).unwrap()[14])
        .collect();
    assert_eq!(asks, [0, 1, 2, 3, 4]);
}

#[test]
fn refusal_codes_are_pinned_and_an_unknown_one_is_refused() {
    use Reason::*;
    let codes = [
        (NotRoot, 1),
        (Duplicate, 2),
        (DriverChanged, 3),
        (UnknownGpu, 4),
        (MemoryExhausted, 5),
        (UidsExhausted, 6),
        (BadLimit, 7),
        (NoLease, 8),
        (GpuUnhealthy, 9),
        (Stopping, 10),
        (OutOfOrder, 11),
        (LedgerMismatch, 12),
    ];
    for (reason, code) in codes {
        assert_eq!((u16::from(reason), Reason::try_from(code)), (code, Ok(reason)));
    }
    for code in [0, 13, u16::MAX] {
        assert!(Reason::try_from(code).is_err());
    }
}

#[test]
fn a_frame_of_another_link_is_refused() {
    let frame = Sender::default().encode(&ToolToScheduler::Status).unwrap();
    assert_eq!(Receiver::<ShimToScheduler>::default().decode(&frame, 0), Err(FrameError::Malformed));
    let frame = Sender::default().encode(&SandboxToShim::Ready).unwrap();
    assert_eq!(Receiver::<SandboxToScheduler>::default().decode(&frame, 0), Err(FrameError::Malformed));
}

#[test]
fn another_version_is_named_whatever_follows_it() {
    let mut frame = Sender::default().encode(&ToolToScheduler::Status).unwrap();
    frame[5] = 9;
    for frame in [frame.clone(), frame[..6].to_vec()] {
        assert_eq!(
            Receiver::<ToolToScheduler>::default().decode(&frame, 0),
            Err(FrameError::Version { found: 9 })
        );
    }
}

#[test]
fn foreign_short_and_long_frames_are_refused() {
    let mut receiver = Receiver::<ToolToScheduler>::default();
    let frame = Sender::default().encode(&ToolToScheduler::Status).unwrap();
    for length in 0..frame.len() {
        assert!(receiver.decode(&frame[..length], 0).is_err(), "cut to {length}");
    }
    assert_eq!(receiver.decode(b"GET / HTTP/1.1\r\n", 0), Err(FrameError::Foreign));
    assert_eq!(receiver.decode(&[0; MAX_FRAME + 1], 0), Err(FrameError::TooLong { length: MAX_FRAME + 1 }));
    let long = SchedulerToShim::Stop { detail: "d".repeat(MAX_FRAME) };
    assert!(matches!(Sender::default().encode(&long), Err(FrameError::TooLong { .. })));
}

#[test]
fn bytes_behind_the_message_are_refused() {
    for mut frame in all_frames().into_iter().filter(|frame| frame.len() < MAX_FRAME) {
        frame.push(0);
        assert!(Receiver::<ShimToScheduler>::default().decode(&frame, 0).is_err());
    }
    let mut frame = Sender::default().encode(&ToolToScheduler::Status).unwrap();
    frame.push(0);
    assert_eq!(Receiver::<ToolToScheduler>::default().decode(&frame, 0), Err(FrameError::Malformed));
}

#[test]
fn a_lost_or_repeated_frame_is_refused_and_does_not_count() {
    let (mut sender, mut receiver) = (Sender::default(), Receiver::<SchedulerToSandbox>::default());
    let ping = SchedulerToSandbox::Ping { ping: 1 };
    let (first, second) = (sender.encode(&ping).unwrap(), sender.encode(&ping).unwrap());
    assert_eq!(receiver.decode(&second, 0), Err(FrameError::Sequence { found: 1, expected: 0 }));
    assert_eq!(receiver.decode(&first, 0), Ok(ping.clone()));
    assert_eq!(receiver.decode(&first, 0), Err(FrameError::Sequence { found: 0, expected: 1 }));
    assert_eq!(receiver.decode(&second, 0), Ok(ping));
}

#[test]
fn the_number_of_files_belongs_to_the_message() {
    let started = Sender::default().encode(&ShimToScheduler::SandboxStarted { pid: 7 }).unwrap();
    let mut receiver = Receiver::<ShimToScheduler>::default();
    for found in [0, 2] {
        assert_eq!(receiver.decode(&started, found), Err(FrameError::Files { found, expected: 1 }));
    }
    assert!(receiver.decode(&started, 1).is_ok());
    let counts: Vec<usize> = shim_to_sandbox().iter().map(Carries::files).collect();
    assert_eq!(counts, [18, 1, 1, 2, 0, 0, 1, 0, 0, 0, 0]);
    let counts: Vec<usize> = sandbox_to_shim().iter().map(Carries::files).collect();
    assert_eq!(counts, [0, 0, 0, 0, 1, 0, 0, 0, 0]);
}

#[test]
fn ids_are_checked_when_they_are_decoded() {
    for text in ["", "a b", "a\n", "ä", "a\0", &"a".repeat(201)] {
        assert!(ContainerId::try_from(text.to_owned()).is_err(), "{text:?}");
    }
    for text in
        [&UUID[4..], &UUID.to_uppercase(), "GPU-", "MIG-01234567-89ab-cdef-0123-456789abcdef", "GPU-../../x"]
    {
        assert!(GpuUuid::try_from(text.to_owned()).is_err(), "{text:?}");
    }
    // The same on the wire: a good frame whose container id gets a blank.
    let frame = Sender::default().encode(&shim_to_scheduler()[0]).unwrap();
    let at = frame.iter().position(|b| *b == b'c').unwrap();
    let mut bad = frame;
    bad[at] = b' ';
    assert_eq!(Receiver::<ShimToScheduler>::default().decode(&bad, 0), Err(FrameError::Malformed));
}

fn decode_everywhere(frame: &[u8], files: usize) {
    fn one<M: Carries>(frame: &[u8], files: usize) {
        if let Ok(message) = Receiver::<M>::default().decode(frame, files) {
            assert_eq!(message.files(), files);
        }
    }
    one::<ShimToScheduler>(frame, files);
    one::<SchedulerToShim>(frame, files);
    one::<SandboxToScheduler>(frame, files);
    one::<SchedulerToSandbox>(frame, files);
    one::<ShimToSandbox>(frame, files);
    one::<SandboxToShim>(frame, files);
    one::<ToolToScheduler>(frame, files);
    one::<SchedulerToTool>(frame, files);
    if let Err(error) = peek_link(frame) {
        assert!(!error.to_string().is_empty());
    }
}

proptest! {
    #[test]
    fn random_bytes_never_panic(frame in proptest::collection::vec(any::<u8>(), 0..200), files in 0usize..4) {
        decode_everywhere(&frame, files);
    }

    #[test]
    fn damaged_frames_never_panic(which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte in any::<u8>(),
                                  cut in any::<prop::sample::Index>(), files in 0usize..20) {
        let frames = all_frames();
        let mut frame = which.get(&frames).clone();
        let at = at.index(frame.len());
        frame[at] = byte;
        decode_everywhere(&frame, files);
        frame.truncate(cut.index(frame.len()));
        decode_everywhere(&frame, files);
    }
}
