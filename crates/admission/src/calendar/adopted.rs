//! Tickets that another node has given: whoever shows one here for the first time has its slot from then on, as if it had been
//! given here. What is not known here is only whether it was used there.
//!
//! Not here: whose ticket it is (the caller), what becomes of a holder after that (`calendar`).

use super::restart::AHEAD_MAX;
use super::{Calendar, LATE_FOR, TICKETS_MAX, after};
use crate::{ClientKey, Moment, Ticket};

/// Taken over and not used yet. Each was signed by a node for a client of its own, so that this many are a crowd that has moved. The
/// holder of one more is a newcomer until others have run or ended.
pub(super) const ADOPTED_MAX: usize = 65_536;

impl Calendar {
    /// Takes a ticket over of which nothing is known here. Its own text says which slot it has; it is counted in
    /// the slot of this row in which it begins, full or not. False: it is not taken over, and whoever shows it is a newcomer, because it is of another lane or
    /// long over, because there are enough, or because this client has a good ticket here already.
    pub fn adopt(&mut self, now: Moment, ticket: Ticket, client: ClientKey) -> bool {
        self.settle(now);
        let now = self.now;
        let is_known = self.holders.contains_key(&ticket.nonce) || self.spent.contains_key(&ticket.nonce);
        let is_over = after(ticket.ends, LATE_FOR) <= now;
        let is_possible = ticket.begins < ticket.ends && ticket.begins < after(now, AHEAD_MAX);
        let has_room = self.adopted < ADOPTED_MAX && self.holders.len() < TICKETS_MAX as usize;
        if ticket.lane != self.lane
            || is_known
            || is_over
            || !is_possible
            || !has_room
            || self.promise_of(client).is_some()
        {
            return false;
        }
        self.drop_late_of(client);
        self.hold(ticket, client);
        if let Some(holder) = self.holders.get_mut(&ticket.nonce) {
            holder.is_adopted = true;
            self.adopted += 1;
        }
        self.tally.adopted += 1;
        if ticket.ends <= now {
            // That nobody was here in its slot is no fault of this node's.
            self.end(ticket.nonce, Moment(u64::MAX));
        } else if let Some(slot) = self.slot_as_written(&ticket) {
            self.put(ticket.nonce, slot);
        }
        true
    }
}
