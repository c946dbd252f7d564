//! `gpuslice doctor`: each thing that gpuslice needs, what was found, what is lost without.
//!
//! The kernel's and the runtime's rows come from `gpuslice_filter`; the others are here. Trusts the node's
//! files. What can't be found out counts as not there.

mod checks;

use std::path::PathBuf;

use gpuslice_config::{Config, LoadError, Node};
use gpuslice_filter::Support;
use serde_json::{Value, json};

/// Where to look.
pub(crate) struct Places {
    pub(crate) node: Node,
    pub(crate) etc: PathBuf,
    pub(crate) cgroup: PathBuf,
    pub(crate) modules: PathBuf,
    /// Where programs are installed.
    pub(crate) programs: Vec<PathBuf>,
    pub(crate) nvidia_smi: PathBuf,
}

impl Places {
    /// This node's.
    pub(crate) fn node() -> Places {
        let beside = std::env::current_exe().ok().and_then(|path| path.parent().map(PathBuf::from));
        Places {
            node: Node::kernel(),
            etc: "/etc".into(),
            cgroup: "/sys/fs/cgroup".into(),
            modules: "/sys/module".into(),
            programs: beside.into_iter().chain(["/usr/local/bin".into(), "/usr/bin".into()]).collect(),
            nvidia_smi: "/usr/bin/nvidia-smi".into(),
        }
    }
}

/// One thing looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) found: String,
    pub(crate) needed: String,
    pub(crate) lost: String,
    pub(crate) ok: bool,
    /// No GPU container starts without it.
    pub(crate) required: bool,
}

impl Row {
    fn new(what: &str, ok: bool, found: impl Into<String>, needed: &str, lost: &str) -> Row {
        Row {
            what: what.into(),
            found: found.into(),
            needed: needed.into(),
            lost: lost.into(),
            ok,
            required: true,
        }
    }

    fn optional(self) -> Row {
        Row { required: false, ..self }
    }
}

/// Looks at everything.
pub(crate) fn examine(config: &Result<Config, LoadError>, places: &Places) -> Vec<Row> {
    let mut rows = vec![checks::configuration(config)];
    let defaults = Config::default();
    let config = config.as_ref().unwrap_or(&defaults);
    rows.extend(checks::node(&places.node, &places.modules));
    rows.extend(checks::cards(places));
    rows.push(checks::uids(config, &places.etc));
    rows.push(checks::scheduler(config));
    rows.extend(checks::programs(config, &places.programs));
    rows.push(checks::cgroups(&places.cgroup));
    rows.push(checks::fence(config));
    let runtime = checks::find_program(
        &config.runtime.binary_name,
        &["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"],
    );
    let support = Support::probe(&runtime);
    rows.extend(support.rows().into_iter().map(|row| Row {
        what: row.what.to_owned(),
        found: row.found,
        needed: row.needed,
        lost: row.lost.to_owned(),
        ok: row.ok,
        required: row.required,
    }));
    rows
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

/// Nothing that must be there is missing.
pub(crate) fn well(rows: &[Row]) -> bool {
    rows.iter().all(|row| row.ok || !row.required)
}

/// For people.
pub(crate) fn text(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        let mark = match (row.ok, row.required) {
            (true, _) => "ok     ",
            (false, true) => "MISSING",
            (false, false) => "without",
        };
        text.push_str(&format!("{mark}  {}: {}\n", row.what, row.found));
        if !row.ok {
            text.push_str(&format!(
                "           needed: {}\n           lost without: {}\n",
                row.needed, row.lost
            ));
        }
    }
    let missing = rows.iter().filter(|row| !row.ok && row.required).count();
    text.push_str(&match missing {
        0 => "\nGPU containers can start on this node.\n".to_owned(),
        1 => "\nGPU containers can't start on this node: 1 thing is missing.\n".to_owned(),
        missing => format!("\nGPU containers can't start on this node: {missing} things are missing.\n"),
    });
    text
}

/// For programs.
pub(crate) fn json(rows: &[Row]) -> String {
    let list: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "what": row.what, "found": row.found, "needed": row.needed, "lost": row.lost, "ok": row.ok,
                "required": row.required,
            })
        })
        .collect();
    format!("{}\n", json!({ "ok": well(rows), "rows": list }))
}

#[cfg(test)]
mod tests;
