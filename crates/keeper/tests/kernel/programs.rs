//! CGI programs: whose rights they have, what they get, and that they end as a whole.
//!
//! Not here: which names and variables are accepted (beside `cgi`).

use nagaya_keeper::CellMechanism;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::cell::Confinement;
use serde_json::json;

use crate::Fact;
use crate::world::{
    ALICE, World, is_alive, pipe, read_all, read_line, refusal, run_cgi, set_mode, site_name, wait_dead,
};

pub const ANYONE: &[Fact] = &[
    ("a program gets its input, variables and directory, and its exit is told", input_and_exit),
    ("a program starts from a clean slate", clean_slate),
    ("ending a running program kills it", ended_while_running),
    ("standard error is logged line by line and within bounds", stderr_is_bounded),
    ("only programs of the site run", only_programs_run),
];

pub const ROOT: &[Fact] = &[
    ("a program runs under its tenant's uid without other groups", runs_as_tenant),
    ("a program cannot read a private file of another tenant", cannot_read_others),
    ("a detached daemon ends with its request on cgroup v2", || daemon_ends(CellMechanism::CgroupV2)),
    ("a detached daemon ends with its request on cgroup v1", || daemon_ends(CellMechanism::CgroupV1)),
    ("a daemon left by a program that exits ends with it", daemon_ends_with_exit),
    ("a fork bomb ends on cgroup v1", || fork_bomb_ends(CellMechanism::CgroupV1)),
    ("a fork bomb ends on cgroup v2", || fork_bomb_ends(CellMechanism::CgroupV2)),
    ("a tenant has so many programs at once and no more", limit_per_tenant),
    ("a tenant with root's uid runs nothing", root_runs_nothing),
    ("a tenant with ids of the system or of nagaya itself runs nothing", system_ids_run_nothing),
];

