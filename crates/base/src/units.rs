//! Sizes and durations as people write them in configuration: `64KiB`, `1GiB`, `250ms`, `10s`,
//! `5m`.
//!
//! Not here: the position of a value in a file; `config` in the binary adds that to the error.

use std::time::Duration;

/// Returns the bytes of a text such as `512`, `64KiB`, `1.5MiB`. Only binary units: `KB` is
/// refused, because it is ambiguous.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text)?;
    let factor: u64 = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        other => return Err(format!("unknown unit '{other}': use B, KiB, MiB, GiB or TiB")),
    };
    scale(number, factor).ok_or_else(|| format!("'{text}' is too large"))
}

/// Returns a duration such as `250ms`, `10s`, `5m`, `2h`, `7d`. A bare number is refused: it has no
/// unit.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text)?;
    let ms: u64 = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        "" => return Err("a duration needs a unit: ms, s, m, h or d".into()),
        other => return Err(format!("unknown unit '{other}': use ms, s, m, h or d")),
    };
    scale(number, ms).map(Duration::from_millis).ok_or_else(|| format!("'{text}' is too large"))
}

/// Returns `1536` as `1.5KiB`: the shortest exact form, so that a printed value can be read back.
pub fn format_bytes(bytes: u64) -> String {
    for (factor, unit) in [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes >= factor && bytes.is_multiple_of(factor) {
            return format!("{}{unit}", bytes / factor);
        }
    }
    format!("{bytes}B")
}

/// Returns a duration in the largest unit that divides it.
pub fn format_duration(duration: Duration) -> String {
    let ms = duration.as_millis();
    for (factor, unit) in [(86_400_000u128, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")] {
        if ms >= factor && ms.is_multiple_of(factor) {
            return format!("{}{unit}", ms / factor);
        }
    }
    format!("{ms}ms")
}

fn split(text: &str) -> Result<(f64, &str), String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().map_err(|_| format!("'{text}' does not begin with a number"))?;
    Ok((number, text[end..].trim_start()))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
fn scale(number: f64, factor: u64) -> Option<u64> {
    let value = number * factor as f64;
    // 2^53: the largest whole number that a float holds exactly, far above any size in use.
    (value <= 9_007_199_254_740_992.0).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations_are_read_and_printed_back() {
        assert_eq!(parse_bytes("64KiB"), Ok(65_536));
        assert_eq!(parse_bytes("1.5 MiB"), Ok(1_572_864));
        assert_eq!(parse_bytes("7"), Ok(7));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(format_bytes(1_572_864), "1536KiB");
        assert_eq!(format_duration(Duration::from_secs(90)), "90s");
    }

    #[test]
    fn doubtful_units_are_refused() {
        for text in ["10KB", "10", "x", "", "5 parsecs", "99999999999d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        for text in ["10KB", "", "-1", "99999999999TiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
