//! What a cluster says of instances: which are placed here, and whether this node may run them now.
//!
//! Not here: stopping them in time (`authority`), what an instance makes of it (`lifecycle`), who places them.

use std::rc::Rc;
use std::time::Duration;

use nagaya_cmdb::SiteName;
use tokio::time::{Instant, timeout, timeout_at};

use super::lifecycle::Event;
use super::{Instance, Instances};
use crate::authority::{ELSEWHERE, FENCED, NOT_RELEASED};
use crate::engine::Engine;
use crate::fault::Fault;
use crate::protocol::Failure;

/// How long one who asks may know more than this keeper: of a placement that was told to it directly, or of authority that
/// is on its way here.
const CATCH_UP_MAX: Duration = Duration::from_millis(500);

/// Longest time those who use an instance that is given up may have, whatever is asked for.
const RELEASE_MAX: Duration = Duration::from_secs(3600);

/// How long requests that run may take when their node becomes one of a cluster's.
const JOIN_RELEASE: Duration = Duration::from_secs(30);

/// How long the end of an instance that is given up may take: its notice, and a kernel that is busy.
const END_MAX: Duration = Duration::from_secs(30);

/// Where a site stands for one who asks for it with an epoch.
#[derive(Debug, PartialEq, Eq)]
enum Standing {
    Here,
    /// There may be something newer in a moment.
    NotYet(Bar),
    Elsewhere,
}

#[derive(Debug, PartialEq, Eq)]
enum Bar {
    Fenced,
    Elsewhere,
}

/// `placed`: whether the placement that is known names this node, and its epoch.
fn standing(placed: Option<(bool, u64)>, asked: Option<u64>, is_fenced: bool) -> Standing {
    let is_behind = asked.is_some_and(|asked| placed.is_none_or(|(_, known)| known < asked));
    match placed {
        _ if is_behind => Standing::NotYet(Bar::Elsewhere),
        Some((true, _)) if is_fenced => Standing::NotYet(Bar::Fenced),
        Some((true, _)) => Standing::Here,
        Some((false, _)) | None => Standing::Elsewhere,
    }
}

pub fn fenced(name: &SiteName) -> Fault {
    let message = format!("this node has no authority to run the application of '{name}' now");
    Fault::new(Failure::Fenced, FENCED, message)
}

pub fn elsewhere(name: &SiteName) -> Fault {
    Fault::new(
        Failure::Elsewhere,
        ELSEWHERE,
        format!("the application of '{name}' is not placed on this node"),
    )
}

/// None: there is no cluster. Otherwise whether this node is named for the site, and under which epoch it is or others are.
fn placed(engine: &Engine, name: &SiteName) -> Option<Option<(bool, u64)>> {
    let node = engine.authority.node()?;
    let placement = engine.table().read().placement(name.as_str());
    let is_removed = engine.authority.is_removed();
    Some(placement.map(|placement| match placement.part(&node) {
        Some(part) => (!is_removed, part.epoch),
        None => (false, placement.epoch),
    }))
}

/// What an instance that begins to be known is told first.
pub fn told_at_birth(engine: &Engine, name: &SiteName) -> Vec<Event> {
    let Some(placed) = placed(engine, name) else { return Vec::new() };
    let is_here = placed.is_some_and(|(is_here, _)| is_here);
    let moved = (!is_here).then_some(Event::Moved);
    let fenced = engine.instances.is_fenced.get().then_some(Event::Fenced);
    [moved, fenced].into_iter().flatten().collect()
}

impl Instances {
    /// Returns once the site's instance may run here, as far as this epoch is concerned.
    pub(super) async fn until_placed(
        &self,
        engine: &Rc<Engine>,
        name: &SiteName,
        epoch: Option<u64>,
    ) -> Result<(), Fault> {
        let until = Instant::now() + CATCH_UP_MAX;
        loop {
            let changed = self.standing_changed.notified();
            let Some(placed) = placed(engine, name) else { return Ok(()) };
            let bar = match standing(placed, epoch, self.is_fenced.get()) {
                Standing::Here => return Ok(()),
                Standing::Elsewhere => return Err(elsewhere(name)),
                Standing::NotYet(bar) => bar,
            };
            if timeout_at(until, changed).await.is_err() {
                return Err(match bar {
                    Bar::Fenced => self::fenced(name),
                    Bar::Elsewhere => elsewhere(name),
                });
            }
        }
    }

