//! Images that go from one keeper to another, with a real CRIU: two nodes on one machine, each with directories of its own.
//!
//! The test carries the bytes, as two edges would. Not here: images of one node (`image`, `wake`), where sites are (`placed`).

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_keeper::KeeperConfig;
use nagaya_keeper::image::{ClusterKey, KEY_LEN, give_order};
use nagaya_keeper_api::client::{ImageOffer, KeeperCallError, KeeperClient};
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::feed::FromSupervisor;
use nagaya_records::instance::{InstanceCommand, Tier, WakeStage};
use nagaya_records::record::{Placement, PlacementReason};
use nagaya_records::{NodeName, RecordChange};
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
    ("an edge that carries an image reads nothing of it", sealed),
    ("an edge of a node in no cluster gets no image and gives none", no_cluster),
    ("an edge without an order of a supervisor gets no image and gives none", without_order),
    ("an order of an older key holds while that is known", other_keys),
];

/// In the memory of the application.
const SECRET: &str = "s3cr3t-of-alice-4711";

/// A pid file that a well-behaved program removes at its end, a log it has open, and a file in memory: an image is no good
/// without them.
fn program() -> String {
    format!(
        "import atexit, os, signal, sys\n\
        log = open('/run/open.log', 'w')\n\
        held = open('/tmp/held', 'w')\n\
        secret = '{SECRET}'\n\
        board = open('/dev/shm/board', 'w')\n\
        open('/run/pid', 'w').write('10')\n\
        atexit.register(lambda: os.remove('/run/pid'))\n\
        signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\n{SERVER}"
    )
}

fn record() -> Value {
    app("", json!({"listen": "fd", "warm_up": ["/"]}))
}

/// Of the cluster that both nodes are in, and of one that nobody is in.
const KEY: ClusterKey = ClusterKey::new([0x5a; KEY_LEN]);
const OTHER_KEY: ClusterKey = ClusterKey::new([0xa5; KEY_LEN]);

fn ordered(key: &ClusterKey, site: &str, from: &str, to: &str) -> String {
    let [from, to] = [from, to].map(|name| NodeName::new(name).unwrap());
    give_order(key, &site_name(site), &from, &to).unwrap()
}

/// As the supervisor of the second node gives it.
fn order() -> String {
    ordered(&KEY, "app", "a", "b")
}

fn join(options: &mut KeeperConfig, node: &str) {
    options.node = Some(node.into());
    options.instances.image_keys = vec![KEY];
}

fn first() -> World {
    let mut world = World::new().with(|options| join(options, "a"));
    world.script("server.py", &program());
    world.site("app", "alice", record());
    let world = world.start();
    place(&world, "a");
    world
}

/// Another node `b` with the same content and other directories of its own. Nothing is placed on it.
fn second(first: &World, backend: Value) -> World {
    let world = World::new().with(|options| join(options, "b")).start();
    let alice =
        json!({"name": "alice", "uid": ALICE, "gid": ALICE, "home": first.home("alice"), "php_workers": 2});
    world.apply(vec![tenant_change(alice), site_change("app", "alice", backend, json!({}))]);
    world
}

fn place(world: &World, node: &str) {
    let node = NodeName::new(node).unwrap();
    let placement = Placement {
        site: site_name("app"),
        node,
        epoch: 1,
        since_ms: 0,
        why: PlacementReason::First,
        wait_ms: 0,
        node_epoch: 0,
        copies: Vec::new(),
    };
    world.apply(vec![RecordChange::PutPlacement(placement)]);
    world.tell(&FromSupervisor::Authority { until_ns: u64::MAX / 2 });
}

async fn offered(keeper: &KeeperClient) -> Option<ImageOffer> {
    keeper.offer_image(&site_name("app"), &order()).await.unwrap()
}

/// An image of the first node's, of a run that rests there; and what wakes from it says of itself.
async fn imaged(world: &World, keeper: &KeeperClient) -> (ImageOffer, String) {
    until_images(world).await;
    assert_eq!(offered(keeper).await, None, "there is none yet");
    let used = keeper.use_instance(&site_name("app"), Some(1)).await.unwrap();
    let run = get(&used, "/").await.split(' ').next().unwrap().to_owned();
    drop(used);
    until_idle(world, "app").await;
    let pids = crate::rest::pids(world, "app");
    assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) })["ok"], true);
    pids.into_iter().for_each(wait_dead);
    let offer = offered(keeper).await.unwrap();
    assert!(offer.bytes > 1 << 20, "{offer:?}");
    (offer, run)
}

