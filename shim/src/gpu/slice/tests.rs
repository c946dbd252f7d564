use gpuslice_config::{Defaults, GpuOverride, Limits};
use proptest::prelude::*;
use serde_json::json;

use super::*;

const A: &str = "GPU-00000000-0000-0000-0000-00000000000a";
const B: &str = "GPU-00000000-0000-0000-0000-00000000000b";

fn gpu(text: &str) -> GpuUuid {
    GpuUuid::try_from(text.to_owned()).unwrap()
}

fn granted() -> Vec<(GpuUuid, u32)> {
    vec![(gpu(A), 0), (gpu(B), 1)]
}

fn bytes_of(text: &str) -> Bytes {
    Bytes::parse(text).unwrap()
}

fn node(hard: Option<&str>, soft: Option<&str>, weight: Option<u32>) -> Config {
    Config {
        limits: Limits { memory_hard: hard.map(bytes_of), memory_soft: soft.map(bytes_of), weight },
        defaults: Defaults { memory_hard: bytes_of("4Gi"), memory_soft: None, weight: 100 },
        ..Config::default()
    }
}

fn resolve(annotations: Value, config: &Config) -> Result<Resolved, SliceError> {
    Wishes::read(&json!({ "annotations": annotations }))?.resolve(&granted(), config)
}

fn amounts(resolved: &Resolved) -> Vec<(u64, u64, u32)> {
    resolved.gpus.iter().map(|gpu| (gpu.memory_hard >> 20, gpu.memory_soft >> 20, gpu.weight)).collect()
}

#[test]
fn a_container_that_says_nothing_gets_the_nodes_default() {
    let resolved = resolve(json!({ "other/key": "x" }), &node(None, None, None)).unwrap();
    assert_eq!(amounts(&resolved), [(4096, 4096, 100); 2]);
    assert_eq!(resolved.notes, Vec::<String>::new());
}

#[test]
fn one_value_holds_for_all_and_named_ones_for_their_gpu() {
    let wishes = json!({ HARD: "2Gi", SOFT: format!("{A}=1Gi"), WEIGHT: format!("{B}=7,{A}=9") });
    assert_eq!(
        amounts(&resolve(wishes, &node(None, None, None)).unwrap()),
        [(2048, 1024, 9), (2048, 2048, 7)]
    );
}

#[test]
fn wishes_above_the_ceiling_are_lowered_and_reported() {
    let wishes = json!({ HARD: "8Gi", SOFT: "6Gi", WEIGHT: "5000" });
    let resolved = resolve(wishes, &node(Some("3Gi"), Some("2Gi"), Some(200))).unwrap();
    assert_eq!(amounts(&resolved), [(3072, 2048, 200); 2]);
    assert_eq!(resolved.notes.len(), 6);
    assert_eq!(resolved.notes[0], format!("{HARD}=8Gi for {A} lowered to 3Gi, the node's ceiling"));
}

#[test]
fn a_default_soft_limit_is_clamped_to_a_lowered_hard_one() {
    let mut config = node(None, None, None);
    config.defaults.memory_soft = Some(bytes_of("3Gi"));
    let resolved = resolve(json!({ HARD: "1Gi" }), &config).unwrap();
    assert_eq!(amounts(&resolved), [(1024, 1024, 100); 2]);
    assert!(resolved.notes.is_empty());
}

#[test]
fn a_gpu_of_its_own_ceiling_is_bound_by_it() {
    let mut config = node(Some("4Gi"), None, None);
    let limits = Limits { memory_hard: Some(bytes_of("1Gi")), ..Limits::default() };
    config.gpus.insert(gpu(B), GpuOverride { limits, ..GpuOverride::default() });
    let resolved = resolve(json!({ HARD: "2Gi" }), &config).unwrap();
    assert_eq!(amounts(&resolved), [(2048, 2048, 100), (1024, 1024, 100)]);
}

#[test]
fn a_soft_limit_written_above_the_hard_one_is_refused() {
    let config = node(None, None, None);
    for wishes in [json!({ HARD: "1Gi", SOFT: "1025Mi" }), json!({ SOFT: "5Gi" })] {
        let error = resolve(wishes, &config).unwrap_err();
        assert!(matches!(error, SliceError::SoftAboveHard { .. }), "{error}");
        assert!(error.to_string().contains(SOFT) && error.to_string().contains("at most"), "{error}");
    }
}

#[test]
fn a_soft_limit_below_the_written_hard_one_is_clamped_with_it() {
    let resolved = resolve(json!({ HARD: "8Gi", SOFT: "6Gi" }), &node(Some("4Gi"), None, None)).unwrap();
    assert_eq!(amounts(&resolved), [(4096, 4096, 100); 2]);
    assert_eq!(resolved.notes.len(), 4);
}

#[test]
fn bad_values_are_refused_by_key_with_what_is_allowed() {
    let config = node(None, None, None);
    for (key, value, part) in [
        (HARD, "", "quantity"),
        (HARD, "4G", "quantity"),
        (HARD, "-1Gi", "quantity"),
        (HARD, "0", "zero"),
        (HARD, "99999999999Ti", "too large"),
        (HARD, " 4Gi", "quantity"),
        (SOFT, "4Gi,4Gi", "GPU-uuid=value"),
        (SOFT, "GPU-xyz=4Gi", "GPU-xyz"),
        (SOFT, "=4Gi", "uuid"),
        (WEIGHT, "0", "1 to 10000"),
        (WEIGHT, "10001", "1 to 10000"),
        (WEIGHT, "+5", "1 to 10000"),
        (WEIGHT, "1.5", "1 to 10000"),
        (WEIGHT, "99999999999", "1 to 10000"),
        (WEIGHT, "", "1 to 10000"),
    ] {
        let error = resolve(json!({ key: value }), &config).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains(part), "{key}={value}: {error}");
    }
}

