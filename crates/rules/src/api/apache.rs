//! `Apache` with the interface of mod_mruby.
//!
//! Not here: sub-objects such as `headers_in`, which are Ruby (`prelude/apache.rb`), the constants
//! (`constants`), missing methods and the reasons (`compatibility`).

use crate::facts::{NumberFact, TextFact};
use crate::native::{NativeArg, NativeCall, NativeError, NativeMethod, NativeValue};
use crate::verdict::{HeaderAction, LogLevel};

use super::complaint::complain;
use super::constants::METHODS;
use super::request::{self, Given, HeaderDirection};

const APACHE: &str = "Apache";
const REQUEST: &str = "Apache::Request";
const NOTES: &str = "Apache::Notes";
const HEADERS_IN: &str = "Apache::Headers_in";
const HEADERS_OUT: &str = "Apache::Headers_out";
const CONNECTION: &str = "Apache::Connection";
const SERVER: &str = "Apache::Server";
const ENV: &str = "Apache::Env";
const SCOREBOARD: &str = "Apache::Scoreboard";

/// Apache's levels 0 to 7.
const LEVELS: [LogLevel; 8] = [
    LogLevel::Error,
    LogLevel::Error,
    LogLevel::Error,
    LogLevel::Error,
    LogLevel::Warning,
    LogLevel::Notice,
    LogLevel::Info,
    LogLevel::Debug,
];

