//! Memory that a wake maps from its image, or writes while CRIU runs, on the real kernel with a real CRIU: it is a program's
//! own, and what it cannot be is refused.
//!
//! Not here: which memory that is, and the form of an image's lists (beside the code), everything else of images (`image`).

use nagaya_keeper::image::{Image, ImageError};
use nagaya_keeper::sandbox::{ChildStep, SandboxError};
use nagaya_records::record::ImageMemory;

use crate::Fact;
use crate::image::{Life, Stage, image_file};
use crate::scene;

pub const MAPPED: &[Fact] = &[
    ("memory that is mapped from an image is a program's own in every wake", own),
    ("a child of a woken program has a copy of memory that is mapped", inherited),
    ("memory that is mapped is not given back, nor made more, and other memory is", kept),
    ("a program nobody knows, and one that is to have copies, maps nothing", copied),
    ("no image is taken of memory that is an image's", not_again),
    ("many processes come back, each with memory of its own", many),
    ("shared memory comes back to all who share it, and to nobody else", shared),
    ("nothing runs that shared memory could not be written for", unwritten),
];

/// Answers what it is asked, with a block of memory of its own in which each page is full of a number.
const BLOCK: &str = "import ctypes, mmap, os, socket\n\
    server = socket.socket(fileno=3)\n\
    PAGE, PAGES = mmap.PAGESIZE, 256\n\
    KIND = dict(flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n\
    block = mmap.mmap(-1, PAGE * PAGES, **KIND)\n\
    for page in range(PAGES): block[page * PAGE:(page + 1) * PAGE] = bytes([page % 250 + 1]) * PAGE\n\
    address = lambda of: ctypes.addressof(ctypes.c_char.from_buffer(of))\n\
    libc = ctypes.CDLL(None, use_errno=True)\n\
    number, size = ctypes.c_int, ctypes.c_size_t\n\
    libc.madvise.argtypes = [size, size, number]\n\
    libc.mremap.argtypes, libc.mremap.restype = [size, size, size, number], size\n\
    def errno(result):\n\
    \x20   return ctypes.get_errno() if result in (-1, 2**64 - 1) else 0\n\
    def advise(of, first, pages, advice):\n\
    \x20   return errno(libc.madvise(address(of) + first * PAGE, pages * PAGE, advice))\n\
    def remap(of, first, pages, wanted):\n\
    \x20   return errno(libc.mremap(address(of) + first * PAGE, pages * PAGE, wanted * PAGE, 1))\n\
    def mapped():\n\
    \x20   return sum('mapped-' in line for line in open('/proc/self/maps'))\n\
    def is_whole(of):\n\
    \x20   return all(of[p * PAGE] == of[p * PAGE + PAGE - 1] == p % 250 + 1 for p in range(PAGES))\n\
    def set(page, to):\n\
    \x20   block[page * PAGE] = to\n\
    def in_child(do):\n\
    \x20   child = os.fork()\n\
    \x20   if child == 0: os._exit(do())\n\
    \x20   return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   try: client.sendall(str(eval(client.recv(1000).decode())).encode())\n\
    \x20   except Exception as error: client.sendall(repr(error).encode())\n\
    \x20   client.close()\n";

fn stage() -> Stage {
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("block.py", BLOCK);
    stage
}

fn imaged(stage: &Stage, memory: ImageMemory) -> Image {
    let life = stage.life();
    let _task = life.start(&["python3", "block.py"]);
    assert_eq!(life.ask("is_whole(block), mapped()"), "(True, 0)");
    stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), memory).unwrap()
}

fn woken(stage: &Stage, image: &Image) -> Life {
    let life = stage.life();
    stage.images.restore(image, &life.sandbox, &life.handed()).unwrap();
    life
}

fn own() {
    let stage = stage();
    let image = imaged(&stage, ImageMemory::Auto);
    let lives = [woken(&stage, &image), woken(&stage, &image)];
    for life in &lives {
        assert_eq!(life.ask("mapped() > 0"), "True", "{}", life.ask("open('/proc/self/maps').read()"));
        assert_eq!(life.ask("is_whole(block)"), "True");
    }
    assert_eq!(lives[0].ask("set(7, 99)"), "None");
    assert_eq!(lives[0].ask("block[7 * PAGE], is_whole(block)"), "(99, False)");
    assert_eq!(lives[1].ask("is_whole(block)"), "True", "what one writes the other does not see");
    let later = woken(&stage, &image);
    assert_eq!(later.ask("is_whole(block)"), "True", "nor does one that wakes later");
}

