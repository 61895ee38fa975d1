//! TLS: the right certificate for each name, replaced while the node runs.
//!
//! Not here: how certificates are cached (unit tests of the edge).

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "tls",
    needs_root: false,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            each_name_gets_its_certificate,
            both_protocols_are_agreed_on,
            a_name_without_certificate_gets_the_default_one,
            without_a_default_an_unknown_name_is_an_alert,
            a_replaced_certificate_is_live,
            a_broken_replacement_changes_nothing,
            another_sites_request_on_this_connection_is_421,
            old_versions_are_refused,
            a_big_file_arrives_whole,
            a_certificate_that_ends_soon_is_said,
        ],
    ),
};

fn world() -> World {
    let site = |name: &str, hosts: &[&str]| json!({ "name": name, "tenant": "alice", "hosts": hosts, "backend": { "kind": "static", "root": "www" } });
    let world = World::builder()
        .tls()
        .tenant("alice")
        .site(site("a", &["a.test", "replaced.test", "broken.test", "*.wild.test"]))
        .site(site("b", &["b.test"]))
        .start();
    world.write("alice", "www/a.txt", "alpha");
    world.write("alice", "www/big.bin", (0..=250).cycle().take(3_000_000).collect::<Vec<u8>>());
    for (file, name) in [
        ("a.test", "a.test"),
        ("b.test", "b.test"),
        ("_wildcard.wild.test", "*.wild.test"),
        ("default", "default.test"),
        ("replaced.test", "replaced.test"),
        ("broken.test", "broken.test"),
    ] {
        certify(&world, file, &[name]);
    }
    world
}

/// Puts a new certificate into place, as an ACME client does: whole, readable for root only.
pub fn certify(world: &World, file: &str, names: &[&str]) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let made = rcgen::generate_simple_self_signed(names).expect("valid names");
    let pem = format!("{}{}", made.cert.pem(), made.signing_key.serialize_pem());
    let draft = world.path("certificates").join(format!("{file}.new"));
    machine::write(&draft, pem);
    std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(0o600)).expect("our own file");
    std::fs::rename(&draft, world.path("certificates").join(format!("{file}.pem"))).expect("our own file");
}

/// What a handshake for this name shows, and whether it succeeded.
fn handshake(world: &World, name: &str, more: &[&str]) -> (String, bool) {
    let address = world.https().to_string();
    let mut arguments = vec!["s_client", "-connect", &address, "-servername", name];
    arguments.extend(more);
    let output =
        Command::new("openssl").args(arguments).stdin(Stdio::null()).output().expect("openssl is installed");
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success())
}

/// Names in the certificate that this name gets.
fn names_for(world: &World, name: &str) -> String {
    let (shown, _) = handshake(world, name, &[]);
    let from = shown.find("-----BEGIN").unwrap_or_else(|| panic!("no certificate for {name}: {shown}"));
    let path = world.path(&format!("shown-{name}.pem"));
    machine::write(&path, &shown[from..]);
    machine::run("openssl", &["x509", "-in", &path.to_string_lossy(), "-noout", "-ext", "subjectAltName"])
}

fn curl(world: &World, url_host: &str, target: &str, more: &[&str]) -> String {
    let port = world.https().port();
    let connect = format!("{url_host}:{port}:127.0.0.1:{port}");
    let url = format!("https://{url_host}:{port}{target}");
    let mut arguments = vec!["-sSk", "--connect-to", &connect];
    arguments.extend(more);
    arguments.push(&url);
    machine::run("curl", &arguments)
}

fn each_name_gets_its_certificate(world: &World) {
    assert!(names_for(world, "a.test").contains("DNS:a.test"));
    assert!(names_for(world, "b.test").contains("DNS:b.test"));
    assert!(names_for(world, "B.TEST").contains("DNS:b.test"));
    assert!(names_for(world, "x.wild.test").contains("DNS:*.wild.test"));
    // Names as resolvers write them, with the dot at their end.
    assert!(names_for(world, "b.test.").contains("DNS:b.test"));
    for version in ["--http1.1", "--http2"] {
        let sent = ["--resolve", &format!("a.test.:{}:127.0.0.1", world.https().port()), version];
        assert_eq!(curl(world, "a.test.", "/a.txt", &sent), "alpha", "{version}");
    }
}

