//! Converts a host name with letters beyond ASCII to its form in DNS. Each such label becomes
//! `xn--` and its Punycode (RFC 3492).
//!
//! It serves only as a hint for people. Not here: the mapping of look-alikes and composed letters
//! (UTS 46), which registries do.

/// Parameters of RFC 3492 section 5.
const BASE: u32 = 36;
const TMIN: u32 = 1;
const TMAX: u32 = 26;
const SKEW: u32 = 38;
const DAMP: u32 = 700;
const INITIAL_BIAS: u32 = 72;
const INITIAL_N: u32 = 128;

/// Longest label in DNS (RFC 1035 section 2.3.4).
const LABEL_LEN_MAX: usize = 63;

/// Returns the name in ASCII. `None` if it has no letters beyond ASCII, or if it would be too long.
/// Also `None` if it has letters that would first have to be composed.
pub fn ascii_form(name: &str) -> Option<String> {
    // With combining marks, one name has two spellings, and only one of them is registered.
    let is_composed =
        !name.chars().any(|letter| matches!(letter, '\u{300}'..='\u{36f}' | '\u{3099}' | '\u{309a}'));
    if name.is_ascii()
        || !is_composed
        || !name.chars().all(|c| c.is_alphanumeric() || matches!(c, '.' | '-' | '*'))
    {
        return None;
    }
    let labels: Option<Vec<String>> = name.to_lowercase().split('.').map(label).collect();
    labels.map(|labels| labels.join("."))
}

fn label(text: &str) -> Option<String> {
    let label = if text.is_ascii() { text.to_owned() } else { format!("xn--{}", encode(text)?) };
    (label.len() <= LABEL_LEN_MAX).then_some(label)
}

/// Encodes a label (RFC 3492 section 6.3).
fn encode(label: &str) -> Option<String> {
    let mut out: String = label.chars().filter(char::is_ascii).collect();
    let basic = u32::try_from(out.len()).ok()?;
    let total = u32::try_from(label.chars().count()).ok()?;
    if basic > 0 {
        out.push('-');
    }
    let mut n = INITIAL_N;
    let mut delta = 0_u32;
    let mut bias = INITIAL_BIAS;
    let mut handled = basic;
    while handled < total {
        let next = label.chars().map(u32::from).filter(|code| *code >= n).min()?;
        delta = delta.checked_add((next - n).checked_mul(handled + 1)?)?;
        n = next;
        for code in label.chars().map(u32::from) {
            if code < n {
                delta = delta.checked_add(1)?;
            }
            if code == n {
                number(delta, bias, &mut out);
                bias = adapt(delta, handled + 1, handled == basic);
                delta = 0;
                handled += 1;
            }
        }
        delta = delta.checked_add(1)?;
        n += 1;
    }
    Some(out)
}

/// Writes a number of variable length.
fn number(mut delta: u32, bias: u32, out: &mut String) {
    for k in (BASE..).step_by(BASE as usize) {
        let threshold = k.saturating_sub(bias).clamp(TMIN, TMAX);
        if delta < threshold {
            break;
        }
        let rest = delta - threshold;
        out.push(digit(threshold + rest % (BASE - threshold)));
        delta = rest / (BASE - threshold);
    }
    out.push(digit(delta));
}

/// Adapts the bias (RFC 3492 section 6.1).
fn adapt(delta: u32, handled: u32, is_first: bool) -> u32 {
    let mut delta = if is_first { delta / DAMP } else { delta / 2 };
    delta += delta / handled;
    let mut k = 0;
    while delta > (BASE - TMIN) * TMAX / 2 {
        delta /= BASE - TMIN;
        k += BASE;
    }
    k + (BASE - TMIN + 1) * delta / (delta + SKEW)
}

fn digit(value: u32) -> char {
    char::from_digit(value, 36).map_or('?', |_| {
        let letters = "abcdefghijklmnopqrstuvwxyz0123456789";
        char::from(letters.as_bytes()[value as usize])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_written_as_dns_has_them() {
        for (name, ascii) in [
            ("bücher.example", "xn--bcher-kva.example"),
            ("BÜCHER.example", "xn--bcher-kva.example"),
            ("*.münchen.de", "*.xn--mnchen-3ya.de"),
            ("例え.テスト", "xn--r8jz45g.xn--zckzah"),
            // RFC 3492 section 7.1 (B) and (G).
            ("他们为什么不说中文.x", "xn--ihqwcrb4cv8a8dqg056pqjye.x"),
            ("почемужеонинеговорятпорусски.x", "xn--b1abfaaepdrnnbgefbadotcwatmq2g4l.x"),
        ] {
            assert_eq!(ascii_form(name).as_deref(), Some(ascii), "{name}");
        }
    }

    #[test]
    fn where_the_form_is_not_certain_there_is_none() {
        for name in ["plain.example", "bu\u{308}cher.example", "a b\u{fc}.example", &"\u{fc}".repeat(200)] {
            assert_eq!(ascii_form(name), None, "{name}");
        }
    }
}
