//! TLS: the right certificate for each name, replaced while the node runs.
//!
//! Not here: how certificates are cached (unit tests of the edge).

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use nagaya_tests::client::Connection;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

use super::browser::installed;

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
            plain_http_is_told_that_the_port_speaks_https,
            plain_http_is_answered_before_it_is_whole,
            a_browser_agrees_on_keys_with_ml_kem,
            clients_without_ml_kem_agree_on_x25519,
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

fn plain_http_is_told_that_the_port_speaks_https(world: &World) {
    for head in ["GET /a.txt HTTP/1.1\r\nHost: a.test\r\n\r\n", "BREW / HTTP/1.0\r\n\r\n", "get"] {
        let mut connection = Connection::open(world.https());
        connection.send(head);
        let response = connection.response().expect(400);
        assert!(response.text().contains("plain HTTP was sent to a port that speaks HTTPS"), "{response:?}");
        assert!(response.text().contains("NGY0478"), "{response:?}");
        assert_eq!(response.header("connection"), Some("close"), "{head}");
        connection.finish();
        assert!(connection.is_closed(), "{head}");
    }
    let logged = || world.access_log().into_iter().find(|line| line["refusal"] == "plain_http");
    let line = wait::until_some("the access log has it", logged);
    assert_eq!((&line["status"], &line["site"]), (&json!(400), &json!(null)), "{line}");
    assert!(world.metric("nagaya_http_refusals_total", "reason=\"plain_http\"") >= 3.0);
    // Others are served as before.
    assert_eq!(curl(world, "a.test", "/a.txt", &[]), "alpha");
}

/// What is sent in part is answered and closed; what is no request of HTTP/1 is closed without an answer of HTTP.
fn plain_http_is_answered_before_it_is_whole(world: &World) {
    let told = |connection: &mut Connection| connection.send("GET / HTTP/1.1\r\n").response().expect(400);
    let mut held: Vec<Connection> = (0..3).map(|_| Connection::open(world.https())).collect();
    held.iter_mut().for_each(|connection| drop(told(connection)));
    // Nobody has sent the rest of the request, and nobody does.
    for connection in &mut held {
        assert!(connection.is_closed(), "the node waits for what nobody sends");
    }
    // What begins neither like a record of TLS nor with a method gets the alert of TLS, and HTTP/2 has no answer without a handshake.
    let mut connection = Connection::open(world.https());
    connection.send([0x80, 0x2e, 1, 3, 1, 0]).finish();
    assert!(!connection.until_end().starts_with(b"HTTP"));
    let mut connection = Connection::open(world.https());
    connection.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").finish();
    assert_eq!(connection.until_end(), b"");
}

fn a_browser_agrees_on_keys_with_ml_kem(world: &World) {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("browser");
    let script = scripts.join("keys.mjs").display().to_string();
    let chromium = installed("chromium").display().to_string();
    let port = world.https().port().to_string();
    let told = machine::run(&installed("node").to_string_lossy(), &[&script, &chromium, "a.test", &port]);
    let told: Value = serde_json::from_str(&told).unwrap_or_else(|error| panic!("{error}: {told}"));
    assert_eq!(told["status"], 200, "{told}");
    assert_eq!(told["protocol"], "TLS 1.3", "{told}");
    assert_eq!(told["keyExchangeGroup"], "X25519MLKEM768", "{told}");
}

fn clients_without_ml_kem_agree_on_x25519(world: &World) {
    for (version, groups, agreed) in [
        ("-tls1_3", "X25519", "Server Temp Key: X25519"),
        ("-tls1_3", "P-256", "Server Temp Key: ECDH, prime256v1"),
        // In TLS 1.2 the curve of the certificate is one of the groups, too.
        ("-tls1_2", "X25519:P-256", "Server Temp Key: X25519"),
    ] {
        let (shown, succeeded) = handshake(world, "a.test", &[version, "-groups", groups]);
        assert!(succeeded && shown.contains(agreed), "{version} {groups}: {shown}");
    }
}
