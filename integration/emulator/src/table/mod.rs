//! Facts of driver 580 that the emulator goes by: classes, controls, UVM commands, escape sizes.
//!
//! Owns: the lookup functions; the rows are in the files beside. Trusts: nothing from the sandbox, whose
//! policy table is another one on purpose: the same mistake must not be made twice. Failure: an unknown
//! number is `None`, and the caller answers as the driver would.

mod classes;
mod controls;
mod uvm;

/// Who may use a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Privilege {
    /// Every client.
    Any,
    /// A caller with CAP_SYS_ADMIN.
    Root,
    /// The kernel only.
    Kernel,
}

/// Whether a class takes parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parameters {
    /// It takes none.
    None,
    /// They may be left out.
    Optional,
    /// They must be there.
    Required,
}

/// One control.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Control {
    /// Its number.
    pub cmd: u32,
    /// Exact size of its parameters.
    pub size: u32,
    /// Who may call it.
    pub privilege: Privilege,
    /// The driver's name for it.
    pub name: &'static str,
}

/// One class.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class {
    /// Its number.
    pub id: u32,
    /// Size of its parameters.
    pub size: u32,
    /// Whether it takes any.
    pub parameters: Parameters,
    /// Who may allocate it.
    pub privilege: Privilege,
    /// The driver's internal class.
    pub kind: &'static str,
    /// Internal classes that its parent may have.
    pub parents: &'static [&'static str],
    /// The driver's name for it.
    pub name: &'static str,
}

/// Which UVM node takes a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UvmNode {
    /// `/dev/nvidia-uvm`.
    Uvm,
    /// `/dev/nvidia-uvm-tools`.
    Tools,
}

/// One UVM command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UvmCommand {
    /// The whole command number.
    pub cmd: u32,
    /// Size of its parameters.
    pub size: usize,
    /// Where its status is.
    pub status: Option<usize>,
    /// Which node takes it.
    pub node: UvmNode,
    /// The driver's name for it.
    pub name: &'static str,
}

/// The control of this number.
pub(crate) fn control(cmd: u32) -> Option<&'static Control> {
    let at = controls::CONTROLS.binary_search_by_key(&cmd, |row| row.cmd).ok()?;
    controls::CONTROLS.get(at)
}

/// The class of this number.
pub(crate) fn class(id: u32) -> Option<&'static Class> {
    let at = classes::CLASSES.binary_search_by_key(&id, |row| row.id).ok()?;
    classes::CLASSES.get(at)
}

/// The UVM command of this number.
pub(crate) fn uvm_command(cmd: u32) -> Option<&'static UvmCommand> {
    uvm::UVM_COMMANDS.iter().find(|row| row.cmd == cmd)
}

/// Numbers of the escapes that `/dev/nvidiactl` and `/dev/nvidiaN` take.
#[allow(missing_docs, reason = "the driver's names")]
pub(crate) mod escape {
    pub(crate) const RM_ALLOC_MEMORY: u32 = 0x27;
    pub(crate) const RM_ALLOC_OBJECT: u32 = 0x28;
    pub(crate) const RM_FREE: u32 = 0x29;
    pub(crate) const RM_CONTROL: u32 = 0x2a;
    pub(crate) const RM_ALLOC: u32 = 0x2b;
    pub(crate) const RM_DUP_OBJECT: u32 = 0x34;
    pub(crate) const RM_SHARE: u32 = 0x35;
    pub(crate) const RM_I2C_ACCESS: u32 = 0x39;
    pub(crate) const RM_IDLE_CHANNELS: u32 = 0x41;
    pub(crate) const RM_VID_HEAP_CONTROL: u32 = 0x4a;
    pub(crate) const RM_ACCESS_REGISTRY: u32 = 0x4d;
    pub(crate) const RM_MAP_MEMORY: u32 = 0x4e;
    pub(crate) const RM_UNMAP_MEMORY: u32 = 0x4f;
    pub(crate) const RM_GET_EVENT_DATA: u32 = 0x52;
    pub(crate) const RM_ALLOC_CONTEXT_DMA2: u32 = 0x54;
    pub(crate) const RM_MAP_MEMORY_DMA: u32 = 0x57;
    pub(crate) const RM_UNMAP_MEMORY_DMA: u32 = 0x58;
    pub(crate) const RM_BIND_CONTEXT_DMA: u32 = 0x59;
    pub(crate) const RM_UPDATE_DEVICE_MAPPING_INFO: u32 = 0x5e;
    pub(crate) const RM_LOCKLESS_DIAGNOSTIC: u32 = 0x5f;
    pub(crate) const CARD_INFO: u32 = 0xc8;
    pub(crate) const REGISTER_FD: u32 = 0xc9;
    pub(crate) const ALLOC_OS_EVENT: u32 = 0xce;
    pub(crate) const FREE_OS_EVENT: u32 = 0xcf;
    pub(crate) const STATUS_CODE: u32 = 0xd1;
    pub(crate) const CHECK_VERSION_STR: u32 = 0xd2;
    pub(crate) const IOCTL_XFER_CMD: u32 = 0xd3;
    pub(crate) const ATTACH_GPUS_TO_FD: u32 = 0xd4;
    pub(crate) const QUERY_DEVICE_INTR: u32 = 0xd5;
    pub(crate) const SYS_PARAMS: u32 = 0xd6;
    pub(crate) const NUMA_INFO: u32 = 0xd7;
    pub(crate) const SET_NUMA_STATUS: u32 = 0xd8;
    pub(crate) const EXPORT_TO_DMABUF_FD: u32 = 0xd9;
    pub(crate) const WAIT_OPEN_COMPLETE: u32 = 0xda;
}

