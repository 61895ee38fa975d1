//! Doing what lifecycles say, and telling them what came of it.
//!
//! Not here: what is to be done (`lifecycle`), how (`start`, `rest`).

use std::pin::pin;
use std::rc::Rc;
use std::time::Instant;

use nagaya_cmdb::SiteName;
use nagaya_cmdb::instance::{Stage, Tier};
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::sleep_until;

use super::housing::NotRestored;
use super::lateness;
use super::ledger::Ledger;
use super::lifecycle::{Blame, Effect, Event, Op, Outcome, Reason, Run};
use super::rest::Reached;
use super::start::{self, Body, How, NoBody, Way};
use super::{Instance, Instances};
use crate::engine::Engine;
use crate::fault;
use crate::image;
use crate::metrics::{ImageEvent, WakeEnd};

impl Instances {
    /// Tells an instance what happened, and does what that calls for. What happens while this is done waits for its end.
    pub(super) fn tell(&self, engine: &Rc<Engine>, instance: &Rc<Instance>, event: Event) {
        self.inbox.borrow_mut().push_back((Rc::clone(instance), event));
        if self.is_acting.replace(true) {
            return;
        }
        loop {
            let next = self.inbox.borrow_mut().pop_front();
            let Some((instance, event)) = next else { break };
            self.act(engine, &instance, event);
        }
        self.is_acting.set(false);
    }

    fn act(&self, engine: &Rc<Engine>, instance: &Rc<Instance>, event: Event) {
        let now = Instant::now();
        let (was_awake, from) = (instance.is_awake(), instance.life.borrow().tier());
        if matches!(event, Event::Ask(_) | Event::Alarm | Event::Retake)
            && instance.life.borrow().waiting() == 0
        {
            // It may be the first of a wake.
            instance.ledger.replace(Some(Ledger::new(from, now)));
        }
        instance.life.borrow_mut().assume(self.costs.get());
        let effects = instance.life.borrow_mut().apply(now, event);
        let is_awake = instance.is_awake();
        if is_awake && !was_awake {
            self.woke(engine, instance, now);
        } else if let Event::Done(_, Outcome::Failed(_)) = event
            && instance.life.borrow().doing().is_none()
        {
            count(engine, instance, WakeEnd::Failed);
        }
        for effect in effects {
            self.perform(engine, instance, effect, now);
        }
        self.look_again(instance);
        self.take_turns(now);
    }

    /// Turns come before anything else that happened: one whose turn it is must still wait for it then.
    fn take_turns(&self, now: Instant) {
        while let Some(key) = self.wakes.borrow_mut().next(now) {
            if let Some(next) = self.all.borrow().get(&key) {
                self.inbox.borrow_mut().push_front((Rc::clone(next), Event::Turn));
            }
        }
    }

    /// Tells those whose turn it is, outside of anything that happens to an instance.
    pub(super) fn wake_next(&self, engine: &Rc<Engine>) {
        loop {
            let Some(key) = self.wakes.borrow_mut().next(Instant::now()) else { break };
            let next = self.all.borrow().get(&key).cloned();
            if let Some(next) = next {
                self.tell(engine, &next, Event::Turn);
            }
        }
    }

    /// A start goes on without a place in the line of wakes, and the next one begins.
    fn give_place_back(&self, engine: &Rc<Engine>, instance: &Instance) {
        tracing::debug!(site = %instance.site().name, "it starts slowly: the next one begins beside it");
        self.wakes.borrow_mut().give_back(instance.key, Instant::now());
        self.wake_next(engine);
    }

    /// Sets its alarm anew, and notes what is different.
    pub(super) fn look_again(&self, instance: &Instance) {
        let (deadline, idle_since, tier) = {
            let life = instance.life.borrow();
            (life.deadline(), life.idle_since(), life.tier())
        };
        if self.alarms.borrow_mut().set(instance.key, deadline) {
            self.first_alarm_changed.notify_one();
        }
        self.idle.borrow_mut().set(instance.key, idle_since);
        if idle_since.is_some() {
            // Nobody waits for an answer any more.
            instance.back.take();
        }
        if instance.tier.get().0 != tier {
            instance.tier.set((tier, Instant::now()));
        }
        self.enrol(&instance.site().name);
        instance.changed.notify_waiters();
    }

