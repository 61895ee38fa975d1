//! `CacheObject`, `Mutex` and `Userdata`: state that rules keep from one request to the next. They
//! work as in mruby-localmemcache, mruby-mutex and mruby-userdata.
//!
//! A Ruby object here names one thing for all threads of the process. So objects that are made
//! again in each VM and for each request mean the same. Not here: what is kept and how much
//! (`state`), the part that is Ruby (`prelude/state.rb`).

use std::time::Duration;

use crate::native::{NativeArg, NativeCall, NativeError, NativeMethod, NativeValue};
use crate::state::{
    CacheFull, KeptFull, LockResult, NAME_LEN_MAX, StoredValue, VALUE_ELEMENTS_MAX, WAIT_MAX,
};

const CACHE: &str = "Cache";
const MUTEX: &str = "Mutex";

type Given<'a> = Result<NativeValue<'a>, NativeError>;

/// Result of `lock` and `unlock` if they do something, as in pthreads.
const DONE: NativeValue<'static> = NativeValue::Int(0);

pub const NATIVES: &[NativeMethod] = &[
    NativeMethod::method(CACHE, "initialize", |call| {
        let space = space_of(call)?;
        call.keep(CacheObject { space: Some(space) });
        Ok(NativeValue::Nil)
    }),
    NativeMethod::method(CACHE, "get", get),
    NativeMethod::method(CACHE, "[]", get),
    NativeMethod::method(CACHE, "get_by_no_lock", get),
    NativeMethod::method(CACHE, "set", set),
    NativeMethod::method(CACHE, "[]=", set),
    NativeMethod::method(CACHE, "delete", |call| {
        call.expect(1, 1)?;
        let space = space(call)?;
        let key = call.bytes(0)?;
        Ok(call.shared.forget(&space, key).into())
    }),
    NativeMethod::method(CACHE, "clear", |call| {
        let space = space(call)?;
        call.shared.clear(&space);
        Ok(NativeValue::Nil)
    }),
    NativeMethod::method(CACHE, "size", |call| {
        let space = space(call)?;
        Ok(NativeValue::Int(i64::try_from(call.shared.cached_in(&space)).unwrap_or(i64::MAX)))
    }),
    NativeMethod::method(CACHE, "close", |call| {
        space(call)?;
        call.this::<CacheObject>()?.space = None;
        Ok(NativeValue::Nil)
    }),
    NativeMethod::method(CACHE, "check_consistency", |call| {
        space(call)?;
        Ok(true.into())
    }),
    NativeMethod::singleton(CACHE, "drop", |call| {
        let space = space_of(call)?;
        call.shared.clear(&space);
        Ok(NativeValue::Nil)
    }),
    NativeMethod::method(CACHE, "keep_in", |call| {
        let space = space(call)?;
        keep(call, StoredValue::Cache(space))
    }),
    NativeMethod::singleton("Nagaya", "cache_usage", |call| {
        let usage = call.shared.usage();
        let number = |bytes| NativeValue::Int(i64::try_from(bytes).unwrap_or(i64::MAX));
        Ok(NativeValue::List(vec![number(usage.bytes_max), number(usage.bytes)]))
    }),
    NativeMethod::method(MUTEX, "initialize", |call| {
        let name = lock_name(call)?;
        call.keep(MutexObject { name });
        Ok(NativeValue::Nil)
    }),
    NativeMethod::method(MUTEX, "try_lock", |call| {
        Ok((take(call, Duration::ZERO)? == LockResult::Yes).into())
    }),
    NativeMethod::method(MUTEX, "lock", lock),
    NativeMethod::method(MUTEX, "lock_within", |call| {
        let within = u64::try_from(call.int(0)?).unwrap_or(0);
        Ok((take(call, Duration::from_micros(within))? == LockResult::Yes).into())
    }),
    NativeMethod::method(MUTEX, "unlock", |call| {
        let name = call.this::<MutexObject>()?.name.clone();
        call.shared.unlock(&name);
        Ok(DONE)
    }),
    NativeMethod::method(MUTEX, "keep_in", |call| {
        let name = call.this::<MutexObject>()?.name.clone();
        keep(call, StoredValue::Lock(name))
    }),
    NativeMethod::singleton("Nagaya", "keep", |call| {
        let value = kept(call.any(2), true)?;
        keep(call, value)
    }),
    NativeMethod::singleton("Nagaya", "kept", |call| {
        let found = call.shared.value(call.text(0)?, call.text(1)?).unwrap_or(StoredValue::Nil);
        let (kind, value) = match found {
            StoredValue::Cache(space) => match space.strip_prefix(FILE) {
                Some(file) => (2, NativeValue::from(file.to_owned())),
                None => (1, NativeValue::from(space[NAMESPACE.len()..].to_owned())),
            },
            StoredValue::Lock(name) => (3, NativeValue::from(String::from(name))),
            plain => (0, value(plain)),
        };
        Ok(NativeValue::List(vec![NativeValue::Int(kind), value]))
    }),
];

