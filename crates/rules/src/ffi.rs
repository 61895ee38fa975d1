//! The shim of `c/vm.c` as safe Rust: one VM, its programs, and the way of a native's call from Ruby into Rust.
//!
//! The only unsafe part of the crate. `c/vm.h` says why no longjmp crosses a frame of Rust. Not here: what is loaded into a
//! VM and when it is given up (`vm`), what natives do (`native`, `api`).

#![allow(unsafe_code)]

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::Phase;
use crate::facts::Facts;
use crate::native::{Arg, Call, ErrorKind, Native, NativeError, Objects, Value};
use crate::verdict::Verdict;

/// One mruby VM. It belongs to the thread that opened it.
pub struct Machine {
    vm: NonNull<RawVm>,
    /// From `Box::into_raw`; behind a pointer because the VM holds it too.
    host: NonNull<Host>,
    error: Box<RawError>,
    not_send: PhantomData<*mut ()>,
}

/// A loaded program of one machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Program(u32);

/// Bytecode. mruby trusts what it loads, so that only `Machine::compile` makes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code(Arc<[u8]>);

/// What one run may use.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Limits {
    pub instructions: u64,
    /// Bytes of the whole VM.
    pub memory: usize,
    /// New symbols.
    pub symbols: u32,
    /// Processor time, also within one call of C. `u64::MAX`: any.
    pub nanoseconds: u64,
}

/// Why the VM did not do something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub status: Status,
    pub line: Option<u32>,
    pub class: String,
    pub message: String,
    /// Innermost first: `FILE:LINE:in METHOD`.
    pub backtrace: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Syntax,
    Exception,
    /// This one and the next three: the work was ended, and the machine can only be dropped.
    Instructions,
    Memory,
    Symbols,
    Time,
    Failed,
}

/// A part of mruby's own library.
pub struct Unit {
    pub index: usize,
    pub name: &'static CStr,
    pub source: &'static [u8],
}

/// What rules run against.
pub struct Scope<'a> {
    pub facts: &'a dyn Facts,
    pub verdict: &'a mut Verdict,
    pub phase: Phase,
}

// === impl Machine ===

impl Machine {
    /// A VM with mruby's core and nothing of its library, unlimited. `None`: no memory.
    pub fn open(natives: &'static [Native]) -> Option<Self> {
        let host = Host { natives, objects: Objects::new(), kept: Kept::default(), scope: ptr::null_mut() };
        let host = NonNull::from(Box::leak(Box::new(host)));
        let raw = RawHost { state: host.as_ptr().cast(), call, drop: drop_object };
        // SAFETY: the shim copies `raw`; the host it points to lives until the machine is dropped.
        let Some(vm) = NonNull::new(unsafe { ng_open(&raw) }) else {
            // SAFETY: leaked above, and no VM has it.
            drop(unsafe { Box::from_raw(host.as_ptr()) });
            return None;
        };
        Some(Self { vm, host, error: RawError::new(), not_send: PhantomData })
    }

    pub fn limit(&mut self, limits: Limits) {
        // SAFETY: the VM is open as long as the machine lives; the limits are copied.
        unsafe { ng_limit(self.vm.as_ptr(), &limits) }
    }

    pub fn units() -> Vec<Unit> {
        let mut first = ptr::null();
        // SAFETY: the shim points to a constant table of so many rows.
        let rows = unsafe {
            let len = ng_units(&mut first);
            slice::from_raw_parts(first, len)
        };
        let unit = |(index, row): (usize, &RawUnit)| Unit {
            index,
            // SAFETY: names and sources are constants of the program, the names ended by NUL.
            name: unsafe { CStr::from_ptr(row.name) },
            // SAFETY: as above.
            source: unsafe { slice::from_raw_parts(row.source, row.len) },
        };
        rows.iter().enumerate().map(unit).collect()
    }

