//! Commands that an operator runs in an instance: what they are, see and leave behind.
//!
//! Not here: the command line's end (`tests/e2e`), what any program in a sandbox can do (`sandbox`).

use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nagaya_records::feed::{FromSupervisor, encode};
use nagaya_records::instance::{EXEC_GO, ExecCommand, ExecSaid, InstanceCommand, Tier};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::{Value, json};

use crate::Fact;
use crate::rest::{SERVER, app, pids, run_of, show, until_idle};
use crate::world::{ALICE, World, until_so, wait_dead};

pub const ROOT: &[Fact] = &[
    ("a command in an instance is as fenced in as its application", as_fenced_in),
    ("a command in an instance sees nothing of another tenant's", sees_only_its_own),
    ("a command reads, writes, and ends with its own status", has_three_streams),
    ("a command ends with who waits for it, and all of its session too", ends_with_its_client),
    ("a command for an instance that rests is refused, or wakes it", wakes_if_wanted),
    ("a command keeps its instance awake, for no longer than it may take", is_bounded_in_time),
    ("no more than so many commands run at once in an instance", is_bounded_in_number),
    ("a command has a terminal of its sandbox', and not of the node's", has_a_terminal),
    ("a command that cannot be started says why", says_why_not),
    ("a command goes into an application that does not answer yet", enters_what_is_starting),
    ("a command for an application that fails is told that nothing runs", is_told_of_failure),
];

/// No line takes so long unless something hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

fn world() -> World {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", SERVER);
    world.script_of("bob", "server.py", SERVER);
    world.site("app", "alice", app("", json!({"env": {"COLOUR": "green"}})));
    world.site("bobs", "bob", app("", json!({})));
    world.start()
}

/// A command of this site's, as the supervisor hands it over.
pub struct Command {
    connection: UnixStream,
}

pub fn exec(site: &str, command: &[&str]) -> ExecCommand {
    let command = command.iter().map(ToString::to_string).collect();
    ExecCommand { site: site.into(), command, wake: true, terminal: None, seconds_max: None }
}

pub fn begin(world: &World, exec: &ExecCommand) -> Command {
    let (ours, theirs) = UnixStream::pair().unwrap();
    world.pass(&encode(&FromSupervisor::Exec(exec.clone())).unwrap(), &theirs.into());
    ours.set_read_timeout(Some(TIMEOUT)).unwrap();
    (&ours).write_all(&[EXEC_GO]).unwrap();
    Command { connection: ours }
}

impl Command {
    pub fn hear(&self) -> (ExecSaid, Vec<OwnedFd>) {
        let (mut line, mut fds) = (Vec::new(), Vec::new());
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut bytes = [IoSliceMut::new(&mut byte)];
            let read = recvmsg(&self.connection, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
            assert_eq!(read.bytes, 1, "the connection ended after {:?}", String::from_utf8_lossy(&line));
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(passed) = message {
                    fds.extend(passed);
                }
            }
            line.push(byte[0]);
        }
        (serde_json::from_slice(&line).unwrap(), fds)
    }

    /// The other ends of its standard streams.
    #[track_caller]
    pub fn streams(&self) -> [File; 3] {
        let (said, fds) = self.hear();
        assert_eq!(said, ExecSaid::Runs);
        let files: Vec<File> = fds.into_iter().map(File::from).collect();
        files.try_into().unwrap()
    }

    #[track_caller]
    fn failure(&self) -> (String, String) {
        match self.hear().0 {
            ExecSaid::Failed { error, code } => (error, code),
            other => panic!("{other:?}"),
        }
    }
}

/// What it writes, and how it ends.
#[track_caller]
pub fn output(world: &World, exec: &ExecCommand) -> (String, ExecSaid) {
    let command = begin(world, exec);
    let [input, mut output, mut errors] = command.streams();
    drop(input);
    let mut text = String::new();
    output.read_to_string(&mut text).unwrap();
    errors.read_to_string(&mut text).unwrap();
    (text, command.hear().0)
}

/// What a script says that ends well.
#[track_caller]
fn shell(world: &World, site: &str, script: &str) -> String {
    let (text, end) = output(world, &exec(site, &["sh", "-c", script]));
    assert_eq!(end, ExecSaid::Exited { status: Some(0), signal: None }, "{text}");
    text
}

