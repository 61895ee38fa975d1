/* mruby as Rust sees it. Three rules keep the longjmps of mruby away from Rust's frames:
 *
 * 1. Rust calls only the functions of vm.h; each runs mruby under `mrb_protect_error`.
 * 2. A native's Rust function returns before anything is raised in its name.
 * 3. Rust's functions never call the VM, so that ending a run (a longjmp out of the hook, or out of the watchdog's signal, which
 *    waits while Rust runs) crosses frames of C only.
 *
 * A VM that was ended from outside is in no defined state and is only ever closed, by freeing its blocks. */
#include <limits.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <mruby.h>
#include <mruby/array.h>
#include <mruby/class.h>
#include <mruby/compile.h>
#include <mruby/data.h>
#include <mruby/debug.h>
#include <mruby/dump.h>
#include <mruby/error.h>
#include <mruby/gc.h>
#include <mruby/hash.h>
#include <mruby/internal.h>
#include <mruby/irep.h>
#include <mruby/opcode.h>
#include <mruby/presym.h>
#include <mruby/proc.h>
#include <mruby/string.h>
#include <mruby/variable.h>

#include "vm.h"
#include "watch.h"

#ifndef MRB_USE_DEBUG_HOOK
#error "without the hook no run can be ended"
#endif

/* Programs of one VM: those of all rule files, and the one that is being replaced. */
#define PROGRAMS_MAX 128
/* Arguments of a native, with the elements of lists and maps among them. */
#define ARGS_MAX 16
#define VALUES_MAX 128
/* Instructions between two looks at what is counted beside them. */
#define STRIDE 256
/* What allocating costs of the budget: an instruction for each KiB, so that copying memory is bounded like computing... */
#define BYTES_PER_INSTRUCTION 1024
/* ...and a refused allocation costs what the collection of garbage costs that follows it. */
#define INSTRUCTIONS_PER_REFUSAL 2000
/* For asking an exception for its message, which can be a rule's method. */
#define INSTRUCTIONS_FOR_MESSAGE 10000

/* In front of each block. 32 bytes, so that blocks stay aligned to 16. */
typedef struct block {
  struct block *prev, *next;
  size_t size;
  size_t unused;
} block;

struct ng_vm {
  mrb_state *mrb;
  ng_host host;
  ng_limits limits;
  block *blocks;
  size_t memory;
  /* Allocations refused one after another. After the first, mruby collects garbage and tries again... */
  int refusals;
  /* ...so that the second means that there is no more memory: the run ends, whatever it rescues. */
  int is_exhausted;
  int32_t exhausted_at;
  /* Instructions until the hook looks, and those left after that. */
  int32_t until;
  int64_t left;
  uint32_t symbols_max;
  /* The latest instruction that has a line: of a rule, not of the library. */
  const mrb_irep *at_irep;
  const mrb_code *at_pc;
  /* The compiler does not survive a refused allocation: it is ended instead. */
  int is_compiling;
  /* Where a run or compilation goes that is ended; set by each. */
  jmp_buf end;
  enum ng_status ended;
  mrb_value programs[PROGRAMS_MAX];
  uint8_t is_loaded[PROGRAMS_MAX];
};

/* === Memory === */

/* The line of the innermost frame that has lines; allocates and raises nothing. */
static int32_t line_of(mrb_state *mrb) {
  if (!mrb || !mrb->c) return 0;
  for (mrb_callinfo *ci = mrb->c->ci; ci && ci >= mrb->c->cibase; ci--) {
    if (!ci->proc || MRB_PROC_CFUNC_P(ci->proc) || !ci->pc) continue;
    const mrb_irep *irep = ci->proc->body.irep;
    if (!irep || !irep->debug_info) continue;
    uint32_t pc = (uint32_t)(ci->pc - irep->iseq);
    int32_t line = mrb_debug_get_line(mrb, irep, pc ? pc - 1 : 0);
    if (line > 0) return line;
  }
  return 0;
}

/* mruby 3.4 has one allocator for all VMs: the one that runs on this thread is found here. */
static __thread ng_vm *current;

int32_t ng_line(void) {
  return current ? line_of(current->mrb) : 0;
}

static void *refuse(ng_vm *vm) {
  if (vm->is_compiling) {
    vm->ended = NG_MEMORY;
    longjmp(vm->end, 1);
  }
  if (++vm->refusals > 1 && !vm->is_exhausted) {
    vm->is_exhausted = 1;
    vm->exhausted_at = line_of(vm->mrb);
  }
  vm->left -= INSTRUCTIONS_PER_REFUSAL;
  vm->until = 0;
  return NULL;
}

static void release(ng_vm *vm, block *b) {
  vm->memory -= b->size;
  if (b->prev) b->prev->next = b->next; else vm->blocks = b->next;
  if (b->next) b->next->prev = b->prev;
  free(b);
}

