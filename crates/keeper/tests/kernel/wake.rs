//! Waking from images, with a real CRIU: what comes back, and what a request gets when it does not.
//!
//! Not here: the rungs above (`rest`), images by themselves (`image`).

use std::fs;
use std::path::PathBuf;
use std::rc::Rc;

use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::instance::{InstanceCommand, Tier, WakeStage};
use serde_json::{Value, json};

use crate::Fact;
use crate::image::forge_header;
use crate::rest::{NEVER, SERVER, app, get, pids, run_of, show, until_at, until_idle};
use crate::world::{World, site_change, site_name, until_so, wait_dead};

pub const CRIU: &[Fact] = &[
    ("an image is taken before the first visitor and wakes the instance as it was then", wakes_as_it_was),
    ("an image outlives the keeper", outlives_the_keeper),
    ("a damaged image is put aside, and its visitor served by a start", damaged_image),
    ("an image whose files are gone is put aside, and its visitor served by a start", lost_files),
    ("what dies soon after it came back is started the next time", dies_soon),
    ("an old image wakes its instance once more, and is taken anew before that rests again", taken_anew),
    ("an image that is twice as old as images may be is not used", past_use),
    ("another release is another image, and an operator gets a new one", other_release),
    ("what cannot be imaged is said once and served all the same", not_imaged),
    ("one wake brings all who wait their answer", one_wake),
    ("an instance in the node's network wakes from its image, too", in_the_nodes_network),
];

/// Goes down to where it has no process, and says which processes are gone.
async fn rest(world: &World) -> Vec<i32> {
    until_idle(world, "app").await;
    let all = pids(world, "app");
    let row = world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) });
    assert_eq!(row["ok"], true, "{row}");
    all.iter().copied().for_each(wait_dead);
    all
}

/// Images can be used from a moment after the keeper's start on.
pub async fn until_images(world: &World) {
    until_so(|| {
        let status: Value =
            serde_json::from_str(&world.ask(nagaya_records::feed::FeedQuery::Status)).unwrap();
        let images = &status["instances"]["images"];
        assert!(images["none"].is_null(), "{images}");
        images.is_object()
    })
    .await;
}

fn world(more: Value) -> World {
    let mut world = World::new();
    world.script("server.py", SERVER);
    world.site("app", "alice", app("", more));
    world
}

fn images(world: &World) -> PathBuf {
    world.dir.path().join("state/images/images")
}

/// The run that answers, how many it has answered, and where it was woken from by which stages.
async fn wake(keeper: &KeeperClient) -> (String, u32, Tier, Vec<WakeStage>) {
    let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
    let said = get(&used, "/").await;
    let mut words = said.split(' ');
    let (run, count) = (words.next().unwrap().to_owned(), words.next().unwrap().parse().unwrap());
    let wake = used.wake.clone().expect("it was woken");
    (run, count, wake.from, wake.stages.iter().map(|(stage, _)| *stage).collect())
}

fn wakes_as_it_was() {
    // A pid file that a well-behaved program removes at its end, a log it has open, and a file in memory.
    let world = world(json!({"warm_up": ["/", "/"], "listen": "fd"}));
    world.script(
        "server.py",
        &format!(
            "import atexit, os, signal, sys\n\
        log = open('/run/open.log', 'w')\n\
        board = open('/dev/shm/board', 'w')\n\
        open('/run/pid', 'w').write('10')\n\
        atexit.register(lambda: os.remove('/run/pid'))\n\
        signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\n{SERVER}"
        ),
    );
    let world = world.start();
    world.run(async |keeper| {
        until_images(&world).await;
        let (first, count, from, stages) = wake(&keeper).await;
        assert_eq!((from, count), (Tier::Cold, 4), "readiness and two to warm it up were nagaya's");
        assert!(stages.contains(&WakeStage::Boot) && stages.contains(&WakeStage::Image), "{stages:?}");
        run_of(&keeper, "app").await;
        // What comes back the first time is asked whether it answers.
        for answered in [5, 4, 4] {
            rest(&world).await;
            assert_eq!(show(&world, "app")["tier"], "image");
            let (run, count, from, stages) = wake(&keeper).await;
            assert_eq!(
                (&run, count, from),
                (&first, answered, Tier::Image),
                "as it was before its first visitor"
            );
            assert!(stages.contains(&WakeStage::Restore) && !stages.contains(&WakeStage::Boot), "{stages:?}");
        }
        let row = show(&world, "app");
        assert!(row["image"]["bytes"].as_u64().unwrap() > 1 << 20, "{row}");
        let taken: u64 = world.metric("nagaya_keeper_images_total{event=\"taken\"}");
        assert_eq!(taken, 1);
    });
    let wake_file = world.dir.path().join("state/instances/app/run/nagaya.wake");
    assert_eq!(fs::read_to_string(wake_file).unwrap().len(), 33, "new bytes for programs that want them");
}

