//! The `Date` field's value (RFC 9110 section 6.6.1), formatted once a second per thread.
//!
//! Not here: dates of files (`files`) and of log lines (`access_log`).

use std::cell::RefCell;
use std::time::{Duration, UNIX_EPOCH};

use http::HeaderValue;
use rustix::time::{ClockId, clock_gettime};

thread_local! {
    static VALUE: RefCell<HeaderValue> = const { RefCell::new(HeaderValue::from_static("")) };
    static NOW: RefCell<(i64, String)> = const { RefCell::new((i64::MIN, String::new())) };
}

/// Returns the current date as a field's value.
pub fn header_value() -> HeaderValue {
    VALUE.with_borrow_mut(|value| {
        with_now(|date| {
            if value.as_bytes() != date {
                *value = HeaderValue::from_bytes(date).expect("a date is of visible characters");
            }
        });
        value.clone()
    })
}

/// Calls `use_it` with the current date in IMF-fixdate form.
pub fn with_now<T>(use_it: impl FnOnce(&[u8]) -> T) -> T {
    // The coarse clock is at most a tick behind and costs a quarter of the precise one.
    let seconds = clock_gettime(ClockId::RealtimeCoarse).tv_sec;
    NOW.with_borrow_mut(|(at, text)| {
        if *at != seconds {
            let since = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
            *text = httpdate::fmt_http_date(UNIX_EPOCH + since);
            *at = seconds;
        }
        use_it(text.as_bytes())
    })
}
