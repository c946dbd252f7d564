//! Controls of the client object (0x0000).

use crate::row::ControlRule::{
    Answer, AnswerZeros, AttachIds, CreateExport, DeviceMask, ExportInfo, ExportMany, ExportOne,
    FilterEntries, FilterIds, Forward, ImportMany, ImportOne, RequireIdMatrix, RequireIds,
};
use crate::row::{
    Control, Direction, FileField, FileKind, Length, Pointer, client_or_none, own, own_or_none,
};

/// One row a line, ascending.
#[rustfmt::skip]
pub(super) const ROOT: &[Control] = &[
    Control::new(0x00000101, "NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION", 40, Forward).pointers(&[Pointer { at: 8, length: Length::List { count: 0, element: 1, most: 4096 }, direction: Direction::Out }, Pointer { at: 16, length: Length::List { count: 0, element: 1, most: 4096 }, direction: Direction::Out }, Pointer { at: 24, length: Length::List { count: 0, element: 1, most: 4096 }, direction: Direction::Out }]),
    Control::new(0x00000102, "NV0000_CTRL_CMD_SYSTEM_GET_CPU_INFO", 108, Forward),
    Control::new(0x00000127, "NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS", 176, RequireIds { at: 0, count: 32, used: Some(128) }).pointers(&[Pointer { at: 160, length: Length::Square { count: 128, element: 4, most: 32 }, direction: Direction::Out }, Pointer { at: 168, length: Length::Square { count: 128, element: 4, most: 32 }, direction: Direction::Out }]),
    Control::new(0x0000012b, "NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS_V2", 8348, RequireIds { at: 0, count: 32, used: Some(128) }),
    Control::new(0x00000136, "NV0000_CTRL_CMD_SYSTEM_GET_FABRIC_STATUS", 4, Forward),
    Control::new(0x0000013a, "NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS_MATRIX", 1352, RequireIdMatrix),
    Control::new(0x000001f0, "NV0000_CTRL_CMD_SYSTEM_GET_FEATURES", 4, Forward),
    Control::new(0x00000201, "NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS", 128, FilterIds { at: 0, count: 32, lists: 1 }),
    Control::new(0x00000202, "NV0000_CTRL_CMD_GPU_GET_ID_INFO", 40, RequireIds { at: 0, count: 1, used: None }).pointers(&[Pointer { at: 16, length: Length::Never, direction: Direction::Out }]),
    Control::new(0x00000204, "NV0000_CTRL_CMD_GPU_GET_DEVICE_IDS", 4, DeviceMask),
    Control::new(0x00000205, "NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2", 32, RequireIds { at: 0, count: 1, used: None }),
    Control::new(0x00000214, "NV0000_CTRL_CMD_GPU_GET_PROBED_IDS", 384, FilterIds { at: 0, count: 32, lists: 2 }),
    Control::new(0x00000215, "NV0000_CTRL_CMD_GPU_ATTACH_IDS", 132, AttachIds),
    Control::new(0x00000216, "NV0000_CTRL_CMD_GPU_DETACH_IDS", 128, Answer),
    Control::new(0x0000021b, "NV0000_CTRL_CMD_GPU_GET_PCI_INFO", 12, RequireIds { at: 0, count: 1, used: None }),
    Control::new(0x00000275, "NV0000_CTRL_CMD_GPU_GET_UUID_FROM_GPU_ID", 268, RequireIds { at: 0, count: 1, used: None }),
    Control::new(0x00000279, "NV0000_CTRL_CMD_GPU_QUERY_DRAIN_STATE", 12, RequireIds { at: 0, count: 1, used: None }),
    Control::new(0x0000027b, "NV0000_CTRL_CMD_GPU_GET_MEMOP_ENABLE", 4, Forward),
    Control::new(0x00000288, "NV0000_CTRL_CMD_GPU_GET_ACTIVE_DEVICE_IDS", 3076, FilterEntries { at: 4, stride: 12 }),
    Control::new(0x00000289, "NV0000_CTRL_CMD_GPU_ASYNC_ATTACH_ID", 4, RequireIds { at: 0, count: 1, used: None }),
    Control::new(0x00000290, "NV0000_CTRL_CMD_GPU_WAIT_ATTACH_ID", 4, RequireIds { at: 0, count: 1, used: None }),
    Control::new(0x00000a04, "NV0000_CTRL_CMD_SYNC_GPU_BOOST_GROUP_INFO", 2244, AnswerZeros),
    Control::new(0x00000b02, "NV0000_CTRL_CMD_GPUACCT_GET_ACCOUNTING_STATE", 12, RequireIds { at: 0, count: 1, used: None }),
    Control::new(0x00000d01, "NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE", 12, Forward),
    Control::new(0x00000d04, "NV0000_CTRL_CMD_CLIENT_SET_INHERITED_SHARE_POLICY", 12, Forward).handles(&[client_or_none(0)]),
    Control::new(0x00000d06, "NV0000_CTRL_CMD_CLIENT_SHARE_OBJECT", 16, Forward).handles(&[own(0), client_or_none(4)]),
    Control::new(0x00003d05, "NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD", 24, ExportOne).files(&[FileField { at: 16, kind: FileKind::Frontend, optional: false }]).handles(&[own_or_none(4), own_or_none(8), own(12)]),
    Control::new(0x00003d06, "NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD", 20, ImportOne).files(&[FileField { at: 0, kind: FileKind::Frontend, optional: false }]).handles(&[own_or_none(8), own(12)]),
    Control::new(0x00003d08, "NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO", 80, ExportInfo).files(&[FileField { at: 0, kind: FileKind::Frontend, optional: false }]),
    Control::new(0x00003d0a, "NV0000_CTRL_CMD_OS_UNIX_CREATE_EXPORT_OBJECT_FD", 76, CreateExport).files(&[FileField { at: 72, kind: FileKind::Frontend, optional: false }]).handles(&[own_or_none(0)]),
    Control::new(0x00003d0b, "NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD", 2128, ExportMany).files(&[FileField { at: 0, kind: FileKind::Frontend, optional: false }]).handles(&[own_or_none(4)]),
    Control::new(0x00003d0c, "NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD", 652, ImportMany).files(&[FileField { at: 0, kind: FileKind::Frontend, optional: false }]).handles(&[own(4)]),
];