    /// Notes for the edge whether this site's instance is awake; one whose site was removed is nobody's any more.
    fn enrol(&self, name: &SiteName) {
        let listed = self.sites.borrow().get(name).cloned();
        let is_awake = listed.is_some_and(|listed| !listed.life.borrow().rests());
        if let Some(roll) = &mut *self.roll.borrow_mut()
            && let Err(error) = roll.set(name, is_awake)
        {
            tracing::warn!(site = %name, %error, "rules are told that it rests, which it does not");
        }
    }

    fn perform(&self, engine: &Rc<Engine>, instance: &Rc<Instance>, effect: Effect, now: Instant) {
        let key = instance.key;
        match effect {
            Effect::Queue => {
                instance.mark(Stage::Queue, now);
                if !self.wakes.borrow_mut().join(key, instance.tenant().name.clone()) {
                    // Before anything else that happened: it waits for nothing now.
                    self.inbox.borrow_mut().push_front((Rc::clone(instance), Event::NoTurn));
                }
            }
            Effect::Unqueue => self.wakes.borrow_mut().leave(key),
            Effect::Release(woke) => {
                self.wakes.borrow_mut().release(key, now, woke);
                if !woke {
                    self.go_as_others(engine, instance, now);
                }
            }
            Effect::Boot(op, run) => self.begin(engine, instance, (op, run), How::Boot, now),
            Effect::Restore(op, run) => {
                let images = self.images.borrow().clone();
                match images {
                    Some(images) => self.begin(engine, instance, (op, run), How::Restore(images), now),
                    // Settings have changed a moment ago.
                    None => self.tell(engine, instance, Event::Done(op, Outcome::Failed(Blame::Node))),
                }
            }
            Effect::TakeImage(op) => self.take_image(engine, instance, op),
            Effect::Rest(op, from, to) => {
                tracing::debug!(site = %instance.site().name, %from, %to, "it goes to rest");
                self.go(engine, instance, op, Some(to));
            }
            Effect::Rouse(op, from) => {
                tracing::debug!(site = %instance.site().name, %from, "it is needed again");
                instance.mark(Stage::Thaw, now);
                self.go_first(engine, instance, now);
                self.go(engine, instance, op, None);
            }
            Effect::End(op) => {
                instance.end_wanted.borrow().send_replace(Some((op, Way::Notice)));
            }
            Effect::Kill(op) => {
                if let Some(body) = &*instance.body.borrow() {
                    body.kill();
                }
                instance.end_wanted.borrow().send_replace(Some((op, Way::Kill)));
            }
            Effect::Quarantine(reason) => self.quarantine(engine, instance, reason),
            Effect::Answer(waiter, answer) => {
                let waiting = instance.waiting.borrow_mut().remove(&waiter);
                if let Some(Err(Ok(run))) = waiting.map(|waiting| waiting.send(answer)) {
                    // Who asked has left just now.
                    self.tell(engine, instance, Event::Leave(run));
                }
            }
            // Its alarm goes with the next look: it has none.
            Effect::Closed => {
                self.all.borrow_mut().remove(&key);
                self.clear_away(engine, instance);
            }
        }
    }

    fn begin(
        &self,
        engine: &Rc<Engine>,
        instance: &Rc<Instance>,
        (op, run): (Op, Run),
        how: How,
        now: Instant,
    ) {
        let (end_wanted, wanted) = watch::channel(None);
        instance.end_wanted.replace(end_wanted);
        instance.mark(Stage::Sandbox, now);
        self.go_first(engine, instance, now);
        spawn_local(live(Rc::clone(engine), Rc::clone(instance), (op, run), how, wanted));
    }

