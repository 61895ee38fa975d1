//! Formats one request as one line. The formats are Apache's combined one, the same followed by
//! host, site and request id, and a JSON object.
//!
//! A client chooses host, target, referer and user agent. None of these can end a line, begin
//! another field or send control codes to a terminal. Quotes, backslashes and everything outside
//! printable ASCII are escaped. In the combined format that is done as Apache's
//! `ap_escape_logitem` documents it, in JSON by RFC 8259 section 7.
//!
//! Not here: buffers and files (`access_log`, `writer`).

use std::io::Write;
use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use http::{HeaderValue, Version};
use nagaya_records::instance::WakeReport;

use crate::options::AccessLogFormat;
use crate::record::access_record::{AccessRecord, ProgramUsage};
use crate::record::receipt::figures::ReceiptFigures;
use crate::record::route_trace;

/// Writes lines. Caches the date of the current second, as text.
#[derive(Debug)]
pub(super) struct LineFormatter {
    format: AccessLogFormat,
    second: u64,
    date: String,
    /// `,"node":"NAME"` or ` node=NAME`.
    node: Vec<u8>,
}

/// Returns each stage of a wake with its microseconds. The last one is the time from its end to
/// the head of the answer.
pub fn stages(wake: &WakeReport, first_byte_us: u64) -> impl Iterator<Item = (&'static str, u64)> + '_ {
    let known = wake.stages.iter().map(|(stage, us)| (stage.as_str(), *us));
    known.chain([("first_byte", first_byte_us)])
}

impl LineFormatter {
    /// `node` is the name of this node in each line.
    pub(super) fn new(format: AccessLogFormat, node: &str) -> Self {
        let mut name = Vec::new();
        match format {
            AccessLogFormat::Extended | AccessLogFormat::Combined => word("node", node, &mut name),
            AccessLogFormat::Json => text("node", node.as_bytes(), &mut name),
        }
        let mut formatter = Self { format, second: 0, date: String::new(), node: name };
        formatter.write_date(0);
        formatter
    }

    pub(super) fn line(&mut self, record: &AccessRecord, out: &mut Vec<u8>) {
        let since_epoch = record.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        if since_epoch.as_secs() != self.second {
            self.write_date(since_epoch.as_secs());
        }
        match self.format {
            AccessLogFormat::Extended | AccessLogFormat::Combined => self.combined(record, out),
            AccessLogFormat::Json => self.json(record, since_epoch.subsec_millis(), out),
        }
        out.push(b'\n');
    }

    /// Writes `10/Oct/2000:13:55:36 +0000` or `2000-10-10T13:55:36`, always UTC.
    fn write_date(&mut self, second: u64) {
        let when = UNIX_EPOCH + std::time::Duration::from_secs(second);
        // "Tue, 10 Oct 2000 13:55:36 GMT" has fixed columns (RFC 9110 section 5.6.7). It cannot
        // show years beyond 9999.
        let when = when.min(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(253_402_300_799));
        let http = httpdate::fmt_http_date(when);
        let (day, month, year, time) = (&http[5..7], &http[8..11], &http[12..16], &http[17..25]);
        self.second = second;
        self.date = match self.format {
            AccessLogFormat::Extended | AccessLogFormat::Combined => {
                format!("{day}/{month}/{year}:{time} +0000")
            }
            AccessLogFormat::Json => {
                const MONTHS: &str = "JanFebMarAprMayJunJulAugSepOctNovDec";
                let number = MONTHS.find(month).map_or(0, |at| at / 3 + 1);
                format!("{year}-{number:02}-{day}T{time}")
            }
        };
    }

    fn combined(&self, record: &AccessRecord, out: &mut Vec<u8>) {
        address(record.client, out);
        out.extend_from_slice(b" - - [");
        out.extend_from_slice(self.date.as_bytes());
        out.extend_from_slice(b"] \"");
        match &record.method {
            Some(method) => {
                escape_combined(method.as_str().as_bytes(), out);
                out.push(b' ');
                escape_combined(record.target().as_bytes(), out);
                out.push(b' ');
                out.extend_from_slice(protocol(record.version).as_bytes());
            }
            None => out.push(b'-'),
        }
        out.extend_from_slice(b"\" ");
        number(record.status.as_u16().into(), out);
        out.push(b' ');
        match record.bytes_out {
            0 => out.push(b'-'),
            bytes => number(bytes, out),
        }
        for field in [&record.referer, &record.user_agent] {
            out.extend_from_slice(b" \"");
            match field {
                Some(value) => escape_combined(value.as_bytes(), out),
                None => out.push(b'-'),
            }
            out.push(b'"');
        }
        if self.format == AccessLogFormat::Extended {
            Self::whose(record, out);
        }
        self.receipt(record, out);
    }

    /// Writes the owner of the request. Readers of combined lines ignore everything after the
    /// format's own fields.
    fn whose(record: &AccessRecord, out: &mut Vec<u8>) {
        word("host", record.host(), out);
        if let Some(site) = &record.site {
            word("site", site.name.as_str(), out);
            word("tenant", site.tenant.as_str(), out);
        }
        out.extend_from_slice(b" id=");
        for byte in record.id.0.to_be_bytes() {
            out.extend_from_slice(&hex(byte));
        }
    }

    /// Writes its tier and each stage of its wake, as one word:
    /// `woken=image:decide_us=90,restore_us=38000`.
    fn wake(record: &AccessRecord, out: &mut Vec<u8>) {
        let Some(woken) = record.woken() else { return };
        out.extend_from_slice(b" woken=");
        out.extend_from_slice(woken.wake.from.as_str().as_bytes());
        let mut before = b':';
        for (stage, us) in stages(&woken.wake, ReceiptFigures::of(record).backend_us) {
            out.push(before);
            out.extend_from_slice(stage.as_bytes());
            out.extend_from_slice(b"_us=");
            number(us, out);
            before = b',';
        }
    }

    /// Writes what the request used and waited for, behind the fields of the format. Numbers that
    /// are 0 are left out.
    fn receipt(&self, record: &AccessRecord, out: &mut Vec<u8>) {
        for (name, value) in ReceiptFigures::of(record).named() {
            if value > 0 {
                out.push(b' ');
                out.extend_from_slice(logged(name).as_bytes());
                out.push(b'=');
                number(value, out);
            }
        }
        if record.used() == ProgramUsage::Unknown {
            out.extend_from_slice(b" cpu_us=-");
        }
        if let Some(cell) = record.more.as_ref().and_then(|more| more.cell.as_deref()) {
            word("cell", cell, out);
        }
        if let Some(of) = record.more.as_ref().and_then(|more| more.cell_of) {
            word("cell_of", of.as_str(), out);
        }
        if let Some(raised) = record.raised() {
            word("raised", &raised.to_string(), out);
        }
        Self::wake(record, out);
        if let Some(more) = &record.more {
            out.extend_from_slice(route_trace::words(more).as_bytes());
        }
        out.extend_from_slice(&self.node);
    }

    /// Writes its waits before the backend, if there were any.
    fn json_waits(record: &AccessRecord, out: &mut Vec<u8>) {
        if let Some(woken) = record.woken() {
            key("woken", out);
            out.extend_from_slice(b"{\"from\":\"");
            out.extend_from_slice(woken.wake.from.as_str().as_bytes());
            out.push(b'"');
            for (stage, us) in stages(&woken.wake, ReceiptFigures::of(record).backend_us) {
                key(&format!("{stage}_us"), out);
                number(us, out);
            }
            out.push(b'}');
        }
        if let Some(place) = record.more.as_deref().and_then(route_trace::json) {
            key("place", out);
            out.extend_from_slice(place.to_string().as_bytes());
        }
    }

    fn json(&self, record: &AccessRecord, ms: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"time\":\"");
        out.extend_from_slice(self.date.as_bytes());
        // 1000 + ms always has four digits. The first becomes the dot.
        let at = out.len();
        number(u64::from(1000 + ms), out);
        out[at] = b'.';
        out.extend_from_slice(b"Z\",\"id\":\"");
        for byte in record.id.0.to_be_bytes() {
            out.extend_from_slice(&hex(byte));
        }
        out.extend_from_slice(b"\",\"client\":\"");
        address(record.client, out);
        out.extend_from_slice(b"\",\"port\":");
        number(record.port.into(), out);
        text("host", record.host().as_bytes(), out);
        if let Some(method) = &record.method {
            text("method", method.as_str().as_bytes(), out);
            text("target", record.target().as_bytes(), out);
            text("protocol", protocol(record.version).as_bytes(), out);
        }
        for (name, value) in [
            ("status", record.status.as_u16().into()),
            ("bytes_in", record.bytes_in),
            ("bytes_out", record.bytes_out),
        ] {
            key(name, out);
            number(value, out);
        }
        for (name, value) in ReceiptFigures::of(record).named() {
            key(logged(name), out);
            number(value, out);
        }
        if record.used() == ProgramUsage::Unknown {
            key("cpu_us", out);
            out.extend_from_slice(b"null");
        }
        if let Some(cell) = record.more.as_ref().and_then(|more| more.cell.as_deref()) {
            text("cell", cell.as_bytes(), out);
        }
        if let Some(of) = record.more.as_ref().and_then(|more| more.cell_of) {
            text("cell_of", of.as_str().as_bytes(), out);
        }
        if let Some(raised) = record.raised() {
            text("raised", raised.to_string().as_bytes(), out);
        }
        Self::json_waits(record, out);
        out.extend_from_slice(&self.node);
        if let Some(site) = &record.site {
            text("site", site.name.as_str().as_bytes(), out);
            text("tenant", site.tenant.as_str().as_bytes(), out);
            text("backend", site.backend.kind().as_bytes(), out);
        }
        let optional = [
            ("referer", record.referer.as_ref().map(HeaderValue::as_bytes)),
            ("user_agent", record.user_agent.as_ref().map(HeaderValue::as_bytes)),
            ("refusal", record.refusal.map(str::as_bytes)),
            ("tls", record.tls.map(str::as_bytes)),
        ];
        for (name, value) in optional {
            if let Some(value) = value {
                text(name, value, out);
            }
        }
        out.push(b'}');
    }
}

