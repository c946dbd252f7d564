//! Names of fields that another reader could take for others.
//!
//! Go's JSON reader, and so runc, takes `Linux`, `LINUX` and even `\u{17f}eccomp` for the fields that this program
//! knows in one form only. What containerd writes has that one form. Owns: the check. Promises: of a spec that
//! passes, every reader sees the same fields as the judgements do.

use serde_json::Value;

use super::Refusal;

/// Fields that are judged or edited.
const KNOWN: [&str; 52] = [
    "access",
    "action",
    "allow",
    "ambient",
    "annotations",
    "architectures",
    "args",
    "bounding",
    "capabilities",
    "cgroupsPath",
    "createContainer",
    "createRuntime",
    "defaultAction",
    "defaultErrnoRet",
    "destination",
    "devices",
    "effective",
    "errnoRet",
    "flags",
    "hooks",
    "index",
    "inheritable",
    "linux",
    "listenerMetadata",
    "listenerPath",
    "major",
    "minor",
    "mounts",
    "names",
    "namespaces",
    "noNewPrivileges",
    "oomScoreAdj",
    "op",
    "options",
    "path",
    "permitted",
    "poststart",
    "poststop",
    "prestart",
    "process",
    "resources",
    "root",
    "seccomp",
    "source",
    "startContainer",
    "sysctl",
    "syscalls",
    "terminal",
    "type",
    "user",
    "value",
    "valueTwo",
];

/// Maps from names that anybody may choose.
const FREE: [&str; 4] =
    ["/annotations", "/linux/sysctl", "/linux/resources/rdma", "/linux/resources/unified"];

/// The form of a name that Go's reader compares.
fn folded(name: &str) -> String {
    let fold = |letter: char| match letter {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        letter => letter.to_ascii_lowercase(),
    };
    name.chars().map(fold).collect()
}

/// Judges every name in `root`, a spec or a process.
///
/// # Errors
/// [`Refusal::Name`].
pub(super) fn judge(root: &Value) -> Result<(), Refusal> {
    // A list of places still to look at, for no JSON reader goes deeper than this program's.
    let mut places = vec![(String::new(), root)];
    while let Some((place, value)) = places.pop() {
        match value {
            Value::Object(fields) if !FREE.contains(&place.as_str()) => {
                for (name, value) in fields {
                    let known = KNOWN.iter().find(|known| folded(known) == folded(name));
                    if let Some(known) = known.filter(|known| *known != name) {
                        return Err(Refusal::Name {
                            found: name.chars().take(40).collect(),
                            place,
                            known: (*known).to_owned(),
                        });
                    }
                    places.push((format!("{place}/{name}"), value));
                }
            }
            Value::Array(items) => places.extend(items.iter().map(|item| (format!("{place}/-"), item))),
            _ => {}
        }
    }
    Ok(())
}
