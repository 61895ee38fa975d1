//! Methods of rules that are written in Rust: their declaration, and the input and result of one
//! call.
//!
//! A native reads `FactSource` and records in the `Verdict`. It never calls back into the VM, never
//! blocks and may panic without harm.
//!
//! Not here: the natives themselves (`api`), and how calls come in (`ffi`, `vm`).

use std::any::Any;
use std::borrow::Cow;
use std::fmt;

use slab::Slab;

use crate::facts::FactSource;
use crate::phase::RulePhase;
use crate::state::StateRun;
use crate::verdict::{OverLimit, Verdict};

/// A method of a Ruby class.
#[derive(Clone, Copy)]
pub struct NativeMethod {
    /// `Cgroup::CPU`. It is made if it does not exist, with its modules.
    pub class: &'static str,
    pub name: &'static str,
    /// It belongs to the class itself, not to its objects.
    pub singleton: bool,
    /// It is one decision: an error refuses it alone, and the rule continues after it.
    pub decides: bool,
    pub call: for<'a> fn(&mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError>,
}

impl NativeMethod {
    pub const fn method(
        class: &'static str,
        name: &'static str,
        call: for<'a> fn(&mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError>,
    ) -> Self {
        Self { class, name, singleton: false, decides: false, call }
    }

    /// Declares a word by which a rule decides something.
    pub const fn decision(
        class: &'static str,
        name: &'static str,
        call: for<'a> fn(&mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError>,
    ) -> Self {
        Self { class, name, singleton: false, decides: true, call }
    }

    pub const fn singleton(
        class: &'static str,
        name: &'static str,
        call: for<'a> fn(&mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError>,
    ) -> Self {
        Self { class, name, singleton: true, decides: false, call }
    }
}

/// Ruby text that every VM runs first, after natives and constants exist.
#[derive(Debug, Clone, Copy)]
pub struct RubyPrelude {
    /// Its name in a backtrace.
    pub file: &'static str,
    pub source: &'static str,
}

/// Result of a native.
#[derive(Debug, Clone, PartialEq)]
pub enum NativeValue<'a> {
    Nil,
    /// The object on which the method was called.
    This,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Cow<'a, str>),
    /// A String that need not be UTF-8.
    Bytes(Vec<u8>),
    Symbol(Cow<'a, str>),
    List(Vec<NativeValue<'a>>),
    /// A Hash with String keys.
    Map(Vec<(Cow<'a, str>, NativeValue<'a>)>),
    /// A Hash with any keys.
    Table(Vec<(NativeValue<'a>, NativeValue<'a>)>),
}

impl From<bool> for NativeValue<'_> {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<i64> for NativeValue<'_> {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<f64> for NativeValue<'_> {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl<'a> From<&'a str> for NativeValue<'a> {
    fn from(value: &'a str) -> Self {
        Self::Text(Cow::Borrowed(value))
    }
}

impl From<String> for NativeValue<'_> {
    fn from(value: String) -> Self {
        Self::Text(Cow::Owned(value))
    }
}

impl<'a> From<Cow<'a, str>> for NativeValue<'a> {
    fn from(value: Cow<'a, str>) -> Self {
        Self::Text(value)
    }
}

impl<'a, T: Into<Self>> From<Option<T>> for NativeValue<'a> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Nil, Into::into)
    }
}

/// One argument, borrowed from the VM for the call.
#[derive(Debug, Clone, PartialEq)]
pub enum NativeArg<'a> {
    Nil,
    Bool(bool),
    Int(i64),
    Float(f64),
    /// Bytes of a String: Ruby's need not be UTF-8.
    Text(&'a [u8]),
    Symbol(&'a str),
    /// A list of scalars; deeper nesting is `Other`.
    List(Vec<NativeArg<'a>>),
    /// A table of scalars; keyword arguments come as the last one.
    Map(Vec<(NativeArg<'a>, NativeArg<'a>)>),
    Other,
}

impl NativeArg<'_> {
    /// Returns its name in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Bool(_) => "a boolean",
            Self::Int(_) => "an Integer",
            Self::Float(_) => "a Float",
            Self::Text(_) => "a String",
            Self::Symbol(_) => "a Symbol",
            Self::List(_) => "an Array",
            Self::Map(_) => "a Hash",
            Self::Other => "another object",
        }
    }
}

/// Raised in the rule, at the line of the call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NativeError {
    pub kind: ErrorKind,
    pub message: Cow<'static, str>,
}

/// The class of the exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    Type,
    Argument,
    Runtime,
}

impl NativeError {
    pub fn wrong_type(message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: ErrorKind::Type, message: message.into() }
    }

    pub fn argument(message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: ErrorKind::Argument, message: message.into() }
    }

    pub fn runtime(message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: ErrorKind::Runtime, message: message.into() }
    }
}

impl fmt::Display for NativeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<OverLimit> for NativeError {
    fn from(full: OverLimit) -> Self {
        Self::runtime(full.to_string())
    }
}

