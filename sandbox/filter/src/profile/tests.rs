use super::*;
use crate::Kind;
use proptest::prelude::*;

fn notify(killable: bool) -> Form {
    let path = "/run/gpuslice/c/0123456789abcdef/notify.sock";
    Form::Notify { listener_path: path.to_owned(), metadata: "nonce".to_owned(), killable }
}

fn merged(profile: &Value, form: &Form) -> Value {
    merge(Some(profile), form).unwrap()
}

fn rules<'a>(profile: &'a Value, name: &str) -> Vec<&'a Value> {
    let all = profile["syscalls"].as_array().unwrap().iter();
    all.filter(|rule| rule["names"].as_array().unwrap().iter().any(|other| other == name)).collect()
}

/// A profile that allows `names` and has one more rule.
fn denying(names: &[&str], rule: Value) -> Value {
    json!({ "defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
        { "names": names, "action": "SCMP_ACT_ALLOW" }, rule,
    ] })
}

#[test]
fn the_listener_and_its_flag_are_set_only_as_asked() {
    let plain = merged(&Value::Null, &notify(false));
    assert_eq!(plain["listenerPath"], "/run/gpuslice/c/0123456789abcdef/notify.sock");
    assert_eq!(plain["listenerMetadata"], "nonce");
    assert_eq!(plain.get("flags"), None);
    assert_eq!(merged(&Value::Null, &notify(true))["flags"], json!([KILLABLE]));
    let own = json!({ "defaultAction": "SCMP_ACT_ALLOW", "flags": ["SECCOMP_FILTER_FLAG_LOG", KILLABLE] });
    assert_eq!(merged(&own, &notify(false))["flags"], json!(["SECCOMP_FILTER_FLAG_LOG"]));
    assert_eq!(merged(&own, &Form::Errno)["flags"], json!(["SECCOMP_FILTER_FLAG_LOG"]));
    let errno = merged(&Value::Null, &Form::Errno);
    assert_eq!((errno.get("listenerPath"), errno.get("listenerMetadata")), (None, None));
    assert_eq!(notify(true).kind(), Kind::Notify);
    assert_eq!(Form::Errno.kind(), Kind::Errno);
}

#[test]
fn fields_and_rules_that_do_not_concern_the_trap_stay() {
    let own = json!({
        "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 7, "x-unknown": { "a": [1, null] },
        "architectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X86_64", "SCMP_ARCH_X32"],
        "syscalls": [
            { "names": ["read", "ioctl", "write"], "action": "SCMP_ACT_ALLOW", "comment": "x" },
            { "names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{ "index": 0, "value": 8, "op": "SCMP_CMP_EQ" }] },
            { "names": ["ioctl"], "action": "SCMP_ACT_ALLOW" },
        ],
    });
    for form in [notify(false), Form::Errno] {
        let out = merged(&own, &form);
        assert_eq!(out["x-unknown"], own["x-unknown"]);
        assert_eq!(out["defaultErrnoRet"], 7);
        assert_eq!(out["architectures"], json!(["SCMP_ARCH_X86_64"]));
        assert_eq!(
            rules(&out, "read"),
            [&json!({ "names": ["read", "write"], "action": "SCMP_ACT_ALLOW", "comment": "x" })]
        );
        assert_eq!(rules(&out, "personality"), [&own["syscalls"][1]]);
        for rule in rules(&out, "ioctl") {
            assert_eq!(rule["args"].as_array().unwrap().len(), 1, "{rule}");
            assert_eq!(rule["args"][0]["index"], 1);
        }
    }
}

