//! What the product does, shown on a private node with two tenants on one GPU.
//!
//! Each line is a promise with what was seen of it; the demo succeeds only if all of them hold.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::node::{Node, Options};
use crate::process;
use crate::running::Running;

const GIB: u64 = 1 << 30;
/// The driver's status for "no memory".
const NO_MEMORY: u64 = 0x51;
/// Exit status of the tenant program when the driver refused.
const REFUSED: i32 = 3;
/// Two tenants and their quotas.
const TENANTS: [(&str, &str, u64); 2] = [("alice", "1Gi", GIB), ("bob", "2Gi", 2 * GIB)];

/// Prints the lines and remembers whether all held.
struct Stage {
    json: bool,
    ok: bool,
}

impl Stage {
    fn show(&mut self, name: &str, ok: bool, text: &str, fields: Value) {
        self.ok &= ok;
        if self.json {
            // By hand, so that the name and the verdict come first.
            let rest = fields.to_string();
            let rest = rest.strip_prefix('{').unwrap_or("}");
            let comma = if rest == "}" { "" } else { ", " };
            println!("{{\"show\": {}, \"ok\": {ok}{comma}{rest}", json!(name));
        } else {
            println!("{}  {text}", if ok { "ok    " } else { "FAILED" });
        }
    }
}

/// Runs the demo; true if everything held.
///
/// # Errors
/// When the node can't be started, or a step fails outright.
pub fn run(json: bool, emulated: bool) -> Result<bool> {
    let mut stage = Stage { json, ok: true };
    let real = !emulated && std::path::Path::new("/dev/nvidiactl").exists();
    let node = Node::with(Options { real, ..Options::default() })?;
    let kind = if real { "real" } else { "emulated" };
    let text = format!(
        "containerd {} and a scheduler run in {}, GPU: {kind}",
        node.daemon_version(),
        node.directory().display()
    );
    stage.show("node", true, &text, json!({"containerd": node.daemon_version(), "gpu": kind}));
    if !real {
        whole_card(&mut stage, &node)?;
    }
    let mut running = Vec::new();
    for (id, quota, _) in TENANTS {
        running.push(node.container(id).gpu(0)?.quota(quota).args(&["/bin/sleep", "1000"]).start()?);
    }
    for (tenant, (id, quota, bytes)) in running.iter().zip(TENANTS) {
        card(&mut stage, tenant, id, quota, bytes)?;
    }
    for (tenant, (id, quota, bytes)) in running.iter().zip(TENANTS) {
        refusal(&mut stage, &node, tenant, (id, quota, bytes))?;
    }
    for (tenant, (id, _, _)) in running.iter().zip(TENANTS) {
        sandbox(&mut stage, &node, tenant, id)?;
    }
    escape(&mut stage, running.first().context("no tenant runs")?)?;
    status(&mut stage, &node)?;
    for tenant in running {
        tenant.stop()?;
    }
    no_scheduler(&mut stage, &node)?;
    let clean = node.finish();
    let said =
        clean.as_ref().err().map_or_else(|| "nothing is left".to_owned(), |error| format!("{error:#}"));
    stage.show(
        "clean",
        clean.is_ok(),
        &format!("containers, sandboxes, mounts, sockets, groups: {said}"),
        json!({"left": said}),
    );
    Ok(stage.ok)
}

/// The same card without gpuslice, for comparison.
fn whole_card(stage: &mut Stage, node: &Node) -> Result<()> {
    let ended = node.container("plain").gpu(0)?.direct()?.tenant(&["info"]).run()?.success()?;
    let total = ended.number("total")?;
    let text = format!("a container without gpuslice sees the whole card: {}", size(total));
    stage.show("whole-card", total > 4 * GIB, &text, json!({"total": total}));
    Ok(())
}

fn card(stage: &mut Stage, tenant: &Running<'_>, id: &str, quota: &str, bytes: u64) -> Result<()> {
    let ended = tenant.exec(&["/bin/gpuslice-tenant", "info"])?.success()?;
    let (total, free) = (ended.number("total")?, ended.number("free")?);
    let lines = ended.lines()?;
    let name = lines.iter().find_map(|line| line.get("name")?.as_str()).unwrap_or("unknown").to_owned();
    let text =
        format!("{id} has a quota of {quota} and sees a {name} of {}, {} free", size(total), size(free));
    let fields = json!({"tenant": id, "quota": bytes, "card": name, "total": total, "free": free});
    stage.show("card", total == bytes && free <= bytes, &text, fields);
    Ok(())
}