fn as_fenced_in() {
    let world = world();
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        let script = "id -u; id -g; echo $COLOUR; pwd; grep -E '^(NoNewPrivs|Seccomp|CapEff|CapBnd):' /proc/self/status | cut -f2; \
            readlink /proc/self/ns/user /proc/self/ns/pid /proc/self/ns/mnt /proc/self/ns/net";
        let said = shell(&world, "app", script);
        let words: Vec<&str> = said.lines().collect();
        let alice = ALICE.to_string();
        let home = world.home("alice").join("www").display().to_string();
        assert_eq!(words[..4], [alice.as_str(), &alice, "green", &home], "{said}");
        assert_eq!(words[4..8], ["0000000000000000", "0000000000000000", "1", "2"], "{said}");
        // The application's own process, as seen from outside.
        let pid = *pids(&world, "app").last().unwrap();
        let its = ["user", "pid", "mnt", "net"].map(|kind| {
            std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap().display().to_string()
        });
        assert_eq!(words[8..12], its.each_ref().map(String::as_str), "{said}");
        // It is in the same cell.
        let command = begin(&world, &exec("app", &["sleep", "1000"]));
        let _streams = command.streams();
        assert_eq!(pids(&world, "app").len(), 3, "the sandbox' own, the application and the command");
    });
}

fn sees_only_its_own() {
    let world = world();
    world.run(async |keeper| {
        run_of(&keeper, "bobs").await;
        let said = shell(
            &world,
            "app",
            "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; cat /proc/1/cmdline | tr '\\0' ' '",
        );
        assert!(said.contains("server.py"), "its own application: {said}");
        let listed = shell(&world, "app", "ls -d /proc/[0-9]* | wc -l");
        // The sandbox' own, the application, the shell and what it runs.
        assert!(listed.trim().parse::<u32>().unwrap() <= 5, "{listed}");
        let home = world.home("bob").display().to_string();
        let (text, end) = output(&world, &exec("app", &["ls", &home]));
        assert!(matches!(end, ExecSaid::Exited { status: Some(1..), .. }), "{text}");
    });
}

fn has_three_streams() {
    let world = world();
    let command = begin(&world, &exec("app", &["sh", "-c", "tr a-z A-Z; echo more >&2; exit 7"]));
    let [mut input, mut output, mut errors] = command.streams();
    input.write_all(b"shout\n").unwrap();
    drop(input);
    let (mut said, mut more) = (String::new(), String::new());
    output.read_to_string(&mut said).unwrap();
    errors.read_to_string(&mut more).unwrap();
    assert_eq!((said.as_str(), more.as_str()), ("SHOUT\n", "more\n"));
    assert_eq!(command.hear().0, ExecSaid::Exited { status: Some(7), signal: None });
    let (_, end) = output_of(&world, "kill -9 $$");
    assert_eq!(end, ExecSaid::Exited { status: None, signal: Some(9) });
}

fn output_of(world: &World, script: &str) -> (String, ExecSaid) {
    output(world, &exec("app", &["sh", "-c", script]))
}

fn ends_with_its_client() {
    let world = world();
    world.run(async |keeper| {
        let run = run_of(&keeper, "app").await;
        let before = pids(&world, "app");
        let command = begin(&world, &exec("app", &["sh", "-c", "sleep 1000 & sleep 1000 & echo on; wait"]));
        let [_input, mut output, _errors] = command.streams();
        let mut on = [0; 3];
        output.read_exact(&mut on).unwrap();
        let its: Vec<i32> = pids(&world, "app").into_iter().filter(|pid| !before.contains(pid)).collect();
        assert_eq!(its.len(), 3, "a shell and two of its own");
        // The visitor leaves; the command keeps its instance awake.
        until_so(|| show(&world, "app")["uses"] == 1).await;
        drop(command);
        its.into_iter().for_each(wait_dead);
        until_idle(&world, "app").await;
        assert_eq!(run_of(&keeper, "app").await, run, "the application goes on");
        // What a command leaves in the background when it ends goes with it.
        let (text, _) = output_of(&world, "sleep 1000 & echo done");
        assert_eq!(text, "done\n");
        until_so(|| pids(&world, "app") == before).await;
    });
}

fn wakes_if_wanted() {
    let world = world();
    world.run(async |keeper| {
        let (error, code) = begin(&world, &ExecCommand { wake: false, ..exec("app", &["true"]) }).failure();
        assert!(error.contains("rests (cold)") && error.contains("--wake"), "{error}");
        assert_eq!(code, "NGY0323");
        assert!(pids(&world, "app").is_empty());
        assert_eq!(shell(&world, "app", "echo here"), "here\n");
        until_idle(&world, "app").await;
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["ok"], true);
        let refused = begin(&world, &ExecCommand { wake: false, ..exec("app", &["true"]) }).failure();
        assert!(refused.0.contains("rests (frozen)"), "{refused:?}");
        assert_eq!(shell(&world, "app", "echo back"), "back\n");
        until_idle(&world, "app").await;
        run_of(&keeper, "app").await;
    });
}

fn is_bounded_in_time() {
    let world = world();
    world.run(async |_| {
        let command = begin(&world, &ExecCommand { seconds_max: Some(1), ..exec("app", &["sleep", "1000"]) });
        let _streams = command.streams();
        assert_eq!(show(&world, "app")["uses"], 1);
        assert_eq!(world.act("app", InstanceCommand::Rest { to: None })["ok"], Value::Null, "it is in use");
        let (error, code) = command.failure();
        assert!(error.contains("it ran for 1 s"), "{error}");
        assert_eq!(code, "NGY0323");
        until_idle(&world, "app").await;
        until_so(|| pids(&world, "app").len() == 2).await;
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Cold) })["ok"], true);
    });
}

