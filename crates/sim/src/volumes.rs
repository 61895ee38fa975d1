//! A random walk of one volume with some copies: the real code of `nagaya-volumes` under lost
//! messages, cut wires, power cuts, replaced disks and a store that is out of reach.
//!
//! An observer looks at all disks after each step. It checks that every copy in sync has each
//! acknowledged commit, and that a primary with a lease answers no read without one. Each rule of
//! the protocol can be left out: then the walk must find it. Not here: contents of entries.

use std::collections::{BTreeMap, BTreeSet};

use nagaya_volumes::{
    AppendMessage, AppendOutcome, AppendReply, CopyIncarnation, LogPosition, PrimaryVolume, ReplicaVolume,
    VolumeEpoch, VolumeLog, VolumeRecord,
};

use crate::dice::Dice;

/// Steps for which a lease lasts from the moment at which it was asked for.
const LEASE_STEPS: u64 = 40;

/// Steps between two looks at all disks. A commit that is lost stays lost.
const CHECKED_EVERY: u64 = 20;

/// Most messages under way.
const MESSAGES_MAX: usize = 64;

/// A rule of the protocol that is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingRule {
    /// Copies refuse entries of an earlier epoch.
    EpochCheck,
    /// The store compares before it sets.
    StoreComparison,
    /// Only a copy in sync becomes the primary.
    InSyncPromotion,
    /// A disk that was replaced makes another incarnation.
    Incarnation,
    /// Every copy in sync has a complete commit.
    EveryCopy,
    /// A primary answers reads under its lease only.
    ReadLease,
}

impl MissingRule {
    pub const ALL: [Self; 6] = [
        Self::EpochCheck,
        Self::StoreComparison,
        Self::InSyncPromotion,
        Self::Incarnation,
        Self::EveryCopy,
        Self::ReadLease,
    ];
}

/// A broken promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeViolation {
    /// A copy that may become the primary lacks an acknowledged commit.
    Lost { node: usize, position: LogPosition },
    /// A read did not see a commit that was acknowledged before.
    Stale { node: usize, position: LogPosition },
}

/// The course of a walk.
#[derive(Debug, Clone, Default)]
pub struct VolumeReport {
    pub acknowledged: u64,
    pub promotions: u64,
    pub reads: u64,
    pub violation: Option<VolumeViolation>,
}

#[derive(Debug, Clone)]
enum WireMessage {
    Append(AppendMessage),
    Reply(AppendReply),
}

/// A disk: what is left after a power cut.
#[derive(Debug, Clone)]
struct CopyDisk {
    incarnation: CopyIncarnation,
    epoch: VolumeEpoch,
    log: VolumeLog,
}

/// A node that runs.
#[derive(Debug)]
struct RunningCopy {
    replica: ReplicaVolume,
    primary: Option<PrimaryVolume<usize>>,
    /// Step at which its lease ends.
    lease_end: u64,
    /// A reply that may leave once its entries are on the disk.
    unsent: Option<(usize, AppendReply)>,
    /// Commits whose clients wait.
    waiting: Vec<LogPosition>,
}

#[derive(Debug)]
struct CopyNode {
    disk: CopyDisk,
    /// `None` while it has no power.
    running: Option<RunningCopy>,
}

/// One volume and its nodes.
#[derive(Debug)]
pub struct VolumeWorld {
    dice: Dice,
    missing: Option<MissingRule>,
    step: u64,
    nodes: Vec<CopyNode>,
    record: VolumeRecord<usize>,
    /// Step of the last lease that the store has given to the primary.
    leased: u64,
    wires: Vec<(usize, usize, WireMessage)>,
    cut: BTreeSet<(usize, usize)>,
    /// Nodes that do not reach the store.
    storeless: BTreeSet<usize>,
    acknowledged: BTreeMap<u64, LogPosition>,
    report: VolumeReport,
}

impl VolumeWorld {
    /// Makes a volume with this number of copies. All but one are empty.
    pub fn new(seed: u64, copies: usize, missing: Option<MissingRule>) -> Self {
        let disk = CopyDisk {
            incarnation: CopyIncarnation(1),
            epoch: VolumeEpoch::default(),
            log: VolumeLog::default(),
        };
        let nodes = (0..copies).map(|_| CopyNode { disk: disk.clone(), running: None }).collect();
        let record = VolumeRecord::new(0, CopyIncarnation(1), 1..copies);
        let mut world = Self {
            dice: Dice(seed),
            missing,
            step: 0,
            nodes,
            record,
            leased: 0,
            wires: Vec::new(),
            cut: BTreeSet::new(),
            storeless: BTreeSet::new(),
            acknowledged: BTreeMap::new(),
            report: VolumeReport::default(),
        };
        (0..copies).for_each(|node| world.power_on(node));
        world.begin_term(0);
        world
    }

