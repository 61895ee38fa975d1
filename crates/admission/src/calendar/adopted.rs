//! Adopts tickets that another node has given. A ticket shown here for the first time has its slot
//! here from then on. The only thing unknown here is whether the ticket was used there.
//!
//! Not here: whose ticket it is (the caller), the holder's later state (`calendar`).

use super::restart::AHEAD_MAX;
use super::{LATE_FOR, TICKETS_MAX, TicketCalendar, after};
use crate::{ClientKey, Moment, Ticket};

/// Adopted tickets that are not used yet. A node signed each of them for one client, so this many
/// are a crowd that has moved. The holder of one more is a newcomer until others have run or ended.
pub(super) const ADOPTED_MAX: usize = 65_536;

impl TicketCalendar {
    /// Adopts a ticket of which nothing is known here. The ticket's text says which slot it has. It
    /// is counted in the slot of this row in which it begins, full or not. Returns false if the
    /// ticket is not adopted, which makes its bearer a newcomer. Reasons are another lane, a ticket
    /// long over, too many tickets, or a client with a valid ticket here.
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
            // This node is not at fault if it did not serve during that slot.
            self.end(ticket.nonce, Moment(u64::MAX));
        } else if let Some(slot) = self.slot_as_written(&ticket) {
            self.put(ticket.nonce, slot);
        }
        true
    }
}