fn both_protocols_are_agreed_on(world: &World) {
    let told = ["-w", " %{http_version}"];
    assert_eq!(curl(world, "a.test", "/a.txt", &[&told[..], &["--http2"]].concat()), "alpha 2");
    assert_eq!(curl(world, "a.test", "/a.txt", &[&told[..], &["--http1.1"]].concat()), "alpha 1.1");
    assert_eq!(curl(world, "a.test", "/a.txt", &[&told[..], &["--no-alpn"]].concat()), "alpha 1.1");
}

fn a_name_without_certificate_gets_the_default_one(world: &World) {
    assert!(names_for(world, "unknown.test").contains("DNS:default.test"));
    let told = ["-o", "/dev/null", "-w", "%{http_code}"];
    assert_eq!(curl(world, "unknown.test", "/", &told), "404");
}

fn without_a_default_an_unknown_name_is_an_alert(_: &World) {
    let bare = World::builder().tls().start();
    let (shown, succeeded) = handshake(&bare, "unknown.test", &[]);
    assert!(!succeeded && !shown.contains("BEGIN CERTIFICATE"), "{shown}");
    bare.stop();
}

fn a_replaced_certificate_is_live(world: &World) {
    assert!(!names_for(world, "replaced.test").contains("second.test"));
    certify(world, "replaced.test", &["replaced.test", "second.test"]);
    wait::until("the new certificate is served", || {
        names_for(world, "replaced.test").contains("second.test")
    });
}

fn a_broken_replacement_changes_nothing(world: &World) {
    // Often enough that every thread of the edge has seen the good one.
    for _ in 0..30 {
        assert!(names_for(world, "broken.test").contains("DNS:broken.test"));
    }
    machine::write(&world.path("certificates/broken.test.pem"), "-----BEGIN CERTIFICATE-----\nnonsense\n");
    wait::until("the broken file is reported", || {
        let still = names_for(world, "broken.test");
        assert!(still.contains("DNS:broken.test"), "{still}");
        world.log().contains("NGY0430")
    });
}

fn another_sites_request_on_this_connection_is_421(world: &World) {
    let told = ["-o", "/dev/null", "-w", "%{http_code}", "-H", "Host: b.test"];
    for version in ["--http1.1", "--http2"] {
        assert_eq!(curl(world, "a.test", "/a.txt", &[&told[..], &[version]].concat()), "421", "{version}");
    }
}

fn old_versions_are_refused(world: &World) {
    assert!(handshake(world, "a.test", &["-tls1_2"]).1);
    assert!(handshake(world, "a.test", &["-tls1_3"]).1);
    assert!(!handshake(world, "a.test", &["-tls1_1"]).1);
}

fn a_big_file_arrives_whole(world: &World) {
    let original = std::fs::read(world.home("alice").join("www/big.bin")).expect("our own file");
    for version in ["--http1.1", "--http2"] {
        let copy = world.path(&format!("copy{version}"));
        curl(world, "a.test", "/big.bin", &[version, "-o", &copy.to_string_lossy()]);
        assert!(std::fs::read(&copy).expect("curl wrote it") == original, "{version}");
    }
}

fn a_certificate_that_ends_soon_is_said(world: &World) {
    let reload = || machine::signal(world.pid(), "HUP");
    let ending = || world.status()["certificates"]["ending"].clone();
    let hour = std::time::Duration::from_secs(3600);
    for (name, left) in [("week.test", hour * (24 * 5 - 1)), ("over.test", std::time::Duration::ZERO)] {
        let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).expect("a valid name");
        let now = std::time::SystemTime::now();
        params.not_after = (now + left).into();
        let key = rcgen::KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem() + &key.serialize_pem();
        machine::write(&world.path("certificates").join(format!("{name}.pem")), pem);
    }
    reload();
    let expected = json!(["over.test ended 0 days ago", "week.test ends in 4 days"]);
    wait::until("the status says it", || ending() == expected);
    wait::until("the log says it", || {
        let log = world.log();
        log.lines().any(|line| line.contains("NGY0515") && line.contains("week.test ends in 4 days"))
    });
    assert_eq!(world.metric("nagaya_certificates", "state=\"7_days\""), 1.0);
    assert_eq!(world.metric("nagaya_certificates", "state=\"over\""), 1.0);
    assert!(world.cli(&["status"]).contains("week.test ends in 4 days"));
    // Other certificates of these tests end in centuries.
    certify(world, "week.test", &["week.test"]);
    std::fs::remove_file(world.path("certificates").join("over.test.pem")).expect("our own file");
    reload();
    wait::until("it is no trouble any more", || ending() == json!([]));
}
