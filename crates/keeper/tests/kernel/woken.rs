//! What a program finds that comes back from its image, with a real CRIU: random numbers that it had before, unless it does
//! as docs/instances.md says, and clocks that have gone on.
//!
//! Not here: that it comes back (`wake`), images by themselves (`image`).

use std::path::Path;

use nagaya_keeper::image::Image;
use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::instance::{InstanceCommand, Tier};
use nagaya_records::record::ImageMemory;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};
use serde_json::json;

use crate::image::{Stage, found};
use crate::rest::{app, get, until_idle};
use crate::wake::until_images;
use crate::world::{World, site_name};
use crate::{Fact, FoundFact, image};

pub const FOUND: &[FoundFact] = &[
    ("Python's random numbers are others after each wake, as docs/instances.md has it", || {
        are_fresh("python3", "python", "py", include_str!("../../fixtures/random.py"))
    }),
    ("PHP's random numbers are others after each wake, as docs/instances.md has it", || {
        are_fresh("php", "php", "php", include_str!("../../fixtures/random.php"))
    }),
    ("Ruby's random numbers are others after each wake, as docs/instances.md has it", || {
        are_fresh("ruby", "ruby", "rb", include_str!("../../fixtures/random.rb"))
    }),
    ("Node's random numbers are others after each wake, as docs/instances.md has it", || {
        are_fresh("node", "js", "js", include_str!("../../fixtures/random.js"))
    }),
];

pub const CRIU: &[Fact] = &[(
    "clocks have gone on after a restore; timers go on with what was left, and sleeps that are due end",
    clocks,
)];

/// The code that the page has for programs in this language.
fn hook(language: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/instances.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (_, section) =
        page.split_once("\n### Random numbers and clocks after a wake\n").expect("its section");
    let (_, code) = section.split_once(&format!("```{language}\n")).expect("code in this language");
    code.split_once("```").expect("the code ends").0.to_owned()
}

fn is_installed(program: &str) -> bool {
    ["/usr/local/bin", "/usr/bin", "/bin"].iter().any(|dir| Path::new(dir).join(program).exists())
}

fn are_fresh(program: &str, language: &str, extension: &str, server: &str) -> Result<(), String> {
    if let Some(why) = image::missing() {
        return Err(why.into());
    }
    if !is_installed(program) {
        return Err(format!("{program} is not installed"));
    }
    let mut world = World::new();
    world.script(&format!("hook.{extension}"), &hook(language));
    let script = format!("server.{extension}");
    world.script(&script, server);
    // What is seeded at its first use has been used when the image is taken.
    let more = json!({"command": [program, script], "warm_up": ["/plain", "/hook"]});
    world.site("app", "alice", app("", more));
    let world = world.start();
    world.run(async |keeper| {
        until_images(&world).await;
        drop(keeper.use_instance(&site_name("app"), None).await.unwrap());
        let (first, second) = (numbers(&world, &keeper).await, numbers(&world, &keeper).await);
        assert_eq!(first.plain, second.plain, "the generator in its memory is as it was");
        assert_ne!(first.fresh, second.fresh);
        assert_ne!(first.plain, first.fresh);
    });
    Ok(())
}

struct Numbers {
    plain: String,
    /// After it was told.
    fresh: String,
}

/// What it draws after its next wake.
async fn numbers(world: &World, keeper: &KeeperClient) -> Numbers {
    until_idle(world, "app").await;
    let row = world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) });
    assert_eq!((&row["ok"], &row["tier"]), (&json!(true), &json!("image")), "{row}");
    let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
    assert_eq!(used.wake.as_ref().expect("it was woken").from, Tier::Image);
    let plain = get(&used, "/plain").await;
    // One connection, one request.
    let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
    Numbers { plain, fresh: get(&used, "/hook").await }
}

/// Begins a sleep and a long timer when it is told to, and tells the clocks, what is left of the timer, and whether it
/// still sleeps.
const CLOCKS: &str = "import signal, socket, threading, time\n\
    server = socket.socket(fileno=3)\n\
    sleeper = threading.Thread(target=time.sleep, args=(2,), daemon=True)\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   if client.recv(100) == b'begin':\n\
    \x20       sleeper.start(); signal.setitimer(signal.ITIMER_REAL, 1000)\n\
    \x20   left, _ = signal.getitimer(signal.ITIMER_REAL)\n\
    \x20   client.sendall(f'{time.time()} {time.monotonic()} {left} {sleeper.is_alive()}'.encode())\n\
    \x20   client.close()\n";

/// What it tells.
struct Told {
    wall: f64,
    monotonic: f64,
    left: f64,
    sleeps: bool,
}

fn told(said: &str) -> Told {
    let words: Vec<&str> = said.split(' ').collect();
    let [wall, monotonic, left, sleeps] = words[..] else { panic!("{said}") };
    let number = |word: &str| word.parse().unwrap();
    Told { wall: number(wall), monotonic: number(monotonic), left: number(left), sleeps: sleeps == "True" }
}

fn seconds(clock: ClockId) -> f64 {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(clock);
    #[expect(clippy::cast_precision_loss, reason = "seconds since 1970 to a microsecond fit")]
    (tv_sec as f64 + tv_nsec as f64 / 1e9)
}

fn clocks() {
    let mut stage = Stage::new();
    stage.scene = stage.scene.with_file("clocks.py", CLOCKS);
    let life = stage.life();
    let _task = life.start(&["python3", "clocks.py"]);
    let begun = told(&life.ask("begin"));
    let _: Image =
        stage.images.take(&stage.subject(), &life.sandbox, &life.handed(), ImageMemory::Auto).unwrap();
    drop(life);
    // Until its sleep is over, and as long again.
    let rested = 4.0;
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap();
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    let due = Itimerspec { it_interval: zero, it_value: Timespec { tv_sec: 4, ..zero } };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &due).unwrap();
    crate::scene::wait_readable(&timer);
    let life = stage.life();
    stage.images.restore(&found(&stage), &life.sandbox, &life.handed()).unwrap();
    let before = (seconds(ClockId::Realtime), seconds(ClockId::Monotonic));
    let woken = told(&life.ask("tell"));
    let after = (seconds(ClockId::Realtime), seconds(ClockId::Monotonic));
    // Python rounds to less than a microsecond.
    let is_between = |at: f64, from: f64, to: f64| from - 1e-6 <= at && at <= to + 1e-6;
    assert!(is_between(woken.wall, before.0, after.0), "{} {} {}", before.0, woken.wall, after.0);
    assert!(is_between(woken.monotonic, before.1, after.1), "{} {} {}", before.1, woken.monotonic, after.1);
    assert!(woken.left > begun.left - rested, "{} {}", woken.left, begun.left);
    while told(&life.ask("tell")).sleeps {}
}
