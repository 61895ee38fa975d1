//! The table of fates, and the page that is made from it.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs;

use super::*;

#[test]
fn each_name_has_one_fate() {
    let mut seen = HashSet::new();
    for name in TABLE.iter().flat_map(|row| row.names) {
        assert!(seen.insert(name), "{name} is in the table twice");
        assert_eq!(*name, name.to_ascii_lowercase());
    }
    for (name, expected) in [
        ("x-forwarded-for", Fate::Restated),
        ("x-forwarded-prefix", Fate::Trusted),
        ("cf-connecting-ip", Fate::Trusted),
        ("ssl-client-verify", Fate::Trusted),
        ("nagaya-peer-anything", Fate::Dropped),
        ("x_real_ip", Fate::Dropped),
        ("x.real.ip", Fate::Dropped),
        ("proxy", Fate::Dropped),
        ("via", Fate::Continued),
        ("accept", Fate::Kept),
        ("x-http-method-override", Fate::Kept),
    ] {
        assert_eq!(fate(name), expected, "{name}");
    }
}

#[test]
fn the_page_is_what_the_table_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/header-fields.md");
    let page = page();
    if std::env::var_os("NAGAYA_WRITE_DOCS").is_some() {
        fs::write(path, &page).unwrap();
    }
    let stored = fs::read_to_string(path).unwrap_or_default();
    assert!(stored == page, "docs/header-fields.md is out of step: run `./dev docs`");
}

impl Fate {
    fn describe(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Dropped => "dropped",
            Self::Replaced => "replaced",
            Self::Continued => "continued",
            Self::Trusted => "kept from a trusted proxy only",
            Self::Restated => "replaced; continued from a trusted proxy",
        }
    }
}

/// The table as a page of the documentation.
fn page() -> String {
    let mut page = String::from(
        "# What applications are told of a request's header fields\n\n\
         This page is made from the table in `crates/edge/src/forward/fields.rs`; `./dev docs` writes it.\n\n\
         The table holds for all kinds of backend: CGI and PHP programs and scripts of applications get a field as a variable\n\
         (`HTTP_...`), servers and applications as a field. It holds for HTTP/1.1 and HTTP/2. A trusted proxy is a peer\n\
         whose address is in `trusted_proxies` ([configuration](configuration.md)). Rules see what is left after it, and may set\n\
         fields that are kept from trusted proxies: what a rule sets is passed on.\n\n\
         | fields | what becomes of them | why |\n|---|---|---|\n",
    );
    for Row { names, fate, why } in TABLE {
        let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(page, "| {} | {} | {why} |", names.join(", "), fate.describe());
    }
    let _ = writeln!(
        page,
        "| any name with a character other than letters, digits and `-` | {} | To many programs it is the same as another name. |",
        Fate::Dropped.describe()
    );
    let _ = writeln!(page, "| all others | {} | |", Fate::Kept.describe());
    page.push_str(AFTER_TABLE);
    page
}

const AFTER_TABLE: &str = "
`X-HTTP-Method-Override` and its like are among the others: applications use them with their own clients.

## What variables say of the client

Programs are told who the client is by variables, and all of them agree. Behind a trusted proxy they are the client's, not
the proxy's.

| variable | without a trusted proxy | behind one |
|---|---|---|
| `REMOTE_ADDR` | the peer's address | the nearest address in `X-Forwarded-For` (or `Forwarded`) that is no trusted proxy |
| `REMOTE_PORT` | the peer's port | the port beside that address; not set if there is none |
| `REQUEST_SCHEME`, `HTTPS` | of the connection | `X-Forwarded-Proto`, or `proto` in `Forwarded` |
| `SERVER_NAME` | the host that was asked for | `X-Forwarded-Host`, or `host` in `Forwarded` |
| `SERVER_PORT` | the port of the listener the client came to | `X-Forwarded-Port`, or the port in `X-Forwarded-Host`, or the scheme's own port if the scheme was told |
| `HTTP_X_FORWARDED_FOR`, `_PROTO`, `_HOST`, `_PORT` | not set | the same facts once more: one address, one scheme, one host, one port |
| `HTTP_X_REQUEST_ID`, `HTTP_TRACEPARENT` | the node's number of the request, its trace | the same |

A server gets `X-Forwarded-*` and `Forwarded` always. `X-Forwarded-Port` is the port of the listener, or what a trusted proxy
said. A list in one of these fields counts from its end: its last element is what the nearest proxy said.

## Trailers

Fields behind a request's body go on only if the site's record names them (`request_trailers`, for the kinds `http` and `app`), and
never if the table does not keep them, or if they frame, route or authenticate a request (RFC 9110 section 6.5.1). Programs get none.

## Paths

The path that is routed is the path that is passed on. `.` and `..` are resolved, escapes of letters, digits, `-`, `.`, `_` and `~` are
decoded, and runs of `/` in the site's own path become one. Paths that servers read differently are `400 Bad Request`: malformed
escapes, NUL, `..` above the root, and `.` or `..` beside `%2F`, `\\` or `;` (`/pub/..%2fadmin`, `/pub/..;/admin`). A `%2F` elsewhere, other
`;parameters`, and empty segments further in are the application's to read.

## Methods and protocols

`TRACE` and `CONNECT` are `405 Method Not Allowed`: an application's answer to `TRACE` would show the request's credentials.
An `Upgrade` to a version of HTTP (`h2c`) is not passed on, and an application may only switch to a protocol that was asked for.
";
