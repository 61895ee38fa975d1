//! A command that an operator runs beside an application, in its sandbox. It has the same uid,
//! filters and cell.
//!
//! It gets pipes or a terminal that are made here, and the client gets their other ends. So no
//! descriptor from outside is ever open inside. The command keeps the instance awake, has a time
//! limit, and ends with the client's connection. It also enters the sandbox of an application that
//! cannot answer yet, so that an operator can find out why. That gives it no more than it would
//! have a moment later. Not here: how the connection comes here (`feed`), the other end
//! (`nagaya::cli`).

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_keeper_api::codec;
use nagaya_keeper_api::protocol::{FailureKind, ProcessExit};
use nagaya_records::instance::{
    EXEC_BYTES_MAX, EXEC_GO, EXEC_SECONDS, EXEC_SECONDS_MAX, EXEC_WORDS_MAX, ExecCommand, ExecSaid, Tier,
};
use nagaya_records::record::App;
use nagaya_records::{Backend, SiteName, Tenant};
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout};

use crate::context::{KeeperContext, wrong_kind};
use crate::fault::{self, Fault};
use crate::instances::lookup::instance_of;
use crate::instances::run::{app_launch, app_machine, sandbox_spec};
use crate::instances::state::instance::{SiteInstance, parts};
use crate::instances::state::shared::NodeInstances;
use crate::instances::use_instance::{ReadyInstance, RunRef, use_site};
use crate::sandbox::{Sandbox, SandboxProgram, SandboxTask};
use crate::spawn::{self, RunAs};

/// Maximum number of commands at once: in one instance, and on the node. Each needs the keeper's
/// one thread once, and some descriptors.
const PER_INSTANCE_MAX: usize = 8;
const EXECS_MAX: usize = 64;

/// Maximum time for the client to report that it is ready, or to read a line.
const SAY_MAX: Duration = Duration::from_secs(5);

/// Maximum time for an application that is woken for a command to answer. Then the command enters
/// all the same.
const READY_WAIT: Duration = Duration::from_secs(5);

/// Maximum length of a terminal type's name, bytes.
const TERM_LEN_MAX: usize = 64;

/// Parameters of a command.
struct ExecRequest {
    app: App,
    tenant: Arc<Tenant>,
    runner: RunAs,
    command: Vec<OsString>,
    terminal: Option<String>,
}

/// A command that runs.
struct RunningCommand {
    sandbox: Arc<Sandbox>,
    task: SandboxTask,
    /// Descriptors for the client.
    ends: Vec<OwnedFd>,
}

/// Why a command is over.
enum ExecEnd {
    Ended(ProcessExit),
    /// Nobody waits any more.
    Left,
    TooLong(Duration),
}

/// Runs a command to its end, and reports the result over the connection.
pub async fn exec(instances: &Rc<NodeInstances>, exec: ExecCommand, connection: OwnedFd) {
    let watched = rustix::io::ioctl_fionbio(&connection, true)
        .map_err(io::Error::from)
        .and_then(|()| nagaya_keeper_api::watch(connection, Interest::READABLE));
    let connection = match watched {
        Ok(connection) => connection,
        Err(error) => return tracing::warn!(%error, "{}: a command is not run", fault::EXEC),
    };
    if !is_told_to_go(&connection).await {
        return;
    }
    let said = match run_command(instances, &exec, &connection).await {
        Ok(Some(ProcessExit { status, signal, .. })) => ExecSaid::Exited { status, signal },
        Ok(None) => return,
        Err(Fault { message: error, code, .. }) => ExecSaid::Failed { error, code: code.to_string() },
    };
    say(&connection, &said, &[]);
}

