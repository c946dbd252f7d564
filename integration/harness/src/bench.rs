//! What gpuslice costs: lines {"id", "case", "value", "unit", "baseline"} with the ids of the project's targets.
//!
//! Every figure is a difference to the same thing without gpuslice, measured in turns in the same run. On an
//! emulated GPU the driver answers over a socket: the baseline of D5 is then the tenant's own talk with it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::container::{Container, Runtime};
use crate::node::{Node, Options};
use crate::process;
use crate::running::Ended;

/// Rounds of the latency program, each way.
const ROUNDS: usize = 10;
/// Calls of each kind in one round.
const CALLS: &str = "4000";
/// After this long without a call shim and sandbox count as idle.
const IDLE: Duration = Duration::from_secs(4);
/// Starts of each kind.
const STARTS: usize = 30;

/// Prints the lines for the ids asked for; none: all.
///
/// # Errors
/// When something can't be measured.
pub fn run(json: bool, only: &[String]) -> Result<()> {
    let wanted = |id: &str| only.is_empty() || only.iter().any(|one| one == id);
    let real = std::path::Path::new("/dev/nvidiactl").exists();
    let node = Node::with(Options { real, ..Options::default() })?;
    let bench = Bench { node: &node, json, gpu: if real { "real GPU" } else { "emulated GPU" } };
    if wanted("D5") {
        bench.proxied_calls()?;
    }
    if wanted("D7") {
        bench.other_calls()?;
    }
    if wanted("E1") {
        bench.starts()?;
    }
    if wanted("E2") {
        bench.memory()?;
    }
    node.finish()
}

struct Bench<'n> {
    node: &'n Node,
    json: bool,
    gpu: &'static str,
}

