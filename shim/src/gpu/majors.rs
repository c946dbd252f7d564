//! Major numbers of the driver's devices.
//!
//! Owns: reading `/proc/devices`. Trusts: that file, which the kernel writes. A driver that isn't loaded has no
//! line there, which is no error here: its devices can't be in a working spec either.

use std::path::Path;

/// Major number of `nvidiactl` and of each GPU.
pub(crate) const NVIDIA_MAJOR: u32 = 195;
/// Major number of the direct rendering manager's nodes.
pub(crate) const DRM_MAJOR: u32 = 226;

/// Major numbers that the driver got from the kernel when it was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Majors {
    pub(crate) uvm: Option<u32>,
    pub(crate) caps: Option<u32>,
    pub(crate) nvswitch: Option<u32>,
    pub(crate) imex: Option<u32>,
}

impl Majors {
    /// Reads `/proc/devices`, or a file in its place.
    pub(crate) fn read(path: &Path) -> std::io::Result<Self> {
        Ok(Majors::parse(&std::fs::read_to_string(path)?))
    }

    fn parse(text: &str) -> Self {
        let mut majors = Majors::default();
        for line in text.lines().take_while(|line| !line.starts_with("Block")) {
            let mut words = line.split_whitespace();
            let (Some(number), Some(name)) = (words.next(), words.next()) else { continue };
            let Ok(number) = number.parse::<u32>() else { continue };
            match name {
                "nvidia-uvm" => majors.uvm = Some(number),
                "nvidia-caps" => majors.caps = Some(number),
                "nvidia-nvswitch" => majors.nvswitch = Some(number),
                "nvidia-caps-imex-channels" => majors.imex = Some(number),
                _ => {}
            }
        }
        majors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn majors_come_from_the_character_devices_alone() {
        let text = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n234 nvidia-nvswitch\n\nBlock devices:\n  9 nvidia-caps\n";
        assert_eq!(
            Majors::parse(text),
            Majors { uvm: Some(511), caps: None, nvswitch: Some(234), imex: None }
        );
    }
}