/// Returns `None` if the client has left.
async fn run_command(
    instances: &Rc<NodeInstances>,
    exec: &ExecCommand,
    connection: &AsyncFd<OwnedFd>,
) -> Result<Option<ProcessExit>, Fault> {
    let limit = check(exec)?;
    let unknown =
        || Fault::new(FailureKind::NotFound, fault::UNKNOWN, format!("there is no site '{}'", exec.site));
    let name = SiteName::new(&exec.site).map_err(|_| unknown())?;
    let instance = instance_of(instances, &name)?;
    let _places = (
        instances.commands.take(EXECS_MAX, "instances of this node")?,
        instance.commands.take(PER_INSTANCE_MAX, "this instance")?,
    );
    let tier = instance.life.borrow().tier();
    let is_coming = instance.coming().is_some();
    if tier < Tier::Quiet && !exec.wake && !is_coming {
        return Err(refused(not_running(&instance, &name)));
    }
    let entered = tokio::select! {
        entered = enter_sandbox(instances, &instance, &name) => entered?,
        () = wait_until_left(connection) => return Ok(None),
    };
    let (sandbox, instance_ref) = entered;
    let (site, tenant) = (instance.site(), instance.tenant());
    let Backend::App(app) = &site.backend else { return Err(wrong_kind(&site, "app")) };
    let wanted = ExecRequest {
        app: app.clone(),
        runner: instances.context.runner(&tenant)?,
        tenant,
        command: exec.command.iter().map(OsString::from).collect(),
        terminal: exec.terminal.clone(),
    };
    tracing::info!(site = %name, program = exec.command[0], "an operator's command runs in it");
    // Must not be cancelled: the processes it has started would belong to nobody.
    let running = instances.context.on_worker(move || start(sandbox, &wanted)).await?;
    // An application that becomes ready meanwhile is kept awake from then on.
    let keep_awake = async {
        let _instance_ref = match instance_ref {
            Some(instance_ref) => Ok(instance_ref),
            None => use_site(instances, &name, None).await.map(|ready| ready.instance_ref),
        };
        std::future::pending::<()>().await;
    };
    let over = attend(running, connection, limit, &instances.context, keep_awake).await?;
    match over {
        ExecEnd::Ended(exit) => Ok(Some(exit)),
        ExecEnd::Left => Ok(None),
        ExecEnd::TooLong(limit) => {
            Err(refused(format!("the command was ended: it ran for {} s", limit.as_secs())))
        }
    }
}

/// Waits until there is a sandbox to enter. It belongs to an application that can answer, or to
/// one that still cannot. The first is kept awake from now on.
async fn enter_sandbox(
    instances: &Rc<NodeInstances>,
    instance: &Rc<SiteInstance>,
    name: &SiteName,
) -> Result<(Arc<Sandbox>, Option<RunRef>), Fault> {
    let is_begun = instance.coming().is_some();
    let coming = async {
        let sandbox = wait_for_sandbox(instance).await;
        if !is_begun {
            sleep(READY_WAIT).await;
        }
        // There may be another try by now.
        instance.coming().unwrap_or(sandbox)
    };
    let used = tokio::select! {
        biased;
        used = use_site(instances, name, None) => used,
        sandbox = coming => return Ok((sandbox, None)),
    };
    // The connection for visitors is useless here.
    let ReadyInstance { id, instance_ref, .. } = used.map_err(|fault| {
        let hint = "nothing of it runs now; while it starts, a command goes in before it can answer";
        Fault { message: format!("{}; {hint}", fault.message), ..fault }
    })?;
    let processes =
        instance.processes_of(parts(id).1).ok_or_else(|| refused("it ended just now; try again"))?;
    let sandbox = processes.sandbox().ok_or_else(|| {
        refused("it runs in no sandbox, because nagaya is not root: use the tenant's own shell")
    })?;
    Ok((sandbox, Some(instance_ref)))
}

async fn wait_for_sandbox(instance: &SiteInstance) -> Arc<Sandbox> {
    loop {
        let changed = instance.changed.notified();
        if let Some(sandbox) = instance.coming() {
            return sandbox;
        }
        changed.await;
    }
}

fn not_running(instance: &SiteInstance, name: &SiteName) -> String {
    let life = instance.life.borrow();
    let tier = life.tier();
    match life.failures(std::time::Instant::now()) {
        (count, Some(left)) => format!(
            "nothing of the application of '{name}' runs: it failed {count} times and may be started again in {:.1} s; `--wake` starts it then, and `nagaya instance logs {name}` says why it failed",
            left.as_secs_f32()
        ),
        _ => format!("the instance of '{name}' rests ({tier}): `--wake` wakes it first"),
    }
}

