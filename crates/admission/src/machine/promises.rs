//! Tickets: deferrals with a slot, returns of holders, and early calls.
//!
//! Not here: which slot is free and how it ends (`calendar`), signatures (`ticket`).

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use super::waits::{ExpectedWait, micros};
use super::{Admission, later, order_of};
use crate::calendar::{CALL_FOR, LATE_FOR, ShownTicket, TICKETS_MAX, TicketCalendar};
use crate::machine::wait_queue::{QueuePosition, QueueRank};
use crate::predict::ClassSlot;
use crate::{
    AdmissionEffect, AdmissionRefusal, AdmissionRequest, ClientKey, Decision, LaneCounts, LaneId, LaneName,
    Moment, Nonce, RequestKey, SlotPromise, Ticket, TicketRecord, TicketStatus,
};

/// Part of a window's drained work below which the queue is short enough to call a holder early.
const CALL_BELOW: f64 = 0.5;

/// Factor on the bytes that holders may take against newcomers. So newcomers cannot use up the
/// bytes that holders need.
const HOLDER_BYTES: u64 = 2;

/// Factor of change, up or down, from which on the service time is stored again.
const PACE_CHANGE: f64 = 1.25;

/// The calendars of all lanes that promise, or have promised.
#[derive(Debug, Default)]
pub(super) struct PromiseTable {
    calendars: HashMap<u32, TicketCalendar>,
    /// When time alone changes something in a calendar.
    due: BTreeSet<(Moment, u32)>,
    due_of: HashMap<u32, Moment>,
    /// The lane that gave each ticket, and until when that is remembered.
    lanes: HashMap<Nonce, u32>,
    lanes_until: BTreeSet<(Moment, Nonce)>,
    /// Requests that run on a ticket, with the record to store when they end. Until then, a crash
    /// leaves the ticket valid.
    running: HashMap<RequestKey, TicketRecord>,
    /// Service time stored last for each lane, microseconds.
    paced: HashMap<u32, f64>,
}

/// The ticket with which a request came.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldTicket {
    lane: LaneId,
    nonce: Nonce,
}

impl Admission {
    /// Returns the status of the ticket with this number.
    pub fn standing(&self, now: Moment, nonce: Nonce) -> TicketStatus {
        let Some(index) = self.promised.lanes.get(&nonce).copied() else { return TicketStatus::Unknown };
        let Some(calendar) = self.promised.calendars.get(&index) else { return TicketStatus::Unknown };
        match calendar.standing(now, nonce) {
            TicketStatus::Later { begins_in, ahead } => {
                TicketStatus::Later { begins_in, ahead: self.before_slot(index, begins_in, ahead) }
            }
            other => other,
        }
    }

    /// Notes whether the holder of this ticket would receive a call. Only those that would are
    /// called early.
    pub fn listen(&mut self, now: Moment, nonce: Nonce, would_hear: bool) {
        let Some(index) = self.promised.lanes.get(&nonce).copied() else { return };
        if let Some(calendar) = self.promised.calendars.get_mut(&index) {
            calendar.listen(nonce, would_hear);
            self.call_early(now, index);
        }
    }

    /// Restores a stored record after a restart, before any request is served.
    pub fn restore(&mut self, now: Moment, lane: LaneId, record: TicketRecord) {
        let Some(index) = self.find(lane) else { return };
        if let TicketRecord::Paced { service_us, .. } = record {
            self.at_mut(index).learned.recall(now, service_us as f64);
            self.promised.paced.insert(index, service_us as f64);
            return;
        }
        let name = self.at(index).name;
        let next = self.at(index).bounds.next;
        let calendar =
            self.promised.calendars.entry(index).or_insert_with(|| TicketCalendar::new(name, next));
        calendar.restore(now, record);
        match record {
            TicketRecord::Promised { ticket, .. } => self.promised.remember(index, &ticket),
            TicketRecord::Spent { nonce, until } => self.promised.remember_until(index, nonce, until),
            TicketRecord::Called { .. } | TicketRecord::Forgotten { .. } | TicketRecord::Paced { .. } => {}
        }
        self.promised.arrange(now, index);
    }

