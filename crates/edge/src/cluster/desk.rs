//! The question to the supervisor where a site is to run: asked once however many requests of however many threads wait for
//! the answer.
//!
//! Questions are written by a thread of their own, so that no request waits for the feed to take them. Not here: the feed
//! itself (`process`), what becomes of the answer (`place`).

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use nagaya_cmdb::feed::{Placed, Up};
use nagaya_cmdb::{NodeName, SiteName, Why};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::timeout;

/// Longest that a request waits for the answer. A store that has just lost its leader takes some seconds for a new one, and the
/// supervisor answers within 8 s whatever happens (`nagaya_placement::relocation::WAIT_LONGEST`).
const ANSWER_MAX: Duration = Duration::from_secs(9);

/// Sites that may be asked for at once: all those of a node that has failed.
const QUESTIONS_MAX: usize = 65_536;

/// So long an answer that a site can run nowhere holds for those who come next: a crowd does not ask the store one by one.
const NOWHERE_FOR: Duration = Duration::from_millis(250);

/// Such answers that are remembered.
const NOWHERE_MAX: usize = 16_384;

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unanswered {
    #[error("the supervisor did not answer within {} s", ANSWER_MAX.as_secs())]
    Late,
    #[error("too many sites are being placed at once")]
    Crowded,
    #[error("the supervisor cannot be asked")]
    Gone,
}

#[derive(Debug, Default)]
pub struct Desk {
    next: AtomicU64,
    open: Mutex<Open>,
    writer: Mutex<Option<Sender<Up>>>,
}

#[derive(Debug, Default)]
struct Open {
    by_tag: HashMap<u64, Question>,
    /// The last question of each site that has one.
    by_site: HashMap<SiteName, u64>,
    /// Sites that can run nowhere, when that was said, and which epoch it was said about.
    nowhere: HashMap<SiteName, (Instant, Option<u64>, Placed)>,
}

#[derive(Debug)]
struct Question {
    site: SiteName,
    seen: Option<u64>,
    answer: watch::Sender<Option<Placed>>,
}

impl Desk {
    pub fn is_open(&self) -> bool {
        self.writer.lock().is_some()
    }

    /// From now on questions can be asked; `write` sends one to the supervisor.
    pub fn open(&self, mut write: impl FnMut(&Up) -> io::Result<()> + Send + 'static) -> io::Result<()> {
        let (sender, questions) = mpsc::channel::<Up>();
        std::thread::Builder::new().name("questions".into()).spawn(move || {
            for question in questions {
                // A feed that is broken ends the process by its other end.
                if write(&question).is_err() {
                    return;
                }
            }
        })?;
        *self.writer.lock() = Some(sender);
        Ok(())
    }

    /// Where the site runs from now on. `seen`: the epoch that did not do, because `lost` did not serve it, for which it waited for `probe`. True with it: this
    /// request's question was the one that was sent.
    pub async fn ask(
        &self,
        site: &SiteName,
        seen: Option<u64>,
        why: Why,
        lost: Option<&NodeName>,
        probe: Duration,
    ) -> Result<(Placed, bool), Unanswered> {
        let (mut answer, is_first) = match self.join(site, seen, why, lost, probe)? {
            Joined::Known(placed) => return Ok((placed, false)),
            Joined::Waiting(answer, is_first) => (answer, is_first),
        };
        let answered = timeout(ANSWER_MAX, answer.wait_for(Option::is_some)).await;
        match answered.map(|placed| placed.ok().and_then(|placed| placed.clone())) {
            Ok(placed) => placed.map(|placed| (placed, is_first)).ok_or(Unanswered::Gone),
            Err(_) => {
                drop(answer);
                self.forget_unheard(site);
                Err(Unanswered::Late)
            }
        }
    }

    /// Says this to the supervisor without waiting. It is lost where there is no feed any more, and with it who asked.
    pub fn say(&self, up: Up) {
        if let Some(writer) = &*self.writer.lock() {
            let _ = writer.send(up);
        }
    }

    fn join(
        &self,
        site: &SiteName,
        seen: Option<u64>,
        why: Why,
        lost: Option<&NodeName>,
        probe: Duration,
    ) -> Result<Joined, Unanswered> {
        let mut open = self.open.lock();
        if let Some(placed) = open.said_nowhere(site, seen) {
            return Ok(Joined::Known(placed));
        }
        if let Some(question) = open.by_site.get(site).and_then(|tag| open.by_tag.get(tag))
            && question.seen >= seen
        {
            return Ok(Joined::Waiting(question.answer.subscribe(), false));
        }
        if open.by_tag.len() >= QUESTIONS_MAX {
            // Those that nobody waits for any more make room.
            open.by_tag.retain(|_, question| question.answer.receiver_count() > 0);
        }
        if open.by_tag.len() >= QUESTIONS_MAX {
            return Err(Unanswered::Crowded);
        }
        let tag = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, receiver) = watch::channel(None);
        let probe_us = u64::try_from(probe.as_micros()).unwrap_or(u64::MAX);
        let question = Up::Place { tag, site: site.clone(), seen, why, lost: lost.cloned(), probe_us };
        // The channel holds no more than there are open questions.
        let sent = self.writer.lock().as_ref().map(|writer| writer.send(question).is_ok());
        if sent != Some(true) {
            return Err(Unanswered::Gone);
        }
        open.by_site.insert(site.clone(), tag);
        open.by_tag.insert(tag, Question { site: site.clone(), seen, answer });
        Ok(Joined::Waiting(receiver, true))
    }

    /// The supervisor's answer.
    pub fn answer(&self, tag: u64, placed: &Placed) {
        let mut open = self.open.lock();
        let Some(question) = open.by_tag.remove(&tag) else { return };
        if open.by_site.get(&question.site) == Some(&tag) {
            open.by_site.remove(&question.site);
        }
        match placed {
            Placed::At { .. } => {
                open.nowhere.remove(&question.site);
            }
            Placed::Nowhere { .. } => {
                if open.nowhere.len() >= NOWHERE_MAX {
                    open.nowhere.clear();
                }
                let said = (Instant::now(), question.seen, placed.clone());
                open.nowhere.insert(question.site.clone(), said);
            }
        }
        drop(open);
        question.answer.send_replace(Some(placed.clone()));
    }

    /// The question that nobody waits for any more is not open any more: the next request asks anew.
    fn forget_unheard(&self, site: &SiteName) {
        let mut open = self.open.lock();
        let Some(tag) = open.by_site.get(site).copied() else { return };
        if open.by_tag.get(&tag).is_some_and(|question| question.answer.receiver_count() == 0) {
            open.by_tag.remove(&tag);
            open.by_site.remove(site);
        }
    }
}