/* Changes the list of blocks; a jump may come before and after it. NULL: there is no memory. */
static block *resize(ng_vm *vm, block *old, size_t size, size_t had) {
  ng_guard();
  block *b = realloc(old, sizeof(block) + size);
  if (b) {
    if (!old) {
      b->prev = NULL;
      b->next = vm->blocks;
      if (b->next) b->next->prev = b;
      vm->blocks = b;
    }
    else if (b != old) {
      if (b->prev) b->prev->next = b; else vm->blocks = b;
      if (b->next) b->next->prev = b;
    }
    b->size = size;
    vm->memory += size - had;
  }
  ng_unguard();
  return b;
}

void *mrb_basic_alloc_func(void *p, size_t size) {
  ng_vm *vm = current;
  block *old = p ? (block*)p - 1 : NULL;
  if (size == 0) {
    if (!old) return NULL;
    ng_guard();
    release(vm, old);
    ng_unguard();
    return NULL;
  }
  size_t had = old ? old->size : 0;
  size_t more = size > had ? size - had : 0;
  if (size > SIZE_MAX / 2 || more > vm->limits.memory || vm->memory > vm->limits.memory - more) {
    return more ? refuse(vm) : p;
  }
  block *b = resize(vm, old, size, had);
  if (!b) return refuse(vm);
  vm->left -= (int64_t)(more / BYTES_PER_INSTRUCTION);
  vm->refusals = 0;
  return b + 1;
}

/* Functions of the C library that take a lock. `build.rs` has mruby call these in their place. */
#define GUARDED(type, name, parameters, ...)       \
  type ng_guarded_##name parameters;               \
  type ng_guarded_##name parameters {              \
    ng_guard();                                    \
    type result = name(__VA_ARGS__);               \
    ng_unguard();                                  \
    return result;                                 \
  }
GUARDED(struct tm*, gmtime_r, (const time_t *t, struct tm *to), t, to)
GUARDED(struct tm*, localtime_r, (const time_t *t, struct tm *to), t, to)
GUARDED(time_t, mktime, (struct tm *from), from)
GUARDED(size_t, strftime, (char *to, size_t cap, const char *format, const struct tm *from), to, cap, format, from)

/* === Budgets === */

static void hook(mrb_state *mrb, const mrb_irep *irep, const mrb_code *pc, mrb_value *regs) {
  ng_vm *vm = mrb->ud;
  (void)regs;
  if (irep->debug_info) {
    vm->at_irep = irep;
    vm->at_pc = pc;
  }
  if (--vm->until > 0) return;
  if (vm->is_exhausted) vm->ended = NG_MEMORY;
  else if (vm->left <= 0) vm->ended = NG_INSTRUCTIONS;
  else if (mrb->symidx > vm->symbols_max) vm->ended = NG_SYMBOLS;
  else {
    vm->until = vm->left < STRIDE ? (int32_t)vm->left : STRIDE;
    vm->left -= vm->until;
    return;
  }
  longjmp(vm->end, 1);
}

/* The line of an instruction of this program; 0 if it has none. */
static int32_t line_within(mrb_state *mrb, const mrb_irep *tree, const mrb_irep *irep, const mrb_code *pc) {
  if (tree == irep) return pc < irep->iseq ? 0 : mrb_debug_get_line(mrb, irep, (uint32_t)(pc - irep->iseq));
  for (uint16_t at = 0; at < tree->rlen; at++) {
    int32_t line = line_within(mrb, tree->reps[at], irep, pc);
    if (line > 0) return line;
  }
  return 0;
}

/* The line that a rule had come to. For a VM that was left at any place: it reads only programs, which do not change. */
static int32_t line_reached(ng_vm *vm) {
  for (size_t at = 0; at < PROGRAMS_MAX && vm->at_irep; at++) {
    if (!vm->is_loaded[at]) continue;
    const struct RProc *proc = mrb_proc_ptr(vm->programs[at]);
    if (MRB_PROC_CFUNC_P(proc)) continue;
    int32_t line = line_within(vm->mrb, proc->body.irep, vm->at_irep, vm->at_pc);
    if (line > 0) return line;
  }
  return 0;
}

static void allow(ng_vm *vm, uint64_t instructions) {
  vm->left = instructions > INT64_MAX ? INT64_MAX : (int64_t)instructions;
  vm->until = 0;
}

/* === Errors === */

static void copy(char *to, size_t cap, const char *from, size_t n) {
  if (n >= cap) n = cap - 1;
  memcpy(to, from, n);
  to[n] = 0;
}

struct describe { mrb_value exception; ng_error *error; };

