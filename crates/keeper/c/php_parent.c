/*
 * Makes php-cgi the parent of a tenant's PHP workers. The keeper loads this into php-cgi (LD_PRELOAD,
 * ld.so(8)). Workers that it forks share its opcache, and everything else that extensions share.
 *
 * php-cgi calls fork() once it has started up, because PHP_FCGI_CHILDREN is set. That call is answered
 * here. In the parent it never returns: it waits for orders on CONTROL and makes one process for each. In
 * such a process it returns 0, as PHP expects, once the keeper has moved the process to its cell.
 *
 * An order is one byte with three descriptors (unix(7), SCM_RIGHTS): the socket to listen on, the log, and
 * the socket on which the worker reports to the keeper and waits. The parent runs with the tenant's rights,
 * so the keeper believes nothing that it sends. Only the kernel says which process a report is from.
 *
 * Invariant: a worker is a child of the keeper's (CLONE_PARENT, clone(2)), as one started without a parent.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CONTROL = 3, LISTENER = 0, LOG = 1, REPORT = 2, ORDER_FDS = 3 };

/* The variable that makes php-cgi a parent. Its standard output is this library's file then. */
static const char parent_variable[] = "NAGAYA_PHP_PARENT";

/* Whether this process is a parent that waits for php-cgi's call of fork(). */
static int is_parent;

/* Where the C library keeps the thread's number. */
static int *thread_number;

__attribute__((constructor)) static void become_parent(void)
{
    /* Something else may start php-cgi, as a script of a shell does. It passes all on. */
    if (!getenv(parent_variable) || !dlsym(RTLD_DEFAULT, "php_module_startup"))
        return;
    unsetenv("LD_PRELOAD");
    unsetenv(parent_variable);
    if (dup2(STDERR_FILENO, STDOUT_FILENO) < 0 || fcntl(CONTROL, F_SETFD, FD_CLOEXEC) < 0)
        _exit(1);
    /* PR_GET_TID_ADDRESS, prctl(2): Linux 3.5, with CONFIG_CHECKPOINT_RESTORE. */
    if (prctl(PR_GET_TID_ADDRESS, &thread_number) < 0)
        _exit(1);
    /* Scripts of the same tenant may not change the parent's memory. */
    prctl(PR_SET_DUMPABLE, 0);
    setenv("PHP_FCGI_CHILDREN", "1", 1);
    is_parent = 1;
}

/* Whether the call comes from the program itself, not from one of its libraries. */
static int is_of_program(const void *caller)
{
    Dl_info program, from;
    return dladdr((const void *)getauxval(AT_ENTRY), &program) && dladdr(caller, &from)
        && program.dli_fbase == from.dli_fbase;
}

/* Receives an order. Returns 0 when there will be no more. */
static int receive_order(int fds[ORDER_FDS])
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * ORDER_FDS)];
    } control;
    char byte;
    struct iovec data = { .iov_base = &byte, .iov_len = 1 };
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes
    };
    ssize_t len;
    do
        len = recvmsg(CONTROL, &message, MSG_CMSG_CLOEXEC);
    while (len < 0 && errno == EINTR);
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (len != 1 || !header || header->cmsg_type != SCM_RIGHTS
        || header->cmsg_len != CMSG_LEN(sizeof(int) * ORDER_FDS))
        return 0;
    memcpy(fds, CMSG_DATA(header), sizeof(int) * ORDER_FDS);
    return 1;
}

/*
 * As fork(), but the new process is a child of this process' parent. It has one thread, so no lock of the C
 * library is held by another. The kernel notes the new thread's number where the C library keeps it.
 */
static long make_sibling(void)
{
    const long flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD;
#if defined(__x86_64__)
    return syscall(SYS_clone, flags, 0L, 0L, thread_number, 0L);
#else
    return syscall(SYS_clone, flags, 0L, 0L, 0L, thread_number);
#endif
}

/* Makes a fresh process a worker, once the keeper says that it is in its cell. */
static void begin_work(const int fds[ORDER_FDS])
{
    char byte = 0;
    is_parent = 0;
    close(CONTROL);
    setpgid(0, 0);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || prctl(PR_SET_DUMPABLE, 1) < 0)
        _exit(1);
    if (dup2(fds[LISTENER], STDIN_FILENO) < 0 || dup2(fds[LOG], STDOUT_FILENO) < 0
        || dup2(fds[LOG], STDERR_FILENO) < 0)
        _exit(1);
    setenv("PHP_FCGI_CHILDREN", "0", 1);
    if (send(fds[REPORT], &byte, 1, MSG_NOSIGNAL) != 1)
        _exit(1);
    ssize_t len;
    do
        len = recv(fds[REPORT], &byte, 1, 0);
    while (len < 0 && errno == EINTR);
    /* The keeper has gone, or does not want it. */
    if (len != 1)
        _exit(1);
    for (int at = 0; at < ORDER_FDS; at++)
        close(fds[at]);
}

static int make_workers(void)
{
    int fds[ORDER_FDS];
    char byte = 0;
    /* The keeper waits for this: PHP has started up. */
    if (send(CONTROL, &byte, 1, MSG_NOSIGNAL) != 1)
        _exit(1);
    while (receive_order(fds)) {
        const long made = make_sibling();
        if (made == 0) {
            begin_work(fds);
            return 0;
        }
        /* If none was made, the keeper finds its end of the report closed. */
        for (int at = 0; at < ORDER_FDS; at++)
            close(fds[at]);
    }
    _exit(0);
}

pid_t fork(void)
{
    if (is_parent && is_of_program(__builtin_return_address(0)))
        return make_workers();
    pid_t (*next)(void);
    *(void **)&next = dlsym(RTLD_NEXT, "fork");
    if (next)
        return next();
    errno = ENOSYS;
    return -1;
}
