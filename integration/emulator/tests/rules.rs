//! The driver's rules, each with what it answers where one is broken.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a helper of a test fails the test"
)]

mod rig;

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use gpuslice_emulator::Node;
use rig::{Client, DEVICE, MIB, OK, Rig, SUBDEVICE, frontend, long, set, word, words};

const NO_MEMORY: u32 = 0x51;
const INVALID_CLIENT: u32 = 0x23;
const INVALID_OBJECT_HANDLE: u32 = 0x33;
const OBJECT_NOT_FOUND: u32 = 0x57;
const NOT_SUPPORTED: u32 = 0x56;

#[test]
fn client_handles_are_sequential_and_a_client_ends_with_its_file() {
    let rig = Rig::new(&[64]);
    let (first, second) = (Client::bare(&rig), Client::bare(&rig));
    assert_eq!((first.handle, second.handle), (0xc1d0_0000, 0xc1d0_0001));
    drop(first.control);
    assert_eq!(rig.clients(), 1);
    let copy = second.control.try_clone().unwrap();
    drop(second.control);
    assert_eq!(rig.clients(), 1, "a duplicate keeps the file open");
    drop(copy);
    assert_eq!(rig.clients(), 0);
}

#[test]
fn a_registered_file_keeps_its_control_file_alive() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    let Client { control, card, .. } = client;
    drop(control);
    assert_eq!(rig.clients(), 1);
    drop(card);
    assert_eq!(rig.clients(), 0);
}

#[test]
fn a_client_obeys_only_the_file_it_was_made_on() {
    let rig = Rig::new(&[64]);
    let (client, stranger) = (Client::new(&rig), Client::new(&rig));
    assert_eq!(client.memory(0x20, MIB), OK);
    let mut free = words(&[client.handle, DEVICE, 0x20, 0]);
    assert_eq!(rig.call(&stranger.control, 0x29, &mut free, 12), INVALID_CLIENT);
    assert_eq!(client.alloc_on(&stranger.control, DEVICE, 0x21, 0x90f1, &mut [0; 56]), INVALID_CLIENT);
    let mut free = words(&[0xdead, DEVICE, 0x20, 0]);
    assert_eq!(rig.call(&client.control, 0x29, &mut free, 12), INVALID_OBJECT_HANDLE);
    assert_eq!(rig.used(0), MIB);
}

#[test]
fn a_device_needs_an_open_file_of_its_card_in_the_caller() {
    let rig = Rig::new(&[64, 64]);
    let client = Client::bare(&rig);
    let mut second_card = [0; 56];
    set(&mut second_card, 0, &1_u32.to_le_bytes());
    assert_eq!(client.alloc(client.handle, DEVICE, 0x80, &mut second_card), 0x1b);
    let _file = rig.open(Node::Gpu(1));
    let mut second_card = [0; 56];
    set(&mut second_card, 0, &1_u32.to_le_bytes());
    assert_eq!(client.alloc(client.handle, DEVICE, 0x80, &mut second_card), OK);
    assert_eq!(client.memory(0x20, MIB), OK);
    assert_eq!((rig.used(0), rig.used(1)), (0, MIB));
}

#[test]
fn sizes_and_sides_of_escapes_are_exact() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    for (nr, size) in [(0x2a, 31), (0x2a, 33), (0x29, 15), (0x4e, 48), (0xd6, 4), (0xda, 0), (0xff, 8)] {
        let answer = rig.ioctl(&client.control, frontend(nr, size), &mut [0; 64]);
        assert_eq!(answer.errno, libc::EINVAL, "{nr:#x} of {size}");
    }
    let on_card = rig.ioctl(&client.card, frontend(0x2a, 32), &mut [0; 32]);
    assert_eq!(on_card.errno, libc::EINVAL);
    let on_control = rig.ioctl(&client.control, frontend(0xd7, 560), &mut [0; 560]);
    assert_eq!(on_control.errno, libc::EINVAL);
    let elsewhere = std::fs::File::open("/dev/null").unwrap().into();
    assert_eq!(rig.ioctl(&elsewhere, frontend(0x2a, 32), &mut [0; 32]).errno, libc::ENOTTY);
}