/// Returns the log's names of these two, with their subject.
fn logged(name: &'static str) -> &'static str {
    match name {
        "took_us" => "duration_us",
        "queue_us" => "queued_us",
        other => other,
    }
}

/// Writes ` name=value`, without characters that could end the word. `-` if it is empty.
fn word(name: &str, value: &str, out: &mut Vec<u8>) {
    out.push(b' ');
    out.extend_from_slice(name.as_bytes());
    out.push(b'=');
    let at = out.len();
    out.extend(value.bytes().filter(|byte| matches!(byte, b'!'..=b'~') && *byte != b'"'));
    if out.len() == at {
        out.push(b'-');
    }
}

fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_09 => "HTTP/0.9",
        Version::HTTP_10 => "HTTP/1.0",
        Version::HTTP_2 => "HTTP/2.0",
        _ => "HTTP/1.1",
    }
}

/// Writes an address. The usual case is done by hand. It takes a quarter of the time of
/// `Display`, and is in every line.
fn address(address: IpAddr, out: &mut Vec<u8>) {
    match address {
        IpAddr::V4(v4) => {
            let [first, rest @ ..] = v4.octets();
            number(first.into(), out);
            for octet in rest {
                out.push(b'.');
                number(octet.into(), out);
            }
        }
        IpAddr::V6(v6) => write!(out, "{v6}").expect("a Vec takes whatever is written to it"),
    }
}

