//! A calendar after a restart: what was stored comes back into the slots in which it was.
//!
//! Not here: everything that happens after that (`calendar`), the store (`edge`).

use std::collections::HashSet;
use std::time::Duration;

use super::slots::{SLOTS_MAX, SlotNumber};
use super::{Calendar, Holder, LATE_FOR, State, TICKETS_MAX, after, micros};
use crate::{ClientKey, Moment, Nonce, Record, Ticket};

/// A record of a ticket whose slot is farther ahead is none: nobody configures such a horizon.
pub(super) const AHEAD_MAX: Duration = Duration::from_secs(366 * 86_400);

impl Calendar {
    /// What was stored before a restart, before anything else: in the order of the slots, or in any order if nothing is asked in
    /// between. What is of another lane or long over is passed over.
    pub fn restore(&mut self, now: Moment, record: Record) {
        match record {
            Record::Promised { ticket, client } => self.restore_promise(now, ticket, client),
            Record::Spent { nonce, until } => {
                self.remove(nonce);
                if until > now {
                    self.remember_spent(nonce, until);
                }
            }
            Record::Called { nonce } => drop(self.restored_calls.insert(nonce)),
            Record::Forgotten { nonce } => drop(self.remove(nonce)),
            Record::Paced { .. } => {}
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
        // Of two of one client, one of which is late, the other is the good one.
        if let Some(other) = other.filter(|other| self.ends_of(*other) > Some(ticket.ends)) {
            self.clients.insert(client, other);
        }
        self.restored.push(ticket.nonce);
    }

    /// Restored promises come into their slots in the order of these, whatever order they came in.
    pub(super) fn put_restored(&mut self) {
        let mut nonces = std::mem::take(&mut self.restored);
        let calls = std::mem::take(&mut self.restored_calls);
        nonces.sort_unstable_by_key(|nonce| {
            self.holders.get(nonce).map(|holder| (holder.ticket.begins, *nonce))
        });
        for nonce in nonces {
            // Used up or forgotten by what was restored after it, or put already as it was told twice.
            let holder = self.holders.get(&nonce).filter(|holder| holder.slot.is_none() && !holder.has_ended);
            let Some(ticket) = holder.map(|holder| holder.ticket) else { continue };
            if ticket.ends <= self.now {
                // It was over before anybody was here again.
                self.end(nonce, Moment(0));
            } else if let Some(slot) = self.slot_as_written(&ticket) {
                self.put(nonce, slot);
                let now = self.now;
                self.slots.change(slot, |slot| slot.is_whole &= slot.begins > now);
            }
        }
        self.restore_calls(calls);
    }

    /// Whoever was called was on his way, or in line, when the process ended: he is awaited once more. Calls are told after their
    /// promises, which may have been put into slots by then.
    fn restore_calls(&mut self, calls: HashSet<Nonce>) {
        let mut calls: Vec<Nonce> = calls.into_iter().collect();
        calls.sort_unstable();
        for nonce in calls {
            let is_out = |holder: &&Holder| holder.state == State::Out && !holder.has_ended;
            let Some(holder) = self.holders.get(&nonce).filter(is_out) else { continue };
            let (begins, number, slot) = (holder.ticket.begins, holder.number, holder.slot);
            if slot.is_some() && begins > self.now {
                self.keep_place(nonce, (begins, number), slot);
            }
        }
    }

    /// The slot as it was, after those that were before it. What fits nowhere is counted where it is nearest.
    pub(super) fn slot_as_written(&mut self, ticket: &Ticket) -> Option<SlotNumber> {
        let row = self.slots.row();
        if row.back().is_some_and(|back| ticket.begins < back.ends) {
            return self.slots.at(ticket.begins).or_else(|| self.slots.front());
        }
        // As long as this one at least: where it has room for one, shorter ones have none.
        let own = ticket.ends.0 - ticket.begins.0;
        let window = self.next.map_or(u64::MAX, |next| micros(next.window).max(own).max(1));
        // With none before it, slots count back from this one to now.
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
