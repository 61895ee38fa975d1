//! Lines of a head in HTTP/1, from clients and from backends.

use bytes::{BufMut, BytesMut};

/// Returns the end of lines that end in CR LF or LF: behind the first empty one. Searches from
/// `from` on. A line in front of it does not count as empty.
pub fn find_empty_line(bytes: &[u8], from: usize) -> Option<usize> {
    memchr::memchr_iter(b'\n', &bytes[from..]).find_map(|at| {
        let behind = from + at + 1;
        match &bytes[behind..] {
            [b'\n', ..] => Some(behind + 1),
            [b'\r', b'\n', ..] => Some(behind + 2),
            _ => None,
        }
    })
}

/// Rewrites lines in the usual form: CR LF, no folded lines, no whitespace around names.
/// `has_status` is true if a status line precedes the fields.
pub(super) fn rewrite_lines(section: &[u8], has_status: bool) -> Result<BytesMut, &'static str> {
    let mut out = BytesMut::with_capacity(section.len() + 64);
    let mut fields = 0;
    for (number, line) in section.split(|&byte| byte == b'\n').enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if memchr::memchr2(b'\r', 0, line).is_some() {
            return Err("a bare carriage return or a NUL byte");
        }
        if has_status && number == 0 {
            put_status_line(&mut out, line)?;
            continue;
        }
        if line.is_empty() {
            break;
        }
        if is_blank(line[0]) {
            // RFC 9112 section 5.2: a folded line continues with a space.
            if fields == 0 {
                return Err("a line begins with a blank before the first field");
            }
            out.truncate(out.len() - 2);
            out.put_u8(b' ');
            out.put_slice(trim_blanks(line));
        } else {
            // RFC 9112 section 5.1: a proxy removes whitespace between name and colon.
            let (name, value) = line.split_at(memchr::memchr(b':', line).ok_or("a line that is no field")?);
            out.put_slice(trim_blanks(name));
            out.put_slice(value);
            fields += 1;
        }
        out.put_slice(b"\r\n");
    }
    out.put_slice(b"\r\n");
    Ok(out)
}

/// Writes `HTTP/1.x 200 reason`, with one space in each place and a known version.
pub fn put_status_line(out: &mut BytesMut, line: &[u8]) -> Result<(), &'static str> {
    const NONE: &str = "its head is not HTTP/1";
    let minor = line.strip_prefix(b"HTTP/1.").and_then(|rest| rest.first()).ok_or(NONE)?;
    // RFC 9110 section 2.5: a higher minor version is read as the highest known one.
    let version: &[u8] = match minor {
        b'0' => b"HTTP/1.0 ",
        b'1'..=b'9' => b"HTTP/1.1 ",
        _ => return Err(NONE),
    };
    let rest = &line[b"HTTP/1.x".len()..];
    if !rest.first().is_some_and(|&byte| is_blank(byte)) {
        return Err(NONE);
    }
    out.put_slice(version);
    out.put_slice(trim_blanks(rest));
    out.put_slice(b"\r\n");
    Ok(())
}

pub fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

pub fn trim_blanks(bytes: &[u8]) -> &[u8] {
    let begin = bytes.iter().position(|&byte| !is_blank(byte)).unwrap_or(bytes.len());
    let end = bytes.iter().rposition(|&byte| !is_blank(byte)).map_or(begin, |last| last + 1);
    &bytes[begin..end]
}
