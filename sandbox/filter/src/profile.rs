//! The container's seccomp profile (`linux.seccomp` of its OCI spec), merged with the rules of the trap.
//!
//! Owns: the merged profile. Trusts nothing in the pod's own. Promises: ioctl (and, for GPU containers, shared
//! file mappings) come out in our form only; what the pod's profile denies stays denied; fields and rules that
//! don't concern the trap stay as they are. Failure: a rule whose meaning can't be kept is an error.
//!
//! The rules rely on the order of libseccomp's compares. Each rule begins with its lowest argument; of the rules
//! of a call those that begin with the highest argument come first; of one argument the larger value comes first,
//! and of equal values the one that was added first. A set inside another has a value at least as large, so it is
//! enough to add it first. That holds among compares of the low half of an argument only.
//! Nothing is safe because of that order: the compiled program is judged.

mod command;
mod mapping;
mod rule;

use serde_json::{Map, Value, json};

use rule::{Effect, Rule};

pub(crate) use mapping::SHARED_FILE;

/// What a container gets in place of the driver's commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// A container that was granted a GPU: the sandbox performs them.
    Notify {
        /// The socket that the runtime sends the listener to.
        listener_path: String,
        /// What it sends along.
        metadata: String,
        /// Ask for `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`: only where the runtime knows it.
        killable: bool,
    },
    /// Any other container: they fail with ENOTTY.
    Errno,
}

impl Form {
    /// What the compiled program is judged by.
    pub fn kind(&self) -> crate::Kind {
        match self {
            Form::Notify { .. } => crate::Kind::Notify,
            Form::Errno => crate::Kind::Errno,
        }
    }
}

/// Why a profile can't be used by a container of this runtime.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// The profile has a listener of its own.
    #[error(
        "seccomp profile: {found}: a container of this runtime can't have a seccomp listener of its own; remove it from the profile"
    )]
    OwnListener {
        /// Where.
        found: String,
    },
    /// A field is not what the OCI spec says.
    #[error("seccomp profile: {field} is {found}, must be {allowed}")]
    Malformed {
        /// The field.
        field: &'static str,
        /// Its value, shortened.
        found: String,
        /// What the spec allows.
        allowed: &'static str,
    },
    /// A rule's meaning can't be kept beside the rules of the trap.
    #[error("seccomp profile: the rule {rule} for {syscall} can't be kept beside the GPU rules: {reason}")]
    Inexpressible {
        /// The system call.
        syscall: &'static str,
        /// The rule, shortened.
        rule: String,
        /// What is wrong with it and what would do.
        reason: &'static str,
    },
}

/// The only architecture whose calls get through. The others are killed by libseccomp.
const NATIVE: &str = "SCMP_ARCH_X86_64";
/// `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV` as the OCI spec spells it.
const KILLABLE: &str = "SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV";
const IO_URING: [&str; 3] = ["io_uring_setup", "io_uring_enter", "io_uring_register"];
const REMAP: &str = "remap_file_pages";
const ENOSYS: u64 = 38;
const EPERM: u64 = 1;
const ENOTTY: u64 = 25;

