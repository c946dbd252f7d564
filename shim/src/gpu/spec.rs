//! Reading and editing the OCI spec as JSON, so that fields this program doesn't know stay as they came.
//!
//! Owns: nothing. Trusts: containerd wrote the spec; its shape is still checked. Promises: a field of
//! another type than the runtime spec says is an error that names it, never skipped.

use serde_json::Value;

/// A field that doesn't have the form the runtime spec gives it.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("config.json: {field} is not {expected}")]
pub(crate) struct Malformed {
    pub(crate) field: String,
    pub(crate) expected: &'static str,
}

fn malformed(field: &str, expected: &'static str) -> Malformed {
    Malformed { field: field.to_owned(), expected }
}

/// The list at `pointer` (empty where it is absent or null).
pub(crate) fn list<'a>(root: &'a Value, pointer: &str) -> Result<&'a [Value], Malformed> {
    match root.pointer(pointer) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(_) => Err(malformed(pointer, "a list")),
    }
}

/// The list at `pointer` for editing, if there is one.
pub(crate) fn list_mut<'a>(root: &'a mut Value, pointer: &str) -> Option<&'a mut Vec<Value>> {
    root.pointer_mut(pointer).and_then(Value::as_array_mut)
}

/// The text in `field` of `item`.
pub(crate) fn text<'a>(item: &'a Value, field: &str) -> Result<Option<&'a str>, Malformed> {
    match item.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(malformed(field, "a text")),
    }
}

/// The whole number in `field` of `item`.
pub(crate) fn number(item: &Value, field: &str) -> Result<Option<i64>, Malformed> {
    match item.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_i64().map(Some).ok_or_else(|| malformed(field, "a whole number")),
    }
}

/// The list of texts at `pointer`.
pub(crate) fn texts<'a>(root: &'a Value, pointer: &str) -> Result<Vec<&'a str>, Malformed> {
    list(root, pointer)?
        .iter()
        .map(|item| item.as_str().ok_or_else(|| malformed(pointer, "a list of texts")))
        .collect()
}

/// A device node or device rule: type letter, major and minor; `None` stands for any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub(crate) kind: char,
    pub(crate) major: Option<u32>,
    pub(crate) minor: Option<u32>,
}

impl std::fmt::Display for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let part = |n: Option<u32>| n.map_or("*".to_owned(), |n| n.to_string());
        write!(f, "{} {}:{}", self.kind, part(self.major), part(self.minor))
    }
}

impl Numbers {
    /// The numbers of an entry of `linux.devices` or `linux.resources.devices`.
    pub(crate) fn of(item: &Value) -> Result<Self, Malformed> {
        let kind = match text(item, "type")? {
            None | Some("") => 'a',
            Some("u") => 'c',
            Some(kind) => {
                let mut letters = kind.chars();
                match (letters.next(), letters.next()) {
                    (Some(letter @ ('a' | 'b' | 'c' | 'p')), None) => letter,
                    _ => return Err(malformed("type", "one of a, b, c, u, p")),
                }
            }
        };
        let part = |field| -> Result<Option<u32>, Malformed> {
            match number(item, field)? {
                None | Some(-1) => Ok(None),
                Some(n) => u32::try_from(n).map(Some).map_err(|_| malformed(field, "a device number")),
            }
        };
        Ok(Numbers { kind, major: part("major")?, minor: part("minor")? })
    }
}
