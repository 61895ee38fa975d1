//! Detects whether one other node is alive, driven by the requests that need it.
//!
//! Anything that arrives from the node counts. Otherwise all interested requests share one probe at
//! a time, a group of at most [`DATAGRAMS_MAX`] datagrams. It waits for a time derived from the
//! measured round trips, as TCP computes it (RFC 6298). It never waits longer than a tenth of a
//! second. No node is probed in the background: a node that no request needs is neither alive nor
//! dead.
//!
//! Three outcomes are distinct: the node answers, its host refuses for it, or it is silent. Slow is
//! not dead. A late reply takes the verdict back, counts a false alarm and widens the bound. So one
//! slow spell does not cause a storm.
//!
//! Not here: sockets, timers and the forms of a probe (`nagaya-edge`), the reaction to silence
//! (`relocation`).

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

use crate::Moment;

/// A node heard from within this time is not probed.
pub const FRESH: Duration = Duration::from_millis(5);

/// Longest time that a probe waits for a reply. It limits a visitor's loss, and it applies while
/// nothing was measured.
pub const BOUND_MAX: Duration = Duration::from_millis(100);

/// Shortest wait. A neighbour answers in less than a millisecond, but a thread of a busy machine
/// waits several for its turn.
pub const BOUND_MIN: Duration = Duration::from_millis(20);

/// Added to the measured time: timers, and threads that wait for their turn on both sides.
pub const GRANULARITY: Duration = Duration::from_millis(5);

/// Datagrams of one probe: two lost in a row are not silence.
pub const DATAGRAMS_MAX: u8 = 3;

/// How long a finding against a node holds without a new probe. It doubles with each further silent
/// probe in a row, up to the longest. So few requests wait to learn again that a node is gone.
pub const REMEMBERED: Duration = Duration::from_millis(250);
pub const REMEMBERED_LONGEST: Duration = Duration::from_secs(2);

/// The same for a refusal. A host that refuses replies at once, so another probe costs little, and
/// its edge comes back soon.
pub const REFUSAL_REMEMBERED: Duration = Duration::from_millis(100);

/// How long a planner sees a finding against a node, unless the node was heard from since. There
/// are other nodes, and planning this one again at each turn goes round in circles.
pub const AVOIDED: Duration = Duration::from_secs(2);

/// A false alarm doubles the bound, this often at most. Each of these periods without one takes one
/// doubling back.
const WIDENED_MAX: u32 = 3;
const CALM: Duration = Duration::from_secs(10);

/// Probes whose verdict can still be queried. It outlasts the time in which a waiting request
/// looks.
const VERDICTS_KEPT: usize = 8;

/// One probe of one peer. Numbers are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerProbe(pub u64);

/// Instruction for a request that needs the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbePlan {
    /// The peer was heard from just now.
    Fresh,
    /// The caller sends the first datagram now, and the others when [`PeerState::resend_at`] says.
    /// It calls [`PeerState::expired`] at `until`.
    Send { probe: PeerProbe, until: Moment },
    /// A probe is in flight, or has just found something against the peer; then `until` has passed.
    /// See [`PeerState::verdict`].
    Shared { probe: PeerProbe, until: Moment },
}

/// Result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeResult {
    Pending,
    /// A reply, or anything else from the peer, arrived.
    Answers,
    /// The peer's host is up, its edge is not.
    Refuses,
    /// Nothing came in time.
    Silent,
}

/// State of one other node.
#[derive(Debug, Clone)]
pub struct PeerState {
    bound_max: Duration,
    heard: Option<Moment>,
    /// Smoothed round trip and its variation; `None` before the first.
    measured: Option<(Duration, Duration)>,
    under_way: Option<UnderWay>,
    /// The latest verdicts, the newest at the end.
    verdicts: VecDeque<(PeerProbe, ProbeResult)>,
    next: u64,
    against: Option<PeerFinding>,
    /// The latest finding against it and its time; `None` once it was heard from.
    avoided: Option<(ProbeResult, Moment)>,
    /// It was heard from after a finding against it, and the caller does not know yet.
    has_returned: bool,
    /// Silent probes in a row.
    silences: u32,
    /// Doublings of the bound as of the last false alarm.
    widened: u32,
    widened_at: Moment,
    false_alarms: u64,
}

#[derive(Debug, Clone, Copy)]
struct UnderWay {
    probe: PeerProbe,
    until: Moment,
    bound: Duration,
    sent: u8,
    last_sent: Moment,
    gap: Duration,
    /// The caller was away when it ended, so it got a little more time.
    is_extended: bool,
}