/* May run a rule's own `message`, and raise. */
static mrb_value describe_body(mrb_state *mrb, void *data) {
  struct describe *d = data;
  ng_error *e = d->error;
  const char *name = mrb_obj_classname(mrb, d->exception);
  if (name) copy(e->class_name, sizeof e->class_name, name, strlen(name));
  mrb_value lines = mrb_exc_backtrace(mrb, d->exception);
  if (mrb_array_p(lines)) {
    size_t at = 0;
    for (mrb_int i = 0; i < RARRAY_LEN(lines); i++) {
      mrb_value line = RARRAY_PTR(lines)[i];
      if (!mrb_string_p(line)) continue;
      size_t n = (size_t)RSTRING_LEN(line);
      if (at + n + 2 > sizeof e->backtrace) break;
      memcpy(e->backtrace + at, RSTRING_PTR(line), n);
      at += n;
      e->backtrace[at++] = '\n';
      e->backtrace[at] = 0;
    }
  }
  mrb_value message = mrb_funcall(mrb, d->exception, "message", 0);
  if (mrb_string_p(message)) {
    copy(e->message, sizeof e->message, RSTRING_PTR(message), (size_t)RSTRING_LEN(message));
  }
  return mrb_nil_value();
}

static void describe(mrb_state *mrb, mrb_value exception, ng_error *error) {
  struct describe d = { exception, error };
  mrb_bool failed = FALSE;
  mrb->exc = NULL;
  mrb_protect_error(mrb, describe_body, &d, &failed);
  mrb->exc = NULL;
}

static const char no_watchdog[] = "the watchdog of rules cannot be started; look at the limits of threads and memory";

static void clear(ng_error *error) {
  error->line = 0;
  error->class_name[0] = error->message[0] = error->backtrace[0] = 0;
}

/* Runs `body` without a budget: for what is not a rule's. */
static int32_t protect(ng_vm *vm, mrb_protect_error_func *body, void *data, ng_error *error) {
  mrb_state *mrb = vm->mrb;
  mrb_bool failed = FALSE;
  current = vm;
  clear(error);
  mrb->code_fetch_hook = NULL;
  int arena = mrb_gc_arena_save(mrb);
  mrb_value result = mrb_protect_error(mrb, body, data, &failed);
  if (!failed && mrb->exc) {
    result = mrb_obj_value(mrb->exc);
    failed = TRUE;
  }
  if (failed) describe(mrb, result, error);
  mrb_gc_arena_restore(mrb, arena);
  return failed ? NG_EXCEPTION : NG_OK;
}

/* === Values === */

struct values { ng_value value[VALUES_MAX]; size_t used; char symbols[VALUES_MAX][8]; };

static void scalar_of(mrb_state *mrb, mrb_value v, ng_value *to, char *symbol) {
  to->tag = NG_OTHER;
  if (mrb_nil_p(v)) { to->tag = NG_NIL; return; }
  switch (mrb_type(v)) {
    case MRB_TT_FALSE: to->tag = NG_FALSE; break;
    case MRB_TT_TRUE: to->tag = NG_TRUE; break;
    case MRB_TT_INTEGER: to->tag = NG_INT; to->u.i = mrb_integer(v); break;
    case MRB_TT_FLOAT: to->tag = NG_FLOAT; to->u.f = mrb_float(v); break;
    case MRB_TT_STRING:
      to->tag = NG_TEXT;
      to->u.bytes.p = RSTRING_PTR(v);
      to->u.bytes.n = (size_t)RSTRING_LEN(v);
      break;
    case MRB_TT_SYMBOL: {
      mrb_int n = 0;
      const char *name = mrb_sym_name_len(mrb, mrb_symbol(v), &n);
      /* Short names are unpacked into one buffer of the VM, which the next one overwrites. */
      if (name == mrb->symbuf) { memcpy(symbol, name, sizeof mrb->symbuf); name = symbol; }
      if (!name) break;
      to->tag = NG_SYMBOL;
      to->u.bytes.p = name;
      to->u.bytes.n = (size_t)n;
      break;
    }
    default: break;
  }
}

static ng_value *take(struct values *values, size_t n) {
  if (n > VALUES_MAX - values->used) return NULL;
  ng_value *first = values->value + values->used;
  values->used += n;
  return first;
}

static void put_scalar(mrb_state *mrb, struct values *values, ng_value *at, mrb_value v) {
  scalar_of(mrb, v, at, values->symbols[at - values->value]);
}

struct pairs { struct values *values; ng_value *at; };

static int pair_of(mrb_state *mrb, mrb_value key, mrb_value value, void *data) {
  struct pairs *pairs = data;
  put_scalar(mrb, pairs->values, pairs->at++, key);
  put_scalar(mrb, pairs->values, pairs->at++, value);
  return 0;
}

static void value_of(mrb_state *mrb, struct values *values, mrb_value v, ng_value *to) {
  if (mrb_array_p(v)) {
    size_t n = (size_t)RARRAY_LEN(v);
    ng_value *first = take(values, n);
    to->tag = first ? NG_LIST : NG_OTHER;
    if (!first) return;
    to->u.list.p = first;
    to->u.list.n = n;
    for (size_t i = 0; i < n; i++) put_scalar(mrb, values, first + i, RARRAY_PTR(v)[i]);
  }
  else if (mrb_hash_p(v)) {
    size_t n = (size_t)mrb_hash_size(mrb, v);
    ng_value *first = n <= VALUES_MAX ? take(values, 2 * n) : NULL;
    to->tag = first ? NG_MAP : NG_OTHER;
    if (!first) return;
    to->u.list.p = first;
    to->u.list.n = n;
    struct pairs pairs = { values, first };
    mrb_hash_foreach(mrb, mrb_hash_ptr(v), pair_of, &pairs);
  }
  else put_scalar(mrb, values, to, v);
}

