//! The forms in which containerd's clients name where output goes.

use std::path::PathBuf;

use super::IoError;

/// Where output goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Uri {
    /// A fifo, or a file that is there.
    Fifo { path: PathBuf },
    /// A program that gets the output, with its arguments in order.
    Binary { path: PathBuf, arguments: Vec<String> },
    /// A file, made where it is missing.
    File { path: PathBuf },
}

impl Uri {
    /// None for an empty text: no output.
    pub(super) fn parse(what: &'static str, text: &str) -> Result<Option<Uri>, IoError> {
        if text.is_empty() {
            return Ok(None);
        }
        let invalid = || IoError::Uri { what, found: text.to_owned() };
        let Some((scheme, rest)) = text.split_once("://") else {
            return Ok(Some(Uri::Fifo { path: text.into() }));
        };
        let (path, query) = rest.split_once('?').map_or((rest, None), |(path, query)| (path, Some(query)));
        let path = PathBuf::from(decode(path, false).ok_or_else(invalid)?);
        if !path.is_absolute() {
            return Err(invalid());
        }
        match scheme {
            "fifo" => Ok(Some(Uri::Fifo { path })),
            "file" => Ok(Some(Uri::File { path })),
            "binary" => {
                let mut arguments = Vec::new();
                for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
                    let (key, value) =
                        pair.split_once('=').map_or((pair, None), |(key, value)| (key, Some(value)));
                    arguments.push(decode(key, true).ok_or_else(invalid)?);
                    if let Some(value) = value {
                        arguments.push(decode(value, true).ok_or_else(invalid)?);
                    }
                }
                Ok(Some(Uri::Binary { path, arguments }))
            }
            other => Err(IoError::Scheme { what, found: text.to_owned(), scheme: other.to_owned() }),
        }
    }
}

/// Undoes percent coding; in a query a plus is a space.
fn decode(text: &str, query: bool) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'%' => {
                let high = char::from(rest.next()?).to_digit(16)?;
                let low = char::from(rest.next()?).to_digit(16)?;
                bytes.push(u8::try_from(high << 4 | low).ok()?);
            }
            b'+' if query => bytes.push(b' '),
            0 => return None,
            other => bytes.push(other),
        }
    }
    if bytes.contains(&0) {
        return None;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Option<Uri>, IoError> {
        Uri::parse("standard output", text)
    }

    #[test]
    fn paths_and_uris_are_told_apart() {
        assert_eq!(parse("").unwrap(), None);
        let fifo = Uri::Fifo { path: "/run/c/stdout".into() };
        assert_eq!(parse("/run/c/stdout").unwrap(), Some(fifo));
        assert_eq!(parse("file:///var/log/a%20b").unwrap(), Some(Uri::File { path: "/var/log/a b".into() }));
        assert!(matches!(parse("npipe:////./pipe"), Err(IoError::Scheme { .. })));
        assert!(matches!(parse("file://relative"), Err(IoError::Uri { .. })));
        assert!(matches!(parse("file:///a%00b"), Err(IoError::Uri { .. })));
    }

    #[test]
    fn the_query_of_a_logger_is_its_arguments_in_order() {
        let uri =
            parse("binary:///usr/bin/nerdctl?_NERDCTL_INTERNAL_LOGGING=%2Fvar%2Flib&z=1&alone").unwrap();
        let arguments =
            ["_NERDCTL_INTERNAL_LOGGING", "/var/lib", "z", "1", "alone"].map(str::to_owned).to_vec();
        assert_eq!(uri, Some(Uri::Binary { path: "/usr/bin/nerdctl".into(), arguments }));
    }
}
