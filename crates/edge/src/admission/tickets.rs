//! Tickets as they travel: in a cookie for people, in a header field for programs.
//!
//! Not here: signatures and slots (`nagaya_admission`), where they are kept (`store`), who is given one (`turned`).

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use http::HeaderValue;
use http::header::{COOKIE, HeaderName};
use nagaya_admission::{ClientKey, Nonce, Ticket};
use nagaya_base::Code;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use super::lanes::{Lane, Lanes};
use super::store::{Store, Stored};
use crate::account::Account;
use crate::message::Head;
use crate::node::Node;
use crate::refusal::Refusal;
use crate::shared::Shared;

/// Carries a ticket in both directions, for clients that keep no cookies.
pub const NAGAYA_TICKET: HeaderName = HeaderName::from_static("nagaya-ticket");

const CODE_NO_STORE: Code = Code(442);

/// A cookie's name goes on with the lane's.
const COOKIE_PREFIX: &str = "nagaya-ticket-";

/// Longest `Cookie` field that is looked through, bytes.
const COOKIE_LEN_MAX: usize = 16 << 10;

/// What this edge signs with, and where it keeps what it promised.
pub struct Tickets {
    pub store: Store,
    /// What an earlier start had stored, where its file could not be read at once.
    stored: Mutex<Option<oneshot::Receiver<Stored>>>,
}

/// A ticket that a request shows.
pub struct Shown {
    pub ticket: Ticket,
    /// The client keeps it as a cookie, to be taken away once it is used.
    pub cookie: Option<String>,
}

impl Tickets {
    /// The ticket for this lane that a request shows.
    ///
    /// # Errors
    /// If a program shows one that is not ours, or not for this lane. A cookie may be left over from long ago: it counts as none.
    pub fn shown(&self, lane: &Lane, head: &Head) -> Result<Option<Shown>, Refusal> {
        if let Some(value) = head.headers.get(NAGAYA_TICKET) {
            let text = value.to_str().map_err(|_| Refusal::TicketInvalid("it is not text".into()))?;
            let Some(keys) = self.store.keys() else { return Ok(None) };
            let ticket =
                keys.verify(text).map_err(|rejected| Refusal::TicketInvalid(rejected.to_string()))?;
            if ticket.lane != lane.name {
                return Err(Refusal::TicketInvalid("it was given for something else".into()));
            }
            return Ok(Some(Shown { ticket, cookie: None }));
        }
        let name = cookie_name(lane);
        let found = cookie(head, &name).and_then(|text| self.store.keys()?.verify(text).ok());
        let ticket = found.filter(|ticket| ticket.lane == lane.name);
        Ok(ticket.map(|ticket| Shown { ticket, cookie: Some(name) }))
    }

    /// One client: an address, or the network that one subscriber of IPv6 has (RFC 6177).
    pub fn client_key(client: IpAddr) -> ClientKey {
        let mut text = [0; 17];
        match client.to_canonical() {
            IpAddr::V4(address) => text[1..5].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => {
                text[0] = 6;
                text[1..9].copy_from_slice(&address.octets()[..8]);
            }
        }
        // A good hash, so that nobody finds an address of the same key as another's and is given that one's ticket.
        let digest = ring::digest::digest(&ring::digest::SHA256, &text);
        let first = digest.as_ref()[..8].try_into().expect("a digest of 32 bytes");
        ClientKey(u64::from_le_bytes(first))
    }
}

/// Opens the store in this directory, so that tickets are given; what was promised before is known before anybody is served.
pub fn open(shared: &Shared, directory: OwnedFd) {
    let (store, mut stored) = match Store::open(directory, shared.lanes.reckoning()) {
        Ok(opened) => opened,
        Err(error) => {
            return tracing::error!(code = %CODE_NO_STORE, %error, "no tickets are given: their store has no thread");
        }
    };
    let stored = match stored.try_recv() {
        Ok(records) => {
            shared.lanes.restore(records);
            None
        }
        Err(TryRecvError::Empty) => Some(stored),
        Err(TryRecvError::Closed) => None,
    };
    shared.set_tickets(Tickets { store, stored: Mutex::new(stored) });
}

/// Takes what was promised before as soon as it can be read.
pub async fn restore_later(tickets: Arc<Tickets>, lanes: Arc<Lanes>) {
    let stored = tickets.stored.lock().take();
    if let Some(stored) = stored
        && let Ok(records) = stored.await
    {
        lanes.restore(records);
    }
}

/// The request of a ticket runs: the client need not show it again, and the next start is to know that it was used.
pub fn used(node: &Node, account: &mut Account, shown: Option<&Shown>) {
    let Some(shown) = shown else { return };
    if let Some(cookie) = &shown.cookie {
        account.take_cookie(cookie.clone());
    }
    keep_rest(node);
}

/// Takes to the store what nobody waits for: that tickets were used, or have ended.
pub fn keep_rest(node: &Node) {
    let Some(tickets) = node.shared.tickets() else { return };
    let mut records = node.shared.lanes.take_records();
    let has_lost = tickets.store.take_lost();
    if has_lost {
        // Before what has become of them since.
        records.splice(0..0, node.shared.lanes.promises());
    }
    if !records.is_empty() {
        tokio::task::spawn_local(async move {
            // The store says by itself that it cannot keep them.
            if tickets.store.keep(records).await.is_err() && has_lost {
                tickets.store.still_lost();
            }
        });
    }
}

/// The name of the cookie for a lane's tickets.
pub fn cookie_name(lane: &Lane) -> String {
    format!("{COOKIE_PREFIX}{}", short(lane))
}

/// A lane in paths and names of cookies: the beginning of its name.
pub fn short(lane: &Lane) -> String {
    lane.name.0[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The value of the first cookie of this name (RFC 6265 section 4.2.1).
pub fn cookie<'a>(head: &'a Head, name: &str) -> Option<&'a str> {
    let fields = head.headers.get_all(COOKIE).iter().filter_map(|field| field.to_str().ok());
    let pairs = fields.filter(|field| field.len() <= COOKIE_LEN_MAX).flat_map(|field| field.split(';'));
    pairs
        .filter_map(|pair| pair.trim().split_once('='))
        .find(|(found, _)| *found == name)
        .map(|(_, value)| value)
}

/// Sets the cookie; `text` empty takes it away.
pub fn set_cookie(name: &str, text: &str, seconds: u64, is_secure: bool) -> HeaderValue {
    let secure = if is_secure { "; Secure" } else { "" };
    let value = format!("{name}={text}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Lax{secure}");
    HeaderValue::try_from(value).expect("a lane's name and a ticket are of plain characters")
}

/// Takes the cookie of this name away.
pub fn take_away(name: &str) -> HeaderValue {
    set_cookie(name, "", 0, false)
}

/// A number for a new ticket, which nobody can guess.
pub fn nonce() -> Nonce {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes once it has booted");
    Nonce(u128::from_le_bytes(bytes))
}
