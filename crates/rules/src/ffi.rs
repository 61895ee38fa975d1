//! The shim of `c/vm.c` as safe Rust: one VM, its programs, and a native's call from Ruby into
//! Rust.
//!
//! This is the only unsafe part of the crate. `c/vm.h` says why no longjmp crosses a frame of Rust.
//! Not here: what is loaded into a VM and when it is dropped (`vm`), the work of natives (`native`,
//! `api`).

#![allow(unsafe_code)]

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::facts::FactSource;
use crate::native::{ErrorKind, NativeArg, NativeCall, NativeError, NativeMethod, NativeValue, Objects};
use crate::phase::RulePhase;
use crate::state::StateRun;
use crate::verdict::Verdict;

/// One mruby VM. It belongs to the thread that opened it.
pub struct RubyVm {
    vm: NonNull<RawVm>,
    /// From `Box::into_raw`; behind a pointer because the VM holds it, too.
    host: NonNull<VmHost>,
    error: Box<RawError>,
    not_send: PhantomData<*mut ()>,
}

/// A loaded program of one machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadedProgram(u32);

/// Bytecode. mruby trusts what it loads, so only `RubyVm::compile` makes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bytecode(Arc<[u8]>);

/// Limits of one run.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RunLimits {
    pub instructions: u64,
    /// Bytes of the whole VM.
    pub memory: usize,
    /// New symbols.
    pub symbols: u32,
    /// CPU time, also within one call of C. `u64::MAX` means no limit.
    pub nanoseconds: u64,
}

/// Why the VM failed to do something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmFailure {
    pub status: VmStatus,
    pub line: Option<u32>,
    pub class: String,
    pub message: String,
    /// Innermost first: `FILE:LINE:in METHOD`.
    pub backtrace: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmStatus {
    Syntax,
    Exception,
    /// For this one and the next three, the work was ended, and the machine can only be dropped.
    Instructions,
    Memory,
    Symbols,
    Time,
    Failed,
}

/// A part of mruby's own library.
pub struct LibraryUnit {
    pub index: usize,
    pub name: &'static CStr,
    pub source: &'static [u8],
}

/// The environment of a rule's run.
pub struct RuleScope<'a> {
    pub facts: &'a dyn FactSource,
    pub verdict: &'a mut Verdict,
    pub phase: RulePhase,
    /// State of this run alone: its locks end with it.
    pub shared: StateRun<'a>,
}

// === impl Machine ===

