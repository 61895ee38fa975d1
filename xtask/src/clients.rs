//! Clients that each wait for one answer before they ask again, over connections of their own: for programs that
//! take milliseconds, where each request's own time matters.
//!
//! Not here: load that saturates a server (`load` runs wrk).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use crate::{http, interrupt};

/// Characters of an unwanted answer that are told.
const SAID_MAX: usize = 2_000;

/// What many requests came to.
#[derive(Debug, Clone, Default)]
pub struct Answers {
    /// Of each request that was answered with 200, from connecting to the last byte, in milliseconds.
    pub times_ms: Vec<f64>,
    /// Requests that failed or were answered with another status.
    pub failed: usize,
    /// Why the first of them failed.
    pub why: Option<String>,
    /// From the first request to the last answer, in seconds.
    pub seconds: f64,
}

impl Answers {
    pub fn mean_ms(&self) -> f64 {
        self.times_ms.iter().sum::<f64>() / to_float(self.times_ms.len())
    }

    /// The time that this part of the requests did not exceed, `0.0..=1.0`.
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

/// What is asked, again and again.
#[derive(Debug, Clone)]
pub struct Question {
    pub address: SocketAddr,
    pub host: String,
    pub path: String,
}

impl Question {
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

/// Asks `total` times, at most `at_once` at a time.
pub fn ask(question: &Question, at_once: usize, total: usize) -> Result<Answers> {
    let left = AtomicUsize::new(total);
    let take = || left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
    gather(at_once, || {
        let mut answers = Answers::default();
        while take() && interrupt::check().is_ok() {
            answers.add(question.ask());
        }
        answers
    })
}

/// Clients that ask in the background until they are told to stop.
pub struct Background {
    stop: std::sync::Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<Answers>>,
    begun: Instant,
}

impl Background {
    pub fn start(question: &Question, at_once: usize) -> Self {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let threads = (0..at_once).map(|_| {
            let (stop, question) = (std::sync::Arc::clone(&stop), question.clone());
            std::thread::spawn(move || {
                let mut answers = Answers::default();
                while !stop.load(Ordering::Relaxed) {
                    answers.add(question.ask());
                }
                answers
            })
        });
        Self { threads: threads.collect(), stop, begun: Instant::now() }
    }

    /// Lets each client take its present answer to the end.
    pub fn stop(self) -> Result<Answers> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Answers::default();
        for thread in self.threads {
            all.join(thread.join().map_err(|_| anyhow!("a client panicked"))?);
        }
        all.seconds = self.begun.elapsed().as_secs_f64();
        interrupt::check()?;
        Ok(all)
    }
}

/// One client that asks at a steady pace, whatever the answers take: what a visitor would see who comes then.
pub fn ask_steadily(question: &Question, every: Duration, for_time: Duration) -> Result<Answers> {
    Ok(ask_steadily_beside(question, every, for_time, || None::<()>)?.all)
}

/// What one client saw.
#[derive(Debug, Default)]
pub struct Steady {
    pub all: Answers,
    /// Of these those during which something else did not run.
    pub undisturbed: Answers,
}

impl Steady {
    pub fn join(&mut self, other: Self) {
        self.all.join(other.all);
        self.undisturbed.join(other.undisturbed);
    }
}

/// The same beside something that now and then does its work: `at_rest` is another value after each time, and none during it.
pub fn ask_steadily_beside<T: PartialEq>(
    question: &Question,
    every: Duration,
    for_time: Duration,
    at_rest: impl Fn() -> Option<T>,
) -> Result<Steady> {
    let begun = Instant::now();
    let mut seen = Steady::default();
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
        // One that was answered late is not followed by a burst.
        due = (due + every).max(Instant::now());
        interrupt::check()?;
    }
    seen.all.seconds = begun.elapsed().as_secs_f64();
    seen.undisturbed.seconds = seen.all.seconds;
    Ok(seen)
}

fn gather(at_once: usize, client: impl Fn() -> Answers + Sync) -> Result<Answers> {
    let begun = Instant::now();
    let mut all = Answers::default();
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

impl Answers {
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
        let of = |times: &[f64]| Answers { times_ms: times.to_vec(), ..Answers::default() };
        assert_eq!(of(&[3.0, 1.0, 2.0]).percentile_ms(0.5), 2.0);
        assert_eq!(of(&[3.0, 1.0, 2.0]).percentile_ms(1.0), 3.0);
        assert!(of(&[]).percentile_ms(0.5).is_nan());
        assert_eq!(of(&[1.0, 3.0]).mean_ms(), 2.0);
    }
}
