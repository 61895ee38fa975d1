//! Whether one other node is there, found out by the requests that need it.
//!
//! Anything that comes from it counts. Otherwise one probe at a time, a group of at most [`DATAGRAMS_MAX`] datagrams, is shared by
//! all requests that want to know. It waits no longer than what was measured of the way there makes likely, as TCP reckons it
//! (RFC 6298), and never longer than a tenth of a second. Nobody is probed in the background: a node that no request needs is
//! neither alive nor dead.
//!
//! Three outcomes are kept apart: it answers; its host refuses for it; it is silent. Slow is not dead: an answer that comes late
//! takes the verdict back, counts a false alarm and makes the bound wider, so that one slow spell is not a storm.
//!
//! Not here: sockets, timers and the forms of a probe (`nagaya-edge`), what follows from silence (`relocation`).

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

use crate::Moment;

/// Heard from within this: not asked.
pub const FRESH: Duration = Duration::from_millis(5);

/// Longest that a probe waits for an answer: what a visitor can lose by it, and what is used while nothing was measured.
pub const BOUND_MAX: Duration = Duration::from_millis(100);

/// Shortest. The way to a neighbour takes less than a millisecond, but a thread of a busy machine waits its turn for several.
pub const BOUND_MIN: Duration = Duration::from_millis(20);

/// Added to what is measured: timers, and threads that wait for their turn on both sides.
pub const GRANULARITY: Duration = Duration::from_millis(5);

/// Datagrams of one probe: two lost in a row are no silence.
pub const DATAGRAMS_MAX: u8 = 3;

/// For how long what a probe has found against a node holds without asking again. It is doubled with each further probe in a row
/// that hears nothing, up to the longest: of a node that is gone, few requests wait to hear that once more.
pub const REMEMBERED: Duration = Duration::from_millis(250);
pub const REMEMBERED_LONGEST: Duration = Duration::from_secs(2);

/// A host that refuses says so at once, so asking it again costs little, and its edge comes back soon.
pub const REFUSAL_REMEMBERED: Duration = Duration::from_millis(100);

/// For how long a planner is told of what was found against a node, unless it was heard from since: there are other nodes, and who
/// asks this one again at each turn goes round in circles.
pub const AVOIDED: Duration = Duration::from_secs(2);

/// A false alarm doubles the bound, this often at most; each of these spells without one takes one doubling back.
const WIDENED_MAX: u32 = 3;
const CALM: Duration = Duration::from_secs(10);

/// Probes whose verdict can still be asked for. One lasts longer than whoever waits for it needs to look.
const VERDICTS_KEPT: usize = 8;

/// One probe of one peer. Numbers are not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Probe(pub u64);

/// What a request that needs the peer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// It was heard from just now.
    Fresh,
    /// The caller sends the first datagram now, the others when [`Peer::resend_at`] says, and calls [`Peer::expired`] at `until`.
    Send { probe: Probe, until: Moment },
    /// One is under way, or has just found something against the peer, in which case `until` has passed: see [`Peer::verdict`].
    Shared { probe: Probe, until: Moment },
}

/// What a probe has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Pending,
    /// It, or anything else from the peer, was heard.
    Answers,
    /// The peer's host is there, its edge is not.
    Refuses,
    /// Nothing came in time.
    Silent,
}

/// What is known of one other node.
#[derive(Debug, Clone)]
pub struct Peer {
    bound_max: Duration,
    heard: Option<Moment>,
    /// Smoothed round trip and its variation; `None` before the first.
    measured: Option<(Duration, Duration)>,
    under_way: Option<UnderWay>,
    /// The last ones, the newest at the end.
    verdicts: VecDeque<(Probe, Verdict)>,
    next: u64,
    against: Option<Against>,
    /// What was last found against it, and when; nothing once it was heard from.
    avoided: Option<(Verdict, Moment)>,
    /// It was heard from after something was found against it, and nobody was told yet.
    has_returned: bool,
    /// Probes in a row that heard nothing.
    silences: u32,
    /// Doublings of the bound as of the last false alarm.
    widened: u32,
    widened_at: Moment,
    false_alarms: u64,
}

