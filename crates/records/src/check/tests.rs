//! Each rule of `check` with a record that breaks only it, named by the field the mistake must point at.
//!
//! Not here: rules between records (`store::suite`).

use super::*;

fn fields_of_site(json: &str) -> Vec<String> {
    let record: Site = serde_json::from_str(json).expect(json);
    let mut to = RecordFindings::of_site(&record.name, None);
    site(&record, &mut to);
    to.mistakes.into_iter().map(|mistake| mistake.field).collect()
}

fn with_backend(backend: &str) -> Vec<String> {
    fields_of_site(&format!(r#"{{"name":"s","tenant":"t","hosts":["s.test"],"backend":{backend}}}"#))
}

#[test]
fn a_backend_in_order_has_no_mistakes() {
    for backend in [
        r#"{"kind":"static","root":"www","index":["a.html","b/c.html"],"listing":true,"cache_control":"max-age=5"}"#,
        r#"{"kind":"static","root":"/usr/share/doc","error_documents":{"404":"e/404.html"}}"#,
        r#"{"kind":"static","root":"."}"#,
        r#"{"kind":"php","root":"www","extensions":[".phtml"]}"#,
        r#"{"kind":"cgi","root":"bin","extensions":[".cgi",".pl"],"env":{"A_1":"x"},"timeout_seconds":5}"#,
        r#"{"kind":"php","root":"wp","deny":["/data","/a/b"],"front_controller":"index.php"}"#,
        r#"{"kind":"http","address":"127.0.0.1:3000","host_header":"a.test:81"}"#,
        r#"{"kind":"http","address":"[::1]:3000","host_header":"[::1]"}"#,
        r#"{"kind":"http","address":"backend.internal:80"}"#,
        r#"{"kind":"http","address":"unix:/run/app.sock"}"#,
        r#"{"kind":"app","command":["puma","-b","unix://{socket}"],"directory":"app"}"#,
        r#"{"kind":"app","command":["serve","{port}"],"directory":"/srv","listen":"port"}"#,
    ] {
        assert_eq!(with_backend(backend), [""; 0], "{backend}");
    }
}

#[test]
fn each_rule_names_its_field() {
    for (field, backend) in [
        ("root", r#"{"kind":"static","root":""}"#),
        ("root", r#"{"kind":"static","root":"../x"}"#),
        ("root", r#"{"kind":"cgi","root":"/a/../b"}"#),
        ("root", r#"{"kind":"php","root":"a\u0000b"}"#),
        ("index", r#"{"kind":"static","root":"w","index":["/etc/passwd"]}"#),
        ("index", r#"{"kind":"static","root":"w","index":[""]}"#),
        ("error_documents", r#"{"kind":"static","root":"w","error_documents":{"200":"a.html"}}"#),
        ("error_documents", r#"{"kind":"static","root":"w","error_documents":{"0404":"a.html"}}"#),
        ("error_documents.404", r#"{"kind":"static","root":"w","error_documents":{"404":"../a"}}"#),
        ("cache_control", r#"{"kind":"static","root":"w","cache_control":"a\r\nb"}"#),
        ("deny", r#"{"kind":"php","root":"w","deny":["data"]}"#),
        ("deny", r#"{"kind":"php","root":"w","deny":["/data/"]}"#),
        ("extensions", r#"{"kind":"php","root":"w","extensions":["phtml"]}"#),
        ("extensions", r#"{"kind":"static","root":"w","extensions":[".cgi"]}"#),
        ("extensions", r#"{"kind":"cgi","root":"w","extensions":["cgi"]}"#),
        ("front_controller", r#"{"kind":"static","root":"w","front_controller":"a.php"}"#),
        ("front_controller", r#"{"kind":"php","root":"w","front_controller":"/a.php"}"#),
        ("env", r#"{"kind":"static","root":"w","env":{"A":"x"}}"#),
        ("env", r#"{"kind":"cgi","root":"w","env":{"1A":"x"}}"#),
        ("env", r#"{"kind":"cgi","root":"w","env":{"A=B":"x"}}"#),
        ("env.A", r#"{"kind":"cgi","root":"w","env":{"A":"\u0000"}}"#),
        ("timeout_seconds", r#"{"kind":"cgi","root":"w","timeout_seconds":0}"#),
        ("timeout_seconds", r#"{"kind":"static","root":"w","timeout_seconds":9}"#),
        ("linger_seconds", r#"{"kind":"php","root":"w","linger_seconds":3601}"#),
        ("linger_seconds", r#"{"kind":"static","root":"w","linger_seconds":9}"#),
        ("address", r#"{"kind":"http","address":"localhost"}"#),
        ("address", r#"{"kind":"http","address":"localhost:0"}"#),
        ("address", r#"{"kind":"http","address":"localhost:+80"}"#),
        ("address", r#"{"kind":"http","address":"http://localhost:80"}"#),
        ("address", r#"{"kind":"http","address":"::1:80"}"#),
        ("address", r#"{"kind":"http","address":"unix:app.sock"}"#),
        ("host_header", r#"{"kind":"http","address":"a:1","host_header":"a b"}"#),
        ("command", r#"{"kind":"app","command":[],"directory":"a"}"#),
        ("command", r#"{"kind":"app","command":[""],"directory":"a"}"#),
        ("command", r#"{"kind":"app","command":["x","{port}"],"directory":"a"}"#),
        ("command", r#"{"kind":"app","command":["x","{socket}"],"directory":"a","listen":"port"}"#),
        ("directory", r#"{"kind":"app","command":["x"],"directory":".."}"#),
        ("start_seconds", r#"{"kind":"app","command":["x"],"directory":"a","start_seconds":0}"#),
    ] {
        assert_eq!(with_backend(backend), [field], "{backend}");
    }
}

#[test]
fn a_site_is_told_all_its_mistakes_at_once() {
    let json = r#"{"name":"s","tenant":"t","hosts":["a.test","A.test"],"path":"blog","max_concurrent":0,
        "stream_seconds":0,"admission":{"visit_seconds":86401},
        "backend":{"kind":"php","root":"..","extensions":["x"]}}"#;
    assert_eq!(
        fields_of_site(json),
        [
            "hosts",
            "path",
            "max_concurrent",
            "stream_seconds",
            "admission.visit_seconds",
            "root",
            "extensions"
        ]
    );
}

#[test]
fn a_mount_path_must_stand_for_itself() {
    for bad in ["", "a", "/a/", "//", "/a//b", "/./a", "/a/..", "/a b", "/a?b", "/a%20", "/\u{7}"] {
        assert!(mount_mistake(bad).is_some(), "{bad}");
    }
    for good in ["/", "/a", "/a/b.c", "/ä", "/..a"] {
        assert_eq!(mount_mistake(good), None, "{good}");
    }
}

#[test]
fn a_tenant_is_never_root() {
    let json = r#"{"name":"t","uid":0,"gid":4294967295,"home":"srv/../t","php_workers":0}"#;
    let record: Tenant = serde_json::from_str(json).unwrap();
    let mut to = RecordFindings::of_tenant(&record.name, Some(3));
    tenant(&record, &mut to);
    let fields: Vec<&str> = to.mistakes.iter().map(|mistake| mistake.field.as_str()).collect();
    assert_eq!(fields, ["uid", "gid", "home", "home", "php_workers"]);
    assert!(to.mistakes.iter().all(|mistake| mistake.index == Some(3)));
    assert_eq!(to.mistakes[0].to_string(), "tenant 't': uid: '0' is root's: a tenant needs an id of its own");
}

fn fields_of_cgi(fields: &str) -> Vec<String> {
    fields_of_site(&format!(
        r#"{{"name":"s","tenant":"t","hosts":["s.test"],"backend":{{"kind":"cgi","root":"b"}},{fields}}}"#
    ))
}

#[test]
fn limits_in_order_have_no_mistakes() {
    for fields in [
        r#""limits":{"cpu":"50%","cpu_shares":2,"read":"5M","write":"5M","read_iops":1,"processes":64,"memory":"512M"}"#,
        r#""limits":{"devices":{"8:0":{"read":"30M"},"254:16":{"write_iops":"unlimited"}}}"#,
        r#""request_limits":{"cpu":"150%","processes":16}"#,
        r#""demotions":[{"after_cpu":"500ms","limits":{"cpu":"10%"}},{"after_cpu":"2s","limits":{"cpu":"1%"}}]"#,
    ] {
        assert_eq!(fields_of_cgi(fields), [""; 0], "{fields}");
    }
}

#[test]
fn each_limit_out_of_range_is_named() {
    for (field, fields) in [
        ("limits.cpu", r#""limits":{"cpu":50}"#),
        ("limits.cpu_shares", r#""limits":{"cpu_shares":10001}"#),
        ("limits.read", r#""limits":{"read":"fast"}"#),
        ("limits.write", r#""limits":{"write":0}"#),
        ("limits.read_iops", r#""limits":{"read_iops":"5K"}"#),
        ("limits.write_iops", r#""limits":{"write_iops":0}"#),
        ("limits.processes", r#""limits":{"processes":5000000}"#),
        ("limits.memory", r#""limits":{"memory":"1K"}"#),
        ("limits.devices", r#""limits":{"devices":{"sda":{"read":"5M"}}}"#),
        ("limits.devices", r#""limits":{"devices":{":root":{"read":"5M"}}}"#),
        ("limits.devices", r#""limits":{"devices":{"08:0":{"read":"5M"}}}"#),
        ("limits.devices.8:0.write", r#""limits":{"devices":{"8:0":{"write":"5X"}}}"#),
        ("request_limits.cpu", r#""request_limits":{"cpu":"0%"}"#),
        ("request_limits.memory", r#""request_limits":{"memory":"512M"}"#),
        ("demotions[0].after_cpu", r#""demotions":[{"after_cpu":"5","limits":{"cpu":"1%"}}]"#),
        (
            "demotions[1].after_cpu",
            r#""demotions":[{"after_cpu":"2s","limits":{"cpu":"9%"}},{"after_cpu":"2s","limits":{"cpu":"1%"}}]"#,
        ),
        ("demotions[0].limits", r#""demotions":[{"after_cpu":"2s","limits":{}}]"#),
        ("demotions[0].limits.memory", r#""demotions":[{"after_cpu":"2s","limits":{"memory":"9M"}}]"#),
    ] {
        assert_eq!(fields_of_cgi(fields), [field], "{fields}");
    }
    let devices: Vec<String> = (0..16).map(|n| format!(r#""8:{n}":{{"read":"5M"}}"#)).collect();
    let many = format!(r#""limits":{{"read":"5M","devices":{{{}}}}}"#, devices.join(","));
    assert_eq!(fields_of_cgi(&many), ["limits.devices"]);
    let step = |n: u32| format!(r#"{{"after_cpu":"{n}s","limits":{{"cpu":"1%"}}}}"#);
    let steps: Vec<String> = (1..=5).map(step).collect();
    assert_eq!(fields_of_cgi(&format!(r#""demotions":[{}]"#, steps.join(","))), ["demotions"]);
}

#[test]
fn limits_that_could_not_hold_are_refused() {
    let on = |backend: &str, field: &str| {
        fields_of_site(&format!(
            r#"{{"name":"s","tenant":"t","hosts":["s.test"],"backend":{backend},{field}}}"#
        ))
    };
    let files = r#"{"kind":"static","root":"w"}"#;
    let http = r#"{"kind":"http","address":"a:1"}"#;
    let app = r#"{"kind":"app","command":["x"],"directory":"a"}"#;
    let bytes = r#"{"read":"5M","write":"1M"}"#;
    let all = r#"{"cpu":"50%","cpu_shares":2,"read_iops":1,"write_iops":1,"processes":9,"devices":{"8:0":{"read":"5M"}}}"#;
    let names = ["cpu", "cpu_shares", "read_iops", "write_iops", "processes", "devices"];
    for (backend, runs_here) in [(files, false), (http, false), (app, true)] {
        for field in ["limits", "request_limits"] {
            assert_eq!(on(backend, &format!(r#""{field}":{bytes}"#)), [""; 0], "{backend} {field}");
            let told = on(backend, &format!(r#""{field}":{all}"#));
            if runs_here && field == "limits" {
                assert_eq!(told, [""; 0], "{backend}")
            } else {
                assert_eq!(told, names.map(|name| format!("{field}.{name}")), "{backend}")
            }
        }
        let memory = r#"{"memory":"512M"}"#;
        let told = on(backend, &format!(r#""limits":{memory},"request_limits":{memory}"#));
        if runs_here {
            assert_eq!(told, ["request_limits.memory"], "{backend}")
        } else {
            assert_eq!(told, ["limits.memory", "request_limits.memory"], "{backend}")
        }
        let step = r#""demotions":[{"after_cpu":"1s","limits":{"cpu":"5%"}}]"#;
        assert_eq!(on(backend, step), ["demotions"], "{backend}");
    }
}

#[test]
fn a_setting_is_short_and_its_key_printable() {
    let fields = |key: &str, value: &str| {
        let record: Setting = serde_json::from_str(&format!(r#"{{"key":"{key}","value":{value}}}"#)).unwrap();
        let mut to = RecordFindings::of_setting(&record.key, None);
        setting(&record, &mut to);
        to.mistakes.into_iter().map(|mistake| mistake.field).collect::<Vec<_>>()
    };
    let text = |len: usize| format!("\"{}\"", "x".repeat(len));
    let object = |count: usize, len: usize| {
        let fields: Vec<String> = (0..count).map(|n| format!(r#""{n:0len$}":{n}"#)).collect();
        format!("{{{}}}", fields.join(","))
    };
    assert_eq!(fields(&"k".repeat(KEY_LEN_MAX), &text(VALUE_LEN_MAX)), [""; 0]);
    assert_eq!(fields("a key: 長屋", &object(FIELDS_MAX, FIELD_NAME_LEN_MAX)), [""; 0]);
    for (key, value) in [("", text(1)), (&"k".repeat(KEY_LEN_MAX + 1), text(1)), ("a\\u0000b", text(1))] {
        assert_eq!(fields(key, &value), ["key"], "{key}");
    }
    for value in [
        text(VALUE_LEN_MAX + 1),
        object(FIELDS_MAX + 1, 2),
        object(1, FIELD_NAME_LEN_MAX + 1),
        format!(r#"{{"a":{}}}"#, text(VALUE_LEN_MAX)),
        r#"{"":1}"#.into(),
    ] {
        assert_eq!(fields("k", &value), ["value"], "{value}");
    }
}
