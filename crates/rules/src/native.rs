//! Methods of rules that are written in Rust: how they are declared, what one call of them sees and gives back.
//!
//! A native reads `Facts` and records in the `Verdict`; it never calls back into the VM, never blocks and may panic
//! without harm. Not here: the natives themselves (`api`), and how calls come in (`ffi`, `vm`).

use std::any::Any;
use std::borrow::Cow;
use std::fmt;

use slab::Slab;

use crate::Phase;
use crate::facts::Facts;
use crate::verdict::{Full, Verdict};

/// A method of a Ruby class.
#[derive(Clone, Copy)]
pub struct Native {
    /// `Cgroup::CPU`. It is made, as its modules are, if it is not there.
    pub class: &'static str,
    pub name: &'static str,
    /// Of the class itself, not of its objects.
    pub singleton: bool,
    /// It is one decision: an error refuses it alone, and the rule goes on behind it.
    pub decides: bool,
    pub call: for<'a> fn(&mut Call<'a>) -> Result<Value<'a>, NativeError>,
}

impl Native {
    pub const fn method(
        class: &'static str,
        name: &'static str,
        call: for<'a> fn(&mut Call<'a>) -> Result<Value<'a>, NativeError>,
    ) -> Self {
        Self { class, name, singleton: false, decides: false, call }
    }

    /// A word by which a rule decides something.
    pub const fn decision(
        class: &'static str,
        name: &'static str,
        call: for<'a> fn(&mut Call<'a>) -> Result<Value<'a>, NativeError>,
    ) -> Self {
        Self { class, name, singleton: false, decides: true, call }
    }

    pub const fn singleton(
        class: &'static str,
        name: &'static str,
        call: for<'a> fn(&mut Call<'a>) -> Result<Value<'a>, NativeError>,
    ) -> Self {
        Self { class, name, singleton: true, decides: false, call }
    }
}

/// Ruby text that every VM runs first, after the natives and constants are there.
#[derive(Debug, Clone, Copy)]
pub struct Prelude {
    /// What a backtrace names it.
    pub file: &'static str,
    pub source: &'static str,
}

/// What a native gives back.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    Nil,
    /// The object the method was called on.
    This,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Cow<'a, str>),
    List(Vec<Value<'a>>),
    /// A Hash with String keys.
    Map(Vec<(Cow<'a, str>, Value<'a>)>),
}

impl From<bool> for Value<'_> {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<i64> for Value<'_> {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<f64> for Value<'_> {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl<'a> From<&'a str> for Value<'a> {
    fn from(value: &'a str) -> Self {
        Self::Text(Cow::Borrowed(value))
    }
}

impl From<String> for Value<'_> {
    fn from(value: String) -> Self {
        Self::Text(Cow::Owned(value))
    }
}

impl<'a> From<Cow<'a, str>> for Value<'a> {
    fn from(value: Cow<'a, str>) -> Self {
        Self::Text(value)
    }
}

impl<'a, T: Into<Self>> From<Option<T>> for Value<'a> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Nil, Into::into)
    }
}

/// One argument, borrowed from the VM for the call.
#[derive(Debug, Clone, PartialEq)]
pub enum Arg<'a> {
    Nil,
    Bool(bool),
    Int(i64),
    Float(f64),
    /// Bytes of a String: Ruby's need not be UTF-8.
    Text(&'a [u8]),
    Symbol(&'a str),
    /// Of scalars; what is nested deeper is `Other`.
    List(Vec<Arg<'a>>),
    /// Of scalars; keyword arguments come as the last one.
    Map(Vec<(Arg<'a>, Arg<'a>)>),
    Other,
}

impl Arg<'_> {
    /// What messages call it.
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

impl From<Full> for NativeError {
    fn from(full: Full) -> Self {
        Self::runtime(full.to_string())
    }
}

/// State of Ruby objects that natives keep in Rust. A VM owns it whole, so that nothing is left when the VM is dropped
/// without running any of its destructors.
pub type Objects = Slab<Box<dyn Any>>;

/// One call of a native by a rule.
pub struct Call<'a> {
    pub facts: &'a dyn Facts,
    pub verdict: &'a mut Verdict,
    pub phase: Phase,
    pub(crate) args: &'a [Arg<'a>],
    pub(crate) objects: &'a mut Objects,
    /// Where the state of the object is; an object without state has none.
    pub(crate) handle: Option<usize>,
}

