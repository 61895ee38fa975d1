/* The watchdog. The hook of mruby counts instructions, and one instruction can be a call of C that takes seconds.
 *
 * Each thread has a slot with the number of its work, odd while it works. One thread of the process looks at all slots each 10 ms.
 * A thread whose work stayed the same while its own processor clock went on by the limit is sent a signal. The handler sees
 * whether that work still goes on, and leaves it by a jump. A thread that only waits for a processor uses no time and is left
 * alone. A signal that comes too late finds another number and does nothing.
 *
 * A jump may come between any two machine instructions of mruby. So the VM is never used again, only its blocks are freed. What must
 * not be left in the middle stands between `ng_guard` and `ng_unguard`: the allocator, functions of the C library that take locks, and all of Rust.
 *
 * Nobody is woken while no rule runs: the watchdog sleeps after some quiet looks, and the next work wakes it. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "vm.h"
#include "watch.h"

/* Time between two looks. */
#define TICK_NANOSECONDS 10000000L
/* Looks that saw nothing new before the watchdog sleeps. */
#define QUIET_LOOKS 10
#define STACK_LEN (128 * 1024)
/* The C library uses the first two. */
#define STRIKE (SIGRTMIN + 4)

struct ng_slot {
  struct ng_slot *next;
  /* 0: its thread has ended, and another one may have it. Under `lock`. */
  pid_t tid;
  clockid_t clock;
  /* Written by the thread. */
  _Atomic uint64_t work, limit;
  /* Written by the watchdog: the work that is to end. */
  _Atomic uint64_t doomed;
  /* The watchdog's own: the work it saw last, the thread's time then, and the work whose signal was sent. */
  uint64_t seen, since, struck;
};

__thread struct ng_watched ng_watched;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ng_slot *slots;
static int is_started;
static pthread_key_t at_exit;
static sem_t wake;
static atomic_int is_asleep;

_Noreturn void ng_watch_stop(void) {
  ng_watched.due = 0;
  longjmp(*ng_watched.end, NG_JUMP_TIME);
}

/* On the thread that works. */
static void strike(int signal) {
  (void)signal;
  struct ng_slot *slot = ng_watched.slot;
  if (!slot) return;
  uint64_t work = atomic_load_explicit(&slot->work, memory_order_relaxed);
  if (!(work & 1) || work != atomic_load_explicit(&slot->doomed, memory_order_relaxed)) return;
  if (!ng_watched.guarded) ng_watch_stop();
  ng_watched.due = 1;
  ng_watched.deferred++;
}

/* Processor time of a slot's thread; 0 if it has none any more. */
static uint64_t time_of(const struct ng_slot *slot) {
  struct timespec t;
  if (clock_gettime(slot->clock, &t)) return 0;
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Ends what has used up its time. Returns whether anything went on since the last look. */
static int look(void) {
  int is_busy = 0;
  pthread_mutex_lock(&lock);
  for (struct ng_slot *slot = slots; slot; slot = slot->next) {
    if (!slot->tid) continue;
    uint64_t work = atomic_load(&slot->work);
    if (work != slot->seen) {
      is_busy = 1;
      slot->seen = work;
      slot->since = work & 1 ? time_of(slot) : 0;
      continue;
    }
    if (!(work & 1)) continue;
    is_busy = 1;
    uint64_t now = time_of(slot);
    uint64_t limit = atomic_load_explicit(&slot->limit, memory_order_relaxed);
    if (slot->struck == work || !slot->since || now < slot->since || now - slot->since < limit) continue;
    atomic_store(&slot->doomed, work);
    /* It fails if too many signals wait: the next look tries again. */
    if (!syscall(SYS_tgkill, getpid(), slot->tid, STRIKE)) slot->struck = work;
  }
  pthread_mutex_unlock(&lock);
  return is_busy;
}

static void *watch(void *unused) {
  (void)unused;
  pthread_setname_np(pthread_self(), "rule-watchdog");
  const struct timespec tick = { 0, TICK_NANOSECONDS };
  int quiet = 0;
  for (;;) {
    quiet = look() ? 0 : quiet + 1;
    if (quiet < QUIET_LOOKS) {
      nanosleep(&tick, NULL);
      continue;
    }
    quiet = 0;
    atomic_store(&is_asleep, 1);
    /* Work that began before the store has not seen it. If somebody else took the mark back, the semaphore is up. */
    if (look() && atomic_exchange(&is_asleep, 0)) continue;
    while (sem_wait(&wake)) continue;
  }
  return NULL;
}

static void leave(void *data) {
  struct ng_slot *slot = data;
  ng_watched.slot = NULL;
  pthread_mutex_lock(&lock);
  slot->tid = 0;
  pthread_mutex_unlock(&lock);
}

/* Once for the process; under `lock`. */
static int start(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = strike;
  sigemptyset(&action.sa_mask);
  /* Not blocked in the handler, which may never return. */
  action.sa_flags = SA_RESTART | SA_NODEFER;
  if (sigaction(STRIKE, &action, NULL) || sem_init(&wake, 0, 0)) return 0;
  if (pthread_key_create(&at_exit, leave)) return 0;
  /* Signals of the process are for its other threads. */
  sigset_t all, had;
  sigfillset(&all);
  pthread_attr_t attributes;
  pthread_t thread;
  if (pthread_attr_init(&attributes)) return 0;
  pthread_attr_setstacksize(&attributes, STACK_LEN);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_sigmask(SIG_SETMASK, &all, &had);
  int error = pthread_create(&thread, &attributes, watch, NULL);
  pthread_sigmask(SIG_SETMASK, &had, NULL);
  pthread_attr_destroy(&attributes);
  if (error) {
    pthread_key_delete(at_exit);
    return 0;
  }
  return 1;
}

/* A slot for this thread. NULL: there can be no watchdog. */
static struct ng_slot *join(void) {
  pthread_mutex_lock(&lock);
  struct ng_slot *slot = NULL;
  if (!is_started) is_started = start();
  if (is_started) {
    for (slot = slots; slot && slot->tid; slot = slot->next) continue;
    if (!slot && (slot = calloc(1, sizeof *slot)) != NULL) {
      slot->next = slots;
      slots = slot;
    }
    if (slot && (pthread_getcpuclockid(pthread_self(), &slot->clock) || pthread_setspecific(at_exit, slot))) slot = NULL;
    if (slot) slot->tid = (pid_t)syscall(SYS_gettid);
  }
  pthread_mutex_unlock(&lock);
  if (slot) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, STRIKE);
    pthread_sigmask(SIG_UNBLOCK, &signals, NULL);
  }
  return slot;
}

int ng_watch_begin(jmp_buf *end, uint64_t nanoseconds) {
  struct ng_slot *slot = ng_watched.slot;
  if (!slot && !(slot = ng_watched.slot = join())) return 0;
  ng_watched.end = end;
  ng_watched.guarded = ng_watched.due = 0;
  atomic_store_explicit(&slot->limit, nanoseconds, memory_order_relaxed);
  uint64_t work = atomic_load_explicit(&slot->work, memory_order_relaxed) | 1;
  atomic_store(&slot->work, work);
  if (__builtin_expect(atomic_load(&is_asleep), 0) && atomic_exchange(&is_asleep, 0)) sem_post(&wake);
  return 1;
}

void ng_watch_end(void) {
  struct ng_slot *slot = ng_watched.slot;
  uint64_t work = atomic_load_explicit(&slot->work, memory_order_relaxed);
  atomic_store_explicit(&slot->work, (work | 1) + 1, memory_order_release);
}

uint64_t ng_deferred(void) { return ng_watched.deferred; }
