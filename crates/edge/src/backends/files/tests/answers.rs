//! Status, headers and bodies of what is served.

use super::*;

#[test]
fn a_file_comes_with_type_length_and_validators() {
    let world = World::new();
    for (name, content, media_type) in [
        ("a.html", "<p>é", "text/html; charset=utf-8"),
        ("a.css", "b{}", "text/css; charset=utf-8"),
        ("a.js", "1", "text/javascript; charset=utf-8"),
        ("a.json", "1", "application/json"),
        ("a.svg", "<svg/>", "image/svg+xml"),
        ("a.png", "x", "image/png"),
        ("a.PNG", "x", "image/png"),
        ("README", "x", "application/octet-stream"),
        ("a.unknown-ending", "x", "application/octet-stream"),
        ("empty.txt", "", "text/plain; charset=utf-8"),
    ] {
        world.write(name, content);
        // The first is read from disk, the second from memory.
        for _ in 0..2 {
            let answer = world.get(&format!("/{name}"));
            assert_eq!((answer.status, answer.text()), (200, content), "{name}");
            assert_eq!(answer.header("content-type"), media_type, "{name}");
            assert_eq!(answer.header("accept-ranges"), "bytes");
            assert!(answer.header("etag").starts_with('"'));
            assert!(answer.header("last-modified").ends_with(" GMT"));
            assert_eq!(answer.header("vary"), "");
        }
    }
}

#[test]
fn a_page_that_is_not_utf8_keeps_its_own_charset() {
    let world = World::new();
    world.write("sjis.html", b"<meta charset=shift_jis>\x92\xb7\x89\xae");
    assert_eq!(world.get("/sjis.html").header("content-type"), "text/html");
    let mut long = "é".repeat(40_000).into_bytes();
    // The look at the beginning ends in the middle of a character.
    long.insert(0, b'x');
    world.write("long.html", long);
    assert_eq!(world.get("/long.html").header("content-type"), "text/html; charset=utf-8");
}

#[test]
fn methods_other_than_get_head_and_options_are_refused() {
    let world = World::new();
    world.write("a.txt", "x");
    let head = world.ask(Method::HEAD, "/a.txt", &[]).unwrap();
    assert_eq!((head.status, head.text()), (200, "x"));
    let options = world.ask(Method::OPTIONS, "/a.txt", &[]).unwrap();
    assert_eq!((options.status, options.header("allow")), (204, ALLOWED));
    for method in [Method::POST, Method::PUT, Method::DELETE, Method::TRACE, Method::CONNECT, Method::PATCH] {
        assert_eq!(world.ask(method, "/a.txt", &[]).err(), Some(Refusal::MethodNotAllowed(ALLOWED)));
    }
}

#[test]
fn a_directory_without_slash_is_redirected_within_the_site() {
    let mut world = World::new();
    for name in ["dir/x", "evil.example/x", "a:b/x", "a b?/x", "長屋/x"] {
        world.write(name, "x");
    }
    for (target, location) in [
        ("/dir", "/dir/"),
        ("/dir?a=b&c", "/dir/?a=b&c"),
        ("//evil.example", "/evil.example/"),
        ("///evil.example?x", "/evil.example/?x"),
        ("/x/../evil.example", "/evil.example/"),
        ("/a:b", "/a:b/"),
        ("/a%20b%3F", "/a%20b%3F/"),
        ("/%E9%95%B7%E5%B1%8B", "/%E9%95%B7%E5%B1%8B/"),
    ] {
        let answer = world.get(target);
        assert_eq!((answer.status, answer.header("location")), (301, location), "{target}");
    }
    world.mount = "/blog";
    for (target, location) in [("/blog", "/blog/"), ("/blog/dir", "/blog/dir/")] {
        let answer = world.get(target);
        assert_eq!((answer.status, answer.header("location")), (301, location), "{target}");
    }
}

#[test]
fn a_directory_is_its_first_index_or_forbidden() {
    let mut world = World::new();
    world.write("dir/x", "x");
    world.write("a/index.html", "a");
    world.write("a/second", "second");
    assert!(matches!(world.refusal("/dir/"), Refusal::Forbidden(_)));
    assert_eq!(world.get("/a/").text(), "a");
    assert_eq!(world.get("/a/").header("content-type"), "text/html; charset=utf-8");
    world.files.index = vec!["first".into(), "second".into()];
    assert_eq!(world.get("/a/").text(), "second");
    for target in ["/none", "/none/", "/dir/x/", "/dir/x/y"] {
        assert_eq!(world.refusal(target), Refusal::NotFound, "{target}");
    }
}

