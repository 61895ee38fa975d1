//! Files in `/dev/shm` and images, with a real CRIU: what has a name there is there again, and what is mapped is shared again.
//!
//! Not here: memory without a name (`image`), a list of files that is damaged (beside the code).

use std::fs;
use std::os::unix::fs::chown;

use nagaya_keeper::image::{ImageError, ImageLookup};
use nagaya_keeper::sandbox::SandboxBind;
use nagaya_records::record::ImageMemory;

use crate::Fact;
use crate::image::{Life, Stage, found, image_file, put_aside};
use crate::scene::shell;
use crate::world::ALICE;

pub const CRIU: &[Fact] = &[
    (
        "files in /dev/shm are there again after a restore, and what is mapped of them is shared again",
        there_again,
    ),
    ("files in /dev/shm are of the same moment as the memory of their processes", of_one_moment),
    ("what is bound into /dev/shm from elsewhere goes into no image", bound_from_elsewhere),
    (
        "more files in /dev/shm than are kept, or mapped ones without a name, are said and not imaged",
        not_imaged,
    ),
    ("files that do not fit into /dev/shm any more put their image aside", does_not_fit),
];

/// File of an image with what is in `/dev/shm`.
const FILE: &str = "dev-shm.img";

/// All that a program may have there: files that are open, mapped by two processes, neither, closed even to itself, with two
/// names or none, with holes; directories; links that lead out. It tells all of that, and writes where it is told to.
const HOLDER: &str = "import ctypes, mmap, os, socket, sys\n\
    server = socket.socket(fileno=3)\n\
    way = sys.argv[1]\n\
    libc = ctypes.CDLL(None)\n\
    libc.mmap.restype = ctypes.c_void_p\n\
    size = (5 << 20) + 1\n\
    def text(path, mode, text): open(path, 'w').write(text); os.chmod(path, mode)\n\
    def map(path):\n\
    \x20   file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600); os.ftruncate(file, size)\n\
    \x20   at = libc.mmap(None, ctypes.c_size_t(size), 3, mmap.MAP_SHARED, file, ctypes.c_long(0))\n\
    \x20   os.close(file); return (ctypes.c_char * size).from_address(at)\n\
    os.chdir('/dev/shm')\n\
    os.mkdir('dir', 0o750); os.mkdir('dir/empty')\n\
    text('dir/inner', 0o640, 'inner'); text('plain', 0o604, 'plain' * 2000); text('closed', 0, 'closed')\n\
    os.symlink('/etc/hostname', 'link'); os.symlink('/srv/app', 'dir/out')\n\
    held, ghost = (open(name, 'wb+', buffering=0) for name in ('held', 'ghost'))\n\
    held.write(b'held'); ghost.write(b'ghost' * 2000)\n\
    os.link('held', 'again'); os.unlink('ghost')\n\
    if way == 'unnamed': unnamed = map('unnamed'); os.unlink('unnamed')\n\
    if way == 'many': [text(f'dir/{one}', 0o600, '') for one in range(1000)]\n\
    ours, theirs = socket.socketpair()\n\
    if os.fork() == 0:\n\
    \x20   shared = map('shared')\n\
    \x20   while True: at = int(ours.recv(100)); shared[at] = shared[at][0] + 1; ours.send(b'x')\n\
    shared = map('shared')\n\
    def add(at): theirs.send(str(at).encode()); theirs.recv(1)\n\
    for at in (0, size // 2, size - 1): add(at)\n\
    def tell():\n\
    \x20   names = sorted(os.path.join(top, name) for top, dirs, files in os.walk('.') for name in dirs + files)\n\
    \x20   stats = {name: os.lstat(name) for name in names}\n\
    \x20   yield [f'{name} {one.st_mode:o} {one.st_uid} {one.st_gid} {one.st_size}' for name, one in stats.items()]\n\
    \x20   yield 'blocks', stats['./shared'].st_blocks, stats['./plain'].st_blocks\n\
    \x20   yield 'links', os.readlink('link'), os.readlink('dir/out'), stats['./held'].st_nlink\n\
    \x20   yield open('dir/inner').read(), open('plain').read() == 'plain' * 2000, open('again').read()\n\
    \x20   yield 'held', os.pread(held.fileno(), 9, 0), os.path.samestat(os.fstat(held.fileno()), stats['./again'])\n\
    \x20   yield 'ghost', os.pread(ghost.fileno(), 99999, 0) == b'ghost' * 2000\n\
    \x20   yield 'shared', [shared[at][0] for at in (0, 1, size // 2, size - 1)]\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   if client.recv(100) == b'write': add(1); held.write(b'!'); ghost.truncate(0); os.unlink('plain'); text('plain', 0o600, 'p')\n\
    \x20   client.sendall('\\n'.join(repr(one) for one in tell()).encode()); client.close()\n";

fn stage() -> Stage {
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("holder.py", HOLDER);
    stage
}

fn holder(stage: &Stage, way: &str) -> (Life, String) {
    let life = stage.life();
    let _task = life.start(&["python3", "holder.py", way]);
    let said = life.ask("read");
    assert!(said.contains("'shared', [1, 0, 1, 1]"), "{said}");
    (life, said)
}

fn take(stage: &Stage, life: &Life) -> Result<(), ImageError> {
    stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).map(drop)
}

