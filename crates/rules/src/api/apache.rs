//! `Apache` as mod_mruby has it.
//!
//! Not here: sub-objects such as `headers_in`, which are Ruby (`prelude/apache.rb`), the constants (`constants`), what
//! is missing and why (`compatibility`).

use crate::facts::{Number, Text};
use crate::native::{Arg, Call, Native, NativeError, Value};
use crate::verdict::{HeaderAction, Level};

use super::complaint::complain;
use super::constants::METHODS;
use super::request::{self, Direction, Given};

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
const LEVELS: [Level; 8] = [
    Level::Error,
    Level::Error,
    Level::Error,
    Level::Error,
    Level::Warning,
    Level::Notice,
    Level::Info,
    Level::Debug,
];

pub const NATIVES: &[Native] = &[
    Native::singleton(APACHE, "return", set_status),
    Native::singleton(APACHE, "errlogger", log),
    Native::singleton(APACHE, "log", log),
    Native::singleton(APACHE, "syslogger", syslog),
    Native::singleton(APACHE, "syslog", syslog),
    Native::singleton(APACHE, "module_name", |_| Ok("nagaya".into())),
    Native::singleton(APACHE, "module_version", |_| Ok(env!("CARGO_PKG_VERSION").into())),
    Native::singleton(APACHE, "server_version", |_| Ok(SERVER_VERSION.into())),
    Native::singleton(APACHE, "get_tid", |_| Ok(Value::Int(0))),
    // The request.
    Native::method(REQUEST, "hostname", |call| request::text(call, Text::Hostname)),
    Native::method(REQUEST, "method", |call| request::text(call, Text::Method)),
    Native::method(REQUEST, "uri", |call| request::text(call, Text::Path)),
    Native::method(REQUEST, "uri=", |call| {
        let path = path(call)?;
        rewrite(call, |rewrites| rewrites.path = path)
    }),
    Native::method(REQUEST, "unparsed_uri", |call| request::text(call, Text::RawTarget)),
    Native::method(REQUEST, "args", |call| request::text(call, Text::Query)),
    Native::method(REQUEST, "args=", |call| {
        let query = request::given(call, "args")?;
        rewrite(call, |rewrites| rewrites.query = query)
    }),
    Native::method(REQUEST, "the_request", |call| request::request_line(call)),
    Native::method(REQUEST, "protocol", |call| request::text(call, Text::Protocol)),
    Native::method(REQUEST, "scheme", |call| request::text(call, Text::Scheme)),
    Native::method(REQUEST, "user", |call| request::text(call, Text::User)),
    Native::method(REQUEST, "user=", |call| {
        let user = request::given(call, "user")?;
        rewrite(call, |rewrites| rewrites.user = user)
    }),
    Native::method(REQUEST, "ap_auth_type", |call| {
        Ok(request::read(call, Text::User).map(|_| Value::from("Basic")).unwrap_or(Value::Nil))
    }),
    Native::method(REQUEST, "filename", |call| request::text(call, Text::Filename)),
    Native::method(REQUEST, "canonical_filename", |call| request::text(call, Text::Filename)),
    Native::method(REQUEST, "filename=", |call| {
        let filename = absolute(call, "filename")?;
        rewrite(call, |rewrites| rewrites.filename = filename)
    }),
    Native::method(REQUEST, "path_info", |call| request::text(call, Text::PathInfo)),
    Native::method(REQUEST, "document_root", |call| request::text(call, Text::DocumentRoot)),
    Native::method(REQUEST, "document_root=", |call| {
        let root = absolute(call, "document_root")?;
        rewrite(call, |rewrites| rewrites.document_root = root)
    }),
    Native::method(REQUEST, "range", |call| Ok(request::field(call, Direction::In, "Range").into())),
    Native::method(REQUEST, "content_type", |call| request::text(call, Text::ContentType)),
    Native::method(REQUEST, "content_type=", |call| {
        let content_type = request::given(call, "content_type")?;
        rewrite(call, |rewrites| rewrites.content_type = content_type)
    }),
    Native::method(REQUEST, "content_encoding", |call| {
        Ok(request::field(call, Direction::Out, "Content-Encoding").into())
    }),
    Native::method(REQUEST, "content_encoding=", |call| {
        let encoding = request::given(call, "content_encoding")?;
        let action = encoding.map_or(HeaderAction::Remove, HeaderAction::Set);
        request::edit_header(call, Direction::Out, "Content-Encoding", action)?;
        Ok(Value::This)
    }),
    Native::method(REQUEST, "status", |call| request::status(call)),
    Native::method(REQUEST, "status=", set_response_status),
    Native::method(REQUEST, "status_line", |call| request::text(call, Text::StatusLine)),
    Native::method(REQUEST, "content_length", |call| request::number(call, Number::BytesOut, 0)),
    Native::method(REQUEST, "vlist_validator", |_| Ok(Value::Nil)),
    Native::method(REQUEST, "handler", |_| Ok(Value::Nil)),
    Native::method(REQUEST, "proxyreq", zero),
    Native::method(REQUEST, "assbackwards", zero),
    Native::method(REQUEST, "header_only", |call| {
        Ok(Value::Int(i64::from(call.facts.text(Text::Method).as_deref() == Some("HEAD"))))
    }),
    Native::method(REQUEST, "proto_num", proto_num),
    Native::method(REQUEST, "method_number", method_number),
    Native::method(REQUEST, "chunked", zero),
    Native::method(REQUEST, "read_body", zero),
    Native::method(REQUEST, "read_chunked", zero),
    Native::method(REQUEST, "used_path_info", zero),
    Native::method(REQUEST, "eos_sent", zero),
    Native::method(REQUEST, "no_cache", zero),
    Native::method(REQUEST, "no_local_copy", zero),
    #[expect(clippy::cast_precision_loss)]
    Native::method(REQUEST, "response_time", |call| Ok(Value::Float(call.facts.elapsed_us() as f64 / 1e6))),
    Native::method(REQUEST, "main?", no),
    Native::method(REQUEST, "sub_request?", no),
    Native::method(REQUEST, "prev?", no),
    Native::method(REQUEST, "internal_redirect?", no),
    Native::method(REQUEST, "next?", no),
    Native::method(REQUEST, "external_redirect?", no),
    Native::method(REQUEST, "error_log", error_log),
    Native::method(REQUEST, "log", error_log),
    // What belongs to it.
    Native::method(NOTES, "[]", |call| {
        call.expect(1, 1)?;
        let name = call.text(0)?;
        Ok(call.verdict.note(name).map(str::to_owned).into())
    }),
    Native::method(NOTES, "[]=", |call| {
        call.expect(2, 2)?;
        call.verdict.set_note(call.text(0)?, call.text(1)?)?;
        Ok(request::echo(call.any(1)))
    }),
    Native::method(HEADERS_IN, "[]", |call| request::header(call, Direction::In)),
    Native::method(HEADERS_IN, "[]=", |call| request::set_header(call, Direction::In)),
    Native::method(HEADERS_IN, "all", |call| request::all_headers(call, Direction::In)),
    Native::method(HEADERS_OUT, "[]", |call| request::header(call, Direction::Out)),
    Native::method(HEADERS_OUT, "[]=", |call| request::set_header(call, Direction::Out)),
    Native::method(HEADERS_OUT, "all", |call| request::all_headers(call, Direction::Out)),
    Native::method(CONNECTION, "remote_ip", |call| request::text(call, Text::ClientIp)),
    Native::method(CONNECTION, "remote_port", |call| request::number(call, Number::ClientPort, 0)),
    Native::method(CONNECTION, "remote_host", |_| Ok(Value::Nil)),
    Native::method(CONNECTION, "remote_logname", |_| Ok(Value::Nil)),
    Native::method(CONNECTION, "local_ip", |call| request::text(call, Text::LocalIp)),
    Native::method(CONNECTION, "local_port", |call| request::number(call, Number::LocalPort, 0)),
    Native::method(CONNECTION, "local_host", |_| Ok(Value::Nil)),
    Native::method(CONNECTION, "keepalives", |call| request::number(call, Number::Keepalives, 0)),
    Native::method(CONNECTION, "data_in_input_filters", zero),
    Native::method(SERVER, "hostname", |call| request::text(call, Text::Hostname)),
    Native::method(SERVER, "document_root", |call| request::text(call, Text::DocumentRoot)),
    Native::method(SERVER, "is_virtual", |_| Ok(Value::Int(1))),
    Native::method(ENV, "[]", variable),
    Native::method(ENV, "[]=", set_variable),
    Native::method(ENV, "all", variables),
    Native::method(SCOREBOARD, "loadavg", |call| {
        Ok(Value::List(call.facts.load().into_iter().map(Value::Float).collect()))
    }),
    Native::method(SCOREBOARD, "busy_worker", |call| request::number(call, Number::Running, 0)),
    Native::method(SCOREBOARD, "idle_worker", |call| request::number(call, Number::SiteFree, 0)),
];