#[test]
fn a_listing_escapes_names_and_leaves_out_what_is_not_served() {
    let mut world = World::new();
    world.files.listing = true;
    world.files.deny = vec!["/dir/denied".into()];
    for name in ["<script>&'\".txt", "javascript:x", ".hidden", "denied/x", "zzz/x", "a b#c", "back\\slash"] {
        world.write(&format!("dir/{name}"), "12345");
    }
    let answer = world.get("/dir/");
    let page = answer.text();
    assert_eq!(answer.header("content-type"), "text/html; charset=utf-8");
    assert_eq!(answer.header("x-content-type-options"), "nosniff");
    assert!(page.contains(
        "<a href=\"./%3Cscript%3E&amp;&#39;%22.txt\">&lt;script&gt;&amp;&#39;&quot;.txt</a><td>5<td>"
    ));
    assert!(
        page.contains("<a href=\"./javascript:x\">") && page.contains("<a href=\"./a%20b%23c\">a b#c</a>")
    );
    assert!(page.contains("<a href=\"../\">"));
    assert!(page.find("./zzz/").unwrap() < page.find("./a%20b").unwrap(), "directories come first");
    for absent in ["<script", "hidden", "denied", "slash"] {
        assert!(!page.contains(absent), "{absent}");
    }
    assert!(!world.get("/").text().contains("../"), "the root has no parent");
}

#[test]
fn conditions_are_answered_with_304_and_412() {
    let mut world = World::new();
    world.files.cache_control = Some("max-age=5".into());
    world.write("a.txt", "x");
    let full = world.get("/a.txt");
    let (etag, date) = (full.header("etag"), full.header("last-modified"));
    for field in [("if-none-match", etag), ("if-modified-since", date)] {
        let answer = world.get_with("/a.txt", &[field]);
        assert_eq!((answer.status, answer.body.len()), (304, 0), "{field:?}");
        assert_eq!((answer.header("etag"), answer.header("cache-control")), (etag, "max-age=5"));
        assert_eq!(answer.header("content-type"), "");
    }
    assert_eq!(world.get_with("/a.txt", &[("if-match", "\"other\"")]).status, 412);
    assert_eq!(world.get_with("/a.txt", &[("if-match", etag), ("if-none-match", "\"other\"")]).status, 200);
}

/// Digits, so that each byte says where it is.
fn digits(count: usize) -> Vec<u8> {
    (0..count).map(|at| b'0' + (at % 10) as u8).collect()
}

#[test]
fn ranges_are_cut_from_small_and_large_files() {
    let world = World::new();
    for size in [1000, 200_000] {
        let content = digits(size);
        world.write("a.bin", &content);
        let one = world.get_with("/a.bin", &[("range", "bytes=3-6")]);
        assert_eq!((one.status, one.text()), (206, "3456"));
        assert_eq!(one.header("content-range"), format!("bytes 3-6/{size}"));
        assert_eq!(one.header("content-type"), "application/octet-stream");
        let last = world.get_with("/a.bin", &[("range", "bytes=-2")]);
        assert_eq!((last.status, last.text()), (206, "89"));
        let none = world.get_with("/a.bin", &[("range", "bytes=200000-")]);
        assert_eq!((none.status, none.body.len()), (416, 0));
        assert_eq!(none.header("content-range"), format!("bytes */{size}"));
        let whole = world.get_with("/a.bin", &[("range", "bytes=0-")]);
        assert_eq!((whole.status, &whole.body), (206, &content));
        assert_eq!(whole.header("content-range"), format!("bytes 0-{}/{size}", size - 1));
        assert_eq!(world.get_with("/a.bin", &[("range", "bytes=nonsense")]).body, content);
        let head = world.ask(Method::HEAD, "/a.bin", &[("range", "bytes=0-1")]).unwrap();
        assert_eq!((head.status, head.body.len()), (200, size));
    }
}

#[test]
fn several_ranges_come_as_multipart() {
    let world = World::new();
    for size in [1000, 200_000] {
        world.write("a.txt", digits(size));
        let answer = world.get_with("/a.txt", &[("range", "bytes=500-502,0-1,-1")]);
        let boundary =
            answer.header("content-type").strip_prefix("multipart/byteranges; boundary=").expect("multipart");
        let part = |range: &str, content: &str| {
            format!(
                "--{boundary}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Range: bytes {range}/{size}\r\n\r\n\
                 {content}\r\n"
            )
        };
        let last = format!("{0}-{0}", size - 1);
        let expected =
            [part("500-502", "012"), part("0-1", "01"), part(&last, "9"), format!("--{boundary}--\r\n")]
                .concat();
        assert_eq!((answer.status, answer.text()), (206, expected.as_str()));
        assert_eq!(answer.header("content-range"), "");
    }
}