#[derive(Debug, Clone, Copy)]
struct UnderWay {
    probe: Probe,
    until: Moment,
    bound: Duration,
    sent: u8,
    last_sent: Moment,
    gap: Duration,
    /// The caller was away when it was over, so it was given a little longer.
    is_extended: bool,
}

/// What the last probe has found against the peer, and until when that is believed.
#[derive(Debug, Clone, Copy)]
struct Against {
    probe: Probe,
    ended: Moment,
    until: Moment,
}

impl Default for Peer {
    fn default() -> Self {
        Self::new(BOUND_MAX)
    }
}

impl Peer {
    /// One that nothing is known of. `bound_max` is the operator's, and no more than [`BOUND_MAX`].
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

    /// Anything has come from the peer, e.g. bytes of a response.
    pub fn heard(&mut self, now: Moment) {
        self.heard = Some(self.heard.map_or(now, |before| before.max(now)));
        if let Some(probe) = self.under_way.take().map(|under_way| under_way.probe) {
            self.judge(probe, Verdict::Answers);
        }
        if let Some(against) = self.against.take()
            && self.verdict(against.probe) == Verdict::Silent
        {
            self.false_alarm(now, against.probe);
        }
        self.silences = 0;
        self.has_returned |= self.avoided.take().is_some();
    }

    /// Whether it was heard from after something was found against it. Said once for each time.
    pub fn take_return(&mut self) -> bool {
        std::mem::take(&mut self.has_returned)
    }

    /// A request needs the peer.
    pub fn ask(&mut self, now: Moment) -> Ask {
        if self.heard.is_some_and(|heard| now.since(heard) < FRESH) {
            return Ask::Fresh;
        }
        if let Some(UnderWay { probe, until, .. }) = self.under_way {
            if now < until {
                return Ask::Shared { probe, until };
            }
            // Nobody was left to wait for its end, so nobody knows whether it was heard in time: it says nothing.
            self.under_way = None;
            self.judge(probe, Verdict::Answers);
        }
        if let Some(against) = self.against
            && now < against.until
        {
            return Ask::Shared { probe: against.probe, until: against.ended };
        }
        self.send(now)
    }

    /// Who asks next wants it asked, whatever the last probe has found.
    pub fn forget_findings(&mut self) {
        self.against = None;
    }

    /// The answer to one of the probe's datagrams, which was sent at `sent_at`. It may be late.
    pub fn answered(&mut self, now: Moment, probe: Probe, sent_at: Moment) {
        self.measure(now.since(sent_at));
        self.heard(now);
        // Not the newest one: it was silent when somebody acted on it all the same.
        if self.verdict_kept(probe) == Some(Verdict::Silent) {
            self.false_alarm(now, probe);
        }
    }

    /// The peer's host says that nobody listens there. Of a probe that has ended it says nothing new.
    pub fn refused(&mut self, now: Moment, probe: Probe) {
        if self.under_way.is_none_or(|under_way| under_way.probe != probe) {
            return;
        }
        self.under_way = None;
        self.silences = 0;
        self.judge(probe, Verdict::Refuses);
        self.avoided = Some((Verdict::Refuses, now));
        self.against = Some(Against { probe, ended: now, until: now + REFUSAL_REMEMBERED });
    }

    /// Ends the probe under way if its time is over, and says which one has found silence. The caller takes in all answers that lie
    /// in its sockets first. Who is far too late to ask has been away itself and accuses nobody: it gets `None` once, and
    /// a new [`Peer::until`].
    pub fn expired(&mut self, now: Moment) -> Option<Probe> {
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
        self.judge(probe, Verdict::Silent);
        self.avoided = Some((Verdict::Silent, now));
        self.against = Some(Against { probe, ended: now, until: now + remembered.min(REMEMBERED_LONGEST) });
        Some(probe)
    }

    /// What has become of a probe. Of one long past: that it answers, for nothing is held against it now.
    pub fn verdict(&self, probe: Probe) -> Verdict {
        if self.under_way.is_some_and(|under_way| under_way.probe == probe) {
            return Verdict::Pending;
        }
        self.verdict_kept(probe).unwrap_or(Verdict::Answers)
    }

