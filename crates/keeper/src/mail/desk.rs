//! Counts and limits of the mail that tenants send: recipients and bytes of an hour, messages and
//! conversations at once.
//!
//! One tenant never has more than a part of the node's limits. Counts of an hour outlive the keeper
//! (`kept`). Not here: the conversation (`session`), numbers for operators (`tallies`).

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use nagaya_records::{RecordIndex, TenantName};
use parking_lot::{Mutex, RwLock};

use crate::options::MailOptions;

use super::kept::{CountSlot, KeptCount, KeptCounts};
use super::tallies::{MailTallies, MessageEnd, RefusalReason};
use super::{LIMITED, NO_SERVER};

/// Maximum number of messages of the node that are under way. Each has a connection to the mail
/// server. One tenant has at most a quarter (the configuration's limit of `at_once`).
const NODE_MESSAGES_MAX: u32 = 256;

/// Maximum number of conversations of the node with programs. Each has a buffer. The relay's other
/// connections have their own limit, which is higher.
const NODE_SESSIONS_MAX: u32 = 1024;

/// Conversations of a tenant that may have few messages under way. Otherwise they are twice these
/// messages.
const TENANT_SESSIONS_MIN: u32 = 32;

/// Minimum time between two log messages that the mail server cannot be used.
const LOST_EVERY: Duration = Duration::from_secs(60);

/// Time for which recipients and bytes count.
pub const WINDOW: Duration = Duration::from_secs(3600);

/// Number of tenants whose counts are kept before expired ones are removed.
const TENANTS_KEPT: usize = 4096;

/// Why a command is refused, and the program's reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MailRefusal {
    pub reason: RefusalReason,
    /// An SMTP reply.
    pub answer: String,
}

impl MailRefusal {
    pub fn new(reason: RefusalReason, answer: impl Into<String>) -> Self {
        Self { reason, answer: answer.into() }
    }
}

#[derive(Debug)]
pub struct MailDesk {
    /// `None` in tests.
    table: Option<Arc<RwLock<RecordIndex>>>,
    options: RwLock<MailOptions>,
    used: Mutex<MailUsage>,
    tallies: Arc<MailTallies>,
}

#[derive(Debug, Default)]
struct MailUsage {
    messages: u32,
    sessions: u32,
    /// Time of the last log message that there is no server.
    lost: Option<Instant>,
    tenants: HashMap<TenantName, TenantUse>,
    kept: KeptCounts,
}

#[derive(Debug)]
struct TenantUse {
    since: Instant,
    recipients: u32,
    bytes: u64,
    messages: u32,
    sessions: u32,
    /// It is logged that a limit of this hour was reached.
    is_said: bool,
    /// `None`: nothing of it is kept.
    place: Option<CountSlot>,
}

impl TenantUse {
    fn begin(since: Instant) -> Self {
        Self { since, recipients: 0, bytes: 0, messages: 0, sessions: 0, is_said: false, place: None }
    }

    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.since) >= WINDOW
    }

    fn is_idle(&self) -> bool {
        self.messages == 0 && self.sessions == 0
    }
}

impl MailUsage {
    fn of(&mut self, tenant: &TenantName, now: Instant) -> &mut TenantUse {
        if self.tenants.len() >= TENANTS_KEPT && !self.tenants.contains_key(tenant) {
            let kept = &mut self.kept;
            self.tenants.retain(|_, used| {
                let stays = !used.is_idle() || !used.is_over(now);
                if let Some(place) = used.place.take_if(|_| !stays) {
                    kept.give_back(place);
                }
                stays
            });
        }
        let used = self.tenants.entry(tenant.clone()).or_insert_with(|| TenantUse::begin(now));
        if used.is_over(now) {
            let TenantUse { messages, sessions, place, .. } = *used;
            *used = TenantUse { messages, sessions, place, ..TenantUse::begin(now) };
        }
        used
    }

    /// Keeps this tenant's counts of its hour.
    fn keep(&mut self, tenant: &TenantName, now: Instant) {
        let Some(used) = self.tenants.get_mut(tenant) else { return };
        if used.place.is_none() {
            used.place = self.kept.take_place();
        }
        let Some(place) = used.place else { return };
        let age = now.saturating_duration_since(used.since);
        let since = SystemTime::now().checked_sub(age).unwrap_or(SystemTime::UNIX_EPOCH);
        let TenantUse { recipients, bytes, .. } = *used;
        self.kept.write(place, &KeptCount { tenant: tenant.clone(), since, recipients, bytes });
    }
}

