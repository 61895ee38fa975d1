//! Times in rules: `500ms` of CPU time, `22:00` of the day; and lists of CPUs.
//!
//! Not here: amounts of CPU, bytes and processes, which rules write as records do
//! (`records::record::Amount`), and the arguments of each word (`dsl`).

use nagaya_base::units::parse_duration;

pub const MINUTES_PER_DAY: u16 = 24 * 60;

/// Returns the microseconds of `500ms` or `2s`. A number without a unit is refused: it is
/// ambiguous.
pub fn time_us(text: &str) -> Result<u64, String> {
    let time = parse_duration(text)
        .map_err(|why| format!("'{text}' is not a time: {why}; write for example \"500ms\" or \"2s\""))?;
    match u64::try_from(time.as_micros()) {
        Ok(0) => Err(format!("'{text}' is too short: use 1ms or more")),
        Ok(us) => Ok(us),
        Err(_) => Err(format!("'{text}' is too long")),
    }
}

/// Returns the minutes since midnight of `22:00`; `24:00` is the end of the day.
pub fn minute_of_day(text: &str) -> Result<u16, String> {
    let wrong = || format!("'{text}' is not a time of day: write for example \"22:00\"");
    let number = |part: &str, digits: std::ops::RangeInclusive<usize>| {
        let plain = digits.contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
        plain.then(|| part.parse::<u16>().ok()).flatten()
    };
    let (hour, minute) = text.split_once(':').ok_or_else(wrong)?;
    let hour = number(hour, 1..=2).ok_or_else(wrong)?;
    let minute = number(minute, 2..=2).filter(|minute| *minute < 60).ok_or_else(wrong)?;
    let at = hour * 60 + minute;
    if at > MINUTES_PER_DAY { Err(wrong()) } else { Ok(at) }
}

/// Returns whether a minute of the day is in a span that may cross midnight. Its end is not part of
/// it.
pub fn in_span(now: u16, from: u16, until: u16) -> bool {
    if from <= until { (from..until).contains(&now) } else { now >= from || now < until }
}

/// Returns whether a text is a list of CPUs or memory nodes as in cpuset(7): `0-1,3`.
pub fn is_cpu_list(text: &str) -> bool {
    let is_number = |text: &str| (1..=4).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    let is_span = |span: &str| {
        span.split_once('-').map_or_else(|| is_number(span), |(a, b)| is_number(a) && is_number(b))
    };
    text.len() <= CPU_LIST_LEN_MAX && text.split(',').all(is_span)
}

/// Longest list of CPUs, in bytes. The longest output of a kernel with 1,024 CPUs fits several
/// times.
const CPU_LIST_LEN_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_need_a_unit() {
        assert_eq!(time_us("500ms"), Ok(500_000));
        assert_eq!(time_us("1.5s"), Ok(1_500_000));
        for bad in ["500", "", "ms", "5 parsecs", "-1s", "0ms"] {
            assert!(time_us(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn lists_of_cpus_are_numbers_and_spans() {
        for good in ["0", "0-1", "0-1,3", "127"] {
            assert!(is_cpu_list(good), "{good}");
        }
        for bad in ["", "a", "0-", "-1", "0,,1", "0\n1", "0 1", "99999"] {
            assert!(!is_cpu_list(bad), "{bad}");
        }
    }

    #[test]
    fn spans_of_the_day_may_go_over_midnight() {
        let at = |text| minute_of_day(text).unwrap();
        assert!(in_span(at("23:59"), at("22:00"), at("6:00")));
        assert!(in_span(at("05:59"), at("22:00"), at("06:00")));
        assert!(!in_span(at("06:00"), at("22:00"), at("06:00")));
        assert!(in_span(at("12:00"), at("09:00"), at("24:00")));
        assert!(!in_span(at("08:00"), at("09:00"), at("17:30")));
        for bad in ["", "22", "24:01", "25:00", "12:60", "12:5", "+2:00", "1:2:3", "ab:cd", "012:00"] {
            assert!(minute_of_day(bad).is_err(), "{bad}");
        }
    }
}
