/*
 * State and functions of a guest's first process (`guest_init.c`) that the process of an operator's command uses, too
 * (`guest_session.c`). Each process has its own copy.
 */
#ifndef NAGAYA_GUEST_H
#define NAGAYA_GUEST_H

#include <sys/ioctl.h>
#include <sys/types.h>

/* Longest configuration, bytes. */
enum { CONFIG_MAX = 1 << 20 };

/* The tenant. */
extern uid_t uid;
extern gid_t gid;

/* Words of the command, and of its environment. */
extern int argument_count, variable_count;

/* This process serves one command of an operator, which has a terminal of this size, or none. */
extern int is_session, has_terminal;
extern struct winsize terminal_size;

/* Obeys the statements of a configuration. */
void obey_text(char *text);

/* Becomes the tenant, with no way back, and runs the command. */
void run_as_tenant(int first_closed) __attribute__((noreturn));

/* Serves one command of an operator to its end. */
void serve_session(int connection) __attribute__((noreturn));

#endif