    pub fn init_unit(&mut self, unit: &Unit) -> Result<(), Failure> {
        // SAFETY: the VM is open, and a `Unit` only comes from `units`.
        let status = unsafe { ng_unit_init(self.vm.as_ptr(), unit.index, &mut *self.error) };
        self.outcome(status)
    }

    /// Puts the methods in place that are written in C because they are too slow in Ruby; after the library.
    pub fn finish(&mut self) -> Result<(), Failure> {
        // SAFETY: the VM is open.
        let status = unsafe { ng_finish(self.vm.as_ptr(), &mut *self.error) };
        self.outcome(status)
    }

    /// Defines the native at this place of the table the machine was opened with.
    pub fn define(&mut self, at: usize, native: &Native, is_module: bool) -> Result<(), Failure> {
        let (class, name) = (c_string(native.class)?, c_string(native.name)?);
        let number = u32::try_from(at).map_err(|_| Failure::of("too many natives"))?;
        let (vm, error) = (self.vm.as_ptr(), &mut *self.error);
        // SAFETY: the VM is open; the names end with NUL and are copied.
        let status = unsafe {
            ng_define_native(
                vm,
                class.as_ptr(),
                name.as_ptr(),
                is_module.into(),
                native.singleton.into(),
                number,
                error,
            )
        };
        self.outcome(status)
    }

    pub fn constant(&mut self, class: &str, name: &str, is_module: bool, value: i64) -> Result<(), Failure> {
        let (class, name) = (c_string(class)?, c_string(name)?);
        let (vm, error) = (self.vm.as_ptr(), &mut *self.error);
        // SAFETY: the VM is open; the names end with NUL and are copied.
        let status =
            unsafe { ng_define_constant(vm, class.as_ptr(), name.as_ptr(), is_module.into(), value, error) };
        self.outcome(status)
    }

