//! How a child of an init becomes a program: the tenant's, without any right, or a tool of the
//! keeper's.
//!
//! Not here: the filter of system calls (`filter`), the programs and their times (`init`).

use std::convert::Infallible;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::fcntl::AtFlags;
use nix::unistd::{Gid, Uid};
use rustix::io::FdFlags;
use rustix::process::{Resource, Rlimit};

use crate::sandbox::mapped_memory_filter;

use super::kernel::{self, ForkOptions, SingleThreaded};
use super::order::{ChildStep, ProcessRole, RunRequest};
use super::{channel, filter, shm};

/// Directories in which a program without a `/` in its name is looked up, if its environment names
/// none.
const PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Exit status of a child that could not become its program. The shell uses it for "command not
/// found".
const EXIT_NOT_STARTED: u8 = 127;

/// Numbers from here on are free for copies while descriptors are moved to their numbers.
const ABOVE_ALL: RawFd = 64;

/// A program that did not start.
#[derive(Debug)]
pub struct NotRun {
    pub step: ChildStep,
    pub error: io::Error,
}

#[derive(Debug)]
pub struct StartedChild {
    pub pid: u32,
    pub pidfd: OwnedFd,
    /// Descriptor of the held calls, for a tool with such calls.
    pub questions: Option<OwnedFd>,
}

/// Starts it and returns once it runs.
pub fn start(
    alone: &SingleThreaded,
    run: &RunRequest,
    fds: &[OwnedFd],
    uid: u32,
    gid: u32,
) -> Result<StartedChild, NotRun> {
    let failed = |error: io::Error| NotRun { step: ChildStep::Fork, error };
    // The start of the program closes it, or it carries the reason for a failure.
    let (ours, theirs) = channel::pair().map_err(failed)?;
    let fork = ForkOptions { pid: run.pid, ..ForkOptions::default() };
    let (pid, pidfd) = alone
        .fork(&fork, |_| {
            match arrange(run, fds, &theirs) {
                Ok(init) => {
                    let Err(not_run) = prepare(run, &init, uid, gid).and_then(|()| execute(run));
                    say_failed(&init, &not_run);
                }
                Err(error) => say_failed(&theirs, &NotRun { step: ChildStep::Descriptors, error }),
            }
            EXIT_NOT_STARTED
        })
        .map_err(failed)?;
    drop(theirs);
    let mut questions = None;
    loop {
        match channel::receive::<ChildMessage>(&ours).map_err(failed)? {
            None => break,
            Some((ChildMessage::Questions, fds)) => questions = fds.into_iter().next(),
            Some((ChildMessage::Failed { step, errno }, _)) => {
                return Err(NotRun { step, error: io::Error::from_raw_os_error(errno) });
            }
        }
    }
    let pid = u32::try_from(pid).map_err(|_| failed(io::ErrorKind::InvalidData.into()))?;
    Ok(StartedChild { pid, pidfd, questions })
}

/// A message from a child to its init.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
enum ChildMessage {
    Failed {
        step: ChildStep,
        errno: i32,
    },
    /// With it comes the descriptor.
    Questions,
}

fn say_failed(init: &OwnedFd, NotRun { step, error }: &NotRun) {
    let errno = error.raw_os_error().unwrap_or(nix::libc::EIO);
    // An init that cannot be notified sees the exit status.
    let _ = channel::send(init, &ChildMessage::Failed { step: *step, errno }, &[]);
}

/// Does everything between its descriptors and the program.
fn prepare(run: &RunRequest, init: &OwnedFd, uid: u32, gid: u32) -> Result<(), NotRun> {
    let at = |step: ChildStep| move |error: io::Error| NotRun { step, error };
    kernel::default_signals();
    nix::sys::signal::SigSet::empty()
        .thread_set_mask()
        .map_err(io::Error::from)
        .map_err(at(ChildStep::Rights))?;
    rustix::process::setsid().map_err(io::Error::from).map_err(at(ChildStep::Rights))?;
    if run.has_terminal {
        let standard_input = kernel::descriptor(0);
        rustix::process::ioctl_tiocsctty(standard_input)
            .map_err(io::Error::from)
            .map_err(at(ChildStep::Descriptors))?;
    }
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    match &run.role {
        ProcessRole::Tenant => give_up_rights(run, uid, gid).map_err(at(ChildStep::Rights))?,
        ProcessRole::Tool { takes_into: Some(_), .. } => ask(&filter::of_checkpoints(), init)?,
        ProcessRole::Tool { brings_back: false, .. } => {}
        ProcessRole::Tool { shown, fills, shm, .. } => {
            for one in fills {
                let contents = kernel::descriptor(one.contents);
                let closed = rustix::io::fcntl_setfd(contents, FdFlags::CLOEXEC);
                closed.map_err(|errno| at(ChildStep::Descriptors)(errno.into()))?;
            }
            if let Some(from) = shm {
                put_back(*from, uid, gid).map_err(at(ChildStep::Files))?;
            }
            // Restored processes inherit both: see `guards`.
            if !shown.is_empty() {
                kernel::install_filter(&mapped_memory_filter::of_ranges(shown))
                    .map_err(at(ChildStep::Rights))?;
            }
            ask(&filter::of_restores(), init)?;
        }
    }
    rustix::process::chdir(&run.directory).map_err(io::Error::from).map_err(at(ChildStep::Directory))?;
    // Last, because a tenant's program may not do all of the earlier steps.
    if run.role == ProcessRole::Tenant {
        kernel::install_filter(&filter::of_tenants()).map_err(at(ChildStep::Rights))?;
    }
    Ok(())
}

