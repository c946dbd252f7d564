//! `gpuslice status`.

use gpuslice_proto::{GpuSlice, StatusTenant};
use serde_json::{Value, json};

use crate::query::Answer;
use crate::table::{lines, size};

/// For people.
pub(crate) fn text(answer: &Answer) -> String {
    let row = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
    let mut gpus = vec![row(&["GPU", "NODE", "MEMORY", "GUARANTEED", "USED", "TENANTS"])];
    for gpu in &answer.gpus {
        gpus.push(vec![
            gpu.uuid.to_string(),
            format!("nvidia{}", gpu.minor),
            size(gpu.memory),
            size(gpu.guaranteed),
            size(gpu.used),
            gpu.tenants.to_string(),
        ]);
    }
    let mut tenants = vec![row(&[
        "CONTAINER",
        "GPU",
        "HARD",
        "SOFT",
        "WEIGHT",
        "USED",
        "PEAK",
        "DRIVER",
        "DENIED",
        "REFUSED",
        "SANDBOX",
        "UID",
    ])];
    for tenant in &answer.tenants {
        for (n, slice) in tenant.gpus.iter().enumerate() {
            let usage = tenant.usage.iter().find(|usage| usage.minor == slice.minor);
            let known = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), size);
            tenants.push(vec![
                tenant.container.to_string(),
                format!("nvidia{}", slice.minor),
                size(slice.memory_hard),
                size(slice.memory_soft),
                slice.weight.to_string(),
                known(usage.map(|usage| usage.used)),
                known(usage.map(|usage| usage.peak)),
                known(tenant.audited.get(n).copied()),
                usage.map_or_else(|| "-".to_owned(), |usage| usage.denied.to_string()),
                tenant.refused.to_string(),
                sandbox(tenant),
                tenant.lease.uid.to_string(),
            ]);
        }
    }
    let tenants = if answer.tenants.is_empty() { "no GPU containers\n".to_owned() } else { lines(&tenants) };
    format!("driver {}, scheduler up {} s\n\n{}\n{tenants}", answer.driver, answer.uptime, lines(&gpus))
}

fn sandbox(tenant: &StatusTenant) -> String {
    match tenant.lease.sandbox_pid {
        0 => "starting".to_owned(),
        pid => pid.to_string(),
    }
}

/// For programs: sizes in bytes; null is what isn't known yet.
pub(crate) fn json(answer: &Answer) -> String {
    let gpus: Vec<Value> = answer
        .gpus
        .iter()
        .map(|gpu| {
            json!({
                "uuid": gpu.uuid.as_str(), "minor": gpu.minor, "memory": gpu.memory, "guaranteed": gpu.guaranteed,
                "used": gpu.used, "tenants": gpu.tenants,
            })
        })
        .collect();
    let slice = |tenant: &StatusTenant, n: usize, slice: &GpuSlice| {
        let usage = tenant.usage.iter().find(|usage| usage.minor == slice.minor);
        json!({
            "uuid": slice.uuid.as_str(), "minor": slice.minor, "memory_hard": slice.memory_hard,
            "memory_soft": slice.memory_soft, "weight": slice.weight, "used": usage.map(|usage| usage.used),
            "peak": usage.map(|usage| usage.peak), "denied": usage.map(|usage| usage.denied),
            "driver": tenant.audited.get(n),
        })
    };
    let tenants: Vec<Value> = answer
        .tenants
        .iter()
        .map(|tenant| {
            let gpus: Vec<Value> = tenant.gpus.iter().enumerate().map(|(n, gpu)| slice(tenant, n, gpu)).collect();
            json!({
                "container": tenant.container.as_str(), "lease": tenant.lease.lease.0, "uid": tenant.lease.uid,
                "sandbox_pid": tenant.lease.sandbox_pid, "refused": tenant.refused, "gpus": gpus,
            })
        })
        .collect();
    format!(
        "{}\n",
        json!({ "driver": answer.driver, "uptime": answer.uptime, "gpus": gpus, "tenants": tenants })
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpuslice_proto::{ContainerId, GpuUsage, GpuUuid, Lease, LeaseId, StatusGpu};

    fn answer() -> Answer {
        let uuid = GpuUuid::try_from("GPU-01234567-89ab-cdef-0123-456789abcdef".to_owned()).unwrap();
        let gpu = StatusGpu {
            uuid: uuid.clone(),
            minor: 3,
            memory: 80 << 30,
            guaranteed: 1 << 30,
            used: 5 << 20,
            tenants: 1,
        };
        let tenant = |name: &str, usage: Vec<GpuUsage>, pid| StatusTenant {
            container: ContainerId::try_from(format!("k8s.io/{name}")).unwrap(),
            lease: Lease { lease: LeaseId(9), uid: 1_900_000_001, sandbox_pid: pid },
            gpus: vec![GpuSlice {
                uuid: uuid.clone(),
                minor: 3,
                memory_hard: 4 << 30,
                memory_soft: 1 << 30,
                weight: 100,
            }],
            audited: usage.iter().map(|usage| usage.used).collect(),
            usage,
            refused: 2,
        };
        let usage = GpuUsage { minor: 3, used: 5 << 20, peak: 6 << 20, denied: 7 };
        Answer {
            driver: "580.1".into(),
            uptime: 61,
            gpus: vec![gpu],
            tenants: vec![tenant("a", vec![usage], 123), tenant("b", vec![], 0)],
        }
    }

    #[test]
    fn people_see_each_tenant_with_its_quota_and_use() {
        let text = text(&answer());
        for cell in
            ["580.1", "80.0 GiB", "k8s.io/a", "4.0 GiB", "5.0 MiB", "6.0 MiB", "starting", "1900000001"]
        {
            assert!(text.contains(cell), "{cell} in {text}");
        }
        assert!(super::text(&Answer { tenants: vec![], ..answer() }).contains("no GPU containers"));
    }

    #[test]
    fn programs_get_bytes_and_null_for_what_is_not_known() {
        let value: Value = serde_json::from_str(&json(&answer())).unwrap();
        assert_eq!(value["gpus"][0]["memory"], 80_u64 << 30);
        assert_eq!(value["tenants"][0]["gpus"][0]["denied"], 7);
        assert_eq!(value["tenants"][1]["gpus"][0]["used"], Value::Null);
        assert_eq!(value["tenants"][0]["refused"], 2);
    }
}
