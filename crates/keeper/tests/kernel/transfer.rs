//! Images that go from one keeper to another, with a real CRIU: two nodes on one machine, each with directories of its own.
//!
//! The test carries the bytes, as two edges would. Not here: images of one node (`image`, `wake`), where sites are (`placed`).

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_cmdb::feed::Down;
use nagaya_cmdb::instance::{Act, Stage, Tier};
use nagaya_cmdb::record::{Placement, Why};
use nagaya_cmdb::{Change, NodeName};
use nagaya_keeper::client::{ClientError, ImageOffer, Keeper};
use nagaya_keeper::protocol::Failure;
use serde_json::{Value, json};

use crate::Fact;
use crate::rest::{SERVER, app, get, run_of, show, until_idle};
use crate::wake::until_images;
use crate::world::{ALICE, World, refusal, site_change, site_name, tenant_change, wait_dead};

pub const CRIU: &[Fact] = &[
    ("an image goes to another node, and wakes the instance there as it was", goes_over),
    ("an image that came in part goes on where it ended", goes_on),
    ("an image that is damaged on its way is put aside, and the instance starts", damaged),
    ("an image that does not fit another node is refused before its first byte", does_not_fit),
    ("an image goes no faster than the node allows", paced),
];

/// A pid file that a well-behaved program removes at its end, a log it has open, and a file in memory: an image is no good
/// without them.
fn program() -> String {
    format!(
        "import atexit, os, signal, sys\n\
        log = open('/run/open.log', 'w')\n\
        held = open('/tmp/held', 'w')\n\
        board = open('/dev/shm/board', 'w')\n\
        open('/run/pid', 'w').write('10')\n\
        atexit.register(lambda: os.remove('/run/pid'))\n\
        signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\n{SERVER}"
    )
}

fn record() -> Value {
    app("", json!({"listen": "fd", "warm_up": ["/"]}))
}

fn first() -> World {
    let mut world = World::new();
    world.script("server.py", &program());
    world.site("app", "alice", record());
    world.start()
}

/// Another node `b` with the same content and other directories of its own. Nothing is placed on it.
fn second(first: &World, backend: Value) -> World {
    let world = World::new().with(|options| options.node = Some("b".into())).start();
    let alice =
        json!({"name": "alice", "uid": ALICE, "gid": ALICE, "home": first.home("alice"), "php_workers": 2});
    world.apply(vec![tenant_change(alice), site_change("app", "alice", backend, json!({}))]);
    world
}

fn place(world: &World) {
    let node = NodeName::new("b").unwrap();
    let placement = Placement {
        site: site_name("app"),
        node,
        epoch: 1,
        since_ms: 0,
        why: Why::First,
        wait_ms: 0,
        node_epoch: 0,
        copies: Vec::new(),
    };
    world.apply(vec![Change::PutPlacement(placement)]);
    world.tell(&Down::Authority { until_ns: u64::MAX / 2 });
}

/// An image of the first node's, of a run that rests there; and what wakes from it says of itself.
async fn imaged(world: &World, keeper: &Keeper) -> (ImageOffer, String) {
    until_images(world).await;
    assert_eq!(keeper.offer_image(&site_name("app")).await.unwrap(), None, "there is none yet");
    let run = run_of(keeper, "app").await;
    until_idle(world, "app").await;
    let pids = crate::rest::pids(world, "app");
    assert_eq!(world.act("app", Act::Rest { to: Some(Tier::Image) })["ok"], true);
    pids.into_iter().for_each(wait_dead);
    let offer = keeper.offer_image(&site_name("app")).await.unwrap().unwrap();
    assert!(offer.bytes > 1 << 20, "{offer:?}");
    (offer, run)
}

fn read(pipe: OwnedFd) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::from(pipe).read_to_end(&mut bytes).unwrap();
    bytes
}

async fn sent(keeper: &Keeper, offer: &ImageOffer, offset: u64) -> Vec<u8> {
    read(keeper.send_image(&site_name("app"), &offer.digest, offset).await.unwrap())
}

/// Gives these bytes to the second keeper, which said that it has so many. What it says at the end.
async fn fetched(keeper: &Keeper, offer: &ImageOffer, bytes: &[u8]) -> (u64, Result<(), ClientError>) {
    let (offset, pipe) = keeper.fetch_image(&site_name("app"), &offer.offer).await.unwrap();
    // It may have seen enough before all of them are written.
    let _ = File::from(pipe).write_all(bytes);
    (offset, keeper.image_fetched(&site_name("app")).await)
}