fn input_and_exit() {
    let world = World::new()
        .with_cgi(r#"pwd; cat; echo "$QUERY_STRING|$SCRIPT_FILENAME|$PATH_TRANSLATED"; exit 3"#)
        .start();
    world.run(async |keeper| {
        let env = vec![("QUERY_STRING".into(), "a=b".into()), ("PATH_INFO".into(), "/p".into())];
        let process =
            keeper.spawn_cgi(&site_name("cgi"), "x.cgi", env, &Confinement::default()).await.unwrap();
        rustix::io::write(&process.stdin, b"the body\n").unwrap();
        drop(process.stdin);
        let www = world.home("alice").join("www");
        let www = www.display();
        let said = read_all(process.stdout).await;
        assert_eq!(said, format!("{www}\nthe body\na=b|{www}/x.cgi|{www}/p\n"));
        let (exit, _) = process.guard.ended().await.unwrap();
        assert_eq!((exit.status, exit.signal), (Some(3), None));
        assert!(exit.cpu_us > 0, "{exit:?}");
    });
}

fn clean_slate() {
    let script = "umask; ulimit -c; ulimit -n; ls /proc/self/fd; env | sort; grep -E 'NoNewPrivs|SigIgn|SigBlk' /proc/self/status; cut -d' ' -f5,7 /proc/$$/stat; echo $$";
    let world = World::new().with_cgi(script).start();
    world.run(async |keeper| {
        let process = run_cgi(&keeper).await;
        let said = read_all(process.stdout).await;
        let lines: Vec<&str> = said.lines().collect();
        // `ls` itself opens the directory as the fourth descriptor.
        assert_eq!(lines[..7], ["0022", "0", "1024", "0", "1", "2", "3"], "{said}");
        let names: Vec<&str> = lines[7..].iter().filter_map(|l| Some(l.split_once('=')?.0)).collect();
        assert_eq!(names, ["DOCUMENT_ROOT", "PATH", "PWD", "SCRIPT_FILENAME"], "{said}");
        for want in ["NoNewPrivs:\t1", "SigIgn:\t0000000000000000", "SigBlk:\t0000000000000000"] {
            assert!(lines.contains(&want), "{want} in {said}");
        }
        let [.., group_and_terminal, pid] = lines[..] else { panic!("{said}") };
        assert_eq!(group_and_terminal, format!("{pid} 0"), "it leads a process group and has no terminal");
    });
}

fn ended_while_running() {
    let world = World::new().with_cgi("echo $$; exec sleep 1000").start();
    world.run(async |keeper| {
        let process = run_cgi(&keeper).await;
        let pid = read_line(&mut pipe(process.stdout)).await.parse().unwrap();
        assert!(is_alive(pid));
        let (exit, _) = process.guard.end().await.unwrap();
        assert_eq!((exit.status, exit.signal), (None, Some(9)));
        assert!(!is_alive(pid));
    });
}

fn stderr_is_bounded() {
    let script = "echo first >&2; i=0; while [ $i -lt 400 ]; do echo 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxx' >&2; i=$((i+1)); done; printf 'done'";
    let world = World::new().with(|options| options.stderr_bytes_max = 3000).with_cgi(script).start();
    world.run(async |keeper| {
        let process = run_cgi(&keeper).await;
        assert_eq!(read_all(process.stdout).await, "done", "it never waits for its log");
        process.guard.ended().await.unwrap();
    });
    let log = world.log();
    assert_eq!(log.matches("program=\"cgi cgi\"").count(), 102, "{log}");
    assert!(log.contains("first") && log.contains("further lines are suppressed"), "{log}");
    assert!(log.contains("lines of it that were suppressed: 301"), "{log}");
}

fn only_programs_run() {
    let world = World::new().with_cgi("echo no");
    world.script("no-interpreter.cgi", "echo no\n");
    world.script("lost.cgi", "#!/does/not/exist\n");
    set_mode(&world.script("plain.cgi", "#!/bin/sh\n"), 0o644);
    let www = world.home("alice").join("www");
    std::fs::create_dir(www.join("dir.cgi")).unwrap();
    std::os::unix::fs::symlink("/bin/true", www.join("out.cgi")).unwrap();
    // Out of the root and in again is the tenant's own file as any other.
    std::os::unix::fs::symlink("../www/x.cgi", www.join("back.cgi")).unwrap();
    let world = world.start();
    world.run(async |keeper| {
        let cgi = site_name("cgi");
        for (script, want) in [
            ("none.cgi", (FailureKind::NotFound, 305)),
            ("x.cgi/more.cgi", (FailureKind::NotFound, 305)),
            ("plain.cgi", (FailureKind::Forbidden, 305)),
            ("dir.cgi", (FailureKind::Forbidden, 305)),
            ("out.cgi", (FailureKind::Forbidden, 305)),
            ("../www/x.cgi", (FailureKind::Invalid, 304)),
            ("/bin/true", (FailureKind::Invalid, 304)),
            ("no-interpreter.cgi", (FailureKind::Broken, 308)),
            ("lost.cgi", (FailureKind::Broken, 308)),
        ] {
            assert_eq!(
                refusal(keeper.spawn_cgi(&cgi, script, Vec::new(), &Confinement::default()).await),
                want,
                "{script}"
            );
        }
        let env = vec![("LD_PRELOAD".into(), "x".into())];
        assert_eq!(
            refusal(keeper.spawn_cgi(&cgi, "x.cgi", env, &Confinement::default()).await),
            (FailureKind::Invalid, 306)
        );
        let unknown = site_name("nowhere");
        assert_eq!(
            refusal(keeper.spawn_cgi(&unknown, "x.cgi", Vec::new(), &Confinement::default()).await),
            (FailureKind::NotFound, 301)
        );
        // After all that, nothing runs and good ones still do.
        for script in ["x.cgi", "back.cgi"] {
            let process = keeper.spawn_cgi(&cgi, script, Vec::new(), &Confinement::default()).await.unwrap();
            assert_eq!(read_all(process.stdout).await, "no\n", "{script}");
        }
    });
}

fn runs_as_tenant() {
    let world = World::new().with_cgi("id -u; id -g; id -G; grep Cap /proc/self/status").start();
    world.run(async |keeper| {
        let process = run_cgi(&keeper).await;
        let said = read_all(process.stdout).await;
        assert!(said.starts_with(&format!("{ALICE}\n{ALICE}\n{ALICE}\n")), "{said}");
        for set in ["CapPrm", "CapEff", "CapAmb"] {
            assert!(said.contains(&format!("{set}:\t0000000000000000")), "{said}");
        }
    });
}

fn cannot_read_others() {
    let world = World::new();
    let secret = world.home("bob").join("secret");
    std::fs::write(&secret, "bob's").unwrap();
    set_mode(&secret, 0o600);
    world.own(&secret, crate::world::BOB);
    let log = world.dir.path().join("log");
    let script =
        format!("cat {} {} 2>&1", secret.display(), world.socket().with_file_name("run/php").display());
    let world = world.with_cgi(&script).start();
    set_mode(&log, 0o600);
    world.run(async |keeper| {
        let process = run_cgi(&keeper).await;
        let said = read_all(process.stdout).await;
        // A home beneath /tmp is not even there, in a /tmp of alice's own.
        let refusals = ["Permission denied", "Is a directory", "No such file"];
        let count: usize = refusals.iter().map(|why| said.matches(why).count()).sum();
        assert_eq!(count, 2, "{said}");
        assert!(!said.contains("bob's"), "{said}");
    });
}

/// Forks, leaves its session, ignores signals, closes everything: the classic daemon.
const DAEMON: &str = r"setsid sh -c 'trap : HUP TERM INT; echo $$; exec >/dev/null 2>&1 </dev/null; while :; do sleep 1000; done' &";

fn daemon_ends(fence: CellMechanism) {
    let world = World::new().fenced(fence).with_cgi(&format!("{DAEMON}\nexec sleep 1000")).start();
    world.run(async |keeper| {
        assert_eq!(fence_of(&keeper.status().await.unwrap()), json!(fence));
        let process = run_cgi(&keeper).await;
        let pid = read_line(&mut pipe(process.stdout)).await.parse().unwrap();
        assert!(is_alive(pid));
        process.guard.end().await.unwrap();
        assert!(!is_alive(pid), "once the end is told, nothing is left");
    });
}

fn fence_of(status: &str) -> serde_json::Value {
    serde_json::from_str::<serde_json::Value>(status).unwrap()["fence"].clone()
}

fn daemon_ends_with_exit() {
    let world = World::new().with_cgi(&format!("{DAEMON}\nread wait")).start();
    world.run(async |keeper| {
        let process = run_cgi(&keeper).await;
        let pid = read_line(&mut pipe(process.stdout)).await.parse().unwrap();
        drop(process.stdin);
        let (exit, _) = process.guard.ended().await.unwrap();
        assert_eq!(exit.signal, None);
        assert!(!is_alive(pid));
    });
}

fn fork_bomb_ends(fence: CellMechanism) {
    // Forty shells that fork as fast as they can, so that there is always one being born.
    let script = "echo go; f() { while :; do ( : ) & wait $!; done; }; i=0; while [ $i -lt 40 ]; do f & i=$((i+1)); done; wait";
    let world = World::new().fenced(fence).with_cgi(script).start();
    world.run(async |keeper| {
        let process = run_cgi(&keeper).await;
        let mut out = pipe(process.stdout);
        assert_eq!(read_line(&mut out).await, "go");
        process.guard.end().await.unwrap();
        let ours = format!("/k{}-", world.keeper_pid());
        let left = std::fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
            let groups = std::fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
            let pid = entry.file_name().to_string_lossy().parse();
            groups.contains(&ours) && pid.is_ok_and(is_alive)
        });
        assert_eq!(left.count(), 0);
    });
}