/// Allocates until refused: the refusal must come at the quota, and not from the driver.
fn refusal(stage: &mut Stage, node: &Node, tenant: &Running<'_>, who: (&str, &str, u64)) -> Result<()> {
    let (id, quota, bytes) = who;
    let emulated = node.gpus()?.pid().is_some();
    let before = if emulated { node.gpus()?.calls()? } else { 0 };
    let ended = tenant.exec(&["/bin/gpuslice-tenant", "alloc", "128M", "64"])?;
    let (got, count) = (ended.number("bytes")?, ended.number("count")?);
    let refused = ended.status == REFUSED && ended.number("status")? == NO_MEMORY;
    let within = got <= bytes && got > bytes - GIB / 2;
    let mut fields =
        json!({"tenant": id, "quota": bytes, "allocated": got, "allocations": count, "status": NO_MEMORY});
    let mut reached = "";
    let mut ok = refused && within;
    if emulated {
        let journal = node.gpus()?.journal(before)?;
        let made =
            journal.iter().filter(|call| call.get("what").and_then(Value::as_u64) == Some(0x40)).count();
        let stopped_before = u64::try_from(made)? == count;
        ok &= stopped_before;
        reached = if stopped_before {
            "; the refused one never reached the driver"
        } else {
            "; it REACHED THE DRIVER"
        };
        if let Some(fields) = fields.as_object_mut() {
            fields.insert("reached_driver".to_owned(), json!(!stopped_before));
        }
    }
    let text = format!(
        "{id} gets {} of its {quota}, then \"out of memory\" (status {NO_MEMORY:#x}){reached}",
        size(got)
    );
    stage.show("quota", ok, &text, fields);
    Ok(())
}

fn sandbox(stage: &mut Stage, node: &Node, tenant: &Running<'_>, id: &str) -> Result<()> {
    let shim = tenant.shim()?;
    let pid = node
        .sandboxes()
        .into_iter()
        .find(|pid| process::parent(*pid) == Some(shim))
        .with_context(|| format!("{id} has no sandbox"))?;
    let identity = process::identity(pid)?;
    let files = std::fs::read_dir(format!("/proc/{pid}/root/")).map(Iterator::count).unwrap_or(usize::MAX);
    let tenant = process::identity(tenant.pid()?)?;
    let ok = identity.uid != 0
        && identity.capabilities == 1 << 19
        && identity.no_new_privileges
        && identity.seccomp == 2
        && files == 0
        && tenant.seccomp == 2;
    let text = format!(
        "{id}'s sandbox: uid {}, CAP_SYS_PTRACE only ({:#x}), no new privileges, {} seccomp filter, an empty root; \
         the container itself has {} filter",
        identity.uid, identity.capabilities, identity.filters, tenant.filters
    );
    let fields = json!({
        "tenant": id, "uid": identity.uid, "capabilities": format!("{:#x}", identity.capabilities),
        "no_new_privileges": identity.no_new_privileges, "seccomp": identity.seccomp, "filters": identity.filters,
        "files_in_root": files, "tenant_seccomp": tenant.seccomp, "tenant_filters": tenant.filters,
    });
    stage.show("sandbox", ok, &text, fields);
    Ok(())
}

/// A call in disguise: the driver would act on it, the tenant must not get through.
fn escape(stage: &mut Stage, tenant: &Running<'_>) -> Result<()> {
    let ended = tenant.exec(&["/bin/gpuslice-tenant", "attack", "type-bytes"])?;
    let tried = ended.lines()?.len();
    let ok = ended.status == 0 && tried > 0;
    let text = format!("{tried} driver commands in disguise: all refused");
    stage.show(
        "attack",
        ok,
        if ok { &text } else { "a driver command in disguise GOT THROUGH" },
        json!({"tried": tried}),
    );
    Ok(())
}

fn status(stage: &mut Stage, node: &Node) -> Result<()> {
    let output = node.tool(&["status", "--json"])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let seen =
        TENANTS.iter().filter(|(id, _, _)| text.contains(&format!("{}/{id}", node.namespace()))).count();
    let ok = output.status.success() && seen == TENANTS.len();
    stage.show("status", ok, &format!("`gpuslice status` lists {seen} tenants"), json!({"tenants": seen}));
    Ok(())
}

fn no_scheduler(stage: &mut Stage, node: &Node) -> Result<()> {
    node.stop_scheduler()?;
    let ended = node.container("carol").gpu(0)?.quota("1Gi").shell("echo ran").run()?;
    let message = ended.stderr.trim().lines().last().unwrap_or_default().to_owned();
    let socket = node.scheduler_socket().to_string_lossy().into_owned();
    let ok = ended.status != 0 && !ended.stdout.contains("ran") && message.contains(&socket);
    stage.show("refusal", ok, &format!("with the scheduler stopped: {message}"), json!({"message": message}));
    Ok(())
}

/// A size for people.
fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(GIB) { format!("{} GiB", bytes / GIB) } else { format!("{} MiB", bytes >> 20) }
}
