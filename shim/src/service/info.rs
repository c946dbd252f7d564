//! `-info`: what this shim and the runtime underneath can do.

use std::io::{self, Read, Write};

use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{Message, MessageField};
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};

use super::ServiceError;
use crate::bundle::Record;
use crate::options::Asked;
use crate::reaper::Reaper;
use crate::runc::{self, Runc};
use crate::{Node, report};

const NAME: &str = "io.containerd.gpuslice.v1";
/// Without the runtime's features no pod gets a user namespace.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

pub(super) fn info(node: &Node) -> Result<(), ServiceError> {
    let mut input = Vec::new();
    let stdin = io::stdin();
    if !io::IsTerminal::is_terminal(&stdin) {
        stdin.lock().take(1 << 20).read_to_end(&mut input).map_err(ServiceError::Server)?;
    }
    let options = Any::parse_from_bytes(&input).ok().filter(|any| !any.type_url.is_empty());
    let version =
        RuntimeVersion { version: env!("CARGO_PKG_VERSION").to_owned(), ..RuntimeVersion::default() };
    let features = features(node, options.as_ref())?.map(|value| Any {
        type_url: FEATURES.to_owned(),
        value,
        ..Any::default()
    });
    let info = RuntimeInfo {
        name: NAME.to_owned(),
        version: MessageField::some(version),
        options: options.into(),
        features: features.into(),
        ..RuntimeInfo::default()
    };
    let bytes = info.write_to_bytes().map_err(|error| ServiceError::Options(Box::new(error)))?;
    io::stdout().write_all(&bytes).map_err(ServiceError::Server)
}

/// The runtime's own answer; none from a runtime that doesn't have the command.
fn features(node: &Node, options: Option<&Any>) -> Result<Option<Vec<u8>>, ServiceError> {
    let asked = Asked::from_any(options)?;
    let (config_path, config) = asked.config(&node.default_config)?;
    let options = asked.complete(&config);
    let record = Record {
        binary: runc::find(&options.binary_name)?,
        root: options.root,
        systemd_cgroup: false,
        config: config_path,
        socket: String::new(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(ServiceError::Server)?.block_on(async {
        let reaper = Reaper::start().map_err(ServiceError::Server)?;
        let runc = Runc::new(&record, &std::env::temp_dir(), reaper)?;
        match runc.features().await {
            Ok(features) => Ok(Some(features)),
            Err(error) => {
                report::log("info", &report::chain(&error));
                Ok(None)
            }
        }
    })
}