    fn take_image(&self, engine: &Rc<Engine>, instance: &Rc<Instance>, op: Op) {
        let (body, images) = (instance.body.borrow().clone(), self.images.borrow().clone());
        let (Some(body), Some(images)) = (body, images) else {
            return self.tell(engine, instance, Event::Done(op, Outcome::Imaged(false)));
        };
        let (engine, instance) = (Rc::clone(engine), Rc::clone(instance));
        spawn_local(async move {
            if let Err(error) = rouse_for_image(&engine, &body, op).await {
                tracing::warn!(site = %instance.site().name, "{}: no image of it is taken: {error}", fault::REST);
                return engine.instances.tell(&engine, &instance, Event::Done(op, Outcome::NotImagedNow));
            }
            body.seats.vacate(&engine, &body).await;
            let taken = start::take_image(&engine, &instance, images, &body).await;
            let site = instance.site();
            let event = match &taken {
                Ok(image) => {
                    tracing::info!(site = %site.name, bytes = image.bytes(), "an image of it was taken");
                    ImageEvent::Taken
                }
                Err(fault) => {
                    tracing::warn!(site = %site.name, "no image of it is taken: {fault}");
                    ImageEvent::NotTaken
                }
            };
            engine.metrics.images.add([event as usize], 1);
            let is_taken = taken.is_ok();
            let outcome = match &taken {
                Err(fault) if matches!(fault.code, image::STORE | image::UNSETTLED) => Outcome::NotImagedNow,
                taken => Outcome::Imaged(taken.is_ok()),
            };
            instance.no_image.replace(taken.as_ref().err().map(|fault| fault.message.clone()));
            instance.image.replace(taken.ok());
            if !is_taken && !instance.life.borrow().is_imaging() {
                // It was ended meanwhile: that it could not be imaged says nothing about it.
                engine.instances.forget_refusal(&engine, &instance).await;
            }
            engine.instances.tell(&engine, &instance, Event::Done(op, outcome));
            engine.instances.collect(&engine);
        });
    }

    fn quarantine(&self, engine: &Rc<Engine>, instance: &Instance, reason: Reason) {
        engine.metrics.images.add([ImageEvent::Quarantined as usize], 1);
        let image = instance.image.take();
        let (Some(images), why) = (self.images.borrow().clone(), reason_of(reason)) else { return };
        // One that could not be restored is put aside by who tried; one that is to be taken anew is replaced.
        if let (Some(image), Some(why)) = (image, why) {
            let job = move || {
                images.quarantine(&image, &why);
                Ok(())
            };
            let engine = Rc::clone(engine);
            spawn_local(async move { engine.on_worker(job).await });
        }
    }

    /// It was woken: how long that took, by stage.
    fn woke(&self, engine: &Rc<Engine>, instance: &Rc<Instance>, now: Instant) {
        instance.fault.take();
        instance.note.take();
        instance.wakes.set(instance.wakes.get() + 1);
        let Some(ledger) = instance.ledger.borrow().clone() else { return };
        let stages = ledger.stages(now);
        let fell_back =
            [Stage::Restore, Stage::Boot].iter().all(|one| stages.iter().any(|(of, _)| of == one));
        count(engine, instance, if fell_back { WakeEnd::FellBack } else { WakeEnd::Woke });
        self.came_back(engine, instance, ledger.from(), &stages, now);
        for (stage, took) in stages {
            engine.metrics.wake_stages.observe(stage as usize, took);
        }
        instance.last_wake.replace(Some(ledger.wake_whole(now)));
    }

