//! Tickets: who is turned away with a slot, who comes back with one, and who is called before his time.
//!
//! Not here: which slot is free and what becomes of it (`calendar`), signatures (`ticket`).

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use super::line::{Place, Rank};
use super::waits::{Wait, micros};
use super::{Admission, later, order_of};
use crate::calendar::{CALL_FOR, Calendar, LATE_FOR, Shown, TICKETS_MAX};
use crate::predict::Slot;
use crate::{
    Ask, ClientKey, Counts, Effect, LaneId, LaneName, Moment, Nonce, Offer, Pass, Promise, Record, Refused,
    Standing, Ticket,
};

/// Part of what drains in a window below which the line is short enough to call somebody who was to come later.
const CALL_BELOW: f64 = 0.5;

/// Holders who come may take so many times the bytes that newcomers may: these cannot fill up what those were promised.
const HOLDER_BYTES: u64 = 2;

/// What a request takes is stored anew when it is so many times as much, or as little, as what is stored.
const PACE_CHANGE: f64 = 1.25;

/// The calendars of all lanes that promise, or have promised.
#[derive(Debug, Default)]
pub(super) struct Promised {
    calendars: HashMap<u32, Calendar>,
    /// When something changes in a calendar by time alone.
    due: BTreeSet<(Moment, u32)>,
    due_of: HashMap<u32, Moment>,
    /// Where a ticket is from, and how long anybody may ask.
    lanes: HashMap<Nonce, u32>,
    lanes_until: BTreeSet<(Moment, Nonce)>,
    /// Requests that run on a ticket, with what is to be stored when they end: until then a crash leaves the ticket good.
    running: HashMap<Pass, Record>,
    /// What was stored last of what a request takes, microseconds.
    paced: HashMap<u32, f64>,
}

/// A request came on this ticket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holding {
    lane: LaneId,
    nonce: Nonce,
}

impl Admission {
    /// How the ticket with this number stands.
    pub fn standing(&self, now: Moment, nonce: Nonce) -> Standing {
        let Some(index) = self.promised.lanes.get(&nonce).copied() else { return Standing::Unknown };
        let Some(calendar) = self.promised.calendars.get(&index) else { return Standing::Unknown };
        match calendar.standing(now, nonce) {
            Standing::Later { begins_in, ahead } => {
                Standing::Later { begins_in, ahead: self.before_slot(index, begins_in, ahead) }
            }
            other => other,
        }
    }

    /// Whether the holder of this ticket would hear a call: only those who would are called early.
    pub fn listen(&mut self, now: Moment, nonce: Nonce, would_hear: bool) {
        let Some(index) = self.promised.lanes.get(&nonce).copied() else { return };
        if let Some(calendar) = self.promised.calendars.get_mut(&index) {
            calendar.listen(nonce, would_hear);
            self.call_early(now, index);
        }
    }

    /// What was stored before a restart, told before anybody is served.
    pub fn restore(&mut self, now: Moment, lane: LaneId, record: Record) {
        let Some(index) = self.find(lane) else { return };
        if let Record::Paced { service_us, .. } = record {
            self.at_mut(index).learned.recall(now, service_us as f64);
            self.promised.paced.insert(index, service_us as f64);
            return;
        }
        let (name, next) = (self.at(index).name, self.at(index).bounds.next);
        let calendar = self.promised.calendars.entry(index).or_insert_with(|| Calendar::new(name, next));
        calendar.restore(now, record);
        match record {
            Record::Promised { ticket, .. } => self.promised.remember(index, &ticket),
            Record::Spent { nonce, until } => self.promised.remember_until(index, nonce, until),
            Record::Called { .. } | Record::Forgotten { .. } | Record::Paced { .. } => {}
        }
        self.promised.arrange(now, index);
    }

    /// All promises that are out, as they were stored: for a store that has lost them.
    pub fn promises(&self) -> Vec<Record> {
        let mut lanes: Vec<_> = self.promised.calendars.iter().collect();
        lanes.sort_unstable_by_key(|(index, _)| **index);
        let mut records: Vec<Record> = lanes.iter().flat_map(|(_, calendar)| calendar.records()).collect();
        let mut known: Vec<_> = self.promised.paced.iter().collect();
        known.sort_unstable_by_key(|(index, _)| **index);
        records.extend(known.iter().map(|(index, service_us)| paced(self.at(**index).name, **service_us)));
        records
    }

