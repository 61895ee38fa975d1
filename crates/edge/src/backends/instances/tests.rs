//! Tests of a thread's use of instances against a peer that speaks the keeper's protocol and answers as the test says.
//!
//! Not here: real instances behind a real keeper (`tests/e2e`).

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use nagaya_keeper_api::codec;
use nagaya_keeper_api::codec::CodecError;
use nagaya_keeper_api::protocol::{KeeperMessage, PROTOCOL_VERSION, Verb, VerbCall, VerbReply};
use nagaya_records::instance::{Tier, WakeStage};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tempfile::TempDir;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::timeout;

use super::*;

/// Nothing in these tests takes longer than this unless it hangs.
const HANG: Duration = Duration::from_secs(20);

/// The keeper's end: each question comes out of `asked`, and is answered when the test says so.
struct Peer {
    _dir: TempDir,
    accepting: tokio::task::JoinHandle<()>,
    asked: mpsc::Receiver<(VerbCall, Rc<UnixStream>)>,
}

/// A question with the connection it came by.
struct Question(VerbCall, Rc<UnixStream>);

impl Peer {
    fn listen() -> (Self, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keeper");
        let listener = seqpacket();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        let (tell, asked) = mpsc::channel(64);
        let listener = UnixListener::from_std(listener.into()).unwrap();
        let accepting = spawn_local(accept(listener, tell));
        (Self { _dir: dir, accepting, asked }, path)
    }

    async fn next(&mut self) -> Question {
        let (ask, connection) =
            timeout(HANG, self.asked.recv()).await.expect("a question").expect("it listens");
        Question(ask, connection)
    }

    /// The next question, which must be for the site's instance.
    async fn use_asked(&mut self) -> Question {
        let question = self.next().await;
        assert!(matches!(question.0.verb, Verb::UseInstance { .. }), "{:?}", question.0.verb);
        question
    }

    /// Nothing is asked that was not answered.
    fn is_silent(&mut self) -> bool {
        self.asked.try_recv().is_err()
    }
}

impl Question {
    fn answer(&self, reply: VerbReply, descriptor: Option<&OwnedFd>) {
        let bytes = codec::encode(&KeeperMessage::Reply { tag: self.0.tag, reply }).unwrap();
        let descriptors: Vec<_> = descriptor.into_iter().map(AsFd::as_fd).collect();
        codec::send(&*self.1, &bytes, &descriptors).unwrap();
    }

    /// The instance is awake; gives the other end of the connection to it.
    fn using(&self, instance: u64, wake: Option<WakeReport>) -> OwnedFd {
        let (ours, theirs) = pair();
        self.answer(VerbReply::Using { instance: InstanceId(instance), wake }, Some(&theirs));
        ours
    }

    fn close(&self) {
        rustix::net::shutdown(&*self.1, rustix::net::Shutdown::Both).unwrap();
    }
}

fn seqpacket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

fn pair() -> (OwnedFd, OwnedFd) {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

async fn accept(listener: UnixListener, tell: mpsc::Sender<(VerbCall, Rc<UnixStream>)>) {
    loop {
        let (connection, _) = listener.accept().await.unwrap();
        spawn_local(converse(Rc::new(connection), tell.clone()));
    }
}

async fn converse(connection: Rc<UnixStream>, tell: mpsc::Sender<(VerbCall, Rc<UnixStream>)>) {
    let mut buffer = Vec::new();
    loop {
        connection.readable().await.unwrap();
        let received = connection.try_io(Interest::READABLE, || {
            codec::receive::<VerbCall>(&*connection, &mut buffer).map_err(|error| match error {
                CodecError::NotReady => io::ErrorKind::WouldBlock.into(),
                error => io::Error::other(error),
            })
        });
        match received {
            Ok((VerbCall { tag, verb: Verb::Hello { .. } }, _)) => {
                Question(VerbCall { tag, verb: Verb::Status }, Rc::clone(&connection))
                    .answer(VerbReply::Hello { version: PROTOCOL_VERSION }, None);
            }
            Ok((ask, _)) => tell.send((ask, Rc::clone(&connection))).await.unwrap(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_closed) => return,
        }
    }
}

fn run<F: Future>(test: impl FnOnce(Peer, Rc<InstanceTable>) -> F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let (peer, path) = Peer::listen();
        let instances = thread_of(&path);
        timeout(HANG, test(peer, instances)).await.expect("the test hangs")
    })
}

