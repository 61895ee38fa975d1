//! `Nginx` with the interface of ngx_mruby, for requests and their headers.
//!
//! Not here: parts that are Ruby upstream, too (`prelude/nginx.rb`), missing methods and the
//! reasons (`compatibility`).

use crate::facts::{NumberFact, TextFact};
use crate::native::{NativeCall, NativeError, NativeMethod, NativeValue};
use crate::verdict::LogLevel;

use super::request::{self, Given, HeaderDirection};

const NGINX: &str = "Nginx";
const REQUEST: &str = "Nginx::Request";
const HEADERS_IN: &str = "Nginx::Headers_in";
const HEADERS_OUT: &str = "Nginx::Headers_out";
const CONNECTION: &str = "Nginx::Connection";
const SERVER: &str = "Nginx::Server";
const VAR: &str = "Nginx::Var";

/// nginx's levels 0 to 8.
const LEVELS: [LogLevel; 9] = [
    LogLevel::Error,
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
    NativeMethod::singleton(NGINX, "return", set_status),
    NativeMethod::singleton(NGINX, "send_header", set_status),
    NativeMethod::singleton(NGINX, "status_code=", set_status),
    NativeMethod::singleton(NGINX, "log", log),
    NativeMethod::singleton(NGINX, "errlogger", log),
    NativeMethod::singleton(NGINX, "module_name", |_| Ok("nagaya".into())),
    NativeMethod::singleton(NGINX, "module_version", |_| Ok(env!("CARGO_PKG_VERSION").into())),
    NativeMethod::singleton(NGINX, "nginx_version", |_| Ok(super::apache::SERVER_VERSION.into())),
    NativeMethod::singleton(NGINX, "server_version", |_| Ok(super::apache::SERVER_VERSION.into())),
    NativeMethod::singleton(NGINX, "redirect", redirect),
    NativeMethod::method(REQUEST, "request_line", |call| request::request_line(call)),
    NativeMethod::method(REQUEST, "uri", |call| request::text(call, TextFact::Path)),
    NativeMethod::method(REQUEST, "unparsed_uri", |call| request::text(call, TextFact::RawTarget)),
    NativeMethod::method(REQUEST, "method", |call| request::text(call, TextFact::Method)),
    NativeMethod::method(REQUEST, "protocol", |call| request::text(call, TextFact::Protocol)),
    NativeMethod::method(REQUEST, "args", |call| request::text(call, TextFact::Query)),
    NativeMethod::method(REQUEST, "scheme", |call| request::text(call, TextFact::Scheme)),
    NativeMethod::method(REQUEST, "hostname", |call| request::text(call, TextFact::Hostname)),
    NativeMethod::method(REQUEST, "authority", |call| request::text(call, TextFact::Authority)),
    NativeMethod::method(REQUEST, "filename", |call| request::text(call, TextFact::Filename)),
    NativeMethod::method(REQUEST, "document_root", |call| request::text(call, TextFact::DocumentRoot)),
    NativeMethod::method(REQUEST, "user", |call| request::text(call, TextFact::User)),
    NativeMethod::method(REQUEST, "content_type", |call| request::text(call, TextFact::ContentType)),
    NativeMethod::method(REQUEST, "content_type=", |call| {
        let content_type = request::given(call, "content_type")?;
        call.verdict.rewrite(|rewrites| rewrites.content_type = content_type);
        Ok(NativeValue::This)
    }),
    NativeMethod::method(REQUEST, "sub_request?", |_| Ok(NativeValue::Bool(false))),
    NativeMethod::method(HEADERS_IN, "[]", |call| request::header(call, HeaderDirection::In)),
    NativeMethod::method(HEADERS_IN, "[]=", |call| request::set_header(call, HeaderDirection::In)),
    NativeMethod::method(HEADERS_IN, "delete", |call| request::delete_header(call, HeaderDirection::In)),
    NativeMethod::method(HEADERS_IN, "all", |call| request::all_headers(call, HeaderDirection::In)),
    NativeMethod::method(HEADERS_OUT, "[]", |call| request::header(call, HeaderDirection::Out)),
    NativeMethod::method(HEADERS_OUT, "[]=", |call| request::set_header(call, HeaderDirection::Out)),
    NativeMethod::method(HEADERS_OUT, "delete", |call| request::delete_header(call, HeaderDirection::Out)),
    NativeMethod::method(HEADERS_OUT, "all", |call| request::all_headers(call, HeaderDirection::Out)),
    NativeMethod::method(CONNECTION, "remote_ip", |call| request::text(call, TextFact::ClientIp)),
    NativeMethod::method(CONNECTION, "remote_port", |call| Ok(port(call, NumberFact::ClientPort).into())),
    NativeMethod::method(CONNECTION, "local_ip", |call| request::text(call, TextFact::LocalIp)),
    NativeMethod::method(CONNECTION, "local_port", |call| Ok(port(call, NumberFact::LocalPort).into())),
    NativeMethod::method(SERVER, "document_root", |call| request::text(call, TextFact::DocumentRoot)),
    NativeMethod::method(SERVER, "path", |call| request::text(call, TextFact::DocumentRoot)),
    NativeMethod::method(SERVER, "realpath_root", |call| request::text(call, TextFact::DocumentRoot)),
    NativeMethod::method(VAR, "exist?", |call| {
        call.expect(1, 1)?;
        Ok(variable(call, call.word(0)?).is_some().into())
    }),
    NativeMethod::method(VAR, "read", |call| {
        call.expect(1, 1)?;
        Ok(variable(call, call.word(0)?).into())
    }),
];

