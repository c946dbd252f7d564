use serde_json::json;

use super::*;

const MAJORS: Majors = Majors { uvm: Some(511), caps: Some(234), nvswitch: Some(233), imex: Some(232) };

fn node(path: &str, major: u32, minor: u32) -> Value {
    json!({ "path": path, "type": "c", "major": major, "minor": minor, "fileMode": 438 })
}

fn rule(major: u32, minor: u32) -> Value {
    json!({ "allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm" })
}

fn spec_of(devices: Vec<Value>) -> Value {
    json!({ "linux": { "devices": devices } })
}

fn card() -> Vec<Value> {
    vec![node("/dev/nvidiactl", 195, 255), node("/dev/nvidia-uvm", 511, 0), node("/dev/nvidia1", 195, 1)]
}

#[test]
fn gpus_are_those_listed_and_nothing_in_the_environment() {
    let mut root = spec_of(Vec::new());
    root["process"] = json!({ "env": ["NVIDIA_VISIBLE_DEVICES=all"] });
    assert_eq!(granted(&root, &MAJORS).unwrap(), Granted::default());
    let mut devices = card();
    devices.push(node("/dev/nvidia0", 195, 0));
    devices.push(node("/dev/again", 195, 0));
    assert_eq!(granted(&spec_of(devices), &MAJORS).unwrap().minors, [0, 1]);
}

#[test]
fn what_a_cdi_device_brings_beside_the_card_is_taken_out_with_its_rules() {
    let mut devices = card();
    let extra = [
        ("/dev/nvidia-modeset", 195, 254),
        ("/dev/nvidia-uvm-tools", 511, 1),
        ("/dev/dri/card1", 226, 1),
        ("/dev/dri/renderD128", 226, 128),
    ];
    devices.extend(extra.iter().map(|(path, major, minor)| node(path, *major, *minor)));
    let mut root = spec_of(devices);
    let mut rules = vec![json!({ "allow": false, "access": "rwm" }), rule(195, 1), rule(1, 3)];
    rules.extend(extra.iter().map(|(_, major, minor)| rule(*major, *minor)));
    root["linux"]["resources"] = json!({ "devices": rules, "unknown": 1 });
    let found = granted(&root, &MAJORS).unwrap();
    assert_eq!(found.dropped.len(), 4);
    narrow(&mut root, &found);
    assert_eq!(root["linux"]["devices"], json!(card()));
    assert_eq!(
        root["linux"]["resources"],
        json!({ "devices": [json!({ "allow": false, "access": "rwm" }), rule(195, 1), rule(1, 3)], "unknown": 1 })
    );
}

#[test]
fn a_card_without_its_common_nodes_is_refused_by_name() {
    for (gone, name) in [(0, "nvidiactl"), (1, "nvidia-uvm")] {
        let mut devices = card();
        devices.remove(gone);
        assert!(granted(&spec_of(devices), &MAJORS).unwrap_err().to_string().contains(name));
    }
}

#[test]
fn common_nodes_without_a_card_are_refused() {
    for device in
        [node("/dev/nvidiactl", 195, 255), node("/dev/nvidia-uvm", 511, 0), node("/dev/dri/card0", 226, 0)]
    {
        let error = granted(&spec_of(vec![device]), &MAJORS).unwrap_err();
        assert!(matches!(error, DeviceError::NoGpu { .. }));
    }
}

#[test]
fn mig_fabric_and_wildcard_devices_are_refused() {
    for (device, part) in [
        (node("/dev/nvidia-caps/nvidia-cap1", 234, 1), "MIG"),
        (node("/dev/nvidia-nvswitch0", 233, 0), "NVSwitch"),
        (node("/dev/nvidia-caps-imex-channels/channel0", 232, 0), "IMEX"),
        (json!({ "path": "/dev/any", "type": "c", "major": 195 }), "single major"),
    ] {
        let mut devices = card();
        devices.push(device);
        let error = granted(&spec_of(devices), &MAJORS).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn more_gpus_than_the_protocol_carries_are_refused() {
    let mut devices = card();
    devices.extend((2..18).map(|minor| node("/dev/nvidia", 195, minor)));
    assert_eq!(granted(&spec_of(devices), &MAJORS), Err(DeviceError::TooMany { found: 17 }));
}
