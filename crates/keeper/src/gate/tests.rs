//! What the gate takes, and what it refuses.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream as StdStream};
use std::path::Path;
use std::time::Duration;

use bytes::BytesMut;
use nagaya_keeper_api::fastcgi::{self, ConnectionReuse, NOT_BEGUN, UsageReport};
use nagaya_records::cell::RequestUsage;
use nagaya_records::{Site, SiteName, Tenant};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::RecvFlags;

use crate::enclosure::ProgramView;

use super::opening::{AnswerRecords, BodyRecords, CheckedOpening, RequestViolation};
use super::scripts::{ScriptRule, SiteScripts};
use super::{GatedWorker, NO_FILE, PART_LEN, PART_WAIT, PassageTimes, ScriptGate, UNTAKEN_MAX, connect};

fn opening(params: &[(&str, &str)]) -> BytesMut {
    let mut opening = fastcgi::RequestOpening::new(ConnectionReuse::Kept);
    for (name, value) in params {
        opening.put(name.as_bytes(), value.as_bytes()).unwrap();
    }
    BytesMut::from(&opening.finish()[..])
}

fn record(kind: u8, content: &[u8]) -> Vec<u8> {
    let len = u16::try_from(content.len()).unwrap().to_be_bytes();
    [&[1, kind, 0, 1, len[0], len[1], 0, 0][..], content].concat()
}

fn take(mut bytes: BytesMut) -> Result<Option<CheckedOpening>, RequestViolation> {
    CheckedOpening::take(&mut bytes)
}

