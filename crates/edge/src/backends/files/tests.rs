//! The file server over real directories. This file holds what the tests share.

pub mod answers;
pub mod confinement;
pub mod freshness;
pub mod links;
pub mod programs;

use std::cell::{Cell, RefCell};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Version};
use nagaya_base::RequestId;
use nagaya_keeper_api::client::KeeperCallError;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::SiteName;
use tempfile::TempDir;

use super::*;
use crate::backends::files::links::{OpeningLink, SiteLinks};
use crate::http::message::{BodyPart, ConnInfo};

/// Long enough for every file made by a test to have been quiet.
const LATER: Duration = Duration::from_secs(3600);

/// The machine's clock, set forward by `ahead`.
#[derive(Default)]
struct ShiftedClock {
    ahead: Cell<Duration>,
    /// It goes on only by `pass` since then.
    stopped: Cell<Option<Instant>>,
}

impl ShiftedClock {
    fn pass(&self, time: Duration) {
        self.ahead.set(self.ahead.get() + time);
    }

    fn stop(&self) {
        self.stopped.set(Some(Instant::now()));
    }
}

impl Clock for ShiftedClock {
    fn now(&self) -> Instant {
        self.stopped.get().unwrap_or_else(Instant::now) + self.ahead.get()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now() + self.ahead.get()
    }
}

/// Follows every link wherever it leads, or none.
struct TestOpener {
    root: PathBuf,
    follows: Cell<bool>,
    asked: RefCell<Vec<String>>,
}

impl LinkOpener for TestOpener {
    fn open_link<'a>(&'a self, _: &'a SiteName, path: &'a str) -> OpeningLink<'a> {
        use rustix::fs::{CWD, Mode, OFlags};
        self.asked.borrow_mut().push(path.to_owned());
        let refuse =
            |failure| KeeperCallError::Refused { failure, code: 358, message: "a secret reason".into() };
        let open = || {
            let dir = rustix::fs::openat(CWD, self.root.join(path), OFlags::RDONLY, Mode::empty());
            let dir = dir.map_err(|_| refuse(FailureKind::NotFound))?;
            Ok(OpenedRoot { dir, is_remote: false, stamp: None })
        };
        let opened = if self.follows.get() { open() } else { Err(refuse(FailureKind::Forbidden)) };
        Box::pin(async { opened })
    }
}

/// A document root `root` in a directory of its own, and a file server.
struct World {
    dir: TempDir,
    root: DocumentRoot,
    opener: Rc<TestOpener>,
    server: FileServer,
    clock: Rc<ShiftedClock>,
    files: FileRoot,
    programs: ProgramKind,
    mount: &'static str,
}

/// Looks may go on on another thread.
fn now_or_later<F: Future>(work: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(work)
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }
}

impl World {
    /// Its clock is ahead, so that files count as quiet and are kept.
    fn new() -> Self {
        let world = Self::now();
        world.clock.pass(LATER);
        world
    }

    /// Its clock is the machine's.
    fn now() -> Self {
        Self::with_cache(32 << 20)
    }

    fn with_cache(bytes: usize) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::create_dir(dir.path().join("root")).expect("a directory");
        let clock = Rc::new(ShiftedClock::default());
        let root = dir.path().join("root");
        let (follows, asked) = (Cell::new(false), RefCell::default());
        let opener = Rc::new(TestOpener { root: root.clone(), follows, asked });
        let (turns, pool) = (Rc::default(), Arc::default());
        Self {
            root: open_root(&root),
            dir,
            server: FileServer::with_clock(bytes, clock.clone(), turns, pool, opener.clone()),
            opener,
            clock,
            files: FileRoot::default(),
            programs: ProgramKind::None,
            mount: "/",
        }
    }

    fn path(&self, rel: &str) -> PathBuf {
        self.dir.path().join("root").join(rel)
    }

    fn write(&self, rel: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(rel);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(&path, content).expect("a file");
        path
    }

    fn ask(&self, method: Method, target: &str, fields: &[(&str, &str)]) -> Result<Answer, Refusal> {
        let head = head(method, target, fields);
        let path = SitePath::parse(&head.path)?;
        let rel = path.below(self.mount)?.expect("a path of this site");
        let ctx = FileContext {
            head: &head,
            files: &self.files,
            programs: self.programs,
            root: &self.root,
            path: &path,
            rel,
        };
        let response = now_or_later(self.server.serve(&ctx))?;
        let length = response.body.len().expect("known before sending");
        let body = collect(response.body);
        assert_eq!(body.len() as u64, length);
        Ok(Answer { status: response.status.as_u16(), headers: response.headers.into_map(), body })
    }

    fn get_with(&self, target: &str, fields: &[(&str, &str)]) -> Answer {
        self.ask(Method::GET, target, fields).unwrap_or_else(|refusal| panic!("{target}: {refusal}"))
    }

    fn get(&self, target: &str) -> Answer {
        self.get_with(target, &[])
    }

    fn refusal(&self, target: &str) -> Refusal {
        match self.ask(Method::GET, target, &[]) {
            Err(refusal) => refusal,
            Ok(answer) => panic!("{target}: {}", answer.status),
        }
    }

    fn kept(&self) -> usize {
        self.server.cache.borrow().len()
    }
}

fn open_dir(path: &Path) -> OpenedRoot {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(path, flags, Mode::empty()).expect("a directory");
    OpenedRoot { dir, is_remote: false, stamp: None }
}

fn open_root(path: &Path) -> DocumentRoot {
    let links = Rc::new(SiteLinks::new(SiteName::new("site").expect("a name")));
    DocumentRoot::new(open_dir(path), Instant::now(), links).expect("a root")
}

fn head(method: Method, target: &str, fields: &[(&str, &str)]) -> RequestHead {
    let (path, query) = match target.split_once('?') {
        Some((path, query)) => (path, Some(query.into())),
        None => (target, None),
    };
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        let name = HeaderName::try_from(*name).expect("a field name");
        headers.append(name, HeaderValue::try_from(*value).expect("a field value"));
    }
    let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    RequestHead {
        id: RequestId(1),
        method,
        path: path.into(),
        query,
        host: "site.test".into(),
        port: None,
        version: Version::HTTP_11,
        headers,
        upgrade: None,
        conn: Rc::new(ConnInfo { peer: nowhere, local: nowhere, tls: None, carried: None, network: None }),
    }
}

fn collect(body: ResponseBody) -> Vec<u8> {
    match body {
        ResponseBody::Empty => Vec::new(),
        ResponseBody::Bytes(bytes) => bytes.to_vec(),
        ResponseBody::File { file, offset, len } => read(&file, offset, len),
        ResponseBody::Parts(parts) => parts
            .into_iter()
            .flat_map(|part| match part {
                BodyPart::Bytes(bytes) => bytes.to_vec(),
                BodyPart::File { file, offset, len } => read(&file, offset, len),
            })
            .collect(),
        ResponseBody::Stream(_) | ResponseBody::Tunnel(_) => panic!("files are not streams"),
    }
}

fn read(file: &OwnedFd, offset: u64, len: u64) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let file = fs::File::from(file.try_clone().expect("a descriptor"));
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, offset).expect("as many bytes as were announced");
    bytes
}
