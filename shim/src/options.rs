//! How a container's runtime is to be run, from whatever containerd sent.
//!
//! Options arrive in four ways, tried in this order: `containerd.runc.v1.Options`; `runtimeoptions.v1.Options`
//! with a ConfigPath (a gpuslice configuration); the same with a ConfigBody (the TOML of CRI's `options` table,
//! in runc's spelling); none. Clients of containerd 1.6 also send two older messages of runc's. What they leave open comes from the node's configuration. An option that isn't
//! known is an error that names it: an option silently dropped would run a container otherwise than asked.

use std::path::{Path, PathBuf};

use containerd_shim_protos::protobuf::CodedInputStream;
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::rt::WireType;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::oci;
use gpuslice_config::{Config, LoadError};
use serde::Deserialize;

/// Why options were refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OptionsError {
    #[error("can't read the runtime options of type {kind}")]
    Decode {
        kind: String,
        #[source]
        source: containerd_shim_protos::protobuf::Error,
    },
    #[error(
        "runtime options of type {kind} are not known: send containerd.runc.v1.Options or runtimeoptions.v1.Options"
    )]
    UnknownType { kind: String },
    #[error("field {field} of containerd.runc.v1.Options is not known: this shim is older than the client")]
    UnknownField { field: u32 },
    #[error("the runtime's options table in containerd's configuration")]
    Body(#[source] toml::de::Error),
    #[error("the runtime's options table in containerd's configuration is not UTF-8")]
    BodyText,
    #[error("ConfigPath \"{path}\" must be an absolute path", path = path.display())]
    RelativePath { path: PathBuf },
    #[error("{name} is not supported by this shim: remove it from the runtime's options")]
    Unsupported { name: &'static str },
    #[error("gpuslice configuration")]
    Config(#[source] LoadError),
}

/// What the options say, before the node's configuration is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "PascalCase")]
pub(crate) struct Asked {
    type_url: String,
    config_path: String,
    binary_name: String,
    root: String,
    systemd_cgroup: bool,
    /// Cgroup that the shim itself joins.
    pub(crate) shim_cgroup: String,
    no_pivot_root: bool,
    no_new_keyring: bool,
    io_uid: u32,
    io_gid: u32,
    criu_image_path: String,
    criu_work_path: String,
    criu_path: String,
}

/// How to run a container's runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Name or path of runc or crun.
    pub(crate) binary_name: String,
    /// Its state directory, without the namespace.
    pub(crate) root: PathBuf,
    /// Systemd cgroups asked for; none: the spec's cgroups path decides.
    pub(crate) systemd_cgroup: Option<bool>,
    /// `--no-pivot`.
    pub(crate) no_pivot_root: bool,
    /// `--no-new-keyring`.
    pub(crate) no_new_keyring: bool,
    /// Owner of the container's pipes.
    pub(crate) io_uid: u32,
    /// Group of the container's pipes.
    pub(crate) io_gid: u32,
}

/// The two fields of `runtimeoptions.v1.Options` that matter here.
#[derive(Default)]
struct Generic {
    config_path: String,
    config_body: Vec<u8>,
}

impl Asked {
    /// Reads the options that came with a request.
    pub(crate) fn from_any(any: Option<&Any>) -> Result<Asked, OptionsError> {
        let Some(any) = any.filter(|any| !any.type_url.is_empty()) else { return Ok(Asked::default()) };
        let kind = any.type_url.rsplit('/').next().unwrap_or_default();
        let decode = |source| OptionsError::Decode { kind: kind.to_owned(), source };
        if kind == "containerd.runc.v1.Options" {
            return Asked::from_runc(oci::Options::parse_from_bytes(&any.value).map_err(decode)?);
        }
        if kind == "containerd.linux.runc.CreateOptions" {
            return old_create(&any.value).map_err(decode);
        }
        if kind == "containerd.linux.runc.RuncOptions" {
            return old_runtime(&any.value).map_err(decode);
        }
        if kind.ends_with("runtimeoptions.v1.Options") {
            let generic = generic(&any.value).map_err(decode)?;
            if !generic.config_path.is_empty() {
                return Ok(Asked { config_path: generic.config_path, ..Asked::default() });
            }
            let body = std::str::from_utf8(&generic.config_body).map_err(|_| OptionsError::BodyText)?;
            return toml::from_str(body).map_err(OptionsError::Body);
        }
        Err(OptionsError::UnknownType { kind: kind.to_owned() })
    }

    fn from_runc(options: oci::Options) -> Result<Asked, OptionsError> {
        // 8 was the path of criu, which only checkpoints need.
        if let Some((field, _)) =
            options.special_fields.unknown_fields().iter().find(|(field, _)| *field != 8)
        {
            return Err(OptionsError::UnknownField { field });
        }
        if !options.task_api_address.is_empty() {
            return Err(OptionsError::Unsupported { name: "task_api_address" });
        }
        Ok(Asked {
            binary_name: options.binary_name,
            root: options.root,
            systemd_cgroup: options.systemd_cgroup,
            shim_cgroup: options.shim_cgroup,
            no_pivot_root: options.no_pivot_root,
            no_new_keyring: options.no_new_keyring,
            io_uid: options.io_uid,
            io_gid: options.io_gid,
            criu_image_path: options.criu_image_path,
            criu_work_path: options.criu_work_path,
            ..Asked::default()
        })
    }

    /// The node's configuration that holds with these options.
    pub(crate) fn config(&self, default: &Path) -> Result<(PathBuf, Config), OptionsError> {
        let path = match self.config_path.as_str() {
            "" => default.to_owned(),
            path => PathBuf::from(path),
        };
        if !path.is_absolute() {
            return Err(OptionsError::RelativePath { path });
        }
        let config = gpuslice_config::load(&path).map_err(OptionsError::Config)?;
        Ok((path, config))
    }

    /// These options, completed by the node's configuration.
    pub(crate) fn complete(self, config: &Config) -> Options {
        let or = |asked: String, otherwise: &str| if asked.is_empty() { otherwise.to_owned() } else { asked };
        Options {
            binary_name: or(self.binary_name, &config.runtime.binary_name),
            root: match self.root.as_str() {
                "" => config.runtime.root.clone(),
                root => root.into(),
            },
            systemd_cgroup: if self.systemd_cgroup { Some(true) } else { config.runtime.systemd_cgroup },
            no_pivot_root: self.no_pivot_root,
            no_new_keyring: self.no_new_keyring,
            io_uid: self.io_uid,
            io_gid: self.io_gid,
        }
    }
}

/// A field of a message that the protos crate doesn't have.
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

/// The fields of a message, by number.
fn fields(bytes: &[u8]) -> Result<Vec<(u32, Field)>, containerd_shim_protos::protobuf::Error> {
    let mut stream = CodedInputStream::from_bytes(bytes);
    let mut fields = Vec::new();
    while let Some(tag) = stream.read_raw_tag_or_eof()? {
        let number = tag >> 3;
        match WireType::new(tag & 7) {
            Some(WireType::Varint) => fields.push((number, Field::Number(stream.read_raw_varint64()?))),
            Some(WireType::LengthDelimited) => fields.push((number, Field::Bytes(stream.read_bytes()?))),
            Some(other) => stream.skip_field(other)?,
            None => break,
        }
    }
    Ok(fields)
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Decodes `runtimeoptions.v1.Options`: type_url 1, config_path 2, config_body 3.
fn generic(bytes: &[u8]) -> Result<Generic, containerd_shim_protos::protobuf::Error> {
    let mut options = Generic::default();
    for (number, field) in fields(bytes)? {
        match (number, field) {
            (2, Field::Bytes(path)) => options.config_path = text(path),
            (3, Field::Bytes(body)) => options.config_body = body,
            _ => {}
        }
    }
    Ok(options)
}

/// Decodes `containerd.linux.runc.CreateOptions`, which clients of 1.6 still send to runtimes that aren't runc's,
/// with user namespaces for one. Its fields 2 to 7 are for checkpoints.
fn old_create(bytes: &[u8]) -> Result<Asked, containerd_shim_protos::protobuf::Error> {
    let mut asked = Asked::default();
    for (number, field) in fields(bytes)? {
        match (number, field) {
            (1, Field::Number(value)) => asked.no_pivot_root = value != 0,
            (8, Field::Number(value)) => asked.no_new_keyring = value != 0,
            (9, Field::Bytes(path)) => asked.shim_cgroup = text(path),
            (10, Field::Number(value)) => asked.io_uid = u32::try_from(value).unwrap_or(0),
            (11, Field::Number(value)) => asked.io_gid = u32::try_from(value).unwrap_or(0),
            _ => {}
        }
    }
    Ok(asked)
}

/// Decodes `containerd.linux.runc.RuncOptions`: runtime 1, runtime_root 2, systemd_cgroup 4.
fn old_runtime(bytes: &[u8]) -> Result<Asked, containerd_shim_protos::protobuf::Error> {
    let mut asked = Asked::default();
    for (number, field) in fields(bytes)? {
        match (number, field) {
            (1, Field::Bytes(name)) => asked.binary_name = text(name),
            (2, Field::Bytes(root)) => asked.root = text(root),
            (4, Field::Number(value)) => asked.systemd_cgroup = value != 0,
            _ => {}
        }
    }
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(kind: &str, value: Vec<u8>) -> Any {
        Any { type_url: kind.to_owned(), value, ..Any::default() }
    }

    fn field(number: u8, text: &str) -> Vec<u8> {
        let mut bytes = vec![number << 3 | 2, u8::try_from(text.len()).unwrap()];
        bytes.extend(text.as_bytes());
        bytes
    }

    #[test]
    fn runc_options_are_taken_as_they_are() {
        let options = oci::Options {
            binary_name: "crun".into(),
            root: "/run/x".into(),
            systemd_cgroup: true,
            no_pivot_root: true,
            io_uid: 5,
            ..Default::default()
        };
        let asked =
            Asked::from_any(Some(&any("containerd.runc.v1.Options", options.write_to_bytes().unwrap())))
                .unwrap();
        let options = asked.complete(&Config::default());
        assert_eq!(options.binary_name, "crun");
        assert_eq!(options.root, Path::new("/run/x"));
        assert_eq!(options.systemd_cgroup, Some(true));
        assert!(options.no_pivot_root && !options.no_new_keyring);
        assert_eq!(options.io_uid, 5);
    }

    #[test]
    fn a_type_url_with_a_host_is_the_same_type() {
        let options = any("type.googleapis.com/containerd.runc.v1.Options", Vec::new());
        assert_eq!(Asked::from_any(Some(&options)).unwrap(), Asked::default());
    }

    #[test]
    fn the_older_messages_of_runc_are_understood() {
        let mut value = vec![8, 1, 64, 1, 80, 0xa0, 0x8d, 6];
        value.extend(field(9, "/shims"));
        let asked = Asked::from_any(Some(&any("containerd.linux.runc.CreateOptions", value))).unwrap();
        assert_eq!(asked.shim_cgroup, "/shims");
        let options = asked.complete(&Config::default());
        assert!(options.no_pivot_root && options.no_new_keyring);
        assert_eq!((options.io_uid, options.io_gid), (100_000, 0));
        let mut value = field(1, "crun");
        value.extend([32, 1]);
        let asked = Asked::from_any(Some(&any("containerd.linux.runc.RuncOptions", value))).unwrap();
        let options = asked.complete(&Config::default());
        assert_eq!((options.binary_name.as_str(), options.systemd_cgroup), ("crun", Some(true)));
    }

    #[test]
    fn a_field_of_runc_options_that_is_not_known_is_refused() {
        let value = vec![0xa8, 1, 1];
        let error = Asked::from_any(Some(&any("containerd.runc.v1.Options", value))).unwrap_err();
        assert!(matches!(error, OptionsError::UnknownField { field: 21 }));
    }

    #[test]
    fn a_config_path_names_our_configuration() {
        let mut value = field(1, "io.containerd.gpuslice.v1.options");
        value.extend(field(2, "/etc/other.toml"));
        let asked = Asked::from_any(Some(&any("runtimeoptions.v1.Options", value))).unwrap();
        assert_eq!(asked.config_path, "/etc/other.toml");
    }

    #[test]
    fn a_config_body_is_the_options_table_in_runc_spelling() {
        let body = "BinaryName = \"crun\"\nSystemdCgroup = true\nRoot = \"/r\"\n";
        let asked = Asked::from_any(Some(&any("runtimeoptions.v1.Options", field(3, body)))).unwrap();
        let options = asked.complete(&Config::default());
        assert_eq!((options.binary_name.as_str(), options.systemd_cgroup), ("crun", Some(true)));
    }

    #[test]
    fn an_unknown_key_of_a_config_body_is_refused_by_name() {
        let error = Asked::from_any(Some(&any("runtimeoptions.v1.Options", field(3, "Binary = \"x\"\n"))))
            .unwrap_err();
        assert!(
            crate::report::chain(&error).contains("unknown field `Binary`"),
            "{}",
            crate::report::chain(&error)
        );
    }

    #[test]
    fn options_of_an_unknown_type_are_refused() {
        let error = Asked::from_any(Some(&any("containerd.runhcs.v1.Options", Vec::new()))).unwrap_err();
        assert!(matches!(error, OptionsError::UnknownType { .. }));
    }

    #[test]
    fn no_options_mean_the_nodes_configuration() {
        let options = Asked::from_any(None).unwrap().complete(&Config::default());
        assert_eq!(options.binary_name, "runc");
        assert_eq!(options.systemd_cgroup, None);
    }

    #[test]
    fn a_relative_config_path_is_refused() {
        let asked = Asked { config_path: "x.toml".into(), ..Asked::default() };
        assert!(matches!(asked.config(Path::new("/nowhere")), Err(OptionsError::RelativePath { .. })));
    }
}