/// One conversation, while it counts.
#[derive(Debug)]
pub struct SessionGuard {
    desk: Arc<MailDesk>,
    tenant: TenantName,
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        let mut used = self.desk.used.lock();
        used.sessions -= 1;
        if let Some(of_tenant) = used.tenants.get_mut(&self.tenant) {
            of_tenant.sessions -= 1;
        }
    }
}

/// One message that is under way, while it counts.
#[derive(Debug)]
pub struct MessageGuard {
    desk: Arc<MailDesk>,
    tenant: TenantName,
    /// Broken off, until another end is known.
    pub end: MessageEnd,
}

impl Drop for MessageGuard {
    fn drop(&mut self) {
        self.desk.tallies.count_message(&self.tenant, self.end);
        let mut used = self.desk.used.lock();
        used.messages -= 1;
        if let Some(of_tenant) = used.tenants.get_mut(&self.tenant) {
            of_tenant.messages -= 1;
        }
        used.keep(&self.tenant, Instant::now());
    }
}

impl MailDesk {
    pub fn new(
        table: Option<Arc<RwLock<RecordIndex>>>,
        options: MailOptions,
        tallies: Arc<MailTallies>,
        kept: (KeptCounts, Vec<(CountSlot, KeptCount)>),
    ) -> Self {
        let (kept, found) = kept;
        let (now, wall) = (Instant::now(), SystemTime::now());
        let tenants = found.into_iter().map(|(place, count)| {
            let age = wall.duration_since(count.since).unwrap_or_default();
            let since = now.checked_sub(age).unwrap_or(now);
            let KeptCount { tenant, recipients, bytes, .. } = count;
            (tenant, TenantUse { recipients, bytes, place: Some(place), ..TenantUse::begin(since) })
        });
        let used = MailUsage { tenants: tenants.collect(), kept, ..MailUsage::default() };
        Self { table, options: RwLock::new(options), used: Mutex::new(used), tallies }
    }

    pub fn set_options(&self, options: &MailOptions) {
        options.clone_into(&mut self.options.write());
    }

    pub fn options(&self) -> MailOptions {
        self.options.read().clone()
    }

    pub fn tallies(&self) -> &MailTallies {
        &self.tallies
    }

    fn per_hour(&self, tenant: &TenantName) -> u32 {
        let record = self.table.as_ref().and_then(|table| table.read().tenant(tenant.as_str()));
        record.and_then(|tenant| tenant.mail_per_hour).unwrap_or(self.options.read().recipients_per_hour)
    }

    /// Begins a conversation with a program of this tenant.
    ///
    /// # Errors
    /// If the maximum number is reached.
    pub fn begin_session(
        self: &Arc<Self>,
        tenant: &TenantName,
        now: Instant,
    ) -> Result<SessionGuard, MailRefusal> {
        let most = (self.options.read().at_once * 2).max(TENANT_SESSIONS_MIN);
        let mut used = self.used.lock();
        let refuse = |whose: &str, most| {
            let answer = format!(
                "421 4.7.0 {whose} has {most} connections for mail, which is the maximum [{LIMITED}]"
            );
            Err(MailRefusal::new(RefusalReason::Sessions, answer))
        };
        if used.sessions >= NODE_SESSIONS_MAX {
            return refuse("the node", NODE_SESSIONS_MAX);
        }
        let of_tenant = used.of(tenant, now);
        if of_tenant.sessions >= most {
            return refuse(&format!("tenant '{tenant}'"), most);
        }
        of_tenant.sessions += 1;
        used.sessions += 1;
        Ok(SessionGuard { desk: Arc::clone(self), tenant: tenant.clone() })
    }

    /// Begins a message of this tenant.
    ///
    /// # Errors
    /// Why it may not be sent now.
    pub fn begin_message(
        self: &Arc<Self>,
        tenant: &TenantName,
        now: Instant,
    ) -> Result<MessageGuard, MailRefusal> {
        let (most, MailOptions { at_once, bytes_per_hour, .. }) = (self.per_hour(tenant), self.options());
        if most == 0 {
            let answer = format!("550 5.7.1 tenant '{tenant}' may send no mail [{LIMITED}]");
            return Err(MailRefusal::new(RefusalReason::NoMail, answer));
        }
        let mut used = self.used.lock();
        if used.messages >= NODE_MESSAGES_MAX {
            let answer =
                format!("451 4.3.2 {NODE_MESSAGES_MAX} messages of this node are under way [{LIMITED}]");
            return Err(MailRefusal::new(RefusalReason::NodeMessages, answer));
        }
        let of_tenant = used.of(tenant, now);
        if of_tenant.messages >= at_once {
            let answer = format!(
                "451 4.3.2 {at_once} messages of tenant '{tenant}' are under way, which is the maximum [{LIMITED}]"
            );
            return Err(MailRefusal::new(RefusalReason::Messages, answer));
        }
        if of_tenant.bytes >= bytes_per_hour {
            return Err(refuse_bytes(tenant, of_tenant, bytes_per_hour));
        }
        of_tenant.messages += 1;
        used.messages += 1;
        let (desk, tenant) = (Arc::clone(self), tenant.clone());
        Ok(MessageGuard { desk, tenant, end: MessageEnd::BrokenOff })
    }