static mrb_value ruby_of(mrb_state *mrb, mrb_value self, const ng_value *v) {
  switch (v->tag) {
    case NG_FALSE: return mrb_false_value();
    case NG_TRUE: return mrb_true_value();
    case NG_INT: return mrb_int_value(mrb, (mrb_int)v->u.i);
    case NG_FLOAT: return mrb_float_value(mrb, v->u.f);
    case NG_TEXT: return mrb_str_new(mrb, v->u.bytes.p, (mrb_int)v->u.bytes.n);
    case NG_SYMBOL: return mrb_symbol_value(mrb_intern(mrb, v->u.bytes.p, v->u.bytes.n));
    case NG_LIST: {
      mrb_value list = mrb_ary_new_capa(mrb, (mrb_int)v->u.list.n);
      int arena = mrb_gc_arena_save(mrb);
      for (size_t i = 0; i < v->u.list.n; i++) {
        mrb_ary_push(mrb, list, ruby_of(mrb, self, v->u.list.p + i));
        mrb_gc_arena_restore(mrb, arena);
      }
      return list;
    }
    case NG_MAP: {
      mrb_value map = mrb_hash_new_capa(mrb, (mrb_int)v->u.list.n);
      int arena = mrb_gc_arena_save(mrb);
      for (size_t i = 0; i < v->u.list.n; i++) {
        mrb_value key = ruby_of(mrb, self, v->u.list.p + 2 * i);
        mrb_hash_set(mrb, map, key, ruby_of(mrb, self, v->u.list.p + 2 * i + 1));
        mrb_gc_arena_restore(mrb, arena);
      }
      return map;
    }
    case NG_THIS: return self;
    default: return mrb_nil_value();
  }
}

/* === Natives === */

static void drop_object(mrb_state *mrb, void *handle) {
  ng_vm *vm = mrb->ud;
  if (!handle) return;
  ng_guard();
  vm->host.drop(vm->host.state, (uintptr_t)handle);
  ng_unguard();
}

static const mrb_data_type object_type = { "native", drop_object };

static mrb_value call_native(mrb_state *mrb, mrb_value self, uint32_t id, mrb_int argc, const mrb_value *argv) {
  ng_vm *vm = mrb->ud;
  if (argc > ARGS_MAX) mrb_raise(mrb, E_ARGUMENT_ERROR, "too many arguments");
  struct values values;
  values.used = (size_t)argc;
  for (mrb_int i = 0; i < argc; i++) value_of(mrb, &values, argv[i], values.value + i);

  /* Only objects of our classes have a handle; a class of mruby's own with the same layout keeps its pointer. */
  int is_ours = mrb_type(self) == MRB_TT_CDATA && (!DATA_TYPE(self) || DATA_TYPE(self) == &object_type);
  uintptr_t handle = is_ours ? (uintptr_t)DATA_PTR(self) : 0;
  const uintptr_t had = handle;
  ng_value result = { .tag = NG_NIL };
  ng_guard();
  int32_t answer = vm->host.call(vm->host.state, id, &handle, values.value, (size_t)argc, &result);
  ng_unguard();
  /* Rust's frames are gone from here on, and raising is safe. */
  if (handle != had) {
    if (!is_ours) {
      ng_guard();
      vm->host.drop(vm->host.state, handle);
      ng_unguard();
      mrb_raise(mrb, E_TYPE_ERROR, "the object cannot keep a native's state");
    }
    mrb_data_init(self, (void*)handle, &object_type);
  }
  if (answer == NG_RETURN) return ruby_of(mrb, self, &result);
  struct RClass *c = answer == NG_TYPE_ERROR ? E_TYPE_ERROR
                   : answer == NG_ARGUMENT_ERROR ? E_ARGUMENT_ERROR : E_RUNTIME_ERROR;
  mrb_exc_raise(mrb, mrb_exc_new_str(mrb, c, ruby_of(mrb, self, &result)));
}

/* All natives: which one is a number kept with the method. */
static mrb_value native(mrb_state *mrb, mrb_value self) {
  uint32_t id = (uint32_t)mrb_integer(mrb_proc_cfunc_env_get(mrb, 0));
  const mrb_value *argv;
  mrb_int argc;
  /* `!`: read where they lie, since nothing moves the stack before the last use of them. */
  if (mrb->c->ci->nk) mrb_get_args(mrb, "*!", &argv, &argc);
  else {
    argc = mrb_get_argc(mrb);
    argv = mrb_get_argv(mrb);
  }
  return call_native(mrb, self, id, argc, argv);
}

