//! Profiles of pods, as they come and as somebody might write them.

use serde_json::{Value, json};

/// Those that merge.
pub(crate) const NAMED: [&str; 9] = [
    "none",
    "allow",
    "deny",
    "deny without ioctl",
    "deny, some commands",
    "deny, all commands but one",
    "deny, errno ENOTTY",
    "allow, some denials",
    "log",
];

fn deny() -> Value {
    serde_json::from_str(include_str!("../profiles/default-deny.json")).unwrap()
}

fn add(mut profile: Value, rules: &[Value]) -> Value {
    profile["syscalls"].as_array_mut().unwrap().extend_from_slice(rules);
    profile
}

fn without(mut profile: Value, name: &str) -> Value {
    for rule in profile["syscalls"].as_array_mut().unwrap() {
        rule["names"].as_array_mut().unwrap().retain(|other| other != name);
    }
    profile
}

/// The rule of the default-deny profile that allows most calls, without some.
pub(crate) fn all_but(names: &[&str]) -> Value {
    let all = names.iter().fold(deny(), |profile, name| without(profile, name));
    all["syscalls"][0].clone()
}

fn ioctl(action: &str, condition: Value) -> Value {
    json!({ "names": ["ioctl"], "action": action, "args": [condition] })
}

/// A pod's profile by name; None: the container has none.
pub(crate) fn profile(name: &str) -> Option<Value> {
    let equals = |value: u64| json!({ "index": 1, "value": value, "op": "SCMP_CMP_EQ" });
    let allow = |value| ioctl("SCMP_ACT_ALLOW", equals(value));
    let deny_value = |value| ioctl("SCMP_ACT_ERRNO", equals(value));
    Some(match name {
        "none" => return None,
        "allow" => json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            { "names": ["mount", "umount2"], "action": "SCMP_ACT_ERRNO" },
        ] }),
        "deny" => deny(),
        "deny without ioctl" => without(deny(), "ioctl"),
        // TIOCGWINSZ, NV_ESC_RM_CONTROL's byte, one UVM number, one harmless look-alike, all of type 'T' on fd 1.
        "deny, some commands" => add(
            without(deny(), "ioctl"),
            &[
                allow(0x5413),
                allow(0xc020_462a),
                allow(5),
                allow(0x8933),
                json!({ "names": ["ioctl"], "action": "SCMP_ACT_ALLOW", "args": [
                { "index": 0, "value": 1, "op": "SCMP_CMP_EQ" },
                { "index": 1, "value": 0xff00, "valueTwo": 0x5400, "op": "SCMP_CMP_MASKED_EQ" },
            ] }),
            ],
        ),
        // TIOCSTI
        "deny, all commands but one" => add(
            without(deny(), "ioctl"),
            &[ioctl("SCMP_ACT_ALLOW", json!({ "index": 1, "value": 0x5412, "op": "SCMP_CMP_NE" }))],
        ),
        "deny, errno ENOTTY" => {
            let mut profile = deny();
            profile["defaultErrnoRet"] = json!(25);
            profile
        }
        // TIOCSTI, TIOCLINUX and NV_ESC_RM_ALLOC; the whole type 'F'.
        "allow, some denials" => json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            deny_value(0x5412), deny_value(0x541c), deny_value(0xc020_462b),
            ioctl("SCMP_ACT_ERRNO", json!({ "index": 1, "value": 0xff00, "valueTwo": 0x4600, "op": "SCMP_CMP_MASKED_EQ" })),
            { "names": ["mmap", "mprotect"], "action": "SCMP_ACT_ERRNO", "args": [
                { "index": 2, "value": 6, "valueTwo": 6, "op": "SCMP_CMP_MASKED_EQ" },
            ] },
        ] }),
        "log" => json!({ "defaultAction": "SCMP_ACT_LOG", "syscalls": [
            { "names": ["read", "ioctl", "mmap"], "action": "SCMP_ACT_ALLOW" },
        ] }),
        other => panic!("no profile named {other}"),
    })
}

/// What a profile says of an ioctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allowed,
    Denied,
    /// By its 64-bit compare the profile denies this register value and allows the same command with another
    /// high half, or the other way round. The kernel doesn't look at the high half: both are right.
    Either,
}

/// The profile's own words on `ioctl(file, command)`, apart from any code that merges.
pub(crate) fn verdict(name: &str, command: u64, file: u64) -> Verdict {
    let low = command & 0xffff_ffff;
    let denied = |denied: bool| if denied { Verdict::Denied } else { Verdict::Allowed };
    match name {
        "none" | "allow" | "deny" | "deny, errno ENOTTY" | "log" => Verdict::Allowed,
        "deny without ioctl" => Verdict::Denied,
        "deny, some commands" => {
            let known = [0x5413, 0xc020_462a, 5, 0x8933];
            let of_type = file == 1 && command & 0xff00 == 0x5400;
            if known.contains(&low) && !known.contains(&command) && !of_type {
                return Verdict::Either;
            }
            denied(!(known.contains(&command) || of_type))
        }
        "deny, all commands but one" if low == 0x5412 && command != low => Verdict::Either,
        "deny, all commands but one" => denied(low == 0x5412),
        "allow, some denials" => {
            let known = [0x5412, 0x541c, 0xc020_462b];
            if known.contains(&low) && !known.contains(&command) {
                return Verdict::Either;
            }
            denied(known.contains(&command) || command & 0xff00 == 0x4600)
        }
        other => panic!("no profile named {other}"),
    }
}