/// State of Ruby objects that natives keep in Rust. A VM owns all of it. So nothing is left when
/// the VM is dropped without running any of its destructors.
pub type Objects = Slab<Box<dyn Any>>;

/// One call of a native by a rule.
pub struct NativeCall<'a> {
    pub facts: &'a dyn FactSource,
    pub verdict: &'a mut Verdict,
    pub phase: RulePhase,
    /// State that rules keep between requests.
    pub shared: &'a StateRun<'a>,
    pub(crate) args: &'a [NativeArg<'a>],
    pub(crate) objects: &'a mut Objects,
    /// Index of the object's state; `None` for an object without state.
    pub(crate) handle: Option<usize>,
}

impl<'a> NativeCall<'a> {
    pub fn args(&self) -> &'a [NativeArg<'a>] {
        self.args
    }

    /// Fails with ArgumentError unless the number of arguments is in this range.
    pub fn expect(&self, least: usize, most: usize) -> Result<(), NativeError> {
        let given = self.args.len();
        if (least..=most).contains(&given) {
            return Ok(());
        }
        let wanted = if least == most { least.to_string() } else { format!("{least}..{most}") };
        Err(NativeError::argument(format!("wrong number of arguments (given {given}, expected {wanted})")))
    }

    /// Returns the argument at this position, `Nil` if there is none.
    pub fn any(&self, at: usize) -> &'a NativeArg<'a> {
        self.args.get(at).unwrap_or(&NativeArg::Nil)
    }

    /// Returns a String, which must be UTF-8.
    pub fn text(&self, at: usize) -> Result<&'a str, NativeError> {
        match self.any(at) {
            NativeArg::Text(bytes) => utf8(bytes, at),
            other => Err(self.wrong(at, "a String", other)),
        }
    }

    /// Returns a String or a Symbol.
    pub fn word(&self, at: usize) -> Result<&'a str, NativeError> {
        match self.any(at) {
            NativeArg::Text(bytes) => utf8(bytes, at),
            NativeArg::Symbol(name) => Ok(name),
            other => Err(self.wrong(at, "a String or a Symbol", other)),
        }
    }

    /// Returns the bytes of a String.
    pub fn bytes(&self, at: usize) -> Result<&'a [u8], NativeError> {
        match self.any(at) {
            NativeArg::Text(bytes) => Ok(bytes),
            other => Err(self.wrong(at, "a String", other)),
        }
    }

    /// Returns an Integer, or a Float truncated to one.
    pub fn int(&self, at: usize) -> Result<i64, NativeError> {
        match self.any(at) {
            NativeArg::Int(int) => Ok(*int),
            // 2^63 is the first float above every i64; `as` truncates exactly the values below it.
            #[expect(clippy::cast_possible_truncation)]
            NativeArg::Float(float) if float.abs() < 9_223_372_036_854_775_808.0 => Ok(*float as i64),
            NativeArg::Float(_) => Err(NativeError::argument("the number is not a 64-bit integer")),
            other => Err(self.wrong(at, "an Integer", other)),
        }
    }

    /// Stores the state of the object, replacing any earlier one: for `initialize`.
    pub fn keep(&mut self, state: impl Any) {
        match self.handle.and_then(|at| self.objects.get_mut(at)) {
            Some(had) => *had = Box::new(state),
            None => self.handle = Some(self.objects.insert(Box::new(state))),
        }
    }

    /// Returns the state that `keep` gave the object.
    pub fn this<T: Any>(&mut self) -> Result<&mut T, NativeError> {
        self.handle
            .and_then(|at| self.objects.get_mut(at))
            .and_then(|state| state.downcast_mut())
            .ok_or_else(|| NativeError::wrong_type("the object was not made with `new`"))
    }

    /// Returns the state of the object together with the verdict, to move one into the other.
    pub fn this_and_verdict<T: Any>(&mut self) -> Result<(&mut T, &mut Verdict), NativeError> {
        self.handle
            .and_then(|at| self.objects.get_mut(at))
            .and_then(|state| state.downcast_mut())
            .map(|state| (state, &mut *self.verdict))
            .ok_or_else(|| NativeError::wrong_type("the object was not made with `new`"))
    }

    fn wrong(&self, at: usize, wanted: &str, given: &NativeArg<'_>) -> NativeError {
        if at >= self.args.len() {
            let given = self.args.len();
            let wanted = at + 1;
            return NativeError::argument(format!(
                "wrong number of arguments (given {given}, expected {wanted})"
            ));
        }
        NativeError::wrong_type(format!("argument {} is {}, and must be {wanted}", at + 1, given.kind()))
    }
}

fn utf8(bytes: &[u8], at: usize) -> Result<&str, NativeError> {
    std::str::from_utf8(bytes).map_err(|_| NativeError::argument(format!("argument {} is not UTF-8", at + 1)))
}