/// Prefix of cache names: a namespace and a file of the same name are two caches.
const NAMESPACE: &str = "namespace:";
const FILE: &str = "filename:";

/// The lock of all callers that give no name.
const ONLY_LOCK: &str = "";

/// State of a `CacheObject`; without a name once it is closed.
struct CacheObject {
    space: Option<Box<str>>,
}

/// State of a `Mutex`.
struct MutexObject {
    name: Box<str>,
}

// === Caches ===

/// Returns the cache of `:namespace` or `:filename`. No file is opened; sizes are nagaya's own.
fn space_of(call: &NativeCall<'_>) -> Result<Box<str>, NativeError> {
    call.expect(1, 1)?;
    let NativeArg::Map(options) = call.any(0) else { return Err(NativeError::argument("expected a Hash")) };
    for (option, prefix) in [("namespace", NAMESPACE), ("filename", FILE)] {
        if let Some(name) = option_of(options, option)? {
            return Ok(format!("{prefix}{name}").into());
        }
    }
    Err(NativeError::argument("a Cache needs :namespace or :filename"))
}

/// Returns a text among options, with a bounded length.
fn option_of<'a>(
    options: &'a [(NativeArg<'a>, NativeArg<'a>)],
    name: &str,
) -> Result<Option<&'a str>, NativeError> {
    let Some((_, value)) = options.iter().find(|(key, _)| *key == NativeArg::Symbol(name)) else {
        return Ok(None);
    };
    match value {
        NativeArg::Nil => Ok(None),
        NativeArg::Text(bytes) if bytes.len() > NAME_LEN_MAX => {
            Err(NativeError::argument(format!(":{name} is longer than {NAME_LEN_MAX} bytes")))
        }
        NativeArg::Text(bytes) => str::from_utf8(bytes)
            .map(Some)
            .map_err(|_| NativeError::argument(format!(":{name} is not UTF-8"))),
        other => Err(NativeError::wrong_type(format!(":{name} is {}, and must be a String", other.kind()))),
    }
}

/// Returns the cache that the object names.
fn space(call: &mut NativeCall<'_>) -> Result<Box<str>, NativeError> {
    call.this::<CacheObject>()?.space.clone().ok_or(NativeError::runtime("Pool is closed"))
}

fn get<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let space = space(call)?;
    let key = call.bytes(0)?;
    Ok(call.shared.cached(&space, key).map_or(NativeValue::Nil, NativeValue::Bytes))
}

fn set<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(2, 2)?;
    let space = space(call)?;
    let (NativeArg::Text(key), NativeArg::Text(value)) = (call.any(0), call.any(1)) else {
        return Err(NativeError::wrong_type("both key and value must be STRING"));
    };
    call.shared.cache(&space, key, value)?;
    Ok(NativeValue::Nil)
}

impl From<CacheFull> for NativeError {
    fn from(full: CacheFull) -> Self {
        Self::argument(full.to_string())
    }
}

// === Locks ===

