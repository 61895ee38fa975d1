//! Memory that goes out to swap while its instance rests, and comes back; and the ladder on a node that has no swap.
//!
//! Swap is the whole machine's. So it is made for one test, which no other test that asks for it runs beside, and is gone after it
//! whatever becomes of the test. Not here: the other tiers (`rest`).

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use nagaya_records::instance::{InstanceCommand, Tier, WakeStage};
use serde_json::json;
use tempfile::TempDir;

use crate::FoundFact;
use crate::rest::{NEVER, SERVER, app, get, has_swap, pids, run_of, show, until_at, until_idle};
use crate::world::{World, site_name, until_so};

pub const ROOT: &[FoundFact] = &[
    ("memory of an instance goes out to swap and comes back as it was", goes_out_and_comes_back),
    ("without swap an instance rests as deep as it can, and says why", rests_without_swap),
];

/// What the application has in memory that cannot be found anywhere else, bytes.
const BALLAST: u64 = 24 << 20;

const SWAP_LEN: usize = 64 << 20;

/// Held for reading by who wants swap to stay as it is.
static SWAP: RwLock<()> = RwLock::new(());

/// Swap neither comes nor goes while this is held.
pub fn stays() -> RwLockReadGuard<'static, ()> {
    SWAP.read().unwrap_or_else(PoisonError::into_inner)
}

/// Swap in a file, until it is dropped.
struct Swap {
    /// Takes it off as soon as its input ends: also when this process is killed.
    keeper: Child,
    _dir: TempDir,
    _alone: RwLockWriteGuard<'static, ()>,
}

impl Swap {
    /// The error says why there can be none here.
    fn on() -> Result<Self, String> {
        let alone = SWAP.write().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("swap");
        // No holes: the kernel wants the blocks.
        let mut file = File::create(&path).unwrap();
        file.write_all(&vec![0; SWAP_LEN])
            .and_then(|()| file.sync_all())
            .map_err(|error| error.to_string())?;
        crate::world::set_mode(&path, 0o600);
        succeeds(Command::new("mkswap").arg(&path))?;
        succeeds(Command::new("swapon").arg(&path))?;
        let keeper = Command::new("sh")
            .args(["-c", "cat > /dev/null; exec swapoff \"$0\""])
            .arg(&path)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        Ok(Self { keeper, _dir: dir, _alone: alone })
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let ended = self.keeper.wait().unwrap();
        assert!(ended.success() || std::thread::panicking(), "swap is still on");
    }
}

fn succeeds(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("no swap can be made here: {}", said.trim())) }
}

/// Of all processes together, bytes: what is in memory, and what is in swap.
fn memory(pids: &[i32]) -> (u64, u64) {
    let (mut resident, mut swapped) = (0, 0);
    for pid in pids {
        let status = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status")).unwrap();
        let kib = |key: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse().unwrap())
        };
        resident += kib("VmRSS:") << 10;
        swapped += kib("VmSwap:") << 10;
    }
    (resident, swapped)
}

fn goes_out_and_comes_back() -> Result<(), String> {
    let _swap = Swap::on()?;
    let ballast = format!("import hashlib, os\nballast = os.urandom({BALLAST})\n");
    let server = SERVER.replace("os.environ.get(\"KEY\", \"\")", "hashlib.sha256(ballast).hexdigest()");
    assert_ne!(server, SERVER);
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", &(ballast + &server));
    world.site("app", "alice", app("", json!({})));
    let world = world.start();
    world.run(async |keeper| {
        let use_app = async || keeper.use_instance(&site_name("app"), None).await.unwrap();
        let answer = get(&use_app().await, "/").await;
        until_idle(&world, "app").await;
        let (all, reported) = (pids(&world, "app"), || show(&world, "app")["memory_bytes"].as_u64());
        let (before, swapped) = memory(&all);
        assert!(before > BALLAST && swapped < BALLAST / 2, "{before} {swapped}");
        let row = world.act("app", InstanceCommand::Rest { to: Some(Tier::Reclaimed) });
        assert_eq!((&row["tier"], &row["note"]), (&json!("reclaimed"), &json!(null)), "{row}");
        // A page on its way to the disk is neither here nor there yet.
        until_so(|| memory(&all).1 > BALLAST).await;
        let (after, swapped) = memory(&all);
        assert!(after + BALLAST < before + (4 << 20), "{before} {after} {swapped}");
        assert!(reported().is_none_or(|bytes| bytes < before), "what it holds is shown as it is");
        let used = use_app().await;
        let wake = used.wake.clone().unwrap();
        assert_eq!(wake.from, Tier::Reclaimed);
        assert!(wake.stages.iter().any(|(stage, _)| *stage == WakeStage::Thaw), "{wake:?}");
        let again = get(&used, "/").await;
        assert_eq!(again, answer.replacen(" 1 ", " 2 ", 1), "the same run, and all that it had in memory");
        assert!(memory(&all).0 > BALLAST);
        assert_eq!(pids(&world, "app"), all);
    });
    Ok(())
}

fn rests_without_swap() -> Result<(), String> {
    let _stays = stays();
    if has_swap() {
        return Err("this machine has swap".into());
    }
    let idle = |cold| {
        let mut idle = NEVER();
        for (tier, after) in
            [("quiet", json!(0)), ("frozen", json!(0)), ("reclaimed", json!(0)), ("cold", cold)]
        {
            idle[tier] = after;
        }
        json!({"idle": idle})
    };
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", SERVER);
    world.site("stays", "alice", app("", idle(json!("never"))));
    world.site("goes", "alice", app("", idle(json!(1))));
    let world = world.start();
    world.run(async |keeper| {
        let first = run_of(&keeper, "stays").await;
        until_so(|| show(&world, "stays")["note"].as_str().is_some_and(|note| note.contains("no swap")))
            .await;
        until_at(&world, "stays", "frozen").await;
        assert_eq!(run_of(&keeper, "stays").await, first);
        assert_eq!(show(&world, "stays")["note"], json!(null), "it is awake: nothing is missing");
        run_of(&keeper, "goes").await;
        until_at(&world, "goes", "cold").await;
    });
    Ok(())
}