#[test]
fn the_type_byte_counts_for_nothing_and_211_carries_any_escape() {
    let rig = Rig::new(&[64]);
    let control = rig.open(Node::Control);
    let mut block = words(&[0, 0, 0, 0x41, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.ioctl(&control, 0x0030_542b, &mut block).errno, 0);
    let mut inner = words(&[0, 0, 0, 0x41, 0, 0, 0, 0, 0, 0, 0, 0]);
    let mut outer = words(&[0x2b, 48, 0, 0]);
    set(&mut outer, 8, &rig::address(&inner).to_le_bytes());
    assert_eq!(rig.ioctl(&control, frontend(211, 16), &mut outer).errno, 0);
    assert_eq!(rig.clients(), 2);
    set(&mut inner, 0, &[0]);
}

#[test]
fn wild_pointers_fault_and_nothing_is_made() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    assert_eq!(
        rig.emulator.ioctl(&rig.caller, &client.control, frontend(0x2b, 48), 0x1000).errno,
        libc::EFAULT
    );
    let mut block = words(&[client.handle, DEVICE, 0x20, 0x40, 0x1000, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.call(&client.control, 0x2b, &mut block, 40), 0x1e);
    let mut block = words(&[client.handle, client.handle, 0x214, 0, 0x1000, 0, 384, 0]);
    assert_eq!(rig.call(&client.control, 0x2a, &mut block, 28), 0x1e);
    assert_eq!(rig.used(0), 0);
}

#[test]
fn controls_are_checked_in_the_drivers_order() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    assert_eq!(client.control(SUBDEVICE, 0x2080_1303, &mut [0; 1027]), 0x1f);
    assert_eq!(client.control(0xdead, 0x2080_1303, &mut [0; 1028]), OBJECT_NOT_FOUND);
    assert_eq!(client.control(DEVICE, 0x2080_1303, &mut [0; 1028]), NOT_SUPPORTED);
    assert_eq!(client.control(SUBDEVICE, 0x2080_7fff, &mut [0; 4]), NOT_SUPPORTED);
    assert_eq!(client.control(SUBDEVICE, 0x2080_8fff, &mut [0; 4]), NOT_SUPPORTED);
    let mut block = words(&[0xdead, 0, 0x214, 0, 0, 0, 0, 0]);
    assert_eq!(rig.call(&client.control, 0x2a, &mut block, 28), INVALID_CLIENT);
}

#[test]
fn memory_is_rounded_reported_and_refused_when_the_card_is_full() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    let mut parameters = [0; 128];
    set(&mut parameters, 64, &(3 * MIB).to_le_bytes());
    assert_eq!(client.alloc(DEVICE, 0x20, 0x40, &mut parameters), 0x39, "memory needs an owner");
    set(&mut parameters, 0, &client.handle.to_le_bytes());
    assert_eq!(client.alloc(DEVICE, 0x20, 0x40, &mut parameters), OK);
    assert_eq!((long(&parameters, 64), long(&parameters, 88)), (4 * MIB, 4 * MIB - 1));
    assert_eq!(client.memory(0x21, 1), OK);
    assert_eq!(rig.used(0), 4 * MIB + (64 << 10));
    let mut info = [0; 1028];
    set(&mut info, 0, &words(&[2, 0x08, 0, 0x16]));
    assert_eq!(client.control(SUBDEVICE, 0x2080_1303, &mut info), OK);
    assert_eq!((word(&info, 8), word(&info, 16)), (64 << 10, (60 << 10) - 64));
    assert_eq!(client.memory(0x22, 60 * MIB), NO_MEMORY);
    assert_eq!(client.memory(0x22, 58 * MIB), OK);
}

