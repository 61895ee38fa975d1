//! Counts requests that the lane treats as guests, and limits how many of each sort there are at
//! once.
//!
//! A CORS preflight asks for a browser's permission. It runs at once, or no script of another
//! origin could wait its turn. Clients that have waited and were admitted (`visits`) go before
//! newcomers. A hostile client could send either without end, so both are counted. Preflights
//! count by tenant, requests of a visit by visit. Requests above the limit are newcomers.
//!
//! Not here: the treatment of guests in a lane (`nagaya_admission`).

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::RandomState;
use http::Method;
use http::header::{ACCESS_CONTROL_REQUEST_METHOD, ORIGIN};
use nagaya_admission::Nonce;
use nagaya_records::TenantName;
use parking_lot::Mutex;

use crate::http::message::Request;

/// Maximum number of preflights of one tenant that run at once beyond its limits. Their programs
/// answer them almost at once.
const PREFLIGHTS_MAX: u32 = 8;

/// Maximum number of requests of one visit at once. Browsers send about six at once over
/// HTTP/1.1.
const VISIT_REQUESTS_MAX: u32 = 8;

/// Key under which guests are counted together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum GuestKey {
    Preflight(TenantName),
    Visit(Nonce),
}

impl GuestKey {
    fn max(&self) -> u32 {
        match self {
            Self::Preflight(_) => PREFLIGHTS_MAX,
            Self::Visit(_) => VISIT_REQUESTS_MAX,
        }
    }
}

/// Present number of guests by key. It has no more entries than there are requests.
#[derive(Debug, Default)]
pub struct GuestCounts(Mutex<HashMap<GuestKey, u32, RandomState>>);

/// One guest. It is counted until it is dropped.
#[derive(Debug)]
pub struct GuestGuard {
    key: GuestKey,
    guests: Arc<GuestCounts>,
}

impl GuestCounts {
    /// Counts one more guest, if the limit allows it.
    pub fn enter(self: &Arc<Self>, key: GuestKey) -> Option<GuestGuard> {
        let mut counts = self.0.lock();
        let count = counts.entry(key.clone()).or_default();
        if *count >= key.max() {
            return None;
        }
        *count += 1;
        Some(GuestGuard { key, guests: Arc::clone(self) })
    }
}

impl GuestGuard {
    /// Returns whether it runs at once.
    pub fn passes(&self) -> bool {
        matches!(self.key, GuestKey::Preflight(_))
    }
}

impl Drop for GuestGuard {
    fn drop(&mut self) {
        let mut counts = self.guests.0.lock();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

/// Returns whether a browser asks if a script may send a request (Fetch standard, section 4.8).
pub fn is_preflight(request: &Request) -> bool {
    let headers = &request.head.headers;
    request.head.method == Method::OPTIONS
        && request.body.is_empty()
        && headers.contains_key(ORIGIN)
        && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_are_counted_apart_and_forgotten() {
        let guests = Arc::new(GuestCounts::default());
        let [one, other] = ["one", "other"].map(|name| TenantName::new(name).expect("a name"));
        let preflight = |tenant: &TenantName| guests.enter(GuestKey::Preflight(tenant.clone()));
        let mut held: Vec<_> = (0..PREFLIGHTS_MAX).map(|_| preflight(&one).expect("there is room")).collect();
        assert!(preflight(&one).is_none() && preflight(&other).is_some());
        assert!(guests.enter(GuestKey::Visit(Nonce(1))).is_some_and(|visit| !visit.passes()));
        held.pop();
        assert!(preflight(&one).is_some_and(|guest| guest.passes()));
        held.clear();
        assert!(guests.0.lock().is_empty());
    }
}
