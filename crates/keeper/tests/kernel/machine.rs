//! Applications with a kernel of their own: real QEMU, and Debian's kernel for virtual machines.
//!
//! Not here: the parts of a machine by themselves (`crates/machine`).

use std::ffi::OsString;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Duration;

use fuser::{Config, MountOption, SessionACL};
use nagaya_machine::share::SharedFiles;
use nagaya_records::instance::{ExecSaid, InstanceCommand, Tier};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::exec::{begin, exec, output};
use crate::outbound::{told, told_by};
use crate::python::application;
use crate::rest::{NEVER, get, pids, show, until_idle};
use crate::world::{ALICE, BOB, World, criu, read_socket, set_mode, site_name, until_so};
use crate::{FoundFact, bases, logs};

/// Time for all of a test: an emulated kernel starts slowly on a busy machine.
const MACHINE_MAX: Duration = Duration::from_secs(300);

pub const FOUND: &[FoundFact] = &[
    ("a guest's kernel sees the files of its sandbox as they are, and no others", files_are_the_same),
    ("an application runs on a kernel of its own, as its tenant, on its own files", runs_on_its_own_kernel),
    ("machines of one template share its memory, and each is one of its own", machines_share_a_template),
    ("a machine rests in an image and wakes with the right time and new randomness", wakes_from_its_image),
    ("a machine that saves itself wakes from its own state, with its device", wakes_from_its_own_state),
    ("a command of an operator runs in the guest, with streams and a terminal", commands_run_in_the_guest),
    ("a machine runs on an image of a layout, and sees nothing of the node's", runs_on_a_base),
    ("a machine that cannot start says why", says_why_it_cannot_start),
    ("a template that was changed is made anew", changed_templates_are_made_anew),
    ("memory that a guest has freed goes back to the node within seconds", memory_is_given_back),
    ("fifty machines that wake at once from one template all answer", fifty_wake_at_once),
    (
        "QEMU that is killed in a request ends that alone, and the next gets a new one",
        killed_machines_begin_anew,
    ),
    ("a full disk makes no template, and says so; with room it is made", full_disks_make_no_template),
];