impl<'a> Call<'a> {
    pub fn args(&self) -> &'a [Arg<'a>] {
        self.args
    }

    /// ArgumentError unless there are so many arguments.
    pub fn expect(&self, least: usize, most: usize) -> Result<(), NativeError> {
        let given = self.args.len();
        if (least..=most).contains(&given) {
            return Ok(());
        }
        let wanted = if least == most { least.to_string() } else { format!("{least}..{most}") };
        Err(NativeError::argument(format!("wrong number of arguments (given {given}, expected {wanted})")))
    }

    /// The argument at this place, `Nil` where there is none.
    pub fn any(&self, at: usize) -> &'a Arg<'a> {
        self.args.get(at).unwrap_or(&Arg::Nil)
    }

    /// A String, which must be UTF-8.
    pub fn text(&self, at: usize) -> Result<&'a str, NativeError> {
        match self.any(at) {
            Arg::Text(bytes) => utf8(bytes, at),
            other => Err(self.wrong(at, "a String", other)),
        }
    }

    /// A String or a Symbol.
    pub fn word(&self, at: usize) -> Result<&'a str, NativeError> {
        match self.any(at) {
            Arg::Text(bytes) => utf8(bytes, at),
            Arg::Symbol(name) => Ok(name),
            other => Err(self.wrong(at, "a String or a Symbol", other)),
        }
    }

    /// The bytes of a String.
    pub fn bytes(&self, at: usize) -> Result<&'a [u8], NativeError> {
        match self.any(at) {
            Arg::Text(bytes) => Ok(bytes),
            other => Err(self.wrong(at, "a String", other)),
        }
    }

    /// An Integer, or a Float cut to one.
    pub fn int(&self, at: usize) -> Result<i64, NativeError> {
        match self.any(at) {
            Arg::Int(int) => Ok(*int),
            // 2^63 is the first float above every i64; `as` cuts exactly what is below it.
            #[expect(clippy::cast_possible_truncation)]
            Arg::Float(float) if float.abs() < 9_223_372_036_854_775_808.0 => Ok(*float as i64),
            Arg::Float(_) => Err(NativeError::argument("the number is not a 64-bit integer")),
            other => Err(self.wrong(at, "an Integer", other)),
        }
    }

    /// Keeps the state of the object, in the place of what it had: for `initialize`.
    pub fn keep(&mut self, state: impl Any) {
        match self.handle.and_then(|at| self.objects.get_mut(at)) {
            Some(had) => *had = Box::new(state),
            None => self.handle = Some(self.objects.insert(Box::new(state))),
        }
    }

    /// The state `keep` gave the object.
    pub fn this<T: Any>(&mut self) -> Result<&mut T, NativeError> {
        self.handle
            .and_then(|at| self.objects.get_mut(at))
            .and_then(|state| state.downcast_mut())
            .ok_or_else(|| NativeError::wrong_type("the object was not made with `new`"))
    }

    /// The state of the object beside the verdict, for what moves one into the other.
    pub fn this_and_verdict<T: Any>(&mut self) -> Result<(&mut T, &mut Verdict), NativeError> {
        self.handle
            .and_then(|at| self.objects.get_mut(at))
            .and_then(|state| state.downcast_mut())
            .map(|state| (state, &mut *self.verdict))
            .ok_or_else(|| NativeError::wrong_type("the object was not made with `new`"))
    }

    fn wrong(&self, at: usize, wanted: &str, given: &Arg<'_>) -> NativeError {
        if at >= self.args.len() {
            let (given, wanted) = (self.args.len(), at + 1);
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
