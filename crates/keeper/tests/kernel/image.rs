//! Images on the real kernel with a real CRIU: state that survives, and images that are wrong.
//!
//! Skipped where there is no CRIU. Not here: sandboxes alone (`sandbox`), single values of headers and logs (beside
//! the code).

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use nagaya_keeper::image::{
    Digest, HandedFds, Image, ImageError, ImageLimits, ImageLookup, ImageSubject, NodeImages, base_digest,
    find_criu,
};
use nagaya_keeper::sandbox::{ROOT_PID, Sandbox, SandboxAddress, SandboxBind, SandboxTask};
use nagaya_records::record::ImageMemory;
use ring::hmac;
use serde_json::{Value, json};

use crate::Fact;
use crate::scene::{self, Scene, TIMEOUT, launcher};
use crate::world::{ALICE, set_mode};

pub const CRIU: &[Fact] = &[
    ("an application goes on from its image with what it remembered", goes_on),
    ("an image of an image's application is one too", generations),
    ("processes that share memory, files and locks go on together", prefork),
    ("shared memory that nobody has used is in no image and reads as zeros", unused_memory),
    ("memory that would be two memories after a restore, or have lost pages, is not imaged", split_memory),
    ("what is written to shared memory is seen by all who have it mapped after a restore", mapped_memory),
    ("what an application made non-blocking is so after its restore", blocking),
    ("an application listens on sockets of its own after its restore", own_sockets),
    ("a restored program is as fenced in as before", still_fenced),
    ("CRIU obeys no file of a tenant's", no_obedience),
    ("an image is closed to everybody but root", closed),
    ("an image that was cut is put aside and not used", cut),
    ("an image that was altered is put aside and not used", altered),
    ("an image of another kernel, CRIU, base or release is not used", elsewhere),
    ("an image that cannot be brought back is put aside, and at last none is taken", not_restored),
    ("what cannot be imaged goes on, says why and is remembered", unfit),
    ("a program with a filter of its own is not imaged", own_filter),
    ("an image that is too large or has no room is refused", no_room),
    ("images go when nobody wants them, or others were used since", collected),
    ("a CRIU that is no good is passed over with the reason", no_criu),
];

/// Why these tests cannot run here, if they cannot.
pub fn missing() -> Option<&'static str> {
    find_criu(configured().as_deref()).found.is_none().then_some("no CRIU of 4.1 or newer is installed")
}

/// For a CRIU elsewhere than in the usual places.
fn configured() -> Option<PathBuf> {
    std::env::var_os("NAGAYA_TEST_CRIU").map(PathBuf::from)
}

const COUNTER: &str = "import os, socket\n\
    server = socket.socket(fileno=3)\n\
    seen = []\n\
    print('starts', flush=True)\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   try:\n\
    \x20       seen.append(client.recv(100).decode())\n\
    \x20       print('served', len(seen), flush=True)\n\
    \x20       client.sendall(f'{os.getpid()} {os.getuid()} {seen}'.encode())\n\
    \x20   except OSError: seen.append('gone')\n\
    \x20   client.close()\n";

const LIMITS: ImageLimits =
    ImageLimits { bytes_max: 1 << 30, images_max: 100, age_max: std::time::Duration::from_secs(3600) };

pub struct Stage {
    pub scene: Scene,
    pub images: NodeImages,
}

/// One life of the application.
pub struct Life {
    pub sandbox: Sandbox,
    listener: OwnedFd,
    path: PathBuf,
    log: OwnedFd,
    log_writer: OwnedFd,
}

impl Stage {
    pub fn new() -> Self {
        let scene = Scene::new().with_file("counter.py", COUNTER);
        let dir = scene.dir.path().join("images");
        let images = NodeImages::open(&dir, configured().as_deref(), launcher(), LIMITS).unwrap();
        Self { scene, images }
    }

    pub fn subject(&self) -> ImageSubject {
        ImageSubject {
            site: "counter".into(),
            release: "1".into(),
            definition: Digest::of(&[b"counter"]),
            base: base_digest("/".as_ref(), &fs::File::open("/").unwrap().into()).unwrap(),
            uid: ALICE,
            gid: ALICE,
        }
    }

    /// A fresh sandbox with the sockets of an application, and nothing in it.
    pub fn life(&self) -> Life {
        static LIVES: AtomicU32 = AtomicU32::new(0);
        let sandbox = self.scene.create();
        let name = format!("listener-{}.sock", LIVES.fetch_add(1, Ordering::Relaxed));
        let path = self.scene.dir.path().join(name);
        let listener = sandbox.listener(&path).unwrap();
        let (log, log_writer) = sandbox.pipe().unwrap();
        Life { sandbox, listener, path, log, log_writer }
    }
}

