//! Limits the time of a program without output, and ends the wait then.
//!
//! A resource limit slows a program and refuses nothing. So silence under a limit is measured by
//! the program's own CPU time. While the program makes progress, it may use as much CPU time in
//! silence as an unlimited one. Not here: a program whose time is up (`answer`), counting its
//! usage (`keeper`).

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use nagaya_keeper_api::client::KeeperClient;
use nagaya_keeper_api::protocol::ProcessId;
use nagaya_records::cell::{Confinement, RequestUsage};
use nagaya_records::record::{FileRoot, LINGER_SECONDS};
use nagaya_records::{Site, Tenant};
use tokio::time::{Instant, Sleep};

use crate::options::EdgeLimits;

/// Longest silence of a program that makes progress under a limit, however slowly.
const SLOWED_MAX: Duration = Duration::from_secs(3600);

/// Time limits of a program.
#[derive(Debug, Clone, Copy)]
pub struct ProgramTimeouts {
    /// Longest time without output and without taking any of the request's body.
    pub silence: Duration,
    /// The end of its whole run, if the site sets one.
    pub end: Option<Instant>,
    /// Time for which it may go on after its client has left.
    pub linger: Duration,
}

/// Time limits of a program whose client has left, or has got its whole answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LingerTimes {
    /// Until then it goes on as if its client were there: its output is read and dropped.
    pub read_until: Instant,
    /// Until then it goes on with its output closed.
    pub end: Instant,
}

/// Time for which a program goes on undisturbed after its client has left. It is long enough for
/// an ordinary page. Ending and starting a PHP worker costs more than letting it finish, and a
/// client could cause that at will.
pub(super) const UNDISTURBED_MAX: Duration = Duration::from_secs(1);

impl ProgramTimeouts {
    /// `timeout_seconds` of the site limits the whole run. Without it only silence is limited, so
    /// that a long download or event stream is not cut.
    pub fn of(files: &FileRoot, limits: &EdgeLimits) -> Self {
        let linger = Duration::from_secs(files.linger_seconds.unwrap_or(LINGER_SECONDS).into());
        match files.timeout_seconds {
            Some(seconds) => {
                let run = Duration::from_secs(seconds.into());
                Self { silence: run, end: Some(Instant::now() + run), linger }
            }
            None => Self { silence: Duration::from_millis(limits.backend.answer_ms), end: None, linger },
        }
    }

    fn linger_end(&self) -> Instant {
        let end = Instant::now() + self.linger;
        self.end.map_or(end, |run| run.min(end))
    }

    fn deadline(&self) -> Instant {
        let silence = Instant::now() + self.silence;
        self.end.map_or(silence, |end| end.min(silence))
    }
}

/// Reads the usage so far of a program that limits slow down.
pub(super) struct UsageGauge {
    keeper: Rc<KeeperClient>,
    process: ProcessId,
}

impl UsageGauge {
    /// Returns `None` if nothing slows this request down.
    pub fn of(
        keeper: &Rc<KeeperClient>,
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

    fn ask(&self) -> UsageFuture {
        let (keeper, process) = (Rc::clone(&self.keeper), self.process);
        // Without an answer, the program counts as making no progress.
        Box::pin(async move { keeper.measure(process).await.unwrap_or_default() })
    }
}

type UsageFuture = Pin<Box<dyn Future<Output = RequestUsage>>>;

/// Rings when a program's time is up.
pub(super) struct ProgramAlarm {
    patience: ProgramTimeouts,
    gauge: Option<UsageGauge>,
    /// Created at the first wait.
    sleep: Option<Pin<Box<Sleep>>>,
    /// The program gave a sign of life since the alarm was set.
    moved: bool,
    measuring: Option<UsageFuture>,
    silence: ProgramSilence,
}

/// Progress of a slowed program while it was silent.
struct ProgramSilence {
    since: Instant,
    /// Usage at the last check. `began_cpu_us` is the CPU time at the beginning of the silence.
    /// Both as far as they are known.
    seen: RequestUsage,
    began_cpu_us: u64,
}

impl ProgramSilence {
    fn new() -> Self {
        Self { since: Instant::now(), seen: RequestUsage::default(), began_cpu_us: 0 }
    }