#[test]
fn freeing_takes_children_and_dependants_and_the_unknown_in_stride() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    assert_eq!(client.free(0xdead), OK);
    assert_eq!(client.alloc(DEVICE, 0x30, 0x90f1, &mut [0; 56]), OK);
    let mut group = [0; 20];
    set(&mut group, 8, &0x30_u32.to_le_bytes());
    set(&mut group, 12, &1_u32.to_le_bytes());
    assert_eq!(client.alloc(DEVICE, 0x31, 0xa06c, &mut group), OK);
    assert_eq!(client.memory(0x33, 2 * MIB), OK);
    let mut channel = [0; 368];
    set(&mut channel, 32, &0x33_u32.to_le_bytes());
    set(&mut channel, 64, &0x2000_u64.to_le_bytes());
    assert_eq!(client.alloc(0x31, 0x32, 0xc86f, &mut channel), OK);
    assert_eq!(client.free(0x33), OK);
    assert!(rig.used(0) >= 2 * MIB, "the channel holds its USERD");
    assert_eq!(client.free(0x30), OK);
    assert_eq!(rig.used(0), 0, "group and channel depended on the address space");
    assert_eq!(client.memory(0x32, MIB), OK, "its handle is free again");
}

#[test]
fn duplicates_keep_memory_and_only_the_same_process_may_make_them() {
    let rig = Rig::new(&[64]);
    let (first, second) = (Client::new(&rig), Client::new(&rig));
    assert_eq!(first.memory(0x20, MIB), OK);
    assert_eq!(second.dup(0x20, &first, 0x20), OK);
    assert_eq!(first.free(0x20), OK);
    assert_eq!(rig.used(0), MIB);
    assert_eq!(second.dup(0x21, &first, 0x20), OBJECT_NOT_FOUND);
    assert_eq!(second.free(0x20), OK);
    assert_eq!(rig.used(0), 0);
}

#[test]
fn a_mapping_shows_its_memory_and_a_stale_one_is_told() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    assert_eq!(client.memory(0x20, 2 * MIB), OK);
    let (first, cookie) = client.map(0x20, 2 * MIB).unwrap();
    let (second, _) = client.map(0x20, 2 * MIB).unwrap();
    let (first, second) = (std::fs::File::from(first), std::fs::File::from(second));
    first.write_all_at(b"seen", 4096).unwrap();
    let mut seen = [0; 4];
    second.read_exact_at(&mut seen, 4096).unwrap();
    assert_eq!(&seen, b"seen");
    drop(first);
    assert_eq!(client.unmap(0x20, cookie), OK);
    assert_eq!(rig.violations(), 0, "the file was closed before the mapping was undone");
    assert_eq!(client.free(0x20), OK);
    assert_eq!(rig.violations(), 1, "the second file still shows the memory");
    drop(second);
    assert_eq!(client.map(0x20, MIB).unwrap_err(), OBJECT_NOT_FOUND);
}

#[test]
fn a_file_carries_one_mapping_for_life() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    assert_eq!(client.memory(0x20, MIB), OK);
    assert_eq!(client.map(0x20, 2 * MIB).unwrap_err(), 0x2e);
    let file = rig.open(Node::Gpu(0));
    for expected in [OK, 0x63] {
        let mut block = words(&[client.handle, SUBDEVICE, 0x20, 0, 0, 0, 0x1000, 0, 0, 0, 0, 0, 0, 0]);
        set(&mut block, 48, &file.as_raw_fd().to_le_bytes());
        assert_eq!(rig.call(&client.control, 0x4e, &mut block, 40), expected);
    }
}