    /// Bytecode of a Ruby text. A text that needs more memory or time than the limits say is ended like a run.
    pub fn compile(&mut self, text: &[u8], file: &CStr, with_lines: bool) -> Result<Code, Failure> {
        let (mut code, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the VM is open; the text is read during the call only.
        let status = unsafe {
            ng_compile(
                self.vm.as_ptr(),
                text.as_ptr().cast(),
                text.len(),
                file.as_ptr(),
                with_lines.into(),
                &mut code,
                &mut len,
                &mut *self.error,
            )
        };
        self.outcome(status)?;
        // SAFETY: on success `code` are `len` bytes of the VM's, released once, here.
        unsafe {
            let copy = Code(slice::from_raw_parts(code, len).into());
            ng_release(self.vm.as_ptr(), code);
            Ok(copy)
        }
    }

    /// Makes bytecode runnable here, of whatever machine.
    pub fn load(&mut self, code: &Code) -> Result<Program, Failure> {
        let mut program = 0;
        let (code, len) = (code.0.as_ptr(), code.0.len());
        // SAFETY: the VM is open; `code` is bytecode of this mruby, which copies what it keeps of it.
        let status = unsafe { ng_load(self.vm.as_ptr(), code, len, &mut program, &mut *self.error) };
        self.outcome(status).map(|()| Program(program))
    }

    pub fn unload(&mut self, program: Program) {
        // SAFETY: the VM is open; a number that is not loaded is ignored.
        unsafe { ng_unload(self.vm.as_ptr(), program.0) }
    }

    /// Runs a program to its end. Without a scope its natives raise.
    pub fn run(&mut self, program: Program, scope: Option<&mut Scope<'_>>) -> Result<(), Failure> {
        let scope: *mut c_void = scope.map_or(ptr::null_mut(), |scope| ptr::from_mut(scope).cast());
        let host = self.host.as_ptr();
        // SAFETY: the host is alive, and nothing borrows it outside a native's call. The scope is borrowed for longer than
        // the run, in which alone `call` reads the pointer.
        let status = unsafe {
            (*host).scope = scope;
            let status = ng_run(self.vm.as_ptr(), program.0, &mut *self.error);
            (*host).scope = ptr::null_mut();
            status
        };
        self.outcome(status)
    }

    /// The names of methods, constants and keywords a program uses, each told once or more. False if it also defines
    /// something, or reads or writes variables that outlive a run.
    pub fn names(&mut self, program: Program, mut each: impl FnMut(&str)) -> bool {
        let mut each: &mut dyn FnMut(&str) = &mut each;
        let state = ptr::from_mut(&mut each).cast();
        // SAFETY: the VM is open; `state` is read by `tell_name` during the call only, as what it is.
        unsafe { ng_names(self.vm.as_ptr(), program.0, tell_name, state) != 0 }
    }

    /// Bytes the VM has allocated.
    pub fn memory(&self) -> usize {
        // SAFETY: the VM is open.
        unsafe { ng_memory(self.vm.as_ptr()) }
    }

    /// Symbols the VM has made; it never forgets one.
    pub fn symbols(&self) -> u32 {
        // SAFETY: the VM is open.
        unsafe { ng_symbols(self.vm.as_ptr()) }
    }

    /// Ruby objects whose state is in Rust.
    #[cfg(test)]
    pub fn objects(&self) -> usize {
        // SAFETY: the host is alive, and no native is running.
        unsafe { (*self.host.as_ptr()).objects.len() }
    }

    /// Collects all garbage. Not after a run was ended.
    pub fn collect(&mut self) {
        // SAFETY: the VM is open.
        unsafe { ng_collect(self.vm.as_ptr()) }
    }

    fn outcome(&self, status: i32) -> Result<(), Failure> {
        let status = match status {
            0 => return Ok(()),
            1 => Status::Syntax,
            2 => Status::Exception,
            3 => Status::Instructions,
            4 => Status::Memory,
            5 => Status::Symbols,
            6 => Status::Time,
            _ => Status::Failed,
        };
        Err(Failure {
            status,
            line: u32::try_from(self.error.line).ok().filter(|line| *line > 0),
            class: text_of(&self.error.class),
            message: text_of(&self.error.message),
            backtrace: text_of(&self.error.backtrace).lines().map(str::to_owned).collect(),
        })
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // SAFETY: both were made by `open` and are used nowhere else; closing calls nothing of the host's.
        unsafe {
            ng_close(self.vm.as_ptr());
            drop(Box::from_raw(self.host.as_ptr()));
        }
    }
}

impl Failure {
    fn of(message: &str) -> Self {
        Self {
            status: Status::Failed,
            line: None,
            class: String::new(),
            message: message.to_owned(),
            backtrace: Vec::new(),
        }
    }
}

fn c_string(text: &str) -> Result<CString, Failure> {
    CString::new(text).map_err(|_| Failure::of("a name holds NUL"))
}

/// How often a run of this thread had to go on for a moment after its time was used up.
#[cfg(test)]
fn deferred() -> u64 {
    // SAFETY: it reads a number of this thread.
    unsafe { ng_deferred() }
}

/// A text of a fixed array, up to its NUL.
fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

// === Natives ===

/// What the VM's calls into Rust work on.
struct Host {
    natives: &'static [Native],
    objects: Objects,
    kept: Kept,
    /// A `Scope` during a run, else null.
    scope: *mut c_void,
}

/// Owns what the result of the last native points to, until the next one is called.
#[derive(Default)]
struct Kept {
    texts: Vec<String>,
    lists: Vec<Vec<RawValue>>,
}

/// A native is called: the only way from Ruby into Rust.
extern "C" fn call(
    state: *mut c_void,
    native: u32,
    handle: *mut usize,
    args: *const RawValue,
    args_len: usize,
    result: *mut RawValue,
) -> i32 {
    // SAFETY: `state` is the host that `Machine::open` gave; only one native runs at a time, and it does not call the VM,
    // so this is the only reference. The other pointers are the shim's local variables.
    let (host, handle, args, result) = unsafe {
        let args = if args_len == 0 { &[] } else { slice::from_raw_parts(args, args_len) };
        (&mut *state.cast::<Host>(), &mut *handle, args, &mut *result)
    };
    host.kept.texts.clear();
    host.kept.lists.clear();
    // A panic must not unwind into C. What it leaves half-done is the verdict of an evaluation that now fails.
    let outcome = catch_unwind(AssertUnwindSafe(|| answer(host, native, handle, args, result)));
    let error = match outcome {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error,
        Err(_) => {
            NativeError::runtime("the method failed; this is a defect of nagaya, and its log says more")
        }
    };
    host.kept.text(&mut { error.message }, result);
    match error.kind {
        ErrorKind::Type => 1,
        ErrorKind::Argument => 2,
        ErrorKind::Runtime => 3,
    }
}

fn answer(
    host: &mut Host,
    native: u32,
    handle: &mut usize,
    args: &[RawValue],
    result: &mut RawValue,
) -> Result<(), NativeError> {
    let native = host.natives.get(native as usize).ok_or(NativeError::runtime("no such method"))?;
    // SAFETY: not null only during `Machine::run`, which borrows the scope for longer.
    let scope = unsafe { host.scope.cast::<Scope<'_>>().as_mut() }
        .ok_or(NativeError::runtime("there is no request here"))?;
    let (only, many): (Arg<'_>, SmallVec<[Arg<'_>; 4]>);
    let args = match args {
        [] => &[],
        [arg] => {
            only = arg.arg();
            slice::from_ref(&only)
        }
        args => {
            many = args.iter().map(RawValue::arg).collect();
            &many[..]
        }
    };
    let mut call = Call {
        facts: scope.facts,
        verdict: &mut *scope.verdict,
        phase: scope.phase,
        args,
        objects: &mut host.objects,
        // C has 0 for no handle, the slab counts from 0.
        handle: handle.checked_sub(1),
    };
    let mut outcome = (native.call)(&mut call);
    *handle = call.handle.map_or(0, |at| at + 1);
    match &mut outcome {
        Ok(value) => host.kept.raw(value, result),
        Err(error) if native.decides => {
            scope.verdict.refuse(current_line(), &error.message);
            result.tag = TAG_NIL;
        }
        Err(_) => return outcome.map(|_| ()),
    }
    Ok(())
}

/// The line of the rule that calls the native.
fn current_line() -> Option<u32> {
    // SAFETY: it reads frames of the VM that runs on this thread, and changes nothing; without one it is 0.
    let line = unsafe { ng_line() };
    u32::try_from(line).ok().filter(|line| *line > 0)
}

/// One name of a program, for `Machine::names`.
extern "C" fn tell_name(state: *mut c_void, name: *const c_char, len: usize) {
    // SAFETY: `state` is what `Machine::names` made of its closure, which nothing else uses meanwhile; the name is good for
    // `len` bytes during this call.
    let (each, name) = unsafe {
        (&mut *state.cast::<&mut dyn FnMut(&str)>(), slice::from_raw_parts(name.cast::<u8>(), len))
    };
    // What is no text is no name that anybody knows.
    let name = str::from_utf8(name).unwrap_or("\0");
    // A panic must not unwind into C.
    let _ = catch_unwind(AssertUnwindSafe(|| each(name)));
}

/// An object with state was collected.
extern "C" fn drop_object(state: *mut c_void, handle: usize) {
    // SAFETY: as in `call`: the VM collects garbage only while no native runs.
    let host = unsafe { &mut *state.cast::<Host>() };
    // A state whose destructor panics must not unwind into C either.
    let _ =
        catch_unwind(AssertUnwindSafe(|| handle.checked_sub(1).and_then(|at| host.objects.try_remove(at))));
}

impl Kept {
    /// Writes the value as the shim reads it. Texts that are borrowed live as long as the scope they are borrowed from; those
    /// that are owned, and lists, are taken and kept. All is written in place: a processor waits long for a value that was
    /// written in parts and is copied as a whole.
    fn raw(&mut self, value: &mut Value<'_>, to: &mut RawValue) {
        match value {
            Value::Nil => to.tag = TAG_NIL,
            Value::This => to.tag = TAG_THIS,
            Value::Bool(bool) => to.tag = if *bool { TAG_TRUE } else { TAG_FALSE },
            Value::Int(i) => (to.tag, to.of.i) = (TAG_INT, *i),
            Value::Float(f) => (to.tag, to.of.f) = (TAG_FLOAT, *f),
            Value::Text(text) => self.text(text, to),
            Value::List(values) => {
                let mut list = vec![RawValue::NIL; values.len()];
                values.iter_mut().zip(&mut list).for_each(|(value, to)| self.raw(value, to));
                self.list(TAG_LIST, list, values.len(), to);
            }
            Value::Map(pairs) => {
                let mut list = vec![RawValue::NIL; 2 * pairs.len()];
                for ((key, value), to) in pairs.iter_mut().zip(list.chunks_exact_mut(2)) {
                    self.text(key, &mut to[0]);
                    self.raw(value, &mut to[1]);
                }
                self.list(TAG_MAP, list, pairs.len(), to);
            }
        }
    }