    /// Takes this number of steps, or fewer if a promise breaks.
    pub fn run(&mut self, steps: u64) -> &VolumeReport {
        for _ in 0..steps {
            self.step += 1;
            self.take_step();
            if self.step.is_multiple_of(CHECKED_EVERY) {
                self.check_disks();
            }
            if self.report.violation.is_some() {
                break;
            }
        }
        &self.report
    }

    fn is_missing(&self, rule: MissingRule) -> bool {
        self.missing == Some(rule)
    }

    fn take_step(&mut self) {
        let node =
            if self.dice.chance(40) { *self.record.primary() } else { self.dice.index(self.nodes.len()) };
        match self.dice.roll(100) {
            0..15 => self.write(node),
            15..35 => self.sync(node),
            35..55 => self.send(node),
            55..78 => self.deliver(),
            78..82 => self.read(node),
            82..87 => self.renew(node),
            87..90 => self.change_members(node),
            90..93 => self.promote(node),
            93..94 => self.cut_or_heal(),
            94..95 => self.power_cut(node),
            95..98 => self.power_on(node),
            _ => self.replace_disk(node),
        }
        self.acknowledge();
    }

    // === Nodes ===

    fn power_on(&mut self, node: usize) {
        let CopyNode { disk, running } = &mut self.nodes[node];
        running.get_or_insert_with(|| RunningCopy {
            replica: ReplicaVolume::new(disk.incarnation, disk.epoch, disk.log.clone()),
            primary: None,
            lease_end: 0,
            unsent: None,
            waiting: Vec::new(),
        });
    }

    fn power_cut(&mut self, node: usize) {
        self.nodes[node].running = None;
    }

    /// Replaces a disk without power, if another copy in sync has everything.
    fn replace_disk(&mut self, node: usize) {
        let keeps = |other: &usize| *other != node && self.is_eligible(*other);
        if self.nodes[node].running.is_some() || !(0..self.nodes.len()).any(|other| keeps(&other)) {
            return;
        }
        let incarnation = self.nodes[node].disk.incarnation;
        let next = if self.is_missing(MissingRule::Incarnation) { 0 } else { 1 };
        self.nodes[node].disk = CopyDisk {
            incarnation: CopyIncarnation(incarnation.0 + next),
            epoch: VolumeEpoch::default(),
            log: VolumeLog::default(),
        };
    }

    /// Whether this copy may become the primary.
    fn is_eligible(&self, node: usize) -> bool {
        self.record.is_in_sync(&node, self.nodes[node].disk.incarnation)
    }

    /// Writes a node's log to its disk. Then its reply may leave.
    fn sync(&mut self, node: usize) {
        let CopyNode { disk, running } = &mut self.nodes[node];
        let Some(copy) = running else { return };
        if let Some(primary) = &mut copy.primary {
            disk.log = primary.log().clone();
            disk.epoch = primary.epoch();
            primary.note_synced(disk.incarnation, disk.log.last().number);
            return;
        }
        disk.log = copy.replica.log().clone();
        disk.epoch = copy.replica.epoch();
        if let Some((to, reply)) = copy.unsent.take() {
            self.put_on_wire(node, to, WireMessage::Reply(reply));
        }
    }

    // === Messages ===

    fn put_on_wire(&mut self, from: usize, to: usize, message: WireMessage) {
        if self.wires.len() < MESSAGES_MAX && !self.cut.contains(&(from, to)) {
            self.wires.push((from, to, message));
        }
    }

    fn send(&mut self, node: usize) {
        let to = self.dice.index(self.nodes.len());
        let primary = self.nodes[node].running.as_ref().and_then(|copy| copy.primary.as_ref());
        if let Some(message) = primary.and_then(|primary| primary.message_to(&to)) {
            self.put_on_wire(node, to, WireMessage::Append(message));
        }
    }

