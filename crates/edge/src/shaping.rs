//! Rates of bodies and CPU quotas of short programs, which no program's cell can hold.
//!
//! In reading order: `limits` (which of them hold), `shared_buckets`, `quota_debt`, `alarm` (its
//! clock).

pub mod alarm;
pub mod limits;
pub mod quota_debt;
pub mod shared_buckets;