/// Which run answers at the second node, and whether it came from an image.
async fn woken(world: &World, keeper: &Keeper) -> (String, bool) {
    place(world);
    let used = keeper.use_instance(&site_name("app"), Some(1)).await.unwrap();
    let run = get(&used, "/").await.split(' ').next().unwrap().to_owned();
    let stages = used.wake.clone().unwrap().stages;
    let has = |stage| stages.iter().any(|(of, _)| *of == stage);
    (run, has(Stage::Restore) && !has(Stage::Boot))
}

fn both(test: impl AsyncFnOnce(&World, Rc<Keeper>, &World, Rc<Keeper>)) {
    let a = first();
    let b = second(&a, record());
    a.run(async |first| {
        let other = Keeper::connect(&b.socket()).await.unwrap();
        until_images(&b).await;
        test(&a, first, &b, other).await;
    });
}

fn goes_over() {
    both(async |a, first, b, other| {
        let (offer, run) = imaged(a, &first).await;
        let bytes = sent(&first, &offer, 0).await;
        assert_eq!(bytes.len() as u64, offer.bytes);
        assert!(sent(&first, &offer, 1000).await == bytes[1000..], "the same from any byte on");
        let (offset, end) = fetched(&other, &offer, &bytes).await;
        assert_eq!((offset, end), (0, Ok(())));
        assert_eq!(
            other.offer_image(&site_name("app")).await.unwrap().as_ref(),
            Some(&offer),
            "it is the same there"
        );
        assert_eq!(woken(b, &other).await, (run, true));
        assert_eq!(fs::read_to_string(b.dir.path().join("state/instances/app/run/pid")).unwrap(), "10");
        let refused = other.fetch_image(&site_name("app"), &offer.offer).await;
        assert_eq!(refusal(refused), (Failure::Invalid, 364), "it runs there");
        let gone = first.send_image(&site_name("app"), &"0".repeat(64), 0).await;
        assert_eq!(refusal(gone), (Failure::NotFound, 364));
    });
}

fn goes_on() {
    both(async |a, first, b, other| {
        let (offer, run) = imaged(a, &first).await;
        let bytes = sent(&first, &offer, 0).await;
        let half = bytes.len() / 2;
        let (_, end) = fetched(&other, &offer, &bytes[..half]).await;
        assert_eq!(refusal(end), (Failure::Broken, 337));
        assert!(other.offer_image(&site_name("app")).await.unwrap().is_none(), "a part is no image");
        let (offset, end) = fetched(&other, &offer, &bytes[half..half + 1]).await;
        assert_eq!(offset, half as u64);
        assert!(end.is_err());
        // Also after the keeper's end; and what was damaged meanwhile is fetched again.
        assert!(b.drain());
        b.restart();
        let staged =
            fs::read_dir(b.dir.path().join("state/images/incoming")).unwrap().next().unwrap().unwrap().path();
        let mut there = fs::read(&staged).unwrap();
        assert!(there == bytes[..=half]);
        there[half / 2] ^= 1;
        fs::write(&staged, there).unwrap();
        let alice =
            json!({"name": "alice", "uid": ALICE, "gid": ALICE, "home": a.home("alice"), "php_workers": 2});
        b.apply(vec![tenant_change(alice), site_change("app", "alice", record(), json!({}))]);
        until_images(b).await;
        let (offset, pipe) = other.fetch_image(&site_name("app"), &offer.offer).await.unwrap();
        let rest = sent(&first, &offer, offset).await;
        File::from(pipe).write_all(&rest).unwrap();
        match other.image_fetched(&site_name("app")).await {
            Ok(()) => assert!(offset <= (half / 2) as u64, "what is damaged was cut off"),
            // The damage was in the piece that had not come whole: it is seen at the end, and all of it comes anew.
            Err(error) => {
                assert_eq!(refusal(Err::<(), _>(error)), (Failure::Broken, 365));
                assert_eq!(fetched(&other, &offer, &bytes).await, (0, Ok(())));
            }
        }
        assert_eq!(woken(b, &other).await, (run, true));
    });
}

