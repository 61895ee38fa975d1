//! Whether an idle instance computes. It has work of its own, which its rest would stop, and its
//! image would lose.
//!
//! Only CPU time of its cell counts. A job that only waits, for a database or a timer, is not
//! noticed. An instance that computes does not rest for as long as its record says
//! (`linger_seconds`). An endless loop is put to rest then, which is logged. It stays in memory no
//! longer than an instance with requests. So it takes nothing that a visitor could not give it. Not
//! here: when it would rest (`policy`), the effect on its lifecycle (`lifecycle::work`).

use std::time::Instant;

use nagaya_records::instance::Tier;

use crate::fault;
use crate::instances::decide::lifecycle::LifecycleEvent;
use crate::instances::state::instance::SiteInstance;

fn cpu_us(instance: &SiteInstance) -> Option<u64> {
    instance.leaf()?.cpu_us().map(|(cpu_us, _)| cpu_us)
}

/// Records the CPU use of its cell when it becomes idle.
pub fn follow_work(instance: &SiteInstance) {
    let (run, idle_since) = {
        let life = instance.life.borrow();
        (life.run(), life.idle_since())
    };
    instance.work.follow(run, idle_since, || cpu_us(instance));
}

fn has_computed(instance: &SiteInstance, now: Instant) -> bool {
    let run = instance.life.borrow().run();
    instance.work.has_computed(run, now, cpu_us(instance))
}

/// Returns this event, or `Works` in its place if it would put to rest what computes and still may.
pub fn unless_at_work(instance: &SiteInstance, event: LifecycleEvent) -> LifecycleEvent {
    let now = Instant::now();
    let Some(to) = instance.life.borrow().stops_by(now, event) else { return event };
    if !has_computed(instance, now) {
        return event;
    }
    if instance.life.borrow().may_work(now) {
        return LifecycleEvent::Works;
    }
    say_cut(instance, to);
    event
}

fn say_cut(instance: &SiteInstance, to: Tier) {
    let (site, code) = (instance.site(), fault::STILL_AT_WORK);
    let linger = instance.life.borrow().linger().as_secs();
    let why = format!(
        "it goes to rest ({to}) although it computes: its linger_seconds ({linger}) after its last request are over [{code}]"
    );
    tracing::warn!(site = %site.name, "{code}: {why}");
    instance.set_note(Some(why));
}
