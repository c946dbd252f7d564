//! The programs that real runtimes compile from merged profiles, judged and run. Needs root.

mod compiled {
    pub(crate) mod container;
    pub(crate) mod profiles;
}

use compiled::container::{Container, LISTENER, Runtime};
use compiled::profiles::{NAMED, profile};
use gpuslice_filter::{Action, Call, Form, Kind, judge, merge, run};
use gpuslice_sys::Instruction;
use std::time::Instant;

const SLEEP: [&str; 3] = ["/bin/busybox", "sleep", "100"];

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

#[test]
fn every_form_of_every_profile_compiles_to_a_program_that_keeps_all_promises() {
    for runtime in Runtime::installed() {
        for name in NAMED {
            for form in [notify(), Form::Errno] {
                let container = compile(runtime, name, &form);
                let programs = container.programs();
                let lengths: Vec<usize> = programs.iter().map(Vec::len).collect();
                let start = Instant::now();
                let verdict = judge(&programs, form.kind());
                println!(
                    "{runtime:?} {name} {:?}: create {:?}, instructions {lengths:?}, judged in {:?}",
                    form.kind(),
                    container.took,
                    start.elapsed()
                );
                assert_eq!(verdict, Ok(()), "{runtime:?} {name}");
            }
        }
    }
}