/// Returns the name of a lock. `:global` makes no difference: every lock spans all threads of the
/// process, and no other process.
fn lock_name(call: &NativeCall<'_>) -> Result<Box<str>, NativeError> {
    call.expect(0, 1)?;
    let options = match call.any(0) {
        NativeArg::Nil => return Ok(ONLY_LOCK.into()),
        NativeArg::Map(options) => options,
        _ => return Err(NativeError::argument("expected a Hash")),
    };
    let global = options.iter().find(|(key, _)| *key == NativeArg::Symbol("global"));
    if global.is_some_and(|(_, value)| !matches!(value, NativeArg::Bool(_))) {
        return Err(NativeError::runtime(":global => true or false"));
    }
    Ok(option_of(options, "name")?.unwrap_or(ONLY_LOCK).into())
}

fn take(call: &mut NativeCall<'_>, within: Duration) -> Result<LockResult, NativeError> {
    let name = call.this::<MutexObject>()?.name.clone();
    let taken = call.shared.lock(&name, within);
    if taken == LockResult::TooMany {
        return Err(NativeError::runtime("a run of a rule holds 16 locks at most"));
    }
    Ok(taken)
}

fn lock<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    match take(call, WAIT_MAX)? {
        LockResult::Yes => Ok(DONE),
        LockResult::Mine => Err(NativeError::runtime(
            "this run of the rule has the lock already, and would wait for itself; locks without :name are one lock",
        )),
        LockResult::No | LockResult::TooMany => Err(NativeError::runtime(
            "the lock did not come free in the time for which a thread of the server may stand still",
        )),
    }
}

// === Values ===

fn keep<'a>(call: &NativeCall<'a>, value: StoredValue) -> Given<'a> {
    call.shared.set_value(call.text(0)?, call.text(1)?, value)?;
    Ok(NativeValue::Nil)
}

impl From<KeptFull> for NativeError {
    fn from(full: KeptFull) -> Self {
        Self::runtime(full.to_string())
    }
}

/// Copies a Ruby value.
fn kept(arg: &NativeArg<'_>, may_hold: bool) -> Result<StoredValue, NativeError> {
    Ok(match arg {
        NativeArg::Nil => StoredValue::Nil,
        NativeArg::Bool(bool) => StoredValue::Bool(*bool),
        NativeArg::Int(int) => StoredValue::Int(*int),
        NativeArg::Float(float) => StoredValue::Float(*float),
        NativeArg::Text(text) => StoredValue::Text((*text).into()),
        NativeArg::Symbol(name) => StoredValue::Symbol((*name).into()),
        NativeArg::List(args) if may_hold && args.len() <= VALUE_ELEMENTS_MAX => {
            StoredValue::List(args.iter().map(|arg| kept(arg, false)).collect::<Result<_, _>>()?)
        }
        NativeArg::Map(pairs) if may_hold && 2 * pairs.len() <= VALUE_ELEMENTS_MAX => {
            let pair =
                |(key, value): &(NativeArg<'_>, NativeArg<'_>)| Ok((kept(key, false)?, kept(value, false)?));
            StoredValue::Map(pairs.iter().map(pair).collect::<Result<_, NativeError>>()?)
        }
        NativeArg::List(_) | NativeArg::Map(_) | NativeArg::Other => {
            return Err(NativeError::wrong_type(format!(
                "Userdata keeps nil, booleans, numbers, Strings, Symbols, a Cache, a Mutex, and an Array or a Hash of \
                 up to {VALUE_ELEMENTS_MAX} of the first five"
            )));
        }
    })
}

fn value(kept: StoredValue) -> NativeValue<'static> {
    match kept {
        StoredValue::Nil | StoredValue::Cache(_) | StoredValue::Lock(_) => NativeValue::Nil,
        StoredValue::Bool(bool) => NativeValue::Bool(bool),
        StoredValue::Int(int) => NativeValue::Int(int),
        StoredValue::Float(float) => NativeValue::Float(float),
        StoredValue::Text(text) => NativeValue::Bytes(text.into()),
        StoredValue::Symbol(name) => NativeValue::Symbol(String::from(name).into()),
        StoredValue::List(values) => NativeValue::List(values.into_iter().map(value).collect()),
        StoredValue::Map(pairs) => {
            NativeValue::Table(pairs.into_iter().map(|(key, of)| (value(key), value(of))).collect())
        }
    }
}
