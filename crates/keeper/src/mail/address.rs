//! Addresses in commands of SMTP, in the form that a tenant may send to the node's mail server.
//!
//! Narrower than RFC 5321 section 4.1.2: no quoted names, no routes, nothing that a server may take
//! for a program, a file or an expansion, and no bytes beyond ASCII. Not here: addresses in the
//! fields of a message.

/// Maximum length of an address, bytes (RFC 5321 section 4.5.3.1.3, without its brackets).
const ADDRESS_LEN_MAX: usize = 254;

/// Maximum length of the name before the `@`, bytes (section 4.5.3.1.1).
const LOCAL_LEN_MAX: usize = 64;

/// Characters of such a name besides letters and digits.
const LOCAL_MARKS: &[u8] = b".-_+=#&'*/?^~";

/// Reads `<ADDRESS>` and the text behind it, from the rest of a command. The address may be empty.
///
/// # Errors
/// `None` for any other form.
pub fn read_path(rest: &str) -> Option<(&str, &str)> {
    let (address, parameters) = rest.trim_start_matches(' ').strip_prefix('<')?.split_once('>')?;
    let is_end = parameters.is_empty() || parameters.starts_with(' ');
    (is_end && (address.is_empty() || is_address(address))).then_some((address, parameters))
}

fn is_address(text: &str) -> bool {
    let (local, domain) = text.split_once('@').unwrap_or((text, "localhost"));
    let is_local = |byte: u8| byte.is_ascii_alphanumeric() || LOCAL_MARKS.contains(&byte);
    let is_label = |label: &str| {
        let is_inside = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        (1..=63).contains(&label.len())
            && label.bytes().all(is_inside)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    text.len() <= ADDRESS_LEN_MAX
        && (1..=LOCAL_LEN_MAX).contains(&local.len())
        && local.bytes().all(is_local)
        // A file, or an option of some program.
        && !local.starts_with(['/', '-'])
        && domain.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_addresses_are_taken() {
        for (rest, address) in [
            ("<a@b.test>", "a@b.test"),
            (" <a.b+tag=x@mail.b-c.test>", "a.b+tag=x@mail.b-c.test"),
            ("<root>", "root"),
            ("<>", ""),
            ("<a@b.test> SIZE=9", "a@b.test"),
        ] {
            assert_eq!(read_path(rest).map(|(address, _)| address), Some(address), "{rest}");
        }
        let long = format!("<{}@b.test>", "a".repeat(LOCAL_LEN_MAX + 1));
        for bad in [
            "a@b.test",
            "<a@b.test",
            "<a@b.test>x",
            "<a b@c.test>",
            "<\"a b\"@c.test>",
            "<a@b@c.test>",
            "<@x.test:a@b.test>",
            "<|sh>",
            "</etc/passwd>",
            "<-oQ/tmp@b.test>",
            "<${run{x}}@b.test>",
            "<a%b@c.test>",
            "<a!b@c.test>",
            "<a@[127.0.0.1]>",
            "<a@-b.test>",
            "<a@b..test>",
            "<a\r\nRCPT@b.test>",
            "<a\0@b.test>",
            "<\u{e4}@b.test>",
            &long,
        ] {
            assert_eq!(read_path(bad), None, "{bad:?}");
        }
    }
}
