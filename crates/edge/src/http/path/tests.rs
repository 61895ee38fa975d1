//! What each odd path becomes, and what no path can become.

use proptest::prelude::*;

use super::*;

fn normal(raw: &str) -> Result<String, Refusal> {
    SitePath::parse(raw).map(|path| path.as_str().to_owned())
}

#[test]
fn paths_are_decoded_once_and_resolved() {
    for (raw, expected) in [
        ("/", "/"),
        ("/a/b.html", "/a/b.html"),
        ("/a/", "/a/"),
        ("/a%20b", "/a b"),
        ("/%E9%95%B7%E5%B1%8B", "/長屋"),
        ("/%2561", "/%61"),
        ("/a/./b", "/a/b"),
        ("/a/../b", "/b"),
        ("/a/b/..", "/a/"),
        ("/a/.", "/a/"),
        ("/a/%2e%2E/b", "/b"),
        ("//a///b//", "/a/b/"),
        ("/..a/b..", "/..a/b.."),
        ("/a%2Fb", "/a%2Fb"),
        ("/a%2f...%2Fb", "/a%2F...%2Fb"),
        ("/x/..", "/"),
        ("/+~;=@:", "/+~;=@:"),
    ] {
        assert_eq!(normal(raw).as_deref(), Ok(expected), "{raw}");
    }
}

#[test]
fn path_without_a_clear_meaning_is_a_bad_request() {
    for raw in [
        "",
        "a",
        "*",
        "/%",
        "/%4",
        "/%zz",
        "/%+1",
        "/a%00b",
        "/..",
        "/a/../..",
        "/%2e%2e/etc",
        "/a/../../b",
        "/./..",
        "//..",
        "/a%2f..%2Fb",
        "/pub/..%2fadmin",
        "/pub/%2e%2e%2Fadmin",
        "/pub/..%5cadmin",
        "/pub/..\\admin",
        "/pub/.%2fadmin",
        "/pub/x%2f..",
        "/pub/..;/admin",
        "/pub/..;a=b/admin",
        "/pub/%2e.%3b/admin",
        "/pub/.;/admin",
        "/pub/x%2f..;y",
        "/..%2f..%2fetc",
    ] {
        assert!(matches!(canonical(raw, "/pub"), Err(Refusal::BadRequest(_))), "{raw}");
        assert!(matches!(normal(raw), Err(Refusal::BadRequest(_))), "{raw}");
    }
}

#[test]
fn ambiguous_names_route_but_name_no_file() {
    for raw in ["/a%2Fb", "/a%5cb", "/a\\b", "/%FF", "/x%2f...%2fetc"] {
        let path = SitePath::parse(raw).expect("routes");
        assert_eq!(path.below("/"), Err(Refusal::NotFound), "{raw}");
    }
}

fn canonical(raw: &str, mount: &str) -> Result<String, Refusal> {
    let mut path = raw.into();
    canonicalize(&mut path, mount).map(|()| path.into())
}

#[test]
fn the_canonical_path_is_what_was_routed() {
    for (raw, mount, expected) in [
        ("/", "/", "/"),
        ("//", "/", "/"),
        ("/a/b.html", "/", "/a/b.html"),
        ("/pub/../admin", "/admin", "/admin"),
        ("/pub/%2e%2E/admin/", "/admin", "/admin/"),
        ("/pub/./x/.", "/pub", "/pub/x/"),
        ("/pub/x/..", "/pub", "/pub/"),
        ("/%70ub/%7Ex%2Dy%20z", "/pub", "/pub/~x-y%20z"),
        ("//pub//x", "/pub", "/pub//x"),
        ("/a//b//c//", "/a/b", "/a/b//c//"),
        ("/a//b/../c", "/a/c", "/a/c"),
        ("/fetch/http://example.org/", "/", "/fetch/http://example.org/"),
        ("/fetch//../x", "/", "/x"),
        ("/a%2Fb%2fc", "/", "/a%2Fb%2fc"),
        ("/a;v=1/b;jsessionid=2", "/", "/a;v=1/b;jsessionid=2"),
        ("/%252e%252e/x", "/", "/%252e%252e/x"),
        ("/.well-known/x", "/", "/.well-known/x"),
        ("/a\\b", "/", "/a\\b"),
        ("/%E9%95%b7", "/", "/%E9%95%b7"),
    ] {
        assert_eq!(canonical(raw, mount).as_deref(), Ok(expected), "{raw}");
    }
}

