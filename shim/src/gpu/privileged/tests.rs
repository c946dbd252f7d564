use std::process::{Child, Command};
use std::time::Duration;

use gpuslice_sys::{SharedMapping, TenantMemory};

use super::*;

fn container(membership: Membership, uvm: UvmFile) -> Container {
    Container { proc: "/proc".into(), cgroups: "/sys/fs/cgroup".into(), membership, uvm }
}

/// Everything of the caller's own cgroup is the container.
fn own() -> Container {
    let membership = Membership::of(Path::new("/proc"), std::process::id()).unwrap();
    container(membership, UvmFile::Device { major: 1 })
}

fn foreign() -> Container {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("1")).unwrap();
    std::fs::write(folder.path().join("1/cgroup"), "0::/somewhere/else\n").unwrap();
    container(Membership::of(folder.path(), 1).unwrap(), UvmFile::Device { major: 1 })
}

struct Sleeper(Child);

impl Sleeper {
    fn new() -> Sleeper {
        Sleeper(Command::new("sleep").arg("30").spawn().unwrap())
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn ask_of(container: &Container, request: PrivilegedRequest, file: Option<OwnedFd>) -> Answer {
    let answer = std::cell::Cell::new(None);
    container
        .serve(request, file, Instant::now() + Duration::from_secs(2), &|served| answer.set(Some(served)));
    answer.into_inner().unwrap()
}

fn errno(answer: &Answer) -> i32 {
    match &answer.0 {
        PrivilegedResult::Failed { errno, .. } => *errno,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_thread_of_the_container_is_opened_with_its_memory() {
    let sleeper = Sleeper::new();
    let tid = sleeper.0.id();
    let (result, files) = ask_of(&own(), PrivilegedRequest::Thread { tid }, None);
    assert!(matches!(result, PrivilegedResult::Thread { tgid, .. } if tgid == tid), "{result:?}");
    assert_eq!(files.len(), 2);
    assert!(!process::pidfd_exited(files[0].as_fd()));
}

#[test]
fn a_thread_of_another_cgroup_and_one_that_is_gone_are_refused() {
    let mut sleeper = Sleeper::new();
    let tid = sleeper.0.id();
    for request in [
        PrivilegedRequest::Thread { tid },
        PrivilegedRequest::SharedRange { tid, range: MemoryRange { start: 4096, length: 4096 } },
        PrivilegedRequest::PopulateRange { tid, range: MemoryRange { start: 4096, length: 4096 } },
    ] {
        let answer = ask_of(&foreign(), request, None);
        assert_eq!((errno(&answer), answer.1.len()), (Errno::EPERM as i32, 0));
    }
    let file = memory::memfd("x", 4096).unwrap();
    let range = MemoryRange { start: 4096, length: 4096 };
    let ask = PrivilegedRequest::MoveRange { tid, range, tenant_file: 3 };
    assert_eq!(errno(&ask_of(&foreign(), ask, Some(file))), Errno::EPERM as i32);
    assert_eq!(errno(&ask_of(&own(), ask, None)), Errno::EBADF as i32);
    sleeper.0.kill().unwrap();
    sleeper.0.wait().unwrap();
    sleeper = Sleeper::new();
    let answer = ask_of(&own(), PrivilegedRequest::Thread { tid }, None);
    assert!(matches!(answer.0, PrivilegedResult::Failed { .. }));
    drop(sleeper);
}

#[test]
fn a_shared_range_gives_its_file_and_a_private_one_says_so() {
    let file = memory::memfd("shared", 4 * 4096).unwrap();
    let mapping = SharedMapping::new(file.as_fd(), 4096, 3 * 4096, true).unwrap();
    let tid = std::process::id();
    let ask = |start, length| {
        let range = MemoryRange { start, length };
        ask_of(&own(), PrivilegedRequest::SharedRange { tid, range }, None)
    };
    let (result, files) = ask(mapping.address() + 4096, 4096);
    assert_eq!(result, PrivilegedResult::Shared { offset: 2 * 4096, absent: true });
    assert_eq!(identify(files[0].as_fd()).unwrap(), identify(file.as_fd()).unwrap());
    // A page of the file that this process has not mapped yet counts as absent: who made it can't be told.
    let writer = std::fs::File::from(file);
    writer.write_all_at(&[1; 4 * 4096], 0).unwrap();
    assert_eq!(ask(mapping.address(), 2 * 4096).0, PrivilegedResult::Shared { offset: 4096, absent: true });
    TenantMemory::new(std::fs::File::open("/proc/self/mem").unwrap().into())
        .read_at(mapping.address(), &mut [0; 2 * 4096])
        .unwrap();
    assert_eq!(ask(mapping.address(), 2 * 4096).0, PrivilegedResult::Shared { offset: 4096, absent: false });
    assert_eq!(errno(&ask(mapping.address(), 1 << 40)), Errno::EFAULT as i32);
    assert_eq!(errno(&ask(4096, 4096)), Errno::EFAULT as i32);
    let local = Box::new([0_u8; 8192]);
    let (result, _) = ask(&raw const local as u64 & !4095, 4096);
    assert_eq!(result, PrivilegedResult::Private);
}

#[test]
fn mappings_of_the_uvm_file_are_counted_in_every_process_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nvidia-uvm");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    let other = memory::memfd("other", 4096).unwrap();
    let found = identify(file.as_fd()).unwrap();
    std::fs::create_dir_all(folder.path().join("pids/pod/c1")).unwrap();
    std::fs::write(folder.path().join("pids/pod/c1/cgroup.procs"), format!("{}\n", std::process::id()))
        .unwrap();
    std::fs::create_dir(folder.path().join("1")).unwrap();
    std::fs::write(folder.path().join("1/cgroup"), "3:pids:/pod/c1\n").unwrap();
    let mut asked = container(
        Membership::of(folder.path(), 1).unwrap(),
        UvmFile::File { device: found.dev, inode: found.inode },
    );
    asked.cgroups = folder.path().to_owned();
    let none = ask_of(&asked, PrivilegedRequest::UvmRanges, None).0;
    assert_eq!(none, PrivilegedResult::UvmRanges { ranges: Vec::new(), total: 0 });
    let one = SharedMapping::new(file.as_fd(), 0, 1 << 20, true).unwrap();
    let _other = SharedMapping::new(other.as_fd(), 0, 4096, true).unwrap();
    let (result, _) = ask_of(&asked, PrivilegedRequest::UvmRanges, None);
    let range = MemoryRange { start: one.address(), length: 1 << 20 };
    assert_eq!(
        result,
        PrivilegedResult::UvmRanges { ranges: vec![(std::process::id(), range)], total: 1 << 20 }
    );
}

#[test]
fn a_process_without_its_first_thread_is_counted_by_another() {
    let folder = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(folder.path().join("nvidia-uvm")).unwrap();
    let found = identify(file.as_fd()).unwrap();
    let make = |path: &str, text: &str| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    make("pids/pod/c1/cgroup.procs", "7\n");
    make("1/cgroup", "3:pids:/pod/c1\n");
    // As of a process whose first thread called exit(2): the kernel shows no memory there.
    make("7/maps", "");
    make("7/task/7/comm", "");
    make("7/task/8/comm", "");
    let line = format!(
        "1000-201000 rw-s 00001000 {:x}:{:x} {} /dev/nvidia-uvm\n",
        found.dev.0, found.dev.1, found.inode
    );
    make("8/maps", &line);
    std::fs::create_dir(folder.path().join("8/map_files")).unwrap();
    let place = folder.path().join("8/map_files/1000-201000");
    std::os::unix::fs::symlink(folder.path().join("nvidia-uvm"), place).unwrap();
    let membership = Membership::of(folder.path(), 1).unwrap();
    let uvm = UvmFile::File { device: found.dev, inode: found.inode };
    let mut asked = container(membership, uvm);
    asked.proc = folder.path().to_owned();
    asked.cgroups = folder.path().to_owned();
    let result = ask_of(&asked, PrivilegedRequest::UvmRanges, None).0;
    let range = MemoryRange { start: 0x1000, length: 0x20_0000 };
    assert_eq!(result, PrivilegedResult::UvmRanges { ranges: vec![(7, range)], total: 0x20_0000 });
}
