//! A command that an operator runs beside an application, in its sandbox: under the same uid, as fenced in, in its cell.
//!
//! It gets pipes or a terminal that are made here, and who waits for it gets their other ends: nothing that was open
//! outside is ever open inside. It keeps the instance awake, has a time limit, and ends with the connection of who
//! waits. Not here: how the connection comes here (`feed`), the other end (`nagaya::cli`).

use std::cell::Cell;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::instance::{
    EXEC_BYTES_MAX, EXEC_GO, EXEC_SECONDS, EXEC_SECONDS_MAX, EXEC_WORDS_MAX, Exec, ExecSaid, Tier,
};
use nagaya_cmdb::record::App;
use nagaya_cmdb::{Backend, SiteName, Tenant};
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout};

use super::{Instances, Lease, Using, housing, parts, surroundings};
use crate::engine::{Engine, wrong_kind};
use crate::fault::{self, Fault};
use crate::protocol::{Exit, Failure};
use crate::sandbox::{Program, Sandbox, Task};
use crate::spawn::{self, Runner};
use crate::{server, sys};

/// Commands at once: in one instance, and on the node. Each is one question of the keeper's one thread, and some
/// descriptors.
const PER_INSTANCE_MAX: usize = 8;
const EXECS_MAX: usize = 64;

/// How long who waits may take to say that it is ready, or to read a line.
const SAY_MAX: Duration = Duration::from_secs(5);

/// Longest name of a kind of terminal, bytes.
const TERM_LEN_MAX: usize = 64;

/// What a command is run as.
struct Wanted {
    app: App,
    tenant: Arc<Tenant>,
    runner: Runner,
    command: Vec<OsString>,
    terminal: Option<String>,
}

/// A command that runs.
struct Running {
    sandbox: Arc<Sandbox>,
    task: Task,
    /// For who waits.
    ends: Vec<OwnedFd>,
}

/// Why it is over.
enum Over {
    Ended(Exit),
    /// Nobody waits any more.
    Left,
    TooLong(Duration),
}

/// One of those that count.
struct Place<'a>(&'a Cell<usize>);