    /// Delivers a message, in any order. Some are lost, and some come twice.
    fn deliver(&mut self) {
        if self.wires.is_empty() {
            return;
        }
        let at = self.dice.index(self.wires.len());
        let (from, to, message) = match self.dice.roll(10) {
            0 => self.wires[at].clone(),
            _ => self.wires.swap_remove(at),
        };
        if self.dice.chance(10) || self.cut.contains(&(from, to)) {
            return;
        }
        match message {
            WireMessage::Append(message) => self.append(from, to, message),
            WireMessage::Reply(reply) => self.note_reply(from, to, reply),
        }
    }

    fn append(&mut self, from: usize, to: usize, mut message: AppendMessage) {
        let is_unchecked = self.is_missing(MissingRule::EpochCheck);
        let Some(copy) = &mut self.nodes[to].running else { return };
        if let Some(primary) = &copy.primary {
            if message.epoch <= primary.epoch() && !is_unchecked {
                let (epoch, incarnation) = (primary.epoch(), copy.replica.incarnation());
                let reply = AppendReply { epoch, incarnation, outcome: AppendOutcome::Refused };
                return self.put_on_wire(to, from, WireMessage::Reply(reply));
            }
            // Another one has taken over: its files are compared as a whole.
            copy.replica = ReplicaVolume::new(
                copy.replica.incarnation(),
                message.epoch,
                VolumeLog::from(LogPosition::default()),
            );
            copy.primary = None;
            copy.waiting.clear();
        }
        let sent_in = message.epoch;
        if is_unchecked {
            message.epoch = message.epoch.max(copy.replica.epoch());
        }
        let mut reply = copy.replica.append(&message);
        if is_unchecked {
            // The primary takes it for its own.
            reply.epoch = sent_in;
        }
        match reply.outcome {
            AppendOutcome::Kept { .. } => copy.unsent = Some((from, reply)),
            AppendOutcome::Diverged => {
                let log = VolumeLog::from(LogPosition::default());
                copy.replica = ReplicaVolume::new(copy.replica.incarnation(), message.epoch, log);
                copy.unsent = None;
            }
            _ => self.put_on_wire(to, from, WireMessage::Reply(reply)),
        }
    }

    fn note_reply(&mut self, from: usize, to: usize, reply: AppendReply) {
        let is_one_enough = self.is_missing(MissingRule::EveryCopy);
        let others: Vec<usize> = (0..self.nodes.len()).filter(|node| *node != to).collect();
        let Some(copy) = &mut self.nodes[to].running else { return };
        let Some(primary) = &mut copy.primary else { return };
        primary.note_reply(&from, reply);
        if is_one_enough && matches!(reply.outcome, AppendOutcome::Kept { .. }) {
            for other in others {
                let incarnation = primary.record().in_sync().get(&other).copied();
                if let Some(incarnation) = incarnation {
                    primary.note_reply(&other, AppendReply { incarnation, ..reply });
                }
            }
        }
    }

    fn cut_or_heal(&mut self) {
        let (one, other) = (self.dice.index(self.nodes.len()), self.dice.index(self.nodes.len()));
        match self.dice.roll(6) {
            0 => drop(self.cut.insert((one, other))),
            1 => drop(self.storeless.insert(one)),
            2 | 3 => {
                // It reaches nobody.
                let others = (0..self.nodes.len()).filter(|node| *node != one);
                self.cut.extend(others.flat_map(|node| [(one, node), (node, one)]));
                self.storeless.insert(one);
            }
            _ => {
                self.cut.clear();
                self.storeless.clear();
            }
        }
    }

    // === Clients ===

    fn write(&mut self, node: usize) {
        let Some(copy) = &mut self.nodes[node].running else { return };
        let written = copy.primary.as_mut().and_then(PrimaryVolume::write);
        copy.waiting.extend(written);
    }

    /// Lets clients go whose commits are complete.
    fn acknowledge(&mut self) {
        for node in &mut self.nodes {
            let Some(copy) = &mut node.running else { continue };
            let Some(primary) = &copy.primary else { continue };
            let complete = primary.log().complete();
            for position in copy.waiting.extract_if(.., |position| position.number <= complete) {
                self.acknowledged.entry(position.number).or_insert(position);
                self.report.acknowledged += 1;
                if self.acknowledged[&position.number] != position {
                    // Two commits have the same number: one of them is lost.
                    self.report.violation = Some(VolumeViolation::Lost { node: 0, position });
                }
            }
        }
    }

