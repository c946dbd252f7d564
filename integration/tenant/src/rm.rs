//! The resource manager's calls, in the order and with the parameters that CUDA uses.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use crate::bytes::Block;
use crate::driver::{self, Trouble, frontend, step};

/// Handles that this program chooses, as CUDA does.
const FIRST_HANDLE: u32 = 0x5c00_0001;

/// A client with a device and a subdevice of the first card.
#[derive(Debug)]
pub(crate) struct Client {
    /// The control file.
    pub control: OwnedFd,
    /// A file of the card, registered with the control file.
    pub card: OwnedFd,
    /// Name of the card's node.
    pub node: String,
    /// The client's handle.
    pub handle: u32,
    /// The device's.
    pub device: u32,
    /// The subdevice's.
    pub subdevice: u32,
    /// The card's id.
    pub gpu: u32,
    /// The card's UUID.
    pub uuid: [u8; 16],
    next: u32,
}

/// Makes a client on a control file.
pub(crate) fn root(control: &impl AsFd) -> Result<u32, Trouble> {
    let mut block = Block::words(&[0, 0, 0, 0x41, 0, 0, 0, 0, 0, 0, 0, 0]);
    step("allocate client", control, frontend(0x2b, 48), &mut block, 40)?;
    Ok(block.u32(8))
}

/// The first card's node: /dev/nvidia0 or the first that exists.
pub(crate) fn first_node() -> Result<String, Trouble> {
    let found = (0..32)
        .map(|n| format!("nvidia{n}"))
        .find(|name| std::path::Path::new(&driver::directory()).join(name).exists());
    found.ok_or_else(|| Trouble::Machine("no /dev/nvidiaN here".to_owned()))
}