    /// Logs that the server cannot be used, as often as is useful.
    pub fn note_lost(&self, error: &io::Error) {
        let mut used = self.used.lock();
        if used.lost.is_none_or(|at| at.elapsed() >= LOST_EVERY) {
            used.lost = Some(Instant::now());
            drop(used);
            let server = self.options.read().server;
            tracing::warn!("{NO_SERVER}: the mail server at {server} cannot be used: {error}");
        }
    }

    /// Counts one more recipient.
    ///
    /// # Errors
    /// Why there may be none.
    pub fn count_recipient(&self, tenant: &TenantName, now: Instant) -> Result<(), MailRefusal> {
        let most = self.per_hour(tenant);
        let mut used = self.used.lock();
        let of_tenant = used.of(tenant, now);
        if of_tenant.recipients < most {
            of_tenant.recipients += 1;
            used.keep(tenant, now);
            return Ok(());
        }
        if !std::mem::replace(&mut of_tenant.is_said, true) {
            tracing::warn!(
                "{LIMITED}: tenant '{tenant}' has sent mail to {most} recipients within an hour, as many as it may: \
                 more is refused until the hour is over"
            );
        }
        let answer = format!(
            "452 4.7.1 tenant '{tenant}' has sent to {most} recipients within an hour, as many as it may [{LIMITED}]"
        );
        Err(MailRefusal::new(RefusalReason::HourRecipients, answer))
    }

    /// Counts bytes of a text before they go to the mail server. Those of a failed message count,
    /// too: they cost it as much.
    ///
    /// # Errors
    /// If they are more than the tenant may send in this hour. They are not counted then.
    pub fn count_bytes(&self, tenant: &TenantName, bytes: u64, now: Instant) -> Result<(), MailRefusal> {
        let most = self.options.read().bytes_per_hour;
        let mut used = self.used.lock();
        let of_tenant = used.of(tenant, now);
        let sum = of_tenant.bytes.saturating_add(bytes);
        if sum > most {
            return Err(refuse_bytes(tenant, of_tenant, most));
        }
        of_tenant.bytes = sum;
        self.tallies.count_bytes(tenant, bytes);
        Ok(())
    }
}