impl Life {
    pub fn start(&self, command: &[&str]) -> SandboxTask {
        scene::root_task(&self.sandbox, command, Some(&self.listener), &self.log_writer)
    }

    pub fn handed(&self) -> HandedFds<'_> {
        HandedFds { listener: Some(self.listener.as_fd()), log: Some(self.log_writer.as_fd()) }
    }

    pub fn connect(&self) -> OwnedFd {
        self.sandbox.connect(&SandboxAddress::Listener(self.path.clone())).unwrap()
    }

    pub fn ask(&self, word: &str) -> String {
        talk(self.connect(), word)
    }

    pub fn read_log(&self) -> String {
        scene::wait_readable(&self.log);
        let mut text = [0; 4096];
        let len = rustix::io::read(&self.log, &mut text).unwrap();
        String::from_utf8_lossy(&text[..len]).into_owned()
    }
}

fn talk(socket: OwnedFd, word: &str) -> String {
    rustix::io::ioctl_fionbio(&socket, false).unwrap();
    let mut stream = UnixStream::from(socket);
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(word.as_bytes()).unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    said
}

/// An application that serves, and an image of it.
fn imaged(stage: &Stage) -> (Life, Image) {
    imaged_with(stage, ImageMemory::Auto)
}

fn imaged_with(stage: &Stage, memory: ImageMemory) -> (Life, Image) {
    let life = stage.life();
    let _task = life.start(&["python3", "counter.py"]);
    assert_eq!(life.ask("one"), format!("10 {ALICE} ['one']"));
    let image = stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), memory).unwrap();
    (life, image)
}