/// The last probe's finding against the peer, and until when it holds.
#[derive(Debug, Clone, Copy)]
struct PeerFinding {
    probe: PeerProbe,
    ended: Moment,
    until: Moment,
}

impl Default for PeerState {
    fn default() -> Self {
        Self::new(BOUND_MAX)
    }
}

impl PeerState {
    /// Creates a peer of which nothing is known. `bound_max` is the operator's, at most
    /// [`BOUND_MAX`].
    pub fn new(bound_max: Duration) -> Self {
        Self {
            bound_max: bound_max.min(BOUND_MAX),
            heard: None,
            measured: None,
            under_way: None,
            verdicts: VecDeque::with_capacity(VERDICTS_KEPT),
            next: 1,
            against: None,
            avoided: None,
            has_returned: false,
            silences: 0,
            widened: 0,
            widened_at: Moment::default(),
            false_alarms: 0,
        }
    }

    /// Notes that anything arrived from the peer, for example bytes of a response.
    pub fn heard(&mut self, now: Moment) {
        self.heard = Some(self.heard.map_or(now, |before| before.max(now)));
        if let Some(probe) = self.under_way.take().map(|under_way| under_way.probe) {
            self.judge(probe, ProbeResult::Answers);
        }
        if let Some(against) = self.against.take()
            && self.verdict(against.probe) == ProbeResult::Silent
        {
            self.false_alarm(now, against.probe);
        }
        self.silences = 0;
        self.has_returned |= self.avoided.take().is_some();
    }

    /// Returns whether the peer was heard from after a finding against it. Returns true once for
    /// each time.
    pub fn take_return(&mut self) -> bool {
        std::mem::take(&mut self.has_returned)
    }

    /// Returns what a request that needs the peer must do.
    pub fn ask(&mut self, now: Moment) -> ProbePlan {
        if self.heard.is_some_and(|heard| now.since(heard) < FRESH) {
            return ProbePlan::Fresh;
        }
        if let Some(UnderWay { probe, until, .. }) = self.under_way {
            if now < until {
                return ProbePlan::Shared { probe, until };
            }
            // No caller waited for its end, so it is unknown whether a reply came in time. It says
            // nothing.
            self.under_way = None;
            self.judge(probe, ProbeResult::Answers);
        }
        if let Some(against) = self.against
            && now < against.until
        {
            return ProbePlan::Shared { probe: against.probe, until: against.ended };
        }
        self.send(now)
    }

    /// Makes the next request send a new probe, whatever the last one has found.
    pub fn forget_findings(&mut self) {
        self.against = None;
    }

    /// Notes the reply to one of the probe's datagrams, which was sent at `sent_at`. It may be
    /// late.
    pub fn answered(&mut self, now: Moment, probe: PeerProbe, sent_at: Moment) {
        self.measure(now.since(sent_at));
        self.heard(now);
        // It is not the newest one: it was silent when a caller acted on it.
        if self.verdict_kept(probe) == Some(ProbeResult::Silent) {
            self.false_alarm(now, probe);
        }
    }

    /// Notes that the peer's host says that nothing listens there. For a probe that has ended, this
    /// changes nothing.
    pub fn refused(&mut self, now: Moment, probe: PeerProbe) {
        if self.under_way.is_none_or(|under_way| under_way.probe != probe) {
            return;
        }
        self.under_way = None;
        self.silences = 0;
        self.judge(probe, ProbeResult::Refuses);
        self.avoided = Some((ProbeResult::Refuses, now));
        self.against = Some(PeerFinding { probe, ended: now, until: now + REFUSAL_REMEMBERED });
    }

    /// Ends the probe in flight if its time is over, and returns the one that found silence. The
    /// caller first reads all replies in its sockets. A caller that is far too late was away itself
    /// and accuses no node. It gets `None` once, and a new [`PeerState::until`].
    pub fn expired(&mut self, now: Moment) -> Option<PeerProbe> {
        let under_way = self.under_way.as_mut()?;
        if now < under_way.until {
            return None;
        }
        if now.since(under_way.until) > under_way.bound && !under_way.is_extended {
            under_way.is_extended = true;
            under_way.until = now + BOUND_MIN;
            return None;
        }
        let probe = under_way.probe;
        self.under_way = None;
        let remembered = REMEMBERED * 2u32.pow(self.silences.min(8));
        self.silences += 1;
        self.judge(probe, ProbeResult::Silent);
        self.avoided = Some((ProbeResult::Silent, now));
        self.against =
            Some(PeerFinding { probe, ended: now, until: now + remembered.min(REMEMBERED_LONGEST) });
        Some(probe)
    }