fn scripts(backend: &str) -> SiteScripts {
    let site = format!(r#"{{"name":"s","tenant":"t","hosts":["s"],"backend":{backend}}}"#);
    let site: Site = serde_json::from_str(&site).unwrap();
    let tenant: Tenant = serde_json::from_str(r#"{"name":"t","uid":9,"gid":9,"home":"/home/t"}"#).unwrap();
    SiteScripts::of(&site, &tenant, None, || ProgramView::Whole).unwrap().expect("it is of kind php")
}

#[test]
fn opening_from_the_edge_is_taken_byte_by_byte() {
    let long = "x".repeat(70);
    let params = [("SCRIPT_FILENAME", "/a/b.php"), ("HTTP_COOKIE", long.as_str()), ("CONTENT_LENGTH", "12")];
    let all = opening(&params);
    let mut buffer = BytesMut::new();
    for (number, byte) in all.iter().enumerate() {
        assert!(CheckedOpening::take(&mut buffer).unwrap().is_none(), "{number} bytes");
        buffer.extend_from_slice(&[*byte]);
    }
    buffer.extend_from_slice(b"rest");
    let mut taken = CheckedOpening::take(&mut buffer).unwrap().expect("it is complete");
    assert_eq!((&taken.bytes[..], &buffer[..]), (&all[..], &b"rest"[..]));
    assert_eq!(taken.param("SCRIPT_FILENAME"), Some(&b"/a/b.php"[..]));
    assert_eq!(taken.body_len(), Ok(12));
    // Flags are the eleventh byte (FastCGI 1.0, section 8).
    assert_eq!(taken.bytes[10], 1);
    taken.end_connection();
    assert_eq!(taken.bytes[10], 0);
}

#[test]
fn other_openings_are_refused() {
    let begin = |role: u8| record(1, &[0, role, 1, 0, 0, 0, 0, 0]);
    let params = |bytes: &[u8]| [begin(1), record(4, bytes)].concat();
    let mut padded = begin(1);
    padded[6] = 1;
    for (name, bytes) in [
        ("an authorizer", begin(2)),
        ("management", record(9, b"x")),
        ("a body first", record(5, b"x")),
        ("an abort", [begin(1), record(2, b"")].concat()),
        ("two beginnings", [begin(1), begin(1)].concat()),
        ("padding", padded),
        ("a name across records", params(&[9, 0, b'S'])),
        ("a length across records", params(&[0x80])),
        ("a long length", params(&[0xff, 0xff, 0xff, 0xff, 0])),
    ] {
        assert!(take(BytesMut::from(&bytes[..])).is_err(), "{name}");
    }
    let twice = take(opening(&[("SCRIPT_FILENAME", "/a"), ("SCRIPT_FILENAME", "/b")]));
    assert_eq!(twice.unwrap_err(), RequestViolation::Twice("SCRIPT_FILENAME".into()));
    for bad in ["-1", "+1", "1x", "", "99999999999999999999999"] {
        let taken = take(opening(&[("CONTENT_LENGTH", bad)])).unwrap().unwrap();
        assert!(taken.body_len().is_err(), "'{bad}'");
    }
}

#[test]
fn only_scripts_of_the_site_are_passed_on() {
    let plain = scripts(r#"{"kind":"php","root":"./www/","front_controller":"/app.fcgi"}"#);
    for (file, expected) in [
        ("/home/t/www/index.php", Some("index.php")),
        ("/home/t/www/a/b.php", Some("a/b.php")),
        ("/home/t/www/app.fcgi", Some("app.fcgi")),
        ("/home/t/www/a/app.fcgi", None),
        ("/home/t/www/a.jpg", None),
        ("/home/t/www", None),
        ("/home/t/www/", None),
        ("/home/t/wwwx.php", None),
        ("/home/t/www/./a.php", None),
        ("/home/t/www/../a.php", None),
        ("/home/t/www//a.php", None),
        ("/home/t/www/a.jpg\0.php", None),
        ("index.php", None),
        ("", None),
        ("php://input/a.php", None),
    ] {
        let taken = take(opening(&[("SCRIPT_FILENAME", file)])).unwrap().unwrap();
        let found = plain.check(&taken);
        assert_eq!(found.ok().flatten(), expected.map(Path::new), "{file}");
    }
    let none = take(opening(&[("DOCUMENT_ROOT", "/home/t/www")])).unwrap().unwrap();
    assert!(plain.check(&none).is_err(), "no script at all");
    // The root of all is a root, too.
    let all = scripts(r#"{"kind":"php","root":"/"}"#);
    let taken = take(opening(&[("SCRIPT_FILENAME", "/a.php")])).unwrap().unwrap();
    assert_eq!(all.check(&taken).unwrap(), Some(Path::new("a.php")));
    // The operator's record may name another one.
    let set =
        scripts(r#"{"kind":"php","root":"www","env":{"SCRIPT_FILENAME":"/opt/x","DOCUMENT_ROOT":"/y"}}"#);
    let params = [("SCRIPT_FILENAME", "/opt/x"), ("DOCUMENT_ROOT", "/y")];
    assert_eq!(set.check(&take(opening(&params)).unwrap().unwrap()), Ok(None));
}

#[test]
fn a_body_is_records_of_no_more_than_it_says() {
    let mut body = BodyRecords::new(5);
    let (mut from, mut to) = (BytesMut::new(), BytesMut::new());
    let bytes = [record(5, b"abc"), record(5, b"de"), record(1, b"12345678")].concat();
    let whole = bytes.len() - 16;
    for byte in &bytes[..whole] {
        assert!(!body.is_complete());
        from.extend_from_slice(&[*byte]);
        body.pass(&mut from, &mut to).unwrap();
    }
    assert!(body.is_complete());
    assert_eq!(&to[..], &bytes[..whole]);
    from.extend_from_slice(&bytes[whole..]);
    assert_eq!(body.pass(&mut from, &mut to), Err(RequestViolation::Record(1)));
    let mut from = BytesMut::from(&record(5, b"abcdef")[..]);
    assert_eq!(BodyRecords::new(5).pass(&mut from, &mut to), Err(RequestViolation::Body));
}

#[test]
fn the_end_of_an_answer_is_found_however_it_is_cut() {
    let mut padded = record(6, b"more");
    padded[6] = 2;
    padded.extend([0, 0]);
    // What looks like an end in an answer is none.
    let answer = [record(6, &NOT_BEGUN), padded, record(6, b""), record(3, &[0; 8])].concat();
    for len in [1, 3, 8, answer.len()] {
        let mut records = AnswerRecords::default();
        let mut seen = 0;
        for part in answer.chunks(len) {
            assert!(!records.has_ended(), "after {seen} bytes");
            assert_eq!(records.look(part), 0);
            seen += part.len();
        }
        assert!(records.has_ended());
    }
}

// === A worker's end ===

/// A gate before a worker that the test is, and the edge's end.
struct Scene {
    edge: StdStream,
    listener: UnixListener,
    script: String,
    _directory: tempfile::TempDir,
    _gate: ScriptGate,
}

impl Scene {
    fn new() -> Self {
        Self::with_gate(ScriptGate::start().unwrap())
    }

    fn with_gate(gate: ScriptGate) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("a.php");
        std::fs::write(&script, "").unwrap();
        let socket = directory.path().join("worker");
        let listener = UnixListener::bind(&socket).unwrap();
        let door = rustix::fs::open(&socket, OFlags::PATH, Mode::empty()).unwrap();
        let (edge, ours) = StdStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        // The rest of an answer that the edge does not read yet is the gate's.
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
        let backend = format!(r#"{{"kind":"php","root":{:?}}}"#, directory.path());
        let rule = ScriptRule::new(SiteName::new("s").unwrap(), scripts(&backend));
        let worker = connect(&door).unwrap();
        gate.open(GatedWorker { edge: ours.into(), worker, door, rule, whose: "t".into() }).unwrap();
        let script = script.to_str().unwrap().to_owned();
        Self { edge, listener, script, _directory: directory, _gate: gate }
    }

    /// Sends a request with a body of one record, and gives its opening.
    fn ask(&mut self, file: &str, body: &[u8]) -> Vec<u8> {
        let len = body.len().to_string();
        let opening = opening(&[("SCRIPT_FILENAME", file), ("CONTENT_LENGTH", &len)]);
        self.edge.write_all(&[&opening[..], &record(5, body)].concat()).unwrap();
        opening.to_vec()
    }

    /// A request without a body, of which the worker has read all.
    fn begun(&mut self) -> StdStream {
        let (mut worker, _) = self.listener.accept().unwrap();
        let opening = opening(&[("SCRIPT_FILENAME", &self.script)]);
        self.edge.write_all(&opening).unwrap();
        worker.read_exact(&mut vec![0; opening.len()]).unwrap();
        worker
    }

    /// All that the edge is still told.
    fn told(mut self) -> Vec<u8> {
        drop(self.listener);
        let mut told = Vec::new();
        // The gate may close with something unread.
        let _ = self.edge.read_to_end(&mut told);
        told
    }
}

#[test]
fn a_body_goes_on_only_after_the_opening_is_read() {
    let mut scene = Scene::new();
    let (mut worker, _) = scene.listener.accept().unwrap();
    let script = scene.script.clone();
    let opening = scene.ask(&script, b"hello");
    let mut read = vec![0; opening.len()];
    worker.read_exact(&mut read[..10]).unwrap();
    // What is there now is the rest of the opening, and nothing behind it.
    let mut rest = vec![0; 1 << 16];
    let len = worker.read(&mut rest).unwrap();
    assert_eq!(len, opening.len() - 10);
    let mut body = [0; 13];
    worker.read_exact(&mut body).unwrap();
    assert_eq!(body[..], record(5, b"hello"));
    drop(worker);
    assert_eq!(scene.told(), b"", "it may have acted on it");
}

#[test]
fn a_worker_that_ends_before_it_has_read_has_not_begun() {
    for read in [0, 1, 20] {
        let mut scene = Scene::new();
        let (mut worker, _) = scene.listener.accept().unwrap();
        let script = scene.script.clone();
        scene.ask(&script, b"hello");
        worker.read_exact(&mut vec![0; read]).unwrap();
        // Otherwise it could be one that ended before the request came.
        rustix::net::recv(&worker, &mut [0; 1], RecvFlags::PEEK).unwrap();
        drop(worker);
        assert_eq!(scene.told(), NOT_BEGUN, "after {read} bytes");
    }
    // Not even taken up.
    let mut scene = Scene::new();
    let script = scene.script.clone();
    scene.ask(&script, b"hello");
    assert_eq!(scene.told(), NOT_BEGUN);
    // Before there was a request.
    let scene = Scene::new();
    drop(scene.listener.accept().unwrap());
    assert_eq!(scene.told(), NOT_BEGUN);
}

#[test]
fn the_edge_gets_all_that_a_worker_sent_before_it_closed() {
    let part = record(6, &[b'x'; 40_000]);
    let end = record(3, &[0; 8]);
    for answer in [part.clone(), [part, end].concat()] {
        for leaves_body in [false, true] {
            let mut scene = Scene::new();
            let (mut worker, _) = scene.listener.accept().unwrap();
            let script = scene.script.clone();
            let opening = scene.ask(&script, b"hello");
            let body_len = if leaves_body { 0 } else { record(5, b"hello").len() };
            worker.read_exact(&mut vec![0; opening.len() + body_len]).unwrap();
            worker.write_all(&answer).unwrap();
            while !crate::sys::is_all_read(&worker).unwrap() {
                std::thread::yield_now();
            }
            drop(worker);
            let mut heard = vec![0; answer.len()];
            scene.edge.read_exact(&mut heard).unwrap();
            assert!(heard == answer);
        }
    }
}

#[test]
fn an_edge_that_takes_nothing_of_an_answer_loses_it() {
    let times = PassageTimes { part_wait: PART_WAIT, untaken_max: Duration::from_millis(50) };
    let mut scene = Scene::with_gate(ScriptGate::start_with(times).unwrap());
    let (mut worker, _) = scene.listener.accept().unwrap();
    let script = scene.script.clone();
    let opening = scene.ask(&script, b"");
    worker.read_exact(&mut vec![0; opening.len()]).unwrap();
    let answer = [record(6, &[b'x'; 40_000]), record(3, &[0; 8])].concat();
    worker.write_all(&answer).unwrap();
    let mut hang_up = [PollFd::new(&scene.edge, PollFlags::empty())];
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut hang_up, Some(&limit)), Ok(1), "the gate closes its end");
    let heard = scene.told();
    assert!(heard.len() < answer.len() && answer.starts_with(&heard), "{} bytes", heard.len());
}

#[test]
fn short_parts_of_an_answer_go_to_the_edge_together() {
    let times = PassageTimes { part_wait: Duration::from_secs(600), untaken_max: UNTAKEN_MAX };
    let mut scene = Scene::with_gate(ScriptGate::start_with(times).unwrap());
    let (mut worker, _) = scene.listener.accept().unwrap();
    let script = scene.script.clone();
    let opening = scene.ask(&script, b"");
    worker.read_exact(&mut vec![0; opening.len()]).unwrap();
    let (part, end) = (record(6, &[b'x'; 1000]), record(3, &[0; 8]));
    let passed_on = |edge: &StdStream| rustix::io::ioctl_fionread(edge).unwrap() as usize;
    let mut sent = Vec::new();
    // Before it reads a part, it has done with those before.
    for _ in 0..4 {
        worker.write_all(&part).unwrap();
        sent.extend_from_slice(&part);
        while !crate::sys::is_all_read(&worker).unwrap() {
            std::thread::yield_now();
        }
        assert_eq!(passed_on(&scene.edge), 0, "{} bytes are few", sent.len());
    }
    while sent.len() < PART_LEN {
        worker.write_all(&part).unwrap();
        sent.extend_from_slice(&part);
    }
    let mut heard = vec![0; sent.len() + end.len()];
    let (enough, rest) = heard.split_at_mut(PART_LEN);
    scene.edge.read_exact(enough).unwrap();
    worker.write_all(&end).unwrap();
    sent.extend_from_slice(&end);
    scene.edge.read_exact(rest).unwrap();
    assert!(heard == sent, "the last part waits for nothing");
}

#[test]
fn a_script_that_is_not_there_is_none_of_the_workers_business() {
    let mut scene = Scene::new();
    let (mut worker, _) = scene.listener.accept().unwrap();
    let (absent, script) = (scene.script.replace("a.php", "b.php"), scene.script.clone());
    for body in [&b""[..], b"hello"] {
        let body = if body.is_empty() { Vec::new() } else { record(5, body) };
        let len = if body.is_empty() { "0" } else { "5" };
        let opening = opening(&[("SCRIPT_FILENAME", &absent), ("CONTENT_LENGTH", len)]);
        scene.edge.write_all(&[&opening[..], &body].concat()).unwrap();
        let expected = [fastcgi::whole_answer(NO_FILE), UsageReport::Ask.record()].concat();
        let mut answer = vec![0; expected.len()];
        scene.edge.read_exact(&mut answer).unwrap();
        assert_eq!(answer, expected);
    }
    let opening = opening(&[("SCRIPT_FILENAME", &script)]);
    scene.edge.write_all(&opening).unwrap();
    let mut read = vec![0; opening.len()];
    worker.read_exact(&mut read).unwrap();
    assert_eq!(read, opening[..], "the first that it sees, over its first connection");
}

#[test]
fn a_worker_reports_no_use_of_its_own() {
    let end = record(3, &[0; 8]);
    let forged = UsageReport::Known(RequestUsage::default()).record();
    for (behind, expected) in [(&b""[..], UsageReport::Ask.record()), (&forged, Vec::new())] {
        let mut scene = Scene::new();
        let mut worker = scene.begun();
        worker.write_all(&[&end, behind].concat()).unwrap();
        let mut heard = vec![0; end.len() + expected.len()];
        scene.edge.read_exact(&mut heard).unwrap();
        assert_eq!(heard, [end.clone(), expected].concat());
        if behind.is_empty() {
            worker.write_all(&forged).unwrap();
        }
        let told = scene.told();
        assert!(told.is_empty() || told == NOT_BEGUN, "the worker serves nobody any more: {told:?}");
    }
}

#[test]
fn a_worker_whose_client_has_left_learns_it_when_it_writes() {
    let mut scene = Scene::new();
    let mut worker = scene.begun();
    let said = record(6, b"X-A: 1\r\n\r\nhello");
    worker.write_all(&said).unwrap();
    let mut heard = vec![0; said.len()];
    scene.edge.read_exact(&mut heard).unwrap();
    assert_eq!(heard, said, "until it leaves it hears all");
    scene.edge.shutdown(std::net::Shutdown::Write).unwrap();
    // A moment may pass until the gate has seen that.
    while worker.write_all(&record(6, b"more")).is_ok() {
        std::thread::yield_now();
    }
    scene.edge.set_nonblocking(true).unwrap();
    let mut one = [0; 1 << 16];
    while scene.edge.read(&mut one).is_ok_and(|len| len > 0) {}
    let nothing = scene.edge.read(&mut one).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock, "it is kept as long as the worker works");
    scene.edge.set_nonblocking(false).unwrap();
    // As PHP does when the script has ended: it closes, and takes the next connection.
    drop(worker);
    let (mut next, _) = scene.listener.accept().unwrap();
    next.read_exact(&mut [0; 8]).unwrap();
    next.write_all(&record(10, b"")).unwrap();
    assert_eq!(scene.edge.read(&mut one).unwrap(), 0);
}