/// Does in the guest what it is told to.
const PROGRAM: &str = r#"
import os, platform, subprocess
from urllib.parse import unquote
def act(words):
    if words[0] == 'release':
        return platform.release()
    if words[0] == 'run':
        done = subprocess.run(['sh', '-c', unquote(words[1])], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.stdout.decode()
"#;

/// Where kernels for machines are.
fn kernels() -> Result<PathBuf, String> {
    if !Path::new("/usr/bin/qemu-system-x86_64").exists() {
        return Err("there is no qemu-system-x86_64".into());
    }
    let trees = std::env::var_os("NAGAYA_KERNELS").map(PathBuf::from).into_iter().chain([PathBuf::from("/")]);
    let has_one = |tree: &PathBuf| {
        let entries = std::fs::read_dir(tree.join("boot")).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .any(|name| name.ends_with("-cloud-amd64"))
    };
    let tree = trees.into_iter().find(has_one).ok_or("there is no kernel for virtual machines")?;
    Ok(of_root(tree))
}

/// Returns the tree, or a copy of root's of one that was unpacked for another user.
fn of_root(tree: PathBuf) -> PathBuf {
    static COPY: OnceLock<tempfile::TempDir> = OnceLock::new();
    if tree.ancestors().all(|path| fs::metadata(path).is_ok_and(|file| file.uid() == 0)) {
        return tree;
    }
    let copy = COPY.get_or_init(|| {
        let copy = tempfile::tempdir().unwrap();
        let script =
            "mkdir -p \"$1/lib\" && cp -r \"$0/boot\" \"$1/\" && cp -r \"$0/lib/modules\" \"$1/lib/\"";
        let copied = Command::new("sh").args(["-c", script]).arg(&tree).arg(copy.path()).status();
        assert!(copied.unwrap().success());
        copy
    });
    copy.path().to_owned()
}

fn unstarted(kernels: &Path) -> World {
    World::new().with(|options| options.instances.kernels = kernels.to_owned())
}

fn record(more: Value) -> Value {
    let mut record = json!({"kind": "app", "command": ["python3", "program.py"], "directory": "www", "start_seconds": 300,
        "idle": NEVER(), "machine": {"kernel": "node", "memory": "128M"}});
    record.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    record
}

fn world(kernels: &Path, more: Value) -> World {
    let mut world = unstarted(kernels);
    world.script("program.py", &application(PROGRAM));
    world.site("app", "alice", record(more));
    world.start()
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

fn runs_on_its_own_kernel() -> Result<(), String> {
    let kernels = kernels()?;
    let world = world(&kernels, json!({}));
    let own = rustix::system::uname().release().to_string_lossy().into_owned();
    world.run_within(MACHINE_MAX, async |keeper| {
        let release = told(&keeper, "/release").await;
        assert!(release.ends_with("-cloud-amd64") && release != own, "{release} on {own}");
        let run = async |command: &str| told(&keeper, &format!("/run/{}", encoded(command))).await;
        assert_eq!(
            run("id -u; id -g; id -G; cat /proc/self/status | grep CapEff")
                .await
                .split_whitespace()
                .collect::<Vec<_>>(),
            [&ALICE.to_string(), &ALICE.to_string(), &ALICE.to_string(), "CapEff:", "0000000000000000"]
        );
        // QEMU and its tender are in its sandbox, as any program of its tenant.
        let processes = pids(&world, "app");
        assert!(processes.len() >= 3, "{processes:?}");
        for pid in &processes[1..] {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let value = |key: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(key));
                line.unwrap().split_whitespace().next().unwrap().to_owned()
            };
            assert_eq!(value("Uid:"), ALICE.to_string(), "{status}");
            assert_eq!(value("CapEff:"), "0000000000000000");
            assert_eq!((value("NoNewPrivs:"), value("Seccomp:")), ("1".into(), "2".into()));
            // It has no interface of the node's, and no other of its own.
            let interfaces = fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap();
            let names: Vec<&str> =
                interfaces.lines().filter_map(|line| Some(line.split_once(':')?.0.trim())).collect();
            assert_eq!(names, ["lo"]);
        }
        // Its directory is that of the node.
        run("echo from the guest > written; cat program.py > /dev/null").await;
        let written = world.home("alice").join("www/written");
        assert_eq!(std::fs::read_to_string(&written).unwrap(), "from the guest\n");
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(&written).unwrap()), ALICE);
        // The clock is the node's.
        let guest: u64 = run("date +%s").await.trim().parse().unwrap();
        let node = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        assert!(guest.abs_diff(node) < 60, "{guest} and {node}");
        // What listens on the node is not reached: at its addresses of QEMU's network, nor elsewhere.
        let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        for address in ["10.0.2.2", "127.0.0.1", "10.0.2.3", "192.0.2.1"] {
            let script = format!(
                "python3 -c 'import socket; socket.create_connection((\"{address}\", {port}), 3)' 2>&1 | tail -1"
            );
            let said = run(&script).await;
            assert!(said.contains("Error") || said.contains("timed out"), "{address}: {said}");
        }
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        // It rests and wakes as any.
        for tier in [Tier::Quiet, Tier::Frozen] {
            rest(&world, "app", tier).await;
            assert_eq!(told(&keeper, "/release").await, release, "{}", show(&world, "app"));
        }
    });
    Ok(())
}

async fn rest(world: &World, site: &str, tier: Tier) -> Value {
    until_idle(world, site).await;
    let row = world.act(site, InstanceCommand::Rest { to: Some(tier) });
    assert_eq!(row["tier"], tier.as_str(), "{row}");
    row
}

/// Private memory of the machine of this site in its template's file, and all of that, KiB.
fn template_memory(world: &World, site: &str) -> (u64, u64) {
    let mut sums = (0, 0);
    for pid in pids(world, site) {
        let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
        let mut is_template = false;
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let number = second.parse().unwrap_or(0);
            match first {
                "Size:" if is_template => sums.1 += number,
                "Private_Dirty:" if is_template => sums.0 += number,
                word if word.contains('-') => is_template = line.ends_with("/run/nagaya/machine/memory"),
                _ => {}
            }
        }
    }
    sums
}

