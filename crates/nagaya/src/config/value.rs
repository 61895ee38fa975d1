//! The kinds of values `nagaya.toml` knows, how each is checked, and how it is printed so that it can be
//! read back.
//!
//! Not here: which keys exist (`schema`), the walk through the file (`read`).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use nagaya_base::units;
use nagaya_cmdb::RuleName;
use nagaya_edge::options::{LogFormat as AccessFormat, ProbeKind};
use nagaya_keeper::{BackEnd, HugePages, ProgramCalls, ProgramNetwork};
use nagaya_rules::{OnError, Phase};
use toml::de::DeValue;

use super::mistake::{INVALID, PATH, Problem, WRONG_TYPE};
use super::settings::{LogFormat, STORED};

/// Users or groups one key names.
const ACCOUNTS_MAX: usize = 64;

const LOG_LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// Parts of this program begin so.
const OWN_TARGETS: &str = "nagaya";

/// What a key takes.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    Text,
    /// An absolute path.
    Path(Exists),
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
    /// Each entry an IP address or a network like `10.0.0.0/8`.
    Networks,
    /// Each entry a user or group of the machine, by name or number. At most `ACCOUNTS_MAX`.
    Accounts,
    /// Each entry the number of a port.
    Ports,
    /// A `tracing` filter.
    Filter,
}

/// What must be at a path when the file is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exists {
    Later,
    Directory,
    File,
}

/// A checked value. Sizes are bytes, times milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Unset,
    Text(String),
    Flag(bool),
    Number(u64),
    Texts(Vec<String>),
}