#[test]
fn the_mount_is_taken_off_by_segments() {
    for (raw, mount, expected) in [
        ("/blog", "/blog", Some(("", false))),
        ("/blog/", "/blog", Some(("", true))),
        ("/blog/x", "/blog", Some(("x", false))),
        ("/blog/x/", "/blog/", Some(("x", true))),
        ("/blogger", "/blog", None),
        ("/Blog", "/blog", None),
        ("/a/b/c", "/a/b", Some(("c", false))),
        ("/", "/", Some(("", true))),
        ("/x/y", "/", Some(("x/y", false))),
        ("/%62log/x", "/blog", Some(("x", false))),
        ("/other/../blog//x", "/blog", Some(("x", false))),
    ] {
        let path = SitePath::parse(raw).expect("a valid path");
        let rel = path.below(mount).expect("a file name");
        assert_eq!(rel.map(|rel| (rel.as_str(), rel.is_directory())), expected, "{raw} below {mount}");
    }
}

#[test]
fn a_path_longer_than_the_limit_is_refused() {
    let raw = format!("/{}", "a".repeat(SITE_PATH_LEN_MAX));
    assert!(SitePath::parse(&raw).unwrap().below("/").is_ok());
    let raw = format!("{raw}a");
    assert_eq!(SitePath::parse(&raw).unwrap().below("/"), Err(Refusal::TargetTooLong));
}

#[test]
fn hidden_names_are_found_anywhere_but_well_known_at_the_top() {
    for (raw, hidden) in [
        ("/.git/config", true),
        ("/a/.htaccess", true),
        ("/%2ehtaccess", true),
        ("/a/...", true),
        ("/.well-known/acme-challenge/x", false),
        ("/a/.well-known/x", true),
        ("/.well-known/.x", true),
        ("/a.b/c.", false),
    ] {
        let path = SitePath::parse(raw).unwrap();
        assert_eq!(path.below("/").unwrap().unwrap().is_hidden(), hidden, "{raw}");
    }
}

#[test]
fn prefixes_match_by_segments_and_case() {
    let deny = ["/data", "conf/"];
    for (raw, denied) in [
        ("/data", true),
        ("/data/", true),
        ("//data/x", true),
        ("/x/../data/x", true),
        ("/d%61ta/x", true),
        ("/conf/local.php", true),
        ("/database", false),
        ("/Data", false),
        ("/x/data", false),
    ] {
        let path = SitePath::parse(raw).unwrap();
        let rel = path.below("/").unwrap().unwrap();
        assert_eq!(deny.iter().any(|prefix| matches_prefix(rel.as_str(), prefix)), denied, "{raw}");
    }
    assert!(matches_prefix("/anything", "/"));
}

/// Text that is likely to hit every branch.
fn hostile() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("/"),
        Just("."),
        Just(".."),
        Just("%2e"),
        Just("%2F"),
        Just("%5C"),
        Just("\\"),
        Just("%00"),
        Just("%"),
        Just("a"),
        Just("%c3%a9"),
        Just(";"),
        Just("%61"),
        Just("%ff"),
        Just("é"),
        Just("//"),
        Just("/../"),
        Just("\u{0}"),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| format!("/{}", pieces.concat()))
}

proptest! {
    #[test]
    fn no_result_can_leave_the_root(raw in hostile()) {
        if let Ok(path) = SitePath::parse(&raw) {
            prop_assert!(path.as_str().starts_with('/'));
            prop_assert!(!path.as_str().contains("//"));
            if let Ok(Some(rel)) = path.below("/") {
                prop_assert!(!rel.as_str().starts_with('/') && !rel.as_str().ends_with('/'));
                prop_assert!(!rel.as_str().contains('\0') && !rel.as_str().contains('\\'));
                prop_assert!(rel.as_str().split('/').all(|segment| segment != ".." && segment != "."));
            }
        }
    }

    #[test]
    fn routing_and_forwarding_agree(raw in hostile(), mount in "(/[a-c]{1,2}){0,2}") {
        let routed = SitePath::parse(&raw);
        let forwarded = canonical(&raw, &mount);
        prop_assert_eq!(routed.is_ok(), forwarded.is_ok());
        if let (Ok(routed), Ok(forwarded)) = (routed, forwarded) {
            let again = SitePath::parse(&forwarded).unwrap();
            prop_assert_eq!(again.as_str(), routed.as_str());
            prop_assert_eq!(canonical(&forwarded, &mount).unwrap(), forwarded.as_str());
            prop_assert!(!forwarded.starts_with("//"));
            let plain = forwarded.replace("%2F", "/").replace("%5C", "/").replace('\\', "/");
            prop_assert!(plain.split('/').all(|segment| segment != ".." && segment != "."), "{}", forwarded);
        }
    }

    #[test]
    fn the_fast_way_agrees_with_the_slow_one(raw in "(/[a-zA-Z0-9._~%-]{0,6}){1,6}/?") {
        let slow = PathDecoder::default().run(&raw);
        prop_assert_eq!(SitePath::parse(&raw), slow);
    }
}