#[test]
fn if_range_gives_the_part_only_of_the_same_file() {
    let world = World::new();
    world.write("a.txt", "0123456789");
    let etag = world.get("/a.txt").header("etag").to_owned();
    let range = ("range", "bytes=1-2");
    assert_eq!(world.get_with("/a.txt", &[range, ("if-range", &etag)]).text(), "12");
    assert_eq!(world.get_with("/a.txt", &[range, ("if-range", "\"other\"")]).text(), "0123456789");
}

#[test]
fn a_precompressed_sibling_is_sent_to_who_accepts_it() {
    let world = World::new();
    world.write("a.html", "plain");
    world.write("a.html.gz", "gzipped");
    world.write("a.html.br", "brotli");
    world.write("only.html.gz", "gzipped");
    let mut tags = Vec::new();
    for (accept, coding, body) in [
        ("", "", "plain"),
        ("gzip", "gzip", "gzipped"),
        ("gzip, br", "br", "brotli"),
        ("zstd", "", "plain"),
        ("br;q=0.1, gzip;q=0.2", "gzip", "gzipped"),
    ] {
        let answer = world.get_with("/a.html", &[("accept-encoding", accept)]);
        assert_eq!((answer.text(), answer.header("content-encoding")), (body, coding), "{accept}");
        assert_eq!(answer.header("vary"), "accept-encoding");
        assert_eq!(answer.header("content-type"), "text/html; charset=utf-8");
        tags.push(answer.header("etag").to_owned());
    }
    tags.sort();
    tags.dedup();
    assert_eq!(tags.len(), 3, "each coding has its own tag");
    let gzip = ("accept-encoding", "gzip");
    let part = world.get_with("/a.html", &[gzip, ("range", "bytes=0-1")]);
    assert_eq!((part.text(), part.header("content-encoding")), ("gz", "gzip"));
    let etag = world.get_with("/a.html", &[gzip]).header("etag").to_owned();
    let same = world.get_with("/a.html", &[gzip, ("if-none-match", &etag)]);
    assert_eq!((same.status, same.header("vary")), (304, "accept-encoding"));
    // Asked for by its own name it is just a file; without the plain file there is nothing to stand for.
    let raw = world.get_with("/a.html.gz", &[gzip]);
    assert_eq!((raw.header("content-encoding"), raw.header("content-type")), ("", "application/gzip"));
    assert_eq!(world.refusal("/only.html"), Refusal::NotFound);
}

#[test]
fn a_sibling_older_than_its_file_is_not_sent() {
    let world = World::new();
    world.write("a.html", "plain");
    let sibling = world.write("a.html.gz", "old");
    fs::File::open(sibling).unwrap().set_modified(SystemTime::now() - LATER).unwrap();
    let answer = world.get_with("/a.html", &[("accept-encoding", "gzip")]);
    assert_eq!((answer.text(), answer.header("vary")), ("plain", ""));
}

#[test]
fn a_date_in_the_future_is_not_sent() {
    let world = World::now();
    let path = world.write("a.txt", "x");
    fs::File::open(path).unwrap().set_modified(SystemTime::now() + LATER).unwrap();
    assert_eq!(world.get("/a.txt").header("last-modified"), "");
}

#[test]
fn an_error_document_is_the_sites_own_file() {
    let mut world = World::new();
    world.write("errors/404.html", "not here");
    let documents = [("404", "/errors/404.html"), ("403", "missing.html"), ("500", "../../etc/passwd")];
    world.files.error_documents =
        documents.into_iter().map(|(status, path)| (status.into(), path.into())).collect();
    let document = |status| now_or_later(world.server.error_document(&world.root, &world.files, status));
    let found = document(StatusCode::NOT_FOUND).expect("a document");
    assert_eq!(found.content_type, "text/html; charset=utf-8");
    assert_eq!(collect(found.body), b"not here");
    assert!(document(StatusCode::FORBIDDEN).is_none());
    assert!(document(StatusCode::INTERNAL_SERVER_ERROR).is_none());
    assert!(document(StatusCode::BAD_GATEWAY).is_none());
}

#[test]
fn a_cache_control_that_is_no_header_value_is_the_sites_fault() {
    let mut world = World::new();
    world.write("a.txt", "x");
    world.files.cache_control = Some("a\r\nSet-Cookie: b".into());
    assert!(matches!(world.refusal("/a.txt"), Refusal::SiteBroken(_)));
}
