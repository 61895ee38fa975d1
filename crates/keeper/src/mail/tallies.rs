//! Metrics of the mail that tenants send by the relay.
//!
//! Each tenant is a label. Above a maximum, all others are counted together. Not here: limits of
//! sending (`desk`).

use std::collections::BTreeMap;

use nagaya_records::TenantName;
use nagaya_telemetry::{MetricFamily, MetricPage};
use parking_lot::Mutex;

/// Maximum number of tenants with numbers of their own since the process began.
const TENANTS_MAX: usize = 1_000;

/// The label of all others. No tenant has such a name.
const OTHERS: &str = "(others)";

/// How a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageEnd {
    HandedOver,
    Refused,
    /// Its program left or gave it up, or the mail server was lost.
    BrokenOff,
}

/// In the order of `MessageEnd`.
const ENDS: [&str; 3] = ["handed_over", "refused", "broken_off"];

/// Why a command of a program was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    /// Its tenant, or the node, has the maximum number of conversations.
    Sessions,
    /// Its tenant may send none.
    NoMail,
    /// The maximum number of its tenant's messages is under way.
    Messages,
    /// The maximum number of the node's messages is under way.
    NodeMessages,
    MessageRecipients,
    MessageBytes,
    HourRecipients,
    HourBytes,
    Address,
    LineEnd,
    Slow,
    /// The mail server has refused.
    Server,
    /// The mail server cannot be used.
    NoServer,
}

/// In the order of `RefusalReason`.
const REASONS: [&str; 13] = [
    "sessions",
    "no_mail",
    "messages",
    "node_messages",
    "message_recipients",
    "message_bytes",
    "hour_recipients",
    "hour_bytes",
    "address",
    "line_end",
    "slow",
    "server",
    "no_server",
];
const _: () = assert!(REASONS.len() == RefusalReason::NoServer as usize + 1);

/// All tenants of a process.
#[derive(Debug, Default)]
pub struct MailTallies(Mutex<TenantMailCounts>);

#[derive(Debug, Default)]
struct TenantMailCounts {
    named: BTreeMap<TenantName, MailCounts>,
    others: Option<MailCounts>,
}

/// The counts of one tenant.
#[derive(Debug, Clone, Default)]
struct MailCounts {
    messages: [u64; ENDS.len()],
    refusals: [u64; REASONS.len()],
    recipients: u64,
    bytes: u64,
}

impl MailTallies {
    pub fn count_message(&self, tenant: &TenantName, end: MessageEnd) {
        self.change(tenant, |tally| tally.messages[end as usize] += 1);
    }

    pub fn count_refusal(&self, tenant: &TenantName, reason: RefusalReason) {
        self.change(tenant, |tally| tally.refusals[reason as usize] += 1);
    }

    /// Counts a recipient that the mail server has accepted.
    pub fn count_recipient(&self, tenant: &TenantName) {
        self.change(tenant, |tally| tally.recipients += 1);
    }

    /// Counts bytes of a text that went to the mail server.
    pub fn count_bytes(&self, tenant: &TenantName, bytes: u64) {
        self.change(tenant, |tally| tally.bytes += bytes);
    }

    fn change(&self, tenant: &TenantName, change: impl FnOnce(&mut MailCounts)) {
        let TenantMailCounts { named, others } = &mut *self.0.lock();
        if let Some(tally) = named.get_mut(tenant) {
            return change(tally);
        }
        if named.len() < TENANTS_MAX {
            return change(named.entry(tenant.clone()).or_default());
        }
        change(others.get_or_insert_default());
    }

    /// Adds the families, each with the samples of each tenant.
    pub fn expose(&self, page: &mut MetricPage) {
        let all: Vec<(String, MailCounts)> = {
            let TenantMailCounts { named, others } = &*self.0.lock();
            let named = named.iter().map(|(name, tally)| (name.to_string(), tally.clone()));
            named.chain(others.clone().map(|tally| (OTHERS.to_owned(), tally))).collect()
        };
        let messages = page.counters("nagaya_mail_messages_total", "Messages of tenants, by how they ended");
        for (tenant, tally) in &all {
            add_occurred(messages, tenant, "end", ENDS.iter().zip(tally.messages));
        }
        let refusals = page.counters("nagaya_mail_refusals_total", "What the relay for mail did not take");
        for (tenant, tally) in &all {
            add_occurred(refusals, tenant, "reason", REASONS.iter().zip(tally.refusals));
        }
        let recipients =
            page.counters("nagaya_mail_recipients_total", "Recipients whom the mail server has taken");
        for (tenant, tally) in &all {
            recipients.add([("tenant", tenant)], tally.recipients);
        }
        let bytes =
            page.counters("nagaya_mail_bytes_total", "Bytes of messages that went to the mail server");
        for (tenant, tally) in &all {
            bytes.add([("tenant", tenant)], tally.bytes);
        }
    }
}

/// Adds a tenant's samples with one more label, except counts of 0.
fn add_occurred<'a>(
    family: &mut MetricFamily,
    tenant: &str,
    label: &'static str,
    counts: impl Iterator<Item = (&'a &'a str, u64)>,
) {
    for (value, count) in counts.filter(|(_, count)| *count > 0) {
        family.add([("tenant", tenant), (label, value)], count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> TenantName {
        TenantName::new(text).unwrap()
    }

    fn text(tallies: &MailTallies) -> String {
        let mut page = MetricPage::default();
        tallies.expose(&mut page);
        page.encode()
    }

    #[test]
    fn each_tenant_has_its_numbers() {
        let tallies = MailTallies::default();
        let alice = name("alice");
        tallies.count_message(&alice, MessageEnd::HandedOver);
        tallies.count_message(&name("bob"), MessageEnd::BrokenOff);
        tallies.count_recipient(&alice);
        tallies.count_recipient(&alice);
        tallies.count_bytes(&alice, 70);
        tallies.count_refusal(&alice, RefusalReason::NoServer);
        tallies.count_refusal(&alice, RefusalReason::Sessions);
        let text = text(&tallies);
        for line in [
            "# HELP nagaya_mail_messages_total Messages of tenants, by how they ended",
            "# TYPE nagaya_mail_messages_total counter",
            r#"nagaya_mail_messages_total{tenant="alice",end="handed_over"} 1"#,
            r#"nagaya_mail_messages_total{tenant="bob",end="broken_off"} 1"#,
            r#"nagaya_mail_recipients_total{tenant="alice"} 2"#,
            r#"nagaya_mail_bytes_total{tenant="alice"} 70"#,
            r#"nagaya_mail_refusals_total{tenant="alice",reason="no_server"} 1"#,
            r#"nagaya_mail_refusals_total{tenant="alice",reason="sessions"} 1"#,
        ] {
            assert!(text.lines().any(|known| known == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn tenants_are_bounded() {
        let tallies = MailTallies::default();
        for number in 0..TENANTS_MAX + 5 {
            tallies.count_recipient(&name(&format!("t{number}")));
        }
        let text = text(&tallies);
        let samples = text.lines().filter(|line| line.starts_with("nagaya_mail_recipients_total{"));
        assert_eq!(samples.count(), TENANTS_MAX + 1);
        assert!(text.contains("nagaya_mail_recipients_total{tenant=\"(others)\"} 5\n"), "{text}");
    }
}
