//! Converts a message from a program to the form of SMTP. Pure but for the clock.
//!
//! Lines get SMTP's line ends, whatever they had. Missing mandatory fields are added, and fields
//! that are not for its readers are removed. A recipient in a field counts with `-t` only.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use nagaya_base::date;

use super::addresses;
use super::arguments::MailArguments;

/// Lines of the header section. A message with more is invalid.
const HEAD_LINES_MAX: usize = 10_000;

#[derive(Debug)]
pub struct MailMessage {
    pub recipients: Vec<String>,
    /// With dots doubled as SMTP requires, and without the end.
    pub text: Vec<u8>,
}

impl MailMessage {
    /// Prepares a message.
    ///
    /// # Errors
    /// Fails, with a text, if the message is invalid.
    pub fn prepare(raw: &[u8], arguments: &MailArguments, sender: &str) -> Result<Self, String> {
        let lines = lines_of(raw, arguments.ignores_dots);
        let (fields, body) = split(&lines)?;
        let mut recipients = arguments.recipients.clone();
        let mut has = [false; 3];
        let mut text = Vec::with_capacity(raw.len() + 512);
        let mut kept = Vec::new();
        for field in fields {
            let name = name_of(field[0]).unwrap_or_default().to_ascii_lowercase();
            if arguments.reads_recipients && ["to", "cc", "bcc"].contains(&name.as_str()) {
                let value = String::from_utf8_lossy(&field.concat()).into_owned();
                recipients.extend(addresses::read_list(value.split_once(':').map_or("", |(_, list)| list))?);
            }
            for (index, needed) in ["from", "date", "message-id"].into_iter().enumerate() {
                has[index] |= name == needed;
            }
            if name != "bcc" && name != "return-path" {
                kept.extend(field);
            }
        }
        for field in missing(has, arguments, sender) {
            push_line(&mut text, field.as_bytes());
        }
        kept.into_iter().for_each(|line| push_line(&mut text, line));
        push_line(&mut text, b"");
        body.iter().for_each(|line| push_line(&mut text, line));
        recipients.sort_unstable();
        recipients.dedup();
        Ok(Self { recipients, text })
    }
}

/// Returns lines without their ends, which are LF, CR LF or CR.
fn lines_of(raw: &[u8], ignores_dots: bool) -> Vec<&[u8]> {
    let mut lines: Vec<&[u8]> = Vec::new();
    for line in raw.split(|byte| *byte == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        for part in line.split(|byte| *byte == b'\r') {
            if part == b"." && !ignores_dots {
                return lines;
            }
            lines.push(part);
        }
    }
    // The text after the last end is not a line.
    if lines.last().is_some_and(|line| line.is_empty()) {
        lines.pop();
    }
    lines
}

/// Fields, each with its continuation lines, and the body.
type Parts<'a, 'b> = (Vec<Vec<&'a [u8]>>, &'b [&'a [u8]]);

fn split<'a, 'b>(lines: &'b [&'a [u8]]) -> Result<Parts<'a, 'b>, String> {
    let mut fields: Vec<Vec<&[u8]>> = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let is_continued = line.starts_with(b" ") || line.starts_with(b"\t");
        match fields.last_mut() {
            _ if line.is_empty() => return Ok((fields, &lines[index + 1..])),
            Some(field) if is_continued => field.push(line),
            // First line of a message in a mailbox.
            None if line.starts_with(b"From ") => {}
            _ if name_of(line).is_some() => fields.push(vec![line]),
            // A body without an empty line before it.
            _ => return Ok((fields, &lines[index..])),
        }
        if index >= HEAD_LINES_MAX {
            return Err(format!("its head has more than {HEAD_LINES_MAX} lines"));
        }
    }
    Ok((fields, &[]))
}

/// Returns the name of a field (RFC 5322 section 3.6.8).
fn name_of(line: &[u8]) -> Option<&str> {
    let end = line.iter().position(|byte| *byte == b':')?;
    let name = str::from_utf8(&line[..end]).ok()?.trim_end_matches([' ', '\t']);
    (!name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic())).then_some(name)
}