    /// Down to a tier, or up to running.
    fn go(&self, engine: &Rc<Engine>, instance: &Rc<Instance>, op: Op, down_to: Option<Tier>) {
        let body = instance.body.borrow().clone();
        // It has ended, and that will be told next.
        let Some(body) = body else { return };
        let resting = std::sync::Arc::clone(&body.resting);
        resting.begin(op.0);
        if down_to.is_some() {
            instance.end_boosts(engine);
        }
        let (engine, instance) = (Rc::clone(engine), Rc::clone(instance));
        spawn_local(async move {
            if down_to.is_some() {
                // What rests is all that is in its cell.
                body.seats.vacate(&engine, &body).await;
            }
            let job = move || {
                Ok(match down_to {
                    Some(to) => resting.down(op.0, to),
                    None => match resting.up(op.0) {
                        Ok(()) => Reached { tier: Tier::Running, why: None },
                        Err(error) => Reached { tier: Tier::Frozen, why: Some(error.to_string()) },
                    },
                })
            };
            let reached = engine.on_worker(job).await;
            let (site, code) = (instance.site(), fault::REST);
            let outcome = match reached {
                Ok(Reached { tier, why }) => {
                    if let Some(why) = why {
                        tracing::info!(site = %site.name, %tier, "{code}: it rests no deeper: {why}");
                        instance.note.replace(Some(format!("it rests no deeper than {tier}: {why}")));
                    }
                    if down_to.is_none() && tier != Tier::Running {
                        Outcome::Stuck
                    } else {
                        Outcome::Rests(tier)
                    }
                }
                Err(fault) => {
                    tracing::warn!(site = %site.name, "{code}: {fault}");
                    // Nothing was begun: on the way down it stays, and who needs it gets a new one.
                    if down_to.is_none() {
                        Outcome::Stuck
                    } else {
                        Outcome::Rests(instance.life.borrow().tier())
                    }
                }
            };
            engine.instances.tell(&engine, &instance, Event::Done(op, outcome));
            if let Outcome::Rests(tier) = outcome
                && down_to.is_some()
            {
                engine.instances.count_memory(&engine, &instance, tier).await;
            }
        });
    }