fn limit_per_tenant() {
    let world =
        World::new().with(|options| options.cgi_per_tenant_max = 2).with_cgi("exec sleep 1000").start();
    world.run(async |keeper| {
        let cgi = site_name("cgi");
        let first = keeper.spawn_cgi(&cgi, "x.cgi", Vec::new(), &Confinement::default()).await.unwrap();
        let _second = keeper.spawn_cgi(&cgi, "x.cgi", Vec::new(), &Confinement::default()).await.unwrap();
        assert_eq!(
            refusal(keeper.spawn_cgi(&cgi, "x.cgi", Vec::new(), &Confinement::default()).await),
            (FailureKind::Busy, 307)
        );
        first.guard.end().await.unwrap();
        let third = keeper.spawn_cgi(&cgi, "x.cgi", Vec::new(), &Confinement::default()).await.unwrap();
        let status: serde_json::Value = serde_json::from_str(&keeper.status().await.unwrap()).unwrap();
        assert_eq!(status["processes"]["cgi"]["running"], 2, "{status}");
        drop(third);
    });
}

fn root_runs_nothing() {
    let mut world = World::new();
    let home = world.home("bob");
    world.tenant(json!({"name": "root", "uid": 0, "gid": 0, "home": home}));
    world.site("r", "root", json!({"kind": "cgi", "root": "www"}));
    let world = world.start();
    world.run(async |keeper| {
        let spawned = keeper.spawn_cgi(&site_name("r"), "x.cgi", Vec::new(), &Confinement::default()).await;
        assert_eq!(refusal(spawned), (FailureKind::Forbidden, 314));
        assert_eq!(refusal(keeper.open_root(&site_name("r")).await), (FailureKind::Forbidden, 314));
    });
}

fn system_ids_run_nothing() {
    let mut world = World::new();
    let home = world.home("bob");
    world.options.ids.edge_uid = 61_800;
    world.options.ids.own_gids = [61_900].into();
    world.options.ids.allowed_gids = [33].into();
    for (name, uid, gid) in [
        ("daemon", 1, 61_003),
        ("disk", 61_007, 6),
        ("nobody", 65_534, 65_534),
        ("edge", 61_800, 61_005),
        ("admins", 61_006, 61_900),
    ] {
        world.tenant(json!({"name": name, "uid": uid, "gid": gid, "home": home}));
        world.site(name, name, json!({"kind": "cgi", "root": "www"}));
    }
    world.tenant(json!({"name": "allowed", "uid": 61_004, "gid": 33, "home": home}));
    world.site("allowed", "allowed", json!({"kind": "cgi", "root": "www"}));
    let world = world.start();
    world.run(async |keeper| {
        for name in ["daemon", "disk", "nobody", "edge", "admins"] {
            let refused = refusal(keeper.open_root(&site_name(name)).await);
            assert_eq!(refused, (FailureKind::Forbidden, 314), "{name}");
        }
        // It has bob's home, which it may not look into: that is what is said of it.
        let refused = refusal(keeper.open_root(&site_name("allowed")).await);
        assert_ne!(refused.1, 314, "the configuration allows its group");
    });
}

/// A program that its guard's dropping, not a call, ends.
pub async fn sleeper(
    keeper: &nagaya_keeper_api::client::KeeperClient,
) -> (i32, nagaya_keeper_api::client::ProcessGuard) {
    let process = run_cgi(keeper).await;
    let pid = read_line(&mut pipe(process.stdout)).await.parse().unwrap();
    assert!(is_alive(pid));
    (pid, process.guard)
}

/// Kept here beside `sleeper`: what it leaves must be gone.
pub fn expect_gone(pid: i32) {
    wait_dead(pid);
}