/// `Nginx.return(status)`: a value that is not above 0 (`OK`, `DECLINED`, ...) is no answer.
fn set_status<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let status = call.int(0)?;
    if status <= 0 {
        request::go_on(call);
    } else {
        request::answer_with(call, status)?;
    }
    Ok(NativeValue::This)
}

fn log<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(2, 2)?;
    request::log(call, &LEVELS)?;
    Ok(NativeValue::This)
}

/// `Nginx.redirect(url [, status])`.
fn redirect<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 2)?;
    let url = call.text(0)?;
    if !(url.starts_with("http://") || url.starts_with("https://")) {
        return Err(NativeError::argument(format!("'{url}' does not begin with http:// or https://")));
    }
    let status = if call.args().len() == 2 { call.int(1)? } else { 302 };
    redirect_to(call, url, status)?;
    Ok(NativeValue::This)
}

/// Answers with a redirection status.
pub fn redirect_to(call: &mut NativeCall<'_>, url: &str, status: i64) -> Result<(), NativeError> {
    if !matches!(status, 301 | 302 | 303 | 307 | 308) {
        return Err(NativeError::argument(format!("{status} is not the status of a redirection")));
    }
    let location = crate::Verdict::value(url, "the address")?;
    request::answer_with(call, status)?;
    call.verdict.answer_mut().location = Some(location);
    Ok(())
}

fn port(call: &NativeCall<'_>, number: NumberFact) -> Option<String> {
    call.facts.number(number).map(|port| port.to_string())
}

/// Returns a variable of nginx, by its name.
fn variable(call: &NativeCall<'_>, name: &str) -> Option<String> {
    let text = |text| request::read(call, text).map(|text| text.into_owned());
    let number = |number| call.facts.number(number).map(|number| number.to_string());
    if let Some(field) = name.strip_prefix("http_") {
        return request::field(call, HeaderDirection::In, &field.replace('_', "-"))
            .map(|value| value.into_owned());
    }
    if let Some(field) = name.strip_prefix("sent_http_") {
        return request::field(call, HeaderDirection::Out, &field.replace('_', "-"))
            .map(|value| value.into_owned());
    }
    if let Some(argument) = name.strip_prefix("arg_") {
        return query_argument(&request::read(call, TextFact::Query)?, argument);
    }
    match name {
        "host" | "server_name" => text(TextFact::Hostname),
        "uri" | "document_uri" => text(TextFact::Path),
        "request_uri" => text(TextFact::RawTarget),
        "args" | "query_string" => text(TextFact::Query),
        "request_method" => text(TextFact::Method),
        "scheme" => text(TextFact::Scheme),
        "https" => call.facts.is_tls().then(|| "on".to_owned()),
        "remote_addr" => text(TextFact::ClientIp),
        "remote_user" => text(TextFact::User),
        "server_addr" => text(TextFact::LocalIp),
        "server_protocol" => text(TextFact::Protocol),
        "document_root" | "realpath_root" => text(TextFact::DocumentRoot),
        "request_filename" => text(TextFact::Filename),
        "request_id" => text(TextFact::RequestId),
        "hostname" => text(TextFact::Node),
        "remote_port" => number(NumberFact::ClientPort),
        "server_port" => number(NumberFact::LocalPort),
        "content_length" => number(NumberFact::ContentLength),
        "body_bytes_sent" => number(NumberFact::BytesOut),
        "status" => number(NumberFact::Status),
        _ => None,
    }
}

/// Returns the first argument of this name, undecoded.
fn query_argument(query: &str, name: &str) -> Option<String> {
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.into_iter().find(|(have, _)| have.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
}