fn is_bounded_in_number() {
    let world = world();
    let running: Vec<_> = (0..8)
        .map(|_| {
            let command = begin(&world, &exec("app", &["sleep", "1000"]));
            let streams = command.streams();
            (command, streams)
        })
        .collect();
    let (error, _) = begin(&world, &exec("app", &["true"])).failure();
    assert!(error.contains("8 commands run in this instance already"), "{error}");
    assert_eq!(shell(&world, "bobs", "echo here"), "here\n", "another has room");
    let last = pids(&world, "app").pop().unwrap();
    drop(running);
    wait_dead(last);
    world.run(async |_| until_idle(&world, "app").await);
    assert_eq!(shell(&world, "app", "echo room"), "room\n");
}

fn has_a_terminal() {
    let world = world();
    let script = "read line; tty; stty size; echo $TERM; echo \"$line\" > /dev/tty";
    let command =
        begin(&world, &ExecCommand { terminal: Some("vt100".into()), ..exec("app", &["sh", "-c", script]) });
    let (said, mut ends) = command.hear();
    assert_eq!(said, ExecSaid::Runs);
    let mut terminal = File::from(ends.pop().unwrap());
    assert!(ends.is_empty());
    tcsetwinsize(&terminal, Winsize { ws_row: 33, ws_col: 77, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    terminal.write_all(b"typed\n").unwrap();
    let mut said = Vec::new();
    let mut piece = [0; 256];
    // It fails to be read once nobody has it any more.
    while let Ok(len @ 1..) = terminal.read(&mut piece) {
        said.extend_from_slice(&piece[..len]);
    }
    let said = String::from_utf8(said).unwrap().replace('\r', "");
    assert_eq!(said, "typed\n/dev/pts/0\n33 77\nvt100\ntyped\n");
    assert_eq!(command.hear().0, ExecSaid::Exited { status: Some(0), signal: None });
}

fn says_why_not() {
    let world = world();
    let (error, code) = begin(&world, &exec("app", &["no-such-program"])).failure();
    assert_eq!(code, "NGY0332", "{error}");
    let (_, code) = begin(&world, &exec("nobodys", &["true"])).failure();
    assert_eq!(code, "NGY0301");
    let (error, _) = begin(&world, &exec("app", &[])).failure();
    assert!(error.contains("a command has 1 to"), "{error}");
    assert_eq!(shell(&world, "app", "echo still"), "still\n");
}

impl World {
    /// Sends a frame with a descriptor.
    fn pass(&self, frame: &[u8], descriptor: &OwnedFd) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [descriptor.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        self.with_feed(|feed| {
            let sent = sendmsg(feed, &[IoSlice::new(frame)], &mut control, SendFlags::NOSIGNAL).unwrap();
            assert_eq!(sent, frame.len());
        });
    }
}

fn enters_what_is_starting() {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", SERVER);
    world.site("app", "alice", app("never", json!({})));
    let world = world.start();
    let begun = begin(&world, &exec("app", &["sh", "-c", "cat /proc/*/cmdline | tr '\\0' ' '; echo; cat"]));
    let [input, mut output, _errors] = begun.streams();
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(b"\n") && output.read(&mut byte).unwrap() == 1 {
        seen.push(byte[0]);
    }
    let seen = String::from_utf8_lossy(&seen).into_owned();
    assert!(seen.contains("server.py never"), "the application that does not listen: {seen}");
    assert_eq!(show(&world, "app")["state"], "starting");
    // Another one need not wake what is coming already.
    let (text, end) = output_without_wake(&world);
    assert_eq!((text.as_str(), end), ("too\n", ExecSaid::Exited { status: Some(0), signal: None }));
    drop(input);
    assert_eq!(begun.hear().0, ExecSaid::Exited { status: Some(0), signal: None });
}

fn output_without_wake(world: &World) -> (String, ExecSaid) {
    output(world, &ExecCommand { wake: false, ..exec("app", &["echo", "too"]) })
}

fn is_told_of_failure() {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", "raise SystemExit('no settings')\n");
    world.site("app", "alice", app("", json!({})));
    let world = world.start();
    let (error, _) = begin(&world, &exec("app", &["true"])).failure();
    assert!(
        error.contains("ended before it could answer") && error.contains("nothing of it runs now"),
        "{error}"
    );
    let (error, code) = begin(&world, &ExecCommand { wake: false, ..exec("app", &["true"]) }).failure();
    assert!(error.contains("nothing of the application of 'app' runs: it failed 1 times"), "{error}");
    assert_eq!(code, "NGY0323");
}
