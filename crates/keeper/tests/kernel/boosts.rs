//! Limits of an instance that are raised while requests run: what the kernel's files hold, how far, and that it ends with the
//! request, its edge and the run.
//!
//! Not here: who decides of several (`instances::boosts`), raising for want of CPU (`instances`), what rules and edge ask for.

use std::path::{Path, PathBuf};

use nagaya_keeper_api::client::{BoostGuard, InstanceUse, KeeperClient};
use nagaya_keeper_api::protocol::{FailureKind, InstanceId};
use nagaya_records::cell::{Boost, CpuQuota};
use nagaya_records::instance::{InstanceCommand, Tier};
use serde_json::{Value, json};

use crate::rest::{SERVER, app, pids, until_at, until_idle};
use crate::world::{World, refusal, site_change, site_name, until_so};
use crate::{CellFact, groups};

pub const CELLS: &[CellFact] = &[
    (
        &["cpu"],
        "limits of an instance are raised while a request runs, and as they were after it",
        while_it_runs,
    ),
    (&["cpu"], "of two requests the one that wants more decides, whichever ends first", two_at_once),
    (&["cpu"], "what an edge that is gone wanted for an instance ends with it", gone_edge),
    (&["cpu"], "nothing is raised beyond what records and configuration allow", within_bounds),
    (&["cpu"], "a record that changes while a limit is raised holds at once", changed_record),
    (&["cpu"], "an instance that rests or ends has its own limits again", rested),
];

fn world(limits: Value, more: Value) -> World {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", SERVER);
    world.site_with("app", "alice", app("", more), json!({ "limits": limits }));
    world
}

fn half() -> World {
    world(json!({ "cpu": "50%", "cpu_shares": 512 }), json!({})).start()
}

fn cpu(percent: u32) -> Boost {
    Boost { cpu: Some(CpuQuota::of_core(percent * 10)), cpu_shares: None }
}

fn shares(shares: u32) -> Boost {
    Boost { cpu: None, cpu_shares: Some(shares) }
}

/// The cgroup of the site.
fn group(world: &World) -> PathBuf {
    groups::above(pids(world, "app")[0], "cpu", "site-app").unwrap()
}

/// Quota in percent of one core, and shares, as the kernel has them.
fn holds(group: &Path) -> (Option<u64>, u64) {
    let percent = groups::cpu_quota(group).map(|(quota, period)| quota * 100 / period);
    (percent, groups::cpu_shares(group))
}

/// Its instance, once it does not go first any more because it was woken.
async fn awake(world: &World, keeper: &KeeperClient) -> InstanceUse {
    let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
    keeper.answered(used.guard.id());
    until_so(|| world.cell("alice").is_some_and(|cell| cell["limits"]["cpu_shares"].is_null())).await;
    used
}

/// What is granted of this, and what keeps it.
async fn boosted(keeper: &KeeperClient, id: InstanceId, asked: Boost) -> (BoostGuard, Boost) {
    keeper.boost_instance(id, asked).await.unwrap()
}

fn while_it_runs() {
    let world = half();
    world.run(async |keeper| {
        let used = awake(&world, &keeper).await;
        let (id, group) = (used.guard.id(), group(&world));
        assert_eq!(holds(&group), (Some(50), 512));
        let (guard, granted) = boosted(&keeper, id, cpu(150).overlaid(shares(2048))).await;
        assert_eq!(granted, cpu(150).overlaid(shares(2048)));
        assert_eq!(holds(&group), (Some(150), 2048));
        let shown = world.cell("alice/app").unwrap();
        assert_eq!(shown["limits"]["cpu"]["quota_us"], 15_000, "{shown}");
        drop(guard);
        until_so(|| holds(&group) == (Some(50), 512)).await;

        // A second one is as the first, and one that asks for less than there is changes nothing.
        let (guard, _) = boosted(&keeper, id, cpu(100)).await;
        assert_eq!(holds(&group), (Some(100), 512));
        drop(guard);
        until_so(|| holds(&group) == (Some(50), 512)).await;
        let (_guard, granted) = boosted(&keeper, id, cpu(20)).await;
        assert_eq!((granted, holds(&group)), (Boost::default(), (Some(50), 512)));
        assert_eq!(world.metric("nagaya_keeper_boosts_total"), 2);
    });
}

fn two_at_once() {
    let world = half();
    world.run(async |keeper| {
        let used = awake(&world, &keeper).await;
        let (id, group) = (used.guard.id(), group(&world));
        let (most, _) = boosted(&keeper, id, cpu(150)).await;
        let (less, granted) = boosted(&keeper, id, cpu(100).overlaid(shares(1024))).await;
        assert_eq!(granted, cpu(100).overlaid(shares(1024)));
        assert_eq!(holds(&group), (Some(150), 1024));
        drop(most);
        until_so(|| holds(&group) == (Some(100), 1024)).await;
        let (most, _) = boosted(&keeper, id, cpu(200)).await;
        assert_eq!(holds(&group), (Some(200), 1024));
        drop(less);
        until_so(|| holds(&group) == (Some(200), 512)).await;
        drop(most);
        until_so(|| holds(&group) == (Some(50), 512)).await;
    });
}

fn gone_edge() {
    let world = half();
    world.run(async |keeper| {
        let _kept = awake(&world, &keeper).await;
        let group = group(&world);
        let edge = KeeperClient::connect(&world.socket()).await.unwrap();
        let used = awake(&world, &edge).await;
        let (_guard, _) = boosted(&edge, used.guard.id(), cpu(150)).await;
        assert_eq!(holds(&group), (Some(150), 512));
        drop(edge);
        until_so(|| holds(&group) == (Some(50), 512)).await;

        // One that gives the instance back, and the boost not.
        let edge = KeeperClient::connect(&world.socket()).await.unwrap();
        let used = awake(&world, &edge).await;
        let (_guard, _) = boosted(&edge, used.guard.id(), cpu(150)).await;
        assert_eq!(holds(&group), (Some(150), 512));
        drop(used);
        until_so(|| holds(&group) == (Some(50), 512)).await;
    });
}