    /// Returns all open promises as they were stored, for a store that has lost them.
    pub fn promises(&self) -> Vec<TicketRecord> {
        let mut lanes: Vec<_> = self.promised.calendars.iter().collect();
        lanes.sort_unstable_by_key(|(index, _)| **index);
        let mut records: Vec<TicketRecord> =
            lanes.iter().flat_map(|(_, calendar)| calendar.records()).collect();
        let mut known: Vec<_> = self.promised.paced.iter().collect();
        known.sort_unstable_by_key(|(index, _)| **index);
        records.extend(known.iter().map(|(index, service_us)| paced(self.at(**index).name, **service_us)));
        records
    }

    /// Stores the service time if it has changed much, so that slots can be given by it after a
    /// restart.
    fn note_pace(&mut self, index: u32) {
        if self.promised_of(index) == 0 {
            return;
        }
        let lane = self.at(index);
        let Some(service_us) = lane.learned.expected_of_any() else { return };
        let noted = self.promised.paced.get(&index).copied().unwrap_or(0.0);
        if !(noted / PACE_CHANGE..noted * PACE_CHANGE).contains(&service_us) {
            self.effects.push(AdmissionEffect::Store(paced(lane.name, service_us)));
            self.promised.paced.insert(index, service_us);
        }
    }

    /// Takes back a promise that could not be stored, before anybody learned of it.
    pub fn forget(&mut self, now: Moment, nonce: Nonce) {
        let Some(lane) = self.promised.lanes.get(&nonce).copied() else { return };
        let calendar = self.promised.calendars.get_mut(&lane);
        if let Some(record) = calendar.and_then(|calendar| calendar.forget(now, nonce)) {
            self.effects.push(AdmissionEffect::Store(record));
            self.promised.arrange(now, lane);
        }
    }

    /// Sets from a lane's limits whether and how it promises.
    pub(super) fn set_promising(&mut self, now: Moment, index: u32) {
        let name = self.at(index).name;
        let next = self.at(index).bounds.next;
        match self.promised.calendars.get_mut(&index) {
            Some(calendar) => calendar.set(next),
            None if next.is_some() => {
                self.promised.calendars.insert(index, TicketCalendar::new(name, next));
            }
            None => return,
        }
        self.promised.arrange(now, index);
    }

    /// Drops the promises of a removed lane.
    pub(super) fn stop_promising(&mut self, index: u32) {
        self.promised.calendars.remove(&index);
        self.promised.paced.remove(&index);
        if let Some(due) = self.promised.due_of.remove(&index) {
            self.promised.due.remove(&(due, index));
        }
    }

    /// Returns the number of tickets that are out.
    pub(super) fn promised_of(&self, index: u32) -> u32 {
        self.promised.calendars.get(&index).map_or(0, TicketCalendar::promised)
    }

    /// Returns the event counts of a lane, including how its promises ended.
    pub(super) fn tally_of(&self, index: u32, counts: LaneCounts) -> LaneCounts {
        let Some(calendar) = self.promised.calendars.get(&index) else { return counts };
        let tally = calendar.tally();
        LaneCounts {
            promised: tally.promised,
            adopted: tally.adopted,
            kept: tally.kept,
            broken: tally.broken,
            late: tally.late,
            never_came: tally.never_came,
            called_early: tally.called_early,
            ..counts
        }
    }

