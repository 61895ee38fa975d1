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
        ("x-forwarded-for", FieldFate::Restated),
        ("x-forwarded-prefix", FieldFate::Trusted),
        ("cf-connecting-ip", FieldFate::Trusted),
        ("ssl-client-verify", FieldFate::Trusted),
        ("nagaya-peer-anything", FieldFate::Dropped),
        ("x_real_ip", FieldFate::Dropped),
        ("x.real.ip", FieldFate::Dropped),
        ("proxy", FieldFate::Dropped),
        ("via", FieldFate::Continued),
        ("accept", FieldFate::Kept),
        ("x-http-method-override", FieldFate::Kept),
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

impl FieldFate {
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
        "# What happens to a request's header fields\n\n\
         This page is generated from the table in the edge's module `fields`; `./dev docs` writes it.\n\n\
         The table holds for all kinds of backend, and for HTTP/1.1 and HTTP/2. CGI and PHP programs and scripts of applications get a field\n\
         as a variable (`HTTP_...`); servers and applications get it as a field. A trusted proxy is a peer whose address is in\n\
         `trusted_proxies` ([configuration](configuration.md)). Rules run after the table. They may set the fields that only trusted proxies\n\
         may send: fields of a rule are passed on.\n\n\
         | fields | what becomes of them | why |\n|---|---|---|\n",
    );
    for FieldRow { names, fate, why } in TABLE {
        let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(page, "| {} | {} | {why} |", names.join(", "), fate.describe());
    }
    let _ = writeln!(
        page,
        "| any name with a character other than letters, digits and `-` | {} | Many programs confuse it with another name. |",
        FieldFate::Dropped.describe()
    );
    let _ = writeln!(page, "| all others | {} | |", FieldFate::Kept.describe());
    page.push_str(AFTER_TABLE);
    page
}

const AFTER_TABLE: &str = "
`X-HTTP-Method-Override` and similar fields are among the others: applications use them with their own clients.

## What variables say of the client

Variables describe the client to programs, and all of them agree. Behind a trusted proxy they describe the client, not the proxy.

| variable | without a trusted proxy | behind one |
|---|---|---|
| `REMOTE_ADDR` | the peer's address | the nearest address in `X-Forwarded-For` (or `Forwarded`) that is not a trusted proxy |
| `REMOTE_PORT` | the peer's port | the port of that address; not set if there is none |
| `REQUEST_SCHEME`, `HTTPS` | of the connection | `X-Forwarded-Proto`, or `proto` in `Forwarded` |
| `SERVER_NAME` | the requested host | `X-Forwarded-Host`, or `host` in `Forwarded` |
| `SERVER_PORT` | the port of the client's listener | `X-Forwarded-Port`, or the port in `X-Forwarded-Host`, or the scheme's own port if the proxy named the scheme |
| `HTTP_X_FORWARDED_FOR`, `_PROTO`, `_HOST`, `_PORT` | not set | the same facts again: one address, one scheme, one host, one port |
| `HTTP_X_REQUEST_ID`, `HTTP_TRACEPARENT` | the node's id of the request, its trace | the same |

A server always gets `X-Forwarded-*` and `Forwarded`. `X-Forwarded-Port` is the port of the listener, or the value of a trusted proxy.
A list in one of these fields counts from its end: its last element is from the nearest proxy.

## Trailers

Trailers of a request pass only if the site's record names them (`request_trailers`, for the kinds `http` and `app`). They never pass
if the table does not keep them, or if they frame, route or authenticate a request (RFC 9110 section 6.5.1). Programs get none.

## Paths

The routed path is the forwarded path. `.` and `..` are resolved, escapes of letters, digits, `-`, `.`, `_` and `~` are decoded, and
runs of `/` in the site's own path become one. Paths that servers read differently get `400 Bad Request`: malformed escapes, NUL,
`..` above the root, and `.` or `..` beside `%2F`, `\\` or `;` (`/pub/..%2fadmin`, `/pub/..;/admin`). The application reads a `%2F`
elsewhere, other `;parameters`, and later empty segments.

## Methods and protocols

`TRACE` and `CONNECT` get `405 Method Not Allowed`: an application's response to `TRACE` would show the request's credentials.
An `Upgrade` to a version of HTTP (`h2c`) is not passed on, and an application may only switch to a requested protocol.
";