fn within_bounds() {
    let world = half();
    world.run(async |keeper| {
        let used = awake(&world, &keeper).await;
        let (id, group) = (used.guard.id(), group(&world));
        let far = cpu(90_000).overlaid(shares(10_000));
        let (guard, granted) = boosted(&keeper, id, far).await;
        assert_eq!(granted, cpu(200).overlaid(shares(2048)), "four times what the record says");
        assert_eq!(holds(&group), (Some(200), 2048));
        drop(guard);
        until_so(|| holds(&group) == (Some(50), 512)).await;

        let odd =
            |quota_us, period_us| Boost { cpu: Some(CpuQuota { quota_us, period_us }), cpu_shares: None };
        for asked in [odd(0, 10_000), odd(u64::MAX, 1_000), odd(1_000, 0), shares(0), shares(10_001)] {
            let refused = refusal(keeper.boost_instance(id, asked).await);
            assert_eq!(refused, (FailureKind::Invalid, 318), "{asked:?}");
        }
        // An instance that this edge does not use.
        let other = KeeperClient::connect(&world.socket()).await.unwrap();
        assert_eq!(refusal(other.boost_instance(id, cpu(100)).await), (FailureKind::NotFound, 301));
        assert_eq!(holds(&group), (Some(50), 512));
    });

    let said = world_of(json!({ "cpu": "50%" }), json!({ "cpu_max": "120%" }), json!({}));
    said.run(async |keeper| {
        let used = awake(&said, &keeper).await;
        let (_guard, granted) = boosted(&keeper, used.guard.id(), cpu(900)).await;
        assert_eq!((granted, holds(&group(&said)).0), (cpu(120), Some(120)), "as far as its record says");
    });
    let around =
        world_of(json!({ "cpu": "50%" }), json!({ "cpu_max": "unlimited" }), json!({ "cpu": "80%" }));
    around.run(async |keeper| {
        let used = awake(&around, &keeper).await;
        let (_guard, granted) = boosted(&keeper, used.guard.id(), cpu(900)).await;
        assert_eq!((granted, holds(&group(&around)).0), (cpu(80), Some(80)), "as far as its tenant's");
    });
    let free = world_of(json!({}), json!({}), json!({}));
    free.run(async |keeper| {
        let used = awake(&free, &keeper).await;
        let (_guard, granted) = boosted(&keeper, used.guard.id(), cpu(900)).await;
        assert_eq!((granted, holds(&group(&free))), (Boost::default(), (None, 1024)), "no limit is made");
    });
}

/// Started, with limits of its tenant's record.
fn world_of(limits: Value, more: Value, tenant: Value) -> World {
    let world = world(limits, more).start();
    world.apply(vec![world.tenant_with("alice", json!({ "limits": tenant }))]);
    world
}

fn changed_record() {
    let world = half();
    let record = |limits: Value| {
        world.apply(vec![site_change("app", "alice", app("", json!({})), json!({ "limits": limits }))]);
    };
    world.run(async |keeper| {
        let used = awake(&world, &keeper).await;
        let (id, group) = (used.guard.id(), group(&world));
        let (guard, _) = boosted(&keeper, id, cpu(300)).await;
        assert_eq!(holds(&group), (Some(200), 512));
        record(json!({ "cpu": "100%" }));
        assert_eq!(holds(&group), (Some(300), 1024));
        record(json!({ "cpu": "20%" }));
        assert_eq!(holds(&group), (Some(80), 1024));
        record(json!({ "cpu": "400%" }));
        assert_eq!(holds(&group), (Some(400), 1024), "it has more without");
        record(json!({}));
        assert_eq!(holds(&group), (None, 1024));
        record(json!({ "cpu": "50%" }));
        assert_eq!(holds(&group), (Some(200), 1024));
        // Load raises beside it, and is told what it has done itself.
        assert_eq!(world.act("app", InstanceCommand::LimitCpu { thousandths: Some(2_500) })["ok"], true);
        assert_eq!(holds(&group), (Some(250), 1024));
        drop(guard);
        assert_eq!(world.act("app", InstanceCommand::LimitCpu { thousandths: None })["ok"], true);
        until_so(|| holds(&group) == (Some(50), 1024)).await;
    });
}

fn rested() {
    let world = half();
    world.run(async |keeper| {
        let used = awake(&world, &keeper).await;
        let (id, group) = (used.guard.id(), group(&world));
        let (guard, _) = boosted(&keeper, id, cpu(150)).await;
        drop(used);
        until_idle(&world, "app").await;
        assert_eq!(holds(&group), (Some(50), 512), "nobody uses it");
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["ok"], true);
        until_at(&world, "app", "frozen").await;
        drop(guard);

        let used = awake(&world, &keeper).await;
        let (_guard, _) = boosted(&keeper, used.guard.id(), cpu(150)).await;
        assert_eq!(holds(&group), (Some(150), 512));
        world.act("app", InstanceCommand::Stop);
        until_so(|| pids(&world, "app").is_empty()).await;
        let again = awake(&world, &keeper).await;
        assert_ne!(again.guard.id(), used.guard.id());
        assert_eq!(holds(&self::group(&world)), (Some(50), 512), "what ran before wanted it, and nobody now");
        assert_eq!(
            refusal(keeper.boost_instance(used.guard.id(), cpu(100)).await),
            (FailureKind::NotFound, 301)
        );
    });
    assert!(world.drain(), "{}", world.log());
}
