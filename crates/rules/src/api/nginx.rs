//! `Nginx` as ngx_mruby has it, as far as a request and its headers go.
//!
//! Not here: what is Ruby upstream too (`prelude/nginx.rb`), what is missing and why (`compatibility`).

use crate::facts::{Number, Text};
use crate::native::{Call, Native, NativeError, Value};
use crate::verdict::Level;

use super::request::{self, Direction, Given};

const NGINX: &str = "Nginx";
const REQUEST: &str = "Nginx::Request";
const HEADERS_IN: &str = "Nginx::Headers_in";
const HEADERS_OUT: &str = "Nginx::Headers_out";
const CONNECTION: &str = "Nginx::Connection";
const SERVER: &str = "Nginx::Server";
const VAR: &str = "Nginx::Var";

/// nginx's levels 0 to 8.
const LEVELS: [Level; 9] = [
    Level::Error,
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
    Native::singleton(NGINX, "return", set_status),
    Native::singleton(NGINX, "send_header", set_status),
    Native::singleton(NGINX, "status_code=", set_status),
    Native::singleton(NGINX, "log", log),
    Native::singleton(NGINX, "errlogger", log),
    Native::singleton(NGINX, "module_name", |_| Ok("nagaya".into())),
    Native::singleton(NGINX, "module_version", |_| Ok(env!("CARGO_PKG_VERSION").into())),
    Native::singleton(NGINX, "nginx_version", |_| Ok(super::apache::SERVER_VERSION.into())),
    Native::singleton(NGINX, "server_version", |_| Ok(super::apache::SERVER_VERSION.into())),
    Native::singleton(NGINX, "redirect", redirect),
    Native::method(REQUEST, "request_line", |call| request::request_line(call)),
    Native::method(REQUEST, "uri", |call| request::text(call, Text::Path)),
    Native::method(REQUEST, "unparsed_uri", |call| request::text(call, Text::RawTarget)),
    Native::method(REQUEST, "method", |call| request::text(call, Text::Method)),
    Native::method(REQUEST, "protocol", |call| request::text(call, Text::Protocol)),
    Native::method(REQUEST, "args", |call| request::text(call, Text::Query)),
    Native::method(REQUEST, "scheme", |call| request::text(call, Text::Scheme)),
    Native::method(REQUEST, "hostname", |call| request::text(call, Text::Hostname)),
    Native::method(REQUEST, "authority", |call| request::text(call, Text::Authority)),
    Native::method(REQUEST, "filename", |call| request::text(call, Text::Filename)),
    Native::method(REQUEST, "document_root", |call| request::text(call, Text::DocumentRoot)),
    Native::method(REQUEST, "user", |call| request::text(call, Text::User)),
    Native::method(REQUEST, "content_type", |call| request::text(call, Text::ContentType)),
    Native::method(REQUEST, "content_type=", |call| {
        let content_type = request::given(call, "content_type")?;
        call.verdict.rewrite(|rewrites| rewrites.content_type = content_type);
        Ok(Value::This)
    }),
    Native::method(REQUEST, "sub_request?", |_| Ok(Value::Bool(false))),
    Native::method(HEADERS_IN, "[]", |call| request::header(call, Direction::In)),
    Native::method(HEADERS_IN, "[]=", |call| request::set_header(call, Direction::In)),
    Native::method(HEADERS_IN, "delete", |call| request::delete_header(call, Direction::In)),
    Native::method(HEADERS_IN, "all", |call| request::all_headers(call, Direction::In)),
    Native::method(HEADERS_OUT, "[]", |call| request::header(call, Direction::Out)),
    Native::method(HEADERS_OUT, "[]=", |call| request::set_header(call, Direction::Out)),
    Native::method(HEADERS_OUT, "delete", |call| request::delete_header(call, Direction::Out)),
    Native::method(HEADERS_OUT, "all", |call| request::all_headers(call, Direction::Out)),
    Native::method(CONNECTION, "remote_ip", |call| request::text(call, Text::ClientIp)),
    Native::method(CONNECTION, "remote_port", |call| Ok(port(call, Number::ClientPort).into())),
    Native::method(CONNECTION, "local_ip", |call| request::text(call, Text::LocalIp)),
    Native::method(CONNECTION, "local_port", |call| Ok(port(call, Number::LocalPort).into())),
    Native::method(SERVER, "document_root", |call| request::text(call, Text::DocumentRoot)),
    Native::method(SERVER, "path", |call| request::text(call, Text::DocumentRoot)),
    Native::method(SERVER, "realpath_root", |call| request::text(call, Text::DocumentRoot)),
    Native::method(VAR, "exist?", |call| {
        call.expect(1, 1)?;
        Ok(variable(call, call.word(0)?).is_some().into())
    }),
    Native::method(VAR, "read", |call| {
        call.expect(1, 1)?;
        Ok(variable(call, call.word(0)?).into())
    }),
];