fn there_again() {
    let stage = stage();
    let (life, said) = holder(&stage, "");
    // Three pages of its 5 MiB.
    assert!(said.contains("('blocks', 24, "), "{said}");
    take(&stage, &life).unwrap();
    let written = life.ask("write");
    assert!(written.contains("'shared', [1, 1, 1, 1]") && written.contains("('ghost', False)"), "{written}");
    drop(life);
    for _ in 0..2 {
        let life = stage.life();
        assert_eq!(shell(&life.sandbox, "ls -A /dev/shm"), "", "a fresh sandbox has nothing there");
        stage.images.restore(&found(&stage), &life.sandbox, &life.handed()).unwrap();
        assert_eq!(life.ask("read"), said);
        assert_eq!(life.ask("write"), written);
    }
    let archive = fs::metadata(image_file(&stage, FILE)).unwrap();
    assert!(archive.len() < 100 << 10, "holes are not in it: {} bytes", archive.len());
    assert_eq!(put_aside(&stage), [""; 0]);
    // One that has nothing there has no such file.
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("idle.py", "import time\nprint('x', flush=True)\ntime.sleep(100000)");
    let life = stage.life();
    let _task = life.start(&["python3", "idle.py"]);
    life.read_log();
    take(&stage, &life).unwrap();
    assert!(!image_file(&stage, FILE).exists());
}

/// Counts for itself and in a file, as fast as it can, and notices when it finds another number in the file than its own.
const COUNTS: &str = "import mmap, os, socket, threading\n\
    server = socket.socket(fileno=3)\n\
    file = os.open('/dev/shm/count', os.O_RDWR | os.O_CREAT); os.ftruncate(file, 4096)\n\
    shared = mmap.mmap(file, 4096)\n\
    count, found, rounds = 0, None, 0\n\
    def run():\n\
    \x20   global count, found, rounds\n\
    \x20   while True:\n\
    \x20       there = int.from_bytes(shared[:8], 'little')\n\
    \x20       if there != count and found is None: found = (count, there)\n\
    \x20       count = there + 1; rounds += 1\n\
    \x20       shared[:8] = count.to_bytes(8, 'little')\n\
    threading.Thread(target=run, daemon=True).start()\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   client.recv(100)\n\
    \x20   before = rounds\n\
    \x20   while rounds < before + 2: pass\n\
    \x20   client.sendall(repr(found).encode()); client.close()\n";

fn of_one_moment() {
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("counts.py", COUNTS);
    let life = stage.life();
    let _task = life.start(&["python3", "counts.py"]);
    for _ in 0..5 {
        assert_eq!(life.ask("x"), "None");
        take(&stage, &life).unwrap();
        let other = stage.life();
        stage.images.restore(&found(&stage), &other.sandbox, &other.handed()).unwrap();
        assert_eq!(other.ask("x"), "None", "what it remembers, and what is in the file");
    }
}

fn bound_from_elsewhere() {
    let mut stage = stage();
    let outside = stage.scene.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "of elsewhere").unwrap();
    chown(&outside, Some(ALICE), Some(ALICE)).unwrap();
    let target = "/dev/shm/bound/deep".into();
    stage.scene.spec.binds.push(SandboxBind {
        source: outside.clone(),
        target,
        writable: true,
        as_tenant: false,
        is_optional: false,
    });
    let (life, said) = holder(&stage, "");
    take(&stage, &life).unwrap();
    drop(life);
    let archive = fs::read(image_file(&stage, FILE)).unwrap();
    assert!(!archive.windows(12).any(|bytes| bytes == b"of elsewhere"));
    fs::write(outside.join("file"), "changed sinc").unwrap();
    let life = stage.life();
    stage.images.restore(&found(&stage), &life.sandbox, &life.handed()).unwrap();
    assert_eq!(life.ask("read"), said);
    assert_eq!(shell(&life.sandbox, "cat /dev/shm/bound/deep/file"), "changed sinc");
    drop(life);
    // Over all of it: files on disk, which stay there.
    let target = "/dev/shm".into();
    stage.scene.spec.binds = vec![stage.scene.spec.binds.swap_remove(0)];
    stage.scene.spec.binds.push(SandboxBind {
        source: outside,
        target,
        writable: true,
        as_tenant: false,
        is_optional: false,
    });
    let (life, _) = holder(&stage, "");
    take(&stage, &life).unwrap();
    drop(life);
    assert!(!image_file(&stage, FILE).exists());
    let life = stage.life();
    stage.images.restore(&found(&stage), &life.sandbox, &life.handed()).unwrap();
    assert!(life.ask("read").contains("'shared', [1, 0, 1, 1]"));
}

fn not_imaged() {
    for (way, why) in
        [("many", "more than 1000 files in /dev/shm"), ("unnamed", "/dev/shm/unnamed (deleted)")]
    {
        let stage = stage();
        let (life, said) = holder(&stage, way);
        let refused = take(&stage, &life).unwrap_err();
        assert_eq!(refused.code().to_string(), "NGY0335", "{way}: {refused}");
        assert!(refused.to_string().contains(why), "{way}: {refused}");
        assert_eq!(life.ask("read"), said, "{way}: it goes on");
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

fn does_not_fit() {
    let mut stage = stage();
    let (life, _) = holder(&stage, "");
    take(&stage, &life).unwrap();
    drop(life);
    stage.scene.spec.shm_bytes_max = 4096;
    let life = stage.life();
    let refused = stage.images.restore(&found(&stage), &life.sandbox, &life.handed()).unwrap_err();
    assert_eq!(refused.code().to_string(), "NGY0336", "{refused}");
    assert!(refused.to_string().contains("/dev/shm cannot be put back: No space left"), "{refused}");
    assert_eq!(put_aside(&stage), [refused.to_string()]);
    assert!(matches!(stage.images.find(&stage.subject()), ImageLookup::Nothing));
}