/// What `Server` says.
pub const SERVER_VERSION: &str = concat!("nagaya/", env!("CARGO_PKG_VERSION"));

/// `OK` and `DECLINED`.
const GO_ON: [i64; 2] = [0, -1];

/// `Apache.return(status)`: only says how the request ends; the script goes on.
fn set_status<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let status = call.int(0)?;
    if GO_ON.contains(&status) {
        request::go_on(call);
    } else {
        request::answer_with(call, status)?;
    }
    Ok(Value::This)
}

/// `Apache.log(level, message)`. With another number of arguments upstream logs that instead, and so does this.
fn log<'a>(call: &mut Call<'a>) -> Given<'a> {
    if call.args().len() == 2 {
        request::log(call, &LEVELS)?;
    } else {
        complain(call.facts, call.verdict, "Apache.log takes a level and a text");
    }
    Ok(Value::This)
}

/// `Apache.syslog("err", message)`.
fn syslog<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(2, 2)?;
    let level = match call.text(0)? {
        "emerg" | "alert" | "crit" | "err" => Level::Error,
        "warn" | "warning" => Level::Warning,
        "notice" => Level::Notice,
        "info" => Level::Info,
        "debug" => Level::Debug,
        other => return Err(NativeError::argument(format!("'{other}' is not a level of syslog"))),
    };
    call.verdict.say(level, call.text(1)?);
    Ok(Value::This)
}

