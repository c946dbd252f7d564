//! Controls of engine, debugger, channel and confidential-computing objects.

use crate::row::ControlRule::{
    Forward, GetTimeslice, MemorySize, RegisterMemory, Schedule, SetTimeslice, UnregisterMemory,
};
use crate::row::{Control, Direction, Length, Pointer, depends, own, own_or_none};

/// One row a line, ascending.
#[rustfmt::skip]
pub(super) const ENGINES: &[Control] = &[
    Control::new(0x20810108, "undocumented", 992, Forward),
    Control::new(0x503c0102, "NV503C_CTRL_CMD_REGISTER_VA_SPACE", 16, Forward).handles(&[depends(0)]),
    Control::new(0x503c0104, "NV503C_CTRL_CMD_REGISTER_VIDMEM", 32, RegisterMemory).handles(&[own(0)]),
    Control::new(0x503c0105, "NV503C_CTRL_CMD_UNREGISTER_VIDMEM", 4, UnregisterMemory).handles(&[own(0)]),
    Control::new(0x83de0307, "NV83DE_CTRL_CMD_DEBUG_SET_MODE_MMU_DEBUG", 4, Forward),
    Control::new(0x83de0309, "NV83DE_CTRL_CMD_DEBUG_SET_EXCEPTION_MASK", 4, Forward),
    Control::new(0x83de030c, "NV83DE_CTRL_CMD_DEBUG_READ_ALL_SM_ERROR_STATES", 4824, Forward).handles(&[own_or_none(0)]),
    Control::new(0x83de0310, "NV83DE_CTRL_CMD_DEBUG_CLEAR_ALL_SM_ERROR_STATES", 8, Forward).handles(&[own_or_none(0)]),
    Control::new(0x83de0315, "NV83DE_CTRL_CMD_DEBUG_READ_MEMORY", 24, Forward).pointers(&[Pointer { at: 16, length: Length::List { count: 4, element: 1, most: 65536 }, direction: Direction::Out }]).handles(&[own(0)]),
    Control::new(0x83de0317, "NV83DE_CTRL_CMD_DEBUG_SUSPEND_CONTEXT", 8, Forward),
    Control::new(0x83de0318, "NV83DE_CTRL_CMD_DEBUG_RESUME_CONTEXT", 0, Forward),
    Control::new(0x83de031f, "NV83DE_CTRL_CMD_DEBUG_SET_MODE_ERRBAR_DEBUG", 4, Forward),
    Control::new(0x906f0101, "NV906F_CTRL_GET_CLASS_ENGINEID", 16, Forward).handles(&[own(0)]),
    Control::new(0x906f0102, "NV906F_CTRL_CMD_RESET_CHANNEL", 16, Forward),
    Control::new(0x90e60102, "NV90E6_CTRL_CMD_MASTER_GET_VIRTUAL_FUNCTION_ERROR_CONT_INTR_MASK", 8, Forward),
    Control::new(0xa06c0101, "NVA06C_CTRL_CMD_GPFIFO_SCHEDULE", 3, Schedule),
    Control::new(0xa06c0103, "NVA06C_CTRL_CMD_SET_TIMESLICE", 8, SetTimeslice),
    Control::new(0xa06c0104, "NVA06C_CTRL_CMD_GET_TIMESLICE", 8, GetTimeslice),
    Control::new(0xa06f0103, "NVA06F_CTRL_CMD_GPFIFO_SCHEDULE", 3, Schedule),
    Control::new(0xa06f0104, "NVA06F_CTRL_CMD_BIND", 4, Forward),
    Control::new(0xa06f0112, "NVA06F_CTRL_CMD_STOP_CHANNEL", 1, Forward),
    Control::new(0xc36f0108, "NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN", 4, Forward),
    Control::new(0xc36f010a, "NVC36F_CTRL_CMD_GPFIFO_SET_WORK_SUBMIT_TOKEN_NOTIF_INDEX", 4, Forward),
    Control::new(0xc56f010b, "NVC56F_CTRL_CMD_GET_KMB", 144, Forward),
    Control::new(0xcb330101, "NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES", 6, Forward),
    Control::new(0xcb330104, "NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_GPUS_STATE", 1, Forward),
    Control::new(0xcb330106, "NV_CONF_COMPUTE_CTRL_CMD_GPU_GET_VIDMEM_SIZE", 24, MemorySize).handles(&[own(0)]),
    Control::new(0xcb33010b, "NV_CONF_COMPUTE_CTRL_CMD_GPU_GET_NUM_SECURE_CHANNELS", 12, Forward).handles(&[own(0)]),
    Control::new(0xcb33010c, "NV_CONF_COMPUTE_CTRL_CMD_GPU_GET_KEY_ROTATION_STATE", 8, Forward).handles(&[own(0)]),
];