/* `new` of our classes. mruby's own is Ruby code that gathers the arguments in an array and a hash, and rules make objects
 * at each request. It still makes those of classes that have an `initialize` in Ruby. */
static mrb_value make(mrb_state *mrb, mrb_value self) {
  struct RClass *c = mrb_class_ptr(self), *of = c;
  mrb_method_t method = mrb_method_search_vm(mrb, &of, MRB_SYM(initialize));
  const struct RProc *proc = MRB_METHOD_PROC_P(method) ? MRB_METHOD_PROC(method) : NULL;
  int is_native = proc && MRB_PROC_CFUNC_P(proc) && MRB_PROC_CFUNC(proc) == native;
  /* What BasicObject has, which does nothing. */
  int is_nothing = !proc && mrb_get_argc(mrb) == 0 && mrb->c->ci->nk == 0;
  if (!is_native && !is_nothing) {
    of = mrb->class_class;
    method = mrb_method_search_vm(mrb, &of, MRB_SYM(new));
    return mrb_exec_irep(mrb, self, MRB_METHOD_PROC(method));
  }
  mrb_value object = mrb_obj_value(mrb_obj_alloc(mrb, MRB_TT_CDATA, c));
  if (is_native) {
    const mrb_value *argv;
    mrb_int argc;
    mrb_get_args(mrb, "*!", &argv, &argc);
    call_native(mrb, object, (uint32_t)mrb_integer(MRB_PROC_ENV(proc)->stack[0]), argc, argv);
  }
  return object;
}

struct definition {
  const char *class_name, *name;
  int32_t is_module, is_singleton;
  uint32_t native;
  int64_t value;
};

static struct RClass *inner_of(mrb_state *mrb, struct RClass *outer, const char *name, int is_module) {
  mrb_sym id = mrb_intern_cstr(mrb, name);
  if (mrb_const_defined_at(mrb, mrb_obj_value(outer), id)) {
    return mrb_class_ptr(mrb_const_get(mrb, mrb_obj_value(outer), id));
  }
  if (is_module) return mrb_define_module_under(mrb, outer, name);
  struct RClass *c = mrb_define_class_under(mrb, outer, name, mrb->object_class);
  MRB_SET_INSTANCE_TT(c, MRB_TT_CDATA);
  mrb_define_class_method(mrb, c, "new", make, MRB_ARGS_ANY());
  return c;
}

/* The class or module of this name: made, as the modules it is in, if it is not there. */
static struct RClass *class_of(mrb_state *mrb, const char *path, int is_module) {
  struct RClass *outer = mrb->object_class;
  char name[NG_CLASS_LEN];
  const char *end;
  while ((end = strstr(path, "::")) != NULL) {
    copy(name, sizeof name, path, (size_t)(end - path));
    outer = inner_of(mrb, outer, name, 1);
    path = end + 2;
  }
  return inner_of(mrb, outer, path, is_module);
}

static mrb_value define_native_body(mrb_state *mrb, void *data) {
  struct definition *d = data;
  struct RClass *c = class_of(mrb, d->class_name, d->is_module);
  if (d->is_singleton) c = mrb_singleton_class_ptr(mrb, mrb_obj_value(c));
  mrb_value id = mrb_int_value(mrb, d->native);
  struct RProc *proc = mrb_proc_new_cfunc_with_env(mrb, native, 1, &id);
  mrb_method_t method;
  MRB_METHOD_FROM_PROC(method, proc);
  mrb_define_method_raw(mrb, c, mrb_intern_cstr(mrb, d->name), method);
  return mrb_nil_value();
}

static mrb_value define_constant_body(mrb_state *mrb, void *data) {
  struct definition *d = data;
  struct RClass *c = class_of(mrb, d->class_name, d->is_module);
  mrb_define_const(mrb, c, d->name, mrb_int_value(mrb, (mrb_int)d->value));
  return mrb_nil_value();
}

int32_t ng_define_native(ng_vm *vm, const char *class_name, const char *name, int32_t is_module, int32_t is_singleton,
                         uint32_t id, ng_error *error) {
  struct definition d = { class_name, name, is_module, is_singleton, id, 0 };
  return protect(vm, define_native_body, &d, error);
}

int32_t ng_define_constant(ng_vm *vm, const char *class_name, const char *name, int32_t is_module, int64_t value,
                           ng_error *error) {
  struct definition d = { class_name, name, is_module, 0, 0, value };
  return protect(vm, define_constant_body, &d, error);
}

/* === mruby's own library === */

/* Made by build.rs: the sources of mrblib and of the gems, and what defines the gems' classes in C. */
extern const ng_unit ng_all_units[];
extern void (*const ng_all_inits[])(mrb_state*);
extern const size_t ng_all_units_len;

/* mruby calls this when it opens; `ng_open`'s caller loads the library itself, from bytecode. */
void mrb_init_mrblib(mrb_state *mrb) { (void)mrb; }

