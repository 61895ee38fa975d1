/* What Rust (src/ffi.rs, where the same types stand) and the shim say to each other. Every function of `vm.c` that is
 * declared here catches all of mruby's exceptions: no longjmp ever leaves C towards Rust. */
#ifndef NAGAYA_RULES_VM_H
#define NAGAYA_RULES_VM_H

#include <stddef.h>
#include <stdint.h>

typedef struct ng_vm ng_vm;

enum ng_tag {
  NG_NIL, NG_FALSE, NG_TRUE, NG_INT, NG_FLOAT,
  NG_TEXT, NG_SYMBOL,   /* bytes */
  NG_LIST, NG_MAP,      /* `n` values; of a map 2 * n: keys and values in turn */
  NG_THIS, NG_OTHER
};

typedef struct ng_value {
  int32_t tag;
  union {
    int64_t i;
    double f;
    struct { const char *p; size_t n; } bytes;
    struct { const struct ng_value *p; size_t n; } list;
  } u;
} ng_value;

enum ng_status {
  NG_OK,
  NG_SYNTAX,         /* does not parse or compile */
  NG_EXCEPTION,      /* raised and not rescued */
  NG_INSTRUCTIONS,   /* ended from outside; the VM can only be closed */
  NG_MEMORY,         /* likewise */
  NG_SYMBOLS,        /* likewise */
  NG_TIME,           /* likewise */
  NG_FAILED          /* the VM cannot do it */
};

/* What a native answers; each but the first is raised as an exception with the text in `result`. */
enum ng_answer { NG_RETURN, NG_TYPE_ERROR, NG_ARGUMENT_ERROR, NG_RUNTIME_ERROR };

#define NG_CLASS_LEN 64
#define NG_MESSAGE_LEN 1024
#define NG_BACKTRACE_LEN 2048

/* All texts end with NUL, and are cut to fit. */
typedef struct ng_error {
  int32_t line;                      /* of a syntax error, or where a VM was ended; 0: unknown */
  char class_name[NG_CLASS_LEN];
  char message[NG_MESSAGE_LEN];
  char backtrace[NG_BACKTRACE_LEN];  /* one `file:line:in method` on each line, the innermost first */
} ng_error;

/* Rust's side. Neither function may call the VM. */
typedef struct ng_host {
  void *state;
  /* `*handle` is the object's state, 0 without; what `result` points to lasts until the next call of `call`. */
  int32_t (*call)(void *state, uint32_t native, uintptr_t *handle, const ng_value *args, size_t n, ng_value *result);
  void (*drop)(void *state, uintptr_t handle);
} ng_host;

typedef struct ng_limits {
  uint64_t instructions;
  size_t memory;
  uint32_t symbols;   /* new ones in one run */
  /* Processor time of one run or compilation, also of one that makes no instruction. UINT64_MAX: any. */
  uint64_t nanoseconds;
} ng_limits;

/* A part of mruby's own library: its classes in C, and its Ruby text. */
typedef struct ng_unit { const char *name; const unsigned char *source; size_t n; } ng_unit;

/* NULL: no memory. `host` is copied. Unlimited until `ng_limit`. */
ng_vm *ng_open(const ng_host *host);
/* Frees all memory of the VM at once. No Ruby code and no `drop` runs. */
void ng_close(ng_vm *vm);
void ng_limit(ng_vm *vm, const ng_limits *limits);

size_t ng_units(const ng_unit **units);
/* Defines the unit's classes written in C. */
int32_t ng_unit_init(ng_vm *vm, size_t unit, ng_error *error);
/* Replaces what is slow in Ruby; after the units. */
int32_t ng_finish(ng_vm *vm, ng_error *error);

int32_t ng_define_native(ng_vm *vm, const char *class_name, const char *name, int32_t is_module, int32_t is_singleton,
                         uint32_t native, ng_error *error);
int32_t ng_define_constant(ng_vm *vm, const char *class_name, const char *name, int32_t is_module, int64_t value,
                           ng_error *error);

/* Bytecode of a Ruby text, with line numbers if wanted; `ng_release` it. Ended by the limits of memory and time. */
int32_t ng_compile(ng_vm *vm, const char *text, size_t n, const char *file, int32_t with_lines,
                   uint8_t **code, size_t *code_len, ng_error *error);
void ng_release(ng_vm *vm, uint8_t *code);

/* Makes bytecode of `ng_compile` runnable as `*program`, whatever the limit of memory. */
int32_t ng_load(ng_vm *vm, const uint8_t *code, size_t n, uint32_t *program, ng_error *error);
void ng_unload(ng_vm *vm, uint32_t program);
int32_t ng_run(ng_vm *vm, uint32_t program, ng_error *error);

/* Tells every name a program uses: of methods, constants and keywords. False if it also defines something, or reads or
 * writes variables that outlive a run. `tell` may not call the VM; `name` is good until it returns. */
int32_t ng_names(ng_vm *vm, uint32_t program, void (*tell)(void *state, const char *name, size_t n), void *state);

size_t ng_memory(const ng_vm *vm);
uint32_t ng_symbols(const ng_vm *vm);
void ng_collect(ng_vm *vm);

/* How often a run of this thread had to go on for a moment after its time was used up. For tests. */
uint64_t ng_deferred(void);

#endif