fn machines_share_a_template() -> Result<(), String> {
    let kernels = kernels()?;
    let mut world = unstarted(&kernels);
    for (site, tenant) in [("app", "alice"), ("second", "alice"), ("bobs", "bob")] {
        world.script_of(tenant, "program.py", &application(PROGRAM));
        world.site(site, tenant, record(json!({})));
    }
    let world = world.start();
    world.run_within(MACHINE_MAX, async |keeper| {
        let run = async |site: &str, command: &str| {
            told_by(&keeper, site, &format!("/run/{}", encoded(command))).await.trim().to_owned()
        };
        for (site, uid) in [("app", ALICE), ("second", ALICE), ("bobs", BOB)] {
            assert_eq!(run(site, "id -u").await, uid.to_string());
            let (private, all) = template_memory(&world, site);
            assert_eq!(all, 128 << 10, "{site}");
            assert!(private < all * 3 / 4, "{site}: {private} of {all} KiB are its own");
        }
        let templates = fs::read_dir(boot_directory(&world)).unwrap().flatten();
        let names: Vec<String> = templates.map(|entry| entry.file_name().into_string().unwrap()).collect();
        assert_eq!(names.iter().filter(|name| name.starts_with("template-")).count(), 1, "{names:?}");
        let template = names.iter().find(|name| name.starts_with("template-")).unwrap();
        for file in ["memory", "state"] {
            let facts = fs::metadata(boot_directory(&world).join(template).join(file)).unwrap();
            assert_eq!((facts.uid(), facts.mode() & 0o777), (0, 0o444), "{file}");
        }
        // Nothing random is the same.
        for command in
            ["cat /proc/sys/kernel/random/uuid", "od -An -N16 -tx1 /dev/urandom", "md5sum /run/nagaya.wake"]
        {
            let [one, two, third] =
                [run("app", command).await, run("second", command).await, run("bobs", command).await];
            assert!(one != two && two != third && one != third, "{command}: {one}, {two}, {third}");
        }
        // It was chosen by a kernel that started, or did not.
        let choice = fs::read_to_string(boot_directory(&world).join("accelerator")).unwrap();
        assert!(choice == "kvm " || choice.starts_with("tcg ") && choice.len() > 8, "{choice}");
    });
    Ok(())
}

fn boot_directory(world: &World) -> PathBuf {
    let machines = fs::read_dir(world.dir.path().join("state/machines")).unwrap().flatten();
    let mut boots = machines.map(|entry| entry.path()).filter(|path| path.is_dir());
    boots.next().unwrap()
}

fn wakes_from_its_image() -> Result<(), String> {
    wakes_from_image(false)
}

/// As with KVM: QEMU's own state is in the image, and a descriptor of `/dev/kvm`.
fn wakes_from_its_own_state() -> Result<(), String> {
    wakes_from_image(true)
}

fn wakes_from_image(saves_state: bool) -> Result<(), String> {
    let kernels = kernels()?;
    if criu().is_none() {
        return Err("there is no CRIU that works".into());
    }
    let mut world = unstarted(&kernels).with(|options| options.instances.machines_save_states = saves_state);
    world.script("program.py", &application(PROGRAM));
    world.site("app", "alice", record(json!({"image_when": "rest"})));
    world.site("began", "alice", record(json!({"image_when": "start"})));
    let world = world.start();
    world.run_within(MACHINE_MAX, async |keeper| {
        // One whose image was taken as it began goes on.
        let release = told_by(&keeper, "began", "/release").await;
        rest(&world, "began", Tier::Image).await;
        assert_eq!(told_by(&keeper, "began", "/release").await, release);
        assert_eq!(show(&world, "began")["last_wake"]["from"], "image");
        let run = async |command: &str| {
            told(&keeper, &format!("/run/{}", encoded(command))).await.trim().to_owned()
        };
        let seed = run("md5sum /run/nagaya.wake").await;
        run("echo kept > kept").await;
        let sleeper = run("sleep 1000 > /dev/null 2>&1 & echo $!").await;
        let uptime: f64 = run("cut -d' ' -f1 /proc/uptime").await.parse().unwrap();
        rest(&world, "app", Tier::Image).await;
        assert_eq!(pids(&world, "app"), Vec::<i32>::new());
        let guest: u64 = run("date +%s").await.parse().unwrap();
        let node = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        assert!(guest.abs_diff(node) <= 2, "{guest} and {node}");
        assert_ne!(run("md5sum /run/nagaya.wake").await, seed);
        assert_eq!(run("cat kept").await, "kept");
        assert_eq!(run(&format!("tr '\\0' ' ' < /proc/{sleeper}/cmdline")).await, "sleep 1000");
        assert!(run("cut -d' ' -f1 /proc/uptime").await.parse::<f64>().unwrap() > uptime);
        assert_eq!(show(&world, "app")["last_wake"]["from"], "image");
        // And once more, from an image of the machine that woke.
        rest(&world, "app", Tier::Image).await;
        assert_eq!(run(&format!("tr '\\0' ' ' < /proc/{sleeper}/cmdline")).await, "sleep 1000");
    });
    Ok(())
}

