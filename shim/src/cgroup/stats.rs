//! A container's figures in the message that containerd expects for this version of cgroups.

use cgroups_rs::fs::Cgroup;
use cgroups_rs::fs::MaxValue;
use cgroups_rs::fs::cpu::CpuController;
use cgroups_rs::fs::cpuacct::CpuAcctController;
use cgroups_rs::fs::memory::MemController;
use cgroups_rs::fs::pid::PidController;
use containerd_shim_protos::cgroups::metrics as v1;
use containerd_shim_protos::protobuf::{Message, MessageField};

use super::{CgroupError, Cgroups};

const V1: &str = "io.containerd.cgroups.v1.Metrics";
const V2: &str = "io.containerd.cgroups.v2.Metrics";

impl Cgroups {
    /// Type and bytes of the figures.
    pub(crate) fn stats(&self) -> Result<(&'static str, Vec<u8>), CgroupError> {
        let failed = |reason: String| CgroupError::Stats { reason };
        let cgroup = self.load();
        let (kind, bytes) = match self {
            Cgroups::V1(_) => (V1, figures(&cgroup).write_to_bytes()),
            Cgroups::V2(_) => {
                let metrics = containerd_shim::cgroup::collect_metrics_v2(&cgroup)
                    .map_err(|e| failed(e.to_string()))?;
                (V2, metrics.write_to_bytes())
            }
        };
        bytes.map(|bytes| (kind, bytes)).map_err(|e| failed(e.to_string()))
    }
}

/// The number after a key, in lines of keys and numbers.
fn keyed(text: &str, key: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == key)
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

fn limit(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// What a v1 cgroup shows; a controller that isn't there stays out.
fn figures(cgroup: &Cgroup) -> v1::Metrics {
    let mut metrics = v1::Metrics::new();
    if let Some(controller) = cgroup.controller_of::<CpuAcctController>() {
        let used = controller.cpuacct();
        let usage = v1::CPUUsage {
            total: used.usage,
            kernel: used.usage_sys,
            user: used.usage_user,
            per_cpu: used.usage_percpu.split_whitespace().filter_map(|n| n.parse().ok()).collect(),
            ..Default::default()
        };
        metrics.cpu.mut_or_insert_default().usage = MessageField::some(usage);
    }
    if let Some(controller) = cgroup.controller_of::<CpuController>() {
        let stat = controller.cpu().stat;
        let throttling = v1::Throttle {
            periods: keyed(&stat, "nr_periods"),
            throttled_periods: keyed(&stat, "nr_throttled"),
            throttled_time: keyed(&stat, "throttled_time"),
            ..Default::default()
        };
        metrics.cpu.mut_or_insert_default().throttling = MessageField::some(throttling);
    }
    if let Some(controller) = cgroup.controller_of::<PidController>() {
        let max = match controller.get_pid_max() {
            Ok(MaxValue::Value(value)) => u64::try_from(value).unwrap_or(0),
            Ok(MaxValue::Max) | Err(_) => 0,
        };
        metrics.pids = MessageField::some(v1::PidsStat {
            current: controller.get_pid_current().unwrap_or(0),
            limit: max,
            ..Default::default()
        });
    }
    if let Some(controller) = cgroup.controller_of::<MemController>() {
        let memory = controller.memory_stat();
        metrics.memory_oom_control = MessageField::some(v1::MemoryOomControl {
            oom_kill_disable: u64::from(memory.oom_control.oom_kill_disable),
            under_oom: u64::from(memory.oom_control.under_oom),
            oom_kill: memory.oom_control.oom_kill,
            ..Default::default()
        });
        metrics.memory = MessageField::some(memory_figures(controller, &memory));
    }
    metrics
}

fn memory_figures(controller: &MemController, memory: &cgroups_rs::fs::memory::Memory) -> v1::MemoryStat {
    let stat = &memory.stat;
    let swap = controller.memswap();
    let kernel = controller.kmem_stat();
    let tcp = controller.kmem_tcp_stat();
    let entry = |limit: u64, usage: u64, max: u64, failcnt: u64| {
        MessageField::some(v1::MemoryEntry { limit, usage, max, failcnt, ..Default::default() })
    };
    v1::MemoryStat {
        cache: stat.cache,
        rss: stat.rss,
        rss_huge: stat.rss_huge,
        mapped_file: stat.mapped_file,
        dirty: stat.dirty,
        writeback: stat.writeback,
        pg_pg_in: stat.pgpgin,
        pg_pg_out: stat.pgpgout,
        pg_fault: stat.pgfault,
        pg_maj_fault: stat.pgmajfault,
        inactive_anon: stat.inactive_anon,
        active_anon: stat.active_anon,
        inactive_file: stat.inactive_file,
        active_file: stat.active_file,
        unevictable: stat.unevictable,
        hierarchical_memory_limit: limit(stat.hierarchical_memory_limit),
        hierarchical_swap_limit: limit(stat.hierarchical_memsw_limit),
        total_cache: stat.total_cache,
        total_rss: stat.total_rss,
        total_rss_huge: stat.total_rss_huge,
        total_mapped_file: stat.total_mapped_file,
        total_dirty: stat.total_dirty,
        total_writeback: stat.total_writeback,
        total_pg_pg_in: stat.total_pgpgin,
        total_pg_pg_out: stat.total_pgpgout,
        total_pg_fault: stat.total_pgfault,
        total_pg_maj_fault: stat.total_pgmajfault,
        total_inactive_anon: stat.total_inactive_anon,
        total_active_anon: stat.total_active_anon,
        total_inactive_file: stat.total_inactive_file,
        total_active_file: stat.total_active_file,
        total_unevictable: stat.total_unevictable,
        usage: entry(
            limit(memory.limit_in_bytes),
            memory.usage_in_bytes,
            memory.max_usage_in_bytes,
            memory.fail_cnt,
        ),
        swap: entry(limit(swap.limit_in_bytes), swap.usage_in_bytes, swap.max_usage_in_bytes, swap.fail_cnt),
        kernel: entry(
            limit(kernel.limit_in_bytes),
            kernel.usage_in_bytes,
            kernel.max_usage_in_bytes,
            kernel.fail_cnt,
        ),
        kernel_tcp: entry(
            limit(tcp.limit_in_bytes),
            tcp.usage_in_bytes,
            tcp.max_usage_in_bytes,
            tcp.fail_cnt,
        ),
        ..Default::default()
    }
}