    /// When the next datagram of the probe under way is to be sent, if there is to be another one.
    pub fn resend_at(&self) -> Option<Moment> {
        let under_way = self.under_way.as_ref()?;
        let at = under_way.last_sent + under_way.gap;
        (under_way.sent < DATAGRAMS_MAX && at < under_way.until).then_some(at)
    }

    /// Another datagram of the probe under way has been sent.
    pub fn resent(&mut self, now: Moment) {
        if let Some(under_way) = &mut self.under_way {
            under_way.sent = under_way.sent.saturating_add(1);
            under_way.last_sent = now;
        }
    }

    /// Until when the probe under way waits.
    pub fn until(&self) -> Option<Moment> {
        self.under_way.map(|under_way| under_way.until)
    }

    /// What a planner is told: what was found against the peer a short while ago. `None`: nothing.
    pub fn known(&self, now: Moment) -> Option<Verdict> {
        self.avoided.filter(|(_, found)| now.since(*found) < AVOIDED).map(|(verdict, _)| verdict)
    }

    /// How long a probe that begins now waits.
    pub fn bound(&self, now: Moment) -> Duration {
        let Some((srtt, rttvar)) = self.measured else { return self.bound_max };
        let calm = now.since(self.widened_at).as_nanos() / CALM.as_nanos();
        let widened = self.widened.saturating_sub(u32::try_from(calm).unwrap_or(u32::MAX));
        let bound = (srtt + 4 * rttvar + GRANULARITY) * 2u32.pow(widened);
        bound.max(BOUND_MIN).min(self.bound_max)
    }

    /// While requests wait for the peer, it is asked again so long after each question: half of what a probe waits, so that one that
    /// dies in the middle of a slow request is found out within one and a half of that at most.
    pub fn again(&self, now: Moment) -> Duration {
        self.bound(now) / 2
    }

    /// The smoothed round trip, once there is one.
    pub fn round_trip(&self) -> Option<Duration> {
        self.measured.map(|(srtt, _)| srtt)
    }

    pub fn last_heard(&self) -> Option<Moment> {
        self.heard
    }

    /// Probes that found silence where an answer came after all.
    pub fn false_alarms(&self) -> u64 {
        self.false_alarms
    }

    fn send(&mut self, now: Moment) -> Ask {
        let bound = self.bound(now);
        let probe = Probe(self.next);
        self.next += 1;
        // The last datagram leaves early enough for its answer to come back in time.
        let gap = bound.saturating_sub(self.round_trip().unwrap_or_default()) / u32::from(DATAGRAMS_MAX);
        let until = now + bound;
        self.under_way =
            Some(UnderWay { probe, until, bound, sent: 1, last_sent: now, gap, is_extended: false });
        self.against = None;
        Ask::Send { probe, until }
    }

    /// RFC 6298, section 2, but for a sample longer than any bound: how much longer tells nothing.
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

    fn judge(&mut self, probe: Probe, verdict: Verdict) {
        if let Some(kept) = self.verdicts.iter_mut().find(|(kept, _)| *kept == probe) {
            kept.1 = verdict;
            return;
        }
        if self.verdicts.len() == VERDICTS_KEPT {
            self.verdicts.pop_front();
        }
        self.verdicts.push_back((probe, verdict));
    }

    fn verdict_kept(&self, probe: Probe) -> Option<Verdict> {
        self.verdicts.iter().find(|(kept, _)| *kept == probe).map(|(_, verdict)| *verdict)
    }

    fn false_alarm(&mut self, now: Moment, probe: Probe) {
        self.judge(probe, Verdict::Answers);
        self.false_alarms += 1;
        let calm = now.since(self.widened_at).as_nanos() / CALM.as_nanos();
        let left = self.widened.saturating_sub(u32::try_from(calm).unwrap_or(u32::MAX));
        self.widened = (left + 1).min(WIDENED_MAX);
        self.widened_at = now;
    }
}