fn commands_run_in_the_guest() -> Result<(), String> {
    let kernels = kernels()?;
    let world = world(&kernels, json!({"env": {"COLOUR": "green"}}));
    world.run_within(MACHINE_MAX, async |keeper| {
        let release = told(&keeper, "/release").await;
        let (text, end) =
            output(&world, &exec("app", &["sh", "-c", "uname -r; id -u; pwd; echo $COLOUR; exit 7"]));
        assert_eq!(end, ExecSaid::Exited { status: Some(7), signal: None }, "{text}");
        let home = world.home("alice").join("www").display().to_string();
        assert_eq!(text.lines().collect::<Vec<_>>(), [&release, &ALICE.to_string(), &home, "green"]);
        let command = begin(&world, &exec("app", &["sh", "-c", "tr a-z A-Z; echo more >&2"]));
        let [mut input, mut output_end, mut errors] = command.streams();
        let long = "shout\n".repeat(20_000);
        input.write_all(long.as_bytes()).unwrap();
        drop(input);
        let (mut said, mut complained) = (String::new(), String::new());
        output_end.read_to_string(&mut said).unwrap();
        errors.read_to_string(&mut complained).unwrap();
        assert!(said == long.to_uppercase() && complained == "more\n", "{} bytes, {complained}", said.len());
        assert_eq!(command.hear().0, ExecSaid::Exited { status: Some(0), signal: None });
        // With a terminal; and nothing of it stays behind.
        let mut order = exec("app", &["sh", "-c", "tty; stty size; sleep 1000 & exit 3"]);
        order.terminal = Some("xterm".into());
        let command = begin(&world, &order);
        let (said, fds) = command.hear();
        assert_eq!((said, fds.len()), (ExecSaid::Runs, 1));
        let mut terminal = fs::File::from(fds.into_iter().next().unwrap());
        let mut text = Vec::new();
        let mut bytes = [0; 1024];
        while let Ok(len @ 1..) = terminal.read(&mut bytes) {
            text.extend_from_slice(&bytes[..len]);
        }
        assert_eq!(command.hear().0, ExecSaid::Exited { status: Some(3), signal: None });
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(text.starts_with("/dev/pts/"), "{text}");
        let (left, _) =
            output(&world, &exec("app", &["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]));
        assert!(left.contains("program.py") && !left.contains("sleep"), "{left}");
    });
    Ok(())
}

fn runs_on_a_base() -> Result<(), String> {
    let kernels = kernels()?;
    let mut world = World::new().with(|options| options.instances.kernels = kernels.clone());
    let base = world.dir.path().join("layout");
    bases::layout(&base, "hello\n")?;
    world.script_of("alice", "server.pl", bases::SERVER);
    let mut record = bases::app(&base);
    record["machine"] = json!({"kernel": "node", "memory": "128M"});
    world.site("one", "alice", record);
    let world = world.start();
    world.run_within(MACHINE_MAX, async |keeper| {
        let used = keeper.use_instance(&site_name("one"), None).await.unwrap();
        let said = read_socket(used.socket).await;
        let parts: Vec<&str> = said.split('|').collect();
        assert_eq!(parts[..3], ["hello", "none", "reads"], "{said}");
        assert_eq!((parts[4], parts[5]), ("of the image", &*ALICE.to_string()), "{said}");
        assert!(!parts[3].split(' ').any(|name| ["var", "opt", "root", "bin"].contains(&name)), "{said}");
        let (text, end) = output(&world, &exec("one", &[bases::PERL, "-e", "print `x` // 'no shell'"]));
        assert_eq!((text.as_str(), end), ("no shell", ExecSaid::Exited { status: Some(0), signal: None }));
    });
    Ok(())
}

fn says_why_it_cannot_start() -> Result<(), String> {
    let kernels = kernels()?;
    let mut world = unstarted(&kernels);
    world.script("program.py", &application(PROGRAM));
    let image = world.home("alice").join("www/vmlinuz");
    fs::write(&image, "#!/bin/sh\n").unwrap();
    set_mode(&image, 0o644);
    // It begins as a kernel, and is none.
    let broken = world.home("alice").join("www/broken");
    let mut bytes = vec![0; 64 << 10];
    bytes[0x1fe..0x200].copy_from_slice(b"\x55\xaa");
    bytes[0x202..0x206].copy_from_slice(b"HdrS");
    fs::write(&broken, bytes).unwrap();
    set_mode(&broken, 0o644);
    let file = |path: &Path| json!({"kernel": path, "memory": "128M"});
    world.site("missing", "alice", record(json!({"machine": file(Path::new("/srv/no/vmlinuz"))})));
    world.site("foreign", "alice", record(json!({"machine": file(&image)})));
    world.site("broken", "alice", record(json!({"machine": file(&broken), "start_seconds": 3})));
    world.site_with("tight", "alice", record(json!({})), json!({"limits": {"memory": "150M"}}));
    world.site("ends", "alice", record(json!({"command": ["sh", "-c", "echo bye; exit 9"]})));
    world.site(
        "hungry",
        "alice",
        record(json!({"command": ["python3", "-c", "x = []\nwhile True: x.append(bytearray(1 << 20))"]})),
    );
    let world = world.start();
    world.run_within(MACHINE_MAX, async |keeper| {
        for (site, expected) in [
            ("missing", "cannot open the kernel"),
            ("foreign", "is no Linux kernel for x86-64"),
            ("broken", ""),
            ("tight", "the memory limit of its cell is 150 MiB, and a machine with 128 MiB needs 192"),
            ("ends", "9"),
            ("hungry", ""),
        ] {
            let error = keeper.use_instance(&site_name(site), None).await.unwrap_err().to_string();
            assert!(error.contains(expected), "{site}: {error}");
        }
    });
    let log = |site: &str| logs::lines(&world, site).join("\n");
    assert!(log("hungry").contains("give it more (--vm-memory)"), "{}", log("hungry"));
    assert!(log("ends").contains("bye"), "{}", log("ends"));
    Ok(())
}

/// Private memory of its processes, KiB.
fn private_memory(world: &World, site: &str) -> u64 {
    let of = |pid: i32| {
        let sums = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let line = sums.lines().find_map(|line| line.strip_prefix("Private_Dirty:")).unwrap_or("0 kB");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    pids(world, site).into_iter().map(of).sum()
}

fn memory_is_given_back() -> Result<(), String> {
    let kernels = kernels()?;
    let machine = json!({"kernel": "node", "memory": "1280M"});
    let world = world(&kernels, json!({"machine": machine}));
    world.run_within(MACHINE_MAX, async |keeper| {
        told(&keeper, "/release").await;
        let before = private_memory(&world, "app");
        let script = "python3 -c 'x = bytearray(1 << 30); x[::4096] = b\"x\" * (1 << 18); print(len(x))'";
        assert_eq!(told(&keeper, &format!("/run/{}", encoded(script))).await.trim(), (1 << 30).to_string());
        // A tenth of it.
        until_so(|| private_memory(&world, "app") < before + (1 << 20) / 10).await;
    });
    Ok(())
}

fn fifty_wake_at_once() -> Result<(), String> {
    let kernels = kernels()?;
    let mut world = unstarted(&kernels).with(|options| options.instances.image_bytes_max = 0);
    // It starts fast, also where its code is translated.
    world.script("server.pl", bases::SERVER);
    let names: Vec<String> = (0..50).map(|number| format!("site{number}")).collect();
    let app = json!({"command": [bases::PERL, "server.pl"], "machine": {"kernel": "node", "memory": "96M"}});
    for name in &names {
        world.site(name, "alice", record(app.clone()));
    }
    let world = world.start();
    // Each starts Perl on a translated processor.
    world.run_within(MACHINE_MAX, async |keeper| {
        let ask = |name: String| {
            let keeper = Rc::clone(&keeper);
            let ask = async move {
                let used = keeper.use_instance(&site_name(&name), None).await.unwrap();
                read_socket(used.socket).await
            };
            tokio::task::spawn_local(ask)
        };
        let all: Vec<_> = names.into_iter().map(ask).collect();
        for one in all {
            let said = one.await.unwrap();
            assert!(said.ends_with(&format!("|{ALICE}")), "{said}");
        }
    });
    Ok(())
}

fn killed_machines_begin_anew() -> Result<(), String> {
    let kernels = kernels()?;
    let world = world(&kernels, json!({}));
    world.run_within(MACHINE_MAX, async |keeper| {
        let release = told(&keeper, "/release").await;
        let qemu = *pids(&world, "app").last().unwrap();
        let name = fs::read_to_string(format!("/proc/{qemu}/comm")).unwrap();
        assert!(name.starts_with("qemu-system"), "{name}");
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        let mut stream = tokio::net::UnixStream::from_std(used.socket.into()).unwrap();
        stream.write_all(b"GET /run/sleep%201000 HTTP/1.0\r\n\r\n").await.unwrap();
        // A zombie has closed its sockets.
        let running = |pid: i32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.is_ok_and(|stat| !stat.rsplit(')').next().unwrap().starts_with(" Z"))
        };
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(qemu), nix::sys::signal::Signal::SIGKILL).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.is_empty(), "{}", String::from_utf8_lossy(&answer));
        until_so(|| !running(qemu)).await;
        assert_eq!(told(&keeper, "/release").await, release);
        assert_ne!(*pids(&world, "app").last().unwrap(), qemu);
    });
    Ok(())
}

fn full_disks_make_no_template() -> Result<(), String> {
    let kernels = kernels()?;
    let mut world = unstarted(&kernels);
    world.script("program.py", &application(PROGRAM));
    world.site("app", "alice", record(json!({})));
    // A disk of its own, with room for a kernel's modules and no machine's memory.
    let machines = world.dir.path().join("state/machines").display().to_string();
    let size = |mib: u32| format!("mount -t tmpfs -o size={mib}m,mode=700 none {machines}");
    let world = world.after(&format!("mkdir -p {machines} && {}", size(24))).start();
    world.run_within(MACHINE_MAX, async |keeper| {
        let error = keeper.use_instance(&site_name("app"), None).await.unwrap_err().to_string();
        assert!(error.contains("cannot make a template in") && error.contains("No space left"), "{error}");
        let enter = format!(
            "nsenter -t {} -m sh -c '{}'",
            world.keeper_pid(),
            size(512).replace("mount -t tmpfs -o ", "mount -o remount,")
        );
        assert!(Command::new("sh").args(["-c", &enter]).status().unwrap().success());
        // After a pause, as after any failure.
        let until = std::time::Instant::now() + Duration::from_secs(40);
        let used = loop {
            match keeper.use_instance(&site_name("app"), None).await {
                Ok(used) => break used,
                Err(error) => assert!(std::time::Instant::now() < until, "{error}"),
            }
        };
        assert!(get(&used, "/release").await.ends_with("-cloud-amd64"));
    });
    Ok(())
}

fn changed_templates_are_made_anew() -> Result<(), String> {
    let kernels = kernels()?;
    let world = world(&kernels, json!({}));
    let state = || {
        let entries = fs::read_dir(boot_directory(&world)).unwrap().flatten().map(|entry| entry.path());
        let mut templates =
            entries.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("template-"));
        templates.next().unwrap().join("state")
    };
    let release = world.run_within(MACHINE_MAX, async |keeper| told(&keeper, "/release").await);
    let made = fs::read(state()).unwrap();
    let mut changed = made.clone();
    changed[made.len() / 2] ^= 1;
    fs::remove_file(state()).unwrap();
    fs::write(state(), &changed).unwrap();
    world.restart();
    world.run_within(MACHINE_MAX, async |keeper| {
        assert_eq!(told(&keeper, "/release").await, release, "{}", show(&world, "app"));
    });
    assert_ne!(fs::read(state()).unwrap(), changed);
    Ok(())
}

