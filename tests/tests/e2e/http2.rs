//! HTTP/2 by prior knowledge, with the clients people use.
//!
//! Not here: HTTP/2 by ALPN (`tls`), malformed frames (unit tests of the edge).

use nagaya_tests::backend::{Backend, Request};
use nagaya_tests::machine;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "http2",
    needs_root: false,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            curl_gets_and_posts,
            many_streams_share_a_connection,
            thousands_of_requests_succeed,
            a_big_file_arrives_whole,
            connection_fields_are_not_forwarded,
            refusals_are_answers_too,
        ],
    ),
};

fn world() -> World {
    let backend = Backend::answering(|peer, request| match request.target() {
        "/told" => peer.answer("200 OK", &request.head),
        _ => peer.answer("200 OK", &format!("{} {} bytes", request.method(), request.body.len())),
    });
    let world = World::builder()
        .tenant("alice")
        .site(json!({ "name": "www", "tenant": "alice", "hosts": ["www.test"],
            "backend": { "kind": "static", "root": "www" } }))
        .site(json!({ "name": "app", "tenant": "alice", "hosts": ["app.test"],
            "backend": { "kind": "http", "address": backend.address.to_string() } }))
        .start();
    world.write("alice", "www/a.txt", "alpha");
    world.write("alice", "www/big.bin", (0..=250).cycle().take(3_000_000).collect::<Vec<u8>>());
    world.keep(backend);
    world
}

fn curl(world: &World, host: &str, target: &str, more: &[&str]) -> String {
    let address = world.http();
    let connect = format!("{host}:{}:127.0.0.1:{}", address.port(), address.port());
    let url = format!("http://{host}:{}{target}", address.port());
    let mut arguments = vec!["-sS", "--http2-prior-knowledge", "--connect-to", &connect];
    arguments.extend(more);
    arguments.push(&url);
    machine::run("curl", &arguments)
}

fn curl_gets_and_posts(world: &World) {
    let told = ["-w", " %{http_version} %{http_code}"];
    assert_eq!(curl(world, "www.test", "/a.txt", &told), "alpha 2 200");
    assert_eq!(curl(world, "app.test", "/", &["-d", "body"]), "POST 4 bytes");
    let head = curl(world, "www.test", "/a.txt", &["-I"]);
    assert!(head.starts_with("HTTP/2 200") && head.contains("content-length: 5"), "{head}");
    // A body whose length is not known before its end.
    let upload = world.path("upload");
    machine::write(&upload, vec![1; 700_000]);
    let data = format!("@{}", upload.display());
    let answer =
        curl(world, "app.test", "/", &["-X", "POST", "-H", "Content-Length:", "--data-binary", &data]);
    assert_eq!(answer, "POST 700000 bytes");
}

fn many_streams_share_a_connection(world: &World) {
    let url = format!("http://{}/a.txt", world.http());
    let output = machine::run("nghttp", &["-nv", "-m", "20", "-H", ":authority: www.test", &url]);
    assert_eq!(output.matches(":status: 200").count(), 20, "{output}");
    assert_eq!(output.matches("Connected").count(), 1, "{output}");
}

fn thousands_of_requests_succeed(world: &World) {
    for host in ["www.test", "app.test"] {
        let authority = format!(":authority: {host}");
        let url = format!("http://{}/a.txt", world.http());
        let output = machine::run("h2load", &["-n", "2000", "-c", "8", "-m", "32", "-H", &authority, &url]);
        assert!(output.contains("2000 succeeded, 0 failed, 0 errored"), "{host}: {output}");
        assert!(output.contains("status codes: 2000 2xx"), "{host}: {output}");
    }
}

fn a_big_file_arrives_whole(world: &World) {
    let copy = world.path("copy.bin");
    curl(world, "www.test", "/big.bin", &["-o", &copy.to_string_lossy()]);
    let whole = std::fs::read(copy).expect("curl wrote it");
    assert!(whole == std::fs::read(world.home("alice").join("www/big.bin")).expect("our own file"));
}

fn connection_fields_are_not_forwarded(world: &World) {
    // RFC 9113 section 8.2.2: such fields make a request malformed; HTTP/1 would take them seriously.
    for field in
        ["transfer-encoding: chunked", "connection: close", "upgrade: h2c", "te: gzip", "host: other.test"]
    {
        let url = format!("http://{}/told", world.http());
        let output = machine::output("nghttp", &["-v", "-H", ":authority: app.test", "-H", field, &url]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!text.contains(":status: 200"), "{field}: {text}");
    }
    let told = Request { head: curl(world, "app.test", "/told", &["-H", "TE: trailers"]), body: Vec::new() };
    assert!(told.head.starts_with("GET /told HTTP/1.1\r\n"), "{}", told.head);
    assert!(told.field("host").is_some_and(|host| host.starts_with("app.test")), "{}", told.head);
    assert!(told.field("via").is_some_and(|via| via.contains("2")), "{}", told.head);
}

fn refusals_are_answers_too(world: &World) {
    let told = ["-o", "/dev/null", "-w", "%{http_version} %{http_code}"];
    assert_eq!(curl(world, "nobody.test", "/", &told), "2 404");
    assert_eq!(curl(world, "www.test", "/missing", &told), "2 404");
    let long = format!("/{}", "x".repeat(80_000));
    let answer = machine::output(
        "nghttp",
        &["-v", "-H", ":authority: www.test", &format!("http://{}{long}", world.http())],
    );
    assert!(!String::from_utf8_lossy(&answer.stdout).contains(":status: 200"));
    assert_eq!(curl(world, "www.test", "/a.txt", &[]), "alpha", "the node goes on");
}