fn thread_of(path: &Path) -> Rc<InstanceTable> {
    let metrics = Arc::new(EdgeMetrics::new());
    InstanceTable::new(
        KeeperClient::later(path),
        Rc::new(UpstreamPool::new(Arc::clone(&metrics))),
        metrics,
        Arc::default(),
    )
}

fn site() -> SiteName {
    SiteName::new("wiki").unwrap()
}

fn wake() -> WakeReport {
    WakeReport { from: Tier::Image, stages: vec![(WakeStage::Restore, 38_000)], predicted_us: None }
}

#[test]
fn concurrent_requests_ask_once_and_the_first_gets_the_stream() {
    run(|mut peer, instances| async move {
        let holds = [(); 3].map(|()| instances.hold(&site(), None));
        let question = peer.use_asked().await;
        let _app = question.using(7, Some(wake()));
        for hold in &holds {
            let awake = hold.awake().await.unwrap();
            assert_eq!((awake.instance, awake.wake.as_deref()), (InstanceId(7), Some(&wake())));
        }
        let late = instances.hold(&site(), None);
        assert!(late.awake().await.unwrap().wake.is_none(), "it came to one that ran");
        let address = UpstreamAddress::Instance(InstanceId(7));
        assert!(holds[0].connect(&address).await.is_ok());
        assert!(peer.is_silent(), "the first connection came with the answer");
        let second = spawn_local(async move { holds[1].connect(&address).await.is_ok() });
        let question = peer.next().await;
        assert_eq!(question.0.verb, Verb::ConnectInstance { instance: InstanceId(7) });
        question.answer(VerbReply::Connected, Some(&pair().1));
        assert!(second.await.unwrap());
    });
}

#[test]
fn a_connection_that_nobody_waits_for_is_not_kept() {
    run(|mut peer, instances| async move {
        let in_line = instances.hold(&site(), None);
        let app = peer.use_asked().await.using(7, None);
        rustix::io::ioctl_fionbio(&app, true).unwrap();
        let app = UnixStream::from_std(app.into()).unwrap();
        app.readable().await.unwrap();
        assert_eq!(app.try_read(&mut [0]).unwrap(), 0, "it is closed before the request's turn has come");
        assert_eq!(in_line.awake().await.unwrap().instance, InstanceId(7), "and the instance is kept awake");
    });
}

#[test]
fn it_is_given_back_once_no_request_has_needed_it_for_a_while() {
    run(|mut peer, instances| async move {
        let hold = instances.hold(&site(), None);
        let _app = peer.use_asked().await.using(1, None);
        hold.awake().await.unwrap();
        drop(hold);
        let again = instances.hold(&site(), None);
        assert_eq!(again.awake().await.unwrap().instance, InstanceId(1), "it is still used");
        drop(again);
        assert_eq!(peer.next().await.0.verb, Verb::LeaveInstance { instance: InstanceId(1) });
        assert!(instances.uses.borrow().is_empty());
        let hold = instances.hold(&site(), None);
        let _app = peer.use_asked().await.using(2, None);
        assert_eq!(hold.awake().await.unwrap().instance, InstanceId(2));
    });
}

#[test]
fn abandoned_instance_goes_with_its_last_request() {
    run(|mut peer, instances| async move {
        let other = instances.hold(&SiteName::new("other").unwrap(), None);
        let _other_app = peer.use_asked().await.using(1, None);
        let holds = [(); 2].map(|()| instances.hold(&site(), None));
        let _app = peer.use_asked().await.using(2, None);
        for hold in holds.iter().chain([&other]) {
            hold.awake().await.unwrap();
        }
        instances.give_up(|name| *name == site());
        yield_now().await;
        assert!(peer.is_silent(), "requests need it");
        let [first, last] = holds;
        drop((other, first));
        yield_now().await;
        assert!(peer.is_silent(), "another request needs it");
        drop(last);
        // Before the one that was left alone earlier.
        assert_eq!(peer.next().await.0.verb, Verb::LeaveInstance { instance: InstanceId(2) });
        assert_eq!(peer.next().await.0.verb, Verb::LeaveInstance { instance: InstanceId(1) });
        // One that nobody needs just now goes at once.
        let hold = instances.hold(&site(), None);
        let _app = peer.use_asked().await.using(3, None);
        hold.awake().await.unwrap();
        drop(hold);
        instances.give_up(|name| *name == site());
        assert_eq!(peer.next().await.0.verb, Verb::LeaveInstance { instance: InstanceId(3) });
    });
}

