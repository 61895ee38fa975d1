//! Tests of images between nodes. Each node's keeper is made up: it speaks the keeper's protocol, holds an image in memory,
//! and breaks off when the test says so.
//!
//! Not here: what keepers make of the bytes (`keeper/tests/kernel/transfer`), real nodes (`tests/e2e/cluster`).

use std::cell::RefCell;
use std::path::PathBuf;

use nagaya_keeper_api::protocol::{FailureKind, Verb, VerbReply};
use nagaya_records::feed::FetchResult;
use tempfile::TempDir;
use tokio::net::unix::pipe;

use super::*;
use crate::cluster::peers::images::orders::ImageOrder;
use crate::cluster::peers::images::take::{ImageFetcher, take};

/// More than any window or pipe on the way holds.
const LEN: usize = 900_001;

/// As the supervisor gave it, with what a header field must be able to carry.
const ORDER: &str = r#"00ff {"site":"demo","from":"b"}"#;

/// What one keeper has, and was asked.
#[derive(Default)]
struct Depot {
    /// With its digest.
    image: RefCell<Option<(String, Vec<u8>)>>,
    /// What it says the digest is, if that is not true any more.
    outdated: RefCell<Option<String>>,
    /// So much of an image is sent before the keeper breaks off.
    sends_max: Cell<Option<usize>>,
    /// From which byte on an image was sent.
    sent_from: RefCell<Vec<u64>>,
    asked: Cell<usize>,
    takes_any_order: Cell<bool>,
    staged: RefCell<Vec<u8>>,
    /// Digest and length of what is to come.
    coming: RefCell<Option<(String, usize)>>,
    /// The pipe has ended.
    ended: Cell<bool>,
    notify: Notify,
}

fn content() -> Vec<u8> {
    (0..LEN).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect()
}

impl Depot {
    fn empty() -> Rc<Self> {
        Rc::default()
    }

    fn with_image(digest: &str) -> Rc<Self> {
        let depot = Self::empty();
        *depot.image.borrow_mut() = Some((digest.into(), content()));
        depot
    }

    async fn reply(self: &Rc<Self>, verb: Verb) -> (VerbReply, Option<OwnedFd>) {
        self.asked.set(self.asked.get() + 1);
        match verb {
            Verb::OfferImage { order, .. }
            | Verb::SendImage { order, .. }
            | Verb::FetchImage { order, .. }
            | Verb::ImageFetched { order, .. }
                if order != ORDER && !self.takes_any_order.get() =>
            {
                (failed(FailureKind::Forbidden, "nobody has ordered it"), None)
            }
            Verb::OfferImage { .. } => (self.offer(), None),
            Verb::SendImage { digest, offset, .. } => self.send(&digest, offset),
            Verb::FetchImage { offer, .. } => self.fetch(&offer),
            Verb::ImageFetched { .. } => (self.fetched().await, None),
            other => panic!("{other:?} is asked"),
        }
    }

    fn offer(&self) -> VerbReply {
        let image = self.image.borrow();
        let Some((digest, bytes)) = &*image else {
            return VerbReply::Offered { offer: None, digest: String::new(), bytes: 0 };
        };
        let digest = self.outdated.borrow().clone().unwrap_or_else(|| digest.clone());
        let offer = Some(format!("{digest} {}", bytes.len()));
        VerbReply::Offered { offer, digest, bytes: bytes.len() as u64 }
    }

    fn send(&self, digest: &str, offset: u64) -> (VerbReply, Option<OwnedFd>) {
        let image = self.image.borrow().clone();
        let Some((_, bytes)) = image.filter(|(known, _)| known == digest) else {
            return (failed(FailureKind::NotFound, "there is another one now"), None);
        };
        self.sent_from.borrow_mut().push(offset);
        let end = self.sends_max.get().map_or(LEN, |max| LEN.min(usize::try_from(offset).unwrap() + max));
        let (read, write) = rustix::pipe::pipe().unwrap();
        spawn_local(async move {
            let mut write = pipe::Sender::from_owned_fd(write).unwrap();
            // Whoever reads may leave.
            let _ = write.write_all(&bytes[usize::try_from(offset).unwrap()..end]).await;
        });
        (VerbReply::Sending, Some(read))
    }

