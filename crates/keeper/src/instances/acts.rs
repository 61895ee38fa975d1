//! What an operator has done to an instance, and the JSON answer.
//!
//! Not here: the question's way here (`feed`, `server`), whether it makes sense now (`lifecycle`).

use std::rc::Rc;
use std::time::Duration;

use nagaya_cmdb::SiteName;
use nagaya_cmdb::cell::CpuQuota;
use nagaya_cmdb::instance::{Act, Tier};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::lifecycle::{Event, Unfit};
use super::{Instance, Instances, WAKE_MAX};
use crate::cells::NoLimit;
use crate::engine::Engine;
use crate::fault::Fault;
use crate::image;
use crate::protocol::Failure;

/// How long a step of rest or an end may take until the answer says that it goes on.
const STEP_MAX: Duration = Duration::from_secs(30);

impl Instances {
    /// `null` where no application has this name.
    pub async fn do_act(&self, engine: &Rc<Engine>, site: &str, act: Act) -> Value {
        let Some(instance) = SiteName::new(site).ok().and_then(|name| self.of_site(engine, &name).ok())
        else {
            return Value::Null;
        };
        let done = match act {
            Act::Wake => self.wake(engine, &instance).await,
            Act::Rest { to } => self.rest(engine, &instance, to).await,
            Act::Image => self.image(engine, &instance).await,
            Act::Restart => self.restart(engine, &instance).await,
            Act::Stop => self.wish(engine, &instance, Event::Stop, STEP_MAX).await,
            Act::Release { within_ms } => {
                match self.release(engine, &instance, Duration::from_millis(within_ms)).await {
                    Ok((epoch, cut)) => return json!({"ok": true, "epoch": epoch, "cut": cut}),
                    Err(fault) => Err(Unwilling::Fault(fault)),
                }
            }
            Act::LimitCpu { thousandths } => return limit_cpu(engine, &instance, thousandths),
            Act::Inspect => Ok(()),
            Act::Logs => {
                let journal = instance.journal();
                journal.recall().await;
                return json!({"ok": true, "lines": journal.lines()});
            }
        };
        match done {
            Ok(()) => {
                let mut row = self.inspect(engine, &instance).await;
                row["ok"] = json!(true);
                row
            }
            Err(Unwilling::Fault(fault)) => json!({"error": fault.message, "code": fault.code.to_string()}),
            Err(Unwilling::Unfit(unfit)) => json!({"error": unfit.to_string()}),
            Err(Unwilling::GoesOn) => {
                json!({"error": "it takes long; `nagaya instance show` tells how it goes on"})
            }
        }
    }

    /// It rests again by itself as if a request had come.
    async fn wake(&self, engine: &Rc<Engine>, instance: &Instance) -> Result<(), Unwilling> {
        let name = instance.site().name.clone();
        self.use_site(engine, &name, None).await.map(drop).map_err(Unwilling::Fault)
    }

    async fn rest(
        &self,
        engine: &Rc<Engine>,
        instance: &Rc<Instance>,
        to: Option<Tier>,
    ) -> Result<(), Unwilling> {
        let now = instance.life.borrow().tier();
        let next = Tier::ALL.into_iter().rev().find(|tier| *tier < now).unwrap_or(Tier::Cold);
        self.wish(engine, instance, Event::Rest(to.unwrap_or(next)), STEP_MAX).await
    }

    async fn image(&self, engine: &Rc<Engine>, instance: &Rc<Instance>) -> Result<(), Unwilling> {
        instance.life.borrow().fits(Event::Retake).map_err(Unwilling::Unfit)?;
        self.forget_refusal(engine, instance).await;
        self.wish(engine, instance, Event::Retake, WAKE_MAX).await?;
        if instance.life.borrow().has_image() {
            return Ok(());
        }
        if let Some(fault) = instance.fault.borrow().clone() {
            return Err(Unwilling::Fault(fault));
        }
        let note = instance.no_image.borrow().clone();
        Err(note.map_or(Unwilling::Unfit(Unfit::NoImages), |note| {
            Unwilling::Fault(Fault::new(Failure::Broken, image::UNFIT, note))
        }))
    }

    /// Whatever it is of: not used again.
    async fn remove_image(&self, engine: &Rc<Engine>, instance: &Instance) {
        let images = self.images.borrow().clone();
        let housing = self.housing(engine, &instance.site().name).await;
        let (Some(images), Ok(housing)) = (images, housing) else { return };
        let tenant = housing.tenant.name.clone();
        let remove = move || {
            images.remove(&housing.present_subject()?);
            Ok(())
        };
        if let Err(fault) = engine.on_worker_for(&tenant, remove).await {
            tracing::warn!(site = %instance.site().name, "its image cannot be removed: {fault}");
        }
    }

    async fn restart(&self, engine: &Rc<Engine>, instance: &Rc<Instance>) -> Result<(), Unwilling> {
        // Before: what starts now has an image of its own soon.
        self.remove_image(engine, instance).await;
        instance.forget_troubles();
        self.wish(engine, instance, Event::Restart, WAKE_MAX).await?;
        // Its next request would say the same.
        match instance.fault.borrow().clone() {
            Some(fault) => Err(Unwilling::Fault(fault)),
            None => Ok(()),
        }
    }

    /// Returns once it is done.
    async fn wish(
        &self,
        engine: &Rc<Engine>,
        instance: &Rc<Instance>,
        wish: Event,
        within: Duration,
    ) -> Result<(), Unwilling> {
        instance.life.borrow().fits(wish).map_err(Unwilling::Unfit)?;
        self.tell(engine, instance, wish);
        let done = async {
            loop {
                let changed = instance.changed.notified();
                if instance.life.borrow().doing().is_none() {
                    return;
                }
                changed.await;
            }
        };
        timeout(within, done).await.map_err(|_| Unwilling::GoesOn)
    }
}

fn limit_cpu(engine: &Engine, instance: &Instance, thousandths: Option<u32>) -> Value {
    let site = instance.site();
    match engine.cells().limit_cpu(&site.name, thousandths.map(CpuQuota::of_core)) {
        Ok(()) => json!({"ok": true}),
        Err(NoLimit) => {
            json!({"error": format!("the cell of '{}' has no CPU limit that could be changed", site.name)})
        }
    }
}

/// Why it was not done.
enum Unwilling {
    Fault(Fault),
    Unfit(Unfit),
    GoesOn,
}
