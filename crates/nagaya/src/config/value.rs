//! The kinds of values in `nagaya.toml`: their checks, and their printed form, which can be read
//! back.
//!
//! Not here: which keys exist (`schema`), the walk through the file (`read`).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use nagaya_base::units;
use nagaya_edge::options::{AccessLogFormat as AccessFormat, ProbeKind};
use nagaya_keeper::{CellMechanism, HugePages, ProgramCalls, ProgramNetwork};
use nagaya_records::RuleName;
use nagaya_rules::{OnError, RulePhase};
use toml::de::DeValue;

use super::mistake::{ConfigProblem, INVALID, PATH, WRONG_TYPE};
use super::settings::{LogFormat, STORED};

/// Users or groups in one key.
const ACCOUNTS_MAX: usize = 64;

const LOG_LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// Prefix of the names of this program's parts.
const OWN_TARGETS: &str = "nagaya";

/// Kind of a key's value.
#[derive(Debug, Clone, Copy)]
pub enum ValueKind {
    Text,
    /// An absolute path.
    Path(PathKind),
    /// An absolute path, or `store:` and the name of a rule of the store.
    Rule,
    Flag,
    Count {
        min: u64,
        max: u64,
    },
    /// Bytes, written like `64KiB`.
    Size {
        min: u64,
        max: u64,
    },
    /// Milliseconds, written like `10s`.
    Time {
        min: u64,
        max: u64,
    },
    Choice(&'static [&'static str]),
    /// `ip:port`.
    Address,
    /// Each entry is an IP address or a network such as `10.0.0.0/8`.
    Networks,
    /// Each entry is a user or group of the machine, by name or number. At most `ACCOUNTS_MAX`.
    Accounts,
    /// Each entry is the number of a port.
    Ports,
    /// A `tracing` filter.
    Filter,
}

/// File type that must be at a path when the file is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathKind {
    Later,
    Directory,
    File,
}

/// A checked value. Sizes are bytes, times milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigValue {
    Unset,
    Text(String),
    Flag(bool),
    Number(u64),
    Texts(Vec<String>),
}

impl ValueKind {
    /// Checks a value of the file. `Err` says what is wrong with it and what would be valid.
    pub fn check(self, found: &DeValue<'_>) -> Result<ConfigValue, ConfigProblem> {
        match self {
            Self::Flag => found.as_bool().map(ConfigValue::Flag).ok_or_else(|| self.wrong_type(found)),
            Self::Count { min, max } => {
                let number = found.as_integer().ok_or_else(|| self.wrong_type(found))?;
                let digits = number.as_str().replace('_', "");
                match u64::from_str_radix(&digits, number.radix()) {
                    Ok(number) if (min..=max).contains(&number) => Ok(ConfigValue::Number(number)),
                    _ => Err(ConfigProblem::new(
                        INVALID,
                        format!("{number} is out of range"),
                        format!("use {min} to {max}"),
                    )),
                }
            }
            Self::Networks => {
                let list = found.as_array().ok_or_else(|| self.wrong_type(found))?;
                let mut texts = Vec::with_capacity(list.len());
                for entry in list.iter() {
                    let text = entry.get_ref().as_str().ok_or_else(|| self.wrong_type(entry.get_ref()))?;
                    check_network(text)?;
                    texts.push(text.to_owned());
                }
                Ok(ConfigValue::Texts(texts))
            }
            Self::Accounts => {
                let list = found.as_array().ok_or_else(|| self.wrong_type(found))?;
                if list.len() > ACCOUNTS_MAX {
                    let what = format!("there are {} entries", list.len());
                    return Err(ConfigProblem::new(INVALID, what, format!("use at most {ACCOUNTS_MAX}")));
                }
                let text = |entry: &DeValue<'_>| entry.as_str().map(str::to_owned);
                let texts = list.iter().map(|entry| text(entry.get_ref())).collect::<Option<_>>();
                texts.map(ConfigValue::Texts).ok_or_else(|| self.wrong_type(found))
            }
            Self::Ports => {
                let list = found.as_array().ok_or_else(|| self.wrong_type(found))?;
                list.iter()
                    .map(|entry| self.check_port(entry.get_ref()))
                    .collect::<Result<_, _>>()
                    .map(ConfigValue::Texts)
            }
            _ => self.check_text(found.as_str().ok_or_else(|| self.wrong_type(found))?),
        }
    }