    fn fetch(self: &Rc<Self>, offer: &str) -> (VerbReply, Option<OwnedFd>) {
        let (digest, len) = offer.split_once(' ').unwrap();
        *self.coming.borrow_mut() = Some((digest.into(), len.parse().unwrap()));
        self.ended.set(false);
        let (read, write) = rustix::pipe::pipe().unwrap();
        let depot = Rc::clone(self);
        spawn_local(async move {
            let mut read = pipe::Receiver::from_owned_fd(read).unwrap();
            let mut came = Vec::new();
            read.read_to_end(&mut came).await.unwrap();
            depot.staged.borrow_mut().extend(came);
            depot.ended.set(true);
            depot.notify.notify_one();
        });
        let offset = self.staged.borrow().len() as u64;
        (VerbReply::Fetching { offset, bytes: len.parse::<u64>().unwrap() - offset }, Some(write))
    }

    async fn fetched(&self) -> VerbReply {
        while !self.ended.get() {
            self.notify.notified().await;
        }
        let (digest, len) = self.coming.take().unwrap();
        if self.staged.borrow().len() < len {
            return failed(FailureKind::Broken, "it ends too early");
        }
        *self.image.borrow_mut() = Some((digest, self.staged.take()));
        VerbReply::Done
    }
}

fn failed(failure: FailureKind, message: &str) -> VerbReply {
    VerbReply::Failed { failure, code: 364, message: message.into() }
}

/// Where this keeper is reached.
fn keeper(depot: &Rc<Depot>) -> (TempDir, PathBuf) {
    let depot = Rc::clone(depot);
    made_up::keeper(move |verb| {
        let depot = Rc::clone(&depot);
        Box::pin(async move { depot.reply(verb).await })
    })
}

/// Node `a`, whose keeper is `here`, and node `b`, which runs the site and whose keeper is `there`.
struct Two {
    node: Rc<ThreadContext>,
    remote: Remote,
    _dirs: [TempDir; 2],
}

impl Two {
    fn fetcher(&self) -> ImageFetcher {
        let placer = &self.node.services.placer;
        ImageFetcher {
            keeper: Rc::clone(&self.node.keeper),
            pool: Rc::clone(&placer.peers),
            cluster: Arc::clone(&placer.cluster),
            metrics: Arc::clone(&placer.metrics),
        }
    }
}

fn two(ca: &Ca, name: &str, here: &Rc<Depot>, there: &Rc<Depot>) -> Two {
    let ((dir_here, path_here), (dir_there, path_there)) = (keeper(here), keeper(there));
    let remote = Remote::start_with(ca.options("b", "b"), &path_there, |_| async { text("a request") });
    let nodes = [record("b", remote.address)];
    let (node, _) = node_with(ca.options(name, name), &nodes, placement("b", 1), &path_here);
    Two { node, remote, _dirs: [dir_here, dir_there] }
}

async fn fetch(two: &Two) -> Result<FetchResult, String> {
    fetch_by(two, "b", ORDER).await
}

async fn fetch_by(two: &Two, from: &str, order: &str) -> Result<FetchResult, String> {
    let order = ImageOrder { tag: 1, site: site(), from: name(from), order: order.into() };
    take(&two.fetcher(), &order).await.map_err(|error| error.to_string())
}

fn here(digest: &str, bytes: usize) -> Result<FetchResult, String> {
    Ok(FetchResult::Here { digest: digest.into(), bytes: bytes as u64 })
}