    /// Returns the verdict of a probe. For one long past it is `Answers`, as nothing is held
    /// against the peer now.
    pub fn verdict(&self, probe: PeerProbe) -> ProbeResult {
        if self.under_way.is_some_and(|under_way| under_way.probe == probe) {
            return ProbeResult::Pending;
        }
        self.verdict_kept(probe).unwrap_or(ProbeResult::Answers)
    }

    /// Returns when the next datagram of the probe in flight must be sent, if there is another one.
    pub fn resend_at(&self) -> Option<Moment> {
        let under_way = self.under_way.as_ref()?;
        let at = under_way.last_sent + under_way.gap;
        (under_way.sent < DATAGRAMS_MAX && at < under_way.until).then_some(at)
    }

    /// Notes that another datagram of the probe in flight has been sent.
    pub fn resent(&mut self, now: Moment) {
        if let Some(under_way) = &mut self.under_way {
            under_way.sent = under_way.sent.saturating_add(1);
            under_way.last_sent = now;
        }
    }

    /// Returns until when the probe in flight waits.
    pub fn until(&self) -> Option<Moment> {
        self.under_way.map(|under_way| under_way.until)
    }

    /// Returns a recent finding against the peer, for the planner. `None` if there is none.
    pub fn known(&self, now: Moment) -> Option<ProbeResult> {
        self.avoided.filter(|(_, found)| now.since(*found) < AVOIDED).map(|(verdict, _)| verdict)
    }

    /// Returns how long a probe that begins now waits.
    pub fn bound(&self, now: Moment) -> Duration {
        let Some((srtt, rttvar)) = self.measured else { return self.bound_max };
        let calm = now.since(self.widened_at).as_nanos() / CALM.as_nanos();
        let widened = self.widened.saturating_sub(u32::try_from(calm).unwrap_or(u32::MAX));
        let bound = (srtt + 4 * rttvar + GRANULARITY) * 2u32.pow(widened);
        bound.max(BOUND_MIN).min(self.bound_max)
    }

    /// Returns the interval between probes while requests wait for the peer: half of a probe's
    /// wait. So a peer that dies during a slow request is detected within one and a half waits at
    /// most.
    pub fn again(&self, now: Moment) -> Duration {
        self.bound(now) / 2
    }

    /// Returns the smoothed round trip, once there is one.
    pub fn round_trip(&self) -> Option<Duration> {
        self.measured.map(|(srtt, _)| srtt)
    }

    pub fn last_heard(&self) -> Option<Moment> {
        self.heard
    }

    /// Returns the number of probes that found silence although a reply came after all.
    pub fn false_alarms(&self) -> u64 {
        self.false_alarms
    }

    fn send(&mut self, now: Moment) -> ProbePlan {
        let bound = self.bound(now);
        let probe = PeerProbe(self.next);
        self.next += 1;
        // The last datagram leaves early enough for its reply to come back in time.
        let gap = bound.saturating_sub(self.round_trip().unwrap_or_default()) / u32::from(DATAGRAMS_MAX);
        let until = now + bound;
        self.under_way =
            Some(UnderWay { probe, until, bound, sent: 1, last_sent: now, gap, is_extended: false });
        self.against = None;
        ProbePlan::Send { probe, until }
    }

    /// Follows RFC 6298, section 2, except for a sample longer than any bound: how much longer says
    /// nothing.
    fn measure(&mut self, sample: Duration) {
        let sample = sample.min(self.bound_max);
        self.measured = Some(match self.measured {
            None => (sample, sample / 2),
            Some((srtt, rttvar)) => {
                let off = srtt.abs_diff(sample);
                ((srtt * 7 + sample) / 8, (rttvar * 3 + off) / 4)
            }
        });
    }

    fn judge(&mut self, probe: PeerProbe, verdict: ProbeResult) {
        if let Some(kept) = self.verdicts.iter_mut().find(|(kept, _)| *kept == probe) {
            kept.1 = verdict;
            return;
        }
        if self.verdicts.len() == VERDICTS_KEPT {
            self.verdicts.pop_front();
        }
        self.verdicts.push_back((probe, verdict));
    }

    fn verdict_kept(&self, probe: PeerProbe) -> Option<ProbeResult> {
        self.verdicts.iter().find(|(kept, _)| *kept == probe).map(|(_, verdict)| *verdict)
    }

    fn false_alarm(&mut self, now: Moment, probe: PeerProbe) {
        self.judge(probe, ProbeResult::Answers);
        self.false_alarms += 1;
        let calm = now.since(self.widened_at).as_nanos() / CALM.as_nanos();
        let left = self.widened.saturating_sub(u32::try_from(calm).unwrap_or(u32::MAX));
        self.widened = (left + 1).min(WIDENED_MAX);
        self.widened_at = now;
    }
}
