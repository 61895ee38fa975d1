//! Fuzz targets for all input of `sendmail`: words of a command line, and messages as programs
//! write them.
//!
//! Targets assert more than the absence of panics: the output is one message, and has the named
//! recipients. Not here: the fuzzer (`fuzz/`), the relay's checks (`nagaya_keeper::fuzzing`).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use nagaya_base::fuzz::{FuzzTarget, copy_seeds};

use crate::addresses;
use crate::arguments::MailArguments;
use crate::message::MailMessage;

/// All fuzz targets.
pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget { name: "sendmail_words", run: read_words, seeds: words },
    FuzzTarget { name: "sendmail_message", run: read_message, seeds: messages },
];

/// The sender, where the target chooses.
const SENDER: &str = "me@here.test";

/// Flags of an input's first byte.
const READS_RECIPIENTS: u8 = 1;
const IGNORES_DOTS: u8 = 2;

/// Returns words separated by NUL, as the kernel has them.
fn words() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"-t\0-i",
        b"-ti\0-fme@a.test",
        b"-oi\0-f\0me@a.test\0-t",
        b"-i\0-FCronDaemon\0-B8BITMIME\0-oem\0root",
        b"-i\0-f\0<>\0--\0-odd@a.test\0b@a.test,c@a.test",
        b"-bm\0-v\0a@a.test",
        b"-N\0never\0-R\0hdrs\0\"B, A\" <a@b.test>, friends: c@d.test (a, (b)), <e@f.test>;",
        b"-bs",
        b"-q",
        b"-f",
        b"\"a\\ \"@b.test",
        b"> <a@b.test>",
    ])
}

fn read_words(bytes: &[u8]) {
    let words: Vec<OsString> =
        bytes.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect();
    if let Ok(parsed) = MailArguments::parse(&words) {
        check_addresses(&parsed.recipients);
        // Words after `--` are recipients, whatever they begin with.
        let again = parsed.recipients.iter().map(|address| OsString::from(format!("<{address}>")));
        let again: Vec<OsString> = std::iter::once("--".into()).chain(again).collect();
        assert_eq!(MailArguments::parse(&again).map(|again| again.recipients), Ok(parsed.recipients));
    }
}

/// Checks that each is one address, and is read as itself.
fn check_addresses(found: &[String]) {
    for address in found {
        assert!(!address.is_empty());
        assert_eq!(addresses::read_list(&format!("<{address}>")).as_ref(), Ok(&vec![address.clone()]));
    }
}

fn messages() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\x03To: A <a@b.test>,\n c@d.test\nBcc: hidden@d.test\nSubject: x\n\n.dot\n.\nend\r\nlast",
        b"\x03From: you@x.test\nDate: then\nmessage-id: <1@x>\n\nbody\n",
        b"\x00To: a@b.test\n\none\n.\ntwo\n",
        b"\x01just a line\nand more\n",
        b"\x03From root Mon\r\nBcc : x@y.test,\r\n\tz@y.test\r\nReturn-Path: <x>\r\n\r\n..\r.\r\r\n",
        b"\x02\n\n",
    ])
}

fn read_message(bytes: &[u8]) {
    let Some((flags, raw)) = bytes.split_first() else { return };
    let arguments = MailArguments {
        reads_recipients: flags & READS_RECIPIENTS != 0,
        ignores_dots: flags & IGNORES_DOTS != 0,
        ..MailArguments::default()
    };
    let Ok(message) = MailMessage::prepare(raw, &arguments, SENDER) else { return };
    assert!(arguments.reads_recipients || message.recipients.is_empty(), "fields name nobody without -t");
    check_addresses(&message.recipients);
    let lines = read_lines(&message.text);
    let end = lines.iter().position(|line| line.is_empty());
    let (head, body) = lines.split_at(end.expect("a head ends with an empty line"));
    for name in ["from", "date", "message-id"] {
        assert!(head.iter().any(|line| begins_field(line, name)), "{name} is missing");
    }
    for name in ["bcc", "return-path"] {
        assert!(!head.iter().any(|line| begins_field(line, name)), "{name} is for nobody to read");
    }
    if arguments.ignores_dots {
        let body: Vec<_> = body[1..].iter().flat_map(|line| line.iter().copied()).collect();
        let plain: Vec<_> = raw.iter().copied().filter(|byte| !b"\r\n".contains(byte)).collect();
        assert!(plain.ends_with(&body), "the body is as it was written");
    }
}

/// Returns lines as a server sees them. Checks that there is no end of line but CR LF, and no line
/// that ends the text.
fn read_lines(text: &[u8]) -> Vec<&[u8]> {
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.iter().position(|byte| b"\r\n".contains(byte)).expect("the last line ends, too");
        assert!(rest[end..].starts_with(b"\r\n"), "a line ends with CR LF");
        assert_ne!(&rest[..end], b".", "a dot alone ends the text");
        lines.push(rest[..end].strip_prefix(b".").unwrap_or(&rest[..end]));
        rest = &rest[end + 2..];
    }
    lines
}

fn begins_field(line: &[u8], name: &str) -> bool {
    let Some(at) = line.iter().position(|byte| *byte == b':') else { return false };
    line[..at].trim_ascii_end().eq_ignore_ascii_case(name.as_bytes())
}
