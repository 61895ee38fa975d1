//! Values that rules keep by name: copies of Ruby values, without any object of a VM.
//!
//! Names come from the rules' text. So a value that does not fit is refused, and none is dropped
//! for it. Not here: entries whose keys come from clients (`cache`).

use std::collections::HashMap;

use foldhash::fast::RandomState;

/// Values of one owner, and bytes of them with their names.
const VALUES_MAX: usize = 4096;
const BYTES_MAX: usize = 4 << 20;

/// One value, bytes.
pub const VALUE_LEN_MAX: usize = 64 << 10;

/// Elements of a list, or keys and values of a table: the most that a native can receive.
pub const VALUE_ELEMENTS_MAX: usize = 100;

/// Bytes taken for each value in addition to its own, roughly.
const OVERHEAD: usize = 128;

#[derive(Debug, Clone, PartialEq)]
pub enum StoredValue {
    Nil,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Box<[u8]>),
    Symbol(Box<str>),
    List(Vec<Self>),
    Map(Vec<(Self, Self)>),
    /// A cache and a lock, by their names.
    Cache(Box<str>),
    Lock(Box<str>),
}

/// Why a value is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeptFull {
    #[error("a value of Userdata is longer than {VALUE_LEN_MAX} bytes")]
    TooLong,
    #[error(
        "Userdata keeps {VALUES_MAX} values, and {BYTES_MAX} bytes, at most; use a Cache for what requests bring"
    )]
    TooMany,
}

#[derive(Debug, Default)]
pub struct ValueTable {
    values: HashMap<(Box<str>, Box<str>), StoredValue, RandomState>,
    bytes: usize,
}

impl StoredValue {
    fn len(&self) -> usize {
        match self {
            Self::Nil | Self::Bool(_) | Self::Int(_) | Self::Float(_) => size_of::<Self>(),
            Self::Text(text) => text.len() + size_of::<Self>(),
            Self::Symbol(text) | Self::Cache(text) | Self::Lock(text) => text.len() + size_of::<Self>(),
            Self::List(values) => values.iter().map(Self::len).sum::<usize>() + size_of::<Self>(),
            Self::Map(pairs) => {
                pairs.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>() + size_of::<Self>()
            }
        }
    }
}

impl ValueTable {
    pub fn get(&self, bag: &str, name: &str) -> Option<&StoredValue> {
        // A tuple of borrowed texts is not a borrowed tuple of texts; rules read only a value or
        // two.
        self.values.get(&(Box::from(bag), Box::from(name)))
    }

    pub fn set(&mut self, bag: &str, name: &str, value: StoredValue) -> Result<(), KeptFull> {
        let len = value.len();
        if len > VALUE_LEN_MAX || bag.len() + name.len() > VALUE_LEN_MAX {
            return Err(KeptFull::TooLong);
        }
        let key = (Box::from(bag), Box::from(name));
        let weight = |value: &StoredValue| value.len() + bag.len() + name.len() + OVERHEAD;
        let had = self.values.get(&key).map(weight);
        if value == StoredValue::Nil {
            self.values.remove(&key);
            self.bytes -= had.unwrap_or(0);
            return Ok(());
        }
        let bytes = self.bytes - had.unwrap_or(0) + weight(&value);
        if bytes > BYTES_MAX || had.is_none() && self.values.len() >= VALUES_MAX {
            return Err(KeptFull::TooMany);
        }
        self.bytes = bytes;
        self.values.insert(key, value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_refused_beyond_their_bounds_and_nil_makes_room() {
        let mut values = ValueTable::default();
        for n in 0..VALUES_MAX {
            values.set("bag", &n.to_string(), StoredValue::Int(1)).unwrap();
        }
        assert_eq!(values.set("bag", "more", StoredValue::Int(1)), Err(KeptFull::TooMany));
        assert_eq!(values.set("bag", "7", StoredValue::Bool(true)), Ok(()), "one that is there changes");
        values.set("bag", "8", StoredValue::Nil).unwrap();
        assert_eq!(values.get("bag", "8"), None);
        assert_eq!(values.set("bag", "more", StoredValue::Int(1)), Ok(()));
        assert_eq!(values.get("other", "more"), None, "each bag has its own names");
    }

    #[test]
    fn values_are_bounded_in_bytes() {
        let mut values = ValueTable::default();
        let text = |len: usize| StoredValue::Text(vec![b'x'; len].into());
        assert_eq!(values.set("", "long", text(VALUE_LEN_MAX)), Err(KeptFull::TooLong));
        assert_eq!(
            values.set("", &"n".repeat(VALUE_LEN_MAX + 1), StoredValue::Int(1)),
            Err(KeptFull::TooLong)
        );
        let nested = StoredValue::List(vec![
            text(VALUE_LEN_MAX / 2),
            StoredValue::Map(vec![(StoredValue::Nil, text(VALUE_LEN_MAX / 2))]),
        ]);
        assert_eq!(values.set("", "nested", nested), Err(KeptFull::TooLong));
        let taken =
            (0..1000).filter(|n| values.set("", &n.to_string(), text(VALUE_LEN_MAX - 64)).is_ok()).count();
        assert_eq!(taken, BYTES_MAX / (VALUE_LEN_MAX + OVERHEAD), "{taken}");
        for n in 0..taken {
            values.set("", &n.to_string(), StoredValue::Nil).unwrap();
        }
        assert_eq!(values.bytes, 0);
    }
}
