//! The cards that the emulator can play.

/// A kind of card.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// Its name on the command line.
    pub key: &'static str,
    /// Its product name.
    pub name: &'static str,
    /// Short name.
    pub short_name: &'static str,
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes of it that are not in the heap, as measured; none for a card of another size.
    pub reserved: u64,
    /// PCI device id.
    pub device_id: u16,
    /// Classes of channel, engine and doorbell objects that the chip has.
    pub classes: &'static [u32],
    /// Architecture and implementation numbers.
    pub arch: (u32, u32),
}

const MIB: u64 = 1 << 20;

/// Classes of a Hopper.
const HOPPER: &[u32] =
    &[0xc86f, 0xcbc0, 0xcb97, 0xc8b5, 0xc661, 0xc461, 0xc361, 0xcba2, 0x902d, 0xa140, 0x90e6];
/// Classes of an Ampere of the GA10x line.
const AMPERE: &[u32] = &[0xc56f, 0xc7c0, 0xc797, 0xc7b5, 0xc461, 0xc361, 0x902d, 0xa140, 0x90e6];

/// All of them.
pub const MODELS: &[Model] = &[
    Model {
        key: "h200",
        name: "NVIDIA H200",
        short_name: "GH100-A",
        memory: 143_771 * MIB,
        reserved: 644_939_776,
        device_id: 0x2335,
        classes: HOPPER,
        arch: (0x180, 0x0),
    },
    Model {
        key: "a10",
        name: "NVIDIA A10",
        short_name: "GA102-A",
        memory: 23_028 * MIB,
        reserved: 0,
        device_id: 0x2236,
        classes: AMPERE,
        arch: (0x170, 0x2),
    },
    Model {
        key: "small",
        name: "NVIDIA Emulated 8G",
        short_name: "GH100-A",
        memory: 8_192 * MIB,
        reserved: 0,
        device_id: 0x2335,
        classes: HOPPER,
        arch: (0x180, 0x0),
    },
];

/// The model with this key.
pub fn model(key: &str) -> Option<&'static Model> {
    MODELS.iter().find(|model| model.key == key)
}

/// One card.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// What it is.
    pub model: &'static Model,
    /// Minor number of its node.
    pub minor: u32,
    /// The driver's device instance, which need not be the minor number.
    pub instance: u32,
    /// PCI bus number; domain and slot are 0.
    pub bus: u8,
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes of it that the driver keeps from clients: the heap is smaller than the card.
    pub reserved: u64,
    /// Its UUID, the 16 bytes.
    pub uuid: [u8; 16],
    /// It fell off the bus.
    pub lost: bool,
}

impl Gpu {
    /// The card number `minor` of a node made from `seed`.
    pub fn new(model: &'static Model, minor: u32, memory: Option<u64>, seed: u64) -> Self {
        let mut state = seed ^ (u64::from(minor) << 32) ^ 0x9e37_79b9_7f4a_7c15;
        let mut uuid = [0; 16];
        for byte in &mut uuid {
            // One step of splitmix64 a byte: fixed by the seed, no two cards alike.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let [first, ..] = (mixed ^ (mixed >> 31)).to_le_bytes();
            *byte = first;
        }
        let bus = 6_u8.wrapping_add(u8::try_from(minor).unwrap_or(0));
        let (memory, reserved) = memory.map_or((model.memory, model.reserved), |memory| (memory, 0));
        Gpu { model, minor, instance: minor, bus, memory, reserved, uuid, lost: false }
    }

    /// `GPU-` and the UUID, as NVIDIA's tools print it.
    pub fn uuid_text(&self) -> String {
        let hex: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default().to_owned();
        format!("GPU-{}-{}-{}-{}-{}", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32))
    }

    /// Its PCI address as text.
    pub fn pci_text(&self) -> String {
        format!("0000:{:02x}:00.0", self.bus)
    }

    /// The driver's id of it.
    pub fn id(&self) -> u32 {
        u32::from(self.bus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_depends_on_seed_and_place_alone() {
        let model = model("h200").unwrap();
        let [a, b, c] =
            [(0, 1), (0, 1), (1, 1)].map(|(minor, seed)| Gpu::new(model, minor, None, seed).uuid_text());
        assert_eq!(a, b);
        assert_ne!(a, c);
        assert_eq!(a.len(), "GPU-".len() + 36);
        assert_ne!(a, Gpu::new(model, 0, None, 2).uuid_text());
    }
}