pub const NATIVES: &[NativeMethod] = &[
    NativeMethod::singleton(APACHE, "return", set_status),
    NativeMethod::singleton(APACHE, "errlogger", log),
    NativeMethod::singleton(APACHE, "log", log),
    NativeMethod::singleton(APACHE, "syslogger", syslog),
    NativeMethod::singleton(APACHE, "syslog", syslog),
    NativeMethod::singleton(APACHE, "module_name", |_| Ok("nagaya".into())),
    NativeMethod::singleton(APACHE, "module_version", |_| Ok(env!("CARGO_PKG_VERSION").into())),
    NativeMethod::singleton(APACHE, "server_version", |_| Ok(SERVER_VERSION.into())),
    NativeMethod::singleton(APACHE, "get_tid", |_| Ok(NativeValue::Int(0))),
    // The request.
    NativeMethod::method(REQUEST, "hostname", |call| request::text(call, TextFact::Hostname)),
    NativeMethod::method(REQUEST, "method", |call| request::text(call, TextFact::Method)),
    NativeMethod::method(REQUEST, "uri", |call| request::text(call, TextFact::Path)),
    NativeMethod::method(REQUEST, "uri=", |call| {
        let path = path(call)?;
        rewrite(call, |rewrites| rewrites.path = path)
    }),
    NativeMethod::method(REQUEST, "unparsed_uri", |call| request::text(call, TextFact::RawTarget)),
    NativeMethod::method(REQUEST, "args", |call| request::text(call, TextFact::Query)),
    NativeMethod::method(REQUEST, "args=", |call| {
        let query = request::given(call, "args")?;
        rewrite(call, |rewrites| rewrites.query = query)
    }),
    NativeMethod::method(REQUEST, "the_request", |call| request::request_line(call)),
    NativeMethod::method(REQUEST, "protocol", |call| request::text(call, TextFact::Protocol)),
    NativeMethod::method(REQUEST, "scheme", |call| request::text(call, TextFact::Scheme)),
    NativeMethod::method(REQUEST, "user", |call| request::text(call, TextFact::User)),
    NativeMethod::method(REQUEST, "user=", |call| {
        let user = request::given(call, "user")?;
        rewrite(call, |rewrites| rewrites.user = user)
    }),
    NativeMethod::method(REQUEST, "ap_auth_type", |call| {
        Ok(request::read(call, TextFact::User)
            .map(|_| NativeValue::from("Basic"))
            .unwrap_or(NativeValue::Nil))
    }),
    NativeMethod::method(REQUEST, "filename", |call| request::text(call, TextFact::Filename)),
    NativeMethod::method(REQUEST, "canonical_filename", |call| request::text(call, TextFact::Filename)),
    NativeMethod::method(REQUEST, "filename=", |call| {
        let filename = absolute(call, "filename")?;
        rewrite(call, |rewrites| rewrites.filename = filename)
    }),
    NativeMethod::method(REQUEST, "path_info", |call| request::text(call, TextFact::PathInfo)),
    NativeMethod::method(REQUEST, "document_root", |call| request::text(call, TextFact::DocumentRoot)),
    NativeMethod::method(REQUEST, "document_root=", |call| {
        let root = absolute(call, "document_root")?;
        rewrite(call, |rewrites| rewrites.document_root = root)
    }),
    NativeMethod::method(REQUEST, "range", |call| {
        Ok(request::field(call, HeaderDirection::In, "Range").into())
    }),
    NativeMethod::method(REQUEST, "content_type", |call| request::text(call, TextFact::ContentType)),
    NativeMethod::method(REQUEST, "content_type=", |call| {
        let content_type = request::given(call, "content_type")?;
        rewrite(call, |rewrites| rewrites.content_type = content_type)
    }),
    NativeMethod::method(REQUEST, "content_encoding", |call| {
        Ok(request::field(call, HeaderDirection::Out, "Content-Encoding").into())
    }),
    NativeMethod::method(REQUEST, "content_encoding=", |call| {
        let encoding = request::given(call, "content_encoding")?;
        let action = encoding.map_or(HeaderAction::Remove, HeaderAction::Set);
        request::edit_header(call, HeaderDirection::Out, "Content-Encoding", action)?;
        Ok(NativeValue::This)
    }),
    NativeMethod::method(REQUEST, "status", |call| request::status(call)),
    NativeMethod::method(REQUEST, "status=", set_response_status),
    NativeMethod::method(REQUEST, "status_line", |call| request::text(call, TextFact::StatusLine)),
    NativeMethod::method(REQUEST, "content_length", |call| request::number(call, NumberFact::BytesOut, 0)),
    NativeMethod::method(REQUEST, "vlist_validator", |_| Ok(NativeValue::Nil)),
    NativeMethod::method(REQUEST, "handler", |_| Ok(NativeValue::Nil)),
    NativeMethod::method(REQUEST, "proxyreq", zero),
    NativeMethod::method(REQUEST, "assbackwards", zero),
    NativeMethod::method(REQUEST, "header_only", |call| {
        Ok(NativeValue::Int(i64::from(call.facts.text(TextFact::Method).as_deref() == Some("HEAD"))))
    }),
    NativeMethod::method(REQUEST, "proto_num", proto_num),
    NativeMethod::method(REQUEST, "method_number", method_number),
    NativeMethod::method(REQUEST, "chunked", zero),
    NativeMethod::method(REQUEST, "read_body", zero),
    NativeMethod::method(REQUEST, "read_chunked", zero),
    NativeMethod::method(REQUEST, "used_path_info", zero),
    NativeMethod::method(REQUEST, "eos_sent", zero),
    NativeMethod::method(REQUEST, "no_cache", zero),
    NativeMethod::method(REQUEST, "no_local_copy", zero),
    #[expect(clippy::cast_precision_loss)]
    NativeMethod::method(REQUEST, "response_time", |call| {
        Ok(NativeValue::Float(call.facts.elapsed_us() as f64 / 1e6))
    }),
    NativeMethod::method(REQUEST, "main?", no),
    NativeMethod::method(REQUEST, "sub_request?", no),
    NativeMethod::method(REQUEST, "prev?", no),
    NativeMethod::method(REQUEST, "internal_redirect?", no),
    NativeMethod::method(REQUEST, "next?", no),
    NativeMethod::method(REQUEST, "external_redirect?", no),
    NativeMethod::method(REQUEST, "error_log", error_log),
    NativeMethod::method(REQUEST, "log", error_log),
    // Its sub-objects.
    NativeMethod::method(NOTES, "[]", |call| {
        call.expect(1, 1)?;
        let name = call.text(0)?;
        Ok(call.verdict.note(name).map(str::to_owned).into())
    }),
    NativeMethod::method(NOTES, "[]=", |call| {
        call.expect(2, 2)?;
        call.verdict.set_note(call.text(0)?, call.text(1)?)?;
        Ok(request::echo(call.any(1)))
    }),
    NativeMethod::method(HEADERS_IN, "[]", |call| request::header(call, HeaderDirection::In)),
    NativeMethod::method(HEADERS_IN, "[]=", |call| request::set_header(call, HeaderDirection::In)),
    NativeMethod::method(HEADERS_IN, "all", |call| request::all_headers(call, HeaderDirection::In)),
    NativeMethod::method(HEADERS_OUT, "[]", |call| request::header(call, HeaderDirection::Out)),
    NativeMethod::method(HEADERS_OUT, "[]=", |call| request::set_header(call, HeaderDirection::Out)),
    NativeMethod::method(HEADERS_OUT, "all", |call| request::all_headers(call, HeaderDirection::Out)),
    NativeMethod::method(CONNECTION, "remote_ip", |call| request::text(call, TextFact::ClientIp)),
    NativeMethod::method(CONNECTION, "remote_port", |call| request::number(call, NumberFact::ClientPort, 0)),
    NativeMethod::method(CONNECTION, "remote_host", |_| Ok(NativeValue::Nil)),
    NativeMethod::method(CONNECTION, "remote_logname", |_| Ok(NativeValue::Nil)),
    NativeMethod::method(CONNECTION, "local_ip", |call| request::text(call, TextFact::LocalIp)),
    NativeMethod::method(CONNECTION, "local_port", |call| request::number(call, NumberFact::LocalPort, 0)),
    NativeMethod::method(CONNECTION, "local_host", |_| Ok(NativeValue::Nil)),
    NativeMethod::method(CONNECTION, "keepalives", |call| request::number(call, NumberFact::Keepalives, 0)),
    NativeMethod::method(CONNECTION, "data_in_input_filters", zero),
    NativeMethod::method(SERVER, "hostname", |call| request::text(call, TextFact::Hostname)),
    NativeMethod::method(SERVER, "document_root", |call| request::text(call, TextFact::DocumentRoot)),
    NativeMethod::method(SERVER, "is_virtual", |_| Ok(NativeValue::Int(1))),
    NativeMethod::method(ENV, "[]", variable),
    NativeMethod::method(ENV, "[]=", set_variable),
    NativeMethod::method(ENV, "all", variables),
    NativeMethod::method(SCOREBOARD, "loadavg", |call| {
        Ok(NativeValue::List(call.facts.load().into_iter().map(NativeValue::Float).collect()))
    }),
    NativeMethod::method(SCOREBOARD, "busy_worker", |call| request::number(call, NumberFact::Running, 0)),
    NativeMethod::method(SCOREBOARD, "idle_worker", |call| request::number(call, NumberFact::SiteFree, 0)),
];

