//! Recognises visits by a signed text in a cookie. A client that has waited and was admitted goes
//! before newcomers for a while.
//!
//! The text is signed like a ticket, for another purpose. It belongs to one lane and one client
//! (an address, or the /64 of an IPv6 address). So a copy is useless elsewhere. Using it does not
//! extend it: only a wait gives a new one. The number of requests of one visit that run or wait
//! at once is limited (`guests`).
//!
//! Not here: the treatment in a lane (`nagaya_admission`), tickets (`tickets`).

use std::time::Duration;

use http::HeaderValue;
use nagaya_admission::{ClientKey, Moment, Nonce, SigningPurpose, Ticket};
use nagaya_records::Site;
use nagaya_records::record::VISIT_SECONDS;

use crate::admission::gate::Gate;
use crate::admission::lanes::EdgeLane;
use crate::admission::{lanes, tickets};
use crate::http::message::RequestHead;

/// Prefix of a cookie's name. The lane follows it.
const COOKIE_PREFIX: &str = "nagaya-visit-";

/// The bits of a visit's number that identify its client.
const CLIENT_BITS: u32 = 64;

/// Returns the visit of a request, if it presents a valid one of this lane and this client.
pub fn shown(gate: &Gate, lane: &EdgeLane, head: &RequestHead, client: ClientKey) -> Option<Nonce> {
    let text = tickets::cookie(head, &cookie_name(lane))?;
    let tickets = gate.tickets.get()?;
    let visit = tickets.verify_visit(text, gate.mark())?;
    is_valid(&visit, lane, client, gate.lanes.now()).then_some(visit.nonce)
}

/// Starts a visit: its cookie goes with the response. Does nothing if the site has no visits, or
/// if nothing can be signed yet.
pub fn begin(
    gate: &Gate,
    (lane, site): (&EdgeLane, &Site),
    (head, client): (&RequestHead, ClientKey),
) -> Option<HeaderValue> {
    let seconds = site.admission.visit_seconds.unwrap_or(VISIT_SECONDS);
    if seconds == 0 {
        return None;
    }
    let tickets = gate.tickets.get();
    let keys = tickets.and_then(|tickets| tickets.keys(gate.mark()))?;
    let visit = visit_of(lane, client, gate.lanes.now(), Duration::from_secs(seconds.into()));
    let text = keys.sign_for(SigningPurpose::Visit, &visit);
    Some(tickets::set_cookie(&cookie_name(lane), &text, seconds.into(), head.conn.tls.is_some()))
}

fn is_valid(visit: &Ticket, lane: &EdgeLane, client: ClientKey, now: Moment) -> bool {
    visit.lane == lane.name && client_of(visit.nonce) == client && visit.begins <= now && now < visit.ends
}

fn visit_of(lane: &EdgeLane, client: ClientKey, begins: Moment, length: Duration) -> Ticket {
    let micros = u64::try_from(length.as_micros()).unwrap_or(u64::MAX);
    let ends = Moment(begins.0.saturating_add(micros));
    let random = tickets::nonce(None).0 & u128::from(u64::MAX);
    let nonce = Nonce(u128::from(client.0) << CLIENT_BITS | random);
    Ticket { lane: lane.name, begins, ends, epoch: 0, nonce }
}

fn client_of(nonce: Nonce) -> ClientKey {
    ClientKey(u64::try_from(nonce.0 >> CLIENT_BITS).unwrap_or_default())
}

fn cookie_name(lane: &EdgeLane) -> String {
    format!("{COOKIE_PREFIX}{}", lanes::short(lane))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::admit::tests::lane;

    #[test]
    fn a_visit_is_of_one_lane_one_client_and_one_time() {
        let (_lanes, own) = lane(1, 1);
        let (client, begins) = (ClientKey(u64::MAX - 1), Moment(1_000_000));
        let visit = visit_of(&own, client, begins, Duration::from_secs(2));
        for (client, now, expected) in [
            (client, 1_000_000, true),
            (client, 2_999_999, true),
            (client, 3_000_000, false),
            (client, 999_999, false),
            (ClientKey(1), 2_000_000, false),
        ] {
            assert_eq!(is_valid(&visit, &own, client, Moment(now)), expected, "{client:?} at {now}");
        }
        let other = Ticket { lane: nagaya_admission::LaneName([1; 16]), ..visit };
        assert!(!is_valid(&other, &own, client, begins));
    }
}