size_t ng_units(const ng_unit **units) {
  *units = ng_all_units;
  return ng_all_units_len;
}

static mrb_value unit_init_body(mrb_state *mrb, void *data) {
  void (*init)(mrb_state*) = ng_all_inits[*(size_t*)data];
  if (init) init(mrb);
  return mrb_nil_value();
}

int32_t ng_unit_init(ng_vm *vm, size_t unit, ng_error *error) {
  return protect(vm, unit_init_body, &unit, error);
}

static mrb_int find_in(mrb_state *mrb, mrb_value list, mrb_value wanted) {
  if (mrb_string_p(wanted)) {
    const char *p = RSTRING_PTR(wanted);
    mrb_int n = RSTRING_LEN(wanted);
    for (mrb_int i = 0; i < RARRAY_LEN(list); i++) {
      mrb_value v = RARRAY_PTR(list)[i];
      if (mrb_string_p(v) ? RSTRING_LEN(v) == n && memcmp(RSTRING_PTR(v), p, (size_t)n) == 0
                          : mrb_equal(mrb, v, wanted)) return i;
    }
    return -1;
  }
  for (mrb_int i = 0; i < RARRAY_LEN(list); i++) {
    if (mrb_equal(mrb, RARRAY_PTR(list)[i], wanted)) return i;
  }
  return -1;
}

/* In mruby's library these go through a block for each element: forty times slower on a list of hosts. */
static mrb_value array_include(mrb_state *mrb, mrb_value self) {
  return mrb_bool_value(find_in(mrb, self, mrb_get_arg1(mrb)) >= 0);
}

/* $1 to $9 from elements 1 to 9: Ruby text cannot assign to them. */
static mrb_value array_set_groups(mrb_state *mrb, mrb_value self) {
  char name[] = "$1";
  for (mrb_int i = 1; i <= 9; i++, name[1]++) {
    mrb_value group = i < RARRAY_LEN(self) ? RARRAY_PTR(self)[i] : mrb_nil_value();
    mrb_gv_set(mrb, mrb_intern_cstr(mrb, name), group);
  }
  return self;
}

static mrb_value finish_body(mrb_state *mrb, void *data) {
  (void)data;
  mrb_define_method(mrb, mrb->array_class, "include?", array_include, MRB_ARGS_REQ(1));
  mrb_define_method(mrb, mrb->array_class, "member?", array_include, MRB_ARGS_REQ(1));
  mrb_define_method(mrb, mrb->array_class, "__set_groups", array_set_groups, MRB_ARGS_NONE());
  return mrb_nil_value();
}

int32_t ng_finish(ng_vm *vm, ng_error *error) { return protect(vm, finish_body, NULL, error); }

/* === Programs === */

struct compilation {
  const char *text, *file;
  size_t n;
  int32_t with_lines;
  ng_error *error;
  uint8_t *code;
  size_t code_len;
  int is_syntax;
};

static mrb_value compile_body(mrb_state *mrb, void *data) {
  struct compilation *c = data;
  mrbc_context *context = mrbc_context_new(mrb);
  mrbc_filename(mrb, context, c->file);
  context->capture_errors = TRUE;
  struct mrb_parser_state *parser = mrb_parse_nstring(mrb, c->text, c->n, context);
  struct RProc *proc = NULL;
  if (parser && parser->nerr == 0) proc = mrb_generate_code(mrb, parser);
  if (proc) {
    uint8_t flags = c->with_lines ? MRB_DUMP_DEBUG_INFO : 0;
    if (mrb_dump_irep(mrb, proc->body.irep, flags, &c->code, &c->code_len) != MRB_DUMP_OK) c->code = NULL;
  }
  else {
    c->is_syntax = 1;
    const char *message = "the code is too large or nested too deeply";
    if (parser && parser->nerr > 0) {
      c->error->line = parser->error_buffer[0].lineno;
      if (parser->error_buffer[0].message) message = parser->error_buffer[0].message;
    }
    copy(c->error->message, sizeof c->error->message, message, strlen(message));
  }
  if (parser) mrb_parser_free(parser);
  mrbc_context_free(mrb, context);
  return mrb_nil_value();
}

int32_t ng_compile(ng_vm *vm, const char *text, size_t n, const char *file, int32_t with_lines,
                   uint8_t **code, size_t *code_len, ng_error *error) {
  struct compilation c = { text, file, n, with_lines, error, NULL, 0, 0 };
  if (vm->ended != NG_OK) return NG_FAILED;
  const int is_watched = vm->limits.nanoseconds != UINT64_MAX;
  switch (setjmp(vm->end)) {
    case 0: break;
    case NG_JUMP_TIME: vm->ended = NG_TIME; /* fallthrough */
    default:
      if (is_watched) ng_watch_end();
      clear(error);
      return vm->ended;
  }
  if (is_watched && !ng_watch_begin(&vm->end, vm->limits.nanoseconds)) {
    copy(error->message, sizeof error->message, no_watchdog, sizeof no_watchdog - 1);
    return NG_FAILED;
  }
  vm->is_compiling = 1;
  int32_t status = protect(vm, compile_body, &c, error);
  vm->is_compiling = 0;
  if (is_watched) ng_watch_end();
  /* The generator of code raises for what it cannot express: that too is the text's fault. */
  if (status != NG_OK || c.is_syntax) return NG_SYNTAX;
  *code = c.code;
  *code_len = c.code_len;
  return c.code ? NG_OK : NG_FAILED;
}