#[test]
fn a_trailing_comma_a_foreign_gpu_and_a_gpu_named_twice_are_refused() {
    let config = node(None, None, None);
    let foreign = "GPU-00000000-0000-0000-0000-00000000000c";
    for value in [format!("{A}=1Gi,"), format!("{foreign}=1Gi"), format!("{A}=1Gi,{A}=2Gi")] {
        let error = resolve(json!({ HARD: value }), &config).unwrap_err();
        assert!(error.to_string().contains(HARD), "{error}");
    }
    let error = resolve(json!({ HARD: format!("{foreign}=1Gi") }), &config).unwrap_err().to_string();
    assert!(error.contains(foreign) && error.contains(A) && error.contains(B), "{error}");
}

#[test]
fn unknown_keys_of_ours_are_refused_and_those_of_others_passed_over() {
    let config = node(None, None, None);
    for key in ["gpuslice.io/memory", "gpuslice.io/", "gpuslice.io/memory-hard2", "gpuslice.io/Weight"] {
        let error = resolve(json!({ key: "1" }), &config).unwrap_err();
        assert!(error.to_string().contains(key) && error.to_string().contains(HARD), "{error}");
    }
    resolve(json!({ "gpuslice.io": "1", "x.gpuslice.io/memory": "1" }), &config).unwrap();
    assert!(matches!(resolve(json!({ HARD: 4 }), &config), Err(SliceError::NotText { .. })));
}

fn amount() -> impl Strategy<Value = Option<u64>> {
    proptest::option::of(1_u64..1 << 40)
}

proptest! {
    #[test]
    fn never_more_than_node_policy(
        hard in amount(), soft in amount(), weight in proptest::option::of(1_u32..=MAX_WEIGHT),
        most_hard in amount(), most_soft in amount(), most_weight in proptest::option::of(1_u32..=MAX_WEIGHT),
        default_hard in 1_u64..1 << 40, default_soft in amount(), each: bool,
    ) {
        let config = Config {
            limits: Limits {
                memory_hard: most_hard.and_then(Bytes::new),
                memory_soft: most_soft.and_then(Bytes::new),
                weight: most_weight,
            },
            defaults: Defaults {
                memory_hard: Bytes::new(default_hard).unwrap(),
                memory_soft: default_soft.and_then(Bytes::new),
                weight: 100,
            },
            ..Config::default()
        };
        let text = |n: u64| if each { format!("{A}={n},{B}={n}") } else { n.to_string() };
        let mut annotations = serde_json::Map::new();
        for (key, value) in [(HARD, hard), (SOFT, soft), (WEIGHT, weight.map(u64::from))] {
            if let Some(value) = value {
                annotations.insert(key.to_owned(), text(value).into());
            }
        }
        let before_ceiling = hard.unwrap_or(default_hard);
        match resolve(Value::Object(annotations), &config) {
            Err(error) => {
                let soft_above = matches!(error, SliceError::SoftAboveHard { .. });
                prop_assert!(soft_above && soft.is_some_and(|soft| soft > before_ceiling));
            }
            Ok(resolved) => for gpu in resolved.gpus {
                prop_assert!(gpu.memory_hard <= most_hard.unwrap_or(u64::MAX));
                prop_assert!(gpu.memory_hard <= before_ceiling && gpu.memory_hard > 0);
                prop_assert!(gpu.memory_soft <= gpu.memory_hard && gpu.memory_soft > 0);
                prop_assert!(gpu.memory_soft <= most_soft.unwrap_or(u64::MAX));
                prop_assert!(gpu.memory_soft <= soft.unwrap_or(u64::MAX));
                prop_assert!(gpu.weight <= most_weight.unwrap_or(MAX_WEIGHT).min(weight.unwrap_or(100)));
            },
        }
    }

    #[test]
    fn the_order_of_gpus_and_of_values_changes_nothing(a in 1_u64..1 << 40, b in 1_u64..1 << 40, most in amount()) {
        let config = Config {
            limits: Limits { memory_hard: most.and_then(Bytes::new), ..Limits::default() },
            ..Config::default()
        };
        let one = Wishes::read(&json!({ "annotations": { HARD: format!("{A}={a},{B}={b}") } })).unwrap();
        let two = Wishes::read(&json!({ "annotations": { HARD: format!("{B}={b},{A}={a}") } })).unwrap();
        let mut turned = granted();
        turned.reverse();
        let mut first = one.resolve(&granted(), &config).unwrap().gpus;
        let mut second = two.resolve(&turned, &config).unwrap().gpus;
        first.sort_by_key(|gpu| gpu.minor);
        second.sort_by_key(|gpu| gpu.minor);
        prop_assert_eq!(first, second);
    }

    #[test]
    fn no_annotation_panics(key in "gpuslice.io/[a-z-]{0,12}", value in ".{0,60}") {
        if let Ok(resolved) = resolve(json!({ key: value }), &node(Some("1Gi"), None, None)) {
            prop_assert!(resolved.gpus.iter().all(|gpu| gpu.memory_hard <= 1 << 30));
        }
    }
}