/// Returns missing fields. `has` is for From, Date and Message-ID.
fn missing(has: [bool; 3], arguments: &MailArguments, sender: &str) -> Vec<String> {
    let now = SystemTime::now();
    let mut fields = Vec::new();
    if !has[0] {
        let name: String =
            arguments.full_name.iter().flat_map(|name| name.chars()).filter(is_plain).collect();
        let sender: String = sender.chars().filter(is_plain).collect();
        fields.push(if name.is_empty() {
            format!("From: {sender}")
        } else {
            format!("From: \"{name}\" <{sender}>")
        });
    }
    if !has[1] {
        fields.push(format!("Date: {}", date::mail(now)));
    }
    if !has[2] {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let host = sender.split_once('@').map_or("localhost", |(_, host)| host);
        let mut field = format!("Message-ID: <{:x}.{:x}@", since.as_nanos(), std::process::id());
        let _ = write!(field, "{}>", host.chars().filter(is_plain).collect::<String>());
        fields.push(field);
    }
    fields
}

fn is_plain(character: &char) -> bool {
    !character.is_control() && !['"', '\\', '<', '>'].contains(character)
}

fn push_line(text: &mut Vec<u8>, line: &[u8]) {
    if line.starts_with(b".") {
        text.push(b'.');
    }
    text.extend_from_slice(line);
    text.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepare(raw: &str, arguments: &MailArguments) -> (Vec<String>, String) {
        let message = MailMessage::prepare(raw.as_bytes(), arguments, "me@here.test").unwrap();
        (message.recipients, String::from_utf8(message.text).unwrap())
    }

    fn reading() -> MailArguments {
        MailArguments { reads_recipients: true, ignores_dots: true, ..MailArguments::default() }
    }

    #[test]
    fn a_message_of_phps_gets_what_smtp_needs() {
        let raw = "To: A <a@b.test>,\n c@d.test\nBcc: hidden@d.test\nSubject: x\n\n.dot\n.\nend\r\nlast";
        let (recipients, text) = prepare(raw, &reading());
        assert_eq!(recipients, ["a@b.test", "c@d.test", "hidden@d.test"]);
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert_eq!(body, "..dot\r\n..\r\nend\r\nlast\r\n");
        for part in [
            "From: me@here.test\r\n",
            "Date: ",
            "Message-ID: <",
            "To: A <a@b.test>,\r\n c@d.test\r\n",
            "Subject: x",
        ] {
            assert!(head.contains(part), "{part}: {head}");
        }
        assert!(!text.contains("hidden"), "{text}");
        assert!(!text.replace("\r\n", "").contains(['\r', '\n']));
    }

    #[test]
    fn fields_that_are_there_are_left_alone() {
        let raw = "From: you@x.test\nDate: then\nmessage-id: <1@x>\n\nbody\n";
        let (recipients, text) =
            prepare(raw, &MailArguments { recipients: vec!["a@b.test".into()], ..reading() });
        assert_eq!(text, "From: you@x.test\r\nDate: then\r\nmessage-id: <1@x>\r\n\r\nbody\r\n");
        assert_eq!(recipients, ["a@b.test"]);
    }

    #[test]
    fn without_i_a_dot_ends_it_and_without_t_fields_name_nobody() {
        let (recipients, text) = prepare("To: a@b.test\n\none\n.\ntwo\n", &MailArguments::default());
        assert!(recipients.is_empty() && text.ends_with("\r\n\r\none\r\n"), "{text}");
    }

    #[test]
    fn text_without_a_head_is_body() {
        let (_, text) = prepare("From\u{a0}: x@y.test\n", &reading());
        assert!(text.ends_with("\r\n\r\nFrom\u{a0}: x@y.test\r\n") && text.contains("From: me@"), "{text}");
        let (_, text) = prepare("just a line\nand more\n", &reading());
        assert!(text.ends_with("\r\n\r\njust a line\r\nand more\r\n"), "{text}");
        let named = MailArguments { full_name: Some("A \"B\"\r\nBcc: x".into()), ..reading() };
        let (_, text) = prepare("\nx\n", &named);
        assert!(text.starts_with("From: \"A BBcc: x\" <me@here.test>\r\n"), "{text}");
    }
}
