/* Ends work of mruby that uses too much processor time, wherever in C it is. `watch.c` says how. */
#ifndef NAGAYA_RULES_WATCH_H
#define NAGAYA_RULES_WATCH_H

#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

/* What `setjmp` returns after the watchdog ended the work. `longjmp` of others gives 1. */
#define NG_JUMP_TIME 2

struct ng_slot;

/* What the signal's handler finds of its own thread. */
struct ng_watched {
  /* NULL until the thread's first work. */
  struct ng_slot *slot;
  /* Where a jump goes. */
  jmp_buf *end;
  /* Above 0: no jump now, for what runs must come to its end. */
  volatile sig_atomic_t guarded;
  /* A jump was put off until nothing is guarded. */
  volatile sig_atomic_t due;
  /* How often that was so. */
  volatile uint64_t deferred;
};

extern __thread struct ng_watched ng_watched;

/* From here to `ng_watch_end`, work that used so much processor time of this thread jumps to `*end`. The time is measured from the
 * first look of the watchdog, up to 10 ms later. 0: there can be no watchdog, and nothing is watched. */
int ng_watch_begin(jmp_buf *end, uint64_t nanoseconds);
void ng_watch_end(void);

_Noreturn void ng_watch_stop(void);

/* Around what must not be left in the middle: memory, locks of the C library, frames of Rust. */
static inline void ng_guard(void) {
  ng_watched.guarded++;
  atomic_signal_fence(memory_order_seq_cst);
}

/* Ends a guard. Does not return if the work's time was used up meanwhile. */
static inline void ng_unguard(void) {
  atomic_signal_fence(memory_order_seq_cst);
  ng_watched.guarded--;
  atomic_signal_fence(memory_order_seq_cst);
  if (__builtin_expect(ng_watched.due && !ng_watched.guarded, 0)) ng_watch_stop();
}

#endif