fn damaged() {
    both(async |a, first, b, other| {
        let (offer, run) = imaged(a, &first).await;
        let bytes = sent(&first, &offer, 0).await;
        for at in [10, 2000, bytes.len() / 2, bytes.len() - 1] {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            let (offset, end) = fetched(&other, &offer, &bad).await;
            assert_eq!((offset, refusal(end)), (0, (Failure::Broken, 365)), "at {at}");
            assert!(other.offer_image(&site_name("app")).await.unwrap().is_none());
        }
        let aside: Vec<_> = fs::read_dir(b.dir.path().join("state/images/quarantine")).unwrap().collect();
        assert_eq!(aside.len(), 1, "the last is kept: {aside:?}");
        // More than was agreed on is not read.
        let more = [bytes.as_slice(), &[0; 100_000]].concat();
        let (_, end) = fetched(&other, &offer, &more).await;
        assert_eq!(end, Ok(()));
        assert_eq!(woken(b, &other).await, (run, true), "what was wrong before says nothing about it");
    });
    both(async |a, first, b, other| {
        let (offer, run) = imaged(a, &first).await;
        let mut bytes = sent(&first, &offer, 0).await;
        *bytes.last_mut().unwrap() ^= 1;
        assert!(fetched(&other, &offer, &bytes).await.1.is_err());
        let (other_run, is_restored) = woken(b, &other).await;
        assert!(other_run != run && !is_restored);
        assert!(b.log().contains("NGY0365"), "{}", b.log());
    });
}

fn does_not_fit() {
    both(async |a, first, b, other| {
        let (offer, _) = imaged(a, &first).await;
        let refused = async |change: &dyn Fn(&mut Value)| {
            let mut text: Value = serde_json::from_str(&offer.offer).unwrap();
            change(&mut text);
            match other.fetch_image(&site_name("app"), &text.to_string()).await {
                Err(ClientError::Refused { code, message, .. }) => (code, message),
                other => panic!("{other:?}"),
            }
        };
        for (change, why) in [
            (
                &(|offer: &mut Value| offer["environment"]["kernel"] = json!("6.0 other"))
                    as &dyn Fn(&mut Value),
                "kernel",
            ),
            (&|offer: &mut Value| offer["environment"]["criu"] = json!("9.9"), "CRIU"),
            (&|offer: &mut Value| offer["subject"]["base"] = json!("0".repeat(64)), "files it ran on"),
            (&|offer: &mut Value| offer["subject"]["definition"] = json!("0".repeat(64)), "record"),
            (&|offer: &mut Value| offer["subject"]["release"] = json!("other"), "release"),
            (&|offer: &mut Value| offer["subject"]["site"] = json!("../../x"), "site"),
            (&|offer: &mut Value| *offer = json!({"nonsense": 1}), "cannot be read"),
        ] {
            let (code, message) = refused(change).await;
            assert!(code == 364 && message.contains(why), "{code} {message}");
        }
        let (code, message) = refused(&|offer: &mut Value| offer["bytes"] = json!(u64::MAX / 4)).await;
        assert!([335, 337].contains(&code), "{code} {message}");
        // Of another record there.
        b.apply(vec![site_change(
            "app",
            "alice",
            app("", json!({"env": {"A": "b"}, "listen": "fd"})),
            json!({}),
        )]);
        assert!(refused(&|_: &mut Value| ()).await.1.contains("record"));
        assert!(show(b, "app")["image"].is_null());
    });
}

fn paced() {
    let a = first();
    let b = World::new()
        .with(|options| {
            options.node = Some("b".into());
            options.instances.image_bandwidth = 8 << 20;
        })
        .start();
    let alice =
        json!({"name": "alice", "uid": ALICE, "gid": ALICE, "home": a.home("alice"), "php_workers": 2});
    b.apply(vec![tenant_change(alice), site_change("app", "alice", record(), json!({}))]);
    a.run(async |first| {
        let other = Keeper::connect(&b.socket()).await.unwrap();
        until_images(&b).await;
        let (offer, _) = imaged(&a, &first).await;
        let bytes = sent(&first, &offer, 0).await;
        let began = Instant::now();
        assert_eq!(fetched(&other, &offer, &bytes).await.1, Ok(()));
        // The first piece goes at once.
        let least = Duration::from_secs_f64((offer.bytes - (256 << 10)) as f64 / f64::from(8 << 20));
        assert!(began.elapsed() >= least, "{} bytes in {:?}", offer.bytes, began.elapsed());
    });
}