#[test]
fn a_profile_with_a_listener_of_its_own_is_refused() {
    let rule = json!({ "names": ["mount"], "action": "SCMP_ACT_NOTIFY" });
    for own in [
        json!({ "defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/x" }),
        json!({ "defaultAction": "SCMP_ACT_ALLOW", "listenerMetadata": "x" }),
        json!({ "defaultAction": "SCMP_ACT_NOTIFY" }),
        denying(&["read"], rule),
    ] {
        for form in [notify(false), Form::Errno] {
            let error = merge(Some(&own), &form).unwrap_err();
            assert!(matches!(error, ProfileError::OwnListener { .. }), "{error}");
        }
    }
    let empty = json!({ "defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "" });
    assert!(merge(Some(&empty), &Form::Errno).is_ok());
}

#[test]
fn malformed_profiles_are_refused_with_the_field_and_its_value() {
    let cases = [
        (json!(7), "linux.seccomp is 7"),
        (json!({}), "defaultAction is null"),
        (json!({ "defaultAction": "SCMP_ACT_MAYBE" }), "SCMP_ACT_MAYBE"),
        (json!({ "defaultAction": "SCMP_ACT_TRACE" }), "SCMP_ACT_TRACE"),
        (json!({ "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": -1 }), "defaultAction"),
        (json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": {} }), "syscalls is {}"),
        (json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [7] }), "syscalls is 7"),
        (
            json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{ "action": "SCMP_ACT_ALLOW" }] }),
            "names of a rule",
        ),
        (
            json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{ "names": [7], "action": "x" }] }),
            "names of a rule",
        ),
        (
            json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{ "names": ["ioctl"], "action": "x" }] }),
            "action of a rule",
        ),
        (json!({ "defaultAction": "SCMP_ACT_ALLOW", "flags": "x" }), "flags"),
        (json!({ "defaultAction": "SCMP_ACT_ALLOW", "Syscalls": [] }), "Syscalls"),
        (json!({ "defaultAction": "SCMP_ACT_ALLOW", "li\u{17f}tenerPath": "" }), "a field's name"),
        (
            json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{ "names": [], "Names": ["ioctl"], "action": "x" }] }),
            "Names",
        ),
        (
            json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            { "names": ["ioctl"], "action": "SCMP_ACT_ERRNO", "args": [{ "index": 1, "op": "SCMP_CMP_EQ", "VALUE": 7 }] },
        ] }),
            "VALUE",
        ),
    ];
    for (own, part) in cases {
        let error = merge(Some(&own), &Form::Errno).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert!(error.len() < 400);
    }
}

#[test]
fn rules_whose_meaning_cannot_be_kept_are_refused() {
    let condition = |index: u64, op: &str| json!({ "index": index, "value": 5, "op": op });
    let rule =
        |name: &str, action: &str, args: Value| json!({ "names": [name], "action": action, "args": args });
    let allow = |rule: Value| json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule] });
    let cases = [
        denying(&[], rule("ioctl", "SCMP_ACT_ALLOW", json!([condition(1, "SCMP_CMP_GT")]))),
        denying(
            &[],
            rule(
                "ioctl",
                "SCMP_ACT_ALLOW",
                json!([condition(1, "SCMP_CMP_NE"), condition(1, "SCMP_CMP_NE")]),
            ),
        ),
        denying(
            &[],
            rule(
                "ioctl",
                "SCMP_ACT_ALLOW",
                json!([condition(1, "SCMP_CMP_NE"), condition(0, "SCMP_CMP_EQ")]),
            ),
        ),
        denying(&["ioctl"], rule("ioctl", "SCMP_ACT_ERRNO", json!([]))),
        denying(&["ioctl"], rule("ioctl", "SCMP_ACT_ERRNO", json!([condition(2, "SCMP_CMP_EQ")]))),
        denying(&[], rule("ioctl", "SCMP_ACT_TRACE", json!([]))),
        denying(&["mmap"], rule("mmap", "SCMP_ACT_ERRNO", json!([condition(2, "SCMP_CMP_EQ")]))),
        denying(&[], rule("mmap", "SCMP_ACT_ALLOW", json!([condition(3, "SCMP_CMP_LT")]))),
        allow(rule("ioctl", "SCMP_ACT_KILL", json!([condition(0, "SCMP_CMP_EQ")]))),
        allow(rule(
            "mmap",
            "SCMP_ACT_ERRNO",
            json!([condition(3, "SCMP_CMP_EQ"), condition(2, "SCMP_CMP_EQ")]),
        )),
        allow(rule("mmap", "SCMP_ACT_ERRNO", json!([condition(2, "SCMP_CMP_GE")]))),
    ];
    for own in cases {
        let error = merge(Some(&own), &notify(false)).unwrap_err();
        assert!(matches!(error, ProfileError::Inexpressible { .. }), "{own}: {error}");
    }
    let odd =
        allow(rule("ioctl", "SCMP_ACT_ERRNO", json!([{ "index": 6, "value": 1, "op": "SCMP_CMP_EQ" }])));
    assert!(matches!(merge(Some(&odd), &Form::Errno), Err(ProfileError::Malformed { .. })));
}

