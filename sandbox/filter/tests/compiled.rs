//! The programs that real runtimes compile from merged profiles, judged and run. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "a test ends at the first surprise"
)]

mod compiled {
    pub(crate) mod container;
    pub(crate) mod profiles;
}

use compiled::container::{Container, LISTENER, Runtime};
use compiled::profiles::{NAMED, Verdict, profile, verdict};
use gpuslice_filter::{Action, Call, Form, Hole, Kind, judge, merge, run};
use gpuslice_policy::acts_on;
use gpuslice_sys::Instruction;
use serde_json::json;
use std::time::Instant;

const SLEEP: [&str; 3] = ["/bin/busybox", "sleep", "100"];
/// TIOCGSID, FIOASYNC, SIOCGIFHWADDR, SIOCGIFINDEX, TCSETS2, TCGETS2.
const NEEDED: [u32; 6] = [0x5429, 0x5452, 0x8927, 0x8933, 0x402c_542b, 0x802c_542a];
const IOCTL: u32 = 16;
const MMAP: u32 = 9;

fn notify() -> Form {
    Form::Notify { listener_path: LISTENER.to_owned(), metadata: "nonce".to_owned(), killable: false }
}

fn compile(runtime: Runtime, name: &str, form: &Form) -> Container {
    let merged = merge(profile(name).as_ref(), form).unwrap();
    Container::create(runtime, Some(&merged), &SLEEP).unwrap_or_else(|e| panic!("{runtime:?} {name}: {e}"))
}

fn strictest(programs: &[Vec<Instruction>], call: &Call) -> Action {
    programs.iter().map(|program| run(program, call)).min().unwrap()
}

/// Numbers without a pattern, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Commands at which something may change, and as many random ones.
fn commands(count: usize) -> Vec<u32> {
    let mut commands = Vec::new();
    let known = gpuslice_policy::harmless().iter().copied();
    let known = known.chain([0x5401, 0x5412, 0x5413, 0x541c, 0x5421, 0x8912, 0xc020_462a, 0x4600, 0x46ff]);
    for command in known {
        commands.push(command);
        commands.extend((0..32).map(|bit| command ^ 1 << bit));
    }
    let uppers =
        [0, 0x100, 0x200, 0x3000_0000, 0x3000_0100, 0x1000_0000, 0x2000_0000, 0x4004_5400, 0xffff_ff00];
    for upper in uppers.into_iter().chain((8..32).map(|bit| 1 << bit)) {
        commands.extend((0..=0xff).map(|byte| upper | byte));
    }
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    commands.extend((0..count).map(|_| numbers.next() as u32));
    commands
}

/// What the filter must do with a command, by the pod's own profile and the policy.
fn expected(name: &str, kind: Kind, command: u64, file: u64) -> Vec<Action> {
    let (denied, allowed) = (
        vec![Action::KillProcess, Action::KillThread, Action::Trap, Action::Errno],
        vec![Action::Allow, Action::Log],
    );
    match verdict(name, command, file) {
        Verdict::Denied => denied,
        // Where the default is to allow, a look-alike is let through only if ordinary programs need it.
        Verdict::Allowed if gpuslice_policy::harmless().contains(&(command as u32)) => {
            let by_default = matches!(name, "none" | "allow" | "allow, some denials");
            match (kind, by_default) {
                (_, false) => allowed,
                (Kind::Notify, true) => vec![Action::Notify],
                (Kind::Errno, true) if NEEDED.contains(&(command as u32)) => allowed,
                (Kind::Errno, true) => vec![Action::Errno],
            }
        }
        Verdict::Allowed if !acts_on(command as u32) => allowed,
        Verdict::Allowed if kind == Kind::Notify => vec![Action::Notify],
        Verdict::Allowed => vec![Action::Errno],
        Verdict::Either => [denied, allowed, vec![Action::Notify]].concat(),
    }
}

#[test]
fn every_form_of_every_profile_compiles_to_a_program_that_keeps_all_promises() {
    let commands = commands(if cfg!(debug_assertions) { 1_000 } else { 400_000 });
    let mut looked = 0_u64;
    for runtime in Runtime::installed() {
        for name in NAMED {
            for form in [notify(), Form::Errno] {
                let container = compile(runtime, name, &form);
                let programs = container.programs();
                let lengths: Vec<usize> = programs.iter().map(Vec::len).collect();
                let start = Instant::now();
                let verdict = judge(&programs, form.kind());
                println!(
                    "{runtime:?}, profile {name:?}, {:?}: {lengths:?} instructions, judged in {:?}",
                    form.kind(),
                    start.elapsed()
                );
                assert_eq!(verdict, Ok(()), "{runtime:?} {name}");
                for command in &commands {
                    // A set high half, as C libraries that sign-extend make it, for one command in four.
                    for high in
                        [0, u64::from(u32::MAX), 1].into_iter().take(if command % 4 == 3 { 3 } else { 1 })
                    {
                        let wide = high << 32 | u64::from(*command);
                        let file = u64::from(command % 3);
                        let found = strictest(&programs, &Call::native(IOCTL, [file, wide, 7, 0, 0, 0]));
                        let wanted = expected(name, form.kind(), wide, file);
                        assert!(
                            wanted.contains(&found),
                            "{runtime:?} {name} {:?} {wide:#x}: {found:?}, not {wanted:?}",
                            form.kind()
                        );
                        looked += 1;
                    }
                }
            }
        }
    }
    println!("{looked} ioctl commands compared with the profiles");
}