#[test]
fn an_image_comes_whole_and_once() {
    run(async {
        let (ours, theirs) = (Depot::empty(), Depot::with_image("d1"));
        let two = two(&Ca::new(), "a", &ours, &theirs);
        assert_eq!(fetch(&two).await, here("d1", LEN));
        assert_eq!(*ours.image.borrow(), Some(("d1".into(), content())));
        assert_eq!(fetch(&two).await, here("d1", 0));
        assert_eq!(*theirs.sent_from.borrow(), [0]);
        let text = two.node.shared.metrics.encode();
        for line in [
            r#"nagaya_images_taken_total{result="here"} 1"#.to_owned(),
            format!(r#"nagaya_image_transfer_bytes_total{{direction="in"}} {LEN}"#),
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
    });
}

#[test]
fn interrupted_image_transfer_resumes_where_it_ended() {
    run(async {
        let (ours, theirs) = (Depot::empty(), Depot::with_image("d1"));
        let two = two(&Ca::new(), "a", &ours, &theirs);
        theirs.sends_max.set(Some(300_000));
        for _ in 0..3 {
            let broken = fetch(&two).await.unwrap_err();
            assert!(broken.contains("too early"), "{broken}");
        }
        assert_eq!(fetch(&two).await, here("d1", 1));
        assert_eq!(*theirs.sent_from.borrow(), [0, 300_000, 600_000, 900_000]);
        assert_eq!(*ours.image.borrow(), Some(("d1".into(), content())));
    });
}

#[test]
fn a_node_that_ends_midway_leaves_what_came() {
    run(async {
        let (ours, theirs) = (Depot::empty(), Depot::with_image("d1"));
        let ca = Ca::new();
        let mut first = two(&ca, "a", &ours, &theirs);
        theirs.sends_max.set(Some(200_000));
        fetch(&first).await.unwrap_err();
        first.remote.kill();
        let gone = fetch(&first).await.unwrap_err();
        assert!(gone.starts_with("b: "), "{gone}");
        theirs.sends_max.set(None);
        let second = two(&ca, "a", &ours, &theirs);
        assert_eq!(fetch(&second).await, here("d1", LEN - 200_000));
    });
}

#[test]
fn an_image_that_is_another_by_now_does_not_come() {
    run(async {
        let (ours, theirs) = (Depot::empty(), Depot::with_image("d2"));
        *theirs.outdated.borrow_mut() = Some("d1".into());
        let two = two(&Ca::new(), "a", &ours, &theirs);
        let refused = fetch(&two).await.unwrap_err();
        assert!(refused.contains("409") && refused.contains("another one now"), "{refused}");
        assert!(ours.staged.borrow().is_empty() && ours.image.borrow().is_none());
        theirs.outdated.take();
        assert_eq!(fetch(&two).await, here("d2", LEN));
    });
}

#[test]
fn where_there_is_none_yet_none_comes() {
    run(async {
        let (ours, theirs) = (Depot::empty(), Depot::empty());
        let two = two(&Ca::new(), "a", &ours, &theirs);
        assert_eq!(fetch(&two).await, Ok(FetchResult::None));
        let unknown = fetch_by(&two, "c", ORDER).await.unwrap_err();
        assert!(unknown.contains("'c' is no other member"), "{unknown}");
    });
}

#[test]
fn image_is_refused_to_a_node_outside_the_cluster() {
    run(async {
        let (ours, theirs) = (Depot::empty(), Depot::with_image("d1"));
        let ca = Ca::new();
        let stranger = two(&ca, "c", &ours, &theirs);
        fetch(&stranger).await.unwrap_err();
        assert_eq!(theirs.asked.get(), 0, "it was not let in");

        let member = two(&ca, "a", &ours, &theirs);
        theirs.sends_max.set(Some(0));
        fetch(&member).await.unwrap_err();
        let asked = theirs.asked.get();
        assert!(asked > 0, "it was let in");
        member.remote.shared.upgrade().unwrap().apply([RecordChange::DropNode(name("a"))]).unwrap();
        let refused = fetch(&member).await.unwrap_err();
        assert!(refused.contains("400"), "{refused}");
        assert_eq!(theirs.asked.get(), asked, "its connection is open still, and asks for nothing");
    });
}

#[test]
fn an_order_goes_to_both_keepers_and_its_refusal_comes_back() {
    run(async {
        let (ours, theirs) = (Depot::empty(), Depot::with_image("d1"));
        let two = two(&Ca::new(), "a", &ours, &theirs);
        let refused = fetch_by(&two, "b", "another").await.unwrap_err();
        assert!(refused.contains("nobody has ordered it"), "{refused}");
        assert_eq!(theirs.asked.get(), 0, "its own keeper has refused it");
        // One that its own keeper takes, and the other's does not.
        ours.takes_any_order.set(true);
        let refused = fetch_by(&two, "b", "another").await.unwrap_err();
        assert!(refused.contains("403") && refused.contains("nobody has ordered it"), "{refused}");
        assert_eq!(theirs.asked.get(), 1);
        assert!(ours.image.borrow().is_none());
    });
}

#[test]
fn no_clients_request_asks_for_an_image() {
    run(async {
        let (ours, theirs) = (Depot::empty(), Depot::with_image("d1"));
        let two = two(&Ca::new(), "a", &ours, &theirs);
        let mut forged = get();
        forged.head.headers.insert("nagaya-peer-image", HeaderValue::from_static("demo"));
        let answer =
            send(&two.node.services.placer.peers, &record("b", two.remote.address), forged).await.unwrap();
        assert_eq!(read(answer).await.1, b"a request");
        assert_eq!(theirs.asked.get(), 0);
    });
}
