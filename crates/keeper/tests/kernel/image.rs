//! Images on the real kernel with a real CRIU: state that survives, and images that are wrong.
//!
//! Skipped where there is no CRIU. Not here: sandboxes alone (`sandbox`), single values of headers and logs (beside
//! the code).

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Instant;

use nagaya_keeper::image::{Digest, Found, Handed, Images, Limits, Subject, base_digest, find_criu};
use nagaya_keeper::sandbox::{Address, Sandbox, Task};

use crate::Fact;
use crate::scene::{self, Scene, TIMEOUT, launcher};
use crate::world::ALICE;

pub const CRIU: &[Fact] = &[("an application goes on from its image with what it remembered", goes_on)];

/// Why these tests cannot run here, if they cannot.
pub fn missing() -> Option<&'static str> {
    find_criu(configured().as_deref()).found.is_none().then_some("no CRIU of 4.1 or newer is installed")
}

/// For a CRIU elsewhere than in the usual places.
fn configured() -> Option<PathBuf> {
    std::env::var_os("NAGAYA_TEST_CRIU").map(PathBuf::from)
}

const COUNTER: &str = "import os, random, socket\n\
    server = socket.socket(fileno=3)\n\
    seen = []\n\
    print('starts', flush=True)\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   seen.append(client.recv(100).decode())\n\
    \x20   client.sendall(f'{os.getpid()} {os.getuid()} {seen}'.encode())\n\
    \x20   client.close()\n\
    \x20   print('served', len(seen), flush=True)\n";

const LIMITS: Limits =
    Limits { bytes_max: 1 << 30, images_max: 100, age_max: std::time::Duration::from_secs(3600) };

struct Stage {
    scene: Scene,
    images: Images,
}

/// One life of the application.
struct Life {
    sandbox: Sandbox,
    listener: OwnedFd,
    path: PathBuf,
    log: OwnedFd,
    log_writer: OwnedFd,
}

impl Stage {
    fn new() -> Self {
        let scene = Scene::new().with_file("counter.py", COUNTER);
        let dir = scene.dir.path().join("images");
        let images = Images::open(&dir, configured().as_deref(), launcher(), LIMITS).unwrap();
        Self { scene, images }
    }

    fn subject(&self) -> Subject {
        Subject {
            site: "counter".into(),
            release: "1".into(),
            definition: Digest::of(&[b"counter"]),
            base: base_digest("/".as_ref()).unwrap(),
            uid: ALICE,
            gid: ALICE,
        }
    }

    /// A fresh sandbox with the sockets of an application, and nothing in it.
    fn life(&self) -> Life {
        let sandbox = self.scene.create();
        let path = self.scene.dir.path().join("listener.sock");
        let listener = sandbox.listener(&path).unwrap();
        let (log, log_writer) = sandbox.pipe().unwrap();
        Life { sandbox, listener, path, log, log_writer }
    }
}

impl Life {
    fn start(&self, command: &[&str]) -> Task {
        scene::root_task(&self.sandbox, command, Some(&self.listener), &self.log_writer)
    }

    fn handed(&self) -> Handed<'_> {
        Handed { listener: Some(self.listener.as_fd()), log: Some(self.log_writer.as_fd()) }
    }

    fn ask(&self, word: &str) -> String {
        let socket = self.sandbox.connect(&Address::Listener(self.path.clone())).unwrap();
        rustix::io::ioctl_fionbio(&socket, false).unwrap();
        let mut stream = UnixStream::from(socket);
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(word.as_bytes()).unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        said
    }

    fn read_log(&self) -> String {
        scene::wait_readable(&self.log);
        let mut text = [0; 4096];
        let len = rustix::io::read(&self.log, &mut text).unwrap();
        String::from_utf8_lossy(&text[..len]).into_owned()
    }
}

fn goes_on() {
    let stage = Stage::new();
    let life = stage.life();
    let _task = life.start(&["python3", "counter.py"]);
    assert_eq!(life.ask("one"), format!("10 {ALICE} ['one']"));
    assert!(life.read_log().contains("starts"));
    let subject = stage.subject();
    assert!(matches!(stage.images.find(&subject), Found::Nothing));
    let t = Instant::now();
    let taken = stage.images.take(&subject, &life.sandbox, &life.handed());
    println!("take {:?}", t.elapsed());
    let image = taken.unwrap();
    assert_eq!(life.ask("two"), format!("10 {ALICE} ['one', 'two']"));
    drop(life);
    for i in 0..10 {
        let life = stage.life();
        let t = Instant::now();
        let task = stage.images.restore(&image, &life.sandbox, &life.handed()).unwrap();
        println!("restore {:?}", t.elapsed());
        assert_eq!(life.ask("three"), format!("10 {ALICE} ['one', 'three']"));
        let _ = (task, i);
    }
}
