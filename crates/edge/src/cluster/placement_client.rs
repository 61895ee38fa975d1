//! Asks the supervisor where a site is to run. It asks once, however many requests of however
//! many threads wait for the answer.
//!
//! A thread of their own writes the questions, so that no request waits for the feed. Not here: the
//! feed itself (`process`), the use of the answer (`placement`).

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use nagaya_records::feed::{PlaceReply, ToSupervisor};
use nagaya_records::{NodeName, PlacementReason, SiteName};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::http::refusal::{ANSWER_MAX, PlacementError};

/// Maximum number of open questions: all sites of a failed node.
const QUESTIONS_MAX: usize = 65_536;

/// Time for which the answer "can run nowhere" also holds for later requests. So a crowd does not
/// ask the store one by one.
const NOWHERE_FOR: Duration = Duration::from_millis(250);

/// Maximum number of such answers that are remembered.
const NOWHERE_MAX: usize = 16_384;

#[derive(Debug, Default)]
pub struct PlacementClient {
    next: AtomicU64,
    open: Mutex<OpenQuestions>,
    writer: Mutex<Option<Sender<ToSupervisor>>>,
}

#[derive(Debug, Default)]
struct OpenQuestions {
    by_tag: HashMap<u64, PlacementQuery>,
    /// The last question of each site that has one.
    by_site: HashMap<SiteName, u64>,
    /// Sites that can run nowhere, with the time and epoch of that answer.
    nowhere: HashMap<SiteName, (Instant, Option<u64>, PlaceReply)>,
}

#[derive(Debug)]
struct PlacementQuery {
    site: SiteName,
    seen: Option<u64>,
    answer: watch::Sender<Option<PlaceReply>>,
}

impl PlacementClient {
    pub fn is_open(&self) -> bool {
        self.writer.lock().is_some()
    }

    /// Enables questions. `write` sends one to the supervisor.
    pub fn open(
        &self,
        mut write: impl FnMut(&ToSupervisor) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let (sender, questions) = mpsc::channel::<ToSupervisor>();
        std::thread::Builder::new().name("questions".into()).spawn(move || {
            for question in questions {
                // The other end of a broken feed ends the process.
                if write(&question).is_err() {
                    return;
                }
            }
        })?;
        *self.writer.lock() = Some(sender);
        Ok(())
    }

    /// Returns where the site runs from now on. `seen` is the epoch that `lost` did not serve,
    /// after a wait of `probe`. The flag is true if this request's question was the one that was
    /// sent.
    pub async fn ask(
        &self,
        site: &SiteName,
        seen: Option<u64>,
        why: PlacementReason,
        lost: Option<&NodeName>,
        probe: Duration,
    ) -> Result<(PlaceReply, bool), PlacementError> {
        let (mut answer, is_first) = match self.join(site, seen, why, lost, probe)? {
            JoinedQuery::Known(placed) => return Ok((placed, false)),
            JoinedQuery::Waiting(answer, is_first) => (answer, is_first),
        };
        let answered = timeout(ANSWER_MAX, answer.wait_for(Option::is_some)).await;
        match answered.map(|placed| placed.ok().and_then(|placed| placed.clone())) {
            Ok(placed) => placed.map(|placed| (placed, is_first)).ok_or(PlacementError::Gone),
            Err(_) => {
                drop(answer);
                self.forget_unheard(site);
                Err(PlacementError::Late)
            }
        }
    }

    /// Sends this to the supervisor without waiting. It is lost if the feed has ended.
    pub fn say(&self, up: ToSupervisor) {
        if let Some(writer) = &*self.writer.lock() {
            let _ = writer.send(up);
        }
    }