#[test]
fn work_put_into_a_scheduled_channel_is_consumed_and_a_disabled_one_stands_still() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    let mut group = [0; 20];
    set(&mut group, 12, &1_u32.to_le_bytes());
    assert_eq!(client.alloc(DEVICE, 0x31, 0xa06c, &mut group), OK);
    assert_eq!(client.memory(0x33, 2 * MIB), OK);
    let mut channel = [0; 368];
    set(&mut channel, 32, &0x33_u32.to_le_bytes());
    set(&mut channel, 64, &0x2000_u64.to_le_bytes());
    assert_eq!(client.alloc(0x31, 0x32, 0xc86f, &mut channel), OK);
    let file = std::fs::File::from(client.map(0x33, 2 * MIB).unwrap().0);
    let get = || {
        rig.emulator.tick(false);
        let mut word = [0; 4];
        file.read_exact_at(&mut word, 0x2088).unwrap();
        u32::from_le_bytes(word)
    };
    file.write_all_at(&7_u32.to_le_bytes(), 0x208c).unwrap();
    assert_eq!(get(), 0, "not scheduled yet");
    assert_eq!(client.control(0x31, 0xa06c_0101, &mut [1, 0, 0]), OK);
    assert_eq!(get(), 7);
    let mut disable = [0; 536];
    set(&mut disable, 0, &words(&[1, 1]));
    set(&mut disable, 24, &client.handle.to_le_bytes());
    set(&mut disable, 280, &0x32_u32.to_le_bytes());
    assert_eq!(client.control(SUBDEVICE, 0x2080_110b, &mut disable), OK);
    file.write_all_at(&9_u32.to_le_bytes(), 0x208c).unwrap();
    assert_eq!(get(), 7);
    disable[0] = 0;
    assert_eq!(client.control(SUBDEVICE, 0x2080_110b, &mut disable), OK);
    assert_eq!(get(), 9);
}

#[test]
fn an_events_number_is_a_key_not_a_file() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    let mut event = [0; 24];
    set(&mut event, 0, &words(&[client.handle, 0, 0x79, 0, 777]));
    assert_eq!(client.alloc(SUBDEVICE, 0x40, 0x79, &mut event.clone()), OBJECT_NOT_FOUND);
    let mut os_event = words(&[client.handle, SUBDEVICE, 777, 0]);
    assert_eq!(rig.call(&client.card, 0xce, &mut os_event, 12), OK);
    assert_eq!(rig.call(&client.card, 0xce, &mut os_event, 12), 0x1a);
    assert_eq!(client.alloc(SUBDEVICE, 0x40, 0x79, &mut event), OK);
    assert_eq!(long(&event, 16) >> 32, 0xffff_8881, "the driver leaves a kernel address there");
}

#[test]
fn pinned_memory_must_be_mapped_in_the_caller() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    let memory = vec![1_u8; 1 << 20];
    let pin = |at: u64, expected: u32| {
        let mut block = words(&[client.handle, DEVICE, 0x50, 0x71, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        set(&mut block, 24, &at.to_le_bytes());
        set(&mut block, 32, &0xffff_u64.to_le_bytes());
        assert_eq!(rig.call(&client.card, 0x27, &mut block, 40), expected);
    };
    pin(0x1000, 0x1e);
    pin(rig::address(&memory), OK);
    assert_eq!(rig.used(0), 0, "host memory is not the card's");
}

#[test]
fn exported_memory_lives_until_the_file_closes() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    assert_eq!(client.memory(0x20, MIB), OK);
    let carrier = rig.open(Node::Control);
    let mut export = words(&[1, DEVICE, DEVICE, 0x20, 0, 0]);
    set(&mut export, 16, &carrier.as_raw_fd().to_le_bytes());
    assert_eq!(client.control(client.handle, 0x3d05, &mut export), OK);
    assert_eq!(client.free(0x20), OK);
    assert_eq!(rig.used(0), MIB);
    let mut import = words(&[0, 1, DEVICE, DEVICE, 0x21]);
    set(&mut import, 0, &carrier.as_raw_fd().to_le_bytes());
    assert_eq!(client.control(client.handle, 0x3d06, &mut import), OK);
    drop(carrier);
    assert_eq!(rig.used(0), MIB);
    assert_eq!(client.free(0x21), OK);
    assert_eq!(rig.used(0), 0);
}

