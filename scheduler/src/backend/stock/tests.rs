use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use gpuslice_sys::Arg;

use super::*;

/// A driver in small, with its own reading of the bytes.
#[derive(Clone, Default)]
struct Driver(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// (class, parent, handle) of each object.
    objects: Vec<(u32, u32, u32)>,
    /// Memory of each process: private, owned-shared, duped.
    memory: BTreeMap<u32, (u64, u64, u64)>,
    /// Status of the next control.
    status: u32,
}

const CLIENT: u32 = 0xc1d0_0019;
const IDS: [(u32, u32); 2] = [(0, 0x1b00), (1, 0x0a00)];

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn set(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

impl Rm for Driver {
    fn ioctl(&self, _: BorrowedFd<'_>, cmd: u32, arg: &mut Arg) -> std::io::Result<i32> {
        let mut state = self.0.lock().unwrap();
        let (number, size) = (cmd & 0xff, (cmd >> 16 & 0x3fff) as usize);
        assert_eq!((arg.bytes.len(), cmd >> 30, cmd >> 8 & 0xff), (size, 3, 0x46));
        match (number, size) {
            (0xc8, 2304) => {
                for (n, (minor, id)) in IDS.iter().enumerate() {
                    set(&mut arg.bytes, n * 72, &[1]);
                    set(&mut arg.bytes, n * 72 + 16, &id.to_le_bytes());
                    set(&mut arg.bytes, n * 72 + 56, &minor.to_le_bytes());
                }
            }
            (0x2b, 48) => {
                let [client, parent, handle, class] = [0, 4, 8, 12].map(|at| word(&arg.bytes, at));
                let handle = if class == 0x41 { CLIENT } else { handle };
                assert_eq!(client, if class == 0x41 { 0 } else { CLIENT });
                match class {
                    0x41 => assert!(arg.links.is_empty()),
                    0x80 => assert_eq!((parent, arg.links[0].bytes.len()), (CLIENT, 56)),
                    0x2080 => {
                        assert_eq!(arg.links[0].bytes, [0; 4]);
                        assert!(state.objects.contains(&(0x80, CLIENT, parent)));
                    }
                    other => panic!("class {other:#x}"),
                }
                assert!(!state.objects.iter().any(|object| object.2 == handle), "handle used twice");
                state.objects.push((class, parent, handle));
                set(&mut arg.bytes, 8, &handle.to_le_bytes());
            }
            (0x2a, 32) => {
                let [client, object, control, length] = [0, 4, 8, 24].map(|at| word(&arg.bytes, at));
                assert_eq!(
                    (client, length as usize, arg.links[0].at),
                    (CLIENT, arg.links[0].bytes.len(), 16)
                );
                if control != 0x205 {
                    assert!(
                        state.objects.iter().any(|(class, _, handle)| *class == 0x2080 && *handle == object)
                    );
                }
                let status = std::mem::take(&mut state.status);
                set(&mut arg.bytes, 28, &status.to_le_bytes());
                if status == 0 {
                    answer(&state, control, &mut arg.links[0].bytes);
                }
            }
            other => panic!("{other:x?}"),
        }
        Ok(0)
    }
}

fn answer(state: &State, control: u32, block: &mut [u8]) {
    match (control, block.len()) {
        (0x205, 32) => {
            let instance = IDS.iter().position(|(_, id)| *id == word(block, 0)).unwrap();
            set(block, 8, &u32::try_from(instance).unwrap().to_le_bytes());
        }
        (0x2080_1303, 1028) => {
            for entry in 0..word(block, 0) as usize {
                let kib: u32 = match word(block, 4 + 8 * entry) {
                    0x08 => 82_000_000,
                    0x09 => 81_000_000,
                    _ => 0,
                };
                set(block, 8 + 8 * entry, &kib.to_le_bytes());
            }
        }
        (0x2080_018d, 3812) => {
            assert_eq!((word(block, 0), word(block, 4)), (0, 0x2080));
            set(block, 8, &u32::try_from(state.memory.len()).unwrap().to_le_bytes());
            for (n, pid) in state.memory.keys().enumerate() {
                set(block, 12 + 4 * n, &pid.to_le_bytes());
            }
        }
        (0x2080_018e, 14408) => {
            for n in 0..word(block, 0) as usize {
                let at = 8 + 72 * n;
                match state.memory.get(&word(block, at)) {
                    None => set(block, at + 8, &0x57_u32.to_le_bytes()),
                    Some((private, owned, duped)) => {
                        set(block, at + 16, &private.to_le_bytes());
                        set(block, at + 24, &owned.to_le_bytes());
                        set(block, at + 32, &duped.to_le_bytes());
                    }
                }
            }
        }
        other => panic!("{other:x?}"),
    }
}

/// A node with `cards` cards whose files say everything.
fn node(root: &Path, cards: u32) -> Node {
    let node = Node { dev: root.join("dev"), proc_driver: root.join("proc") };
    std::fs::create_dir_all(&node.dev).unwrap();
    std::fs::write(node.control(), "").unwrap();
    for minor in 0..cards {
        let directory = node.proc_driver.join(format!("gpus/0000:{minor:02x}:00.0"));
        std::fs::create_dir_all(&directory).unwrap();
        let text = format!(
            "Model: \t NVIDIA H200\nGPU UUID: \t GPU-0000000{minor}-0000-0000-0000-000000000000\n\
             Bus Location: \t 0000:{minor:02x}:00.0\nDevice Minor: \t {minor}\n"
        );
        std::fs::write(directory.join("information"), text).unwrap();
        std::fs::write(node.gpu(minor), "").unwrap();
    }
    let version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n";
    std::fs::write(node.proc_driver.join("version"), version).unwrap();
    node
}

#[test]
fn each_card_gets_a_subdevice_and_the_least_of_its_sizes() {
    let root = tempfile::tempdir().unwrap();
    let driver = Driver::default();
    let stock = Stock::new(&node(root.path(), 2), driver.clone()).unwrap();
    let cards = stock.cards();
    assert_eq!(cards.iter().map(|card| card.minor).collect::<Vec<_>>(), [0, 1]);
    assert!(cards.iter().all(|card| card.memory == 81_000_000 << 10));
    assert_eq!(stock.driver(), "580.159.04");
    let classes: Vec<u32> = driver.0.lock().unwrap().objects.iter().map(|object| object.0).collect();
    assert_eq!(classes, [0x41, 0x80, 0x2080, 0x80, 0x2080]);
}

#[test]
fn a_card_without_a_node_is_left_out_and_a_node_without_any_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let node = node(root.path(), 2);
    std::fs::remove_file(node.gpu(0)).unwrap();
    let stock = Stock::new(&node, Driver::default()).unwrap();
    assert_eq!(stock.cards().iter().map(|card| card.minor).collect::<Vec<_>>(), [1]);
    std::fs::remove_file(node.gpu(1)).unwrap();
    let error = Stock::new(&node, Driver::default()).err().unwrap().to_string();
    assert!(error.contains("no usable GPU of 2 listed"), "{error}");
    std::fs::remove_file(node.control()).unwrap();
    let error = Stock::new(&node, Driver::default()).err().unwrap().to_string();
    assert!(error.contains("nvidiactl"), "{error}");
}