    /// Offers a request that shows a ticket. `None` if the ticket is not valid here, which makes
    /// its bearer a newcomer.
    pub(super) fn offer_to_holder(
        &mut self,
        now: Moment,
        index: u32,
        slot: ClassSlot,
        ask: &AdmissionRequest,
        ticket: &Ticket,
        has_room: bool,
    ) -> Option<Decision> {
        let shown = match self.show(now, index, ticket) {
            ShownTicket::Unknown if ask.adopts && self.adopt(now, index, ticket, ask.client) => {
                self.show(now, index, ticket)
            }
            shown => shown,
        };
        let begins = i64::try_from(ticket.begins.0).unwrap_or(i64::MAX);
        let place = match shown {
            ShownTicket::Unknown => return None,
            ShownTicket::Used => return Some(self.refuse(index, AdmissionRefusal::Replayed)),
            ShownTicket::Expired => return Some(self.refuse(index, AdmissionRefusal::Expired)),
            // A newcomer would run at once as well, so sending away a request that has waited gains
            // nothing.
            ShownTicket::Early(promise) if !has_room => {
                return Some(Decision::Early(self.with_line(now, index, promise)));
            }
            // It was called. Its position has been kept since then, behind the requests that were
            // queued before.
            ShownTicket::Open { until } if ticket.begins > now => {
                (QueueRank::Newcomer, order_of(until, 0) - i64::try_from(CALL_FOR.as_micros()).unwrap_or(0))
            }
            ShownTicket::Early(_) | ShownTicket::Open { .. } => (QueueRank::Holder, begins),
            ShownTicket::Late => (QueueRank::LateHolder, begins),
        };
        let holding = HeldTicket { lane: self.id_of(index), nonce: ticket.nonce };
        if has_room {
            self.come(now, &holding);
            let pass = self.run_at_once(now, index, slot);
            self.spend(now, pass, &holding);
            return Some(Decision::Run(pass));
        }
        self.recall(now, self.path(index).as_slice());
        let lane = self.at(index);
        let room = lane.bounds.wait_bytes.saturating_mul(HOLDER_BYTES);
        if !ask.can_wait || lane.bytes.saturating_add(ask.bytes) > room {
            // The ticket stays valid: its holder may come again.
            let wait = self.wait_at_end(now, index);
            let prediction = self.describe_wait(index, lane.line.len(), wait);
            return Some(self.refuse(index, AdmissionRefusal::Full(prediction)));
        }
        self.come(now, &holding);
        Some(self.get_in_line(now, index, slot, ask, place, Some(holding)))
    }

    fn show(&mut self, now: Moment, index: u32, ticket: &Ticket) -> ShownTicket {
        let calendar = self.promised.calendars.get_mut(&index);
        calendar.map_or(ShownTicket::Unknown, |calendar| calendar.show(now, ticket))
    }

    /// Adopts another node's ticket that is shown here for the first time. This applies even if
    /// none are given any more: promises are kept.
    fn adopt(&mut self, now: Moment, index: u32, ticket: &Ticket, client: ClientKey) -> bool {
        let name = self.at(index).name;
        let next = self.at(index).bounds.next;
        let calendar =
            self.promised.calendars.entry(index).or_insert_with(|| TicketCalendar::new(name, next));
        if !calendar.adopt(now, *ticket, client) {
            return false;
        }
        self.promised.remember(index, ticket);
        self.promised.arrange(now, index);
        // Otherwise a restart would not know that it was used.
        self.effects.push(AdmissionEffect::Store(TicketRecord::Promised { ticket: *ticket, client }));
        true
    }

    /// Defers a request that gets no position in the queue: with a slot, if any is given here.
    pub(super) fn turn_away(
        &mut self,
        now: Moment,
        index: u32,
        ask: &AdmissionRequest,
        wait: Option<ExpectedWait>,
    ) -> Decision {
        let lane = self.at(index);
        let ahead = lane.line.before(QueuePosition {
            rank: QueueRank::Newcomer,
            order: order_of(now, ask.priority),
            turn: u64::MAX,
        });
        let prediction = self.describe_wait(index, ahead.count, wait);
        let (Some(nonce), Some(_)) = (ask.nonce, lane.bounds.next) else {
            return self.refuse(index, AdmissionRefusal::Full(prediction));
        };
        // Not before the requests in the queue now have had their turn.
        let earliest = later(now, wait.map_or(lane.bounds.wait, |wait| micros(wait.expected)));
        match self.promise(now, index, earliest, ask, nonce) {
            Some(promise) => Decision::Next(self.with_line(now, index, promise)),
            None => self.refuse(index, AdmissionRefusal::NoSlot(prediction)),
        }
    }