    fn begins(&mut self) {
        (self.since, self.began_cpu_us) = (Instant::now(), self.seen.cpu_us);
    }

    /// Returns whether a program with this usage may stay silent any longer.
    fn may_last(&mut self, usage: RequestUsage, patience: &ProgramTimeouts) -> bool {
        let gets_on = usage != std::mem::replace(&mut self.seen, usage);
        let burnt = Duration::from_micros(usage.cpu_us.saturating_sub(self.began_cpu_us));
        let is_over = patience.end.is_some_and(|end| end <= Instant::now());
        gets_on && !is_over && burnt < patience.silence && self.since.elapsed() < SLOWED_MAX
    }
}

impl ProgramAlarm {
    pub fn new(patience: ProgramTimeouts, gauge: Option<UsageGauge>) -> Self {
        Self { patience, gauge, sleep: None, moved: false, measuring: None, silence: ProgramSilence::new() }
    }

    /// Restarts the time after a sign of life.
    pub fn put_off(&mut self) {
        self.moved = true;
    }

    /// Returns the time limits from now on, because its client has left.
    pub fn linger(&self) -> LingerTimes {
        let read_until = self.patience.deadline().min(Instant::now() + UNDISTURBED_MAX);
        LingerTimes { read_until, end: self.patience.linger_end().max(read_until) }
    }

    /// Returns the time limits, because its client has got its whole answer.
    pub fn linger_complete(&self) -> LingerTimes {
        let end = self.patience.deadline().max(self.patience.linger_end());
        LingerTimes { read_until: end, end }
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

    fn cpu(seconds: u64) -> RequestUsage {
        RequestUsage { cpu_us: seconds * 1_000_000, ..RequestUsage::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slowed_program_has_its_own_clock() {
        let patience =
            ProgramTimeouts { silence: Duration::from_secs(60), end: None, linger: Duration::ZERO };
        let mut silence = ProgramSilence::new();
        assert!(silence.may_last(cpu(20), &patience));
        assert!(silence.may_last(RequestUsage { read_bytes: 1, ..cpu(20) }, &patience), "it read something");
        assert!(
            !silence.may_last(RequestUsage { read_bytes: 1, ..cpu(20) }, &patience),
            "it did nothing at all"
        );
        assert!(!silence.may_last(cpu(60), &patience), "without limits its time would be up too");
        silence.begins();
        assert!(silence.may_last(cpu(70), &patience));
        tokio::time::advance(SLOWED_MAX).await;
        assert!(!silence.may_last(cpu(71), &patience));
    }

    #[tokio::test(start_paused = true)]
    async fn the_sites_own_end_holds_for_slowed_programs_too() {
        let end = Instant::now() + Duration::from_secs(5);
        let patience =
            ProgramTimeouts { silence: Duration::from_secs(5), end: Some(end), linger: Duration::ZERO };
        let mut silence = ProgramSilence::new();
        assert!(silence.may_last(cpu(1), &patience));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(!silence.may_last(cpu(2), &patience));
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_lingers_within_its_sites_bounds() {
        let of = |text: &str| {
            let files: FileRoot = serde_json::from_str(&format!(r#"{{"root":"w"{text}}}"#)).unwrap();
            let linger =
                ProgramAlarm::new(ProgramTimeouts::of(&files, &EdgeLimits::default()), None).linger();
            let now = Instant::now();
            (linger.read_until - now, linger.end - now)
        };
        let seconds = Duration::from_secs;
        assert_eq!(of(""), (UNDISTURBED_MAX, seconds(30)));
        assert_eq!(of(r#","linger_seconds":0"#), (UNDISTURBED_MAX, UNDISTURBED_MAX));
        assert_eq!(of(r#","linger_seconds":3600"#), (UNDISTURBED_MAX, seconds(3600)));
        assert_eq!(of(r#","linger_seconds":3600,"timeout_seconds":5"#), (UNDISTURBED_MAX, seconds(5)));
    }
}
