//! `gpuslice drivers`.

use gpuslice_config::Node;
use gpuslice_policy::Branch;
use serde_json::json;

/// The list, and whether the node's driver is on it (or there is none).
pub(crate) fn list(node: &Node, as_json: bool) -> (String, bool) {
    let found = node.driver_version().ok();
    let judged = found.as_deref().map(Branch::for_version);
    let known = !matches!(judged, Some(Err(_)));
    if as_json {
        let branches: Vec<_> = Branch::all()
            .iter()
            .map(|branch| {
                json!({
                    "branch": branch.major, "floor": branch.floor.to_string(), "classes": branch.classes().len(),
                    "controls": branch.controls().count(), "uvm_commands": branch.uvm_commands().len(),
                })
            })
            .collect();
        return (
            format!(
                "{}\n",
                json!({ "known": branches, "found": found, "found_is_known": known && found.is_some() })
            ),
            known,
        );
    }
    let mut text = String::from("Known to this release:\n");
    for branch in Branch::all() {
        text.push_str(&format!(
            "  {}: {} and later ({} classes, {} controls, {} UVM commands)\n",
            branch.major,
            branch.floor,
            branch.classes().len(),
            branch.controls().count(),
            branch.uvm_commands().len()
        ));
    }
    text.push_str(&match (&found, judged) {
        (None, _) | (_, None) => "Found here: no NVIDIA driver\n".to_owned(),
        (Some(version), Some(Ok(_))) => format!("Found here: {version}, known\n"),
        (Some(_), Some(Err(error))) => format!("Found here: {error}\n"),
    });
    (text, known)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(version: Option<&str>) -> (String, bool) {
        let directory = tempfile::tempdir().unwrap();
        if let Some(version) = version {
            let line = format!(
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
            );
            std::fs::write(directory.path().join("version"), line).unwrap();
        }
        list(&Node { dev: directory.path().into(), proc_driver: directory.path().into() }, false)
    }

    #[test]
    fn the_nodes_driver_is_judged() {
        let (text, known) = with(Some("580.159.04"));
        assert!(known && text.contains("580.159.04, known"), "{text}");
        let (text, known) = with(Some("999.1"));
        assert!(!known && text.contains("unknown NVIDIA driver version \"999.1\""), "{text}");
        let (text, known) = with(None);
        assert!(known && text.contains("no NVIDIA driver"), "{text}");
    }
}