fn outlives_the_keeper() {
    let world = world(json!({})).start();
    let first = world.run(async |keeper| {
        until_images(&world).await;
        run_of(&keeper, "app").await
    });
    assert!(world.drain());
    world.restart();
    world.run(async |keeper| {
        until_images(&world).await;
        let (run, _, _, stages) = wake(&keeper).await;
        assert_eq!(run, first);
        assert!(stages.contains(&WakeStage::Restore), "{stages:?}");
    });
}

fn damaged_image() {
    let world = world(json!({})).start();
    world.run(async |keeper| {
        until_images(&world).await;
        let first = run_of(&keeper, "app").await;
        rest(&world).await;
        let image = fs::read_dir(images(&world)).unwrap().next().unwrap().unwrap().path();
        let pages = image.join("pages-1.img");
        let mut bytes = fs::read(&pages).unwrap();
        bytes.truncate(bytes.len() / 2);
        fs::write(&pages, bytes).unwrap();
        let (run, _, _, stages) = wake(&keeper).await;
        assert_ne!(run, first, "a start");
        assert!(stages.contains(&WakeStage::Image), "and a new image: {stages:?}");
        rest(&world).await;
        assert_eq!(wake(&keeper).await.0, run, "which is used from then on");
    });
    assert!(world.log().contains("NGY0336"), "{}", world.log());
    assert_eq!(world.metric("nagaya_keeper_images_total{event=\"quarantined\"}"), 1);
}

fn lost_files() {
    let world = world(json!({}));
    world.script("server.py", &format!("log = open('own.log', 'w')\n{SERVER}"));
    let world = world.start();
    world.run(async |keeper| {
        until_images(&world).await;
        let first = run_of(&keeper, "app").await;
        rest(&world).await;
        fs::remove_file(world.home("alice").join("www/own.log")).unwrap();
        let (run, _, from, stages) = wake(&keeper).await;
        assert_eq!(from, Tier::Image);
        assert_ne!(run, first);
        assert!(stages.contains(&WakeStage::Boot), "{stages:?}");
    });
    assert!(world.log().contains("NGY0321"), "{}", world.log());
    assert_eq!(world.metric("nagaya_keeper_images_total{event=\"quarantined\"}"), 1);
    assert_eq!(world.metric("nagaya_keeper_wakes_total{from=\"image\",end=\"woke\"}"), 1);
}