/// Value of `Server`.
pub const SERVER_VERSION: &str = concat!("nagaya/", env!("CARGO_PKG_VERSION"));

/// `OK` and `DECLINED`.
const GO_ON: [i64; 2] = [0, -1];

/// `Apache.return(status)`: sets how the request ends; the script continues.
fn set_status<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let status = call.int(0)?;
    if GO_ON.contains(&status) {
        request::go_on(call);
    } else {
        request::answer_with(call, status)?;
    }
    Ok(NativeValue::This)
}

/// `Apache.log(level, message)`. With another number of arguments upstream logs an error instead,
/// and so does this.
fn log<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    if call.args().len() == 2 {
        request::log(call, &LEVELS)?;
    } else {
        complain(call.facts, call.verdict, "Apache.log takes a level and a text");
    }
    Ok(NativeValue::This)
}

/// `Apache.syslog("err", message)`.
fn syslog<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(2, 2)?;
    let level = match call.text(0)? {
        "emerg" | "alert" | "crit" | "err" => LogLevel::Error,
        "warn" | "warning" => LogLevel::Warning,
        "notice" => LogLevel::Notice,
        "info" => LogLevel::Info,
        "debug" => LogLevel::Debug,
        other => return Err(NativeError::argument(format!("'{other}' is not a level of syslog"))),
    };
    call.verdict.say(level, call.text(1)?);
    Ok(NativeValue::This)
}

