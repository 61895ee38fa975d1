//! Checks whether the client of a connection is still there: a silent one gets a PING.
//!
//! Not here: clients that are there and do nothing (`streams`).

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{Instant, Sleep, sleep};

/// Time of silence after which a peer gets a PING. It has the same time to answer.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct KeepAlive {
    pings: PingPong,
    /// Time when the client was last heard.
    heard: Rc<Cell<Instant>>,
    timer: Pin<Box<Sleep>>,
    /// Time of the PING, until the client is heard.
    asked: Option<Instant>,
}

impl KeepAlive {
    pub(super) fn new(pings: PingPong, heard: Rc<Cell<Instant>>) -> Self {
        Self { pings, heard, timer: Box::pin(sleep(PING_EVERY)), asked: None }
    }

    /// Ready when the client has not answered in time. Poll it together with the connection.
    pub(super) fn poll_dead(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.asked.is_some() && self.pings.poll_pong(cx).is_ready() {
                self.rest();
            }
            ready!(self.timer.as_mut().poll(cx));
            match self.asked {
                Some(asked) if self.heard.get() <= asked => return Poll::Ready(()),
                // Other data arrived first. The answer to the PING comes later.
                Some(_) => self.rest(),
                None if self.heard.get() + PING_EVERY > Instant::now() => self.rest(),
                None => {
                    // It fails while an earlier answer is missing. Then that one is waited for.
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
