//! Facts about requests to an instance by FastCGI, with a program at the other end of a socket pair.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream as Peer;
use std::thread::JoinHandle;

use nagaya_base::RequestId;
use nagaya_keeper_api::fastcgi::{END_OF_BODY, RequestOpening};
use nagaya_records::SiteName;

use super::*;
use crate::backends::programs::testing::{HANG, known, text};

const ANSWER: &[u8] = b"\x01\x06\0\x01\0\x0c\0\0A: b\r\n\r\nhere\x01\x03\0\x01\0\x08\0\0\0\0\0\0\0\0\0\0";

fn call(method: Method, text: &'static str) -> InstanceCall {
    let after = Rc::new(BackgroundJobs::default());
    after.begin();
    InstanceCall {
        opening: RequestOpening::new(ConnectionReuse::Closed).finish(),
        body: if text.is_empty() { RequestBody::empty() } else { known(text) },
        errors: ErrorLines::new("FastCGI", SiteName::new("demo").unwrap(), RequestId(7)),
        method,
        name: "index.php".into(),
        silence: HANG,
        after,
    }
}

/// Status and text, or why there is none and whether the call may be made again.
type Said = Result<(u16, String), (Refusal, bool)>;

/// Makes the call to a program.
fn made<T: Send + 'static>(
    call: impl FnOnce() -> InstanceCall,
    program: impl FnOnce(Peer) -> T + Send + 'static,
) -> (Said, T) {
    let (ours, theirs) = Peer::pair().unwrap();
    theirs.set_read_timeout(Some(HANG)).unwrap();
    let program: JoinHandle<T> = std::thread::spawn(move || program(theirs));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let said = tokio::task::LocalSet::new().block_on(&runtime, async {
        match call().over(QuietStream::new(ours.into()).unwrap(), None).await {
            Ok(ProgramOutcome::Response(response)) => Ok((response.status.as_u16(), text(response).await)),
            Ok(ProgramOutcome::LocalRedirect { .. }) => panic!("it leads nowhere"),
            Err(UnansweredCall { refusal, again }) => Err((refusal, again.is_some())),
        }
    });
    (said, program.join().unwrap())
}

fn read_to(peer: &mut Peer, end: &[u8]) -> Vec<u8> {
    let mut seen = Vec::new();
    while !seen.ends_with(end) {
        let mut byte = [0];
        peer.read_exact(&mut byte).unwrap();
        seen.push(byte[0]);
    }
    seen
}

#[test]
fn body_ends_with_its_record_and_connection_with_the_answer() {
    for (method, text) in [(Method::GET, ""), (Method::POST, "form")] {
        let (said, (seen, rest)) = made(
            move || call(method, text),
            |mut peer| {
                let seen = read_to(&mut peer, &END_OF_BODY);
                peer.write_all(ANSWER).unwrap();
                let mut rest = Vec::new();
                peer.read_to_end(&mut rest).unwrap();
                (seen, rest)
            },
        );
        assert_eq!(said.unwrap(), (200, "here".to_owned()));
        let (opening, carried) = seen.split_at(RequestOpening::new(ConnectionReuse::Closed).finish().len());
        assert_eq!(opening[10], 0, "the program is to close the connection");
        let expected: Vec<u8> = match text {
            "" => vec![],
            text => [b"\x01\x05\0\x01\0\x04\0\0", text.as_bytes()].concat(),
        };
        assert_eq!(carried, [expected, END_OF_BODY.to_vec()].concat());
        assert_eq!(rest, b"", "nothing else came, and then the end");
    }
}

#[test]
fn a_program_that_is_gone_before_it_reads_costs_no_request() {
    // The other end is closed before anything is written.
    for method in [Method::GET, Method::POST] {
        let (ours, theirs) = Peer::pair().unwrap();
        drop(theirs);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let again = tokio::task::LocalSet::new().block_on(&runtime, async {
            call(method, "").over(QuietStream::new(ours.into()).unwrap(), None).await.err().unwrap().again
        });
        assert!(again.is_some());
    }
}

#[test]
fn request_that_was_read_is_repeated_only_if_harmless() {
    let reads_and_dies = |mut peer: Peer| drop(read_to(&mut peer, &END_OF_BODY));
    for (method, text, expected) in
        [(Method::GET, "", true), (Method::POST, "", false), (Method::PUT, "form", false)]
    {
        let (said, ()) = made(move || call(method, text), reads_and_dies);
        assert_eq!(said.unwrap_err().1, expected);
    }
    // The end of the body lies there unread while a script runs, so that a reset tells nothing.
    let (said, ()) = made(
        || call(Method::POST, ""),
        |mut peer| drop(read_to(&mut peer, &RequestOpening::new(ConnectionReuse::Closed).finish())),
    );
    assert!(!said.unwrap_err().1);
    let (said, ()) = made(
        || call(Method::GET, ""),
        |mut peer| {
            read_to(&mut peer, &END_OF_BODY);
            peer.write_all(&ANSWER[..12]).unwrap();
        },
    );
    let (refusal, again) = said.unwrap_err();
    assert!(!again && matches!(refusal, Refusal::BackendInvalid(_)), "{refusal:?}: an answer had begun");
}