fn read(pipe: OwnedFd) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::from(pipe).read_to_end(&mut bytes).unwrap();
    bytes
}

/// The sealed stream from this byte on.
async fn sent(keeper: &KeeperClient, offer: &ImageOffer, order: &str, offset: u64) -> Vec<u8> {
    read(keeper.send_image(&site_name("app"), order, (&offer.digest, offset)).await.unwrap())
}

/// What becomes of a stream on its way.
type Way<'a> = &'a dyn Fn(&mut Vec<u8>);

/// Has the second keeper take what the first sends, as two edges do. From which byte on, and what it says at the end.
async fn fetched(
    (first, other): (&KeeperClient, &KeeperClient),
    offer: &ImageOffer,
    way: Way<'_>,
) -> (u64, Result<(), KeeperCallError>) {
    let (app, order) = (site_name("app"), order());
    let intake = other.fetch_image(&app, &order, &offer.offer).await.unwrap();
    let mut bytes = sent(first, offer, &order, intake.offset).await;
    assert_eq!(bytes.len() as u64, intake.bytes);
    way(&mut bytes);
    // It may have seen enough before all of them are written.
    let _ = File::from(intake.pipe).write_all(&bytes);
    (intake.offset, other.image_fetched(&app, &order).await)
}

const UNCHANGED: Way<'_> = &|_| ();

/// Which run answers at the second node, and whether it came from an image.
async fn woken(world: &World, keeper: &KeeperClient) -> (String, bool) {
    place(world, "b");
    let used = keeper.use_instance(&site_name("app"), Some(1)).await.unwrap();
    let run = get(&used, "/").await.split(' ').next().unwrap().to_owned();
    let stages = used.wake.clone().unwrap().stages;
    let has = |stage| stages.iter().any(|(of, _)| *of == stage);
    (run, has(WakeStage::Restore) && !has(WakeStage::Boot))
}

fn both(test: impl AsyncFnOnce(&World, Rc<KeeperClient>, &World, Rc<KeeperClient>)) {
    let a = first();
    let b = second(&a, record());
    a.run(async |first| {
        let other = KeeperClient::connect(&b.socket()).await.unwrap();
        until_images(&b).await;
        test(&a, first, &b, other).await;
    });
}

fn goes_over() {
    both(async |a, first, b, other| {
        let (offer, run) = imaged(a, &first).await;
        let (offset, end) = fetched((&first, &other), &offer, UNCHANGED).await;
        assert_eq!((offset, end), (0, Ok(())));
        assert_eq!(offered(&other).await.as_ref(), Some(&offer), "it is the same there");
        assert_eq!(woken(b, &other).await, (run, true));
        assert_eq!(fs::read_to_string(b.dir.path().join("state/instances/app/run/pid")).unwrap(), "10");
        let refused = other.fetch_image(&site_name("app"), &order(), &offer.offer).await;
        assert_eq!(refusal(refused), (FailureKind::Invalid, 364), "it runs there");
        let gone = first.send_image(&site_name("app"), &order(), (&"0".repeat(64), 0)).await;
        assert_eq!(refusal(gone), (FailureKind::NotFound, 364));
    });
}

/// What an edge carries says nothing, and is of use for nothing else.
fn sealed() {
    both(async |a, first, _, other| {
        let (offer, _) = imaged(a, &first).await;
        let stream = sent(&first, &offer, &order(), 0).await;
        let has = |text: &[u8]| stream.windows(text.len()).any(|part| part == text);
        assert!(!has(SECRET.as_bytes()) && !has(b"nagaya-image"), "it is sealed");
        // One of another order, of which this one's edge has kept a copy.
        let (app, order) = (site_name("app"), order());
        let intake = other.fetch_image(&app, &order, &offer.offer).await.unwrap();
        let _ = File::from(intake.pipe).write_all(&stream);
        assert_eq!(refusal(other.image_fetched(&app, &order).await), (FailureKind::Broken, 365));
        assert!(offered(&other).await.is_none());
    });
}

