//! Clients that each wait for one response before the next request, over connections of their own.
//! They are for programs that take milliseconds, where each request's own time matters.
//!
//! Not here: load that saturates a server (`load` runs wrk).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use crate::{http, interrupt};

/// Characters of an unexpected response that are shown.
const SAID_MAX: usize = 2_000;

/// Results of many requests.
#[derive(Debug, Clone, Default)]
pub struct ClientAnswers {
    /// Time of each request with a 200 response, from connecting to the last byte, in milliseconds.
    pub times_ms: Vec<f64>,
    /// Requests that failed or had another status.
    pub failed: usize,
    /// Why the first of them failed.
    pub why: Option<String>,
    /// From the first request to the last response, in seconds.
    pub seconds: f64,
}

impl ClientAnswers {
    pub fn mean_ms(&self) -> f64 {
        self.times_ms.iter().sum::<f64>() / to_float(self.times_ms.len())
    }

    /// Returns the time that this part of the requests did not exceed, `0.0..=1.0`.
    pub fn percentile_ms(&self, part: f64) -> f64 {
        let mut sorted = self.times_ms.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a part of a length is an index"
        )]
        let at = (to_float(last) * part).round() as usize;
        sorted.get(at).copied().unwrap_or(f64::NAN)
    }
}

/// The repeated request.
#[derive(Debug, Clone)]
pub struct ClientQuestion {
    pub address: SocketAddr,
    pub host: String,
    pub path: String,
}

impl ClientQuestion {
    fn ask(&self) -> Result<f64> {
        let begun = Instant::now();
        let told = |why: String| anyhow!("after {:.1} s: {why}", begun.elapsed().as_secs_f64());
        match http::get(self.address, &self.host, &self.path) {
            Ok((200, _)) => Ok(begun.elapsed().as_secs_f64() * 1e3),
            Ok((status, body)) => {
                let said: String = String::from_utf8_lossy(&body).chars().take(SAID_MAX).collect();
                Err(told(format!("{status} {said}")))
            }
            Err(error) => Err(told(format!("{error:#}"))),
        }
    }
}

/// Sends `total` requests, at most `at_once` at a time.
pub fn ask(question: &ClientQuestion, at_once: usize, total: usize) -> Result<ClientAnswers> {
    let left = AtomicUsize::new(total);
    let take = || left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
    gather(at_once, || {
        let mut answers = ClientAnswers::default();
        while take() && interrupt::check().is_ok() {
            answers.add(question.ask());
        }
        answers
    })
}

/// Clients that send requests in the background until they are stopped.
pub struct BackgroundLoad {
    stop: std::sync::Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<ClientAnswers>>,
    begun: Instant,
}

impl BackgroundLoad {
    pub fn start(question: &ClientQuestion, at_once: usize) -> Self {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let threads = (0..at_once).map(|_| {
            let (stop, question) = (std::sync::Arc::clone(&stop), question.clone());
            std::thread::spawn(move || {
                let mut answers = ClientAnswers::default();
                while !stop.load(Ordering::Relaxed) {
                    answers.add(question.ask());
                }
                answers
            })
        });
        Self { threads: threads.collect(), stop, begun: Instant::now() }
    }

    /// Lets each client finish its present request.
    pub fn stop(self) -> Result<ClientAnswers> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = ClientAnswers::default();
        for thread in self.threads {
            all.join(thread.join().map_err(|_| anyhow!("a client panicked"))?);
        }
        all.seconds = self.begun.elapsed().as_secs_f64();
        interrupt::check()?;
        Ok(all)
    }
}

/// Runs one client at a steady pace, whatever the response times: as a visitor who comes then would
/// see it.
pub fn ask_steadily(question: &ClientQuestion, every: Duration, for_time: Duration) -> Result<ClientAnswers> {
    Ok(ask_steadily_beside(question, every, for_time, || None::<()>)?.all)
}

/// Observations of one client.
#[derive(Debug, Default)]
pub struct SteadyLoad {
    pub all: ClientAnswers,
    /// Those of them during which the other work did not run.
    pub undisturbed: ClientAnswers,
}

impl SteadyLoad {
    pub fn join(&mut self, other: Self) {
        self.all.join(other.all);
        self.undisturbed.join(other.undisturbed);
    }
}

/// Does the same beside other work that runs occasionally. `at_rest` returns another value after
/// each run, and none during it.
pub fn ask_steadily_beside<T: PartialEq>(
    question: &ClientQuestion,
    every: Duration,
    for_time: Duration,
    at_rest: impl Fn() -> Option<T>,
) -> Result<SteadyLoad> {
    let begun = Instant::now();
    let mut seen = SteadyLoad::default();
    let mut due = begun;
    while begun.elapsed() < for_time {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let before = at_rest();
        let answer = question.ask();
        let is_undisturbed = before.is_some() && at_rest() == before;
        if let (Ok(time), true) = (&answer, is_undisturbed) {
            seen.undisturbed.add(Ok(*time));
        }
        seen.all.add(answer);
        // A late response is not followed by a burst.
        due = (due + every).max(Instant::now());
        interrupt::check()?;
    }
    seen.all.seconds = begun.elapsed().as_secs_f64();
    seen.undisturbed.seconds = seen.all.seconds;
    Ok(seen)
}

fn gather(at_once: usize, client: impl Fn() -> ClientAnswers + Sync) -> Result<ClientAnswers> {
    let begun = Instant::now();
    let mut all = ClientAnswers::default();
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (0..at_once).map(|_| scope.spawn(&client)).collect();
        for thread in threads {
            all.join(thread.join().map_err(|_| anyhow!("a client panicked"))?);
        }
        Ok(())
    })?;
    interrupt::check()?;
    all.seconds = begun.elapsed().as_secs_f64();
    Ok(all)
}

impl ClientAnswers {
    fn add(&mut self, time_ms: Result<f64>) {
        match time_ms {
            Ok(time) => self.times_ms.push(time),
            Err(error) => {
                if self.why.is_none() {
                    eprintln!("a request failed {error}");
                    self.why = Some(error.to_string());
                }
                self.failed += 1;
            }
        }
    }

    pub fn join(&mut self, other: Self) {
        self.times_ms.extend(other.times_ms);
        self.failed += other.failed;
        self.why = self.why.take().or(other.why);
    }
}

#[expect(clippy::cast_precision_loss, reason = "numbers of requests stay far below 2^53")]
pub fn to_float(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_few_and_of_many() {
        let of = |times: &[f64]| ClientAnswers { times_ms: times.to_vec(), ..ClientAnswers::default() };
        assert_eq!(of(&[3.0, 1.0, 2.0]).percentile_ms(0.5), 2.0);
        assert_eq!(of(&[3.0, 1.0, 2.0]).percentile_ms(1.0), 3.0);
        assert!(of(&[]).percentile_ms(0.5).is_nan());
        assert_eq!(of(&[1.0, 3.0]).mean_ms(), 2.0);
    }
}
