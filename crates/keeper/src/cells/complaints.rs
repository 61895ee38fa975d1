//! Warnings about cells: logged once for each cause, always counted.
//!
//! A limit that cannot be set never fails the request it was for, and is never dropped in silence
//! either. Not here: what stops a request (`CellError`).

use std::collections::BTreeMap;

use nagaya_base::Code;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// Maximum number of different warnings kept. A tenant's records cannot fill the keeper's memory
/// with them. Further ones are only counted.
const KINDS_MAX: usize = 1000;

#[derive(Debug, Default)]
pub struct CellWarnings {
    known: Mutex<WarningCounts>,
}

#[derive(Debug, Default)]
struct WarningCounts {
    counts: BTreeMap<(u16, Box<str>), u64>,
    total: u64,
}

impl CellWarnings {
    /// Adds a warning. `about` separates it from others of its code. `say` makes its text, the
    /// first time.
    pub fn add(&self, code: Code, about: &str, say: impl FnOnce() -> String) {
        let mut known = self.known.lock();
        known.total += 1;
        if let Some(count) = known.counts.get_mut(&(code.0, about.into())) {
            *count += 1;
            return;
        }
        if known.counts.len() >= KINDS_MAX {
            return;
        }
        known.counts.insert((code.0, about.into()), 1);
        drop(known);
        let what = say();
        tracing::warn!("{code}: {what}");
    }

    /// Returns the number of all warnings.
    pub fn total(&self) -> u64 {
        self.known.lock().total
    }

    pub fn show(&self) -> Value {
        let known = self.known.lock();
        let each = known.counts.iter().map(
            |((code, about), count)| json!({"code": Code(*code).to_string(), "about": about, "count": count}),
        );
        each.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thing_is_said_once_and_counted_always() {
        let complaints = CellWarnings::default();
        let mut said = 0;
        for about in ["8:0", "8:0", "8:1", "8:0"] {
            complaints.add(Code(343), about, || {
                said += 1;
                about.to_owned()
            });
        }
        assert_eq!((said, complaints.total()), (2, 4));
        let counts = [("8:0", 3), ("8:1", 1)];
        let expected =
            counts.map(|(about, count)| json!({"code": "NGY0343", "about": about, "count": count}));
        assert_eq!(complaints.show(), json!(expected));
    }

    #[test]
    fn there_is_an_end_to_what_is_kept() {
        let complaints = CellWarnings::default();
        let mut said = 0;
        for number in 0..2 * KINDS_MAX {
            complaints.add(Code(343), &number.to_string(), || {
                said += 1;
                String::new()
            });
        }
        assert_eq!((said, complaints.total()), (KINDS_MAX, 2 * KINDS_MAX as u64));
    }
}