/// The kernel of this machine in place of a guest's.
fn files_are_the_same() -> Result<(), String> {
    if !Path::new("/dev/fuse").exists() {
        return Err("there is no FUSE here".into());
    }
    let dir = tempfile::tempdir().unwrap();
    let (node, guest) = (dir.path().join("node"), dir.path().join("guest"));
    for path in ["node", "node/srv", "node/proc", "node/run", "guest"] {
        fs::create_dir(dir.path().join(path)).unwrap();
    }
    fs::write(node.join("proc/secret"), "secret").unwrap();
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.mount_options = vec![MountOption::FSName("nagaya".into()), MountOption::DefaultPermissions];
    let mounted = fuser::spawn_mount(SharedFiles::open(&node).unwrap(), &guest, &config)
        .map_err(|error| format!("FUSE cannot be mounted: {error}"))?;
    let (inside, outside) = (guest.join("srv"), node.join("srv"));
    contents_are_the_same(&inside, &outside);
    names_are_the_same(&inside, &outside);
    // Its own directories are empty, and stay so.
    assert_eq!(listed(&guest.join("proc")), Vec::<OsString>::new());
    assert!(fs::read(guest.join("proc/secret")).is_err() && fs::write(guest.join("run/x"), "x").is_err());
    drop(mounted);
    Ok(())
}

