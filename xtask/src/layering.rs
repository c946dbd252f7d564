//! Which crate may use which: read from `cargo metadata`, compared with the list below.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::cargo;

/// Crates of the product, and the crates of ours that each may depend on. Programs never depend on each other.
const PRODUCT: [(&str, &[&str]); 9] = [
    ("gpuslice-proto", &[]),
    ("gpuslice-config", &["gpuslice-proto"]),
    ("gpuslice-policy", &[]),
    ("gpuslice-sys", &[]),
    ("gpuslice-filter", &["gpuslice-policy", "gpuslice-sys"]),
    ("gpuslice-sandbox", &["gpuslice-filter", "gpuslice-policy", "gpuslice-proto", "gpuslice-sys"]),
    ("gpuslice-scheduler", &["gpuslice-config", "gpuslice-policy", "gpuslice-proto", "gpuslice-sys"]),
    (
        "gpuslice-cli",
        &["gpuslice-config", "gpuslice-filter", "gpuslice-policy", "gpuslice-proto", "gpuslice-sys"],
    ),
    (
        "gpuslice-shim",
        &["gpuslice-config", "gpuslice-filter", "gpuslice-policy", "gpuslice-proto", "gpuslice-sys"],
    ),
];

/// Test-only crates. The emulator and the tenant share nothing with the product: no mistake is made twice.
const TEST_ONLY: [(&str, &[&str]); 6] = [
    ("gpuslice-emulator", &[]),
    ("gpuslice-tenant", &[]),
    (
        "gpuslice-node",
        &[
            "gpuslice-config",
            "gpuslice-emulator",
            "gpuslice-policy",
            "gpuslice-proto",
            "gpuslice-sandbox",
            "gpuslice-scheduler",
            "gpuslice-shim",
            "gpuslice-sys",
        ],
    ),
    ("gpuslice-harness", &["gpuslice-config", "gpuslice-emulator", "gpuslice-proto"]),
    ("gpuslice-tests", &["gpuslice-emulator", "gpuslice-harness", "gpuslice-proto"]),
    ("xtask", &[]),
];

/// What breaks the rules, one line each.
pub(crate) fn check() -> Result<Vec<String>> {
    let output = cargo()
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .output()
        .context("ask cargo for the workspace's metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).context("read cargo's metadata")?;
    let packages =
        metadata.get("packages").and_then(Value::as_array).context("cargo's metadata names no packages")?;
    let mut edges = Vec::new();
    for package in packages {
        let name = text(package, "name");
        for dependency in package.get("dependencies").and_then(Value::as_array).into_iter().flatten() {
            if dependency.get("path").is_some_and(Value::is_string) {
                let kind = dependency.get("kind").and_then(Value::as_str).unwrap_or("normal");
                edges.push((name.clone(), text(dependency, "name"), kind == "dev"));
            }
        }
    }
    let names = packages.iter().map(|package| text(package, "name"));
    Ok(judge(names, &edges))
}

fn text(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The rules themselves. An edge is (user, used, only in tests).
fn judge(names: impl Iterator<Item = String>, edges: &[(String, String, bool)]) -> Vec<String> {
    let allowed = |name: &str| {
        let rule = PRODUCT.iter().chain(&TEST_ONLY).find(|(crate_name, _)| *crate_name == name);
        rule.map(|(_, list)| *list)
    };
    let mut found: Vec<String> = names
        .filter(|name| allowed(name).is_none())
        .map(|name| format!("{name} has no rule: add it to xtask/src/layering.rs"))
        .collect();
    for (user, used, dev) in edges {
        let listed = allowed(user).is_some_and(|list| list.contains(&used.as_str()));
        let own_tests = *dev && PRODUCT.iter().any(|(product, _)| product == used);
        if !listed && !own_tests {
            found.push(format!("{user} may not depend on {used}"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::judge;

    fn edge(user: &str, used: &str, dev: bool) -> Vec<(String, String, bool)> {
        vec![(user.to_owned(), used.to_owned(), dev)]
    }

    #[test]
    fn the_product_never_uses_a_test_only_crate() {
        let found = judge(std::iter::empty(), &edge("gpuslice-shim", "gpuslice-emulator", false));
        assert_eq!(found, ["gpuslice-shim may not depend on gpuslice-emulator"]);
    }

    #[test]
    fn a_crate_without_a_rule_is_reported() {
        assert_eq!(judge(["gpuslice-new".to_owned()].into_iter(), &[]).len(), 1);
    }

    #[test]
    fn a_listed_dependency_is_fine() {
        assert!(judge(std::iter::empty(), &edge("gpuslice-filter", "gpuslice-policy", false)).is_empty());
    }
}