impl Bench<'_> {
    fn line(&self, id: &str, case: &str, value: f64, unit: &str, baseline: f64) {
        let (value, baseline) = (rounded(value), rounded(baseline));
        if self.json {
            // By hand: the fields in the order in which people read them.
            let (id, case, unit) = (json!(id), json!(case), json!(unit));
            println!(
                "{{\"id\": {id}, \"case\": {case}, \"value\": {value}, \"unit\": {unit}, \"baseline\": {baseline}}}"
            );
        } else {
            println!("{id}  {case}: {value} {unit} (without gpuslice {baseline} {unit})");
        }
    }

    fn protected(&self, id: &str) -> Result<Container<'_>> {
        self.node.container(id).gpu(0).map(|container| container.quota("2Gi"))
    }

    fn unprotected(&self, id: &str) -> Result<Container<'_>> {
        let container = self.node.container(id).gpu(0)?;
        if self.node.gpus()?.pid().is_some() {
            container.direct()
        } else {
            Ok(container.runtime(Runtime::Runc))
        }
    }

    /// D5: a driver call with and without the proxy.
    fn proxied_calls(&self) -> Result<()> {
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            with.push(self.protected("with")?.tenant(&["latency", CALLS]).run()?.success()?);
            without.push(self.unprotected("without")?.tenant(&["latency", CALLS]).run()?.success()?);
        }
        for call in ["sys_params", "check_version", "control_0x214"] {
            for (percentile, key) in [("p50", "p50_ns"), ("p99", "p99_ns")] {
                let (with, without) = (figure(&with, call, key)?, figure(&without, call, key)?);
                let case = format!("{call}, added at {percentile}, {}", self.gpu);
                self.line("D5", &case, (with - without) / 1000.0, "us", without / 1000.0);
            }
        }
        Ok(())
    }

    /// D7: a call that has nothing to do with the driver, under the same profile of the container's own.
    fn other_calls(&self) -> Result<()> {
        let profile = self.node.ctr_profile()?;
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let gpu = self.protected("with")?.seccomp(profile.clone());
            with.push(gpu.tenant(&["latency", CALLS]).run()?.success()?);
            let plain = self.unprotected("without")?.seccomp(profile.clone());
            without.push(plain.tenant(&["latency", CALLS]).run()?.success()?);
        }
        let (with, without) = (figure(&with, "getppid", "p50_ns")?, figure(&without, "getppid", "p50_ns")?);
        self.line(
            "D7",
            "getppid, added at p50, under containerd's default profile",
            with - without,
            "ns",
            without,
        );
        Ok(())
    }

    /// E1: create, start and delete of a program that ends at once.
    fn starts(&self) -> Result<()> {
        let plain = |runtime| self.node.container("start").runtime(runtime);
        let gpu = self.protected("start")?;
        let (mut stock, mut own, mut own_gpu) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..STARTS {
            stock.push(timed(&plain(Runtime::Runc))?);
            own.push(timed(&plain(Runtime::Gpuslice))?);
            own_gpu.push(timed(&gpu)?);
        }
        let (stock, own, own_gpu) = (median(&mut stock), median(&mut own), median(&mut own_gpu));
        self.line("E1", "create+start+delete over the stock shim, no GPU, p50", own - stock, "ms", stock);
        let case = format!("create+start+delete over the stock shim, {}, p50", self.gpu);
        self.line("E1", &case, own_gpu - stock, "ms", stock);
        Ok(())
    }

    /// E2: what shim and sandbox keep in memory, just after the GPU was used and once they have been idle.
    fn memory(&self) -> Result<()> {
        let stock =
            self.node.container("stock").runtime(Runtime::Runc).args(&["/bin/sleep", "1000"]).start()?;
        let baseline = megabytes(process::identity(stock.shim()?)?.resident);
        stock.stop()?;
        let running = self.protected("a")?.args(&["/bin/sleep", "1000"]).start()?;
        running.exec(&["/bin/gpuslice-tenant", "info"])?.success()?;
        // Idle: both give memory back a second after the last call.
        std::thread::sleep(Duration::from_secs(3));
        let (shim, sandbox) = (running.shim()?, self.node.sandbox()?);
        let resident = |pid| process::identity(pid).map(|identity| megabytes(identity.resident));
        let own = |pid| process::proportional_memory(pid).map(megabytes);
        self.line(
            "E2",
            "shim and sandbox, resident, just used",
            resident(shim)? + resident(sandbox)?,
            "MB",
            baseline,
        );
        std::thread::sleep(IDLE);
        self.line("E2", "shim, resident, idle", resident(shim)?, "MB", baseline);
        self.line("E2", "sandbox, resident, idle", resident(sandbox)?, "MB", 0.0);
        self.line(
            "E2",
            "shim and sandbox, resident, idle",
            resident(shim)? + resident(sandbox)?,
            "MB",
            baseline,
        );
        self.line(
            "E2",
            "shim and sandbox, shared pages divided, idle",
            own(shim)? + own(sandbox)?,
            "MB",
            baseline,
        );
        running.stop()?;
        Ok(())
    }
}

/// Milliseconds of one run from `ctr run` to its end.
fn timed(container: &Container<'_>) -> Result<f64> {
    let start = Instant::now();
    container.run()?.success()?;
    Ok(start.elapsed().as_secs_f64() * 1000.0)
}

/// A figure of the latency program in its quietest round, in nanoseconds: what else runs on the machine only ever
/// adds.
fn figure(rounds: &[Ended], case: &str, key: &str) -> Result<f64> {
    let mut values = Vec::new();
    for ended in rounds {
        let lines = ended.lines()?;
        let line = lines.iter().find(|line| line.get("case").and_then(Value::as_str) == Some(case));
        values.push(
            line.and_then(|line| line.get(key)?.as_f64()).with_context(|| format!("no {key} of {case}"))?,
        );
    }
    Ok(values.into_iter().fold(f64::INFINITY, f64::min))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn megabytes(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) * 1024.0 / 1e6
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::{median, megabytes};

    #[test]
    fn the_median_is_the_middle_value() {
        assert!((median(&mut [3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
    }

    #[test]
    fn a_kibibyte_is_1024_bytes() {
        assert!((megabytes(1000) - 1.024).abs() < 1e-9);
    }
}