#[test]
fn an_audit_counts_own_and_shared_memory_once_and_lists_clients_without_any() {
    let root = tempfile::tempdir().unwrap();
    let driver = Driver::default();
    let mut stock = Stock::new(&node(root.path(), 1), driver.clone()).unwrap();
    // More processes than one call takes.
    let sandboxes: Vec<u32> = (1000..1450).collect();
    driver.0.lock().unwrap().memory =
        [(1001, (5, 7, 100)), (1440, (0, 0, 0)), (1449, (9, 0, 0)), (3, (4, 4, 4))].into();
    let expected: BTreeMap<u32, Holding> = [
        (1001, Holding { bytes: 12, listed: true }),
        (1440, Holding { bytes: 0, listed: true }),
        (1449, Holding { bytes: 9, listed: true }),
    ]
    .into();
    assert_eq!(stock.audit(0, &sandboxes).unwrap(), expected);
    assert!(stock.audit(0, &[]).unwrap().is_empty());
    assert!(stock.audit(5, &sandboxes).is_err());
}

#[test]
fn a_status_of_the_driver_is_an_error_and_not_an_empty_answer() {
    let root = tempfile::tempdir().unwrap();
    let driver = Driver::default();
    let mut stock = Stock::new(&node(root.path(), 1), driver.clone()).unwrap();
    driver.0.lock().unwrap().status = 0x0f;
    assert!(matches!(stock.audit(0, &[1]), Err(BackendError::Status { status: 0x0f, .. })));
    assert!(stock.audit(0, &[1]).is_ok());
}