/// Returns how many filters a restore's tool puts on itself, and so on restored processes. `shown`:
/// ranges of memory mapped from a file.
pub fn guards(shown: &[(u64, u64)]) -> u32 {
    1 + u32::from(!shown.is_empty())
}

/// Sets a filter that holds calls, and hands its descriptor to the init.
fn ask(program: &[kernel::FilterInstruction], init: &OwnedFd) -> Result<(), NotRun> {
    let questions = kernel::install_asking_filter(program);
    questions
        .and_then(|questions| channel::send(init, &ChildMessage::Questions, &[questions.as_fd()]))
        .map_err(|error| NotRun { step: ChildStep::Rights, error })
}

/// Makes the files in `/dev/shm`. Their source is closed when the tool starts.
fn put_back(from: i32, uid: u32, gid: u32) -> io::Result<()> {
    let from = kernel::descriptor(from);
    rustix::io::fcntl_setfd(from, FdFlags::CLOEXEC)?;
    shm::put_back(from, uid, gid)
}

/// Moves the descriptors to their numbers and closes all others but the connection with the init.
fn arrange(run: &RunRequest, fds: &[OwnedFd], init: &OwnedFd) -> io::Result<OwnedFd> {
    let above = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, ABOVE_ALL);
    let nothing = OwnedFd::from(File::options().read(true).write(true).open("/dev/null")?);
    let mut sources =
        (0..3).map(|number| Ok((number, above(nothing.as_fd())?))).collect::<io::Result<Vec<_>>>()?;
    for (number, fd) in run.fds.iter().zip(fds) {
        if !(0..ABOVE_ALL).contains(number) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        sources.push((*number, above(fd.as_fd())?));
    }
    let init = above(init.as_fd())?;
    for (number, source) in &sources {
        kernel::place(source.as_fd(), *number)?;
    }
    let mut keep: Vec<RawFd> = sources.iter().map(|(number, _)| *number).collect();
    keep.dedup();
    keep.push(init.as_raw_fd());
    kernel::close_all_but(&mut keep)?;
    // Closed just now.
    std::mem::forget((sources, nothing));
    Ok(init)
}

/// Gives up for good: all capabilities, every way to one, every other uid.
fn give_up_rights(run: &RunRequest, uid: u32, gid: u32) -> io::Result<()> {
    let open_files = Rlimit { current: Some(run.open_files_max), maximum: Some(run.open_files_max) };
    rustix::process::setrlimit(Resource::Nofile, open_files)?;
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    kernel::drop_bounding_capabilities()?;
    nix::unistd::setgroups(&[])?;
    nix::unistd::setresgid(gid, gid, gid)?;
    nix::unistd::setresuid(uid, uid, uid)?;
    kernel::drop_capabilities()?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

fn execute(run: &RunRequest) -> Result<Infallible, NotRun> {
    let failed = |error: io::Error| NotRun { step: ChildStep::Program, error };
    let texts = |list: &[Vec<u8>]| {
        let texts = list.iter().map(|text| CString::new(text.as_slice())).collect::<Result<Vec<_>, _>>();
        texts.map_err(|_| failed(io::Error::from_raw_os_error(nix::libc::EINVAL)))
    };
    let mut env = run.env.clone();
    if run.listeners > 0 {
        env.push(format!("LISTEN_FDS={}", run.listeners).into_bytes());
        env.push(format!("LISTEN_PID={}", rustix::process::getpid()).into_bytes());
    }
    let (args, env) = (texts(&run.argv)?, texts(&env)?);
    // Forks of the launcher have none. A kernel that refuses this has not refused them to the
    // launcher either.
    let _ = rustix::thread::disable_transparent_huge_pages(run.small_pages);
    if let ProcessRole::Tool { program, .. } = &run.role {
        return nix::unistd::execveat(kernel::descriptor(*program), c"", &args, &env, AtFlags::AT_EMPTY_PATH)
            .map_err(|errno| failed(errno.into()));
    }
    let mut last = nix::errno::Errno::ENOENT;
    for program in candidates(run.argv.first().map_or(&[], Vec::as_slice), &env) {
        let Err(errno) = nix::unistd::execve(&program, &args, &env);
        last = errno;
        if last != nix::errno::Errno::ENOENT {
            break;
        }
    }
    Err(failed(last.into()))
}

/// Returns the paths that a program's name can mean: itself with a `/`, else one for each directory
/// of `PATH`.
fn candidates(name: &[u8], env: &[CString]) -> Vec<CString> {
    if name.contains(&b'/') {
        return CString::new(name).into_iter().collect();
    }
    let path = env.iter().find_map(|one| one.as_bytes().strip_prefix(b"PATH="));
    let path = path.unwrap_or(PATH.as_bytes());
    path.split(|byte| *byte == b':').filter_map(|dir| CString::new([dir, b"/", name].concat()).ok()).collect()
}