#[track_caller]
pub fn found(stage: &Stage) -> Image {
    match stage.images.find(&stage.subject()) {
        ImageLookup::Image(image) => *image,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn not_found(stage: &Stage, subject: &ImageSubject) {
    let found = stage.images.find(subject);
    assert!(matches!(found, ImageLookup::Nothing), "{found:?}");
}

/// Why images were put aside.
pub fn put_aside(stage: &Stage) -> Vec<String> {
    stage.images.list().into_iter().filter_map(|one| one.quarantined).collect()
}

pub fn image_file(stage: &Stage, name: &str) -> PathBuf {
    stage.images.dir().join("images").join(stage.subject().id()).join(name)
}

fn goes_on() {
    let stage = Stage::new();
    not_found(&stage, &stage.subject());
    let (life, taken) = imaged(&stage);
    assert!(taken.bytes() > 1 << 20, "{taken:?}");
    assert_eq!(life.ask("two"), format!("10 {ALICE} ['one', 'two']"), "it goes on after its image was taken");
    drop(life);
    // As often as it takes, each time from the same moment.
    for word in ["three", "four", "five"] {
        let life = stage.life();
        // Queued before there is anybody.
        let early = life.connect();
        let task = stage.images.restore(&found(&stage), &life.sandbox, &life.handed()).unwrap();
        assert_eq!(task.pid, ROOT_PID);
        assert_eq!(talk(early, word), format!("10 {ALICE} ['one', '{word}']"));
        assert_eq!(life.ask("more"), format!("10 {ALICE} ['one', '{word}', 'more']"));
        assert_eq!(life.read_log(), "served 2\nserved 3\n");
        assert_eq!(task.try_exit().unwrap(), None);
        task.signal(rustix::process::Signal::TERM).unwrap();
        let exit = task.wait(TIMEOUT).unwrap();
        assert_eq!(exit.signal, Some(rustix::process::Signal::TERM.as_raw()));
    }
    assert_eq!(put_aside(&stage), [""; 0]);
}

fn generations() {
    let stage = Stage::new();
    let (mut life, mut image) = imaged_with(&stage, ImageMemory::Copied);
    for generation in 2..5 {
        drop(life);
        life = stage.life();
        stage.images.restore(&image, &life.sandbox, &life.handed()).unwrap();
        let said = life.ask("again");
        assert_eq!(said.matches("again").count(), generation - 1, "{said}");
        image =
            stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Copied).unwrap();
    }
    assert_eq!(stage.images.list().len(), 1, "each takes the place of the one before");
}

/// As gunicorn does it: a master, workers that share memory, a file without a name for signs of life, a lock.
const PREFORK: &str = "import fcntl, mmap, os, socket, tempfile, threading, time\n\
    server = socket.socket(fileno=3)\n\
    shared = mmap.mmap(-1, 4096)\n\
    alive = tempfile.TemporaryFile()\n\
    alive.write(b'alive'); alive.flush()\n\
    locked = open('/srv/app/lock', 'w'); fcntl.lockf(locked, fcntl.LOCK_EX)\n\
    log = open('/tmp/own.log', 'a')\n\
    def serve():\n\
    \x20   while True:\n\
    \x20       client, _ = server.accept()\n\
    \x20       shared[0] += 1\n\
    \x20       print(shared[0], file=log, flush=True)\n\
    \x20       client.recv(100); alive.seek(0)\n\
    \x20       client.sendall(f'{shared[0]} {alive.read().decode()} {threading.active_count()}'.encode())\n\
    \x20       client.close()\n\
    if os.fork() == 0:\n\
    \x20   threading.Thread(target=time.sleep, args=(100000,), daemon=True).start()\n\
    \x20   serve()\n\
    os.wait()\n";

fn prefork() {
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("prefork.py", PREFORK);
    let life = stage.life();
    let _task = life.start(&["python3", "prefork.py"]);
    assert_eq!(life.ask("x"), "1 alive 2");
    let image =
        stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap();
    assert_eq!(life.ask("x"), "2 alive 2");
    drop(life);
    let life = stage.life();
    let task = stage.images.restore(&image, &life.sandbox, &life.handed()).unwrap();
    assert_eq!(life.ask("x"), "2 alive 2");
    assert_eq!(fs::read_to_string(stage.scene.dir.path().join("tmp/own.log")).unwrap(), "1\n2\n2\n");
    let try_lock = "import fcntl\n\
        try: fcntl.lockf(open('/srv/app/lock', 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB); print('free')\n\
        except OSError: print('locked')";
    assert_eq!(scene::python(&life.sandbox, try_lock), "locked");
    assert_eq!(task.try_exit().unwrap(), None);
}

/// Two processes that share much memory, of which little is used, the way PHP keeps what it has compiled; some that nobody
/// has used at all; and a file in memory. Tells what stands in the middle of the last two, and digests of all; writes there
/// if it is told to.
const ROOMY: &str = "import hashlib, mmap, os, socket\n\
    server = socket.socket(fileno=3)\n\
    size = 48 << 20\n\
    file = os.memfd_create('roomy'); os.ftruncate(file, size)\n\
    used, unused = mmap.mmap(-1, size), mmap.mmap(-1, size)\n\
    for at in [0, 4096 * 9 + 5, size // 3, size - 1]:\n\
    \x20   used[at] = at % 251 + 1\n\
    \x20   os.pwrite(file, bytes([at % 251 + 1]), at)\n\
    def serve():\n\
    \x20   while True:\n\
    \x20       client, _ = server.accept()\n\
    \x20       if client.recv(100) == b'write':\n\
    \x20           unused[size // 2] = 1; os.pwrite(file, b'2', size // 2)\n\
    \x20       digests = [hashlib.sha256(all).hexdigest() for all in (used, unused, os.pread(file, size, 0))]\n\
    \x20       client.sendall(f'{unused[size // 2]} {os.pread(file, 1, size // 2)} {digests}'.encode())\n\
    \x20       client.close()\n\
    if os.fork() == 0: serve()\n\
    os.wait()\n";

fn unused_memory() {
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("roomy.py", ROOMY);
    let life = stage.life();
    let _task = life.start(&["python3", "roomy.py"]);
    let said = life.ask("read");
    assert!(said.starts_with(r"0 b'\x00' ["), "{said}");
    let image =
        stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Copied).unwrap();
    assert!(image.bytes() < 48 << 20, "{} bytes", image.bytes());
    assert_eq!(life.ask("read"), said, "it goes on after its image was taken");
    drop(life);
    let life = stage.life();
    stage.images.restore(&found(&stage), &life.sandbox, &life.handed()).unwrap();
    assert_eq!(life.ask("read"), said);
    let written = life.ask("write");
    assert!(written.starts_with("1 b'2' ["), "{written}");
    assert_eq!(life.ask("read"), written);
    // An image of that is one, too.
    stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Copied).unwrap();
    drop(life);
    let life = stage.life();
    stage.images.restore(&found(&stage), &life.sandbox, &life.handed()).unwrap();
    assert_eq!(life.ask("read"), written);
    assert_eq!(put_aside(&stage), [""; 0]);
}