fn goes_on() {
    both(async |a, first, b, other| {
        let (offer, run) = imaged(a, &first).await;
        let half = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() / 2);
        let (_, end) = fetched((&first, &other), &offer, &half).await;
        assert_eq!(refusal(end), (FailureKind::Broken, 337));
        assert!(offered(&other).await.is_none(), "a part is no image");
        let (came, end) = fetched((&first, &other), &offer, &|bytes| bytes.truncate(1)).await;
        let piece = 64 << 10;
        assert!(came <= offer.bytes / 2 && came + piece > offer.bytes / 2, "whole pieces are kept: {came}");
        assert!(end.is_err());
        // Also after the keeper's end; and what was damaged meanwhile is fetched again.
        assert!(b.drain());
        b.restart();
        let staged =
            fs::read_dir(b.dir.path().join("state/images/incoming")).unwrap().next().unwrap().unwrap().path();
        let mut there = fs::read(&staged).unwrap();
        assert_eq!(there.len() as u64, came);
        let middle = there.len() / 2;
        there[middle] ^= 1;
        fs::write(&staged, there).unwrap();
        let alice =
            json!({"name": "alice", "uid": ALICE, "gid": ALICE, "home": a.home("alice"), "php_workers": 2});
        b.apply(vec![tenant_change(alice), site_change("app", "alice", record(), json!({}))]);
        until_images(b).await;
        match fetched((&first, &other), &offer, UNCHANGED).await {
            (offset, Ok(())) => assert!(offset <= middle as u64, "what is damaged was cut off"),
            // The damage was in the piece that had not come whole: it is seen at the end, and all of it comes anew.
            (_, Err(error)) => {
                assert_eq!(refusal(Err::<(), _>(error)), (FailureKind::Broken, 365));
                assert_eq!(fetched((&first, &other), &offer, UNCHANGED).await, (0, Ok(())));
            }
        }
        assert_eq!(woken(b, &other).await, (run, true));
    });
}

fn damaged() {
    both(async |a, first, b, other| {
        let (offer, run) = imaged(a, &first).await;
        for at in [10, 2000, offer.bytes as usize / 2, offer.bytes as usize] {
            let (offset, end) = fetched((&first, &other), &offer, &|bytes| bytes[at] ^= 1).await;
            assert_eq!((offset, refusal(end)), (0, (FailureKind::Broken, 365)), "at {at}");
            assert!(offered(&other).await.is_none());
        }
        let aside: Vec<_> = fs::read_dir(b.dir.path().join("state/images/quarantine")).unwrap().collect();
        assert_eq!(aside.len(), 1, "the last is kept: {aside:?}");
        // More than was agreed on is not read.
        let more = |bytes: &mut Vec<u8>| bytes.resize(bytes.len() + 100_000, 0);
        let (_, end) = fetched((&first, &other), &offer, &more).await;
        assert_eq!(end, Ok(()));
        assert_eq!(woken(b, &other).await, (run, true), "what was wrong before says nothing about it");
    });
    both(async |a, first, b, other| {
        let (offer, run) = imaged(a, &first).await;
        let last = |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1;
        assert!(fetched((&first, &other), &offer, &last).await.1.is_err());
        let (other_run, is_restored) = woken(b, &other).await;
        assert!(other_run != run && !is_restored);
        assert!(b.log().contains("NGY0365"), "{}", b.log());
    });
}

/// All that an edge can ask of images, with this order. What it gets: failures and codes.
async fn all_verbs(keeper: &KeeperClient, site: &str, order: &str, offer: &str) -> Vec<(FailureKind, u16)> {
    let site = site_name(site);
    vec![
        refusal(keeper.offer_image(&site, order).await),
        refusal(keeper.send_image(&site, order, (&"0".repeat(64), 0)).await),
        refusal(keeper.fetch_image(&site, order, offer).await),
        refusal(keeper.image_fetched(&site, order).await),
    ]
}

const NOT_ORDERED: (FailureKind, u16) = (FailureKind::Forbidden, 366);