#[test]
fn other_calls_stay_as_the_profile_has_them() {
    for runtime in Runtime::installed() {
        for form in [notify(), Form::Errno] {
            let native = |programs: &[Vec<Instruction>], nr: u32, args: [u64; 6]| {
                strictest(programs, &Call::native(nr, args))
            };
            let container = compile(runtime, "deny", &form);
            let programs = container.programs();
            assert_eq!(native(&programs, 0, [0; 6]), Action::Allow);
            // bpf; personality with a value allowed and one that isn't; clone3 by a rule of its own.
            assert_eq!(native(&programs, 321, [0; 6]), Action::Errno);
            assert_eq!(native(&programs, 135, [8, 0, 0, 0, 0, 0]), Action::Allow);
            assert_eq!(native(&programs, 135, [9, 0, 0, 0, 0, 0]), Action::Errno);
            assert_eq!(native(&programs, 435, [0; 6]), Action::Errno);
            assert_eq!(native(&programs, 425, [0; 6]), Action::Errno);
            for foreign in [0x4000_0003, 0xc000_0028] {
                let call = Call { nr: 54, arch: foreign, instruction_pointer: 0, args: [0; 6] };
                assert!(strictest(&programs, &call) < Action::Errno, "{foreign:#x}");
            }
            assert!(native(&programs, 0x4000_0000 | 514, [0; 6]) <= Action::Errno);
        }
    }
}

#[test]
fn exactly_shared_file_mappings_are_trapped_in_gpu_containers() {
    let trapped = |flags: u64| matches!(flags & 0xf, 1 | 3) && flags & 0x20 == 0;
    for runtime in Runtime::installed() {
        for (name, allowed) in [("none", true), ("deny", true), ("allow, some denials", true), ("log", true)]
        {
            for form in [notify(), Form::Errno] {
                let programs = compile(runtime, name, &form).programs();
                for flags in
                    (0..0x80).chain([0x8001, 0x4_0001, 1 << 32, 1 << 32 | 1, 1 << 63 | 3, 1 << 63 | 2])
                {
                    let found = strictest(&programs, &Call::native(MMAP, [0, 4096, 3, flags, 5, 0]));
                    if trapped(flags) && form.kind() == Kind::Notify {
                        assert_eq!(found, Action::Notify, "{runtime:?} {name} {flags:#x}");
                    } else {
                        assert_eq!(found >= Action::Log, allowed, "{runtime:?} {name} {flags:#x}");
                    }
                    if name == "allow, some denials" {
                        // Writable and executable: the pod's own denial comes first.
                        let found = strictest(&programs, &Call::native(MMAP, [0, 4096, 7, flags, 5, 0]));
                        assert_eq!(found, Action::Errno, "{runtime:?} {flags:#x}");
                    }
                }
                let remap = strictest(&programs, &Call::native(216, [0; 6]));
                assert_eq!(remap == Action::Errno, form.kind() == Kind::Notify, "{runtime:?} {name}");
            }
        }
    }
}

/// Rules added beside a profile that allows ioctl: what a straightforward merge would do.
#[test]
fn rules_added_beside_an_allowed_ioctl_are_judged_a_hole() {
    for runtime in Runtime::installed() {
        let mut naive = profile("deny").unwrap();
        let good = merge(Some(&naive), &notify()).unwrap();
        let ours =
            good["syscalls"].as_array().unwrap().iter().filter(|rule| rule["action"] == "SCMP_ACT_NOTIFY");
        let ours: Vec<_> = ours.cloned().collect();
        assert!(ours.len() > 20);
        naive["syscalls"].as_array_mut().unwrap().extend(ours);
        naive["listenerPath"] = json!(LISTENER);
        naive["architectures"] = json!(["SCMP_ARCH_X86_64"]);
        let container = Container::create(runtime, Some(&naive), &SLEEP).unwrap();
        let programs = container.programs();
        let hole = judge(&programs, Kind::Notify).unwrap_err();
        println!("{runtime:?}: {hole}");
        let Hole::Open { action: Action::Allow, call, .. } = hole else { panic!("{hole}") };
        assert!(acts_on(call.args[1] as u32));
        assert_eq!(strictest(&programs, &call), Action::Allow);
        // The very command that the rules were for.
        let control = Call::native(IOCTL, [3, 0xc020_462a, 0, 0, 0, 0]);
        assert_eq!(strictest(&programs, &control), Action::Allow);
    }
}

