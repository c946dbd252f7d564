//! Controls of memory, device and semaphore surface objects (0x0041, 0x0080, 0x00da, 0x00de).

use crate::row::ControlRule::{Answer, ChannelList, Forward, InlineChannels};
use crate::row::{Control, list, own};

/// One row a line, ascending.
#[rustfmt::skip]
pub(super) const DEVICE: &[Control] = &[
    Control::new(0x00410110, "NV0041_CTRL_CMD_GET_SURFACE_INFO", 16, Forward).pointers(&[list(0, 8, 8, 1024)]),
    Control::new(0x00800201, "NV0080_CTRL_CMD_GPU_GET_CLASSLIST", 16, Forward).pointers(&[list(0, 8, 4, 1024)]),
    Control::new(0x00800280, "NV0080_CTRL_CMD_GPU_GET_NUM_SUBDEVICES", 4, Forward),
    Control::new(0x00800288, "NV0080_CTRL_CMD_GPU_QUERY_SW_STATE_PERSISTENCE", 4, Forward),
    Control::new(0x00800289, "NV0080_CTRL_CMD_GPU_GET_VIRTUALIZATION_MODE", 8, Forward),
    Control::new(0x00800292, "NV0080_CTRL_CMD_GPU_GET_CLASSLIST_V2", 804, Forward),
    Control::new(0x00801104, "NV0080_CTRL_CMD_GR_GET_INFO", 16, Forward).pointers(&[list(0, 8, 8, 1024)]),
    Control::new(0x00801108, "NV0080_CTRL_CMD_GR_SET_TPC_PARTITION_MODE", 32, Forward).handles(&[own(0)]),
    Control::new(0x00801307, "NV0080_CTRL_CMD_FB_GET_CAPS_V2", 3, Forward),
    Control::new(0x00801402, "NV0080_CTRL_CMD_HOST_GET_CAPS_V2", 3, Forward),
    Control::new(0x0080170d, "NV0080_CTRL_CMD_FIFO_GET_CHANNELLIST", 24, ChannelList).pointers(&[list(0, 8, 4, 4096), list(0, 16, 4, 4096)]),
    Control::new(0x00801714, "NV0080_CTRL_CMD_FIFO_IDLE_CHANNELS", 16396, InlineChannels),
    Control::new(0x00801806, "NV0080_CTRL_CMD_DMA_ADV_SCHED_GET_VA_CAPS", 192, Forward),
    Control::new(0x0080180d, "NV0080_CTRL_CMD_DMA_GET_CAPS", 12, Forward),
    Control::new(0x00801909, "NV0080_CTRL_CMD_PERF_CUDA_LIMIT_SET_CONTROL", 1, Answer),
    Control::new(0x00da0002, "NV_SEMAPHORE_SURFACE_CTRL_CMD_BIND_CHANNEL", 40, Forward).handles(&[own(0)]),
    Control::new(0x00da0006, "NV_SEMAPHORE_SURFACE_CTRL_CMD_UNBIND_CHANNEL", 40, Forward).handles(&[own(0)]),
    Control::new(0x00de0001, "NV00DE_CTRL_CMD_REQUEST_DATA_POLL", 8, Answer),
];