/// A memfd, its descriptor and mappings of it, had in different ways; a module of Python's that maps memory keeps a descriptor,
/// the call itself does not. Writes where it is told to, and tells what is read in another place.
const MEMFD: &str = "import ctypes, mmap, os, socket, sys\n\
    server = socket.socket(fileno=3)\n\
    way = sys.argv[1]\n\
    libc = ctypes.CDLL(None)\n\
    libc.mmap.restype = ctypes.c_void_p\n\
    def map(file, how):\n\
    \x20   at = libc.mmap(None, ctypes.c_size_t(16384), 3, how, file, ctypes.c_long(0))\n\
    \x20   return (ctypes.c_char * 16384).from_address(at)\n\
    file = os.memfd_create('memory'); os.ftruncate(file, 16384); os.pwrite(file, b'a' * 16384, 0)\n\
    one, two = map(file, mmap.MAP_SHARED), map(file, mmap.MAP_SHARED)\n\
    write, read = lambda value: one.__setitem__(0, value), lambda: two[:1]\n\
    if way == 'open': read = lambda: os.pread(file, 1, 0)\n\
    if way == 'of python': two = mmap.mmap(file, 16384); os.close(file)\n\
    if way == 'private': one = map(file, mmap.MAP_PRIVATE); os.close(file)\n\
    if way == 'closed': os.close(file)\n\
    if way == 'queued':\n\
    \x20   ours, theirs = socket.socketpair()\n\
    \x20   socket.send_fds(theirs, [b'x'], [file]); os.close(file)\n\
    if way in ('elsewhere', 'by two'):\n\
    \x20   ours, theirs = socket.socketpair()\n\
    \x20   if os.fork():\n\
    \x20       if way == 'by two': os.close(file)\n\
    \x20       else: libc.munmap(one, ctypes.c_size_t(16384)); libc.munmap(two, ctypes.c_size_t(16384))\n\
    \x20       while ours.recv(1): ours.send(two[:1] if way == 'by two' else os.pread(file, 1, 0))\n\
    \x20   os.close(file)\n\
    \x20   def read(): theirs.send(b'x'); return theirs.recv(1)\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   word = client.recv(100)\n\
    \x20   if word != b'read': write(word)\n\
    \x20   client.sendall(read()); client.close()\n";

fn split_memory() {
    for (way, why) in [
        ("open", "would be two memories"),
        ("of python", "would be two memories"),
        ("elsewhere", "would be two memories"),
        ("queued", "would be two memories"),
        ("private", "pages would be lost"),
    ] {
        let mut stage = Stage::new();
        stage.scene = stage.scene.with_file("memfd.py", MEMFD);
        let life = stage.life();
        let _task = life.start(&["python3", "memfd.py", way]);
        assert_eq!(life.ask("read"), "a", "{way}");
        let refused = stage
            .images
            .take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto)
            .unwrap_err();
        assert_eq!(refused.code().to_string(), "NGY0335", "{way}: {refused}");
        assert!(refused.to_string().contains(why), "{way}: {refused}");
        let seen = if way == "private" { "a" } else { "b" };
        assert_eq!(life.ask("b"), seen, "{way}: it goes on");
        let found = stage.images.find(&stage.subject());
        assert!(
            matches!(&found, ImageLookup::ImageImpossible(reason) if reason.contains(why)),
            "{way}: {found:?}"
        );
        for dir in ["images", "work"] {
            assert_eq!(fs::read_dir(stage.images.dir().join(dir)).unwrap().count(), 0, "{way}: {dir}");
        }
    }
}

fn mapped_memory() {
    for way in ["closed", "by two"] {
        let mut stage = Stage::new();
        stage.scene = stage.scene.with_file("memfd.py", MEMFD);
        let life = stage.life();
        let _task = life.start(&["python3", "memfd.py", way]);
        assert_eq!(life.ask("b"), "b", "{way}");
        let image =
            stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap();
        drop(life);
        let life = stage.life();
        stage.images.restore(&image, &life.sandbox, &life.handed()).unwrap();
        assert_eq!(life.ask("read"), "b", "{way}");
        assert_eq!(life.ask("c"), "c", "{way}");
        assert_eq!(put_aside(&stage), [""; 0]);
    }
}

/// Tells whether it would wait in `accept` and for its log. It does not: it waits for events.
const EVENTS: &str = "import os, select, socket, sys\n\
    server = socket.socket(fileno=3)\n\
    for fd in map(int, sys.argv[1:]): os.set_blocking(fd, False)\n\
    while True:\n\
    \x20   select.select([server], [], [])\n\
    \x20   client, _ = server.accept()\n\
    \x20   client.setblocking(True)\n\
    \x20   client.recv(100)\n\
    \x20   client.sendall(f'{os.get_blocking(3)} {os.get_blocking(1)}'.encode())\n\
    \x20   client.close()\n";

fn blocking() {
    for (nonblocking, said) in
        [(&[][..], "True True"), (&["3"], "False True"), (&["1"], "True False"), (&["1", "3"], "False False")]
    {
        let mut stage = Stage::new();
        stage.scene = stage.scene.with_file("events.py", EVENTS);
        let life = stage.life();
        let _task = life.start(&[&["python3", "events.py"], nonblocking].concat());
        assert_eq!(life.ask("x"), said);
        let image =
            stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap();
        drop(life);
        let life = stage.life();
        stage.images.restore(&image, &life.sandbox, &life.handed()).unwrap();
        assert_eq!(life.ask("x"), said);
    }
}