    /// Looks at each instance at the moment its lifecycle named, for ever.
    pub async fn keep_time(&self, engine: &Rc<Engine>) {
        loop {
            let first = self.alarms.borrow().first();
            let due = async {
                match first {
                    Some(first) => sleep_until(first.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = self.first_alarm_changed.notified() => continue,
            }
            let now = Instant::now();
            loop {
                let Some(key) = self.alarms.borrow_mut().due(now) else { break };
                let instance = self.all.borrow().get(&key).cloned();
                if let Some(instance) = instance {
                    if self.has_old_image(&instance) {
                        self.tell(engine, &instance, Event::Aged);
                    }
                    self.tell(engine, &instance, Event::Alarm);
                }
            }
        }
    }
}

/// What rests stands still, and so does what takes images in its sandbox.
async fn rouse_for_image(engine: &Rc<Engine>, body: &Body, op: Op) -> std::io::Result<()> {
    let resting = std::sync::Arc::clone(&body.resting);
    resting.begin(op.0);
    let roused = engine.on_worker(move || Ok(resting.up(op.0))).await;
    roused.map_err(|fault| std::io::Error::other(fault.message))?
}

/// What is written beside an image that is put aside here.
fn reason_of(reason: Reason) -> Option<String> {
    match reason {
        Reason::DiedSoon(after) => Some(format!("what came back from it ended after {after:?}")),
        Reason::NotRestored | Reason::Asked => None,
    }
}

fn count(engine: &Engine, instance: &Instance, end: WakeEnd) {
    let from = instance.ledger.borrow().as_ref().map_or(Tier::Cold, Ledger::from);
    engine.metrics.wakes.add([from as usize, end as usize], 1);
}

/// One run, from its start until nothing is left of it.
async fn live(
    engine: Rc<Engine>,
    instance: Rc<Instance>,
    (op, run): (Op, Run),
    how: How,
    mut end_wanted: watch::Receiver<Option<(Op, Way)>>,
) {
    let tell = |event| engine.instances.tell(&engine, &instance, event);
    let number = instance.id(run).0;
    let brought = {
        let mut coming = pin!(start::bring_up(&engine, &instance, &how, number, end_wanted.clone()));
        tokio::select! {
            brought = &mut coming => brought,
            () = lateness::until_late(&engine, &instance) => {
                engine.instances.give_place_back(&engine, &instance);
                coming.await
            }
        }
    };
    match brought {
        Ok(body) => {
            let body = Rc::new(body);
            let ended = body.ended();
            if let Some(image) = &body.image {
                instance.prove(image);
            }
            instance.body.replace(Some(Rc::clone(&body)));
            tell(Event::Done(op, Outcome::Ready));
            let keeps = {
                let life = instance.life.borrow();
                life.is_imaging() || life.images_at_rest()
            };
            if !keeps {
                body.needs_no_image();
            }
            let died = tokio::select! {
                exit = ended => Some(exit),
                _ = end_wanted.wait_for(Option::is_some) => None,
            };
            instance.body.take();
            instance.end_boosts(&engine);
            match died {
                Some(_) if engine.processes.is_closing() => body.bury(),
                Some(exit) => {
                    let why = body.why_ended(exit);
                    tracing::warn!(site = %instance.site().name, "its application ended by itself: {why}");
                    instance.last_end.replace(Some((why, Instant::now())));
                    body.bury();
                    tell(Event::Died(run));
                }
                None => end(&engine, &body, end_wanted.clone()).await,
            }
        }
        Err(why) => failed(&engine, &instance, op, why).await,
    }
    let wanted = *end_wanted.borrow();
    if let Some((op, _)) = wanted {
        tell(Event::Done(op, Outcome::Ended));
    }
}

/// Tells why there is no body.
async fn failed(engine: &Rc<Engine>, instance: &Rc<Instance>, op: Op, why: NoBody) {
    let tell = |event| engine.instances.tell(engine, instance, event);
    let site = instance.site();
    let over = |blame| Event::Done(op, Outcome::Failed(blame));
    match why {
        NoBody::GivenUp => {}
        NoBody::NotRestored(NotRestored::Nothing) => {
            tell(Event::Lost);
            tell(over(Blame::Node));
        }
        NoBody::NotRestored(NotRestored::Stale(why)) => {
            tracing::info!(site = %site.name, "its image is not used, it is started: {why}");
            instance.image_end.replace(Some(why));
            tell(Event::Lost);
            tell(over(Blame::Node));
        }
        NoBody::NotRestored(NotRestored::Unfit(why, subject)) => {
            instance.refused.replace(Some(*subject));
            instance.no_image.replace(Some(why));
            tell(Event::Unfit);
            tell(over(Blame::Node));
        }
        NoBody::NotRestored(NotRestored::PutAside(fault)) => {
            tracing::warn!(site = %site.name, "{}: it is started instead: {fault}", fault::BAD_IMAGE);
            // Until another is taken, which may not be tried.
            instance.no_image.replace(Some(fault.message.clone()));
            tell(over(Blame::Program));
        }
        NoBody::Mute(image, fault) => {
            tracing::warn!(site = %site.name, "{}: it is started instead: {fault}", fault::BAD_IMAGE);
            let is_to_blame = !instance.life.borrow().is_disturbed();
            let images = engine.instances.images.borrow().clone().filter(|_| is_to_blame);
            if let Some(images) = images {
                let why = format!("what came back from it does not answer: {}", fault.message);
                let put_aside = move || {
                    images.quarantine(&image, &why);
                    Ok(())
                };
                // Should no worker be free, it is tried again at the next wake, and put aside then.
                let _ = engine.on_worker(put_aside).await;
            }
            tell(over(Blame::Program));
        }
        NoBody::Failed(fault) | NoBody::NotRestored(NotRestored::Failed(fault)) => {
            tracing::warn!(site = %site.name, "{fault}");
            let blame = start::blame(&fault);
            instance.fault.replace(Some(fault));
            tell(over(blame));
        }
    }
}

/// Ends it, with a moment's notice as long as it may have one.
async fn end(engine: &Engine, body: &Body, mut end_wanted: watch::Receiver<Option<(Op, Way)>>) {
    let is_kill = |wanted: &Option<(Op, Way)>| matches!(wanted, Some((_, Way::Kill)));
    if is_kill(&end_wanted.borrow_and_update()) {
        body.kill();
        return body.end().await;
    }
    let ending = end_with_notice(engine, body);
    tokio::pin!(ending);
    tokio::select! {
        () = &mut ending => return,
        _ = end_wanted.wait_for(is_kill) => body.kill(),
    }
    ending.await;
}

/// What is frozen is let go on first: it ends as others do.
async fn end_with_notice(engine: &Engine, body: &Body) {
    let resting = std::sync::Arc::clone(&body.resting);
    resting.begin(u64::MAX);
    let up = engine.on_worker(move || Ok(resting.up(u64::MAX))).await;
    if let Ok(Err(error)) = up {
        tracing::warn!(%error, "{}: it cannot be let go on before its end", fault::REST);
    }
    body.end().await;
}
