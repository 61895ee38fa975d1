//! Settings: texts and small objects that rules look up by key, such as a host's limits by its
//! name. So rules do not grow with the number of sites.
//!
//! Not here: their meaning (the operator's rules), checks (`check`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Longest key, in bytes: a host name fits (`nagaya_base::limits::HOST_LEN_MAX`).
pub const KEY_LEN_MAX: usize = 253;

/// Longest value, in bytes: of the text, or of the object as JSON.
pub const VALUE_LEN_MAX: usize = 4096;

/// Most fields of an object.
pub const FIELDS_MAX: usize = 32;

/// Longest name of a field, in bytes.
pub const FIELD_NAME_LEN_MAX: usize = 64;

/// Most settings in a store. Every process has all of them in memory: at a typical 200 bytes, 200
/// MB.
pub const SETTINGS_MAX: u64 = 1_000_000;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// 1 to `KEY_LEN_MAX` bytes without control characters.
    pub key: Box<str>,
    pub value: SettingValue,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a value is a text, or an object whose fields are texts, numbers and booleans")]
pub enum SettingValue {
    Text(Box<str>),
    /// At most `FIELDS_MAX`.
    Fields(BTreeMap<Box<str>, SettingScalar>),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a field is a text, a number or a boolean")]
pub enum SettingScalar {
    Boolean(bool),
    Number(serde_json::Number),
    Text(Box<str>),
}

impl Setting {
    /// Returns the bytes it has allocated, without the allocator's own rounding.
    pub fn heap_bytes(&self) -> usize {
        let value = match &self.value {
            SettingValue::Text(text) => text.len(),
            SettingValue::Fields(fields) => fields
                .iter()
                .map(|(name, value)| size_of::<(Box<str>, SettingScalar)>() + name.len() + value.heap_bytes())
                .sum(),
        };
        self.key.len() + value
    }
}

impl SettingScalar {
    fn heap_bytes(&self) -> usize {
        if let Self::Text(text) = self { text.len() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_reads_and_writes_the_same_json() {
        for text in [
            r#"{"key":"wiki.example.org","value":"50%"}"#,
            r#"{"key":"a","value":{"cpu":50,"load":1.5,"on":true,"who":"x"}}"#,
            r#"{"key":"a","value":{}}"#,
        ] {
            let setting: Setting = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&setting).unwrap(), text);
        }
    }

    #[test]
    fn anything_but_a_text_or_a_flat_object_is_refused() {
        for value in ["1", "null", "[1]", r#"{"a":{"b":1}}"#, r#"{"a":[1]}"#, r#"{"a":null}"#] {
            let error =
                serde_json::from_str::<Setting>(&format!(r#"{{"key":"k","value":{value}}}"#)).unwrap_err();
            assert!(error.to_string().starts_with("a value is a text, or an object"), "{value}: {error}");
        }
    }
}