#[test]
fn uvm_refuses_before_initialize_and_holds_what_it_maps() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    let uvm = rig.open(Node::Uvm);
    let status = |cmd: u32, block: &mut [u8], at: usize| {
        assert_eq!(rig.ioctl(&uvm, cmd, block).errno, 0);
        word(block, at)
    };
    assert_eq!(status(23, &mut [0; 16], 8), 0x16);
    assert_eq!(rig.ioctl(&uvm, 99, &mut [0; 64]).errno, libc::EINVAL);
    let mut multi_process = [0; 16];
    set(&mut multi_process, 0, &2_u64.to_le_bytes());
    assert_eq!(status(0x3000_0001, &mut multi_process, 8), OK);
    assert_eq!(status(39, &mut [0; 8], 4), OK);
    let mut mm = uvm.as_raw_fd().to_le_bytes().to_vec();
    mm.extend([0; 4]);
    assert_eq!(status(75, &mut mm, 4), 0x0001_0006);
    assert_eq!(client.memory(0x20, 2 * MIB), OK);
    let mut range = [0; 24];
    set(&mut range, 0, &0x2_0000_0000_u64.to_le_bytes());
    set(&mut range, 8, &(2 * MIB).to_le_bytes());
    assert_eq!(status(73, &mut range, 16), OK);
    assert_eq!(status(73, &mut range, 16), 0x68);
    let mut map = vec![0; 9264];
    set(&mut map, 0, &range[..16]);
    set(&mut map, 9252, &words(&[client.handle, 0x20]));
    assert_eq!(status(33, &mut map, 9260), OK);
    assert_eq!(client.free(0x20), OK);
    assert_eq!(rig.used(0), 2 * MIB);
    assert_eq!(status(34, &mut range, 16), OK);
    assert_eq!(rig.used(0), 0);
}

#[test]
fn faults_hit_what_they_name_and_no_more() {
    let rig = Rig::new(&[64]);
    let client = Client::new(&rig);
    let ask = |text: &str| gpuslice_emulator::ask(&rig.emulator, text);
    let planted = ask(r#"{"do":"fault","match":{"nr":43,"what":64},"effect":{"status":81},"times":1}"#);
    assert!(planted.contains("\"ok\":true"), "{planted}");
    assert_eq!(client.alloc(DEVICE, 0x30, 0x90f1, &mut [0; 56]), OK);
    assert_eq!(client.memory(0x20, MIB), NO_MEMORY);
    assert_eq!(client.memory(0x20, MIB), OK);
    ask(r#"{"do":"fault","match":{"node":"ctl"},"effect":{"errno":5}}"#);
    assert_eq!(rig.ioctl(&client.control, frontend(0xd6, 8), &mut [0; 8]).errno, libc::EIO);
    ask(r#"{"do":"release"}"#);
    assert_eq!(rig.ioctl(&client.control, frontend(0xd6, 8), &mut [0; 8]).errno, 0);
    ask(r#"{"do":"gpu-lost","minor":0}"#);
    assert_eq!(client.memory(0x21, MIB), 0x0f);
    assert!(ask(r#"{"do":"nonsense"}"#).contains("\"ok\":false"));
}

#[test]
fn the_journal_has_every_call_with_its_name_and_status() {
    let rig = Rig::new(&[1]);
    let client = Client::new(&rig);
    assert_eq!(client.memory(0x20, 4 * MIB), NO_MEMORY);
    let journal: serde_json::Value =
        serde_json::from_str(&gpuslice_emulator::ask(&rig.emulator, r#"{"do":"journal"}"#)).unwrap();
    let last = journal["calls"].as_array().unwrap().last().unwrap();
    assert_eq!(last["name"], "NV01_MEMORY_LOCAL_USER");
    assert_eq!(last["status"], NO_MEMORY);
    assert_eq!(last["pid"], std::process::id());
}
