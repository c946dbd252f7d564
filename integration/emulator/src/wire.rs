//! The frames between the driver and whoever calls it: one SEQPACKET message each.
//!
//! | request, 16 bytes and one file | answer, 16 bytes and at most one file |
//! | --- | --- |
//! | command u32, reserved u32, address u64 | value i32, errno i32, number to replace i32, has file u32 |
//!
//! The file on a request is the one that the ioctl is made on. The caller is the process that connected
//! (SO_PEERCRED); addresses and file numbers are in that process.

use std::io;

/// Length of both frames.
pub const FRAME: usize = 16;
/// Name of the driver's socket under the root.
pub const SOCKET: &str = "emulator.sock";
/// Name of the tests' control socket under the root.
pub const CONTROL_SOCKET: &str = "ctl.sock";

/// What a caller asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The ioctl's command.
    pub cmd: u32,
    /// Its argument.
    pub address: u64,
}

/// What it gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The ioctl's value.
    pub value: i32,
    /// Its errno, 0 for none.
    pub errno: i32,
    /// With a file: its number in the caller's table, whose file it replaces.
    pub replaces: Option<i32>,
}

fn word(bytes: &[u8; FRAME], at: usize) -> [u8; 4] {
    bytes.get(at..at + 4).and_then(|part| part.try_into().ok()).unwrap_or([0; 4])
}

fn joined(parts: [[u8; 4]; 4]) -> [u8; FRAME] {
    let mut frame = [0; FRAME];
    for (target, byte) in frame.iter_mut().zip(parts.iter().flatten()) {
        *target = *byte;
    }
    frame
}

fn exact(bytes: &[u8]) -> io::Result<[u8; FRAME]> {
    bytes.try_into().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "a frame is 16 bytes"))
}

impl Request {
    /// As bytes.
    pub fn encode(self) -> [u8; FRAME] {
        let [a, b, c, d, e, f, g, h] = self.address.to_le_bytes();
        joined([self.cmd.to_le_bytes(), [0; 4], [a, b, c, d], [e, f, g, h]])
    }

    /// From bytes.
    ///
    /// # Errors
    /// Another length.
    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        let bytes = exact(bytes)?;
        let [low, high] = [word(&bytes, 8), word(&bytes, 12)].map(u32::from_le_bytes);
        Ok(Request {
            cmd: u32::from_le_bytes(word(&bytes, 0)),
            address: u64::from(high) << 32 | u64::from(low),
        })
    }
}

impl Reply {
    /// As bytes.
    pub fn encode(self) -> [u8; FRAME] {
        let has_file = u32::from(self.replaces.is_some());
        let number = self.replaces.unwrap_or(-1);
        joined([
            self.value.to_le_bytes(),
            self.errno.to_le_bytes(),
            number.to_le_bytes(),
            has_file.to_le_bytes(),
        ])
    }

    /// From bytes.
    ///
    /// # Errors
    /// Another length.
    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        let bytes = exact(bytes)?;
        let has_file = u32::from_le_bytes(word(&bytes, 12)) != 0;
        Ok(Reply {
            value: i32::from_le_bytes(word(&bytes, 0)),
            errno: i32::from_le_bytes(word(&bytes, 4)),
            replaces: has_file.then(|| i32::from_le_bytes(word(&bytes, 8))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_went() {
        let request = Request { cmd: 0xc030_462b, address: 0x7fff_1234_5678_9abc };
        assert_eq!(Request::decode(&request.encode()).unwrap(), request);
        for replaces in [None, Some(7)] {
            let reply = Reply { value: -1, errno: 22, replaces };
            assert_eq!(Reply::decode(&reply.encode()).unwrap(), reply);
        }
        assert!(Request::decode(&[0; 15]).is_err());
    }
}