    /// Stores what a request takes, if that has changed by much: after a restart slots can be given by it.
    fn note_pace(&mut self, index: u32) {
        if self.promised_of(index) == 0 {
            return;
        }
        let lane = self.at(index);
        let Some(service_us) = lane.learned.expected_of_any() else { return };
        let noted = self.promised.paced.get(&index).copied().unwrap_or(0.0);
        if !(noted / PACE_CHANGE..noted * PACE_CHANGE).contains(&service_us) {
            self.effects.push(Effect::Store(paced(lane.name, service_us)));
            self.promised.paced.insert(index, service_us);
        }
    }

    /// Takes back a promise that could not be stored, before anybody was told of it.
    pub fn forget(&mut self, now: Moment, nonce: Nonce) {
        let Some(lane) = self.promised.lanes.get(&nonce).copied() else { return };
        let calendar = self.promised.calendars.get_mut(&lane);
        if let Some(record) = calendar.and_then(|calendar| calendar.forget(now, nonce)) {
            self.effects.push(Effect::Store(record));
            self.promised.arrange(now, lane);
        }
    }

    /// A lane's bounds say whether and how it promises.
    pub(super) fn set_promising(&mut self, now: Moment, index: u32) {
        let (name, next) = (self.at(index).name, self.at(index).bounds.next);
        match self.promised.calendars.get_mut(&index) {
            Some(calendar) => calendar.set(next),
            None if next.is_some() => {
                self.promised.calendars.insert(index, Calendar::new(name, next));
            }
            None => return,
        }
        self.promised.arrange(now, index);
    }

    /// A lane is removed, and with it what it promised.
    pub(super) fn stop_promising(&mut self, index: u32) {
        self.promised.calendars.remove(&index);
        self.promised.paced.remove(&index);
        if let Some(due) = self.promised.due_of.remove(&index) {
            self.promised.due.remove(&(due, index));
        }
    }

    /// Tickets that are out.
    pub(super) fn promised_of(&self, index: u32) -> u32 {
        self.promised.calendars.get(&index).map_or(0, Calendar::promised)
    }