impl<'a> Place<'a> {
    fn take(count: &'a Cell<usize>, max: usize, whose: &str) -> Result<Self, Fault> {
        if count.get() >= max {
            return Err(refused(format!("{max} commands run in {whose} already; wait for one to end")));
        }
        count.set(count.get() + 1);
        Ok(Self(count))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Instances {
    /// Runs it to its end, and says over the connection what comes of it.
    pub async fn exec(&self, engine: &Rc<Engine>, exec: Exec, connection: OwnedFd) {
        let watched = rustix::io::ioctl_fionbio(&connection, true)
            .map_err(io::Error::from)
            .and_then(|()| sys::watch(connection, Interest::READABLE | Interest::WRITABLE));
        let connection = match watched {
            Ok(connection) => connection,
            Err(error) => return tracing::warn!(%error, "{}: a command is not run", fault::EXEC),
        };
        if !is_told_to_go(&connection).await {
            return;
        }
        let said = match self.run_command(engine, &exec, &connection).await {
            Ok(Some(Exit { status, signal, .. })) => ExecSaid::Exited { status, signal },
            Ok(None) => return,
            Err(Fault { message: error, code, .. }) => ExecSaid::Failed { error, code: code.to_string() },
        };
        say(&connection, &said, &[]).await;
    }

    /// None: who waited has left.
    async fn run_command(
        &self,
        engine: &Rc<Engine>,
        exec: &Exec,
        connection: &AsyncFd<OwnedFd>,
    ) -> Result<Option<Exit>, Fault> {
        let limit = check(exec)?;
        let unknown =
            || Fault::new(Failure::NotFound, fault::UNKNOWN, format!("there is no site '{}'", exec.site));
        let name = SiteName::new(&exec.site).map_err(|_| unknown())?;
        let instance = self.of_site(engine, &name)?;
        let _places = (
            Place::take(&self.execs, EXECS_MAX, "instances of this node")?,
            Place::take(&instance.execs, PER_INSTANCE_MAX, "this instance")?,
        );
        let tier = instance.life.borrow().tier();
        if tier < Tier::Quiet && !exec.wake {
            return Err(refused(format!("the instance of '{name}' rests ({tier}): `--wake` wakes it first")));
        }
        let used = tokio::select! {
            used = self.use_site(engine, &name, None) => used?,
            () = until_left(connection) => return Ok(None),
        };
        // The connection that visitors get is of no use here.
        let Using { id, lease, .. } = used;
        let body = instance.body_of(parts(id).1).ok_or_else(|| refused("it ended just now; try again"))?;
        let sandbox = body.sandbox().ok_or_else(|| {
            refused("it runs in no sandbox, because nagaya is not root: use the tenant's own shell")
        })?;
        let (site, tenant) = (instance.site(), instance.tenant());
        let Backend::App(app) = &site.backend else { return Err(wrong_kind(&site, "app")) };
        let wanted = Wanted {
            app: app.clone(),
            runner: engine.runner(&tenant)?,
            tenant,
            command: exec.command.iter().map(OsString::from).collect(),
            terminal: exec.terminal.clone(),
        };
        tracing::info!(site = %name, program = exec.command[0], "an operator's command runs in it");
        // Not to be given up: what it has started would be nobody's.
        let running = engine.on_worker(move || start(sandbox, &wanted)).await?;
        let over = attend(running, connection, limit, engine, lease).await?;
        match over {
            Over::Ended(exit) => Ok(Some(exit)),
            Over::Left => Ok(None),
            Over::TooLong(limit) => {
                Err(refused(format!("the command was ended: it ran for {} s", limit.as_secs())))
            }
        }
    }
}

/// How long it may take.
fn check(exec: &Exec) -> Result<Duration, Fault> {
    let invalid = |why: String| Err(Fault::new(Failure::Invalid, fault::EXEC, why));
    let bytes: usize = exec.command.iter().map(String::len).sum();
    if exec.command.is_empty() || exec.command.len() > EXEC_WORDS_MAX || bytes > EXEC_BYTES_MAX {
        return invalid(format!(
            "a command has 1 to {EXEC_WORDS_MAX} words of at most {EXEC_BYTES_MAX} bytes together"
        ));
    }
    if exec.terminal.as_ref().is_some_and(|kind| kind.len() > TERM_LEN_MAX) {
        return invalid(format!("the kind of a terminal has at most {TERM_LEN_MAX} bytes"));
    }
    let seconds = exec.seconds_max.unwrap_or(EXEC_SECONDS);
    if !(1..=EXEC_SECONDS_MAX).contains(&seconds) {
        return invalid(format!("a command may take 1 to {EXEC_SECONDS_MAX} s"));
    }
    Ok(Duration::from_secs(seconds.into()))
}

/// Starts it. Blocks: a worker's part.
fn start(sandbox: Arc<Sandbox>, wanted: &Wanted) -> Result<Running, Fault> {
    let Wanted { app, tenant, runner, command, terminal } = wanted;
    let secrets = spawn::secrets(app, tenant, runner)?;
    // Of a handed socket it gets nothing: that is the application's.
    let address = surroundings::told(app.listen, Path::new(""));
    let mut env = housing::environment(app, tenant, &address, secrets);
    let mut wire = || -> io::Result<_> {
        Ok(match terminal {
            Some(kind) => {
                env.push(("TERM".into(), kind.into()));
                let (ours, theirs) = sandbox.terminal()?;
                (vec![ours], [theirs.try_clone()?, theirs.try_clone()?, theirs])
            }
            None => {
                let ((input, to), (from, output), (from_errors, errors)) =
                    (sandbox.pipe_in()?, sandbox.pipe()?, sandbox.pipe()?);
                (vec![to, from, from_errors], [input, output, errors])
            }
        })
    };
    let (ends, [input, output, errors]) = wire().map_err(|error| {
        let message = format!("cannot make the pipes or the terminal of a command: {error}");
        Fault::new(Failure::Busy, fault::EXEC, message)
    })?;
    let program = Program {
        argv: command.clone(),
        env,
        directory: spawn::home(tenant).join(&app.directory),
        stdin: Some(input.as_fd()),
        stdout: Some(output.as_fd()),
        stderr: Some(errors.as_fd()),
        listener: None,
        pid: None,
        open_files_max: runner.open_files_max,
        has_terminal: terminal.is_some(),
    };
    let task = sandbox.run(&program).map_err(|error| housing::of_sandbox(&error))?;
    Ok(Running { sandbox, task, ends })
}

/// Until it is over; then all of its session is killed.
async fn attend(
    running: Running,
    connection: &AsyncFd<OwnedFd>,
    limit: Duration,
    engine: &Rc<Engine>,
    lease: Lease,
) -> Result<Over, Fault> {
    let Running { sandbox, task, ends } = running;
    let over = if say(connection, &ExecSaid::Runs, &ends).await {
        drop(ends);
        tokio::select! {
            exit = ended(&task) => Over::Ended(exit),
            () = until_left(connection) => Over::Left,
            () = sleep(limit) => Over::TooLong(limit),
        }
    } else {
        Over::Left
    };
    let pid = task.pid;
    let session_ended =
        engine.on_worker(move || sandbox.end_session(pid).map_err(|error| housing::of_sandbox(&error)));
    if session_ended.await.is_err() {
        // Its sandbox has ended, or nobody is free to look for more of it.
        let _ = task.signal(Signal::KILL);
    }
    drop(lease);
    Ok(over)
}

async fn ended(task: &Task) -> Exit {
    let lost = Exit { status: None, signal: Some(Signal::KILL.as_raw()), cpu_us: 0 };
    let Ok(watched) = sys::watch(task.end(), Interest::READABLE) else { return lost };
    loop {
        let Ok(mut ready) = watched.readable().await else { return lost };
        match task.try_exit() {
            Ok(Some(exit)) => return exit,
            Ok(None) => ready.clear_ready(),
            Err(_) => return lost,
        }
    }
}

async fn is_told_to_go(connection: &AsyncFd<OwnedFd>) -> bool {
    let told = async {
        let mut byte = [0];
        loop {
            let Ok(mut ready) = connection.readable().await else { return false };
            match rustix::io::read(connection.get_ref(), &mut byte) {
                Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                Err(rustix::io::Errno::INTR) => {}
                read => return read == Ok(1) && byte[0] == EXEC_GO,
            }
        }
    };
    timeout(SAY_MAX, told).await.unwrap_or(false)
}

/// Returns once the other end has closed, or says what it has no business to.
async fn until_left(connection: &AsyncFd<OwnedFd>) {
    loop {
        let Ok(mut ready) = connection.readable().await else { return };
        match rustix::io::read(connection.get_ref(), &mut [0; 1]) {
            Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
            Err(rustix::io::Errno::INTR) => {}
            _ => return,
        }
    }
}

/// One line. False: nobody reads it.
async fn say(connection: &AsyncFd<OwnedFd>, said: &ExecSaid, ends: &[OwnedFd]) -> bool {
    let Ok(mut line) = serde_json::to_vec(said) else { return false };
    line.push(b'\n');
    // A line is shorter than any buffer of a socket.
    matches!(timeout(SAY_MAX, server::send(connection, &line, ends)).await, Ok(Ok(())))
}

fn refused(why: impl Into<String>) -> Fault {
    Fault::new(Failure::Busy, fault::EXEC, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_words_and_a_time() {
        let exec = |command: &[&str], seconds_max| Exec {
            site: "a".into(),
            command: command.iter().map(ToString::to_string).collect(),
            wake: false,
            terminal: None,
            seconds_max,
        };
        assert_eq!(check(&exec(&["ls"], None)).unwrap(), Duration::from_secs(3600));
        assert_eq!(check(&exec(&["ls"], Some(5))).unwrap(), Duration::from_secs(5));
        for bad in
            [exec(&[], None), exec(&["ls"], Some(0)), exec(&["ls"], Some(u32::MAX)), exec(&["x"; 1025], None)]
        {
            assert_eq!(check(&bad).unwrap_err().code, fault::EXEC);
        }
    }

    #[test]
    fn places_are_given_back() {
        let count = Cell::new(0);
        let first = Place::take(&count, 1, "it").unwrap();
        assert!(Place::take(&count, 1, "it").is_err());
        drop(first);
        assert!(Place::take(&count, 1, "it").is_ok());
    }
}