    /// Tells an instance if it is here now and was not, or the other way about.
    pub(super) fn follow_placement(&self, engine: &Rc<Engine>, instance: &Rc<Instance>) {
        let site = instance.site();
        let Some(placed) = placed(engine, &site.name) else { return };
        let is_here = placed.is_some_and(|(is_here, _)| is_here);
        // What was given up under one epoch may come back under another.
        let epoch = placed.map(|(_, epoch)| epoch);
        let is_new = instance.released.get().is_some_and(|released| epoch > released);
        if is_new || !is_here {
            instance.released.set(None);
        }
        let was_here = instance.life.borrow().is_here();
        match (was_here, is_here) {
            (true, false) => {
                tracing::info!(site = %site.name, "its application is placed elsewhere; what runs of it here is killed");
                self.tell(engine, instance, Event::Moved);
            }
            (false, true) => self.tell(engine, instance, Event::Placed),
            (true, true) if is_new => self.tell(engine, instance, Event::Placed),
            _ => {}
        }
    }

    /// Gives an instance up. Returns once nothing of it is left, with the epoch under which it does not run here again and
    /// how many uses were cut short.
    pub(super) async fn release(
        &self,
        engine: &Rc<Engine>,
        instance: &Rc<Instance>,
        within: Duration,
    ) -> Result<(Option<u64>, u32), Fault> {
        let site = instance.site();
        let Some(placed) = placed(engine, &site.name) else {
            let message = "this node is in no cluster: there is nobody to give an instance to";
            return Err(Fault::new(Failure::Invalid, NOT_RELEASED, message));
        };
        let epoch = placed.map(|(_, epoch)| epoch);
        instance.released.set(Some(epoch));
        self.tell(engine, instance, Event::Release);
        if timeout(within.min(RELEASE_MAX), instance.until_gone()).await.is_ok() {
            return Ok((epoch, 0));
        }
        let cut = instance.life.borrow().users();
        tracing::info!(site = %site.name, uses = cut, "its application is given up; those who still use it are cut short");
        self.tell(engine, instance, Event::Stop);
        timeout(END_MAX, instance.until_gone()).await.map_err(|_| {
            let message =
                format!("processes of the application of '{}' are still there after {END_MAX:?}", site.name);
            Fault::new(Failure::Busy, NOT_RELEASED, message)
        })?;
        Ok((epoch, cut))
    }

    /// Gives up all that runs, for it was started outside of the cluster that the node is in now.
    pub async fn release_all(&self, engine: &Rc<Engine>) {
        let all: Vec<_> = self.all.borrow().values().cloned().collect();
        let running = all.into_iter().filter(|instance| instance.life.borrow().tier().has_process());
        let mut released = Vec::new();
        for instance in running {
            let engine = Rc::clone(engine);
            released.push(tokio::task::spawn_local(async move {
                let done = engine.instances.release(&engine, &instance, JOIN_RELEASE).await;
                if let Err(fault) = done {
                    tracing::warn!(code = %fault.code, "{}", fault.message);
                }
            }));
        }
        for one in released {
            // A task that panicked has said so.
            let _ = one.await;
        }
    }

    /// Tells all instances when the node loses its authority and when it has it again. Returns when it cannot have it any
    /// more.
    pub async fn follow_authority(&self, engine: &Rc<Engine>) {
        engine.authority.until_joined().await;
        let mut fenced = engine.authority.fenced();
        loop {
            let is_fenced = *fenced.borrow_and_update();
            if is_fenced == self.is_fenced.get() {
                tokio::select! {
                    _ = fenced.changed() => {}
                    () = engine.authority.until_lost() => return,
                }
                continue;
            }
            self.is_fenced.set(is_fenced);
            let event = if is_fenced { Event::Fenced } else { Event::Unfenced };
            let all: Vec<_> = self.all.borrow().values().cloned().collect();
            for instance in all {
                self.tell(engine, &instance, event);
            }
            self.standing_changed.notify_waiters();
        }
    }
}

impl Instance {
    /// Returns once it has no process, and nothing is done to it.
    async fn until_gone(&self) {
        loop {
            let changed = self.changed.notified();
            let is_gone = {
                let life = self.life.borrow();
                !life.tier().has_process() && life.doing().is_none()
            };
            if is_gone {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_knows_of_a_later_epoch_is_waited_for() {
        use Standing::*;
        assert_eq!(standing(Some((true, 3)), None, false), Here);
        assert_eq!(standing(Some((true, 3)), Some(3), false), Here);
        assert_eq!(standing(Some((true, 3)), Some(2), false), Here, "what is known here is newer");
        assert_eq!(standing(Some((false, 3)), Some(4), false), NotYet(Bar::Elsewhere));
        assert_eq!(standing(None, Some(1), false), NotYet(Bar::Elsewhere));
        assert_eq!(standing(Some((false, 3)), Some(3), false), Elsewhere);
        assert_eq!(standing(Some((false, 3)), None, false), Elsewhere);
        assert_eq!(standing(None, None, false), Elsewhere);
        assert_eq!(standing(Some((true, 3)), None, true), NotYet(Bar::Fenced));
    }
}