#[test]
fn instance_nobody_waits_for_is_forgotten_and_given_back() {
    run(|mut peer, instances| async move {
        let (first, second) = (instances.hold(&site(), None), instances.hold(&site(), None));
        let question = peer.use_asked().await;
        drop(first);
        assert!(!instances.uses.borrow().is_empty(), "another waits");
        drop(second);
        assert!(instances.uses.borrow().is_empty());
        assert_eq!(peer.next().await.0.verb, Verb::Forget { tag: question.0.tag });
        // It was on its way already.
        let _app = question.using(1, Some(wake()));
        assert_eq!(peer.next().await.0.verb, Verb::LeaveInstance { instance: InstanceId(1) });
    });
}

#[test]
fn one_that_ended_is_asked_for_anew_by_all_together() {
    run(|mut peer, instances| async move {
        let (first, second) = (instances.hold(&site(), None), instances.hold(&site(), None));
        let _app = peer.use_asked().await.using(1, None);
        let ended = first.awake().await.unwrap().instance;
        assert_eq!(second.awake().await.unwrap().instance, ended);
        first.renew(ended);
        second.renew(ended);
        let mut left = 0;
        loop {
            let question = peer.next().await;
            match question.0.verb {
                Verb::LeaveInstance { instance } if instance == ended => left += 1,
                _ => {
                    std::mem::forget(question.using(2, Some(wake())));
                    break;
                }
            }
        }
        for hold in [&first, &second] {
            let awake = hold.awake().await.unwrap();
            assert_eq!(awake.instance, InstanceId(2));
            assert!(awake.wake.is_some(), "they waited for this wake");
        }
        if left == 0 {
            assert_eq!(peer.next().await.0.verb, Verb::LeaveInstance { instance: ended });
        }
        first.renew(ended);
        assert_eq!(first.awake().await.unwrap().instance, InstanceId(2), "that one has not ended");
        assert!(peer.is_silent());
    });
}

#[test]
fn failure_reaches_all_waiters_and_the_next_request_asks_anew() {
    run(|mut peer, instances| async move {
        let holds = [(); 2].map(|()| instances.hold(&site(), None));
        let failed = |failure| VerbReply::Failed { failure, code: 310, message: "it ended".into() };
        peer.use_asked().await.answer(failed(FailureKind::Broken), None);
        for hold in &holds {
            assert!(matches!(hold.awake().await, Err(Refusal::BackendUnreachable(_))));
        }
        let next = instances.hold(&site(), None);
        peer.use_asked().await.answer(failed(FailureKind::Busy), None);
        assert!(matches!(next.awake().await, Err(Refusal::Overloaded(_))));
    });
}

#[test]
fn restarted_keeper_is_asked_again_for_awake_instances() {
    run(|mut peer, instances| async move {
        let hold = instances.hold(&site(), None);
        let question = peer.use_asked().await;
        let _app = question.using(1, None);
        hold.awake().await.unwrap();
        question.close();
        // The thread learns of it when it next looks at the socket.
        while instances.is_kept(&instances.uses.borrow()[&site()]) {
            sleep(Duration::from_millis(1)).await;
        }
        let next = instances.hold(&site(), None);
        let question = peer.use_asked().await;
        let _app = question.using(1, None);
        assert_eq!(next.awake().await.unwrap().instance, InstanceId(1));
        drop((hold, next));
        assert_eq!(peer.next().await.0.verb, Verb::LeaveInstance { instance: InstanceId(1) });
        assert!(peer.is_silent(), "the old keeper's instance is not given back to the new one");
    });
}

#[test]
fn a_keeper_that_is_not_there_yet_is_waited_for() {
    run(|mut peer, instances| async move {
        let hold = instances.hold(&site(), None);
        peer.use_asked().await.close();
        let _app = peer.use_asked().await.using(3, Some(wake()));
        assert_eq!(hold.awake().await.unwrap().instance, InstanceId(3));
        peer.accepting.abort();
    });
}
