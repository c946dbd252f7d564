//! What is changed in a container's spec before the runtime sees it.
//!
//! Owns: the seccomp section, the removal of annotations that runtimes obey (S40). Trusts nothing in the spec.
//! Promises: fields unknown here stay as they came.

use gpuslice_filter::{Form, ProfileError, merge};
use serde_json::{Map, Value, json};

/// Annotations with which crun lets a pod author replace parts of the spec, the seccomp filter among them.
const RUNTIME_ANNOTATIONS: &str = "run.oci.";

/// Why a spec can't be edited.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EditError {
    #[error("config.json: linux is not an object")]
    NoLinux,
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

/// Takes out the annotations that are addressed to the runtime.
pub(crate) fn drop_runtime_annotations(spec: &mut Value) {
    if let Some(annotations) = spec.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.retain(|key, _| !key.starts_with(RUNTIME_ANNOTATIONS));
    }
}

/// Merges the container's seccomp profile with the rules of the trap.
///
/// # Errors
/// [`EditError`].
pub(crate) fn set_rules(spec: &mut Value, form: &Form) -> Result<(), EditError> {
    let root = spec.as_object_mut().ok_or(EditError::NoLinux)?;
    let linux: &mut Map<String, Value> =
        root.entry("linux").or_insert_with(|| json!({})).as_object_mut().ok_or(EditError::NoLinux)?;
    let merged = merge(linux.get("seccomp"), form)?;
    linux.insert("seccomp".to_owned(), merged);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_for_the_runtime_go_and_others_stay() {
        let mut spec = json!({ "annotations": {
            "run.oci.seccomp_bpf_data": "x", "run.oci.handler": "y", "run.ocix": "1", "io.kubernetes.cri.sandbox-id": "p",
        } });
        drop_runtime_annotations(&mut spec);
        assert_eq!(spec, json!({ "annotations": { "run.ocix": "1", "io.kubernetes.cri.sandbox-id": "p" } }));
        let mut bare = json!({});
        drop_runtime_annotations(&mut bare);
        assert_eq!(bare, json!({}));
    }

    #[test]
    fn a_spec_without_a_profile_gets_the_rules_and_keeps_the_rest() {
        let mut spec = json!({ "linux": { "unknown": [1] }, "other": true });
        set_rules(&mut spec, &Form::Errno).unwrap();
        assert_eq!((&spec["linux"]["unknown"], &spec["other"]), (&json!([1]), &json!(true)));
        assert!(!spec["linux"]["seccomp"]["syscalls"].as_array().unwrap().is_empty());
        assert_eq!(spec["linux"]["seccomp"]["listenerPath"], Value::Null);
        let mut bare = json!({});
        set_rules(&mut bare, &Form::Errno).unwrap();
        assert!(bare["linux"]["seccomp"].is_object());
        assert!(matches!(set_rules(&mut json!({ "linux": 1 }), &Form::Errno), Err(EditError::NoLinux)));
    }

    #[test]
    fn a_container_with_a_gpu_gets_the_listener() {
        let form =
            Form::Notify { listener_path: "/run/x.sock".into(), metadata: "n".into(), killable: false };
        let mut spec = json!({ "linux": {} });
        set_rules(&mut spec, &form).unwrap();
        assert_eq!(spec["linux"]["seccomp"]["listenerPath"], "/run/x.sock");
        assert_eq!(spec["linux"]["seccomp"]["listenerMetadata"], "n");
    }
}
