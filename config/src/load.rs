//! From a file to a checked [`Config`].
//!
//! Trusts a file only if root owns it and nobody else can write it: whoever writes it decides about every
//! tenant. A missing file means the defaults; an unreadable or wrong one is an error, never the defaults.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::{Config, InvalidConfig};

/// Where the configuration is looked for when nobody says otherwise.
pub const DEFAULT_PATH: &str = "/etc/gpuslice/config.toml";
const MAX_BYTES: u64 = 256 * 1024;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Open or read failed.
    #[error("can't read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Somebody but root could write it.
    #[error(
        "{}: owner uid {uid}, mode {mode:o}: must be a regular file of root that only root can write (chown root, chmod 0644)",
        path.display()
    )]
    Untrusted {
        /// The file.
        path: PathBuf,
        /// Its owner.
        uid: u32,
        /// Its mode.
        mode: u32,
    },
    /// Larger than any configuration.
    #[error("{} is larger than {MAX_BYTES} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// Not TOML, an unknown key, a value of the wrong type.
    #[error(transparent)]
    Syntax(toml::de::Error),
    /// A value out of range.
    #[error(transparent)]
    Invalid(InvalidConfig),
    /// Either of the last two, with its file.
    #[error("{}", path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        source: Box<LoadError>,
    },
}

/// The configuration in `text`, checked.
///
/// # Errors
/// [`LoadError::Syntax`] or [`LoadError::Invalid`].
pub fn parse(text: &str) -> Result<Config, LoadError> {
    let config: Config = toml::from_str(text).map_err(LoadError::Syntax)?;
    config.check().map_err(LoadError::Invalid)?;
    Ok(config)
}

/// The configuration in the file `path`, or the defaults where there is none.
///
/// # Errors
/// Any [`LoadError`].
pub fn load(path: &Path) -> Result<Config, LoadError> {
    let failed = |source| LoadError::Read { path: path.to_owned(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Config::default()),
        Err(error) => return Err(failed(error)),
    };
    let metadata = file.metadata().map_err(failed)?;
    if metadata.uid() != 0 || metadata.mode() & 0o022 != 0 || !metadata.is_file() {
        return Err(LoadError::Untrusted {
            path: path.to_owned(),
            uid: metadata.uid(),
            mode: metadata.mode(),
        });
    }
    let mut text = String::new();
    let length = file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if u64::try_from(length).is_ok_and(|length| length > MAX_BYTES) {
        return Err(LoadError::TooLarge { path: path.to_owned() });
    }
    parse(&text).map_err(|source| LoadError::In { path: path.to_owned(), source: Box::new(source) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown};

    #[test]
    fn a_missing_file_means_the_defaults() {
        assert_eq!(load(Path::new("/nonexistent/config.toml")).unwrap(), Config::default());
    }

    #[test]
    fn a_file_that_others_can_write_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        std::fs::write(&path, "fence = \"off\"\n").unwrap();
        if std::fs::metadata(&path).unwrap().uid() != 0 {
            assert!(matches!(load(&path), Err(LoadError::Untrusted { .. })), "not root's file");
            return;
        }
        assert_eq!(load(&path).unwrap().fence, crate::Fence::Off);
        for mode in [0o664, 0o646, 0o622] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert!(matches!(load(&path), Err(LoadError::Untrusted { .. })), "{mode:o}");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        chown(&path, Some(65534), None).unwrap();
        assert!(matches!(load(&path), Err(LoadError::Untrusted { uid: 65534, .. })));
    }

    #[test]
    fn an_error_names_the_file_and_the_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        std::fs::write(&path, "\nfoo = 1\n").unwrap();
        if std::fs::metadata(&path).unwrap().uid() == 0 {
            let error = load(&path).unwrap_err();
            let error = format!("{error}: {}", std::error::Error::source(&error).unwrap());
            assert!(
                error.contains("config.toml") && error.contains("line 2") && error.contains("foo"),
                "{error}"
            );
        }
        assert!(matches!(load(directory.path()), Err(LoadError::Untrusted { .. } | LoadError::Read { .. })));
    }
}