fn refuse_bytes(tenant: &TenantName, used: &mut TenantUse, most: u64) -> MailRefusal {
    if !std::mem::replace(&mut used.is_said, true) {
        tracing::warn!(
            "{LIMITED}: tenant '{tenant}' has sent {} bytes of mail within an hour, and may send {most}: \
             more is refused until the hour is over",
            used.bytes
        );
    }
    let answer = format!("452 4.7.1 tenant '{tenant}' may send {most} bytes within an hour [{LIMITED}]");
    MailRefusal::new(RefusalReason::HourBytes, answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desk(options: MailOptions) -> Arc<MailDesk> {
        Arc::new(MailDesk::new(None, options, Arc::default(), Default::default()))
    }

    fn name(text: &str) -> TenantName {
        TenantName::new(text).unwrap()
    }

    #[test]
    fn recipients_of_an_hour_are_counted_for_each_tenant() {
        let desk = desk(MailOptions { recipients_per_hour: 2, ..MailOptions::default() });
        let (now, alice) = (Instant::now(), name("alice"));
        assert_eq!(desk.count_recipient(&alice, now), Ok(()));
        assert_eq!(desk.count_recipient(&alice, now), Ok(()));
        let refused = desk.count_recipient(&alice, now + WINDOW / 2).unwrap_err();
        assert!(refused.answer.starts_with("452 ") && refused.answer.contains("alice"), "{refused:?}");
        assert_eq!(refused.reason, RefusalReason::HourRecipients);
        assert_eq!(desk.count_recipient(&name("bob"), now), Ok(()), "it is nobody else's count");
        assert_eq!(desk.count_recipient(&alice, now + WINDOW), Ok(()), "another hour");
    }

    #[test]
    fn bytes_of_an_hour_are_counted_for_each_tenant() {
        let desk = desk(MailOptions { bytes_per_hour: 100, ..MailOptions::default() });
        let (now, alice) = (Instant::now(), name("alice"));
        assert_eq!(desk.count_bytes(&alice, 60, now), Ok(()));
        assert_eq!(desk.count_bytes(&alice, 41, now).unwrap_err().reason, RefusalReason::HourBytes);
        assert!(desk.begin_message(&alice, now).is_ok(), "a shorter one may be sent");
        assert_eq!(desk.count_bytes(&alice, 40, now), Ok(()), "what was refused is not counted");
        let refused = desk.begin_message(&alice, now + WINDOW / 2).unwrap_err();
        assert!(refused.answer.starts_with("452 ") && refused.reason == RefusalReason::HourBytes);
        assert_eq!(desk.count_bytes(&name("bob"), 100, now), Ok(()), "it is nobody else's count");
        assert!(desk.begin_message(&alice, now + WINDOW).is_ok(), "another hour");
    }

    #[test]
    fn messages_under_way_are_bounded() {
        let desk = desk(MailOptions { at_once: 1, ..MailOptions::default() });
        let (now, alice) = (Instant::now(), name("alice"));
        let first = desk.begin_message(&alice, now).unwrap();
        assert_eq!(desk.begin_message(&alice, now).unwrap_err().reason, RefusalReason::Messages);
        let others: Vec<_> = (1..NODE_MESSAGES_MAX)
            .map(|number| desk.begin_message(&name(&format!("t{number}")), now))
            .collect();
        assert!(others.iter().all(Result::is_ok));
        let refused = desk.begin_message(&name("late"), now).unwrap_err();
        assert_eq!(refused.reason, RefusalReason::NodeMessages);
        drop(first);
        assert!(desk.begin_message(&alice, now).is_ok());
    }

    #[test]
    fn one_tenant_has_a_part_of_the_conversations() {
        let desk = desk(MailOptions::default());
        let (now, alice) = (Instant::now(), name("alice"));
        let open = |tenant: &TenantName| desk.begin_session(tenant, now);
        let mut own: Vec<_> = (0..TENANT_SESSIONS_MIN).map(|_| open(&alice).unwrap()).collect();
        let refused = open(&alice).unwrap_err();
        assert!(refused.answer.starts_with("421 ") && refused.reason == RefusalReason::Sessions);
        let others: Vec<_> = (TENANT_SESSIONS_MIN..NODE_SESSIONS_MAX)
            .map(|number| open(&name(&format!("t{}", number / TENANT_SESSIONS_MIN))))
            .collect();
        assert!(others.iter().all(Result::is_ok), "the others have what is left");
        assert!(open(&name("late")).is_err(), "the node has as many");
        own.pop();
        assert!(open(&alice).is_ok());
    }

    #[test]
    fn counts_of_tenants_do_not_stay_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let kept = KeptCounts::open(&dir.path().join("counts"), WINDOW).unwrap();
        let desk = MailDesk::new(None, MailOptions::default(), Arc::default(), kept);
        let now = Instant::now();
        for number in 0..TENANTS_KEPT {
            desk.count_recipient(&name(&format!("t{number}")), now).unwrap();
        }
        let len = dir.path().join("counts").metadata().unwrap().len();
        desk.count_recipient(&name("one-more"), now + WINDOW).unwrap();
        assert_eq!(desk.used.lock().tenants.len(), 1);
        assert_eq!(dir.path().join("counts").metadata().unwrap().len(), len, "its place was another's");
    }

    #[test]
    fn counts_outlive_the_keeper() {
        let dir = tempfile::tempdir().unwrap();
        let options = MailOptions { recipients_per_hour: 2, bytes_per_hour: 100, ..MailOptions::default() };
        let begin = || {
            let kept = KeptCounts::open(&dir.path().join("counts"), WINDOW).unwrap();
            Arc::new(MailDesk::new(None, options.clone(), Arc::default(), kept))
        };
        let (first, alice, now) = (begin(), name("alice"), Instant::now());
        let message = first.begin_message(&alice, now).unwrap();
        first.count_recipient(&alice, now).unwrap();
        first.count_bytes(&alice, 70, now).unwrap();
        drop(message);
        let second = begin();
        assert!(second.count_bytes(&alice, 31, Instant::now()).is_err());
        assert!(second.count_recipient(&alice, Instant::now()).is_ok());
        assert!(second.count_recipient(&alice, Instant::now()).is_err(), "one was of the keeper before");
        assert!(second.count_recipient(&alice, Instant::now() + WINDOW).is_ok(), "its hour is over");
    }

    #[test]
    fn a_tenant_without_mail_is_told_for_good() {
        let desk = desk(MailOptions { recipients_per_hour: 0, ..MailOptions::default() });
        let refused = desk.begin_message(&name("alice"), Instant::now()).unwrap_err();
        assert!(refused.answer.starts_with("550 ") && refused.reason == RefusalReason::NoMail);
    }
}
