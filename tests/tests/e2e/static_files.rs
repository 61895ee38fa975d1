//! Files: what a browser, a download manager and a curious visitor ask of them.
//!
//! Not here: whether tenants can reach each other's files (`tenants`).

use std::fs;
use std::os::unix::fs::symlink;

use nagaya_tests::client::{self, Connection, Response};
use nagaya_tests::machine;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "static_files",
    needs_root: false,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            an_index_answers_for_its_directory,
            a_directory_without_its_slash_is_redirected,
            ranges_are_exact,
            several_ranges_come_as_parts,
            conditional_requests_save_the_body,
            a_changed_file_is_served_at_once,
            precompressed_files_are_chosen_by_what_the_client_takes,
            a_link_out_of_the_root_leads_nowhere,
            dots_in_a_path_lead_nowhere,
            a_directory_is_listed_only_where_asked_for,
            error_documents_are_the_sites_own,
            a_big_file_arrives_byte_for_byte,
            head_has_the_fields_of_get_and_no_body,
            other_methods_are_refused_with_those_allowed,
            an_unknown_host_is_404,
            wildcards_and_paths_choose_the_nearest_site,
            denied_paths_and_hidden_files_are_not_served,
        ],
    ),
};

const PAGE: &str = "<!doctype html><title>hello</title><p>0123456789</p>\n";

fn world() -> World {
    let site = |name: &str, host: &str, root: &str| json!({ "name": name, "tenant": "alice", "hosts": [host], "backend": { "kind": "static", "root": root } });
    let mut listed = site("listed", "listed.test", "www");
    listed["backend"]["listing"] = true.into();
    let mut own = site("own-errors", "errors.test", "www");
    own["backend"]["error_documents"] = json!({ "404": "errors/404.html" });
    let mut denied = site("denied", "denied.test", "www");
    denied["backend"]["deny"] = json!(["/errors"]);
    let mut docs = site("docs", "www.test", "docs");
    docs["path"] = "/docs".into();
    let world = World::builder()
        .tenant("alice")
        .site(site("www", "www.test", "www"))
        .site(docs)
        .site(site("any", "*.wild.test", "any"))
        .site(site("exact", "exact.wild.test", "www"))
        .site(listed)
        .site(own)
        .site(denied)
        .start();
    world.write("alice", "www/index.html", PAGE);
    world.write("alice", "www/plain.txt", "0123456789");
    world.write("alice", "www/sub/page.html", "below");
    world.write("alice", "www/errors/404.html", "<p>our own words</p>");
    world.write("alice", "www/.hidden", "not for visitors");
    world.write("alice", "docs/index.html", "the documents");
    world.write("alice", "any/index.html", "any name");
    world
}

/// Bytes that repeat in no short period, so that a shifted range shows.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let step = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    std::iter::repeat_with(step).take(len).collect()
}

fn an_index_answers_for_its_directory(world: &World) {
    let page = world.get("www.test", "/").expect(200);
    assert_eq!(page.text(), PAGE);
    assert!(page.header("content-type").is_some_and(|kind| kind.starts_with("text/html")));
    assert_eq!(page.header("content-length"), Some(PAGE.len().to_string().as_str()));
    assert!(
        page.header("date").is_some()
            && page.header("last-modified").is_some()
            && page.header("etag").is_some()
    );
}

fn a_directory_without_its_slash_is_redirected(world: &World) {
    let answer = world.get("www.test", "/sub?a=1");
    assert!(matches!(answer.status, 301 | 308), "{answer:?}");
    assert_eq!(answer.header("location"), Some("/sub/?a=1"));
}

fn ranges_are_exact(world: &World) {
    let range = |range: &str| {
        client::get_with(world.http(), "www.test", "/plain.txt", &format!("Range: {range}\r\n"))
    };
    let middle = range("bytes=2-5").expect(206);
    assert_eq!((middle.text().as_str(), middle.header("content-range")), ("2345", Some("bytes 2-5/10")));
    assert_eq!(range("bytes=7-").expect(206).text(), "789");
    // Players take a 200 for a server without ranges.
    for all in ["bytes=0-", "bytes=0-9", "bytes=-10", "bytes=0-999", "bytes=0-4,5-"] {
        let answer = range(all).expect(206);
        assert_eq!(
            (answer.text().as_str(), answer.header("content-range")),
            ("0123456789", Some("bytes 0-9/10")),
            "{all}"
        );
    }
    assert_eq!(range("bytes=-3").expect(206).text(), "789");
    assert_eq!(range("bytes=3-999").expect(206).header("content-range"), Some("bytes 3-9/10"));
    assert_eq!(range("bytes=10-").expect(416).header("content-range"), Some("bytes */10"));
    // RFC 9110 section 14.2: what is not understood is ignored.
    assert_eq!(range("lines=1-2").expect(200).text(), "0123456789");
}