/// A wrong program differs from a right one in a few instructions: the judge must see each difference that
/// matters, and none that doesn't.
#[test]
fn damaged_programs_are_judged_as_the_interpreter_finds_them() {
    let commands = commands(200);
    let trapped: Vec<u32> = commands.into_iter().filter(|command| acts_on(*command)).collect();
    let rounds = if cfg!(debug_assertions) { 25 } else { 3_000 };
    let mut numbers = Numbers(0x2545_f491_4f6c_dd1d);
    for runtime in Runtime::installed() {
        for name in ["none", "deny", "deny, some commands"] {
            for form in [notify(), Form::Errno] {
                let good = compile(runtime, name, &form).programs();
                let (mut open, mut kept) = (0, 0);
                for _ in 0..rounds {
                    let mut programs = good.clone();
                    damage(&mut programs[0], &mut numbers);
                    let call = |command: &u32| Call::native(IOCTL, [1, u64::from(*command), 0, 0, 0, 0]);
                    let leak =
                        trapped.iter().map(call).find(|call| strictest(&programs, call) > Action::Notify);
                    match judge(&programs, form.kind()) {
                        Ok(()) => {
                            assert_eq!(leak, None, "{runtime:?} {name}: a hole that was not seen");
                            kept += 1;
                        }
                        Err(hole) => {
                            if let Some(call) = hole.example() {
                                assert!(strictest(&programs, &call) > Action::Notify, "{hole}");
                            }
                            open += 1;
                        }
                    }
                }
                println!("{runtime:?}, profile {name:?}, {:?}: {open} open, {kept} kept", form.kind());
                assert!(open > 0 && kept > 0);
            }
        }
    }
}

fn damage(program: &mut [Instruction], numbers: &mut Numbers) {
    let length = program.len() as u64;
    let at = (numbers.next() % length) as usize;
    let room = (program.len() - at).saturating_sub(2).min(255);
    let instruction = &mut program[at];
    match numbers.next() % 4 {
        0 => instruction.k ^= 1 << (numbers.next() % 32),
        1 => std::mem::swap(&mut instruction.jt, &mut instruction.jf),
        2 => instruction.jt = (numbers.next() % (room as u64 + 1)) as u8,
        _ => instruction.jf = (numbers.next() % (room as u64 + 1)) as u8,
    }
}

/// crun installs the filter of a process without new privileges after the start: nothing to judge before.
#[test]
fn a_process_without_a_filter_is_not_passed() {
    for runtime in Runtime::installed() {
        let container = Container::create(runtime, None, &SLEEP).unwrap();
        assert_eq!(judge(&container.programs(), Kind::Errno), Err(Hole::NoFilter));
    }
}

/// What the forms cost at create, and what the judgement costs: `cargo test --profile test-release -p gpuslice-filter
/// --test compiled -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn cost_of_each_form() {
    const ROUNDS: usize = 40;
    let middle = |mut times: Vec<std::time::Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    for runtime in Runtime::installed() {
        for name in ["none", "deny", "deny, some commands", "allow, some denials"] {
            let own = profile(name);
            let forms = [None, Some(notify()), Some(Form::Errno)];
            let mut times = vec![Vec::new(); forms.len()];
            for _ in 0..ROUNDS {
                for (form, times) in forms.iter().zip(&mut times) {
                    let merged = form.as_ref().map(|form| merge(own.as_ref(), form).unwrap());
                    let container =
                        Container::create(runtime, merged.as_ref().or(own.as_ref()), &SLEEP).unwrap();
                    times.push(container.took);
                }
            }
            for (form, times) in forms.iter().zip(times) {
                let kind = form.as_ref().map(Form::kind);
                println!("{runtime:?}, profile {name:?}, {kind:?}: create {:?}", middle(times));
                let Some(form) = form else { continue };
                let programs = compile(runtime, name, form).programs();
                let run = |work: &dyn Fn()| {
                    middle(
                        (0..101)
                            .map(|_| {
                                let start = Instant::now();
                                work();
                                start.elapsed()
                            })
                            .collect(),
                    )
                };
                let judged = run(&|| judge(&programs, form.kind()).unwrap());
                let merged = run(&|| drop(merge(own.as_ref(), form)));
                println!("    merge {merged:?}, judge {judged:?}");
            }
        }
    }
}