fn inherited() {
    let stage = stage();
    let life = woken(&stage, &imaged(&stage, ImageMemory::Auto));
    assert_eq!(life.ask("set(7, 99)"), "None");
    assert_eq!(life.ask("in_child(lambda: block[7 * PAGE])"), "99");
    assert_eq!(life.ask("in_child(lambda: set(8, 55) or block[8 * PAGE])"), "55");
    assert_eq!(life.ask("set(7, 8) or is_whole(block)"), "True", "what its child wrote");
}

fn kept() {
    let stage = stage();
    let life = woken(&stage, &imaged(&stage, ImageMemory::Auto));
    const DONTNEED: u32 = 4;
    const FREE: u32 = 8;
    let (einval, enomem) = ("22", "12");
    assert_eq!(life.ask("set(7, 99)"), "None");
    for (advice, answer) in [(DONTNEED, einval), (FREE, "0")] {
        assert_eq!(life.ask(&format!("advise(block, 7, 1, {advice})")), answer);
        assert_eq!(life.ask(&format!("advise(block, 0, PAGES, {advice})")), answer);
    }
    assert_eq!(life.ask("block[7 * PAGE]"), "99", "nothing was given back");
    assert_eq!(life.ask("remap(block, 16, 16, 32)"), enomem);
    assert_eq!(life.ask("set(7, 8) or is_whole(block)"), "True");
    // Memory that it gets after its wake is like any other.
    let fresh = "[b := mmap.mmap(-1, PAGE * PAGES, **KIND), b.write(b'x' * PAGE * PAGES), \
                 advise(b, 0, PAGES, 4), b[0], b[PAGE * PAGES - 1]][2:]";
    assert_eq!(life.ask(fresh), "[0, 0, 0]");
    let moved = "[b := mmap.mmap(-1, PAGE, **KIND), remap(b, 0, 1, 2)][1]";
    assert_eq!(life.ask(moved), "0");
    assert_eq!(life.ask("advise(block, 0, PAGES, 14)"), "0", "advice that gives nothing back");
}

/// The same of a language whose programs are not known, as far as it is needed.
const OTHER: &str = "open(S, '+<&=', 3); my $x = join '', map { chr(65 + $_ % 26) x 4096 } 1 .. 1000; \
    while (accept(C, S)) { sysread(C, $b, 100); open(M, '<', '/proc/self/maps'); \
    my $n = grep { /mapped-/ } <M>; syswrite(C, \"$n \" . length($x)); close C }";

fn copied() {
    let stage = stage();
    let life = woken(&stage, &imaged(&stage, ImageMemory::Copied));
    assert_eq!(life.ask("is_whole(block), mapped()"), "(True, 0)");
    assert_eq!(life.ask("advise(block, 7, 1, 4), block[7 * PAGE]"), "(0, 0)");
    for (memory, maps_any) in [(ImageMemory::Auto, false), (ImageMemory::Mapped, true)] {
        let life = stage.life();
        let _task = life.start(&["perl", "-e", OTHER]);
        assert_eq!(life.ask("x"), "0 4096000");
        let image = stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), memory).unwrap();
        let said = woken(&stage, &image).ask("x");
        let (count, length) = said.split_once(' ').unwrap();
        assert_eq!((count != "0", length), (maps_any, "4096000"), "{memory:?}: {said}");
    }
}

fn not_again() {
    let stage = stage();
    let life = woken(&stage, &imaged(&stage, ImageMemory::Auto));
    let taken = stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto);
    assert!(matches!(taken, Err(ImageError::Unfit { .. })), "{taken:?}");
    assert_eq!(life.ask("is_whole(block)"), "True");
}

/// A master that asks each of its children whether its memory is what it was.
const FAMILY: &str = "import os, socket\n\
    server = socket.socket(fileno=3)\n\
    children = []\n\
    for number in range(1, 31):\n\
    \x20   ours, theirs = socket.socketpair()\n\
    \x20   if os.fork() == 0:\n\
    \x20       block = bytearray([number]) * (1 << 20)\n\
    \x20       while theirs.recv(1): theirs.sendall(bytes([number if sum(block) == number << 20 else 0]))\n\
    \x20       os._exit(0)\n\
    \x20   children.append(ours)\n\
    def asked(child):\n\
    \x20   child.sendall(b'?')\n\
    \x20   return child.recv(1)[0]\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   client.recv(100)\n\
    \x20   client.sendall(str([asked(child) for child in children]).encode())\n\
    \x20   client.close()\n";

