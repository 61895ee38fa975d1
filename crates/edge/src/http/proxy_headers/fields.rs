//! Decides about each header field of a request to an application, by one table for all kinds of
//! backend.
//!
//! The table says which senders may set a field. Fields that identify the client, or that a proxy
//! in front determined, count only from a trusted proxy. The node replaces the fields that it sets
//! itself. Everything else is the application's own business. `docs/header-fields.md` is made from
//! it. Not here: values (`proxy_headers`, `programs::environment`).

use std::collections::HashMap;
use std::sync::LazyLock;

use foldhash::fast::RandomState;

/// Treatment of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldFate {
    /// It is forwarded as the client sent it.
    Kept,
    /// The node drops it from any sender.
    Dropped,
    /// The node writes it, whatever was sent.
    Replaced,
    /// The node writes it and continues the sent value, from any sender.
    Continued,
    /// It is forwarded if a trusted proxy sent it, and dropped otherwise.
    Trusted,
    /// The node writes it. It continues the value of a trusted proxy, and no other.
    Restated,
}

/// Fields with one treatment, for one reason. A name that ends with `*` is a prefix.
struct FieldRow {
    names: &'static [&'static str],
    fate: FieldFate,
    /// For the page.
    #[cfg_attr(not(test), expect(dead_code))]
    why: &'static str,
}

const fn row(fate: FieldFate, names: &'static [&'static str], why: &'static str) -> FieldRow {
    FieldRow { names, fate, why }
}

/// A row with the full name goes before a prefix. All other names are kept.
const TABLE: &[FieldRow] = &[
    row(
        FieldFate::Restated,
        &["forwarded", "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-forwarded-port"],
        "The client's identity and connection. A program gets variables instead, and these only behind a trusted proxy.",
    ),
    row(
        FieldFate::Trusted,
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
        "The client's address, and facts about it from proxies and delivery networks.",
    ),
    row(
        FieldFate::Trusted,
        &["front-end-https", "x-scheme", "x-url-scheme", "x-https", "https", "x-ssl"],
        "The scheme the client used.",
    ),
    row(
        FieldFate::Trusted,
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
        "Another target than the routed one, and files that a proxy must send.",
    ),
    row(
        FieldFate::Trusted,
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
        "A client's certificate, as reported by the proxy that checked it (RFC 9440).",
    ),
    row(
        FieldFate::Trusted,
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
        "A user, as reported by the proxy that checked the login.",
    ),
    row(
        FieldFate::Continued,
        &["via", "traceparent", "tracestate"],
        "The request's path. A server gets the node's own entry added; a program gets Via unchanged.",
    ),
    row(FieldFate::Replaced, &["x-request-id"], "The node's own id of the request, which is in its log."),
    row(
        FieldFate::Replaced,
        &["host", "content-length", "transfer-encoding"],
        "The node reads, checks and writes them.",
    ),
    row(
        FieldFate::Dropped,
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
        "They belong to the client's own connection (RFC 9110 section 7.6.1). A requested protocol switch is offered \
         again, except to another version of HTTP.",
    ),
    row(
        FieldFate::Dropped,
        &["proxy"],
        "Not a field of HTTP. It would become HTTP_PROXY, with which programs choose a proxy (CVE-2016-5385).",
    ),
    row(FieldFate::Dropped, &["redirect-*"], "Apache marks internal redirects with them."),
    row(FieldFate::Dropped, &["nagaya-peer-*"], "Nodes of a cluster use them among each other."),
];

struct FieldFates {
    names: HashMap<&'static str, FieldFate, RandomState>,
    prefixes: Vec<(&'static str, FieldFate)>,
}

static FATES: LazyLock<FieldFates> = LazyLock::new(|| {
    let mut fates = FieldFates { names: HashMap::default(), prefixes: Vec::new() };
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

/// Returns the treatment of the field `name`, which is in lower case.
pub fn fate(name: &str) -> FieldFate {
    // For a program that uses CGI or WSGI, `X_Real_IP` and `X-Real-IP` are one variable. PHP
    // takes `.` for `_`, too. So a client could send a field that only a proxy may.
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        return FieldFate::Dropped;
    }
    if let Some(fate) = FATES.names.get(name) {
        return *fate;
    }
    let prefix = FATES.prefixes.iter().find(|(prefix, _)| name.starts_with(prefix));
    prefix.map_or(FieldFate::Kept, |(_, fate)| *fate)
}

/// Returns whether the field is dropped on arrival, before rules and applications see it.
pub(super) fn is_claim(name: &str, trusted: bool) -> bool {
    match fate(name) {
        FieldFate::Kept | FieldFate::Replaced | FieldFate::Continued => false,
        FieldFate::Dropped => true,
        FieldFate::Trusted | FieldFate::Restated => !trusted,
    }
}

#[cfg(test)]
mod tests;