fn several_ranges_come_as_parts(world: &World) {
    let content: String = ('a'..='z').cycle().take(5_000).collect();
    world.write("alice", "www/letters.txt", &content);
    let fields = "Range: bytes=0-1,4000-4001\r\n";
    let parts = client::get_with(world.http(), "www.test", "/letters.txt", fields).expect(206);
    let kind = parts.header("content-type").unwrap_or_default().to_owned();
    let boundary = kind.strip_prefix("multipart/byteranges; boundary=").unwrap_or_else(|| panic!("{kind}"));
    let text = parts.text();
    let pieces: Vec<_> = text.split(&format!("--{}", boundary.trim_matches('"'))).collect();
    assert_eq!(pieces.len(), 4, "{text}");
    assert!(pieces[1].to_ascii_lowercase().contains("content-range: bytes 0-1/5000"), "{text}");
    assert!(pieces[1].ends_with("\r\n\r\nab\r\n"), "{text}");
    assert!(pieces[2].ends_with(&format!("\r\n\r\n{}\r\n", &content[4000..=4001])), "{text}");
    // Hundreds of overlapping ranges cost more than they save (RFC 9110 section 14.2): all of it, or none.
    let many = format!("Range: bytes=0-{}\r\n", ",0-".repeat(500));
    let answer = client::get_with(world.http(), "www.test", "/letters.txt", &many);
    assert!(matches!(answer.status, 200 | 416) && answer.body.len() <= 5_000, "{}", answer.status);
}

fn conditional_requests_save_the_body(world: &World) {
    let page = world.get("www.test", "/plain.txt").expect(200);
    let etag = page.header("etag").unwrap();
    let modified = page.header("last-modified").unwrap();
    let with = |fields: String| client::get_with(world.http(), "www.test", "/plain.txt", &fields);
    let unchanged = with(format!("If-None-Match: {etag}\r\n")).expect(304);
    assert_eq!((unchanged.body.len(), unchanged.header("etag")), (0, Some(etag)));
    with(format!("If-Modified-Since: {modified}\r\n")).expect(304);
    with("If-None-Match: \"other\"\r\n".into()).expect(200);
    with("If-Match: \"other\"\r\n".into()).expect(412);
    with("If-Unmodified-Since: Thu, 01 Jan 2015 00:00:00 GMT\r\n".into()).expect(412);
    // A range of what the client no longer has is answered with all of it.
    with("If-Range: \"other\"\r\nRange: bytes=0-1\r\n".into()).expect(200);
}

fn a_changed_file_is_served_at_once(world: &World) {
    let path = world.write("alice", "www/changing.txt", "first");
    // Often enough that it is served from memory if it ever is.
    for _ in 0..20 {
        assert_eq!(world.get("www.test", "/changing.txt").expect(200).text(), "first");
    }
    fs::write(&path, "other").unwrap();
    assert_eq!(world.get("www.test", "/changing.txt").expect(200).text(), "other");
    fs::remove_file(&path).unwrap();
    world.get("www.test", "/changing.txt").expect(404);
}

fn precompressed_files_are_chosen_by_what_the_client_takes(world: &World) {
    world.write("alice", "www/app.js", "plain");
    world.write("alice", "www/app.js.gz", "gzipped");
    world.write("alice", "www/app.js.br", "brotli");
    let accept = |codings: &str| {
        client::get_with(world.http(), "www.test", "/app.js", &format!("Accept-Encoding: {codings}\r\n"))
            .expect(200)
    };
    let is = |answer: Response, text: &str, coding: Option<&str>| {
        assert_eq!((answer.text().as_str(), answer.header("content-encoding")), (text, coding));
        assert!(
            answer.header("vary").is_some_and(|vary| vary.to_ascii_lowercase().contains("accept-encoding"))
        );
        assert!(answer.header("content-type").is_some_and(|kind| kind.contains("javascript")));
    };
    is(accept("gzip"), "gzipped", Some("gzip"));
    is(accept("gzip, br"), "brotli", Some("br"));
    is(accept("br;q=0, gzip;q=0"), "plain", None);
    is(world.get("www.test", "/app.js"), "plain", None);
}

fn a_link_out_of_the_root_leads_nowhere(world: &World) {
    let root = world.home("alice").join("www");
    world.write("alice", ".secret.txt", "beside the root");
    for (name, target) in
        [("passwd", "/etc/passwd"), ("up", "../.secret.txt"), ("magic", "/proc/self/root/etc/passwd")]
    {
        symlink(target, root.join(name)).unwrap();
        let answer = world.get("www.test", &format!("/{name}"));
        assert!(matches!(answer.status, 403 | 404), "/{name}: {answer:?}");
        assert!(!answer.text().contains("root:") && !answer.text().contains("beside"));
    }
    symlink("/etc", root.join("etc")).unwrap();
    assert!(matches!(world.get("www.test", "/etc/passwd").status, 403 | 404));
    // One that stays inside is as good as the file.
    symlink("plain.txt", root.join("same.txt")).unwrap();
    assert_eq!(world.get("www.test", "/same.txt").expect(200).text(), "0123456789");
}