fn error_log<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(2, 2)?;
    Ok(request::log(call, &LEVELS)?.into())
}

// === The request ===

fn zero<'a>(_: &mut NativeCall<'a>) -> Given<'a> {
    Ok(NativeValue::Int(0))
}

fn no<'a>(_: &mut NativeCall<'a>) -> Given<'a> {
    Ok(NativeValue::Bool(false))
}

fn rewrite<'a>(call: &mut NativeCall<'a>, edit: impl FnOnce(&mut crate::RequestRewrites)) -> Given<'a> {
    call.verdict.rewrite(edit);
    Ok(NativeValue::This)
}

fn path(call: &NativeCall<'_>) -> Result<Option<Box<str>>, NativeError> {
    absolute(call, "uri")
}

fn absolute(call: &NativeCall<'_>, what: &'static str) -> Result<Option<Box<str>>, NativeError> {
    let given = request::given(call, what)?;
    match &given {
        Some(path) if !path.starts_with('/') || path.split('/').any(|part| part == "..") => {
            Err(NativeError::argument(format!("{what} begins with '/' and goes through no '..'")))
        }
        _ => Ok(given),
    }
}

fn set_response_status<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let status = call.int(0)?;
    let fits = u16::try_from(status).ok().filter(|status| (200..=599).contains(status));
    let fits = fits.ok_or_else(|| NativeError::argument(format!("{status} is not an HTTP status")))?;
    rewrite(call, |rewrites| rewrites.status = Some(fits))
}

/// Returns 1001 for HTTP/1.1.
fn proto_num<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    let protocol = call.facts.text(TextFact::Protocol);
    let version = protocol.as_deref().and_then(|protocol| protocol.strip_prefix("HTTP/")).unwrap_or_default();
    let (major, minor) = version.split_once('.').unwrap_or((version, "0"));
    let number = |text: &str| text.parse::<i64>().unwrap_or(0);
    Ok(NativeValue::Int(number(major) * 1000 + number(minor)))
}

fn method_number<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    let method = call.facts.text(TextFact::Method).unwrap_or_default();
    // Apache separates HEAD from GET by `header_only`.
    let method = if method == "HEAD" { "GET" } else { &*method };
    let known = METHODS.iter().position(|name| *name == method).unwrap_or(METHODS.len());
    Ok(NativeValue::Int(i64::try_from(known).unwrap_or_default()))
}

// === Variables of programs ===

fn variable<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let name = call.text(0)?;
    Ok(match call.verdict.env(name) {
        Some(set) => set.map(str::to_owned).into(),
        None => call.facts.env(name).into(),
    })
}

fn set_variable<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(2, 2)?;
    let value = match call.any(1) {
        NativeArg::Nil => None,
        _ => Some(call.text(1)?),
    };
    call.verdict.set_env(call.text(0)?, value)?;
    Ok(request::echo(call.any(1)))
}

fn variables<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    let mut all: Vec<(String, String)> = Vec::new();
    call.facts.each_env(&mut |name, value| all.push((name.to_owned(), value.to_owned())));
    for (name, value) in &call.verdict.env {
        all.retain(|(have, _)| **have != **name);
        all.extend(value.as_ref().map(|value| (name.to_string(), value.to_string())));
    }
    Ok(NativeValue::Map(
        all.into_iter().map(|(name, value)| (name.into(), NativeValue::from(value))).collect(),
    ))
}