    fn check_port(self, found: &DeValue<'_>) -> Result<String, ConfigProblem> {
        let number = found.as_integer().ok_or_else(|| self.wrong_type(found))?;
        match u16::from_str_radix(&number.as_str().replace('_', ""), number.radix()) {
            Ok(port) if port > 0 => Ok(port.to_string()),
            _ => Err(ConfigProblem::new(INVALID, format!("{number} is no port"), "use 1 to 65535".into())),
        }
    }

    fn check_text(self, text: &str) -> Result<ConfigValue, ConfigProblem> {
        match self {
            Self::Size { min, max } => {
                let bytes = units::parse_bytes(text)
                    .map_err(|error| ConfigProblem::new(INVALID, error, format!("use {}", self.range())))?;
                self.within(bytes, min, max)
            }
            Self::Time { min, max } => {
                let time = units::parse_duration(text)
                    .map_err(|error| ConfigProblem::new(INVALID, error, format!("use {}", self.range())))?;
                self.within(u64::try_from(time.as_millis()).unwrap_or(u64::MAX), min, max)
            }
            Self::Choice(words) if words.contains(&text) => Ok(ConfigValue::Text(text.into())),
            Self::Choice(words) => {
                let hint = super::mistake::nearest(text, words.iter().copied()).map_or_else(
                    || format!("use {}", words.join(", ")),
                    |near| format!("did you mean \"{near}\"?"),
                );
                Err(ConfigProblem::new(INVALID, format!("'{text}' is not one of {}", words.join(", ")), hint))
            }
            Self::Address => check_address(text).map(|address| ConfigValue::Text(address.to_string())),
            Self::Path(exists) => check_path(text, exists),
            Self::Rule => check_rule(text),
            Self::Filter => check_log_filter(text),
            _ if text.is_empty() => Err(ConfigProblem::new(
                INVALID,
                "it is empty".into(),
                "write a value, or leave the key out".into(),
            )),
            _ => Ok(ConfigValue::Text(text.into())),
        }
    }

    fn within(self, number: u64, min: u64, max: u64) -> Result<ConfigValue, ConfigProblem> {
        if (min..=max).contains(&number) {
            return Ok(ConfigValue::Number(number));
        }
        let shown = self.print(&ConfigValue::Number(number));
        Err(ConfigProblem::new(INVALID, format!("{shown} is out of range"), format!("use {}", self.range())))
    }

    fn wrong_type(self, found: &DeValue<'_>) -> ConfigProblem {
        let article = if found.type_str().starts_with(['a', 'i']) { "an" } else { "a" };
        let what = format!("expected {}, found {article} {}", self.noun(), found.type_str());
        let hint = match (self, found) {
            (Self::Size { .. }, DeValue::Integer(n)) => {
                format!("write it with its unit, in quotes: \"{n}B\"")
            }
            (Self::Time { .. }, DeValue::Integer(n)) => {
                format!("a duration needs its unit, in quotes: \"{n}s\" or \"{n}ms\"")
            }
            (Self::Flag, _) => "use true or false, without quotes".into(),
            (Self::Count { .. }, DeValue::String(_)) => "write the number without quotes".into(),
            (Self::Accounts, _) => "write a list of texts: [\"www-data\", \"33\"]".into(),
            (Self::Networks, _) => "write a list: [\"10.0.0.0/8\", \"192.0.2.1\"]".into(),
            (Self::Ports, _) => "write a list of numbers: [25, 3306]".into(),
            _ => format!("write it in quotes, for example {}", self.example()),
        };
        ConfigProblem::new(WRONG_TYPE, what, hint)
    }

