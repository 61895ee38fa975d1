//! The privileged half of nagaya: starts tenants' processes, opens their files and certificates.
//!
//! It speaks a closed set of verbs (`protocol`) over a Unix seqpacket socket and treats whoever is at the
//! other end as hostile: ids and names, never paths from outside. Not here: HTTP; that is `edge`.

pub mod protocol;