fn dies_soon() {
    let world = world(json!({})).start();
    world.run(async |keeper| {
        until_images(&world).await;
        let first = run_of(&keeper, "app").await;
        rest(&world).await;
        assert_eq!(wake(&keeper).await.0, first);
        let pid = rustix::process::Pid::from_raw(*pids(&world, "app").last().unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        until_so(|| pids(&world, "app").is_empty()).await;
        let (run, ..) = wake(&keeper).await;
        assert_ne!(run, first, "the image is not trusted any more");
    });
    assert!(world.log().contains("NGY0336"), "{}", world.log());
}

/// As images may be, unless they are to be taken anew.
const AGE_MAX_S: u64 = 86_400;

/// Says of the only image that it was taken so long ago.
fn age_image(world: &World, seconds: u64) {
    let image = fs::read_dir(images(world)).unwrap().next().unwrap().unwrap().path();
    forge_header(&image.join("header"), |header| {
        header["taken_at"] = json!(header["taken_at"].as_u64().unwrap() - seconds);
    });
}

fn aging_world(idle: Value) -> World {
    world(json!({"idle": idle})).with(|options| options.instances.image_age_max_ms = AGE_MAX_S * 1000).start()
}

fn taken_anew() {
    let idle =
        json!({"quiet": "never", "frozen": "never", "reclaimed": "never", "image": 1, "cold": "never"});
    let world = aging_world(idle);
    let taken = || world.metric("nagaya_keeper_images_total{event=\"taken\"}");
    world.run(async |keeper| {
        until_images(&world).await;
        let first = run_of(&keeper, "app").await;
        until_at(&world, "app", "image").await;
        age_image(&world, AGE_MAX_S * 3 / 2);
        let (run, _, from, stages) = wake(&keeper).await;
        assert_eq!((&run, from), (&first, Tier::Image), "{stages:?}");
        // Nobody asks.
        until_so(|| taken() == 2).await;
        until_at(&world, "app", "image").await;
        let (second, _, from, stages) = wake(&keeper).await;
        assert_eq!(from, Tier::Image, "{stages:?}");
        assert!(stages.contains(&WakeStage::Restore) && !stages.contains(&WakeStage::Boot), "{stages:?}");
        assert_ne!(second, first);
        until_at(&world, "app", "image").await;
        assert_eq!((wake(&keeper).await.0, taken()), (second, 2), "that is done once");
    });
}

fn past_use() {
    let world = aging_world(NEVER());
    world.run(async |keeper| {
        until_images(&world).await;
        let first = run_of(&keeper, "app").await;
        rest(&world).await;
        age_image(&world, AGE_MAX_S * 2 + 60);
        let (second, _, _, stages) = wake(&keeper).await;
        assert_ne!(second, first);
        assert!(stages.contains(&WakeStage::Boot) && stages.contains(&WakeStage::Image), "{stages:?}");
        rest(&world).await;
        assert_eq!(wake(&keeper).await.0, second, "another was taken in its place");
    });
    assert!(world.log().contains("it was taken too long ago"), "{}", world.log());
}

fn other_release() {
    let world = world(json!({"release": "1"})).start();
    let change = |release: &str| {
        let record = app("", json!({"release": release}));
        world.apply(vec![site_change("app", "alice", record, json!({}))]);
    };
    world.run(async |keeper| {
        until_images(&world).await;
        let first = run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        change("2");
        let (second, ..) = wake(&keeper).await;
        assert_ne!(first, second);
        rest(&world).await;
        assert_eq!(wake(&keeper).await.0, second);
        until_idle(&world, "app").await;
        let row = world.act("app", InstanceCommand::Image);
        assert_eq!((&row["ok"], &row["tier"]), (&json!(true), &json!("running")), "{row}");
        let third = run_of(&keeper, "app").await;
        assert_ne!(second, third);
        rest(&world).await;
        assert_eq!(wake(&keeper).await.0, third);
    });
}

fn not_imaged() {
    let world = world(json!({}));
    // Nobody's socket but its own: no relay is between them.
    let other = world.home("alice").join("www/other.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&other).unwrap();
    crate::world::set_mode(&other, 0o777);
    let held = "import socket\nheld = socket.socket(socket.AF_UNIX)\nheld.connect('other.sock')\n";
    world.script("server.py", &format!("{held}{SERVER}"));
    let world = world.start();
    world.run(async |keeper| {
        until_images(&world).await;
        let (first, ..) = wake(&keeper).await;
        let row = show(&world, "app");
        assert!(row["note"].as_str().unwrap().starts_with("it has no image: "), "{row}");
        assert!(row["image"].is_null());
        rest(&world).await;
        assert_eq!(show(&world, "app")["tier"], "cold");
        let (second, _, _, stages) = wake(&keeper).await;
        assert_ne!(first, second);
        assert!(!stages.contains(&WakeStage::Image), "it is not tried again: {stages:?}");
    });
    assert_eq!(world.metric("nagaya_keeper_images_total{event=\"not_taken\"}"), 1);
    // A keeper that knows nothing of that finds it written down.
    assert!(world.drain());
    world.restart();
    world.run(async |keeper| {
        until_images(&world).await;
        let (_, _, _, stages) = wake(&keeper).await;
        assert!(!stages.contains(&WakeStage::Image), "{stages:?}");
    });
}

fn in_the_nodes_network() {
    let world = world(json!({"outbound": "host"})).start();
    world.run(async |keeper| {
        until_images(&world).await;
        let first = run_of(&keeper, "app").await;
        rest(&world).await;
        let (run, _, _, stages) = wake(&keeper).await;
        assert_eq!(run, first, "{stages:?}");
    });
}

fn one_wake() {
    let world = world(json!({"idle": NEVER()})).start();
    world.run(async |keeper| {
        until_images(&world).await;
        let first = run_of(&keeper, "app").await;
        rest(&world).await;
        let asking: Vec<_> = (0..20)
            .map(|_| {
                let keeper = Rc::clone(&keeper);
                tokio::task::spawn_local(async move { run_of(&keeper, "app").await })
            })
            .collect();
        for one in asking {
            assert_eq!(one.await.unwrap(), first);
        }
        until_at(&world, "app", "running").await;
        assert_eq!(show(&world, "app")["wakes"], 2, "the start and one wake");
    });
}
