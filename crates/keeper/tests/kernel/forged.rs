//! Forged images, with a real CRIU: one that somebody made who has not the keeper's key, and one of somebody who has it.
//!
//! Each is an image of an ordinary application in which CRIU's files say that a process has other rights. Digests are right
//! everywhere. Not here: images that are damaged (`image`), images on their way between nodes (`transfer`).

use std::fs;
use std::path::Path;

use nagaya_keeper::image::{Digest, ImageError, ImageLookup};
use nagaya_records::instance::{InstanceCommand, Tier};
use nagaya_records::record::ImageMemory;
use serde_json::{Value, json};

use crate::Fact;
use crate::image::{Life, Stage, forge_header, forge_header_by, found, image_file, put_aside};
use crate::rest::{SERVER, app, get, pids, run_of, until_idle};
use crate::wake::until_images;
use crate::world::{World, site_name, wait_dead};

pub const CRIU: &[Fact] = &[
    ("a forged image does not run: its authenticator is wrong", refused_by_key),
    ("a forged image that is signed right does not run: its rights are wrong", refused_by_rights),
    ("a thread with other rights than its process' is found", refused_thread),
    ("a filter that an image does not name holds all the same", filter_holds),
    ("the visitor of a forged image is served by a start", served_cold),
];

/// Writes when it runs, asks for what is refused, and tells which rights it has.
const PROGRAM: &str = "import ctypes, os, socket, threading, time\n\
    server = socket.socket(fileno=3)\n\
    libc = ctypes.CDLL(None, use_errno=True)\n\
    threading.Thread(target=time.sleep, args=(100000,), daemon=True).start()\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   open('/srv/app/runs', 'w').close()\n\
    \x20   said = [libc.unshare(0x10000000), ctypes.get_errno(), libc.ptrace(0, 0, 0, 0), ctypes.get_errno()]\n\
    \x20   try: client.recv(100); client.sendall(str(said).encode())\n\
    \x20   except OSError: pass\n\
    \x20   client.close()\n";

// === CRIU's files ===

/// Fields of `core_entry`, `task_core_entry`, `thread_core_entry` and `creds_entry` (CRIU's `images/core.proto` and `creds.proto`).
const CORE_TASK: u32 = 3;
const CORE_THREAD: u32 = 5;
const TASK_OLD_SECCOMP: u32 = 11;
const THREAD_CREDS: u32 = 10;
const THREAD_SECCOMP: u32 = 11;
const CREDS_UIDS: [u32; 4] = [1, 3, 5, 7];
const CREDS_CAPABILITIES: [u32; 4] = [9, 10, 11, 12];
const CREDS_GROUPS: u32 = 14;
const CREDS_NO_NEW_PRIVS: u32 = 18;

/// Two words that say what a file is, and the length of its message.
const MAGIC_LEN: usize = 8;

fn varint(bytes: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0, 0);
    loop {
        let (first, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        shift += 7;
        if first & 0x80 == 0 {
            return value;
        }
    }
}

fn put_varint(to: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        to.push(u8::try_from(value & 0x7f).unwrap() | 0x80);
        value >>= 7;
    }
    to.push(u8::try_from(value).unwrap());
}

/// A field of a message: a number, or bytes, or eight or four of them.
#[derive(Debug, Clone, PartialEq)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
    Fixed(u64, Vec<u8>),
}

fn read(mut bytes: &[u8]) -> Vec<(u32, Field)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let field = match key & 7 {
            0 => Field::Number(varint(&mut bytes)),
            wire => {
                let len = match wire {
                    1 => 8,
                    5 => 4,
                    _ => usize::try_from(varint(&mut bytes)).unwrap(),
                };
                let (now, rest) = bytes.split_at(len);
                bytes = rest;
                if wire == 2 { Field::Bytes(now.to_vec()) } else { Field::Fixed(wire, now.to_vec()) }
            }
        };
        fields.push((u32::try_from(key >> 3).unwrap(), field));
    }
    fields
}

fn written(fields: &[(u32, Field)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, field) in fields {
        let key = |wire: u64| u64::from(*number) << 3 | wire;
        match field {
            Field::Number(value) => {
                put_varint(&mut bytes, key(0));
                put_varint(&mut bytes, *value);
            }
            Field::Bytes(content) => {
                put_varint(&mut bytes, key(2));
                put_varint(&mut bytes, content.len() as u64);
                bytes.extend(content);
            }
            Field::Fixed(wire, content) => {
                put_varint(&mut bytes, key(*wire));
                bytes.extend(content);
            }
        }
    }
    bytes
}