    /// Returns its name in the reference and in messages.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Path(_) => "a path",
            Self::Rule => "a path or a name",
            Self::Flag => "true or false",
            Self::Count { .. } => "a whole number",
            Self::Size { .. } => "a size",
            Self::Time { .. } => "a duration",
            Self::Choice(_) => "a word",
            Self::Address => "an address",
            Self::Networks => "a list of networks",
            Self::Accounts => "a list of names",
            Self::Ports => "a list of ports",
            Self::Filter => "a log level",
        }
    }

    fn example(self) -> &'static str {
        match self {
            Self::Size { .. } => "\"64KiB\"",
            Self::Time { .. } => "\"10s\"",
            Self::Path(_) => "\"/srv/nagaya\"",
            Self::Rule => "\"/etc/nagaya/rules/limits.rb\"",
            Self::Address => "\"0.0.0.0:80\"",
            Self::Filter => "\"info\"",
            _ => "\"text\"",
        }
    }

    /// Returns the acceptable values, as the reference prints them.
    pub fn range(self) -> String {
        match self {
            Self::Count { min, max } => format!("{min} to {max}"),
            Self::Size { min, max } => {
                format!("{} to {}", units::format_bytes(min), units::format_bytes(max))
            }
            Self::Time { min, max } => format!("{} to {}", print_ms(min), print_ms(max)),
            Self::Choice(words) => words.join(", "),
            Self::Path(PathKind::Directory) => "an existing directory".into(),
            Self::Path(PathKind::File) => "an existing file".into(),
            Self::Path(PathKind::Later) => "absolute".into(),
            Self::Rule => "absolute, or `store:NAME`".into(),
            Self::Address => "`ip:port` or `[ipv6]:port`".into(),
            Self::Networks => "addresses or `address/bits`".into(),
            Self::Accounts => format!("names or numbers, at most {ACCOUNTS_MAX}"),
            Self::Ports => "numbers from 1 to 65535".into(),
            Self::Filter => "error, warn, info, debug, trace, or a filter".into(),
            Self::Text | Self::Flag => String::new(),
        }
    }

    /// Returns the value as written in the file.
    pub fn print(self, value: &ConfigValue) -> String {
        match (self, value) {
            (_, ConfigValue::Unset) => String::new(),
            (Self::Size { .. }, ConfigValue::Number(bytes)) => quote(&units::format_bytes(*bytes)),
            (Self::Time { .. }, ConfigValue::Number(ms)) => quote(&print_ms(*ms)),
            (_, ConfigValue::Number(number)) => number.to_string(),
            (_, ConfigValue::Flag(flag)) => flag.to_string(),
            (_, ConfigValue::Text(text)) => quote(text),
            (Self::Ports, ConfigValue::Texts(ports)) => format!("[{}]", ports.join(", ")),
            (_, ConfigValue::Texts(texts)) => {
                format!("[{}]", texts.iter().map(|text| quote(text)).collect::<Vec<_>>().join(", "))
            }
        }
    }
}

fn print_ms(ms: u64) -> String {
    units::format_duration(Duration::from_millis(ms))
}

/// Quotes a text. JSON's string form is also a TOML basic string: both escape quotes, backslashes
/// and control characters the same way.
fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Checks a filter. A word alone must be a level. The library would take any other word for the
/// name of a program's part, and show all of its lines.
fn check_log_filter(text: &str) -> Result<ConfigValue, ConfigProblem> {
    const USE: &str = "use error, warn, info, debug or trace, or a list like \"info,nagaya_edge=debug\"";
    let refuse = |part: &str, why: String| {
        let near = super::mistake::nearest(part, LOG_LEVELS.into_iter());
        let hint = near.map_or_else(|| USE.to_owned(), |near| format!("did you mean \"{near}\"?"));
        Err(ConfigProblem::new(INVALID, format!("'{part}' is not a log level{why}"), hint))
    };
    let is_level = |word: &str| word.parse::<tracing_subscriber::filter::LevelFilter>().is_ok();
    let stranger = text.split(',').map(str::trim).find(|part| {
        let has_level = part.contains('=') || is_level(part) || part.starts_with(OWN_TARGETS);
        !part.is_empty() && !has_level
    });
    if let Some(stranger) = stranger {
        return refuse(stranger, String::new());
    }
    match text.parse::<tracing_subscriber::filter::Targets>() {
        Ok(_) => Ok(ConfigValue::Text(text.into())),
        Err(error) => refuse(text, format!(": {error}")),
    }
}

