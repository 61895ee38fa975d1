//! What becomes of each header field of a request on its way to an application: one table for all kinds of backend.
//!
//! The table is about who may say a thing. What identifies the client, or was found out by a proxy in front, counts only
//! from a trusted proxy; what the node says itself is written anew; everything else is the application's own business.
//! `docs/header-fields.md` is made from it. Not here: values (`forward`, `programs::environment`).

use std::collections::HashMap;
use std::sync::LazyLock;

use foldhash::fast::RandomState;

/// What becomes of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It goes on as the client sent it.
    Kept,
    /// It ends at the node, whoever sent it.
    Dropped,
    /// The node writes it, whatever was sent.
    Replaced,
    /// The node writes it and continues what was sent, whoever sent it.
    Continued,
    /// It goes on if a trusted proxy sent it, and ends at the node otherwise.
    Trusted,
    /// The node writes it; what a trusted proxy said is continued, anything else is not.
    Restated,
}

/// Fields with one fate, for one reason. A name that ends with `*` stands for all that begin so.
struct Row {
    names: &'static [&'static str],
    fate: Fate,
    /// For the page.
    #[cfg_attr(not(test), expect(dead_code))]
    why: &'static str,
}

const fn row(fate: Fate, names: &'static [&'static str], why: &'static str) -> Row {
    Row { names, fate, why }
}

/// A name in a row of its own goes before a prefix. All other names are kept.
const TABLE: &[Row] = &[
    row(
        Fate::Restated,
        &["forwarded", "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-forwarded-port"],
        "Who the client is and how it came. A program gets variables instead, and these only behind a trusted proxy.",
    ),
    row(
        Fate::Trusted,
        &[
            "x-forwarded-*",
            "x-original-forwarded-for",
            "x-real-ip",
            "x-real-port",
            "x-client-ip",
            "x-remote-ip",
            "x-remote-addr",
            "x-originating-ip",
            "x-cluster-client-ip",
            "x-proxyuser-ip",
            "x-nf-client-connection-ip",
            "client-ip",
            "true-client-ip",
            "remote-addr",
            "remote-host",
            "proxy-client-ip",
            "wl-proxy-client-ip",
            "do-connecting-ip",
            "fly-client-ip",
            "fastly-client-ip",
            "incap-client-ip",
            "x-envoy-*",
            "x-azure-*",
            "x-arr-*",
            "x-appengine-*",
            "cf-*",
            "cloudfront-*",
        ],
        "The client's address, and what proxies and delivery networks found out about it.",
    ),
    row(
        Fate::Trusted,
        &["front-end-https", "x-scheme", "x-url-scheme", "x-https", "https", "x-ssl"],
        "The scheme the client used.",
    ),
    row(
        Fate::Trusted,
        &[
            "x-original-url",
            "x-original-uri",
            "x-original-host",
            "x-original-method",
            "x-rewrite-url",
            "x-host",
            "x-http-host-override",
            "x-script-name",
            "script-name",
            "path-info",
            "x-sendfile-type",
            "x-accel-*",
        ],
        "Another target than the one that was routed, and files for a proxy to send.",
    ),
    row(
        Fate::Trusted,
        &[
            "ssl-*",
            "x-ssl-*",
            "x-client-cert*",
            "x-client-dn",
            "x-client-verify",
            "x-tls-*",
            "client-cert",
            "client-cert-chain",
        ],
        "A client's certificate, as the proxy that checked it tells it (RFC 9440).",
    ),
    row(
        Fate::Trusted,
        &[
            "remote-user",
            "remote-ident",
            "auth-user",
            "auth-type",
            "x-remote-*",
            "x-authenticated-*",
            "x-auth-request-*",
            "x-webauth-*",
            "x-wp-remote-user",
            "x-amzn-oidc-*",
            "x-goog-iap-*",
            "x-goog-authenticated-user-*",
            "x-ms-client-principal*",
        ],
        "A user, as the proxy that checked the login tells it.",
    ),
    row(
        Fate::Continued,
        &["via", "traceparent", "tracestate"],
        "The request's way. A server gets the node's own entry added; a program gets Via as it came.",
    ),
    row(Fate::Replaced, &["x-request-id"], "The node's own number of the request, which is in its log."),
    row(
        Fate::Replaced,
        &["host", "content-length", "transfer-encoding"],
        "Read once by the node, checked, and written by it.",
    ),
    row(
        Fate::Dropped,
        &[
            "connection",
            "keep-alive",
            "te",
            "trailer",
            "upgrade",
            "http2-settings",
            "expect",
            "proxy-connection",
            "proxy-authorization",
            "proxy-authenticate",
        ],
        "Of the client's own connection (RFC 9110 section 7.6.1). A protocol that a client asks to switch to is \
         offered anew, but for another version of HTTP.",
    ),
    row(
        Fate::Dropped,
        &["proxy"],
        "No field of HTTP. It would become HTTP_PROXY, by which programs choose a proxy (CVE-2016-5385).",
    ),
    row(Fate::Dropped, &["redirect-*"], "Apache's own marks of a request that it redirects inside."),
    row(Fate::Dropped, &["nagaya-peer-*"], "What nodes of a cluster say to each other."),
];

struct Fates {
    names: HashMap<&'static str, Fate, RandomState>,
    prefixes: Vec<(&'static str, Fate)>,
}

static FATES: LazyLock<Fates> = LazyLock::new(|| {
    let mut fates = Fates { names: HashMap::default(), prefixes: Vec::new() };
    for row in TABLE {
        for name in row.names {
            match name.strip_suffix('*') {
                Some(prefix) => fates.prefixes.push((prefix, row.fate)),
                None => drop(fates.names.insert(name, row.fate)),
            }
        }
    }
    fates
});

/// What becomes of the field `name`, which is in lower case.
pub fn fate(name: &str) -> Fate {
    // To a program that talks CGI or WSGI, `X_Real_IP` and `X-Real-IP` are one variable, and PHP takes `.` for `_` too: a
    // client could say what only a proxy may.
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        return Fate::Dropped;
    }
    if let Some(fate) = FATES.names.get(name) {
        return *fate;
    }
    let prefix = FATES.prefixes.iter().find(|(prefix, _)| name.starts_with(prefix));
    prefix.map_or(Fate::Kept, |(_, fate)| *fate)
}

/// Whether the field ends where it came in, before rules and applications see it.
pub(super) fn is_claim(name: &str, trusted: bool) -> bool {
    match fate(name) {
        Fate::Kept | Fate::Replaced | Fate::Continued => false,
        Fate::Dropped => true,
        Fate::Trusted | Fate::Restated => !trusted,
    }
}

#[cfg(test)]
mod tests;