#[test]
fn a_denied_ioctl_stays_denied_whole() {
    let absent = denying(&["read"], json!({ "names": ["write"], "action": "SCMP_ACT_ALLOW" }));
    let denied = json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{ "names": ["ioctl", "bpf"], "action": "SCMP_ACT_KILL" }] });
    for form in [notify(false), Form::Errno] {
        assert!(rules(&merged(&absent, &form), "ioctl").is_empty());
        let out = merged(&denied, &form);
        assert_eq!(rules(&out, "ioctl"), [&json!({ "names": ["ioctl"], "action": "SCMP_ACT_KILL" })]);
        assert_eq!(rules(&out, "bpf"), [&json!({ "names": ["bpf"], "action": "SCMP_ACT_KILL" })]);
    }
}

#[test]
fn io_uring_is_denied_always_and_remap_file_pages_in_gpu_containers() {
    let own = denying(
        &["io_uring_setup", "io_uring_enter", "remap_file_pages", "mmap"],
        json!({ "names": ["io_uring_register"], "action": "SCMP_ACT_LOG" }),
    );
    let gpu = merged(&own, &notify(false));
    let other = merged(&own, &Form::Errno);
    for name in IO_URING {
        for out in [&gpu, &other] {
            let found = rules(out, name);
            assert_eq!(found.len(), 1);
            assert_eq!((&found[0]["action"], &found[0]["errnoRet"]), (&json!("SCMP_ACT_ERRNO"), &json!(38)));
        }
    }
    assert_eq!(rules(&gpu, REMAP)[0]["errnoRet"], 38);
    assert_eq!(rules(&other, REMAP)[0]["action"], "SCMP_ACT_ALLOW");
    assert_eq!(rules(&other, "mmap").len(), 1);
    // Where that is the default already, runtimes would drop the rule.
    let mut enosys = own;
    enosys["defaultErrnoRet"] = json!(38);
    assert!(rules(&merged(&enosys, &Form::Errno), "io_uring_setup").is_empty());
}

#[test]
fn a_rule_never_does_what_the_default_does() {
    for errno in [1, 25, 38] {
        let mut own = denying(
            &["ioctl", "mmap"],
            json!({ "names": ["ioctl"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno, "args": [
            { "index": 1, "value": 0x5412, "op": "SCMP_CMP_EQ" },
        ] }),
        );
        own["defaultErrnoRet"] = json!(errno);
        for form in [notify(false), Form::Errno] {
            let out = merged(&own, &form);
            for rule in out["syscalls"].as_array().unwrap() {
                assert!(rule["action"] != "SCMP_ACT_ERRNO" || rule["errnoRet"] != errno, "{rule}");
            }
        }
    }
}

fn any_rule() -> impl Strategy<Value = Value> {
    let action = prop::sample::select(vec![
        "SCMP_ACT_ALLOW",
        "SCMP_ACT_ERRNO",
        "SCMP_ACT_LOG",
        "SCMP_ACT_KILL_PROCESS",
        "SCMP_ACT_NOTIFY",
        "SCMP_ACT_TRACE",
        "",
    ]);
    let op =
        prop::sample::select(vec!["SCMP_CMP_EQ", "SCMP_CMP_MASKED_EQ", "SCMP_CMP_NE", "SCMP_CMP_GE", "x"]);
    let number = prop_oneof![0_u64..8, any::<u64>(), Just(0xff), Just(0x5412)];
    let arg = (0_u64..7, op, number.clone(), number).prop_map(
        |(index, op, value, two)| json!({ "index": index, "op": op, "value": value, "valueTwo": two }),
    );
    let names =
        prop::collection::vec(prop::sample::select(vec!["ioctl", "mmap", "read", "io_uring_enter"]), 0..3);
    (names, action, prop::collection::vec(arg, 0..3))
        .prop_map(|(names, action, args)| json!({ "names": names, "action": action, "args": args }))
}

proptest! {
    #[test]
    fn any_profile_is_merged_or_refused_and_never_allows_ioctl_without_a_compare(
        rules in prop::collection::vec(any_rule(), 0..6),
        default in prop::sample::select(vec!["SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO", "SCMP_ACT_LOG", "SCMP_ACT_KILL"]),
        gpu: bool,
    ) {
        let own = json!({ "defaultAction": default, "syscalls": rules });
        let form = if gpu { notify(false) } else { Form::Errno };
        if let Ok(out) = merge(Some(&own), &form) {
            for rule in super::tests::rules(&out, "ioctl") {
                let args = rule.get("args").and_then(Value::as_array).map_or(0, Vec::len);
                let denial = rule["action"] != "SCMP_ACT_ALLOW" && rule["action"] != "SCMP_ACT_LOG";
                prop_assert!(args > 0 || denial, "{}", rule);
            }
        }
    }
}
