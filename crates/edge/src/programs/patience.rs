//! How long a program may say nothing, and the alarm that rings then.
//!
//! A limit slows a program and refuses nothing, so silence under a limit is counted by the program's own clock: while it
//! gets on, it may use as much CPU time in silence as one without limits may take. Not here: what becomes of a
//! program whose time is up (`answer`), where its use is counted (`keeper`).

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use nagaya_cmdb::cell::{Confinement, Usage};
use nagaya_cmdb::record::Files;
use nagaya_cmdb::{Site, Tenant};
use nagaya_keeper::client::Keeper;
use nagaya_keeper::protocol::ProcessId;
use tokio::time::{Instant, Sleep};

use crate::options::Limits;

/// Longest silence of a program that gets on under a limit, however slowly.
const SLOWED_MAX: Duration = Duration::from_secs(3600);

/// How long a program may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Longest time without output and without taking any of the request's body.
    pub silence: Duration,
    /// The end of its whole run, if the site sets one.
    pub end: Option<Instant>,
}

impl Patience {
    /// `timeout_seconds` of the site bounds the whole run. Without it only silence is bounded, so that a long
    /// download or event stream is not cut.
    pub fn of(files: &Files, limits: &Limits) -> Self {
        match files.timeout_seconds {
            Some(seconds) => {
                let run = Duration::from_secs(seconds.into());
                Self { silence: run, end: Some(Instant::now() + run) }
            }
            None => Self { silence: Duration::from_millis(limits.backend.answer_ms), end: None },
        }
    }

    fn deadline(&self) -> Instant {
        let silence = Instant::now() + self.silence;
        self.end.map_or(silence, |end| end.min(silence))
    }
}

/// Asks what a program that limits slow down has used so far.
pub(super) struct Gauge {
    keeper: Rc<Keeper>,
    process: ProcessId,
}

impl Gauge {
    /// None: nothing slows this request down.
    pub fn of(
        keeper: &Rc<Keeper>,
        process: ProcessId,
        (site, tenant): (&Site, &Tenant),
        asked: &Confinement,
    ) -> Option<Self> {
        let records = [&tenant.limits, &site.limits, &site.request_limits];
        let is_limited = *asked != Confinement::default()
            || !site.demotions.is_empty()
            || !records.iter().all(|limits| limits.is_empty());
        is_limited.then(|| Self { keeper: Rc::clone(keeper), process })
    }

    fn ask(&self) -> Measuring {
        let (keeper, process) = (Rc::clone(&self.keeper), self.process);
        // Who cannot be asked has not got on.
        Box::pin(async move { keeper.measure(process).await.unwrap_or_default() })
    }
}

type Measuring = Pin<Box<dyn Future<Output = Usage>>>;

/// Rings when a program's time is up.
pub(super) struct Alarm {
    patience: Patience,
    gauge: Option<Gauge>,
    /// Made when something is waited for the first time.
    sleep: Option<Pin<Box<Sleep>>>,
    /// The program gave a sign of life since the alarm was set.
    moved: bool,
    measuring: Option<Measuring>,
    silence: Silence,
}

/// What a program that is slowed down did while it said nothing.
struct Silence {
    since: Instant,
    /// What it had used when it was last looked at, and the CPU time when it fell silent, as far as that is known.
    seen: Usage,
    began_cpu_us: u64,
}

impl Silence {
    fn new() -> Self {
        Self { since: Instant::now(), seen: Usage::default(), began_cpu_us: 0 }
    }

    fn begins(&mut self) {
        (self.since, self.began_cpu_us) = (Instant::now(), self.seen.cpu_us);
    }

    /// Whether a program that has used so much by now may go on saying nothing.
    fn may_last(&mut self, usage: Usage, patience: &Patience) -> bool {
        let gets_on = usage != std::mem::replace(&mut self.seen, usage);
        let burnt = Duration::from_micros(usage.cpu_us.saturating_sub(self.began_cpu_us));
        let is_over = patience.end.is_some_and(|end| end <= Instant::now());
        gets_on && !is_over && burnt < patience.silence && self.since.elapsed() < SLOWED_MAX
    }
}

impl Alarm {
    pub fn new(patience: Patience, gauge: Option<Gauge>) -> Self {
        Self { patience, gauge, sleep: None, moved: false, measuring: None, silence: Silence::new() }
    }

    /// A sign of life: its time begins anew.
    pub fn put_off(&mut self) {
        self.moved = true;
    }

    /// When it rings if nothing happens from now on.
    pub fn deadline(&self) -> Instant {
        self.patience.deadline()
    }

    /// Ready once the time is up.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let patience = self.patience;
        if std::mem::take(&mut self.moved) {
            self.silence.begins();
            self.measuring = None;
            if let Some(sleep) = &mut self.sleep {
                sleep.as_mut().reset(patience.deadline());
            }
        }
        loop {
            if let Some(measuring) = &mut self.measuring {
                let usage = ready!(measuring.as_mut().poll(cx));
                self.measuring = None;
                if !self.silence.may_last(usage, &patience) {
                    return Poll::Ready(());
                }
                if let Some(sleep) = &mut self.sleep {
                    sleep.as_mut().reset(patience.deadline());
                }
            }
            let made = || Box::pin(tokio::time::sleep_until(patience.deadline()));
            ready!(self.sleep.get_or_insert_with(made).as_mut().poll(cx));
            match &self.gauge {
                Some(gauge) => self.measuring = Some(gauge.ask()),
                None => return Poll::Ready(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(seconds: u64) -> Usage {
        Usage { cpu_us: seconds * 1_000_000, ..Usage::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slowed_program_has_its_own_clock() {
        let patience = Patience { silence: Duration::from_secs(60), end: None };
        let mut silence = Silence::new();
        assert!(silence.may_last(cpu(20), &patience));
        assert!(silence.may_last(Usage { read_bytes: 1, ..cpu(20) }, &patience), "it read something");
        assert!(!silence.may_last(Usage { read_bytes: 1, ..cpu(20) }, &patience), "it did nothing at all");
        assert!(!silence.may_last(cpu(60), &patience), "without limits its time would be up too");
        silence.begins();
        assert!(silence.may_last(cpu(70), &patience));
        tokio::time::advance(SLOWED_MAX).await;
        assert!(!silence.may_last(cpu(71), &patience));
    }

    #[tokio::test(start_paused = true)]
    async fn the_sites_own_end_holds_for_slowed_programs_too() {
        let end = Instant::now() + Duration::from_secs(5);
        let patience = Patience { silence: Duration::from_secs(5), end: Some(end) };
        let mut silence = Silence::new();
        assert!(silence.may_last(cpu(1), &patience));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(!silence.may_last(cpu(2), &patience));
    }
}
