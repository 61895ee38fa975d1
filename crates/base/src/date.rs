//! A moment as people and programs read it in logs and answers, always in UTC.
//!
//! Not here: the `Date` field of HTTP (`edge::date`), the combined format's dates (`edge::access_log`).

use std::time::{SystemTime, UNIX_EPOCH};

/// Characters of what `utc` returns.
pub const UTC_LEN: usize = "2000-10-10T13:55:36.042Z".len();

/// The last second that has a year of four digits.
const LAST: u64 = 253_402_300_799;

const DAY: u64 = 86_400;

/// `2000-10-10T13:55:36.042Z`. A moment before 1970 is shown as its beginning.
pub fn utc(when: SystemTime) -> String {
    let since = when.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs().min(LAST);
    let ((year, month, day), of_day) = (date(seconds / DAY), seconds % DAY);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let ms = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// Year, month and day of the Gregorian calendar. Years are counted from March on, so that the odd day comes last, and in
/// eras of 400 years, which all have as many days.
fn date(days_since_1970: u64) -> (u64, u64, u64) {
    const ERA: u64 = 146_097;
    // From 1 March of the year 0.
    let days = days_since_1970 + 719_468;
    let (era, day_of_era) = (days / ERA, days % ERA);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

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
            (LAST + 1, "9999-12-31T23:59:59.042Z"),
        ] {
            let shown = utc(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 42));
            assert_eq!((shown.as_str(), shown.len()), (text, UTC_LEN));
        }
        assert_eq!(utc(UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00.000Z");
    }
}
