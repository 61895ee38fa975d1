//! Writes a moment for people and programs in logs and responses, always in UTC.
//!
//! Not here: the `Date` field of HTTP (`edge::date`), the combined format's dates
//! (`edge::access_log`).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Characters of the text that `utc` returns.
pub const UTC_LEN: usize = "2000-10-10T13:55:36.042Z".len();

/// Last second that has a year of four digits.
const LAST: u64 = 253_402_300_799;

/// Formats a moment as `2000-10-10T13:55:36.042Z`. A moment before 1970 is shown as its beginning,
/// and one after the year 9999 as its end.
pub fn utc(when: SystemTime) -> String {
    humantime::format_rfc3339_millis(clamp(when)).to_string()
}

/// Formats a moment as messages have it (RFC 5322 section 3.3): `Tue, 10 Oct 2000 13:55:36 +0000`.
pub fn mail(when: SystemTime) -> String {
    // RFC 9110 has the same form with another name for the zone.
    httpdate::fmt_http_date(clamp(when)).replace("GMT", "+0000")
}

/// The nearest moment that has a text.
fn clamp(when: SystemTime) -> SystemTime {
    let since = when.duration_since(UNIX_EPOCH).unwrap_or_default();
    UNIX_EPOCH + since.min(Duration::new(LAST, 999_999_999))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn messages_have_dates_of_rfc_5322() {
        for (seconds, text) in [
            (0, "Thu, 01 Jan 1970 00:00:00 +0000"),
            (971_186_136, "Tue, 10 Oct 2000 13:55:36 +0000"),
            (1_709_251_199, "Thu, 29 Feb 2024 23:59:59 +0000"),
        ] {
            assert_eq!(mail(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn moments_are_shown_as_calendars_have_them() {
        // As date(1) has them.
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.042Z"),
            (951_782_400, "2000-02-29T00:00:00.042Z"),
            (971_186_136, "2000-10-10T13:55:36.042Z"),
            (1_709_251_199, "2024-02-29T23:59:59.042Z"),
            (1_709_251_200, "2024-03-01T00:00:00.042Z"),
            (4_107_542_399, "2100-02-28T23:59:59.042Z"),
            (4_107_542_400, "2100-03-01T00:00:00.042Z"),
            (LAST, "9999-12-31T23:59:59.042Z"),
            (LAST + 1, "9999-12-31T23:59:59.999Z"),
        ] {
            let shown = utc(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 42));
            assert_eq!((shown.as_str(), shown.len()), (text, UTC_LEN));
        }
        assert_eq!(utc(UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00.000Z");
    }
}