fn contents_are_the_same(inside: &Path, outside: &Path) {
    fs::write(outside.join("big"), vec![7; 3 << 20]).unwrap();
    assert_eq!(fs::read(inside.join("big")).unwrap(), vec![7; 3 << 20]);
    fs::write(inside.join("new"), vec![9; 1 << 20]).unwrap();
    assert_eq!(fs::read(outside.join("new")).unwrap(), vec![9; 1 << 20]);
    fs::write(outside.join("late"), "from the node").unwrap();
    assert_eq!(fs::read_to_string(inside.join("late")).unwrap(), "from the node");
    // Appended, cut, with rights.
    let mut file = fs::OpenOptions::new().append(true).open(inside.join("late")).unwrap();
    file.write_all(b" and back").unwrap();
    assert_eq!(fs::read_to_string(outside.join("late")).unwrap(), "from the node and back");
    fs::OpenOptions::new().write(true).open(inside.join("late")).unwrap().set_len(4).unwrap();
    assert_eq!(fs::read_to_string(outside.join("late")).unwrap(), "from");
    fs::set_permissions(inside.join("late"), fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(outside.join("late")).unwrap().mode() & 0o777, 0o640);
    // A file without a name.
    let open = fs::OpenOptions::new().create_new(true).read(true).write(true).open(inside.join("gone"));
    let nameless = open.unwrap();
    fs::remove_file(inside.join("gone")).unwrap();
    nameless.write_all_at(b"still here", 0).unwrap();
    assert_eq!(nameless.metadata().unwrap().len(), 10);
}

fn names_are_the_same(inside: &Path, outside: &Path) {
    symlink("/etc/passwd", outside.join("link")).unwrap();
    assert_eq!(fs::read_link(inside.join("link")).unwrap(), Path::new("/etc/passwd"));
    fs::create_dir(inside.join("a")).unwrap();
    fs::write(inside.join("a/x"), "x").unwrap();
    fs::rename(inside.join("a"), inside.join("b")).unwrap();
    assert_eq!(fs::read_to_string(inside.join("b/x")).unwrap(), "x");
    fs::hard_link(inside.join("b/x"), inside.join("y")).unwrap();
    assert_eq!(fs::metadata(inside.join("y")).unwrap().nlink(), 2);
    assert_eq!(listed(inside), listed(outside));
    fs::remove_file(inside.join("b/x")).unwrap();
    fs::remove_dir(inside.join("b")).unwrap();
    assert!(!outside.join("b").exists());
}

fn listed(path: &Path) -> Vec<OsString> {
    let mut names: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}