/// Which node an escape may be issued on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The control node only.
    Control,
    /// A GPU node only.
    Gpu,
    /// Either.
    Any,
}

/// Exact size of an escape's parameters and where it may be issued. `None`: no such escape.
/// `RM_ALLOC`, `CARD_INFO`, `ATTACH_GPUS_TO_FD` and `QUERY_DEVICE_INTR` have size rules of their own.
pub(crate) fn escape_shape(nr: u32) -> Option<(usize, Side)> {
    use Side::{Any, Control, Gpu};
    Some(match nr {
        escape::RM_ALLOC_MEMORY => (56, Gpu),
        escape::RM_ALLOC_OBJECT => (20, Control),
        escape::RM_FREE => (16, Control),
        escape::RM_CONTROL => (32, Control),
        escape::RM_ALLOC => (48, Any),
        escape::RM_DUP_OBJECT => (28, Control),
        escape::RM_SHARE => (24, Control),
        escape::RM_I2C_ACCESS => (32, Gpu),
        escape::RM_IDLE_CHANNELS => (56, Control),
        escape::RM_VID_HEAP_CONTROL => (184, Control),
        escape::RM_ACCESS_REGISTRY => (72, Control),
        escape::RM_MAP_MEMORY => (56, Control),
        escape::RM_UNMAP_MEMORY => (32, Control),
        escape::RM_GET_EVENT_DATA => (16, Any),
        escape::RM_ALLOC_CONTEXT_DMA2 => (56, Control),
        escape::RM_MAP_MEMORY_DMA => (64, Control),
        escape::RM_UNMAP_MEMORY_DMA => (48, Control),
        escape::RM_BIND_CONTEXT_DMA => (16, Control),
        escape::RM_UPDATE_DEVICE_MAPPING_INFO => (40, Control),
        escape::RM_LOCKLESS_DIAGNOSTIC => (15412, Control),
        escape::CARD_INFO => (72, Control),
        escape::REGISTER_FD => (4, Any),
        escape::ALLOC_OS_EVENT | escape::FREE_OS_EVENT => (16, Any),
        escape::STATUS_CODE => (12, Control),
        escape::CHECK_VERSION_STR => (72, Control),
        escape::IOCTL_XFER_CMD => (16, Any),
        escape::ATTACH_GPUS_TO_FD => (4, Control),
        escape::QUERY_DEVICE_INTR => (8, Gpu),
        escape::SYS_PARAMS => (8, Control),
        escape::NUMA_INFO => (560, Gpu),
        escape::SET_NUMA_STATUS => (4, Gpu),
        escape::EXPORT_TO_DMABUF_FD => (2608, Gpu),
        escape::WAIT_OPEN_COMPLETE => (8, Any),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_and_unique() {
        assert!(controls::CONTROLS.windows(2).all(|pair| pair[0].cmd < pair[1].cmd));
        assert!(classes::CLASSES.windows(2).all(|pair| pair[0].id < pair[1].id));
    }

    #[test]
    fn lookups_find_what_cuda_uses_and_nothing_else() {
        assert_eq!(control(0x2080_1303).map(|row| row.size), Some(1028));
        assert_eq!(class(0x40).map(|row| (row.size, row.kind)), Some((128, "VideoMemory")));
        assert_eq!(uvm_command(0x3000_0001).map(|row| row.size), Some(16));
        assert!(control(0xdead_beef).is_none() && class(0xdead).is_none() && uvm_command(0).is_none());
    }
}