fn check_address(text: &str) -> Result<SocketAddr, ConfigProblem> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let hint = match text.rsplit_once(':') {
        _ if text.parse::<u16>().is_ok() => {
            format!("write the address too: \"0.0.0.0:{text}\" and \"[::]:{text}\"")
        }
        Some(("" | "*", port)) => format!("write the address too: \"0.0.0.0:{port}\" and \"[::]:{port}\""),
        Some(("localhost", port)) => format!("use the number: \"127.0.0.1:{port}\" or \"[::1]:{port}\""),
        _ if text.parse::<std::net::IpAddr>().is_ok() => {
            "the port is missing: \"0.0.0.0:80\", \"[::]:80\"".into()
        }
        _ => "use ip:port, for example \"0.0.0.0:80\" or \"[::]:443\"".into(),
    };
    Err(ConfigProblem::new(INVALID, format!("'{text}' is not an address and port"), hint))
}

fn check_network(text: &str) -> Result<(), ConfigProblem> {
    let (address, bits) = match text.split_once('/') {
        Some((address, bits)) => (address, Some(bits)),
        None => (text, None),
    };
    let bits_max = match address.parse() {
        Ok(std::net::IpAddr::V4(_)) => Some(32),
        Ok(std::net::IpAddr::V6(_)) => Some(128),
        Err(_) => None,
    };
    let bits = bits.map_or(Some(0), |bits| bits.parse::<u32>().ok());
    match (bits_max, bits) {
        (Some(max), Some(bits)) if bits <= max => Ok(()),
        _ => Err(ConfigProblem::new(
            INVALID,
            format!("'{text}' is not an address or network"),
            "use \"192.0.2.1\", \"10.0.0.0/8\" or \"2001:db8::/32\"".into(),
        )),
    }
}

fn check_rule(text: &str) -> Result<ConfigValue, ConfigProblem> {
    let Some(name) = text.strip_prefix(STORED) else { return check_path(text, PathKind::Later) };
    match RuleName::new(name) {
        Ok(_) => Ok(ConfigValue::Text(text.into())),
        Err(error) => {
            let hint = "write the name as `nagaya rule list` shows it".into();
            Err(ConfigProblem::new(INVALID, error.to_string(), hint))
        }
    }
}

fn check_path(text: &str, exists: PathKind) -> Result<ConfigValue, ConfigProblem> {
    let path = PathBuf::from(text);
    if !path.is_absolute() {
        let hint = "write the whole path, beginning with /".into();
        return Err(ConfigProblem::new(INVALID, format!("'{text}' is not an absolute path"), hint));
    }
    let found = match exists {
        PathKind::Later => return Ok(ConfigValue::Text(text.into())),
        PathKind::Directory | PathKind::File => std::fs::metadata(&path),
    };
    match found {
        Ok(meta) if meta.is_dir() == (exists == PathKind::Directory) => Ok(ConfigValue::Text(text.into())),
        Ok(_) => {
            let wanted = if exists == PathKind::Directory { "directory" } else { "file" };
            Err(ConfigProblem::new(
                PATH,
                format!("'{text}' is not a {wanted}"),
                format!("give the path of a {wanted}"),
            ))
        }
        Err(error) => Err(ConfigProblem::new(
            PATH,
            format!("'{text}' cannot be used: {error}"),
            "create it, or correct the path".into(),
        )),
    }
}

/// A field of the settings that a key reads and writes.
pub trait ConfigField {
    fn value(&self) -> ConfigValue;
    /// Takes a value of its key's kind; the schema's test assigns every key once.
    fn assign(&mut self, value: ConfigValue);
}

/// The message of an `assign` that got another kind: the row in the schema is wrong, not the
/// operator.
const MISMATCH: &str = "schema.rs gives this field a kind that its type does not hold";

impl ConfigField for bool {
    fn value(&self) -> ConfigValue {
        ConfigValue::Flag(*self)
    }

    fn assign(&mut self, value: ConfigValue) {
        let ConfigValue::Flag(flag) = value else { panic!("{MISMATCH}") };
        *self = flag;
    }
}