fn own_sockets() {
    let mut stage = Stage::new();
    let knows_ports = !stage.images.criu().why.contains("cannot image applications with TCP sockets");
    let own = "server = socket.socket(socket.AF_UNIX); server.bind('/run/own.sock'); server.listen()";
    let port = "server = socket.create_server(('127.0.0.1', 8123))";
    let handed = "server = socket.socket(fileno=3)";
    stage.scene = stage.scene.with_file("own.py", &COUNTER.replace(handed, own));
    stage.scene = stage.scene.with_file("port.py", &COUNTER.replace(handed, port));
    let own = ("own.py", SandboxAddress::Socket("/run/own.sock".into()));
    let ways = if knows_ports { vec![own, ("port.py", SandboxAddress::Port(8123))] } else { vec![own] };
    for (name, address) in ways {
        let life = stage.life();
        let log = HandedFds { listener: None, log: Some(life.log_writer.as_fd()) };
        let _task = scene::root_task(&life.sandbox, &["python3", name], None, &life.log_writer);
        assert!(life.read_log().contains("starts"));
        assert_eq!(talk(life.sandbox.connect(&address).unwrap(), "one"), format!("10 {ALICE} ['one']"));
        let stays = life.sandbox.connect(&address).unwrap();
        let taken = stage.images.take(&stage.subject(), &life.sandbox, &log, ImageMemory::Auto);
        match address {
            // It is cut off in the image.
            SandboxAddress::Port(_) => drop(taken.unwrap()),
            _ => {
                let refused = taken.unwrap_err().to_string();
                assert!(refused.contains("one end of a Unix socket's connection is outside"), "{refused}");
                drop(stays);
                stage.images.forget_refusal(&stage.subject());
                // It must have seen that the client has gone.
                assert_eq!(
                    talk(life.sandbox.connect(&address).unwrap(), "one"),
                    format!("10 {ALICE} ['one', '', 'gone', 'one']")
                );
                stage.images.take(&stage.subject(), &life.sandbox, &log, ImageMemory::Auto).unwrap();
            }
        }
        drop(life);
        let life = stage.life();
        let log = HandedFds { listener: None, log: Some(life.log_writer.as_fd()) };
        stage.images.restore(&found(&stage), &life.sandbox, &log).unwrap();
        let said = talk(life.sandbox.connect(&address).unwrap(), "two");
        assert!(said.ends_with("'two']"), "{said}");
        assert_eq!(put_aside(&stage), [""; 0]);
    }
}

fn still_fenced() {
    let mut stage = Stage::new();
    let status = "client.recv(100); seen = [line.split()[1] for line in open('/proc/self/status') if line.startswith((\
        'CapEff', 'CapBnd', 'NoNewPrivs', 'Seccomp'))]";
    let code = COUNTER.replace("seen.append(client.recv(100).decode())", status);
    stage.scene = stage.scene.with_file("fenced.py", &code);
    let none = "0".repeat(16);
    let fenced = |filters: u32| format!("10 {ALICE} ['{none}', '{none}', '1', '2', '{filters}']");
    // One filter more of a restore, and another one where files show its memory.
    for (memory, filters) in [(ImageMemory::Copied, 2), (ImageMemory::Auto, 3)] {
        let life = stage.life();
        let _task = life.start(&["python3", "fenced.py"]);
        assert_eq!(life.ask("x"), fenced(1));
        let image = stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), memory).unwrap();
        drop(life);
        let life = stage.life();
        stage.images.restore(&image, &life.sandbox, &life.handed()).unwrap();
        assert_eq!(life.ask("x"), fenced(filters));
        // What CRIU was is gone; the application is alone, and new processes have numbers near its own.
        let others = "import os; own = os.getpid()\n\
            print(own < 100, [name for name in os.listdir('/proc') if name.isdigit() and int(name) != own])";
        assert_eq!(scene::python(&life.sandbox, others), "True ['10']");
    }
}