fn error_log<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(2, 2)?;
    Ok(request::log(call, &LEVELS)?.into())
}

// === The request ===

fn zero<'a>(_: &mut Call<'a>) -> Given<'a> {
    Ok(Value::Int(0))
}

fn no<'a>(_: &mut Call<'a>) -> Given<'a> {
    Ok(Value::Bool(false))
}

fn rewrite<'a>(call: &mut Call<'a>, edit: impl FnOnce(&mut crate::Rewrites)) -> Given<'a> {
    call.verdict.rewrite(edit);
    Ok(Value::This)
}

fn path(call: &Call<'_>) -> Result<Option<Box<str>>, NativeError> {
    absolute(call, "uri")
}

fn absolute(call: &Call<'_>, what: &'static str) -> Result<Option<Box<str>>, NativeError> {
    let given = request::given(call, what)?;
    match &given {
        Some(path) if !path.starts_with('/') || path.split('/').any(|part| part == "..") => {
            Err(NativeError::argument(format!("{what} begins with '/' and goes through no '..'")))
        }
        _ => Ok(given),
    }
}

fn set_response_status<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let status = call.int(0)?;
    let fits = u16::try_from(status).ok().filter(|status| (200..=599).contains(status));
    let fits = fits.ok_or_else(|| NativeError::argument(format!("{status} is not an HTTP status")))?;
    rewrite(call, |rewrites| rewrites.status = Some(fits))
}

/// 1001 for HTTP/1.1.
fn proto_num<'a>(call: &mut Call<'a>) -> Given<'a> {
    let protocol = call.facts.text(Text::Protocol);
    let version = protocol.as_deref().and_then(|protocol| protocol.strip_prefix("HTTP/")).unwrap_or_default();
    let (major, minor) = version.split_once('.').unwrap_or((version, "0"));
    let number = |text: &str| text.parse::<i64>().unwrap_or(0);
    Ok(Value::Int(number(major) * 1000 + number(minor)))
}

fn method_number<'a>(call: &mut Call<'a>) -> Given<'a> {
    let method = call.facts.text(Text::Method).unwrap_or_default();
    // Apache tells HEAD from GET by `header_only`.
    let method = if method == "HEAD" { "GET" } else { &*method };
    let known = METHODS.iter().position(|name| *name == method).unwrap_or(METHODS.len());
    Ok(Value::Int(i64::try_from(known).unwrap_or_default()))
}

// === Variables of programs ===

fn variable<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let name = call.text(0)?;
    Ok(match call.verdict.env(name) {
        Some(set) => set.map(str::to_owned).into(),
        None => call.facts.env(name).into(),
    })
}

fn set_variable<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(2, 2)?;
    let value = match call.any(1) {
        Arg::Nil => None,
        _ => Some(call.text(1)?),
    };
    call.verdict.set_env(call.text(0)?, value)?;
    Ok(request::echo(call.any(1)))
}

fn variables<'a>(call: &mut Call<'a>) -> Given<'a> {
    let mut all: Vec<(String, String)> = Vec::new();
    call.facts.each_env(&mut |name, value| all.push((name.to_owned(), value.to_owned())));
    for (name, value) in &call.verdict.env {
        all.retain(|(have, _)| **have != **name);
        all.extend(value.as_ref().map(|value| (name.to_string(), value.to_string())));
    }
    Ok(Value::Map(all.into_iter().map(|(name, value)| (name.into(), Value::from(value))).collect()))
}