    /// What has happened in a lane, with what became of its promises.
    pub(super) fn tally_of(&self, index: u32, counts: Counts) -> Counts {
        let Some(calendar) = self.promised.calendars.get(&index) else { return counts };
        let tally = calendar.tally();
        Counts {
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

    /// Somebody shows a ticket. `None`: it says nothing here, and he is a newcomer.
    pub(super) fn offer_to_holder(
        &mut self,
        now: Moment,
        index: u32,
        slot: Slot,
        ask: &Ask,
        ticket: &Ticket,
        has_room: bool,
    ) -> Option<Offer> {
        let shown = match self.show(now, index, ticket) {
            Shown::Unknown if ask.adopts && self.adopt(now, index, ticket, ask.client) => {
                self.show(now, index, ticket)
            }
            shown => shown,
        };
        let begins = i64::try_from(ticket.begins.0).unwrap_or(i64::MAX);
        let place = match shown {
            Shown::Unknown => return None,
            Shown::Used => return Some(self.refuse(index, Refused::Replayed)),
            Shown::Expired => return Some(self.refuse(index, Refused::Expired)),
            // A newcomer would run at once as well: nothing is gained by sending away who has waited.
            Shown::Early(promise) if !has_room => {
                return Some(Offer::Early(self.with_line(now, index, promise)));
            }
            // Called: his place has been kept since then, behind who was in line before.
            Shown::Open { until } if ticket.begins > now => {
                (Rank::Newcomer, order_of(until, 0) - i64::try_from(CALL_FOR.as_micros()).unwrap_or(0))
            }
            Shown::Early(_) | Shown::Open { .. } => (Rank::Holder, begins),
            Shown::Late => (Rank::LateHolder, begins),
        };
        let holding = Holding { lane: self.id_of(index), nonce: ticket.nonce };
        if has_room {
            self.come(now, &holding);
            let pass = self.run_at_once(now, index, slot);
            self.spend(now, pass, &holding);
            return Some(Offer::Run(pass));
        }
        self.recall(now, self.path(index).as_slice());
        let lane = self.at(index);
        let room = lane.bounds.wait_bytes.saturating_mul(HOLDER_BYTES);
        if !ask.can_wait || lane.bytes.saturating_add(ask.bytes) > room {
            // The ticket stays good: he may come again.
            let wait = self.wait_at_end(now, index);
            let prediction = self.told(index, lane.line.len(), wait);
            return Some(self.refuse(index, Refused::Full(prediction)));
        }
        self.come(now, &holding);
        Some(self.get_in_line(now, index, slot, ask, place, Some(holding)))
    }

    fn show(&mut self, now: Moment, index: u32, ticket: &Ticket) -> Shown {
        let calendar = self.promised.calendars.get_mut(&index);
        calendar.map_or(Shown::Unknown, |calendar| calendar.show(now, ticket))
    }

    /// Another node's ticket is shown here for the first time. Also where none are given any more: what was promised is kept.
    fn adopt(&mut self, now: Moment, index: u32, ticket: &Ticket, client: ClientKey) -> bool {
        let (name, next) = (self.at(index).name, self.at(index).bounds.next);
        let calendar = self.promised.calendars.entry(index).or_insert_with(|| Calendar::new(name, next));
        if !calendar.adopt(now, *ticket, client) {
            return false;
        }
        self.promised.remember(index, ticket);
        self.promised.arrange(now, index);
        // Otherwise a restart would not know that it was used.
        self.effects.push(Effect::Store(Record::Promised { ticket: *ticket, client }));
        true
    }

    /// There is no place in line: a slot, if any is given here.
    pub(super) fn turn_away(&mut self, now: Moment, index: u32, ask: &Ask, wait: Option<Wait>) -> Offer {
        let lane = self.at(index);
        let ahead = lane.line.before(Place {
            rank: Rank::Newcomer,
            order: order_of(now, ask.priority),
            turn: u64::MAX,
        });
        let prediction = self.told(index, ahead.count, wait);
        let (Some(nonce), Some(_)) = (ask.nonce, lane.bounds.next) else {
            return self.refuse(index, Refused::Full(prediction));
        };
        // Not before those who are in line now have had their turn.
        let earliest = later(now, wait.map_or(lane.bounds.wait, |wait| micros(wait.expected)));
        match self.promise(now, index, earliest, ask, nonce) {
            Some(promise) => Offer::Next(self.with_line(now, index, promise)),
            None => self.refuse(index, Refused::NoSlot(prediction)),
        }
    }

    fn promise(
        &mut self,
        now: Moment,
        index: u32,
        earliest: Moment,
        ask: &Ask,
        nonce: Nonce,
    ) -> Option<Promise> {
        let rate = self.requests_per_second(index)?;
        let calendar = self.promised.calendars.get_mut(&index)?;
        let promise = calendar.reserve(now, earliest, rate, ask.client, nonce)?;
        if promise.is_new {
            self.promised.remember(index, &promise.ticket);
            self.promised.arrange(now, index);
            let record = Record::Promised { ticket: promise.ticket, client: ask.client };
            self.effects.push(Effect::Store(record));
            // Not only at the ends of slots: a crash before the first would leave the next start without a pace to promise by.
            self.note_pace(index);
        }
        Some(promise)
    }

    /// The promise as its holder is told it: not only tickets go before him.
    fn with_line(&self, now: Moment, index: u32, promise: Promise) -> Promise {
        let begins_in = Duration::from_micros(promise.ticket.begins.0.saturating_sub(now.0));
        Promise { ahead: self.before_slot(index, begins_in, promise.ahead), ..promise }
    }

    /// So many go before the holder of a ticket: those with `tickets` before his, and of the line whoever has his turn before the
    /// slot begins. From then on the holder goes first.
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

    fn refuse(&mut self, index: u32, refused: Refused) -> Offer {
        self.at_mut(index).counts.refused += 1;
        Offer::Refused(refused)
    }

    /// The holder is in line, or runs.
    fn come(&mut self, now: Moment, holding: &Holding) {
        self.with_calendar(now, holding, |calendar| {
            calendar.come(now, holding.nonce);
        });
    }

    /// The holder has his permit: the ticket is used up, unless the process ends before his request does.
    pub(super) fn spend(&mut self, now: Moment, pass: Pass, holding: &Holding) {
        let record = self.with_calendar(now, holding, |calendar| calendar.ran(now, holding.nonce)).flatten();
        self.promised.running.extend(record.map(|record| (pass, record)));
    }

    /// A request that ran has ended, whoever it was of.
    pub(super) fn has_spent(&mut self, pass: Pass) {
        if !self.promised.running.is_empty() {
            self.effects.extend(self.promised.running.remove(&pass).map(Effect::Store));
        }
    }

    /// The holder left the line before his turn, and may come again.
    pub(super) fn come_back(&mut self, now: Moment, holding: &Holding) {
        self.with_calendar(now, holding, |calendar| calendar.left(now, holding.nonce));
    }

    fn with_calendar<T>(
        &mut self,
        now: Moment,
        holding: &Holding,
        change: impl FnOnce(&mut Calendar) -> T,
    ) -> Option<T> {
        // The lane may have been removed, and its number be another one's.
        let index = self.find(holding.lane)?;
        let answer = self.promised.calendars.get_mut(&index).map(change);
        self.promised.arrange(now, index);
        answer
    }

    /// Where the line is short, holders are called before their time, so that no permit lies idle while somebody waits outside. The
    /// places of those who were called count as part of the line, so not all are called at once.
    pub(super) fn call_early(&mut self, now: Moment, index: u32) {
        if !self.promised.calendars.contains_key(&index) || self.promised_of(index) == 0 {
            return;
        }
        let Some(lane) = self.lanes.get(index as usize) else { return };
        let (waiting, Some(next)) = (lane.line.len(), lane.bounds.next) else { return };
        let free = f64::from(lane.run.saturating_sub(lane.running));
        let Some(rate) = self.requests_per_second(index) else { return };
        let Some(calendar) = self.promised.calendars.get_mut(&index) else { return };
        // Who is called comes within the time that his place is kept, or not at all.
        // And nobody is called into a line that is longer than lines are to be here.
        let span = next.window.mul_f64(CALL_BELOW).min(CALL_FOR).min(lane.bounds.wait);
        let ahead = (span.as_secs_f64() * rate).max(free);
        let mut has_called = false;
        while f64::from(waiting + calendar.called()) < ahead {
            let Some((nonce, until)) = calendar.call(now) else { break };
            self.effects.push(Effect::Store(Record::Called { nonce }));
            self.effects.push(Effect::Call { nonce, until });
            has_called = true;
        }
        if has_called {
            self.promised.arrange(now, index);
        }
    }

    /// Holders outside who will go before one who comes now and has his turn then: those who were called, and those whose slots
    /// will have begun.
    pub(super) fn due(&self, now: Moment, index: u32, turn: f64) -> f64 {
        let Some(calendar) = self.promised.calendars.get(&index) else { return 0.0 };
        calendar.due(now, later(now, micros(turn)))
    }

    /// Requests of this lane that end in a second, if there is a line: what may be promised is a part of it.
    pub(super) fn requests_per_second(&self, index: u32) -> Option<f64> {
        let service = self.at(index).learned.expected_of_any()?;
        Some(self.permits_in_line(index) / service.max(1.0) * 1e6)
    }

    /// Slots and calls that have ended. Says when the next one does.
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
fn paced(lane: LaneName, service_us: f64) -> Record {
    Record::Paced { lane, service_us: service_us.round() as u64 }
}

impl Promised {
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

    /// Of tickets that are long over it is not remembered where they are from.
    fn drop_old(&mut self, now: Moment) {
        while let Some(first) = self.lanes_until.first().copied().filter(|(until, _)| *until <= now) {
            self.lanes_until.remove(&first);
            self.lanes.remove(&first.1);
        }
    }

    /// A calendar has changed: when it is to be looked at again.
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

/// Of so many tickets it is remembered where they are from. About 100 bytes each. Of more, the one that is over first can be asked
/// about no more; its holder may come all the same, as his ticket says which lane it is for.
const REMEMBERED_MAX: usize = 2 * TICKETS_MAX as usize;

/// So much longer than a ticket may be good it is remembered where it is from.
const MEMORY_SPARE: Duration = Duration::from_secs(1);