    /// Answers a read at a node that believes itself the primary.
    fn read(&mut self, node: usize) {
        let is_leaseless = self.is_missing(MissingRule::ReadLease);
        let Some(copy) = &self.nodes[node].running else { return };
        let Some(primary) = &copy.primary else { return };
        if !is_leaseless && self.step >= copy.lease_end {
            return;
        }
        self.report.reads += 1;
        let unseen = self.acknowledged.values().find(|position| !primary.log().has(**position));
        if let Some(position) = unseen {
            self.report.violation = Some(VolumeViolation::Stale { node, position: *position });
        }
    }

    // === The store ===

    fn reaches_store(&self, node: usize) -> bool {
        !self.storeless.contains(&node)
    }

    /// Renews a primary's lease. The store's answer says who is primary.
    fn renew(&mut self, node: usize) {
        if !self.reaches_store(node) {
            return;
        }
        let Some(copy) = &mut self.nodes[node].running else { return };
        copy.replica.note_epoch(self.record.epoch());
        let Some(primary) = &mut copy.primary else { return };
        primary.note_record(self.record.clone());
        if *self.record.primary() == node && !primary.is_fenced() {
            self.leased = self.step;
            copy.lease_end = self.step + LEASE_STEPS;
        }
    }

    /// Lets a primary leave out a copy, or take one in. The store's answer may be lost.
    fn change_members(&mut self, node: usize) {
        let other = self.dice.index(self.nodes.len());
        let (reaches, is_told) = (self.reaches_store(node), self.dice.chance(70));
        let acts_alone = self.is_missing(MissingRule::StoreComparison);
        let Some(copy) = &mut self.nodes[node].running else { return };
        let Some(primary) = &mut copy.primary else { return };
        let expected = primary.record().clone();
        let is_member = expected.in_sync().contains_key(&other);
        let proposed = if is_member { primary.propose_without(&other) } else { primary.propose_with(&other) };
        let Some(Ok(changed)) = proposed else { return };
        if acts_alone {
            // It acts as if the store had agreed.
            primary.note_record(changed.clone());
        }
        if !reaches {
            return;
        }
        if self.record == expected {
            self.record = changed;
        }
        if is_told {
            primary.note_record(self.record.clone());
        }
    }

    /// Lets a node take over, if the primary's lease has ended.
    fn promote(&mut self, node: usize) {
        let is_primary = *self.record.primary() == node;
        let has_lapsed = self.step >= self.leased + LEASE_STEPS;
        let CopyNode { disk, running } = &self.nodes[node];
        let Some(copy) = running else { return };
        if !self.reaches_store(node) || copy.primary.as_ref().is_some_and(|primary| !primary.is_fenced()) {
            return;
        }
        if !is_primary && !has_lapsed {
            return;
        }
        let mut record = self.record.clone();
        if self.is_missing(MissingRule::InSyncPromotion)
            && let Ok(with) = record.with(node, disk.incarnation)
        {
            record = with;
        }
        let Ok(promoted) = record.promoted(&node, disk.incarnation) else { return };
        self.record = promoted;
        self.leased = self.step;
        self.report.promotions += 1;
        self.begin_term(node);
    }

    /// Begins a term with what is on the node's disk.
    fn begin_term(&mut self, node: usize) {
        let CopyNode { disk, running } = &mut self.nodes[node];
        let Some(copy) = running else { return };
        let log = disk.log.clone();
        let mut primary = PrimaryVolume::new(node, self.record.clone(), log);
        primary.note_synced(disk.incarnation, disk.log.last().number);
        copy.primary = Some(primary);
        copy.lease_end = self.step + LEASE_STEPS;
        copy.unsent = None;
        copy.waiting.clear();
    }

    // === The observer ===

    /// Checks that each copy that may become the primary has every acknowledged commit.
    fn check_disks(&mut self) {
        for (node, CopyNode { disk, .. }) in self.nodes.iter().enumerate() {
            if !self.record.is_in_sync(&node, disk.incarnation) {
                continue;
            }
            let lost = self.acknowledged.values().find(|position| !disk.log.has(**position));
            if let Some(position) = lost {
                self.report.violation = Some(VolumeViolation::Lost { node, position: *position });
                return;
            }
        }
    }
}