void ng_release(ng_vm *vm, uint8_t *code) {
  current = vm;
  mrb_free(vm->mrb, code);
}

struct loading { const uint8_t *code; size_t n; mrb_value proc; };

static mrb_value load_body(mrb_state *mrb, void *data) {
  struct loading *l = data;
  mrbc_context *context = mrbc_context_new(mrb);
  context->no_exec = TRUE;
  l->proc = mrb_load_irep_buf_cxt(mrb, l->code, l->n, context);
  mrbc_context_free(mrb, context);
  if (mrb_type(l->proc) == MRB_TT_PROC) {
    MRB_PROC_SET_TARGET_CLASS(mrb_proc_ptr(l->proc), mrb->object_class);
    mrb_gc_register(mrb, l->proc);
  }
  return mrb_nil_value();
}

int32_t ng_load(ng_vm *vm, const uint8_t *code, size_t n, uint32_t *program, ng_error *error) {
  uint32_t at = 0;
  while (at < PROGRAMS_MAX && vm->is_loaded[at]) at++;
  clear(error);
  if (at == PROGRAMS_MAX) return NG_FAILED;
  struct loading l = { code, n, mrb_nil_value() };
  /* Not all of the loader looks whether it got its memory. What it needs is bounded by the text's length. */
  const size_t memory = vm->limits.memory;
  vm->limits.memory = SIZE_MAX / 2;
  int32_t status = protect(vm, load_body, &l, error);
  vm->limits.memory = memory;
  if (status != NG_OK) return status;
  if (mrb_type(l.proc) != MRB_TT_PROC) return NG_FAILED;
  vm->programs[at] = l.proc;
  vm->is_loaded[at] = 1;
  *program = at;
  return NG_OK;
}

void ng_unload(ng_vm *vm, uint32_t program) {
  if (program >= PROGRAMS_MAX || !vm->is_loaded[program]) return;
  current = vm;
  vm->is_loaded[program] = 0;
  mrb_gc_unregister(vm->mrb, vm->programs[program]);
}

static mrb_value run_body(mrb_state *mrb, void *data) {
  return mrb_top_run(mrb, mrb_proc_ptr(*(mrb_value*)data), mrb_top_self(mrb), 0);
}

/* In a function of its own, so that no variable lives over the return of `setjmp`. */
static int32_t run_to_end(ng_vm *vm, uint32_t program, ng_error *error) {
  mrb_state *mrb = vm->mrb;
  mrb_bool failed = FALSE;
  int arena = mrb_gc_arena_save(mrb);
  mrb_value result = mrb_protect_error(mrb, run_body, &vm->programs[program], &failed);
  if (!failed && mrb->exc) {
    result = mrb_obj_value(mrb->exc);
    failed = TRUE;
  }
  if (vm->is_exhausted) {
    vm->ended = NG_MEMORY;
    error->line = vm->exhausted_at;
    return NG_MEMORY;
  }
  if (failed) {
    allow(vm, INSTRUCTIONS_FOR_MESSAGE);
    describe(mrb, result, error);
  }
  mrb_gc_arena_restore(mrb, arena);
  return failed ? NG_EXCEPTION : NG_OK;
}

int32_t ng_run(ng_vm *vm, uint32_t program, ng_error *error) {
  clear(error);
  if (vm->ended != NG_OK || program >= PROGRAMS_MAX || !vm->is_loaded[program]) return NG_FAILED;
  current = vm;
  vm->refusals = vm->is_exhausted = 0;
  vm->symbols_max = vm->mrb->symidx > UINT32_MAX - vm->limits.symbols ? UINT32_MAX
                                                                       : vm->mrb->symidx + vm->limits.symbols;
  /* The one exception of this kind keeps the lines it was raised with first. */
  ((struct RException*)vm->mrb->stack_err)->backtrace = NULL;
  allow(vm, vm->limits.instructions);
  vm->mrb->code_fetch_hook = hook;
  vm->at_irep = NULL;
  const int is_watched = vm->limits.nanoseconds != UINT64_MAX;
  switch (setjmp(vm->end)) {
    case 0: break;
    case NG_JUMP_TIME:
      ng_watch_end();
      vm->ended = NG_TIME;
      clear(error);
      error->line = line_reached(vm);
      return NG_TIME;
    default:
      if (is_watched) ng_watch_end();
      error->line = vm->is_exhausted ? vm->exhausted_at : line_of(vm->mrb);
      return vm->ended;
  }
  if (is_watched && !ng_watch_begin(&vm->end, vm->limits.nanoseconds)) {
    copy(error->message, sizeof error->message, no_watchdog, sizeof no_watchdog - 1);
    return NG_FAILED;
  }
  int32_t status = run_to_end(vm, program, error);
  if (is_watched) ng_watch_end();
  return status;
}

