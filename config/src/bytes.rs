//! Byte quantities as people write them.
//!
//! Owns: the one parser for `4Gi`, `4096Mi` and plain bytes, in the configuration and in annotations.
//! Trusts nothing. Promises: a [`Bytes`] is never zero and never came from a sign, a fraction, two units or
//! an overflow. Failure: an error that names what was given and what is allowed.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, de};

/// A number of bytes, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(u64);

/// Why a text is no quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not digits and at most one unit.
    #[error(
        "{found:?} is not a quantity: write bytes, or a whole number with one of Ki, Mi, Gi, Ti, as in 4Gi"
    )]
    Malformed {
        /// What was given, shortened.
        found: String,
    },
    /// Zero.
    #[error("{found:?} is zero: at least 1 byte is needed")]
    Zero {
        /// What was given, shortened.
        found: String,
    },
    /// Does not fit 63 bits.
    #[error("{found:?} is too large: at most 8388607Ti")]
    Overflow {
        /// What was given, shortened.
        found: String,
    },
}

const UNITS: [(&str, u32); 4] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40)];

impl Bytes {
    /// A known, non-zero number of bytes.
    pub const fn new(count: u64) -> Option<Bytes> {
        if count == 0 || count > i64::MAX as u64 { None } else { Some(Bytes(count)) }
    }

    /// The number.
    pub const fn count(self) -> u64 {
        self.0
    }

    /// Reads `4Gi`, `4096Mi` or a plain number of bytes. No sign, no space, no fraction, one unit.
    ///
    /// # Errors
    /// [`QuantityError`], with what was given and what is allowed.
    pub fn parse(text: &str) -> Result<Bytes, QuantityError> {
        let found = || text.chars().take(64).collect::<String>();
        let (digits, shift) = UNITS
            .iter()
            .find_map(|(unit, shift)| text.strip_suffix(unit).map(|digits| (digits, *shift)))
            .unwrap_or((text, 0));
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(QuantityError::Malformed { found: found() });
        }
        // Only digits are left, so the one way to fail is overflow.
        let number: u64 = digits.parse().map_err(|_| QuantityError::Overflow { found: found() })?;
        if number == 0 {
            return Err(QuantityError::Zero { found: found() });
        }
        number
            .checked_mul(1 << shift)
            .and_then(Bytes::new)
            .ok_or_else(|| QuantityError::Overflow { found: found() })
    }
}

impl FromStr for Bytes {
    type Err = QuantityError;
    fn from_str(text: &str) -> Result<Bytes, QuantityError> {
        Bytes::parse(text)
    }
}

/// The largest unit that divides the number, so that what is printed parses to the same value.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().rev().find(|(_, shift)| self.0.is_multiple_of(1 << shift)) {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        struct Quantity;
        impl de::Visitor<'_> for Quantity {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity as in \"4Gi\", or a number of bytes")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                Bytes::parse(text).map_err(E::custom)
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Bytes, E> {
                Bytes::parse(&number.to_string()).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Quantity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_powers_of_two() {
        for (text, count) in
            [("1", 1), ("1Ki", 1 << 10), ("4096Mi", 4 << 30), ("4Gi", 4 << 30), ("2Ti", 2 << 40)]
        {
            assert_eq!(Bytes::parse(text).unwrap().count(), count, "{text}");
        }
    }

    #[test]
    fn anything_but_digits_and_one_unit_is_refused() {
        for text in [
            "", "Gi", "+4Gi", "-4Gi", " 4Gi", "4Gi ", "4 Gi", "4.5Gi", "4G", "4GiB", "4gi", "4GiMi", "0x4",
            "4e3", "٤Gi", "1_000", "all",
        ] {
            assert!(matches!(Bytes::parse(text), Err(QuantityError::Malformed { .. })), "{text:?}");
        }
    }

    #[test]
    fn zero_and_overflow_are_refused_by_name() {
        for text in ["0", "0Gi", "000"] {
            assert!(matches!(Bytes::parse(text), Err(QuantityError::Zero { .. })), "{text}");
        }
        for text in ["18446744073709551616", "18446744073709551615", "8388608Ti", "99999999999999Gi"] {
            assert!(matches!(Bytes::parse(text), Err(QuantityError::Overflow { .. })), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_parses_to_the_same_value(count in 1..i64::MAX as u64) {
            let bytes = Bytes::new(count).unwrap();
            prop_assert_eq!(Bytes::parse(&bytes.to_string()).unwrap(), bytes);
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            if let Ok(bytes) = Bytes::parse(&text) {
                prop_assert!(bytes.count() > 0);
            }
        }
    }
}
