//! Checks on source text: file length, where `unsafe` may stand, names of tests.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::workspace::root;

/// Longest source file, tests and the tables of the driver's facts aside.
const LONGEST: usize = 500;
/// Folders in which `unsafe` may stand: the one system-call crate, and programs for tests.
const UNSAFE: [&str; 4] =
    ["sandbox/sys/", "integration/emulator/", "integration/node/", "integration/tenant/"];
/// Where the driver's facts are, row by row.
const TABLES: [&str; 3] =
    ["sandbox/policy/src/table", "sandbox/policy/src/branch", "integration/emulator/src/table"];

/// Files that are too long.
pub(crate) fn long_files() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (name, text) in sources()? {
        if name.ends_with("tests.rs")
            || name.contains("/tests/")
            || TABLES.iter().any(|table| name.starts_with(table))
        {
            continue;
        }
        let length = code_lines(&text);
        if length > LONGEST {
            found.push(format!("{name}: {length} lines without its tests, at most {LONGEST}: split it"));
        }
    }
    Ok(found)
}

/// Lines before the tests that end a file.
fn code_lines(text: &str) -> usize {
    text.lines().position(|line| line == "#[cfg(test)]").unwrap_or_else(|| text.lines().count())
}

/// Crates that use `unsafe`, or don't forbid it, where it must not be.
pub(crate) fn unsafe_code() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (name, text) in sources()? {
        if UNSAFE.iter().any(|folder| name.starts_with(folder)) {
            continue;
        }
        let crate_root = name.ends_with("src/lib.rs") || name.ends_with("src/main.rs");
        if crate_root && !text.contains("#![forbid(unsafe_code)]") {
            found.push(format!("{name}: a crate outside sandbox/sys starts with #![forbid(unsafe_code)]"));
        }
    }
    Ok(found)
}

/// Tests whose name is no sentence.
pub(crate) fn test_names() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (name, text) in sources()? {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (index, _) in lines.iter().enumerate().filter(|(_, line)| **line == "#[test]") {
            // The other half of a test, run by it in a process of its own.
            let half = index.checked_sub(1).and_then(|before| lines.get(before));
            if half.is_some_and(|line| line.starts_with("/// Not a test of its own")) {
                continue;
            }
            let function = lines.iter().skip(index + 1).find_map(|line| line.strip_prefix("fn "));
            let function = function.and_then(|rest| rest.split('(').next()).unwrap_or_default();
            if function.starts_with('$') {
                continue; // Named where the macro is used.
            }
            if function.starts_with("test_") || function.split('_').count() < 3 {
                found.push(format!("{name}: test {function:?} should be a sentence: what holds, and when"));
            }
        }
    }
    Ok(found)
}

/// Every Rust source file of the repository, by its path from the top.
fn sources() -> Result<Vec<(String, String)>> {
    let top = root();
    let mut files = Vec::new();
    for folder in ["config", "integration", "sandbox", "scheduler", "shim", "xtask"] {
        walk(&top.join(folder), &mut files)?;
    }
    files.sort();
    files
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            let name = path.strip_prefix(&top).unwrap_or(&path).to_string_lossy().into_owned();
            Ok((name, text))
        })
        .collect()
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry.with_context(|| format!("list {}", folder.display()))?.path();
        if path.is_dir() && path.file_name().is_none_or(|name| name != "target") {
            walk(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::code_lines;

    #[test]
    fn the_tests_that_end_a_file_do_not_count() {
        assert_eq!(code_lines("a\nb\n#[cfg(test)]\nmod tests;\n"), 2);
        assert_eq!(code_lines("a\nb\n"), 2);
    }
}
