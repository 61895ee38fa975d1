//! Messages out of the tests of other parsers: of http-parser, which are in C, and of httparse, which are in Rust.
//!
//! Not here: how the sources come to this machine (`./dev conformance`).

/// A message of a corpus, as its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// What the corpus calls it; with its number, because names come twice.
    pub name: String,
    pub is_request: bool,
    pub bytes: Vec<u8>,
}

/// Messages of http-parser's `test.c`: structures with a name, a type and the bytes as string literals.
pub fn read_http_parser(source: &str) -> Vec<Message> {
    let mut messages = Vec::new();
    for part in source.split(".name").skip(1) {
        let Some((name, rest)) = read_value(part).and_then(read_literals) else { continue };
        let Some(kind) = rest.split_once(".type").and_then(|(_, rest)| read_value(rest)) else { continue };
        let Some(raw) = kind.split_once(".raw").and_then(|(_, rest)| read_value(rest)) else { continue };
        let Some((bytes, _)) = read_literals(raw) else { continue };
        messages.push(Message {
            name: format!("http-parser {}: {}", messages.len(), String::from_utf8_lossy(&name)),
            is_request: kind.starts_with("HTTP_REQUEST"),
            bytes,
        });
    }
    messages
}

/// Messages of httparse's tests: `req! { name, b"...", ... }` and `res!` likewise.
pub fn read_httparse(source: &str) -> Vec<Message> {
    let mut messages = Vec::new();
    for (start, marker) in source.match_indices("re") {
        let rest = &source[start + marker.len()..];
        let Some(inside) = rest.strip_prefix("q! {").or_else(|| rest.strip_prefix("s! {")) else { continue };
        let Some((name, value)) = inside.split_once(',') else { continue };
        let name = skip_blanks(name).trim();
        let Some((bytes, _)) = read_literals(value) else { continue };
        // Inside the macros themselves, a parameter stands in its place.
        if name.starts_with('$') {
            continue;
        }
        messages.push(Message {
            name: format!("httparse {}: {name}", messages.len()),
            is_request: rest.starts_with('q'),
            bytes,
        });
    }
    messages
}

/// What stands behind `=`.
fn read_value(text: &str) -> Option<&str> {
    text.trim_start().strip_prefix('=').map(str::trim_start)
}

/// String literals that stand one behind the other, of C or of Rust, and what follows them. `None`: here is none.
fn read_literals(text: &str) -> Option<(Vec<u8>, &str)> {
    let mut bytes = Vec::new();
    let mut rest = skip_blanks(text);
    let mut has_begun = false;
    loop {
        let inside = rest.strip_prefix('"').or_else(|| rest.strip_prefix("b\""));
        let Some(inside) = inside else { return has_begun.then_some((bytes, rest)) };
        rest = skip_blanks(read_literal(inside, &mut bytes)?);
        has_begun = true;
    }
}

/// Reads to the quotation mark that ends it, and says what is behind that.
fn read_literal<'a>(inside: &'a str, bytes: &mut Vec<u8>) -> Option<&'a str> {
    let mut rest = inside;
    loop {
        let next = rest.chars().next()?;
        rest = &rest[next.len_utf8()..];
        match next {
            '"' => return Some(rest),
            '\\' => rest = read_escape(rest, bytes)?,
            other => bytes.extend(other.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

fn read_escape<'a>(rest: &'a str, bytes: &mut Vec<u8>) -> Option<&'a str> {
    let next = rest.chars().next()?;
    let behind = &rest[next.len_utf8()..];
    let plain = match next {
        'r' => b'\r',
        'n' => b'\n',
        't' => b'\t',
        'f' => 0x0c,
        'v' => 0x0b,
        'b' => 0x08,
        '0' => 0,
        '\\' | '"' | '\'' | '?' => u8::try_from(next).ok()?,
        'x' => {
            bytes.push(u8::from_str_radix(behind.get(..2)?, 16).ok()?);
            return behind.get(2..);
        }
        // In Rust the line goes on behind the blanks; in C right away, and none of these lines begins with blanks.
        '\n' => return Some(behind.trim_start()),
        _ => return None,
    };
    bytes.push(plain);
    Some(behind)
}

/// Blanks and comments.
fn skip_blanks(text: &str) -> &str {
    let mut rest = text.trim_start();
    loop {
        let behind = match (rest.strip_prefix("/*"), rest.strip_prefix("//")) {
            (Some(comment), _) => comment.split_once("*/").map_or("", |(_, behind)| behind),
            (_, Some(comment)) => comment.split_once('\n').map_or("", |(_, behind)| behind),
            (None, None) => return rest,
        };
        rest = behind.trim_start();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_c_are_read() {
        let source = "{ {.name= \"a get\"\n ,.type= HTTP_REQUEST\n ,.raw= \"GET / HTTP/1.1\\r\\n\" /* it */\n \"A: \\x7f\\\"\\r\\n\\r\\n\"\n\
                      ,.should_keep_alive= TRUE }\n, {.name= NULL }\n, {.name = \"ok\"\n,.type= HTTP_RESPONSE\n,.raw= \"x\"";
        let read = read_http_parser(source);
        assert_eq!(read.len(), 2);
        assert_eq!(read[0].name, "http-parser 0: a get");
        assert!(read[0].is_request && !read[1].is_request);
        assert_eq!(read[0].bytes, b"GET / HTTP/1.1\r\nA: \x7f\"\r\n\r\n");
    }

    #[test]
    fn messages_of_rust_are_read() {
        let source = "macro_rules! req { ($name:ident) => ( req! {$name, $buf, Ok(()) } ) }\n\
                      req! {\n // it\n  test_one,\n  b\"GET / HTTP/1.1\\r\\n\\\n   \\xff\",\n |req| {} }\nres! { two, b\"\\n\", |_| {} }";
        let read = read_httparse(source);
        assert_eq!(
            read.iter().map(|message| &*message.name).collect::<Vec<_>>(),
            ["httparse 0: test_one", "httparse 1: two"]
        );
        assert_eq!(read[0].bytes, b"GET / HTTP/1.1\r\n\xff");
        assert!(read[0].is_request && !read[1].is_request);
    }
}