fn no_obedience() {
    let mut stage = Stage::new();
    // What CRIU looks for by itself: its settings in /etc, which a base of the tenant's may have, and what it once
    // found out, in /run.
    stage.scene = stage.scene.with_file("planted", "#!/bin/sh\n: > /srv/app/obeyed\n");
    let etc = stage.scene.dir.path().join("etc");
    fs::create_dir_all(etc.join("criu")).unwrap();
    fs::write(etc.join("criu/default.conf"), "action-script /srv/app/planted\n").unwrap();
    let bind = SandboxBind {
        source: etc,
        target: "/etc".into(),
        writable: false,
        as_tenant: false,
        is_optional: false,
    };
    stage.scene.spec.binds.push(bind);
    let facts = stage.scene.dir.path().join("run/criu.kdat");
    fs::write(&facts, "planted").unwrap();
    let (life, image) = imaged(&stage);
    assert_eq!(scene::shell(&life.sandbox, "cat /etc/criu/default.conf"), "action-script /srv/app/planted");
    drop(life);
    let life = stage.life();
    stage.images.restore(&image, &life.sandbox, &life.handed()).unwrap();
    assert_eq!(life.ask("two"), format!("10 {ALICE} ['one', 'two']"));
    assert!(!stage.scene.app("obeyed").exists());
    assert_eq!(fs::read_to_string(&facts).unwrap(), "planted");
}

fn closed() {
    let stage = Stage::new();
    let (life, _image) = imaged(&stage);
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777;
    for dir in ["", "images", "quarantine", "work", "refused"] {
        assert_eq!(mode(&stage.images.dir().join(dir)), 0o700, "{dir}");
    }
    let dir = image_file(&stage, "");
    assert_eq!(mode(&dir), 0o750);
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let stat = fs::symlink_metadata(&path).unwrap();
        assert_eq!((stat.uid(), mode(&path) & 0o137), (0, 0), "{}", path.display());
    }
    assert_eq!(fs::read_dir(stage.images.dir().join("work")).unwrap().count(), 0);
    // The group that can read is that of the sandbox' root, which no program in it is in.
    let code = "import os; print(os.getgroups(), os.getgid())";
    assert_eq!(scene::python(&life.sandbox, code), format!("[] {ALICE}"));
}

fn cut() {
    let stage = Stage::new();
    drop(imaged(&stage));
    let pages = image_file(&stage, "pages-1.img");
    let len = fs::metadata(&pages).unwrap().len();
    fs::File::options().write(true).open(&pages).unwrap().set_len(len - 4096).unwrap();
    not_found(&stage, &stage.subject());
    let why = put_aside(&stage);
    assert!(matches!(why.as_slice(), [why] if why.contains("pages-1.img has")), "{why:?}");
    // Another one is taken, of which the header is cut.
    drop(imaged(&stage));
    found(&stage);
    fs::File::options().write(true).open(image_file(&stage, "header")).unwrap().set_len(200).unwrap();
    not_found(&stage, &stage.subject());
    assert_eq!(put_aside(&stage).len(), 2);
    assert!(
        matches!(stage.images.find(&stage.subject()), ImageLookup::ImageImpossible(why) if why.contains("turned out wrong"))
    );
}

fn altered() {
    let stage = Stage::new();
    drop(imaged(&stage));
    found(&stage);
    let pages = image_file(&stage, "pages-1.img");
    let file = fs::File::options().read(true).write(true).open(&pages).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 100_000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 100_000).unwrap();
    not_found(&stage, &stage.subject());
    let why = put_aside(&stage);
    assert!(matches!(why.as_slice(), [why] if why.contains("content of pages-1.img was changed")), "{why:?}");
    // One that nobody looked at since the start of the keeper is compared, too.
    drop(imaged(&stage));
    let pages = image_file(&stage, "pages-1.img");
    let again = NodeImages::open(&stage.images.dir(), configured().as_deref(), launcher(), LIMITS).unwrap();
    let stage = Stage { images: again, ..stage };
    fs::File::options().write(true).open(&pages).unwrap().write_all_at(&[byte[0] ^ 1], 100_000).unwrap();
    not_found(&stage, &stage.subject());
}

/// Changes a header as somebody would who knows its digest and has the keeper's key.
pub fn forge_header(path: &Path, change: impl FnOnce(&mut Value)) {
    // images/<id>/header beside key.
    let key = fs::read(path.ancestors().nth(3).unwrap().join("key")).unwrap();
    forge_header_by(path, &key, change);
}

/// The same with another key.
pub fn forge_header_by(path: &Path, key: &[u8], change: impl FnOnce(&mut Value)) {
    let file = fs::read_to_string(path).unwrap();
    let (text, _) = file.split_once("authenticator ").unwrap();
    let (first, body) = text.split_once('\n').unwrap();
    let mut header: Value = serde_json::from_str(body).unwrap();
    change(&mut header);
    let body = serde_json::to_string_pretty(&header).unwrap();
    let digest = Digest::of(&[body.as_bytes()]).to_string();
    let (magic, _) = first.rsplit_once(' ').unwrap();
    let text = format!("{magic} {digest}\n{body}\n");
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes());
    let tag: String = tag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(path, format!("{text}authenticator {tag}\n")).unwrap();
}