    fn promise(
        &mut self,
        now: Moment,
        index: u32,
        earliest: Moment,
        ask: &AdmissionRequest,
        nonce: Nonce,
    ) -> Option<SlotPromise> {
        let rate = self.requests_per_second(index)?;
        let calendar = self.promised.calendars.get_mut(&index)?;
        let promise = calendar.reserve(now, earliest, rate, ask.client, nonce)?;
        if promise.is_new {
            self.promised.remember(index, &promise.ticket);
            self.promised.arrange(now, index);
            let record = TicketRecord::Promised { ticket: promise.ticket, client: ask.client };
            self.effects.push(AdmissionEffect::Store(record));
            // Not only at the ends of slots. A crash before the first end would leave the next
            // start without a pace to promise by.
            self.note_pace(index);
        }
        Some(promise)
    }

    /// Returns the promise as shown to its holder: tickets are not all that goes before it.
    fn with_line(&self, now: Moment, index: u32, promise: SlotPromise) -> SlotPromise {
        let begins_in = Duration::from_micros(promise.ticket.begins.0.saturating_sub(now.0));
        SlotPromise { ahead: self.before_slot(index, begins_in, promise.ahead), ..promise }
    }

    /// Returns how many requests go before the holder of a ticket. They are the holders of the
    /// `tickets` before it, and queued requests that run before the slot begins. After that, the
    /// holder goes first.
    fn before_slot(&self, index: u32, begins_in: Duration, tickets: u32) -> u32 {
        let turns =
            self.requests_per_second(index).map_or(0.0, |rate| (rate * begins_in.as_secs_f64()).ceil());
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a float to an integer saturates"
        )]
        let turns = turns as u32;
        tickets.saturating_add(self.at(index).line.len().min(turns))
    }

    fn refuse(&mut self, index: u32, refused: AdmissionRefusal) -> Decision {
        self.at_mut(index).counts.refused += 1;
        Decision::Refused(refused)
    }

    /// Notes that the holder is in the queue, or runs.
    fn come(&mut self, now: Moment, holding: &HeldTicket) {
        self.with_calendar(now, holding, |calendar| {
            calendar.come(now, holding.nonce);
        });
    }

    /// Uses up the ticket of a holder that has its permit, unless the process ends before its
    /// request does.
    pub(super) fn spend(&mut self, now: Moment, pass: RequestKey, holding: &HeldTicket) {
        let record = self.with_calendar(now, holding, |calendar| calendar.ran(now, holding.nonce)).flatten();
        self.promised.running.extend(record.map(|record| (pass, record)));
    }

    /// Notes that a request that ran has ended, with or without a ticket.
    pub(super) fn has_spent(&mut self, pass: RequestKey) {
        if !self.promised.running.is_empty() {
            self.effects.extend(self.promised.running.remove(&pass).map(AdmissionEffect::Store));
        }
    }

    /// Notes that the holder left the queue before its turn, and may come again.
    pub(super) fn come_back(&mut self, now: Moment, holding: &HeldTicket) {
        self.with_calendar(now, holding, |calendar| calendar.reinstate_holder(now, holding.nonce));
    }

    fn with_calendar<T>(
        &mut self,
        now: Moment,
        holding: &HeldTicket,
        change: impl FnOnce(&mut TicketCalendar) -> T,
    ) -> Option<T> {
        // The lane may have been removed, and its number reused.
        let index = self.find(holding.lane)?;
        let answer = self.promised.calendars.get_mut(&index).map(change);
        self.promised.arrange(now, index);
        answer
    }

    /// Calls holders early while the queue is short, so that no permit is idle while a holder waits
    /// outside. Positions of called holders count as part of the queue, so not all are called at
    /// once.
    pub(super) fn call_early(&mut self, now: Moment, index: u32) {
        if !self.promised.calendars.contains_key(&index) || self.promised_of(index) == 0 {
            return;
        }
        let Some(lane) = self.lanes.get(index as usize) else { return };
        let (waiting, Some(next)) = (lane.line.len(), lane.bounds.next) else { return };
        let free = f64::from(lane.run.saturating_sub(lane.running));
        let Some(rate) = self.requests_per_second(index) else { return };
        let Some(calendar) = self.promised.calendars.get_mut(&index) else { return };
        // A called holder comes within the time that its position is kept, or not at all. No holder
        // is called into a queue that is longer than the lane's limit.
        let span = next.window.mul_f64(CALL_BELOW).min(CALL_FOR).min(lane.bounds.wait);
        let ahead = (span.as_secs_f64() * rate).max(free);
        let mut has_called = false;
        while f64::from(waiting + calendar.called()) < ahead {
            let Some((nonce, until)) = calendar.call(now) else { break };
            self.effects.push(AdmissionEffect::Store(TicketRecord::Called { nonce }));
            self.effects.push(AdmissionEffect::Call { nonce, until });
            has_called = true;
        }
        if has_called {
            self.promised.arrange(now, index);
        }
    }

    /// Returns the holders outside that will go before a request that comes now and runs at `turn`.
    /// They are the called holders, and those whose slots will have begun.
    pub(super) fn due(&self, now: Moment, index: u32, turn: f64) -> f64 {
        let Some(calendar) = self.promised.calendars.get(&index) else { return 0.0 };
        calendar.due(now, later(now, micros(turn)))
    }

    /// Returns how many requests of this lane end in a second while there is a queue. Promises are
    /// a part of that.
    pub(super) fn requests_per_second(&self, index: u32) -> Option<f64> {
        let service = self.at(index).learned.expected_of_any()?;
        Some(self.permits_in_line(index) / service.max(1.0) * 1e6)
    }

    /// Ends slots and calls that are over. Returns when the next one ends.
    pub(super) fn tick_promises(&mut self, now: Moment) -> Option<Moment> {
        while let Some((due, index)) = self.promised.due.first().copied().filter(|(due, _)| *due <= now) {
            self.promised.due.remove(&(due, index));
            self.promised.due_of.remove(&index);
            self.call_early(now, index);
            self.note_pace(index);
            self.promised.arrange(now, index);
            if self.promised.due_of.get(&index).is_some_and(|again| *again <= now) {
                debug_assert!(false, "a calendar that was told the time has nothing due before it");
                break;
            }
        }
        self.promised.drop_old(now);
        self.promised.due.first().map(|(due, _)| *due)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
fn paced(lane: LaneName, service_us: f64) -> TicketRecord {
    TicketRecord::Paced { lane, service_us: service_us.round() as u64 }
}

impl PromiseTable {
    fn remember(&mut self, index: u32, ticket: &Ticket) {
        self.remember_until(index, ticket.nonce, later(ticket.ends, LATE_FOR + MEMORY_SPARE));
    }

    fn remember_until(&mut self, index: u32, nonce: Nonce, until: Moment) {
        if self.lanes.insert(nonce, index).is_none() {
            self.lanes_until.insert((until, nonce));
        }
        if self.lanes.len() > REMEMBERED_MAX
            && let Some((_, nonce)) = self.lanes_until.pop_first()
        {
            self.lanes.remove(&nonce);
        }
    }

    /// Forgets the lanes of tickets that ended long ago.
    fn drop_old(&mut self, now: Moment) {
        while let Some(first) = self.lanes_until.first().copied().filter(|(until, _)| *until <= now) {
            self.lanes_until.remove(&first);
            self.lanes.remove(&first.1);
        }
    }

    /// Notes when a changed calendar must be evaluated again.
    fn arrange(&mut self, now: Moment, index: u32) {
        let due = self.calendars.get_mut(&index).and_then(|calendar| calendar.tick(now));
        let was = self.due_of.get(&index).copied();
        if was == due {
            return;
        }
        if let Some(was) = was {
            self.due.remove(&(was, index));
            self.due_of.remove(&index);
        }
        if let Some(due) = due {
            self.due.insert((due, index));
            self.due_of.insert(index, due);
        }
    }
}

/// Tickets whose lane is remembered, about 100 bytes each. Beyond that, the ticket that ends first
/// can no longer be queried. Its holder may still come, as the ticket names its lane.
const REMEMBERED_MAX: usize = 2 * TICKETS_MAX as usize;

/// Time for which a ticket's lane is remembered beyond the longest validity of a ticket.
const MEMORY_SPARE: Duration = Duration::from_secs(1);
