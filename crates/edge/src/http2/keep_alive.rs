//! Whether the client of a connection is still there: one that is silent is asked by a PING.
//!
//! Not here: clients that are there and do nothing (`streams`).

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{Instant, Sleep, sleep};

/// A peer that is silent so long is asked whether it lives, and has so long to answer.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct KeepAlive {
    pings: PingPong,
    /// When the client was last heard.
    heard: Rc<Cell<Instant>>,
    timer: Pin<Box<Sleep>>,
    /// When it was asked, until it is heard.
    asked: Option<Instant>,
}

impl KeepAlive {
    pub(super) fn new(pings: PingPong, heard: Rc<Cell<Instant>>) -> Self {
        Self { pings, heard, timer: Box::pin(sleep(PING_EVERY)), asked: None }
    }

    /// Ready when the client has not answered in time. To be polled with the connection.
    pub(super) fn poll_dead(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.asked.is_some() && self.pings.poll_pong(cx).is_ready() {
                self.rest();
            }
            ready!(self.timer.as_mut().poll(cx));
            match self.asked {
                Some(asked) if self.heard.get() <= asked => return Poll::Ready(()),
                // It says something else first; its answer comes later.
                Some(_) => self.rest(),
                None if self.heard.get() + PING_EVERY > Instant::now() => self.rest(),
                None => {
                    // It fails while an answer is still to come, which is waited for then.
                    let _ = self.pings.send_ping(Ping::opaque());
                    self.asked = Some(Instant::now());
                    self.timer.as_mut().reset(Instant::now() + PING_PATIENCE);
                }
            }
        }
    }

    fn rest(&mut self) {
        self.asked = None;
        self.timer.as_mut().reset(self.heard.get().max(Instant::now() - PING_EVERY) + PING_EVERY);
    }
}