/// The profile that a container gets: `profile` is its own `linux.seccomp`, if it has one.
///
/// # Errors
/// The profile has a listener of its own, is malformed, or has a rule for ioctl or mmap that can't be kept.
pub fn merge(profile: Option<&Value>, form: &Form) -> Result<Value, ProfileError> {
    let mut merged = match profile {
        None | Some(Value::Null) => Map::from_iter([("defaultAction".to_owned(), json!("SCMP_ACT_ALLOW"))]),
        Some(Value::Object(own)) => own.clone(),
        Some(other) => return Err(malformed("linux.seccomp", other, "an object")),
    };
    refuse_look_alikes(&merged, &FIELDS)?;
    let default = default_of(&merged)?;
    refuse_listener(&merged)?;

    let mut rules = Vec::new();
    let mut taken = Taken::default();
    for entry in rules_of(&merged)? {
        rules.extend(taken.take(entry, form)?);
    }
    rules.extend(command::rules(&taken.ioctl, &default, form)?);
    let mut denied = IO_URING.to_vec();
    if matches!(form, Form::Notify { .. }) {
        rules.extend(mapping::rules(&taken.mmap, &default)?);
        denied.push(REMAP);
    }
    let enosys = Effect::Errno(ENOSYS);
    if default != enosys {
        rules.push(json!({ "names": denied, "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS }));
    }

    merged.insert("syscalls".to_owned(), Value::Array(rules));
    merged.insert("architectures".to_owned(), json!([NATIVE]));
    set_listener(&mut merged, form)?;
    Ok(Value::Object(merged))
}

/// The profile's rules for the calls that the trap owns.
#[derive(Default)]
struct Taken {
    ioctl: Vec<Rule>,
    mmap: Vec<Rule>,
}

impl Taken {
    /// What is left of one entry of `syscalls` once the trap's calls are taken out of it.
    fn take(&mut self, entry: &Value, form: &Form) -> Result<Option<Value>, ProfileError> {
        let Value::Object(fields) = entry else {
            return Err(malformed("syscalls", entry, "a list of objects"));
        };
        refuse_look_alikes(fields, &rule::FIELDS)?;
        let action = fields.get("action").unwrap_or(&Value::Null);
        if action == "SCMP_ACT_NOTIFY" {
            return Err(ProfileError::OwnListener { found: format!("the rule {}", shortened(entry)) });
        }
        let Some(Value::Array(names)) = fields.get("names") else {
            return Err(malformed("names of a rule", entry, "a list of system calls"));
        };
        let gpu = matches!(form, Form::Notify { .. });
        let mut left = Vec::with_capacity(names.len());
        for name in names {
            // Names are compared as libseccomp does: exactly.
            match name.as_str() {
                Some("ioctl") => self.ioctl.push(Rule::parse("ioctl", entry, fields)?),
                Some("mmap") if gpu => self.mmap.push(Rule::parse("mmap", entry, fields)?),
                Some(REMAP) if gpu => {}
                Some(other) if IO_URING.contains(&other) => {}
                Some(_) => left.push(name.clone()),
                None => return Err(malformed("names of a rule", entry, "a list of system calls")),
            }
        }
        if left.len() == names.len() {
            return Ok(Some(entry.clone()));
        }
        if left.is_empty() {
            return Ok(None);
        }
        let mut rest = fields.clone();
        rest.insert("names".to_owned(), Value::Array(left));
        Ok(Some(Value::Object(rest)))
    }
}

/// The fields of a profile that mean something here.
const FIELDS: [&str; 7] = [
    "defaultAction",
    "defaultErrnoRet",
    "architectures",
    "flags",
    "listenerPath",
    "listenerMetadata",
    "syscalls",
];

/// Runtimes in Go take `Syscalls` for `syscalls`: a field that only they would understand is refused.
fn refuse_look_alikes(fields: &Map<String, Value>, known: &[&str]) -> Result<(), ProfileError> {
    let exact = |name: &str| known.contains(&name);
    let similar = |name: &str| !name.is_ascii() || known.iter().any(|other| other.eq_ignore_ascii_case(name));
    match fields.keys().find(|name| !exact(name) && similar(name)) {
        Some(name) => Err(malformed("a field's name", &json!(name), "spelled as in the OCI spec")),
        None => Ok(()),
    }
}

fn default_of(profile: &Map<String, Value>) -> Result<Effect, ProfileError> {
    const ALLOWED: &str = "an OCI seccomp action other than SCMP_ACT_NOTIFY and SCMP_ACT_TRACE";
    let action = profile.get("defaultAction").unwrap_or(&Value::Null);
    if action == "SCMP_ACT_NOTIFY" {
        return Err(ProfileError::OwnListener { found: "defaultAction SCMP_ACT_NOTIFY".to_owned() });
    }
    match Effect::parse(action, profile.get("defaultErrnoRet")) {
        Some(Effect::Trace) | None => Err(malformed("defaultAction", action, ALLOWED)),
        Some(effect) => Ok(effect),
    }
}

fn refuse_listener(profile: &Map<String, Value>) -> Result<(), ProfileError> {
    for field in ["listenerPath", "listenerMetadata"] {
        match profile.get(field) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() => {}
            Some(other) => {
                return Err(ProfileError::OwnListener { found: format!("{field} {}", shortened(other)) });
            }
        }
    }
    Ok(())
}

fn rules_of(profile: &Map<String, Value>) -> Result<&[Value], ProfileError> {
    match profile.get("syscalls") {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(rules)) => Ok(rules),
        Some(other) => Err(malformed("syscalls", other, "a list of objects")),
    }
}

fn set_listener(merged: &mut Map<String, Value>, form: &Form) -> Result<(), ProfileError> {
    let mut flags = match merged.remove("flags") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(flags)) => flags,
        Some(other) => return Err(malformed("flags", &other, "a list of names")),
    };
    flags.retain(|flag| flag != KILLABLE);
    merged.remove("listenerPath");
    merged.remove("listenerMetadata");
    if let Form::Notify { listener_path, metadata, killable } = form {
        merged.insert("listenerPath".to_owned(), json!(listener_path));
        merged.insert("listenerMetadata".to_owned(), json!(metadata));
        if *killable {
            flags.push(json!(KILLABLE));
        }
    }
    if !flags.is_empty() {
        merged.insert("flags".to_owned(), Value::Array(flags));
    }
    Ok(())
}

fn malformed(field: &'static str, found: &Value, allowed: &'static str) -> ProfileError {
    ProfileError::Malformed { field, found: shortened(found), allowed }
}

/// At most 120 characters of a value, for messages.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

#[cfg(test)]
mod tests;