impl Kind {
    /// What stood in the file, checked; `Err` says what is wrong with it and what would do.
    pub fn check(self, found: &DeValue<'_>) -> Result<Value, Problem> {
        match self {
            Self::Flag => found.as_bool().map(Value::Flag).ok_or_else(|| self.wrong_type(found)),
            Self::Count { min, max } => {
                let number = found.as_integer().ok_or_else(|| self.wrong_type(found))?;
                let digits = number.as_str().replace('_', "");
                match u64::from_str_radix(&digits, number.radix()) {
                    Ok(number) if (min..=max).contains(&number) => Ok(Value::Number(number)),
                    _ => Err(Problem::new(
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
                Ok(Value::Texts(texts))
            }
            Self::Accounts => {
                let list = found.as_array().ok_or_else(|| self.wrong_type(found))?;
                if list.len() > ACCOUNTS_MAX {
                    let what = format!("there are {} entries", list.len());
                    return Err(Problem::new(INVALID, what, format!("use at most {ACCOUNTS_MAX}")));
                }
                let text = |entry: &DeValue<'_>| entry.as_str().map(str::to_owned);
                let texts = list.iter().map(|entry| text(entry.get_ref())).collect::<Option<_>>();
                texts.map(Value::Texts).ok_or_else(|| self.wrong_type(found))
            }
            Self::Ports => {
                let list = found.as_array().ok_or_else(|| self.wrong_type(found))?;
                list.iter()
                    .map(|entry| self.check_port(entry.get_ref()))
                    .collect::<Result<_, _>>()
                    .map(Value::Texts)
            }
            _ => self.check_text(found.as_str().ok_or_else(|| self.wrong_type(found))?),
        }
    }

    fn check_port(self, found: &DeValue<'_>) -> Result<String, Problem> {
        let number = found.as_integer().ok_or_else(|| self.wrong_type(found))?;
        match u16::from_str_radix(&number.as_str().replace('_', ""), number.radix()) {
            Ok(port) if port > 0 => Ok(port.to_string()),
            _ => Err(Problem::new(INVALID, format!("{number} is no port"), "use 1 to 65535".into())),
        }
    }

    fn check_text(self, text: &str) -> Result<Value, Problem> {
        match self {
            Self::Size { min, max } => {
                let bytes = units::parse_bytes(text)
                    .map_err(|error| Problem::new(INVALID, error, format!("use {}", self.range())))?;
                self.within(bytes, min, max)
            }
            Self::Time { min, max } => {
                let time = units::parse_duration(text)
                    .map_err(|error| Problem::new(INVALID, error, format!("use {}", self.range())))?;
                self.within(u64::try_from(time.as_millis()).unwrap_or(u64::MAX), min, max)
            }
            Self::Choice(words) if words.contains(&text) => Ok(Value::Text(text.into())),
            Self::Choice(words) => {
                let hint = super::mistake::nearest(text, words.iter().copied()).map_or_else(
                    || format!("use {}", words.join(", ")),
                    |near| format!("did you mean \"{near}\"?"),
                );
                Err(Problem::new(INVALID, format!("'{text}' is not one of {}", words.join(", ")), hint))
            }
            Self::Address => check_address(text).map(|address| Value::Text(address.to_string())),
            Self::Path(exists) => check_path(text, exists),
            Self::Rule => check_rule(text),
            Self::Filter => check_log_filter(text),
            _ if text.is_empty() => {
                Err(Problem::new(INVALID, "it is empty".into(), "write a value, or leave the key out".into()))
            }
            _ => Ok(Value::Text(text.into())),
        }
    }

    fn within(self, number: u64, min: u64, max: u64) -> Result<Value, Problem> {
        if (min..=max).contains(&number) {
            return Ok(Value::Number(number));
        }
        let shown = self.print(&Value::Number(number));
        Err(Problem::new(INVALID, format!("{shown} is out of range"), format!("use {}", self.range())))
    }

    fn wrong_type(self, found: &DeValue<'_>) -> Problem {
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
        Problem::new(WRONG_TYPE, what, hint)
    }

    /// What it is called in the reference and in messages.
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

    /// The acceptable values, as the reference prints them.
    pub fn range(self) -> String {
        match self {
            Self::Count { min, max } => format!("{min} to {max}"),
            Self::Size { min, max } => {
                format!("{} to {}", units::format_bytes(min), units::format_bytes(max))
            }
            Self::Time { min, max } => format!("{} to {}", print_ms(min), print_ms(max)),
            Self::Choice(words) => words.join(", "),
            Self::Path(Exists::Directory) => "an existing directory".into(),
            Self::Path(Exists::File) => "an existing file".into(),
            Self::Path(Exists::Later) => "absolute".into(),
            Self::Rule => "absolute, or `store:NAME`".into(),
            Self::Address => "`ip:port` or `[ipv6]:port`".into(),
            Self::Networks => "addresses or `address/bits`".into(),
            Self::Accounts => format!("names or numbers, at most {ACCOUNTS_MAX}"),
            Self::Ports => "numbers from 1 to 65535".into(),
            Self::Filter => "error, warn, info, debug, trace, or a filter".into(),
            Self::Text | Self::Flag => String::new(),
        }
    }

    /// The value as it is written in the file.
    pub fn print(self, value: &Value) -> String {
        match (self, value) {
            (_, Value::Unset) => String::new(),
            (Self::Size { .. }, Value::Number(bytes)) => quote(&units::format_bytes(*bytes)),
            (Self::Time { .. }, Value::Number(ms)) => quote(&print_ms(*ms)),
            (_, Value::Number(number)) => number.to_string(),
            (_, Value::Flag(flag)) => flag.to_string(),
            (_, Value::Text(text)) => quote(text),
            (Self::Ports, Value::Texts(ports)) => format!("[{}]", ports.join(", ")),
            (_, Value::Texts(texts)) => {
                format!("[{}]", texts.iter().map(|text| quote(text)).collect::<Vec<_>>().join(", "))
            }
        }
    }
}

fn print_ms(ms: u64) -> String {
    units::format_duration(Duration::from_millis(ms))
}

/// JSON's string form is also a TOML basic string: both escape quotes, backslashes and control characters
/// the same way.
fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A word alone is a level. The library takes any other word for the name of a program's part, all of which is shown then.
fn check_log_filter(text: &str) -> Result<Value, Problem> {
    const USE: &str = "use error, warn, info, debug or trace, or a list like \"info,nagaya_edge=debug\"";
    let refuse = |part: &str, why: String| {
        let near = super::mistake::nearest(part, LOG_LEVELS.into_iter());
        let hint = near.map_or_else(|| USE.to_owned(), |near| format!("did you mean \"{near}\"?"));
        Err(Problem::new(INVALID, format!("'{part}' is not a log level{why}"), hint))
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
        Ok(_) => Ok(Value::Text(text.into())),
        Err(error) => refuse(text, format!(": {error}")),
    }
}

fn check_address(text: &str) -> Result<SocketAddr, Problem> {
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
    Err(Problem::new(INVALID, format!("'{text}' is not an address and port"), hint))
}

fn check_network(text: &str) -> Result<(), Problem> {
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
        _ => Err(Problem::new(
            INVALID,
            format!("'{text}' is not an address or network"),
            "use \"192.0.2.1\", \"10.0.0.0/8\" or \"2001:db8::/32\"".into(),
        )),
    }
}

fn check_rule(text: &str) -> Result<Value, Problem> {
    let Some(name) = text.strip_prefix(STORED) else { return check_path(text, Exists::Later) };
    match RuleName::new(name) {
        Ok(_) => Ok(Value::Text(text.into())),
        Err(error) => {
            let hint = "write the name as `nagaya rule list` shows it".into();
            Err(Problem::new(INVALID, error.to_string(), hint))
        }
    }
}

fn check_path(text: &str, exists: Exists) -> Result<Value, Problem> {
    let path = PathBuf::from(text);
    if !path.is_absolute() {
        let hint = "write the whole path, beginning with /".into();
        return Err(Problem::new(INVALID, format!("'{text}' is not an absolute path"), hint));
    }
    let found = match exists {
        Exists::Later => return Ok(Value::Text(text.into())),
        Exists::Directory | Exists::File => std::fs::metadata(&path),
    };
    match found {
        Ok(meta) if meta.is_dir() == (exists == Exists::Directory) => Ok(Value::Text(text.into())),
        Ok(_) => {
            let wanted = if exists == Exists::Directory { "directory" } else { "file" };
            Err(Problem::new(
                PATH,
                format!("'{text}' is not a {wanted}"),
                format!("give the path of a {wanted}"),
            ))
        }
        Err(error) => Err(Problem::new(
            PATH,
            format!("'{text}' cannot be used: {error}"),
            "create it, or correct the path".into(),
        )),
    }
}

/// A field of the settings that a key reads and writes.
pub trait Field {
    fn value(&self) -> Value;
    /// Takes a value of the kind its key has; the schema's test assigns every key once.
    fn assign(&mut self, value: Value);
}

/// The message of an `assign` that got another kind: the row in the schema is wrong, not the operator.
const MISMATCH: &str = "schema.rs gives this field a kind that its type does not hold";

impl Field for bool {
    fn value(&self) -> Value {
        Value::Flag(*self)
    }

    fn assign(&mut self, value: Value) {
        let Value::Flag(flag) = value else { panic!("{MISMATCH}") };
        *self = flag;
    }
}

impl Field for String {
    fn value(&self) -> Value {
        Value::Text(self.clone())
    }

    fn assign(&mut self, value: Value) {
        let Value::Text(text) = value else { panic!("{MISMATCH}") };
        *self = text;
    }
}

impl Field for PathBuf {
    fn value(&self) -> Value {
        Value::Text(self.to_string_lossy().into_owned())
    }

    fn assign(&mut self, value: Value) {
        let Value::Text(text) = value else { panic!("{MISMATCH}") };
        *self = text.into();
    }
}

impl Field for SocketAddr {
    fn value(&self) -> Value {
        Value::Text(self.to_string())
    }

    fn assign(&mut self, value: Value) {
        let Value::Text(text) = value else { panic!("{MISMATCH}") };
        *self = text.parse().expect("an address value was parsed once already");
    }
}

impl Field for Vec<String> {
    fn value(&self) -> Value {
        Value::Texts(self.clone())
    }

    fn assign(&mut self, value: Value) {
        let Value::Texts(texts) = value else { panic!("{MISMATCH}") };
        *self = texts;
    }
}

impl Field for Vec<u16> {
    fn value(&self) -> Value {
        Value::Texts(self.iter().map(u16::to_string).collect())
    }

    fn assign(&mut self, value: Value) {
        let Value::Texts(ports) = value else { panic!("{MISMATCH}") };
        *self = ports.iter().map(|port| port.parse().expect("a port was parsed once already")).collect();
    }
}

impl<T: Field + Default> Field for Option<T> {
    fn value(&self) -> Value {
        self.as_ref().map_or(Value::Unset, Field::value)
    }

    fn assign(&mut self, value: Value) {
        self.insert(T::default()).assign(value);
    }
}

macro_rules! number_field {
    ($($type:ty),*) => {$(
        impl Field for $type {
            fn value(&self) -> Value {
                Value::Number(u64::try_from(*self).expect("no number type here is wider than 64 bits"))
            }

            fn assign(&mut self, value: Value) {
                let Value::Number(number) = value else { panic!("{MISMATCH}") };
                *self = <$type>::try_from(number).expect("the key's range fits its field; a test assigns the ends");
            }
        }
    )*};
}

number_field!(u32, u64, usize);

macro_rules! word_field {
    ($type:ty: $($variant:ident = $word:literal),*) => {
        impl Field for $type {
            fn value(&self) -> Value {
                Value::Text(match self { $(Self::$variant => $word),* }.into())
            }

            fn assign(&mut self, value: Value) {
                match value {
                    $(Value::Text(text) if text == $word => *self = Self::$variant,)*
                    _ => panic!("{MISMATCH}"),
                }
            }
        }
    };
}

word_field!(LogFormat: Auto = "auto", Text = "text", Json = "json");
word_field!(
    Phase:
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
    BackEnd: Auto = "auto",
    CgroupV2 = "cgroup-v2",
    CgroupV1 = "cgroup-v1",
    ProcessGroup = "process-group"
);