fn forge(stage: &Stage, change: impl FnOnce(&mut Value)) {
    forge_header(&image_file(stage, "header"), change);
}

fn elsewhere() {
    let stage = Stage::new();
    drop(imaged(&stage));
    forge(&stage, |_| {});
    found(&stage);
    for (field, value) in
        [("kernel", json!("5.10.0 #1")), ("criu", json!("4.0")), ("criu_build", json!("0".repeat(64)))]
    {
        let before = fs::read(image_file(&stage, "header")).unwrap();
        forge(&stage, |header| header["environment"][field] = value);
        not_found(&stage, &stage.subject());
        fs::write(image_file(&stage, "header"), before).unwrap();
        found(&stage);
    }
    let other = Digest::of(&[b"upgraded"]);
    not_found(&stage, &ImageSubject { base: other, ..stage.subject() });
    not_found(&stage, &ImageSubject { definition: other, ..stage.subject() });
    not_found(&stage, &ImageSubject { release: "2".into(), ..stage.subject() });
    forge(&stage, |header| header["subject"]["site"] = json!("another"));
    not_found(&stage, &stage.subject());
    // None of them is wrong: they only do not fit.
    assert_eq!(put_aside(&stage), [""; 0]);
    // A format of another version is none.
    let text = fs::read_to_string(image_file(&stage, "header")).unwrap();
    fs::write(image_file(&stage, "header"), text.replacen("nagaya-image ", "nagaya-image 1", 1)).unwrap();
    not_found(&stage, &stage.subject());
    assert!(put_aside(&stage)[0].contains("another version of nagaya"));
}

fn not_restored() {
    let mut stage = Stage::new();
    let code = format!("data = open('/srv/app/data', 'r+')\n{COUNTER}");
    stage.scene = stage.scene.with_file("data.py", &code).with_file("data", "x");
    for time in 1..=2 {
        fs::write(stage.scene.app("data"), "x").unwrap();
        std::os::unix::fs::chown(stage.scene.app("data"), Some(ALICE), Some(ALICE)).unwrap();
        let life = stage.life();
        let _task = life.start(&["python3", "data.py"]);
        life.ask("one");
        stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap();
        drop(life);
        fs::remove_file(stage.scene.app("data")).unwrap();
        let life = stage.life();
        let refused = stage.images.restore(&found(&stage), &life.sandbox, &life.handed()).unwrap_err();
        assert!(matches!(refused, ImageError::NotRestored { .. }), "{refused}");
        assert!(refused.to_string().contains("srv/app/data"), "{refused}");
        assert_eq!(put_aside(&stage).len(), time);
    }
    assert!(matches!(stage.images.find(&stage.subject()), ImageLookup::ImageImpossible(_)));
    // Another release is another matter, and asking by hand is too.
    not_found(&stage, &ImageSubject { release: "2".into(), ..stage.subject() });
    stage.images.forget_refusal(&stage.subject());
    not_found(&stage, &stage.subject());
}