fn many() {
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("family.py", FAMILY);
    let life = stage.life();
    let _task = life.start(&["python3", "family.py"]);
    let all = format!("{:?}", (1..=30).collect::<Vec<_>>());
    assert_eq!(life.ask("x"), all);
    let image =
        stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap();
    assert!(files_of(&stage, "mapped-") > 20, "more than a message had room for");
    drop(life);
    assert_eq!(woken(&stage, &image).ask("x"), all);
}

/// How many files of an image have a name that begins so.
fn files_of(stage: &Stage, prefix: &str) -> usize {
    let dir = image_file(stage, "header").parent().unwrap().to_owned();
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().starts_with(prefix)).count()
}

/// A child answers, a master writes what it is told to: both have the same memory, a part of which was never used.
const TOGETHER: &str = "import mmap, os, socket, zlib\n\
    server = socket.socket(fileno=3)\n\
    SIZE = 16 << 20\n\
    memory, other = mmap.mmap(-1, SIZE), mmap.mmap(-1, 1 << 20)\n\
    for page in range(0, 2048): memory[page * 4096:page * 4096 + 8] = page.to_bytes(8, 'big')\n\
    memory[SIZE - 1] = 7\n\
    for page in range(0, 256): other[page * 4096] = 1\n\
    ours, theirs = socket.socketpair()\n\
    if os.fork() == 0:\n\
    \x20   while True:\n\
    \x20       client, _ = server.accept()\n\
    \x20       told = client.recv(100)\n\
    \x20       if told != b'read':\n\
    \x20           theirs.sendall(told); theirs.recv(1)\n\
    \x20       client.sendall(f'{zlib.crc32(memory)} {sum(other[:])} {memory[9 << 20]}'.encode())\n\
    \x20       client.close()\n\
    while told := ours.recv(100):\n\
    \x20   memory[9 << 20] = int(told)\n\
    \x20   ours.sendall(b'.')\n";

fn shared() {
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("together.py", TOGETHER);
    let life = stage.life();
    let _task = life.start(&["python3", "together.py"]);
    let before = life.ask("read");
    assert!(before.ends_with(" 256 0"), "{before}");
    for memory in [ImageMemory::Copied, ImageMemory::Auto] {
        let image = stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), memory).unwrap();
        assert_eq!(files_of(&stage, "shared-"), 2, "{memory:?}");
        assert!(image.bytes() < 48 << 20, "what was never used is no part of it");
        let lives = [woken(&stage, &image), woken(&stage, &image)];
        for life in &lives {
            assert_eq!(life.ask("read"), before, "{memory:?}");
        }
        let written = lives[0].ask("5");
        assert!(written.ends_with(" 256 5"), "{written}");
        assert_eq!(lives[0].ask("read"), written, "what its master writes");
        assert_eq!(lives[1].ask("read"), before, "what one writes the other does not see");
        assert_eq!(woken(&stage, &image).ask("read"), before, "nor does one that wakes later");
    }
    assert_eq!(life.ask("read"), before, "nor what was taken");
}

fn unwritten() {
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("together.py", TOGETHER);
    let life = stage.life();
    let _task = life.start(&["python3", "together.py"]);
    life.ask("read");
    for memory in [ImageMemory::Copied, ImageMemory::Auto] {
        let image = stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), memory).unwrap();
        // Its length is looked at when an image is looked for, which was before.
        let dir = image_file(&stage, "header").parent().unwrap().to_owned();
        let names = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
        let shared = names.filter(|path| path.to_string_lossy().contains("/shared-")).max().unwrap();
        std::fs::File::options().write(true).open(shared).unwrap().set_len(4096).unwrap();
        let fresh = stage.life();
        let error = stage.images.restore(&image, &fresh.sandbox, &fresh.handed()).unwrap_err();
        let is_of_memory =
            matches!(error, ImageError::Sandbox(SandboxError::Run { step: ChildStep::Memory, .. }));
        assert!(is_of_memory, "{memory:?}: {error:?}");
        let others = "import os; print([one for one in os.listdir('/proc') if one.isdigit() and int(one) not in (1, os.getpid())])";
        assert_eq!(scene::python(&fresh.sandbox, others), "[]", "{memory:?}");
    }
}