impl Client {
    /// The whole way to a subdevice.
    pub(crate) fn new() -> Result<Self, Trouble> {
        let control = driver::open("nvidiactl")?;
        let node = first_node()?;
        let card = driver::open(&node)?;
        register(&card, &control)?;
        let handle = root(&control)?;
        let mut client = Client {
            control,
            card,
            node,
            handle,
            device: 0,
            subdevice: 0,
            gpu: 0,
            uuid: [0; 16],
            next: FIRST_HANDLE,
        };
        let ids = client.control(handle, 0x214, 384)?;
        client.gpu = ids.u32(0);
        let mut attach = Block::zeroed(132);
        attach.set_u32(0, client.gpu);
        attach.set_u32(4, u32::MAX);
        client.control_with(handle, 0x215, &mut attach)?;
        let mut info = Block::zeroed(32);
        info.set_u32(0, client.gpu);
        client.control_with(handle, 0x205, &mut info)?;
        let mut device = Block::zeroed(56);
        device.set_u32(0, info.u32(8));
        device.set_u32(4, handle);
        device.set_u32(48, 2);
        client.device = client.alloc(handle, 0x80, &mut device)?;
        client.subdevice = client.alloc(client.device, 0x2080, &mut Block::zeroed(4))?;
        let mut gid = Block::zeroed(268);
        gid.set_u32(4, 2);
        client.control_with(client.subdevice, 0x2080_014a, &mut gid)?;
        client.uuid = gid.0.get(12..28).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; 16]);
        Ok(client)
    }

    /// A second client in this process, on the same control file.
    pub(crate) fn sibling(&self) -> Result<Client, Trouble> {
        let control = self.control.try_clone().map_err(|error| Trouble::Machine(error.to_string()))?;
        let card = self.card.try_clone().map_err(|error| Trouble::Machine(error.to_string()))?;
        let handle = root(&control)?;
        let mut client = Client {
            control,
            card,
            node: self.node.clone(),
            handle,
            device: 0,
            subdevice: 0,
            gpu: self.gpu,
            uuid: self.uuid,
            next: FIRST_HANDLE,
        };
        let mut info = Block::zeroed(32);
        info.set_u32(0, client.gpu);
        client.control_with(handle, 0x205, &mut info)?;
        let mut device = Block::zeroed(56);
        device.set_u32(0, info.u32(8));
        client.device = client.alloc(handle, 0x80, &mut device)?;
        client.subdevice = client.alloc(client.device, 0x2080, &mut Block::zeroed(4))?;
        Ok(client)
    }

    /// A handle not used yet.
    pub(crate) fn fresh(&mut self) -> u32 {
        let handle = self.next;
        self.next = self.next.wrapping_add(1);
        handle
    }

    /// Allocates an object; CUDA leaves paramsSize 0 and so does this.
    pub(crate) fn alloc(&mut self, parent: u32, class: u32, parameters: &mut Block) -> Result<u32, Trouble> {
        let wanted = self.fresh();
        self.alloc_as(wanted, parent, class, parameters)
    }

    /// Allocates an object under a handle of the caller's choice.
    pub(crate) fn alloc_as(
        &self,
        wanted: u32,
        parent: u32,
        class: u32,
        parameters: &mut Block,
    ) -> Result<u32, Trouble> {
        let mut block = Block::zeroed(48);
        block.set_u32(0, self.handle);
        block.set_u32(4, parent);
        block.set_u32(8, wanted);
        block.set_u32(12, class);
        block.set_u64(16, parameters.address());
        step(&format!("allocate class {class:#x}"), &self.control, frontend(0x2b, 48), &mut block, 40)?;
        Ok(block.u32(8))
    }

    /// A control whose parameters start as zeros.
    pub(crate) fn control(&self, object: u32, cmd: u32, size: usize) -> Result<Block, Trouble> {
        let mut parameters = Block::zeroed(size);
        self.control_with(object, cmd, &mut parameters)?;
        Ok(parameters)
    }

    /// A control.
    pub(crate) fn control_with(&self, object: u32, cmd: u32, parameters: &mut Block) -> Result<(), Trouble> {
        let mut block = control_block(self.handle, object, cmd, parameters);
        step(&format!("control {cmd:#x}"), &self.control, frontend(0x2a, 32), &mut block, 28)
    }

    /// Frees an object.
    pub(crate) fn free(&self, handle: u32) -> Result<(), Trouble> {
        let mut block = Block::words(&[self.handle, self.device, handle, 0]);
        step("free", &self.control, frontend(0x29, 16), &mut block, 12)
    }

    /// Card memory: handle and the size that the driver gave.
    pub(crate) fn card_memory(&mut self, size: u64) -> Result<(u32, u64), Trouble> {
        let mut parameters = Block::zeroed(128);
        parameters.set_u32(0, self.handle);
        parameters.set_u32(8, 0x0001_c101);
        parameters.set_u32(24, 0x1800_0000);
        parameters.set_u64(64, size);
        if size >= 2 << 20 {
            parameters.set_u64(72, 2 << 20);
        }
        let handle = self.alloc(self.device, 0x40, &mut parameters)?;
        Ok((handle, parameters.u64(64)))
    }

    /// Host memory that the card can read.
    pub(crate) fn host_memory(&mut self, size: u64) -> Result<u32, Trouble> {
        let mut parameters = Block::zeroed(128);
        parameters.set_u32(0, self.handle);
        parameters.set_u32(8, 0xc001);
        parameters.set_u32(24, 0x3a00_0000);
        parameters.set_u64(64, size);
        self.alloc(self.device, 0x3e, &mut parameters)
    }

    /// Total, heap and free bytes of the card, as FB_GET_INFO_V2 tells them.
    pub(crate) fn memory_sizes(&self) -> Result<(u64, u64, u64), Trouble> {
        let mut info = Block::zeroed(1028);
        info.set_u32(0, 3);
        for (at, index) in [(4, 0x08), (12, 0x09), (20, 0x16)] {
            info.set_u32(at, index);
        }
        self.control_with(self.subdevice, 0x2080_1303, &mut info)?;
        let bytes = |at| u64::from(info.u32(at)) << 10;
        Ok((bytes(8), bytes(16), bytes(24)))
    }

    /// A CPU mapping: the file to mmap and the driver's cookie.
    pub(crate) fn map(&self, parent: u32, memory: u32, length: u64) -> Result<(OwnedFd, u64), Trouble> {
        let file = driver::open(&self.node)?;
        register(&file, &self.control)?;
        let cookie = self.map_into(&file, parent, memory, length)?;
        Ok((file, cookie))
    }

    /// A CPU mapping through an open file.
    pub(crate) fn map_into(
        &self,
        file: &OwnedFd,
        parent: u32,
        memory: u32,
        length: u64,
    ) -> Result<u64, Trouble> {
        let mut block = Block::zeroed(56);
        block.set_u32(0, self.handle);
        block.set_u32(4, parent);
        block.set_u32(8, memory);
        block.set_u64(24, length);
        block.set(48, &file.as_raw_fd().to_le_bytes());
        step("map memory", &self.control, frontend(0x4e, 56), &mut block, 40)?;
        Ok(block.u64(32))
    }

    /// Undoes a CPU mapping.
    pub(crate) fn unmap(&self, parent: u32, memory: u32, cookie: u64) -> Result<(), Trouble> {
        let mut block = Block::zeroed(32);
        block.set_u32(0, self.handle);
        block.set_u32(4, parent);
        block.set_u32(8, memory);
        block.set_u64(16, cookie);
        step("unmap memory", &self.control, frontend(0x4f, 32), &mut block, 24)
    }
}

/// Binds a card's file to a control file.
pub(crate) fn register(card: &OwnedFd, control: &OwnedFd) -> Result<(), Trouble> {
    let mut block = Block(control.as_raw_fd().to_le_bytes().to_vec());
    driver::ioctl(card.as_fd(), frontend(0xc9, 4), &mut block)
        .map(drop)
        .map_err(|error| Trouble::Call { what: "register file".to_owned(), error })
}

/// The block of a control call.
pub(crate) fn control_block(client: u32, object: u32, cmd: u32, parameters: &Block) -> Block {
    let mut block = Block::zeroed(32);
    block.set_u32(0, client);
    block.set_u32(4, object);
    block.set_u32(8, cmd);
    block.set_u64(16, parameters.address());
    block.set_u32(24, u32::try_from(parameters.0.len()).unwrap_or(0));
    block
}
