//! Each rule of `check` with a record that breaks only it, named by the field the mistake must point at.
//!
//! Not here: rules between records (`store::suite`).

use super::*;

fn fields_of_site(json: &str) -> Vec<String> {
    let record: Site = serde_json::from_str(json).expect(json);
    let mut to = Findings::of_site(&record.name, None);
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
        ("extensions", r#"{"kind":"php","root":"w","extensions":[".cgi"]}"#),
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
        "backend":{"kind":"php","root":"..","extensions":[".x"]}}"#;
    assert_eq!(fields_of_site(json), ["hosts", "path", "max_concurrent", "root", "extensions"]);
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
    let mut to = Findings::of_tenant(&record.name, Some(3));
    tenant(&record, &mut to);
    let fields: Vec<&str> = to.mistakes.iter().map(|mistake| mistake.field.as_str()).collect();
    assert_eq!(fields, ["uid", "gid", "home", "home", "php_workers"]);
    assert!(to.mistakes.iter().all(|mistake| mistake.index == Some(3)));
    assert_eq!(to.mistakes[0].to_string(), "tenant 't': uid: '0' is root's: a tenant needs an id of its own");
}