enum Joined {
    Known(Placed),
    Waiting(watch::Receiver<Option<Placed>>, bool),
}

impl Open {
    fn said_nowhere(&mut self, site: &SiteName, seen: Option<u64>) -> Option<Placed> {
        let (when, about, placed) = self.nowhere.get(site)?;
        if when.elapsed() < NOWHERE_FOR && *about == seen {
            return Some(placed.clone());
        }
        self.nowhere.remove(site);
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nagaya_cmdb::Placement;

    use super::*;

    fn site() -> SiteName {
        SiteName::new("wiki").unwrap()
    }

    fn at(epoch: u64) -> Placed {
        let node = NodeName::new("b").unwrap();
        let placement = Placement {
            site: site(),
            node,
            epoch,
            since_ms: 0,
            why: Why::Silent,
            wait_ms: 0,
            node_epoch: 0,
            copies: Vec::new(),
        };
        Placed::At { placement, decide_us: 1, store_us: 2 }
    }

    /// A desk, and what it asks.
    fn desk() -> (Arc<Desk>, mpsc::Receiver<Up>) {
        let (desk, (sender, asked)) = (Arc::new(Desk::default()), mpsc::channel());
        desk.open(move |question| sender.send(question.clone()).map_err(io::Error::other)).unwrap();
        (desk, asked)
    }

    fn ask(desk: &Arc<Desk>, seen: u64) -> tokio::task::JoinHandle<Result<(Placed, bool), Unanswered>> {
        let desk = Arc::clone(desk);
        tokio::spawn(async move { desk.ask(&site(), Some(seen), Why::Silent, None, Duration::ZERO).await })
    }

    fn next(asked: &mpsc::Receiver<Up>) -> (u64, Option<u64>) {
        match asked.recv_timeout(Duration::from_secs(20)).unwrap() {
            Up::Place { tag, seen, .. } => (tag, seen),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_hundred_requests_ask_once_and_all_get_the_answer() {
        let (desk, asked) = desk();
        let waiting: Vec<_> = (0..100).map(|_| ask(&desk, 3)).collect();
        let heard_by =
            || desk.open.lock().by_tag.values().map(|open| open.answer.receiver_count()).sum::<usize>();
        while heard_by() < 100 {
            tokio::task::yield_now().await;
        }
        let (tag, seen) = next(&asked);
        assert_eq!(seen, Some(3));
        desk.answer(tag, &at(4));
        let mut first = 0;
        for waiting in waiting {
            let (placed, is_first) = waiting.await.unwrap().unwrap();
            assert_eq!(placed, at(4));
            first += u32::from(is_first);
        }
        assert_eq!(first, 1);
        assert!(asked.try_recv().is_err(), "it was asked once");
        assert!(desk.open.lock().by_tag.is_empty() && desk.open.lock().by_site.is_empty());
    }

    #[tokio::test]
    async fn who_has_seen_more_does_not_take_an_answer_to_those_who_have_seen_less() {
        let (desk, asked) = desk();
        let early = ask(&desk, 3);
        tokio::task::yield_now().await;
        let late = ask(&desk, 4);
        tokio::task::yield_now().await;
        let (first, second) = (next(&asked), next(&asked));
        assert_eq!((first.1, second.1), (Some(3), Some(4)));
        desk.answer(first.0, &at(4));
        assert_eq!(early.await.unwrap().unwrap().0, at(4));
        assert!(!late.is_finished());
        desk.answer(second.0, &at(5));
        assert_eq!(late.await.unwrap().unwrap().0, at(5));
    }

    #[tokio::test]
    async fn that_it_can_run_nowhere_is_not_asked_again_at_once() {
        let (desk, asked) = desk();
        let waiting = ask(&desk, 3);
        tokio::task::yield_now().await;
        let nowhere = Placed::Nowhere { reason: "all are full".into(), code: "NGY0461".into() };
        desk.answer(next(&asked).0, &nowhere);
        assert_eq!(waiting.await.unwrap().unwrap().0, nowhere);
        assert_eq!(ask(&desk, 3).await.unwrap().unwrap().0, nowhere);
        assert!(asked.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_supervisor_that_does_not_answer_is_waited_for_within_a_bound() {
        let (desk, asked) = desk();
        assert_eq!(ask(&desk, 3).await.unwrap(), Err(Unanswered::Late));
        next(&asked);
        assert!(desk.open.lock().by_tag.is_empty(), "nothing is kept of it");
    }

    #[tokio::test]
    async fn without_a_feed_the_answer_is_at_once_that_there_is_none() {
        let desk = Arc::new(Desk::default());
        assert_eq!(ask(&desk, 3).await.unwrap(), Err(Unanswered::Gone));
    }
}
