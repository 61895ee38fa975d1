//! An instance goes deeper while the node is short of memory. The keeper sees files that say so in the place of the kernel's: a
//! machine that is really short would harm all other tests.
//!
//! Not here: when memory is short (`instances::pressure`), which step that is (`instances::policy`).

use std::fs;
use std::path::Path;

use nagaya_records::instance::Tier;
use serde_json::json;

use crate::FoundFact;
use crate::rest::{SERVER, app, get, run_of, show, until_idle};
use crate::world::{World, site_name, until_so};

pub const ROOT: &[FoundFact] =
    &[("while memory is short, what is idle goes deeper before its time, and nothing else", goes_deeper)];

const FILES: [&str; 2] = ["/proc/pressure/memory", "/proc/meminfo"];

/// Percent of time in which something waited, and of memory that is there.
fn say(dir: &Path, waited: u32, available: u32) {
    let some = format!("some avg10={waited}.00 avg60=0.00 avg300=0.00 total=0\n");
    fs::write(dir.join("memory"), format!("{some}full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")).unwrap();
    let available = available * 10_000;
    fs::write(dir.join("meminfo"), format!("MemTotal: 1000000 kB\nMemAvailable: {available} kB\n")).unwrap();
}

fn goes_deeper() -> Result<(), String> {
    if let Some(missing) = FILES.iter().find(|file| !Path::new(file).exists()) {
        return Err(format!("this kernel has no {missing}"));
    }
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    let dir = world.dir.path().to_owned();
    say(&dir, 0, 50);
    let at = dir.to_str().unwrap();
    let mounts = FILES.map(|file| format!("mount --bind {at}/{} {file}", file.rsplit_once('/').unwrap().1));
    // A sandbox gets a /proc only where one can be seen whole.
    fs::create_dir(dir.join("proc")).unwrap();
    world = world.after(&format!("{}; mount -t proc none {at}/proc", mounts.join("; ")));
    world.script("server.py", SERVER);
    for site in ["app", "used"] {
        world.site(site, "alice", app("", json!({})));
    }
    let world = world.start();
    world.run(async |keeper| {
        let first = run_of(&keeper, "app").await;
        let used = keeper.use_instance(&site_name("used"), None).await.unwrap();
        until_idle(&world, "app").await;
        assert_eq!(show(&world, "app")["tier"], "running");
        say(&dir, 20, 10);
        until_so(|| show(&world, "app")["tier"] != "running").await;
        // It goes on until nothing is left to give.
        until_so(|| show(&world, "app")["tier"] == Tier::Cold.as_str()).await;
        assert_eq!(show(&world, "used")["tier"], "running");
        get(&used, "/").await;
        say(&dir, 0, 50);
        assert_ne!(run_of(&keeper, "app").await, first);
    });
    Ok(())
}