/// Changes the message in this field.
fn within(fields: &mut [(u32, Field)], number: u32, change: impl Fn(&mut Vec<(u32, Field)>)) {
    for (_, field) in fields.iter_mut().filter(|(found, _)| *found == number) {
        let Field::Bytes(bytes) = field else { panic!("{number} is no message") };
        let mut inner = read(bytes);
        change(&mut inner);
        *bytes = written(&inner);
    }
}

fn set(fields: &mut Vec<(u32, Field)>, number: u32, value: u64) {
    fields.retain(|(found, _)| *found != number);
    fields.push((number, Field::Number(value)));
}

/// Changes credentials of a thread.
type Change = fn(&mut Vec<(u32, Field)>);

/// What is changed in a thread's part, with a word that the reason has.
const CHANGES: &[(&str, Change)] = &[
    ("Seccomp", |thread| thread.retain(|(number, _)| ![THREAD_SECCOMP, THREAD_SECCOMP + 1].contains(number))),
    ("Cap", |thread| {
        within(thread, THREAD_CREDS, |creds| {
            for number in CREDS_CAPABILITIES {
                fill(creds, number, 0xffff_ffff);
            }
        });
    }),
    ("NoNewPrivs", |thread| within(thread, THREAD_CREDS, |creds| set(creds, CREDS_NO_NEW_PRIVS, 0))),
    ("Uid", |thread| {
        within(thread, THREAD_CREDS, |creds| CREDS_UIDS.iter().for_each(|number| set(creds, *number, 0)));
    }),
    ("Groups", |thread| within(thread, THREAD_CREDS, |creds| creds.push((CREDS_GROUPS, Field::Number(0))))),
];

/// Every value of a repeated field, packed or not.
fn fill(creds: &mut [(u32, Field)], number: u32, value: u64) {
    for (_, field) in creds.iter_mut().filter(|(found, _)| *found == number) {
        match field {
            Field::Bytes(packed) => {
                let mut rest = packed.as_slice();
                let mut filled = Vec::new();
                while !rest.is_empty() {
                    varint(&mut rest);
                    put_varint(&mut filled, value);
                }
                *packed = filled;
            }
            field => *field = Field::Number(value),
        }
    }
}

/// A change of CRIU's message in one file.
type FileChange<'a> = &'a dyn Fn(&mut Vec<(u32, Field)>);

/// Changes a file of CRIU's, and everything that says what its content is. `key`: with this one instead of the keeper's.
fn forge_file(header: &Path, name: &str, key: Option<&[u8]>, change: FileChange<'_>) {
    let path = header.with_file_name(name);
    let bytes = fs::read(&path).unwrap();
    let (magic, rest) = bytes.split_at(MAGIC_LEN);
    let len = u32::from_le_bytes(rest[..4].try_into().unwrap()) as usize;
    let (message, behind) = rest[4..].split_at(len);
    let mut fields = read(message);
    assert_eq!(written(&fields), message, "nothing is lost on the way");
    change(&mut fields);
    let message = written(&fields);
    let len = u32::try_from(message.len()).unwrap().to_le_bytes();
    let forged = [magic, &len, &message, behind].concat();
    assert_ne!(forged, bytes, "it was changed");
    fs::write(&path, &forged).unwrap();
    let change = |header: &mut Value| {
        let digest = Digest::of_file(&fs::File::open(&path).unwrap()).unwrap();
        header["files"][name] = json!({"bytes": forged.len(), "digest": digest});
    };
    match key {
        Some(key) => forge_header_by(header, key, change),
        None => forge_header(header, change),
    }
}

fn forge_thread(header: &Path, thread: &str, key: Option<&[u8]>, change: Change) {
    forge_file(header, &format!("core-{thread}.img"), key, &|core| {
        within(core, CORE_THREAD, change);
        // Of CRIU before it knew of threads.
        within(core, CORE_TASK, |task| {
            task.retain(|(number, _)| ![TASK_OLD_SECCOMP, TASK_OLD_SECCOMP + 1].contains(number));
        });
    });
}

// === Tests ===

fn stage() -> Stage {
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("program.py", PROGRAM);
    let life = stage.life();
    let _task = life.start(&["python3", "program.py"]);
    life.ask("x");
    fs::remove_file(stage.scene.app("runs")).unwrap();
    stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap();
    found(&stage);
    stage
}

fn restored(stage: &Stage) -> (Life, Result<(), ImageError>) {
    let life = stage.life();
    let image = found(stage);
    // Queued before there is anybody: who runs answers it.
    let _visitor = life.connect();
    let restored = stage.images.restore(&image, &life.sandbox, &life.handed()).map(drop);
    (life, restored)
}