/* === What a program uses === */

/* Bytes of operands by the letters of mruby/ops.h. */
enum { OPERANDS_Z = 0, OPERANDS_B = 1, OPERANDS_BB = 2, OPERANDS_BBB = 3, OPERANDS_BS = 3, OPERANDS_BSS = 5, OPERANDS_S = 2,
       OPERANDS_W = 3 };

#define OPCODE(_, letters) OPERANDS_##letters,
static const uint8_t operands[] = {
#include <mruby/ops.h>
};
#undef OPCODE

/* How many operands of one byte an instruction has, of which a prefix can make the first and the second wider. */
#define OPCODE(_, letters) sizeof #letters - 1 > 1 ? (#letters[0] == 'B') + (#letters[1] == 'B') : #letters[0] == 'B',
static const uint8_t narrow[] = {
#include <mruby/ops.h>
};
#undef OPCODE

static mrb_bool outlives_run(uint8_t op) {
  switch (op) {
    case OP_GETGV: case OP_SETGV: case OP_GETSV: case OP_SETSV: case OP_GETIV: case OP_SETIV: case OP_GETCV: case OP_SETCV:
    case OP_SETCONST: case OP_SETMCNST: case OP_METHOD: case OP_CLASS: case OP_MODULE: case OP_EXEC: case OP_DEF:
    case OP_ALIAS: case OP_UNDEF: case OP_SCLASS: case OP_TCLASS: case OP_SUPER:
      return TRUE;
    default:
      return FALSE;
  }
}

static mrb_bool is_within_run(const mrb_irep *irep) {
  const size_t kinds = sizeof operands / sizeof *operands;
  size_t at = 0;
  while (at < irep->ilen) {
    uint8_t op = irep->iseq[at++];
    size_t wide = 0;
    if (op == OP_EXT1 || op == OP_EXT2 || op == OP_EXT3) {
      if (at >= irep->ilen) return FALSE;
      const uint8_t prefix = op;
      op = irep->iseq[at++];
      if (op >= kinds) return FALSE;
      wide = (prefix != OP_EXT2 && narrow[op] > 0) + (prefix != OP_EXT1 && narrow[op] > 1);
    }
    if (op >= kinds || outlives_run(op)) return FALSE;
    at += operands[op] + wide;
  }
  return at == irep->ilen;
}

static mrb_bool names_of(mrb_state *mrb, const mrb_irep *irep, void (*tell)(void*, const char*, size_t), void *state) {
  for (uint16_t at = 0; at < irep->slen; at++) {
    mrb_int n = 0;
    const char *name = mrb_sym_name_len(mrb, irep->syms[at], &n);
    if (name) tell(state, name, (size_t)n);
  }
  mrb_bool within = is_within_run(irep);
  for (uint16_t at = 0; at < irep->rlen; at++) within = names_of(mrb, irep->reps[at], tell, state) && within;
  return within;
}

int32_t ng_names(ng_vm *vm, uint32_t program, void (*tell)(void *state, const char *name, size_t n), void *state) {
  if (vm->ended != NG_OK || program >= PROGRAMS_MAX || !vm->is_loaded[program]) return FALSE;
  const struct RProc *proc = mrb_proc_ptr(vm->programs[program]);
  if (MRB_PROC_CFUNC_P(proc)) return FALSE;
  current = vm;
  return names_of(vm->mrb, proc->body.irep, tell, state);
}

/* === The VM === */

ng_vm *ng_open(const ng_host *host) {
  ng_vm *vm = calloc(1, sizeof *vm);
  if (!vm) return NULL;
  vm->host = *host;
  vm->limits = (ng_limits){ .instructions = INT64_MAX, .memory = SIZE_MAX / 2, .symbols = UINT32_MAX,
                              .nanoseconds = UINT64_MAX };
  vm->left = INT64_MAX;
  current = vm;
  vm->mrb = mrb_open_core();
  if (!vm->mrb) {
    ng_close(vm);
    return NULL;
  }
  vm->mrb->ud = vm;
  return vm;
}

void ng_close(ng_vm *vm) {
  for (block *b = vm->blocks, *next; b; b = next) {
    next = b->next;
    free(b);
  }
  if (current == vm) current = NULL;
  free(vm);
}

void ng_limit(ng_vm *vm, const ng_limits *limits) { vm->limits = *limits; }

size_t ng_memory(const ng_vm *vm) { return vm->memory; }

uint32_t ng_symbols(const ng_vm *vm) { return vm->mrb->symidx; }

void ng_collect(ng_vm *vm) {
  current = vm;
  vm->mrb->code_fetch_hook = NULL;
  mrb_full_gc(vm->mrb);
}