/// A node in no cluster, whose edge is in another's hands, and has an image of its application.
fn no_cluster() {
    let mut world = World::new();
    world.script("server.py", &program());
    world.site("app", "alice", record());
    let world = world.start();
    world.run(async |keeper| {
        until_images(&world).await;
        run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) })["ok"], true);
        // Orders of every kind it could think of.
        let orders = [String::new(), order(), ordered(&ClusterKey::new([0; KEY_LEN]), "app", "a", "b")];
        for order in &orders {
            assert_eq!(all_verbs(&keeper, "app", order, "{}").await, [NOT_ORDERED; 4], "{order}");
        }
        assert_eq!(world.metric("nagaya_keeper_images_total{event=\"not_ordered\"}"), 12);
        assert!(world.log().contains("NGY0366"), "{}", world.log());
    });
}

fn without_order() {
    both(async |a, first, b, other| {
        let (offer, run) = imaged(a, &first).await;
        let forged = ordered(&OTHER_KEY, "app", "a", "b");
        let of_others = ordered(&KEY, "app", "b", "c");
        let of_site = ordered(&KEY, "bank", "a", "b");
        for order in [String::new(), forged, of_site, order().replacen("\"a\"", "\"b\"", 1)] {
            for keeper in [&first, &other] {
                assert_eq!(all_verbs(keeper, "app", &order, &offer.offer).await, [NOT_ORDERED; 4], "{order}");
            }
        }
        assert_eq!(all_verbs(&first, "app", &of_others, &offer.offer).await, [NOT_ORDERED; 4]);
        // In one direction: who gives takes nothing, and who takes gives nothing.
        let app = site_name("app");
        let taken = first.fetch_image(&app, &order(), &offer.offer).await;
        assert_eq!(refusal(taken), NOT_ORDERED);
        let given = other.send_image(&app, &order(), (&offer.digest, 0)).await;
        assert_eq!(refusal(given), NOT_ORDERED);
        // None of it has changed anything.
        assert_eq!(fetched((&first, &other), &offer, UNCHANGED).await, (0, Ok(())));
        assert_eq!(woken(b, &other).await, (run, true));
    });
}

/// The keys change: who has the new one alone takes nothing of before; who has both does.
fn other_keys() {
    both(async |a, first, b, other| {
        let (offer, run) = imaged(a, &first).await;
        b.change(|options| options.instances.image_keys = vec![OTHER_KEY]);
        assert_eq!(refusal(other.fetch_image(&site_name("app"), &order(), &offer.offer).await), NOT_ORDERED);
        b.change(|options| options.instances.image_keys = vec![OTHER_KEY, KEY]);
        assert_eq!(fetched((&first, &other), &offer, UNCHANGED).await, (0, Ok(())));
        assert_eq!(woken(b, &other).await, (run, true));
    });
}

fn does_not_fit() {
    both(async |a, first, b, other| {
        let (offer, _) = imaged(a, &first).await;
        let refused = async |change: &dyn Fn(&mut Value)| {
            let mut text: Value = serde_json::from_str(&offer.offer).unwrap();
            change(&mut text);
            match other.fetch_image(&site_name("app"), &order(), &text.to_string()).await {
                Err(KeeperCallError::Refused { code, message, .. }) => (code, message),
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
            join(options, "b");
            options.instances.image_bandwidth = 8 << 20;
        })
        .start();
    let alice =
        json!({"name": "alice", "uid": ALICE, "gid": ALICE, "home": a.home("alice"), "php_workers": 2});
    b.apply(vec![tenant_change(alice), site_change("app", "alice", record(), json!({}))]);
    a.run(async |first| {
        let other = KeeperClient::connect(&b.socket()).await.unwrap();
        until_images(&b).await;
        let (offer, _) = imaged(&a, &first).await;
        let began = Instant::now();
        assert_eq!(fetched((&first, &other), &offer, UNCHANGED).await.1, Ok(()));
        // The first piece goes at once.
        let least = Duration::from_secs_f64((offer.bytes - (256 << 10)) as f64 / f64::from(8 << 20));
        assert!(began.elapsed() >= least, "{} bytes in {:?}", offer.bytes, began.elapsed());
    });
}