fn dots_in_a_path_lead_nowhere(world: &World) {
    world.write("alice", "outside.txt", "outside");
    for target in [
        "/../outside.txt",
        "/sub/../../outside.txt",
        "/%2e%2e/outside.txt",
        "/..%2foutside.txt",
        "/sub/..%2f..%2foutside.txt",
        "/.%2e/outside.txt",
        "//etc/passwd",
        "/%00/../outside.txt",
        "/..\\outside.txt",
    ] {
        let answer = world.get("www.test", target);
        assert!((400..=404).contains(&answer.status), "{target}: {answer:?}");
        assert!(!answer.text().contains("outside\n") && answer.text() != "outside", "{target}");
    }
}

fn a_directory_is_listed_only_where_asked_for(world: &World) {
    world.write("alice", "www/files/<b>.txt", "x");
    let answer = world.get("www.test", "/files/");
    assert!(matches!(answer.status, 403 | 404), "{answer:?}");
    let listing = world.get("listed.test", "/files/").expect(200).text();
    assert!(
        listing.contains("%3Cb%3E.txt") && listing.contains("&lt;b&gt;.txt") && !listing.contains("<b>.txt")
    );
    assert!(!world.get("listed.test", "/sub/").expect(200).text().contains(".hidden"));
}

fn error_documents_are_the_sites_own(world: &World) {
    let answer = world.get("errors.test", "/nothing-here").expect(404);
    assert_eq!(answer.text(), "<p>our own words</p>");
    let plain = world.get("www.test", "/nothing-here").expect(404).text();
    assert!(plain.contains("NGY0404") && plain.contains("request"), "{plain}");
}

fn a_big_file_arrives_byte_for_byte(world: &World) {
    let content = noise(5_000_003);
    world.write("alice", "www/big.bin", &content);
    let whole = world.get("www.test", "/big.bin").expect(200);
    assert!(whole.body == content, "{} bytes differ", whole.body.len());
    let part = client::get_with(world.http(), "www.test", "/big.bin", "Range: bytes=1000001-4000000\r\n")
        .expect(206);
    assert!(part.body == content[1_000_001..=4_000_000]);
    // A client that reads slowly, and two that share a connection.
    let mut connection = Connection::open(world.http());
    let request = "GET /big.bin HTTP/1.1\r\nHost: www.test\r\n\r\n";
    connection.send(request).send(request);
    assert!(connection.response().body == content && connection.response().body == content);
    let by_curl = machine::output(
        "curl",
        &["-sS", "-H", "Host: www.test", &format!("http://{}/big.bin", world.http())],
    );
    assert!(by_curl.stdout == content, "curl got {} bytes", by_curl.stdout.len());
}

fn head_has_the_fields_of_get_and_no_body(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send(
        "HEAD /plain.txt HTTP/1.1\r\nHost: www.test\r\n\r\nGET /plain.txt HTTP/1.1\r\nHost: www.test\r\n\r\n",
    );
    let head = connection.response_to_head().expect(200);
    let get = connection.response().expect(200);
    assert_eq!(get.text(), "0123456789");
    for name in ["content-length", "content-type", "etag", "last-modified", "accept-ranges"] {
        assert_eq!(head.header(name), get.header(name), "{name}");
    }
}

fn other_methods_are_refused_with_those_allowed(world: &World) {
    let ask = |line: &str| {
        Connection::open(world.http()).send(format!("{line} HTTP/1.1\r\nHost: www.test\r\n\r\n")).response()
    };
    ask("BREW /plain.txt").expect(501);
    let refused = ask("DELETE /plain.txt").expect(405);
    assert!(refused.header("allow").is_some_and(|allow| allow.contains("GET") && allow.contains("HEAD")));
    let options = ask("OPTIONS /plain.txt");
    assert!(matches!(options.status, 200 | 204) && options.header("allow").is_some(), "{options:?}");
    let node = ask("OPTIONS *");
    assert!(matches!(node.status, 200 | 204) && node.header("allow").is_some(), "{node:?}");
}

fn an_unknown_host_is_404(world: &World) {
    let answer = world.get("nobody.test", "/").expect(404);
    assert!(answer.text().contains("NGY0402"), "{}", answer.text());
    // Nothing of the name is remembered: the log has it, and no metric.
    let page = world.admin("/metrics").expect("the admin socket answers");
    assert!(!page.contains("nobody.test"));
}

fn wildcards_and_paths_choose_the_nearest_site(world: &World) {
    assert_eq!(world.get("x.wild.test", "/").expect(200).text(), "any name");
    assert_eq!(world.get("EXACT.wild.test:8080", "/plain.txt").expect(200).text(), "0123456789");
    world.get("wild.test", "/").expect(404);
    assert_eq!(world.get("www.test", "/docs/").expect(200).text(), "the documents");
    // Segments, not letters.
    world.get("www.test", "/docsx").expect(404);
}

fn denied_paths_and_hidden_files_are_not_served(world: &World) {
    for (host, target) in
        [("denied.test", "/errors/404.html"), ("denied.test", "/%65rrors/404.html"), ("www.test", "/.hidden")]
    {
        let answer = world.get(host, target);
        assert!(matches!(answer.status, 403 | 404), "{host}{target}: {answer:?}");
    }
}