/// Checks the command, and returns its time limit.
fn check(exec: &ExecCommand) -> Result<Duration, Fault> {
    let invalid = |why: String| Err(Fault::new(FailureKind::Invalid, fault::EXEC, why));
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

/// Starts it. Blocks, so it runs on a worker thread.
fn start(sandbox: Arc<Sandbox>, wanted: &ExecRequest) -> Result<RunningCommand, Fault> {
    let ExecRequest { app, tenant, runner, command, terminal } = wanted;
    let secrets = spawn::secrets(app, tenant, runner)?;
    // It gets no inherited socket: that is the application's.
    let address = sandbox_spec::told(app.listen, Path::new(""));
    let mut env = app_launch::environment(app, tenant, &address, secrets);
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
        Fault::new(FailureKind::Busy, fault::EXEC, message)
    })?;
    let argv = match &app.machine {
        // Where its own sandbox only has QEMU.
        Some(_) => {
            let is_node_base = app.base.as_ref().is_none_or(|base| sandbox_spec::is_node(base.path()));
            app_machine::exec_command(app, tenant, is_node_base, command)
        }
        None => command.clone(),
    };
    let program = SandboxProgram {
        argv,
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
    let task = sandbox.run(&program).map_err(|error| app_launch::of_sandbox(&error))?;
    Ok(RunningCommand { sandbox, task, ends })
}

/// Waits until it is over. Then kills all of its session.
async fn attend(
    running: RunningCommand,
    connection: &AsyncFd<OwnedFd>,
    limit: Duration,
    context: &KeeperContext,
    keep_awake: impl Future<Output = ()>,
) -> Result<ExecEnd, Fault> {
    let RunningCommand { sandbox, task, ends } = running;
    let over = if say(connection, &ExecSaid::Runs, &ends) {
        drop(ends);
        tokio::select! {
            exit = ended(&task) => ExecEnd::Ended(exit),
            () = wait_until_left(connection) => ExecEnd::Left,
            () = sleep(limit) => ExecEnd::TooLong(limit),
            () = keep_awake => unreachable!("it waits for ever"),
        }
    } else {
        ExecEnd::Left
    };
    let pid = task.pid;
    let session_ended =
        context.on_worker(move || sandbox.end_session(pid).map_err(|error| app_launch::of_sandbox(&error)));
    if session_ended.await.is_err() {
        // Its sandbox has ended, or no worker is free to search it for more.
        let _ = task.signal(Signal::KILL);
    }
    Ok(over)
}

async fn ended(task: &SandboxTask) -> ProcessExit {
    let lost =
        ProcessExit { status: None, signal: Some(Signal::KILL.as_raw()), cpu_us: 0, out_of_memory: false };
    let Ok(watched) = nagaya_keeper_api::watch(task.end(), Interest::READABLE) else { return lost };
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

/// Returns once the other end has closed, or sent something unexpected.
async fn wait_until_left(connection: &AsyncFd<OwnedFd>) {
    loop {
        let Ok(mut ready) = connection.readable().await else { return };
        match rustix::io::read(connection.get_ref(), &mut [0; 1]) {
            Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
            Err(rustix::io::Errno::INTR) => {}
            _ => return,
        }
    }
}

/// Sends one line. Returns false if nobody reads it.
fn say(connection: &AsyncFd<OwnedFd>, said: &ExecSaid, ends: &[OwnedFd]) -> bool {
    let Ok(mut line) = serde_json::to_vec(said) else { return false };
    line.push(b'\n');
    let ends: Vec<_> = ends.iter().map(AsFd::as_fd).collect();
    // A line is shorter than any socket buffer, and there are two of them.
    codec::send(connection, &line, &ends).is_ok()
}

fn refused(why: impl Into<String>) -> Fault {
    Fault::new(FailureKind::Busy, fault::EXEC, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_words_and_a_time() {
        let exec = |command: &[&str], seconds_max| ExecCommand {
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
}