fn unfit() {
    let mut stage = Stage::new();
    // A database, outside.
    let path = stage.scene.dir.path().join("run/db.sock");
    let database = std::os::unix::net::UnixListener::bind(&path).unwrap();
    std::os::unix::fs::chown(&path, Some(ALICE), Some(ALICE)).unwrap();
    let code =
        format!("import socket\ndb = socket.socket(socket.AF_UNIX); db.connect('/run/db.sock')\n{COUNTER}");
    stage.scene = stage.scene.with_file("connected.py", &code);
    let life = stage.life();
    let _task = life.start(&["python3", "connected.py"]);
    let _connection = database.accept().unwrap();
    assert_eq!(life.ask("one"), format!("10 {ALICE} ['one']"));
    let refused =
        stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap_err();
    assert!(refused.to_string().contains("a Unix socket is connected to something outside"), "{refused}");
    assert_eq!(refused.code().to_string(), "NGY0335");
    assert_eq!(life.ask("two"), format!("10 {ALICE} ['one', 'two']"), "it goes on");
    match stage.images.find(&stage.subject()) {
        ImageLookup::ImageImpossible(reason) => {
            assert!(reason.contains("a Unix socket is connected"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
    stage.images.forget_refusal(&stage.subject());
    not_found(&stage, &stage.subject());
    assert_eq!(fs::read_dir(stage.images.dir().join("work")).unwrap().count(), 0);
}

fn own_filter() {
    let mut stage = Stage::new();
    // One instruction: allow everything.
    let code = format!(
        "import ctypes, struct\n\
         program = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))\n\
         header = ctypes.create_string_buffer(struct.pack('HxxxxxxP', 1, ctypes.addressof(program)))\n\
         assert ctypes.CDLL(None).prctl(22, 2, header, 0, 0) == 0\n{COUNTER}"
    );
    stage.scene = stage.scene.with_file("filtered.py", &code);
    let life = stage.life();
    let _task = life.start(&["python3", "filtered.py"]);
    life.ask("one");
    let refused =
        stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap_err();
    assert!(refused.to_string().contains("a system call filter of its own"), "{refused}");
    assert_eq!(life.ask("two"), format!("10 {ALICE} ['one', 'two']"));
}

fn no_room() {
    let stage = Stage::new();
    stage.images.set_limits(ImageLimits { bytes_max: 1 << 20, ..LIMITS });
    let life = stage.life();
    let _task = life.start(&["python3", "counter.py"]);
    life.ask("one");
    let refused =
        stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap_err();
    assert!(matches!(refused, ImageError::TooLarge { .. }), "{refused}");
    assert_eq!(life.ask("two"), format!("10 {ALICE} ['one', 'two']"));
    assert_eq!(fs::read_dir(stage.images.dir().join("work")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(stage.images.dir().join("images")).unwrap().count(), 0);
    // A file system with less than must stay free.
    let small = stage.scene.dir.path().join("small");
    fs::create_dir(&small).unwrap();
    let _mounted = Mounted::new(&small, "size=64m");
    let images =
        NodeImages::open(&small.join("images"), configured().as_deref(), launcher(), LIMITS).unwrap();
    let refused =
        images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap_err();
    assert!(matches!(refused, ImageError::NoSpace { .. }), "{refused}");
    assert!(matches!(images.find(&stage.subject()), ImageLookup::Nothing), "that is not remembered");
}

/// A file system in memory, gone with this.
struct Mounted(PathBuf);

impl Mounted {
    fn new(at: &Path, options: &str) -> Self {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "none"]).arg(at).status();
        assert!(mounted.unwrap().success());
        Self(at.into())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn collected() {
    let stage = Stage::new();
    let life = stage.life();
    let _task = life.start(&["python3", "counter.py"]);
    life.ask("one");
    let release = |number: u32| ImageSubject { release: number.to_string(), ..stage.subject() };
    for number in 1..=3 {
        stage.images.take(&release(number), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap();
    }
    // Used longest ago, by the clock of the file system.
    let used = |number: u32, seconds: u64| {
        let header = stage.images.dir().join("images").join(release(number).id()).join("header");
        let time = std::time::SystemTime::now() - std::time::Duration::from_secs(seconds);
        fs::File::open(header).unwrap().set_modified(time).unwrap();
    };
    for (number, seconds) in [(1, 10), (2, 30), (3, 20)] {
        used(number, seconds);
    }
    let left = || {
        let mut left: Vec<String> =
            stage.images.list().into_iter().map(|one| one.subject.unwrap().release).collect();
        left.sort();
        left
    };
    stage.images.collect(|_| true);
    assert_eq!(left(), ["1", "2", "3"]);
    stage.images.set_limits(ImageLimits { images_max: 2, ..LIMITS });
    stage.images.collect(|_| true);
    assert_eq!(left(), ["1", "3"]);
    stage.images.collect(|subject| subject.release != "1");
    assert_eq!(left(), ["3"]);
    used(3, 7200);
    stage.images.collect(|_| true);
    assert_eq!(left(), [""; 0]);
}

fn no_criu() {
    let dir = tempfile::tempdir().unwrap();
    let passed_over = |path: &Path| {
        let search = find_criu(Some(path));
        assert!(search.found.is_none());
        search.reason()
    };
    let absent = dir.path().join("absent");
    assert!(passed_over(&absent).contains("no such file"), "{}", passed_over(&absent));
    // A program that says no version.
    assert!(passed_over(Path::new("/bin/true")).contains("does not say its version"));
    let script = dir.path().join("script");
    fs::write(&script, "#!/bin/sh\necho Version: 9.9\n").unwrap();
    set_mode(&script, 0o755);
    assert!(passed_over(&script).contains("no program of this machine"));
    let open = dir.path().join("open");
    fs::copy("/bin/true", &open).unwrap();
    set_mode(&open, 0o777);
    assert!(passed_over(&open).contains("others than root can change it"));
    let search = find_criu(configured().as_deref());
    assert!(
        search.reason().contains("version 4") || search.reason().contains("version 5"),
        "{}",
        search.reason()
    );
    let refused = NodeImages::open(dir.path(), Some(&absent), launcher(), LIMITS).unwrap_err();
    assert_eq!(refused.code().to_string(), "NGY0334");
}