impl RubyVm {
    /// Opens a VM with mruby's core and nothing of its library, unlimited. `None` if there is no
    /// memory.
    pub fn open(natives: &'static [NativeMethod]) -> Option<Self> {
        let host =
            VmHost { natives, objects: Objects::new(), kept: KeptResult::default(), scope: ptr::null_mut() };
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

    pub fn limit(&mut self, limits: RunLimits) {
        // SAFETY: the VM is open as long as the machine lives; the limits are copied.
        unsafe { ng_limit(self.vm.as_ptr(), &limits) }
    }

    pub fn units() -> Vec<LibraryUnit> {
        let mut first = ptr::null();
        // SAFETY: the shim points to a constant table of that many rows.
        let rows = unsafe {
            let len = ng_units(&mut first);
            slice::from_raw_parts(first, len)
        };
        let unit = |(index, row): (usize, &RawUnit)| LibraryUnit {
            index,
            // SAFETY: names and sources are constants of the program, the names ended by NUL.
            name: unsafe { CStr::from_ptr(row.name) },
            // SAFETY: as above.
            source: unsafe { slice::from_raw_parts(row.source, row.len) },
        };
        rows.iter().enumerate().map(unit).collect()
    }

    pub fn init_unit(&mut self, unit: &LibraryUnit) -> Result<(), VmFailure> {
        // SAFETY: the VM is open, and a `LibraryUnit` only comes from `units`.
        let status = unsafe { ng_unit_init(self.vm.as_ptr(), unit.index, &mut *self.error) };
        self.outcome(status)
    }

    /// Installs the methods that are written in C because they are too slow in Ruby. Called after
    /// the library is loaded.
    pub fn finish(&mut self) -> Result<(), VmFailure> {
        // SAFETY: the VM is open.
        let status = unsafe { ng_finish(self.vm.as_ptr(), &mut *self.error) };
        self.outcome(status)
    }

    /// Defines the native at this position of the table with which the machine was opened.
    pub fn define(&mut self, at: usize, native: &NativeMethod, is_module: bool) -> Result<(), VmFailure> {
        let class = c_string(native.class)?;
        let name = c_string(native.name)?;
        let number = u32::try_from(at).map_err(|_| VmFailure::of("too many natives"))?;
        let vm = self.vm.as_ptr();
        let error = &mut *self.error;
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

    pub fn constant(
        &mut self,
        class: &str,
        name: &str,
        is_module: bool,
        value: i64,
    ) -> Result<(), VmFailure> {
        let class = c_string(class)?;
        let name = c_string(name)?;
        let vm = self.vm.as_ptr();
        let error = &mut *self.error;
        // SAFETY: the VM is open; the names end with NUL and are copied.
        let status =
            unsafe { ng_define_constant(vm, class.as_ptr(), name.as_ptr(), is_module.into(), value, error) };
        self.outcome(status)
    }

    /// Compiles a Ruby text to bytecode. A text that needs more memory or time than the limits is
    /// ended like a run.
    pub fn compile(&mut self, text: &[u8], file: &CStr, with_lines: bool) -> Result<Bytecode, VmFailure> {
        let mut code = ptr::null_mut();
        let mut len = 0;
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
            let copy = Bytecode(slice::from_raw_parts(code, len).into());
            ng_release(self.vm.as_ptr(), code);
            Ok(copy)
        }
    }

    /// Makes bytecode of any machine runnable here.
    pub fn load(&mut self, code: &Bytecode) -> Result<LoadedProgram, VmFailure> {
        let mut program = 0;
        let (code, len) = (code.0.as_ptr(), code.0.len());
        // SAFETY: the VM is open; `code` is bytecode of this mruby, which copies the parts that it
        // keeps.
        let status = unsafe { ng_load(self.vm.as_ptr(), code, len, &mut program, &mut *self.error) };
        self.outcome(status).map(|()| LoadedProgram(program))
    }

    pub fn unload(&mut self, program: LoadedProgram) {
        // SAFETY: the VM is open; a number that is not loaded is ignored.
        unsafe { ng_unload(self.vm.as_ptr(), program.0) }
    }

    /// Runs a program to its end. Without a scope its natives raise.
    pub fn run(
        &mut self,
        program: LoadedProgram,
        scope: Option<&mut RuleScope<'_>>,
    ) -> Result<(), VmFailure> {
        let scope: *mut c_void = scope.map_or(ptr::null_mut(), |scope| ptr::from_mut(scope).cast());
        let host = self.host.as_ptr();
        // SAFETY: the host is alive, and nothing borrows it outside a native's call. The scope is
        // borrowed for longer than the run, and `call` reads the pointer only during the run.
        let status = unsafe {
            (*host).scope = scope;
            let status = ng_run(self.vm.as_ptr(), program.0, &mut *self.error);
            (*host).scope = ptr::null_mut();
            status
        };
        self.outcome(status)
    }

    /// Passes the names of methods, constants and keywords that a program uses, each once or more.
    /// Returns false if it also defines something, or uses variables that outlive a run.
    pub fn names(&mut self, program: LoadedProgram, mut each: impl FnMut(&str)) -> bool {
        let mut each: &mut dyn FnMut(&str) = &mut each;
        let state = ptr::from_mut(&mut each).cast();
        // SAFETY: the VM is open; `state` is read by `tell_name` during the call only, with its
        // true type.
        unsafe { ng_names(self.vm.as_ptr(), program.0, tell_name, state) != 0 }
    }

    /// Returns the bytes that the VM has allocated.
    pub fn memory(&self) -> usize {
        // SAFETY: the VM is open.
        unsafe { ng_memory(self.vm.as_ptr()) }
    }

    /// Returns the symbols that the VM has made; it never forgets one.
    pub fn symbols(&self) -> u32 {
        // SAFETY: the VM is open.
        unsafe { ng_symbols(self.vm.as_ptr()) }
    }

    /// Returns the Ruby objects whose state is in Rust.
    #[cfg(test)]
    pub fn objects(&self) -> usize {
        // SAFETY: the host is alive, and no native is running.
        unsafe { (*self.host.as_ptr()).objects.len() }
    }

    /// Collects all garbage. Must not be called after a run was ended.
    pub fn collect(&mut self) {
        // SAFETY: the VM is open.
        unsafe { ng_collect(self.vm.as_ptr()) }
    }

    fn outcome(&self, status: i32) -> Result<(), VmFailure> {
        let status = match status {
            0 => return Ok(()),
            1 => VmStatus::Syntax,
            2 => VmStatus::Exception,
            3 => VmStatus::Instructions,
            4 => VmStatus::Memory,
            5 => VmStatus::Symbols,
            6 => VmStatus::Time,
            _ => VmStatus::Failed,
        };
        Err(VmFailure {
            status,
            line: u32::try_from(self.error.line).ok().filter(|line| *line > 0),
            class: text_of(&self.error.class),
            message: text_of(&self.error.message),
            backtrace: text_of(&self.error.backtrace).lines().map(str::to_owned).collect(),
        })
    }
}

impl Drop for RubyVm {
    fn drop(&mut self) {
        // SAFETY: both were made by `open` and are used nowhere else; closing calls nothing of the
        // host's.
        unsafe {
            ng_close(self.vm.as_ptr());
            drop(Box::from_raw(self.host.as_ptr()));
        }
    }
}

impl VmFailure {
    fn of(message: &str) -> Self {
        Self {
            status: VmStatus::Failed,
            line: None,
            class: String::new(),
            message: message.to_owned(),
            backtrace: Vec::new(),
        }
    }
}

fn c_string(text: &str) -> Result<CString, VmFailure> {
    CString::new(text).map_err(|_| VmFailure::of("a name holds NUL"))
}

/// Returns how often a run of this thread had to continue for a moment after its time was used up.
#[cfg(test)]
fn deferred() -> u64 {
    // SAFETY: it reads a number of this thread.
    unsafe { ng_deferred() }
}

/// Returns the text of a fixed array, up to its NUL.
fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

// === Natives ===

/// Data for the VM's calls into Rust.
struct VmHost {
    natives: &'static [NativeMethod],
    objects: Objects,
    kept: KeptResult,
    /// A `RuleScope` during a run, otherwise null.
    scope: *mut c_void,
}

/// Owns the data to which the result of the last native points, until the next call.
#[derive(Default)]
struct KeptResult {
    texts: Vec<String>,
    bytes: Vec<Vec<u8>>,
    lists: Vec<Vec<RawValue>>,
}

/// Calls a native: the only way from Ruby into Rust.
extern "C" fn call(
    state: *mut c_void,
    native: u32,
    handle: *mut usize,
    args: *const RawValue,
    args_len: usize,
    result: *mut RawValue,
) -> i32 {
    // SAFETY: `state` is the host that `RubyVm::open` gave. Only one native runs at a time, and it
    // does not call the VM, so this is the only reference. The other pointers are the shim's local
    // variables.
    let (host, handle, args, result) = unsafe {
        let args = if args_len == 0 { &[] } else { slice::from_raw_parts(args, args_len) };
        (&mut *state.cast::<VmHost>(), &mut *handle, args, &mut *result)
    };
    host.kept.texts.clear();
    host.kept.bytes.clear();
    host.kept.lists.clear();
    // A panic must not unwind into C. It leaves a half-done verdict, whose evaluation now fails.
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
    host: &mut VmHost,
    native: u32,
    handle: &mut usize,
    args: &[RawValue],
    result: &mut RawValue,
) -> Result<(), NativeError> {
    let native = host.natives.get(native as usize).ok_or(NativeError::runtime("no such method"))?;
    // SAFETY: not null only during `RubyVm::run`, which borrows the scope for longer.
    let scope = unsafe { host.scope.cast::<RuleScope<'_>>().as_mut() }
        .ok_or(NativeError::runtime("there is no request here"))?;
    let (only, many): (NativeArg<'_>, SmallVec<[NativeArg<'_>; 4]>);
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
    let mut call = NativeCall {
        facts: scope.facts,
        verdict: &mut *scope.verdict,
        phase: scope.phase,
        shared: &scope.shared,
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

/// Returns the line of the rule that calls the native.
fn current_line() -> Option<u32> {
    // SAFETY: it reads frames of the VM that runs on this thread, and changes nothing; without one
    // it is 0.
    let line = unsafe { ng_line() };
    u32::try_from(line).ok().filter(|line| *line > 0)
}

/// Passes one name of a program, for `RubyVm::names`.
extern "C" fn tell_name(state: *mut c_void, name: *const c_char, len: usize) {
    // SAFETY: `state` is made by `RubyVm::names` from its closure, which nothing else uses
    // meanwhile. The name is valid for `len` bytes during this call.
    let (each, name) = unsafe {
        (&mut *state.cast::<&mut dyn FnMut(&str)>(), slice::from_raw_parts(name.cast::<u8>(), len))
    };
    // Bytes that are no text are not a known name.
    let name = str::from_utf8(name).unwrap_or("\0");
    // A panic must not unwind into C.
    let _ = catch_unwind(AssertUnwindSafe(|| each(name)));
}

/// Drops the state of an object that was collected.
extern "C" fn drop_object(state: *mut c_void, handle: usize) {
    // SAFETY: as in `call`: the VM collects garbage only while no native runs.
    let host = unsafe { &mut *state.cast::<VmHost>() };
    // A state whose destructor panics must not unwind into C, either.
    let _ =
        catch_unwind(AssertUnwindSafe(|| handle.checked_sub(1).and_then(|at| host.objects.try_remove(at))));
}

impl KeptResult {
    /// Writes the value as the shim reads it. Borrowed texts live as long as the scope of their
    /// borrow. Owned texts, and lists, are taken and kept. All is written in place. A CPU waits
    /// long for a value that was written in parts and is copied as a whole.
    fn raw(&mut self, value: &mut NativeValue<'_>, to: &mut RawValue) {
        match value {
            NativeValue::Nil => to.tag = TAG_NIL,
            NativeValue::This => to.tag = TAG_THIS,
            NativeValue::Bool(bool) => to.tag = if *bool { TAG_TRUE } else { TAG_FALSE },
            NativeValue::Int(i) => (to.tag, to.of.i) = (TAG_INT, *i),
            NativeValue::Float(f) => (to.tag, to.of.f) = (TAG_FLOAT, *f),
            NativeValue::Text(text) => self.text(text, to),
            NativeValue::Bytes(bytes) => {
                to.tag = TAG_TEXT;
                to.of.bytes = RawBytes { first: bytes.as_ptr(), len: bytes.len() };
                self.bytes.push(std::mem::take(bytes));
            }
            NativeValue::Symbol(name) => {
                self.text(name, to);
                to.tag = TAG_SYMBOL;
            }
            NativeValue::List(values) => {
                let mut list = vec![RawValue::NIL; values.len()];
                values.iter_mut().zip(&mut list).for_each(|(value, to)| self.raw(value, to));
                self.list(TAG_LIST, list, values.len(), to);
            }
            NativeValue::Map(pairs) => {
                let mut list = vec![RawValue::NIL; 2 * pairs.len()];
                for ((key, value), to) in pairs.iter_mut().zip(list.chunks_exact_mut(2)) {
                    self.text(key, &mut to[0]);
                    self.raw(value, &mut to[1]);
                }
                self.list(TAG_MAP, list, pairs.len(), to);
            }
            NativeValue::Table(pairs) => {
                let mut list = vec![RawValue::NIL; 2 * pairs.len()];
                for ((key, value), to) in pairs.iter_mut().zip(list.chunks_exact_mut(2)) {
                    self.raw(key, &mut to[0]);
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
        let class = [0; CLASS_LEN];
        let message = [0; MESSAGE_LEN];
        let backtrace = [0; BACKTRACE_LEN];
        Box::new(Self { line: 0, class, message, backtrace })
    }
}

impl RawValue {
    const NIL: Self = Self { tag: TAG_NIL, of: RawUnion { i: 0 } };

    /// Returns the argument that the shim made of a Ruby value.
    #[inline(always)]
    fn arg(&self) -> NativeArg<'_> {
        // SAFETY: the tag says which field the shim has set. Bytes and lists live as long as the
        // arguments. Those are the shim's local variables and Ruby objects on the VM's stack.
        unsafe {
            match self.tag {
                TAG_NIL => NativeArg::Nil,
                TAG_FALSE => NativeArg::Bool(false),
                TAG_TRUE => NativeArg::Bool(true),
                TAG_INT => NativeArg::Int(self.of.i),
                TAG_FLOAT => NativeArg::Float(self.of.f),
                TAG_TEXT => NativeArg::Text(self.of.bytes.slice()),
                TAG_SYMBOL => {
                    std::str::from_utf8(self.of.bytes.slice()).map_or(NativeArg::Other, NativeArg::Symbol)
                }
                TAG_LIST => NativeArg::List(self.of.list.slice(1).iter().map(Self::arg).collect()),
                TAG_MAP => {
                    let pairs = self.of.list.slice(2).chunks_exact(2);
                    NativeArg::Map(pairs.map(|pair| (pair[0].arg(), pair[1].arg())).collect())
                }
                _ => NativeArg::Other,
            }
        }
    }
}

impl RawBytes {
    /// SAFETY: the pointer must be valid for `len` bytes as long as `'a`.
    unsafe fn slice<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: promised by the caller.
        unsafe { slice::from_raw_parts(self.first, self.len) }
    }
}

impl RawList {
    /// SAFETY: the pointer must be valid for `len * width` values as long as `'a`.
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
    fn ng_limit(vm: *mut RawVm, limits: *const RunLimits);
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