impl ConfigField for String {
    fn value(&self) -> ConfigValue {
        ConfigValue::Text(self.clone())
    }

    fn assign(&mut self, value: ConfigValue) {
        let ConfigValue::Text(text) = value else { panic!("{MISMATCH}") };
        *self = text;
    }
}

impl ConfigField for PathBuf {
    fn value(&self) -> ConfigValue {
        ConfigValue::Text(self.to_string_lossy().into_owned())
    }

    fn assign(&mut self, value: ConfigValue) {
        let ConfigValue::Text(text) = value else { panic!("{MISMATCH}") };
        *self = text.into();
    }
}

impl ConfigField for SocketAddr {
    fn value(&self) -> ConfigValue {
        ConfigValue::Text(self.to_string())
    }

    fn assign(&mut self, value: ConfigValue) {
        let ConfigValue::Text(text) = value else { panic!("{MISMATCH}") };
        *self = text.parse().expect("an address value was parsed once already");
    }
}

impl ConfigField for Vec<String> {
    fn value(&self) -> ConfigValue {
        ConfigValue::Texts(self.clone())
    }

    fn assign(&mut self, value: ConfigValue) {
        let ConfigValue::Texts(texts) = value else { panic!("{MISMATCH}") };
        *self = texts;
    }
}

impl ConfigField for Vec<u16> {
    fn value(&self) -> ConfigValue {
        ConfigValue::Texts(self.iter().map(u16::to_string).collect())
    }

    fn assign(&mut self, value: ConfigValue) {
        let ConfigValue::Texts(ports) = value else { panic!("{MISMATCH}") };
        *self = ports.iter().map(|port| port.parse().expect("a port was parsed once already")).collect();
    }
}

impl<T: ConfigField + Default> ConfigField for Option<T> {
    fn value(&self) -> ConfigValue {
        self.as_ref().map_or(ConfigValue::Unset, ConfigField::value)
    }

    fn assign(&mut self, value: ConfigValue) {
        self.insert(T::default()).assign(value);
    }
}

macro_rules! number_field {
    ($($type:ty),*) => {$(
        impl ConfigField for $type {
            fn value(&self) -> ConfigValue {
                ConfigValue::Number(u64::try_from(*self).expect("no number type here is wider than 64 bits"))
            }

            fn assign(&mut self, value: ConfigValue) {
                let ConfigValue::Number(number) = value else { panic!("{MISMATCH}") };
                *self = <$type>::try_from(number).expect("the key's range fits its field; a test assigns the ends");
            }
        }
    )*};
}

number_field!(u32, u64, usize);

macro_rules! word_field {
    ($type:ty: $($variant:ident = $word:literal),*) => {
        impl ConfigField for $type {
            fn value(&self) -> ConfigValue {
                ConfigValue::Text(match self { $(Self::$variant => $word),* }.into())
            }

            fn assign(&mut self, value: ConfigValue) {
                match value {
                    $(ConfigValue::Text(text) if text == $word => *self = Self::$variant,)*
                    _ => panic!("{MISMATCH}"),
                }
            }
        }
    };
}

word_field!(LogFormat: Auto = "auto", Text = "text", Json = "json");
word_field!(
    RulePhase:
    Init = "init",
    PostReadRequest = "post_read_request",
    AccessChecker = "access_checker",
    Fixups = "fixups",
    LogTransaction = "log_transaction"
);
word_field!(ProbeKind: Udp = "udp", Connect = "connect", Icmp = "icmp");
word_field!(OnError: Pass = "pass", Refuse = "refuse");
word_field!(HugePages: AsIs = "as-is", Of64KiB = "64KiB");
word_field!(ProgramNetwork: Own = "own", Host = "host");
word_field!(ProgramCalls: Filtered = "filtered", All = "all");
word_field!(AccessFormat: Extended = "extended", Combined = "combined", Json = "json");
word_field!(
    CellMechanism: Auto = "auto",
    CgroupV2 = "cgroup-v2",
    CgroupV1 = "cgroup-v1",
    ProcessGroup = "process-group"
);