    fn text(&mut self, text: &mut Cow<'_, str>, to: &mut RawValue) {
        to.tag = TAG_TEXT;
        to.of.bytes = RawBytes { first: text.as_ptr(), len: text.len() };
        if let Cow::Owned(text) = text {
            // The bytes of a String stay where they are when it is moved.
            self.texts.push(std::mem::take(text));
        }
    }

    fn list(&mut self, tag: i32, list: Vec<RawValue>, len: usize, to: &mut RawValue) {
        to.tag = tag;
        to.of.list = RawList { first: list.as_ptr(), len };
        self.lists.push(list);
    }
}

// === The shim's types, as in c/vm.h ===

const TAG_NIL: i32 = 0;
const TAG_FALSE: i32 = 1;
const TAG_TRUE: i32 = 2;
const TAG_INT: i32 = 3;
const TAG_FLOAT: i32 = 4;
const TAG_TEXT: i32 = 5;
const TAG_SYMBOL: i32 = 6;
const TAG_LIST: i32 = 7;
const TAG_MAP: i32 = 8;
const TAG_THIS: i32 = 9;

const CLASS_LEN: usize = 64;
const MESSAGE_LEN: usize = 1024;
const BACKTRACE_LEN: usize = 2048;

#[repr(C)]
struct RawVm {
    opaque: [u8; 0],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RawValue {
    tag: i32,
    of: RawUnion,
}

#[derive(Clone, Copy)]
#[repr(C)]
union RawUnion {
    i: i64,
    f: f64,
    bytes: RawBytes,
    list: RawList,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RawBytes {
    first: *const u8,
    len: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RawList {
    first: *const RawValue,
    len: usize,
}

#[repr(C)]
struct RawError {
    line: i32,
    class: [u8; CLASS_LEN],
    message: [u8; MESSAGE_LEN],
    backtrace: [u8; BACKTRACE_LEN],
}

#[repr(C)]
struct RawHost {
    state: *mut c_void,
    call: extern "C" fn(*mut c_void, u32, *mut usize, *const RawValue, usize, *mut RawValue) -> i32,
    drop: extern "C" fn(*mut c_void, usize),
}

#[repr(C)]
struct RawUnit {
    name: *const c_char,
    source: *const u8,
    len: usize,
}

impl RawError {
    fn new() -> Box<Self> {
        let (class, message, backtrace) = ([0; CLASS_LEN], [0; MESSAGE_LEN], [0; BACKTRACE_LEN]);
        Box::new(Self { line: 0, class, message, backtrace })
    }
}

impl RawValue {
    const NIL: Self = Self { tag: TAG_NIL, of: RawUnion { i: 0 } };

    /// What the shim made of a Ruby value.
    #[inline(always)]
    fn arg(&self) -> Arg<'_> {
        // SAFETY: the tag says which field the shim has set; bytes and lists live as long as the arguments, which are the
        // shim's local variables and Ruby objects on the VM's stack.
        unsafe {
            match self.tag {
                TAG_NIL => Arg::Nil,
                TAG_FALSE => Arg::Bool(false),
                TAG_TRUE => Arg::Bool(true),
                TAG_INT => Arg::Int(self.of.i),
                TAG_FLOAT => Arg::Float(self.of.f),
                TAG_TEXT => Arg::Text(self.of.bytes.slice()),
                TAG_SYMBOL => std::str::from_utf8(self.of.bytes.slice()).map_or(Arg::Other, Arg::Symbol),
                TAG_LIST => Arg::List(self.of.list.slice(1).iter().map(Self::arg).collect()),
                TAG_MAP => {
                    let pairs = self.of.list.slice(2).chunks_exact(2);
                    Arg::Map(pairs.map(|pair| (pair[0].arg(), pair[1].arg())).collect())
                }
                _ => Arg::Other,
            }
        }
    }
}

impl RawBytes {
    /// SAFETY: the pointer must be good for `len` bytes as long as `'a`.
    unsafe fn slice<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: promised by the caller.
        unsafe { slice::from_raw_parts(self.first, self.len) }
    }
}

impl RawList {
    /// SAFETY: the pointer must be good for `len * width` values as long as `'a`.
    unsafe fn slice<'a>(self, width: usize) -> &'a [RawValue] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: promised by the caller.
        unsafe { slice::from_raw_parts(self.first, self.len * width) }
    }
}

unsafe extern "C" {
    fn ng_open(host: *const RawHost) -> *mut RawVm;
    fn ng_close(vm: *mut RawVm);
    fn ng_limit(vm: *mut RawVm, limits: *const Limits);
    fn ng_units(units: *mut *const RawUnit) -> usize;
    fn ng_unit_init(vm: *mut RawVm, unit: usize, error: *mut RawError) -> i32;
    fn ng_finish(vm: *mut RawVm, error: *mut RawError) -> i32;
    fn ng_define_native(
        vm: *mut RawVm,
        class_name: *const c_char,
        name: *const c_char,
        is_module: i32,
        is_singleton: i32,
        native: u32,
        error: *mut RawError,
    ) -> i32;
    fn ng_define_constant(
        vm: *mut RawVm,
        class_name: *const c_char,
        name: *const c_char,
        is_module: i32,
        value: i64,
        error: *mut RawError,
    ) -> i32;
    fn ng_compile(
        vm: *mut RawVm,
        text: *const c_char,
        len: usize,
        file: *const c_char,
        with_lines: i32,
        code: *mut *mut u8,
        code_len: *mut usize,
        error: *mut RawError,
    ) -> i32;
    fn ng_release(vm: *mut RawVm, code: *mut u8);
    fn ng_load(vm: *mut RawVm, code: *const u8, len: usize, program: *mut u32, error: *mut RawError) -> i32;
    fn ng_unload(vm: *mut RawVm, program: u32);
    fn ng_run(vm: *mut RawVm, program: u32, error: *mut RawError) -> i32;
    fn ng_names(
        vm: *mut RawVm,
        program: u32,
        tell: extern "C" fn(*mut c_void, *const c_char, usize),
        state: *mut c_void,
    ) -> i32;
    fn ng_line() -> i32;
    fn ng_memory(vm: *const RawVm) -> usize;
    fn ng_symbols(vm: *const RawVm) -> u32;
    fn ng_collect(vm: *mut RawVm);
    #[cfg(test)]
    fn ng_deferred() -> u64;
}

#[cfg(test)]
mod tests;
