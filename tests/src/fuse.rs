//! A file system of the test's own, which stops answering when the test says so: what a network file system does whose
//! server is gone. It speaks the kernel's FUSE protocol (fuse(4)) on a plain thread.
//!
//! It has one directory with files that never change, and the kernel keeps nothing of it: each look asks this thread.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::mount::{MountFlags, UnmountFlags};

/// Requests of the kernel that are answered (`linux/fuse.h`).
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const RELEASEDIR: u32 = 29;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

const ENOENT: i32 = 2;
const ENOSYS: i32 = 38;

const ROOT: u64 = 1;

/// Length of the largest request: the header, and the largest write that is agreed on.
const REQUEST_MAX: usize = 1 << 20;

/// 2020, so that files count as quiet.
const CHANGED: u64 = 1_577_836_800;

/// A mounted file system. Unmounted, and all that wait for it woken, when it is dropped.
#[derive(Debug)]
pub struct HangingMount {
    path: PathBuf,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    hangs: AtomicBool,
    /// Requests that were left without an answer.
    unanswered: AtomicUsize,
}

impl HangingMount {
    /// Mounts it at `path`, which is made. `files` are names and contents.
    #[track_caller]
    pub fn new(path: &Path, files: &[(&'static str, &'static [u8])]) -> Self {
        Self::of(path, files, 0)
    }

    /// The same where all is this user's.
    #[track_caller]
    pub fn of(path: &Path, files: &[(&'static str, &'static [u8])], owner: u32) -> Self {
        std::fs::create_dir_all(path).expect("a directory to mount at");
        let device =
            OpenOptions::new().read(true).write(true).open("/dev/fuse").expect("the kernel knows FUSE");
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions\0",
            device.as_raw_fd()
        );
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).expect("it ends with NUL");
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        rustix::mount::mount("nagaya-test", path, "fuse.nagaya-test", flags, options)
            .expect("root may mount");
        let shared = Arc::new(Shared::default());
        let files = files.to_vec();
        let theirs = Arc::clone(&shared);
        std::thread::spawn(move || serve(device, (&files, owner), &theirs));
        Self { path: path.to_owned(), shared }
    }

    /// From now on nothing is answered.
    pub fn hang(&self) {
        self.shared.hangs.store(true, Ordering::SeqCst);
    }

    /// How many requests of the kernel wait in vain.
    pub fn unanswered(&self) -> usize {
        self.shared.unanswered.load(Ordering::SeqCst)
    }
}

impl Drop for HangingMount {
    fn drop(&mut self) {
        // Whoever waits gets an error as soon as the connection is aborted.
        let number = std::fs::read_to_string("/proc/self/mountinfo").ok().and_then(|list| {
            let line = list.lines().find(|line| line.split(' ').nth(4) == self.path.to_str())?;
            line.split(' ').nth(2)?.split_once(':').map(|(_, minor)| minor.to_owned())
        });
        if let Some(minor) = number {
            let _ = std::fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1");
        }
        let _ = rustix::mount::unmount(&self.path, UnmountFlags::DETACH | UnmountFlags::FORCE);
    }
}

/// Names and contents, and whose they are.
type Content<'a> = (&'a [(&'static str, &'static [u8])], u32);

fn serve(mut device: File, content: Content<'_>, shared: &Shared) {
    let mut request = vec![0; REQUEST_MAX];
    // An error means that it is unmounted.
    while let Ok(len) = device.read(&mut request) {
        let request = &request[..len];
        if shared.hangs.load(Ordering::SeqCst) {
            shared.unanswered.fetch_add(1, Ordering::SeqCst);
            continue;
        }
        let Some(answer) = answer(request, content) else { continue };
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(error) => (-error, Vec::new()),
        };
        let len = u32::try_from(16 + body.len()).expect("an answer is short");
        let reply = [&len.to_ne_bytes()[..], &error.to_ne_bytes(), &request[8..16], &body].concat();
        let _ = device.write_all(&reply);
    }
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The body of the answer; none: this request has none. `Err` is an error number.
fn answer(request: &[u8], (files, owner): Content<'_>) -> Option<Result<Vec<u8>, i32>> {
    let opcode = u32::from_ne_bytes(request[4..8].try_into().expect("four bytes"));
    let node = number(request, 16);
    let body = &request[40..];
    let content = |node: u64| {
        let at = usize::try_from(node).ok()?.checked_sub(2)?;
        files.get(at).map(|(_, content)| *content)
    };
    Some(match opcode {
        INIT => Ok(init()),
        FORGET | BATCH_FORGET | INTERRUPT => return None,
        LOOKUP => {
            let name = body.split(|&byte| byte == 0).next().unwrap_or_default();
            match files.iter().position(|(known, _)| known.as_bytes() == name) {
                Some(at) => Ok(entry(at as u64 + 2, files[at].1.len(), owner)),
                None => Err(ENOENT),
            }
        }
        GETATTR => {
            // No time for which they are good.
            let mut out = vec![0; 16];
            out.extend(attributes(node, content(node).map(<[u8]>::len), owner));
            Ok(out)
        }
        OPEN | OPENDIR => Ok(vec![0; 16]),
        READ => {
            let offset = number(body, 8);
            let size = u32::from_ne_bytes(body[16..20].try_into().expect("four"));
            let content = content(node).unwrap_or_default();
            let begin = usize::try_from(offset).unwrap_or(usize::MAX).min(content.len());
            let end = content.len().min(begin + size as usize);
            Ok(content[begin..end].to_vec())
        }
        STATFS => Ok(vec![0; 80]),
        FLUSH | RELEASE | RELEASEDIR => Ok(Vec::new()),
        _ => Err(ENOSYS),
    })
}

/// Version 7.31 of the protocol.
fn init() -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    for word in [7_u32, 31, 1 << 16, 0] {
        out.extend(word.to_ne_bytes());
    }
    // Requests at once, twice 16 bits; the largest write; the grain of times.
    out.extend(16_u16.to_ne_bytes());
    out.extend(12_u16.to_ne_bytes());
    out.extend((64_u32 << 10).to_ne_bytes());
    out.extend(1_u32.to_ne_bytes());
    out.resize(64, 0);
    out
}

fn entry(node: u64, len: usize, owner: u32) -> Vec<u8> {
    let mut out = node.to_ne_bytes().to_vec();
    // Generation, and no time for which name and attributes are good.
    out.resize(40, 0);
    out.extend(attributes(node, Some(len), owner));
    out
}

/// Of a file with this length, or of the directory.
fn attributes(node: u64, len: Option<usize>, owner: u32) -> Vec<u8> {
    debug_assert_eq!(len.is_none(), node == ROOT);
    let mode: u32 = if len.is_some() { 0o100_644 } else { 0o040_755 };
    let len = len.unwrap_or_default() as u64;
    let mut out = Vec::with_capacity(88);
    for long in [node, len, len.div_ceil(512), CHANGED, CHANGED, CHANGED] {
        out.extend(long.to_ne_bytes());
    }
    // Nanoseconds, mode, links, owner, group, device, block size, flags.
    for word in [0, 0, 0, mode, 1, owner, owner, 0, 4096, 0] {
        out.extend(u32::to_ne_bytes(word));
    }
    out
}