/// Profiles made of random rules for the calls that the trap owns: whatever merges compiles and is judged right,
/// and no call that the profile denies by every reading of its rules gets through.
#[test]
fn random_profiles_merge_to_programs_that_keep_all_promises() {
    let mut numbers = Numbers(0x1234_5678_9abc_def1);
    let mut pick = move |list: &[u64]| list[(numbers.next() % list.len() as u64) as usize];
    let (mut merged, mut refused, mut unusable) = (0, 0, 0);
    // Both runtimes hand the rules to the same library in the same order.
    for runtime in Runtime::installed().into_iter().take(1) {
        for _ in 0..if cfg!(debug_assertions) { 60 } else { 1_500 } {
            let own = random_profile(&mut pick);
            let form = if pick(&[0, 1]) == 0 { notify() } else { Form::Errno };
            let Ok(profile) = merge(Some(&own), &form) else {
                refused += 1;
                continue;
            };
            merged += 1;
            // The runtime itself can't go on under some of these.
            let Ok(container) = Container::create(runtime, Some(&profile), &SLEEP) else {
                unusable += 1;
                continue;
            };
            let programs = container.programs();
            assert_eq!(judge(&programs, form.kind()), Ok(()), "{own}");
            for (name, number, at) in [("ioctl", IOCTL, 1), ("mmap", MMAP, 3)] {
                if name == "mmap" && form == Form::Errno {
                    continue;
                }
                for value in VALUES {
                    for other in [0, 1, 2, 5] {
                        let mut args = [other; 6];
                        args[at] = value;
                        let found = strictest(&programs, &Call::native(number, args));
                        if denied_by_all(&own, name, &args) {
                            assert!(found < Action::Notify, "{name} {args:x?} {found:?}\n{own}");
                        }
                    }
                }
            }
        }
    }
    println!("{merged} merged, {unusable} of them unusable, {refused} refused");
    assert!(Runtime::installed().is_empty() || merged - unusable > refused);
}

const VALUES: [u64; 12] =
    [0, 1, 2, 3, 5, 0x22, 0x5401, 0x5413, 0x8933, 0xc020_462a, 0x3000_0001, 0x8004_5438];

fn random_profile(pick: &mut impl FnMut(&[u64]) -> u64) -> serde_json::Value {
    let action = |which: u64| {
        ["SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO", "SCMP_ACT_LOG", "SCMP_ACT_KILL_PROCESS"][which as usize]
    };
    let mut rules = vec![compiled::profiles::all_but(&["ioctl", "mmap"])];
    for _ in 0..pick(&[0, 1, 1, 2, 2, 3]) {
        let name = if pick(&[0, 1]) == 0 { "ioctl" } else { "mmap" };
        let mut args = Vec::new();
        for _ in 0..pick(&[0, 1, 1, 1, 2]) {
            let op = ["SCMP_CMP_EQ", "SCMP_CMP_MASKED_EQ", "SCMP_CMP_NE"][pick(&[0, 0, 1, 1, 2]) as usize];
            let mask = pick(&[0xff, 0xff00, 0x2d, 1, 6, u64::MAX]);
            let value = pick(&VALUES);
            let (first, second) = if op == "SCMP_CMP_MASKED_EQ" { (mask, value & mask) } else { (value, 0) };
            args.push(json!({ "index": pick(&[0, 1, 1, 2, 3, 3, 4]), "value": first, "valueTwo": second, "op": op }));
        }
        rules.push(json!({ "names": [name], "action": action(pick(&[0, 0, 0, 1, 2, 3])), "args": args }));
    }
    json!({ "defaultAction": action(pick(&[0, 1, 1, 2, 3])), "syscalls": rules })
}

/// The profile denies the call whichever of its rules counts.
fn denied_by_all(profile: &serde_json::Value, name: &str, args: &[u64; 6]) -> bool {
    let permits = |action: &serde_json::Value| action == "SCMP_ACT_ALLOW" || action == "SCMP_ACT_LOG";
    let rules = profile["syscalls"].as_array().unwrap();
    let matching: Vec<_> =
        rules.iter().filter(|rule| rule["names"][0] == name && matches_rule(rule, args)).collect();
    if matching.is_empty() {
        return !permits(&profile["defaultAction"]);
    }
    matching.iter().all(|rule| !permits(&rule["action"]))
}

fn matches_rule(rule: &serde_json::Value, args: &[u64; 6]) -> bool {
    rule["args"].as_array().unwrap().iter().all(|arg| {
        let number = |field: &str| arg[field].as_u64().unwrap();
        let found = args[number("index") as usize];
        match arg["op"].as_str().unwrap() {
            "SCMP_CMP_EQ" => found == number("value"),
            "SCMP_CMP_NE" => found != number("value"),
            _ => found & number("value") == number("valueTwo"),
        }
    })
}
