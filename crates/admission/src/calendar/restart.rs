//! Restores a calendar after a restart: stored tickets return to their slots.
//!
//! Not here: everything after that (`calendar`), the store (`edge`).

use std::collections::HashSet;
use std::time::Duration;

use super::slots::{SLOTS_MAX, SlotNumber};
use super::{HolderState, LATE_FOR, TICKETS_MAX, TicketCalendar, TicketHolder, after, micros};
use crate::{ClientKey, Moment, Nonce, Ticket, TicketRecord};

/// Farthest slot that a record may name: nobody configures such a horizon. A record beyond it is
/// invalid.
pub(super) const AHEAD_MAX: Duration = Duration::from_secs(366 * 86_400);

impl TicketCalendar {
    /// Restores a stored record, before anything else happens. The order is that of the slots, or
    /// any order if no other call comes in between. Records of another lane or that ended long ago
    /// are skipped.
    pub fn restore(&mut self, now: Moment, record: TicketRecord) {
        match record {
            TicketRecord::Promised { ticket, client } => self.restore_promise(now, ticket, client),
            TicketRecord::Spent { nonce, until } => {
                self.remove(nonce);
                if until > now {
                    self.remember_spent(nonce, until);
                }
            }
            TicketRecord::Called { nonce } => drop(self.restored_calls.insert(nonce)),
            TicketRecord::Forgotten { nonce } => drop(self.remove(nonce)),
            TicketRecord::Paced { .. } => {}
        }
    }

    fn restore_promise(&mut self, now: Moment, ticket: Ticket, client: ClientKey) {
        let is_known = self.holders.contains_key(&ticket.nonce) || self.spent.contains_key(&ticket.nonce);
        let is_over = after(ticket.ends, LATE_FOR) <= now;
        let is_possible = ticket.begins < ticket.ends && ticket.begins < after(now, AHEAD_MAX);
        if ticket.lane != self.lane
            || is_known
            || is_over
            || !is_possible
            || self.holders.len() >= TICKETS_MAX as usize
        {
            return;
        }
        self.epoch = self.epoch.max(ticket.epoch.saturating_add(1));
        let other = self.clients.get(&client).copied();
        self.hold(ticket, client);
        // If a client has two tickets and one is late, the other is the valid one.
        if let Some(other) = other.filter(|other| self.ends_of(*other) > Some(ticket.ends)) {
            self.clients.insert(client, other);
        }
        self.restored.push(ticket.nonce);
    }

    /// Puts restored promises into their slots in slot order, whatever order they came in.
    pub(super) fn put_restored(&mut self) {
        let mut nonces = std::mem::take(&mut self.restored);
        let calls = std::mem::take(&mut self.restored_calls);
        nonces.sort_unstable_by_key(|nonce| {
            self.holders.get(nonce).map(|holder| (holder.ticket.begins, *nonce))
        });
        for nonce in nonces {
            // A later record used it up or forgot it, or the same record came twice.
            let holder = self.holders.get(&nonce).filter(|holder| holder.slot.is_none() && !holder.has_ended);
            let Some(ticket) = holder.map(|holder| holder.ticket) else { continue };
            if ticket.ends <= self.now {
                // It ended before the node was up again.
                self.end(nonce, Moment(0));
            } else if let Some(slot) = self.slot_as_written(&ticket) {
                self.put(nonce, slot);
                let now = self.now;
                self.slots.change(slot, |slot| slot.is_whole &= slot.begins > now);
            }
        }
        self.restore_calls(calls);
    }

    /// Expects called holders once more: they were on their way, or in the queue, when the process
    /// ended. Call records come after their promises, which may already have their slots.
    fn restore_calls(&mut self, calls: HashSet<Nonce>) {
        let mut calls: Vec<Nonce> = calls.into_iter().collect();
        calls.sort_unstable();
        for nonce in calls {
            let is_out = |holder: &&TicketHolder| holder.state == HolderState::Out && !holder.has_ended;
            let Some(holder) = self.holders.get(&nonce).filter(is_out) else { continue };
            let begins = holder.ticket.begins;
            let number = holder.number;
            let slot = holder.slot;
            if slot.is_some() && begins > self.now {
                self.keep_place(nonce, (begins, number), slot);
            }
        }
    }

    /// Returns the slot as it was, after those before it. A ticket that fits nowhere is counted in
    /// the nearest slot.
    pub(super) fn slot_as_written(&mut self, ticket: &Ticket) -> Option<SlotNumber> {
        let row = self.slots.row();
        if row.back().is_some_and(|back| ticket.begins < back.ends) {
            return self.slots.at(ticket.begins).or_else(|| self.slots.front());
        }
        // At least as long as this one: where it has capacity for one ticket, shorter slots have
        // none.
        let own = ticket.ends.0 - ticket.begins.0;
        let window = self.next.map_or(u64::MAX, |next| micros(next.window).max(own).max(1));
        // With no slot before it, slots are laid back from this one to now.
        let until_begin = ticket.begins.0.saturating_sub(self.now.0);
        let back =
            row.back().map_or(Moment(ticket.begins.0 - until_begin / window * window), |back| back.ends);
        let room = (SLOTS_MAX - row.len()) as u64 / 2;
        let len = window.max((ticket.begins.0 - back.0) / room.max(1));
        let mut at = back.0;
        while at < ticket.begins.0 && self.slots.row().len() < SLOTS_MAX - 1 {
            let end = at.saturating_add(len).min(ticket.begins.0);
            self.slots.push(Moment(at), Moment(end));
            at = end;
        }
        if at < ticket.begins.0 {
            return self.slots.back();
        }
        self.slots.push(ticket.begins, ticket.ends).or_else(|| self.slots.back())
    }
}