fn number(value: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

fn key(name: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
}

fn text(name: &str, value: &[u8], out: &mut Vec<u8>) {
    key(name, out);
    out.push(b'"');
    escape_json(value, out);
    out.push(b'"');
}

fn is_plain(byte: u8) -> bool {
    matches!(byte, b' '..=b'~') & (byte != b'"') & (byte != b'\\')
}

/// Returns whether nothing has to be escaped, as nearly always. It checks every byte, so that
/// many are checked at once.
fn all_plain(value: &[u8]) -> bool {
    value.iter().fold(true, |plain, byte| plain & is_plain(*byte))
}

fn escape_combined(mut value: &[u8], out: &mut Vec<u8>) {
    if all_plain(value) {
        return out.extend_from_slice(value);
    }
    while let Some(at) = value.iter().position(|b| !is_plain(*b)) {
        out.extend_from_slice(&value[..at]);
        let short = match value[at] {
            b'"' => b'"',
            b'\\' => b'\\',
            8 => b'b',
            b'\n' => b'n',
            b'\r' => b'r',
            b'\t' => b't',
            11 => b'v',
            _ => b'x',
        };
        out.extend_from_slice(&[b'\\', short]);
        if short == b'x' {
            out.extend_from_slice(&hex(value[at]));
        }
        value = &value[at + 1..];
    }
    out.extend_from_slice(value);
}

/// Escapes for JSON. Bytes above ASCII become the code points of the same number. So the client's
/// bytes can be recovered exactly in any encoding.
fn escape_json(mut value: &[u8], out: &mut Vec<u8>) {
    if all_plain(value) {
        return out.extend_from_slice(value);
    }
    while let Some(at) = value.iter().position(|b| !is_plain(*b)) {
        out.extend_from_slice(&value[..at]);
        match value[at] {
            byte @ (b'"' | b'\\') => out.extend_from_slice(&[b'\\', byte]),
            byte => {
                out.extend_from_slice(b"\\u00");
                out.extend_from_slice(&hex(byte));
            }
        }
        value = &value[at + 1..];
    }
    out.extend_from_slice(value);
}

fn hex(byte: u8) -> [u8; 2] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]
}