/// `Nginx.return(status)`: what is not above 0 (`OK`, `DECLINED`, ...) is no answer.
fn set_status<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let status = call.int(0)?;
    if status <= 0 {
        request::go_on(call);
    } else {
        request::answer_with(call, status)?;
    }
    Ok(Value::This)
}

fn log<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(2, 2)?;
    request::log(call, &LEVELS)?;
    Ok(Value::This)
}

/// `Nginx.redirect(url [, status])`.
fn redirect<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(1, 2)?;
    let url = call.text(0)?;
    if !(url.starts_with("http://") || url.starts_with("https://")) {
        return Err(NativeError::argument(format!("'{url}' does not begin with http:// or https://")));
    }
    let status = if call.args().len() == 2 { call.int(1)? } else { 302 };
    redirect_to(call, url, status)?;
    Ok(Value::This)
}

/// Answers with a status that leads elsewhere.
pub fn redirect_to(call: &mut Call<'_>, url: &str, status: i64) -> Result<(), NativeError> {
    if !matches!(status, 301 | 302 | 303 | 307 | 308) {
        return Err(NativeError::argument(format!("{status} is not the status of a redirection")));
    }
    let location = crate::Verdict::value(url, "the address")?;
    request::answer_with(call, status)?;
    call.verdict.answer_mut().location = Some(location);
    Ok(())
}

fn port(call: &Call<'_>, number: Number) -> Option<String> {
    call.facts.number(number).map(|port| port.to_string())
}

/// A variable of nginx, by its name.
fn variable(call: &Call<'_>, name: &str) -> Option<String> {
    let text = |text| request::read(call, text).map(|text| text.into_owned());
    let number = |number| call.facts.number(number).map(|number| number.to_string());
    if let Some(field) = name.strip_prefix("http_") {
        return request::field(call, Direction::In, &field.replace('_', "-")).map(|value| value.into_owned());
    }
    if let Some(field) = name.strip_prefix("sent_http_") {
        return request::field(call, Direction::Out, &field.replace('_', "-"))
            .map(|value| value.into_owned());
    }
    if let Some(argument) = name.strip_prefix("arg_") {
        return query_argument(&request::read(call, Text::Query)?, argument);
    }
    match name {
        "host" | "server_name" => text(Text::Hostname),
        "uri" | "document_uri" => text(Text::Path),
        "request_uri" => text(Text::RawTarget),
        "args" | "query_string" => text(Text::Query),
        "request_method" => text(Text::Method),
        "scheme" => text(Text::Scheme),
        "https" => call.facts.is_tls().then(|| "on".to_owned()),
        "remote_addr" => text(Text::ClientIp),
        "remote_user" => text(Text::User),
        "server_addr" => text(Text::LocalIp),
        "server_protocol" => text(Text::Protocol),
        "document_root" | "realpath_root" => text(Text::DocumentRoot),
        "request_filename" => text(Text::Filename),
        "request_id" => text(Text::RequestId),
        "hostname" => text(Text::Node),
        "remote_port" => number(Number::ClientPort),
        "server_port" => number(Number::LocalPort),
        "content_length" => number(Number::ContentLength),
        "body_bytes_sent" => number(Number::BytesOut),
        "status" => number(Number::Status),
        _ => None,
    }
}

/// The first argument of this name, as it came.
fn query_argument(query: &str, name: &str) -> Option<String> {
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.into_iter().find(|(have, _)| have.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
}