fn refused_by_key() {
    let stage = stage();
    for (thread, change) in CHANGES.iter().map(|(_, change)| ("10", *change)) {
        let header = image_file(&stage, "header");
        forge_thread(&header, thread, Some(&[0; 32]), change);
        assert!(matches!(stage.images.find(&stage.subject()), ImageLookup::Nothing));
        let why = put_aside(&stage);
        let is_told = |why: &String| why.contains("its authenticator is wrong");
        assert!(!why.is_empty() && why.iter().all(is_told), "{why:?}");
        // Back in its place, as it was.
        let aside =
            fs::read_dir(stage.images.dir().join("quarantine")).unwrap().next().unwrap().unwrap().path();
        fs::rename(aside, header.parent().unwrap()).unwrap();
    }
    assert!(!stage.scene.app("runs").exists());
}

/// Each in a stage of its own: what turns out wrong again and again is not taken any more.
fn refused(thread: &str, (word, change): &(&str, Change)) {
    let stage = stage();
    forge_thread(&image_file(&stage, "header"), thread, None, *change);
    let (life, end) = restored(&stage);
    match end {
        Err(ImageError::LessFenced { reason }) => assert!(reason.contains(word), "{word}: {reason}"),
        other => panic!("{word}: {other:?}"),
    }
    assert!(!stage.scene.app("runs").exists(), "nothing of it has run");
    let why = put_aside(&stage);
    assert!(
        matches!(why.as_slice(), [why] if why.contains("other rights than its sandbox gives")),
        "{why:?}"
    );
    drop(life);
}

fn refused_by_rights() {
    CHANGES.iter().for_each(|change| refused("10", change));
}

fn refused_thread() {
    let stage = stage();
    let dir = image_file(&stage, "header").parent().unwrap().to_owned();
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let cores = names.filter_map(|name| Some(name.strip_prefix("core-")?.strip_suffix(".img")?.to_owned()));
    let other = cores.into_iter().find(|name| name != "10").expect("it has a second thread");
    // CRIU keeps filters once for all threads, and ids and capabilities of each.
    CHANGES[1..4].iter().for_each(|change| refused(&other, change));
}

/// `seccomp_entry` and `seccomp_filter` (CRIU's `images/seccomp.proto`).
const FILTERS: u32 = 1;
const FILTER_PROGRAM: u32 = 1;

/// `BPF_RET | BPF_K` with `SECCOMP_RET_ALLOW`.
const ALLOW_ALL: [u8; 8] = [6, 0, 0, 0, 0, 0, 0xff, 0x7f];

fn filter_holds() {
    const EPERM: i32 = 1;
    const ENOSYS: i32 = 38;
    let stage = stage();
    let (life, end) = restored(&stage);
    end.unwrap();
    assert_eq!(life.ask("x"), format!("[-1, {EPERM}, -1, {EPERM}]"), "its own filter answers first");
    drop(life);
    // As many filters as it should have, of which its own allows everything.
    forge_file(&image_file(&stage, "header"), "seccomp.img", None, &|fields| {
        within(fields, FILTERS, |filter| {
            filter.retain(|(number, _)| *number != FILTER_PROGRAM);
            filter.push((FILTER_PROGRAM, Field::Bytes(ALLOW_ALL.into())));
        });
    });
    let (life, end) = restored(&stage);
    end.unwrap();
    assert_eq!(life.ask("x"), format!("[-1, {ENOSYS}, -1, {ENOSYS}]"), "it is refused all the same");
}

fn served_cold() {
    let mut world = World::new();
    world.script("server.py", SERVER);
    world.site("app", "alice", app("", json!({"listen": "fd"})));
    let world = world.start();
    world.run(async |keeper| {
        until_images(&world).await;
        let first = run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        let before = pids(&world, "app");
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) })["ok"], true);
        before.into_iter().for_each(wait_dead);
        let images = world.dir.path().join("state/images/images");
        let header = fs::read_dir(images).unwrap().next().unwrap().unwrap().path().join("header");
        forge_thread(&header, "10", None, CHANGES[1].1);
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        let second = get(&used, "/").await.split(' ').next().unwrap().to_owned();
        assert_ne!(first, second, "it was started");
        let log = world.log();
        assert!(log.contains("NGY0367") && log.contains("other rights"), "{log}");
        assert_eq!(world.metric("nagaya_keeper_images_total{event=\"quarantined\"}"), 1);
    });
}