    fn join(
        &self,
        site: &SiteName,
        seen: Option<u64>,
        why: PlacementReason,
        lost: Option<&NodeName>,
        probe: Duration,
    ) -> Result<JoinedQuery, PlacementError> {
        let mut open = self.open.lock();
        if let Some(placed) = open.said_nowhere(site, seen) {
            return Ok(JoinedQuery::Known(placed));
        }
        if let Some(question) = open.by_site.get(site).and_then(|tag| open.by_tag.get(tag))
            && question.seen >= seen
        {
            return Ok(JoinedQuery::Waiting(question.answer.subscribe(), false));
        }
        if open.by_tag.len() >= QUESTIONS_MAX {
            // Questions without a waiting request make room.
            open.by_tag.retain(|_, question| question.answer.receiver_count() > 0);
        }
        if open.by_tag.len() >= QUESTIONS_MAX {
            return Err(PlacementError::Crowded);
        }
        let tag = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, receiver) = watch::channel(None);
        let probe_us = u64::try_from(probe.as_micros()).unwrap_or(u64::MAX);
        let question =
            ToSupervisor::Place { tag, site: site.clone(), seen, why, lost: lost.cloned(), probe_us };
        // The channel holds no more than the open questions.
        let sent = self.writer.lock().as_ref().map(|writer| writer.send(question).is_ok());
        if sent != Some(true) {
            return Err(PlacementError::Gone);
        }
        open.by_site.insert(site.clone(), tag);
        open.by_tag.insert(tag, PlacementQuery { site: site.clone(), seen, answer });
        Ok(JoinedQuery::Waiting(receiver, true))
    }

    /// Delivers the supervisor's answer.
    pub fn answer(&self, tag: u64, placed: &PlaceReply) {
        let mut open = self.open.lock();
        let Some(question) = open.by_tag.remove(&tag) else { return };
        if open.by_site.get(&question.site) == Some(&tag) {
            open.by_site.remove(&question.site);
        }
        match placed {
            PlaceReply::At { .. } => {
                open.nowhere.remove(&question.site);
            }
            PlaceReply::Nowhere { .. } => {
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

    /// Drops a question without a waiting request. The next request asks again.
    fn forget_unheard(&self, site: &SiteName) {
        let mut open = self.open.lock();
        let Some(tag) = open.by_site.get(site).copied() else { return };
        if open.by_tag.get(&tag).is_some_and(|question| question.answer.receiver_count() == 0) {
            open.by_tag.remove(&tag);
            open.by_site.remove(site);
        }
    }
}

enum JoinedQuery {
    Known(PlaceReply),
    Waiting(watch::Receiver<Option<PlaceReply>>, bool),
}

impl OpenQuestions {
    fn said_nowhere(&mut self, site: &SiteName, seen: Option<u64>) -> Option<PlaceReply> {
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

    use nagaya_records::Placement;

    use super::*;

    fn site() -> SiteName {
        SiteName::new("wiki").unwrap()
    }

    fn at(epoch: u64) -> PlaceReply {
        let node = NodeName::new("b").unwrap();
        let placement = Placement {
            site: site(),
            node,
            epoch,
            since_ms: 0,
            why: PlacementReason::Silent,
            wait_ms: 0,
            node_epoch: 0,
            copies: Vec::new(),
        };
        PlaceReply::At { placement, decide_us: 1, store_us: 2 }
    }

    /// A desk, and what it asks.
    fn placement_client() -> (Arc<PlacementClient>, mpsc::Receiver<ToSupervisor>) {
        let (placement_client, (sender, asked)) = (Arc::new(PlacementClient::default()), mpsc::channel());
        placement_client
            .open(move |question| sender.send(question.clone()).map_err(io::Error::other))
            .unwrap();
        (placement_client, asked)
    }

    fn ask(
        placement_client: &Arc<PlacementClient>,
        seen: u64,
    ) -> tokio::task::JoinHandle<Result<(PlaceReply, bool), PlacementError>> {
        let placement_client = Arc::clone(placement_client);
        tokio::spawn(async move {
            placement_client.ask(&site(), Some(seen), PlacementReason::Silent, None, Duration::ZERO).await
        })
    }

    fn next(asked: &mpsc::Receiver<ToSupervisor>) -> (u64, Option<u64>) {
        match asked.recv_timeout(Duration::from_secs(20)).unwrap() {
            ToSupervisor::Place { tag, seen, .. } => (tag, seen),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_hundred_requests_ask_once_and_all_get_the_answer() {
        let (placement_client, asked) = placement_client();
        let waiting: Vec<_> = (0..100).map(|_| ask(&placement_client, 3)).collect();
        let heard_by = || {
            placement_client
                .open
                .lock()
                .by_tag
                .values()
                .map(|open| open.answer.receiver_count())
                .sum::<usize>()
        };
        while heard_by() < 100 {
            tokio::task::yield_now().await;
        }
        let (tag, seen) = next(&asked);
        assert_eq!(seen, Some(3));
        placement_client.answer(tag, &at(4));
        let mut first = 0;
        for waiting in waiting {
            let (placed, is_first) = waiting.await.unwrap().unwrap();
            assert_eq!(placed, at(4));
            first += u32::from(is_first);
        }
        assert_eq!(first, 1);
        assert!(asked.try_recv().is_err(), "it was asked once");
        assert!(
            placement_client.open.lock().by_tag.is_empty() && placement_client.open.lock().by_site.is_empty()
        );
    }

    #[tokio::test]
    async fn answer_for_an_older_epoch_is_not_given_to_a_newer_asker() {
        let (placement_client, asked) = placement_client();
        let early = ask(&placement_client, 3);
        tokio::task::yield_now().await;
        let late = ask(&placement_client, 4);
        tokio::task::yield_now().await;
        let (first, second) = (next(&asked), next(&asked));
        assert_eq!((first.1, second.1), (Some(3), Some(4)));
        placement_client.answer(first.0, &at(4));
        assert_eq!(early.await.unwrap().unwrap().0, at(4));
        assert!(!late.is_finished());
        placement_client.answer(second.0, &at(5));
        assert_eq!(late.await.unwrap().unwrap().0, at(5));
    }

    #[tokio::test]
    async fn that_it_can_run_nowhere_is_not_asked_again_at_once() {
        let (placement_client, asked) = placement_client();
        let waiting = ask(&placement_client, 3);
        tokio::task::yield_now().await;
        let nowhere = PlaceReply::Nowhere { reason: "all are full".into(), code: "NGY0461".into() };
        placement_client.answer(next(&asked).0, &nowhere);
        assert_eq!(waiting.await.unwrap().unwrap().0, nowhere);
        assert_eq!(ask(&placement_client, 3).await.unwrap().unwrap().0, nowhere);
        assert!(asked.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_a_silent_supervisor_is_bounded() {
        let (placement_client, asked) = placement_client();
        assert_eq!(ask(&placement_client, 3).await.unwrap(), Err(PlacementError::Late));
        next(&asked);
        assert!(placement_client.open.lock().by_tag.is_empty(), "nothing is kept of it");
    }

    #[tokio::test]
    async fn without_a_feed_the_answer_is_at_once_that_there_is_none() {
        let placement_client = Arc::new(PlacementClient::default());
        assert_eq!(ask(&placement_client, 3).await.unwrap(), Err(PlacementError::Gone));
    }
}
