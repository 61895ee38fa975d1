/*
 * One command of an operator in a guest (`nagaya instance exec`), in a process of its own. The other side is `exec.rs`:
 * both send frames, each a byte for its kind, its length (32 bits, little endian) and its bytes.
 *
 * Not here: the port that takes such commands (`guest_init.c`).
 */
#define _GNU_SOURCE
#include "guest.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

/* Longest frame, bytes (exec.rs). */
enum { FRAME_LEN_MAX = 16384 };

/* Kinds of frames: to the guest, and from it. */
enum { FRAME_INPUT, FRAME_SIZE };
enum { FRAME_OUTPUT = 1, FRAME_ERRORS, FRAME_EXIT };

static int read_all(int from, void *to, size_t len)
{
    for (size_t done = 0; done < len;) {
        ssize_t got = read(from, (char *)to + done, len - done);
        if (got <= 0)
            return 0;
        done += got;
    }
    return 1;
}

static int send_frame(int to, unsigned char kind, const void *bytes, uint32_t len)
{
    unsigned char head[5] = {kind, len & 255, len >> 8 & 255, len >> 16 & 255, len >> 24};
    struct iovec parts[] = {{head, sizeof head}, {(void *)bytes, len}};
    ssize_t wrote = writev(to, parts, 2);
    for (size_t done = wrote < 0 ? 0 : (size_t)wrote; wrote > 0 && done < sizeof head + len; done += wrote) {
        const char *rest = done < sizeof head ? (char *)head + done : (char *)bytes + done - sizeof head;
        wrote = write(to, rest, done < sizeof head ? sizeof head - done : sizeof head + len - done);
    }
    return wrote > 0;
}

/* Passes some output on. Returns 0 at its end. */
static int send_output(int to, unsigned char kind, int from)
{
    static char bytes[FRAME_LEN_MAX];
    ssize_t got = read(from, bytes, sizeof bytes);
    return got > 0 && send_frame(to, kind, bytes, (uint32_t)got);
}

/* Takes a frame of the operator's. Returns 0 if the operator has left. */
static int take_frame(int connection, int *input)
{
    static char bytes[FRAME_LEN_MAX];
    unsigned char head[5];
    if (!read_all(connection, head, sizeof head))
        return 0;
    uint32_t len = head[1] | head[2] << 8 | head[3] << 16 | (uint32_t)head[4] << 24;
    if (len > sizeof bytes || !read_all(connection, bytes, len))
        return 0;
    if (head[0] == FRAME_SIZE && len == 4 && has_terminal) {
        struct winsize size = {.ws_row = (unsigned char)bytes[0] | (unsigned char)bytes[1] << 8,
                               .ws_col = (unsigned char)bytes[2] | (unsigned char)bytes[3] << 8};
        ioctl(*input, TIOCSWINSZ, &size);
    } else if (head[0] == FRAME_INPUT && *input >= 0) {
        for (uint32_t done = 0; done < len;) {
            ssize_t wrote = write(*input, bytes + done, len - done);
            if (wrote <= 0)
                break;
            done += wrote;
        }
        /* A terminal has no end: its reader is told with a character. */
        if (len == 0 && !has_terminal) {
            close(*input);
            *input = -1;
        }
    }
    return 1;
}

/* Starts the command, with a terminal or with pipes. `ends`: our ends of its input, its output and its errors. */
static pid_t start_session(int ends[3])
{
    int its[3] = {-1, -1, -1}, pair[2];
    if (has_terminal) {
        char name[64];
        unsigned number, zero = 0;
        ends[0] = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
        if (ends[0] < 0 || ioctl(ends[0], TIOCSPTLCK, &zero) < 0 || ioctl(ends[0], TIOCGPTN, &number) < 0)
            return -1;
        snprintf(name, sizeof name, "/dev/pts/%u", number);
        if (chown(name, uid, gid) < 0)
            return -1;
        ioctl(ends[0], TIOCSWINSZ, &terminal_size);
        its[0] = its[1] = its[2] = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
        ends[1] = ends[0];
        ends[2] = -1;
    } else {
        for (int at = 0; at < 3; at++) {
            if (pipe2(pair, O_CLOEXEC) < 0)
                return -1;
            ends[at] = pair[at == 0];
            its[at] = pair[at != 0];
        }
    }
    pid_t command = fork();
    if (command == 0) {
        setsid();
        if (has_terminal)
            ioctl(its[0], TIOCSCTTY, 0);
        for (int at = 0; at < 3; at++)
            if (dup2(its[at], at) < 0)
                _exit(126);
        run_as_tenant(3);
    }
    close(its[0]);
    if (!has_terminal) {
        close(its[1]);
        close(its[2]);
    }
    return command;
}

/* Ends every process of a session, also those in groups of their own. */
static void end_session(pid_t leader)
{
    for (int rounds = 0, left = 1; left && rounds < 16; rounds++) {
        DIR *all = opendir("/proc");
        left = 0;
        for (struct dirent *entry; all && (entry = readdir(all));) {
            pid_t process = atoi(entry->d_name);
            if (process > 1 && process != leader && getsid(process) == leader)
                left |= kill(process, SIGKILL) == 0;
        }
        if (all)
            closedir(all);
    }
    kill(leader, SIGKILL);
}

/* Serves one command to its end. Never returns. */
void serve_session(int connection)
{
    static char text[CONFIG_MAX];
    uint32_t len;
    int ends[3];
    is_session = 1;
    argument_count = variable_count = 0;
    signal(SIGCHLD, SIG_DFL);
    if (!read_all(connection, &len, sizeof len) || len >= sizeof text || !read_all(connection, text, len))
        _exit(1);
    obey_text(text);
    if (argument_count == 0)
        _exit(1);
    pid_t command = start_session(ends);
    int ended = command < 0 ? -1 : (int)syscall(SYS_pidfd_open, command, 0);
    if (ended < 0)
        _exit(1);
    struct pollfd watched[] = {{.fd = connection, .events = POLLIN},
                               {.fd = ends[1], .events = POLLIN},
                               {.fd = ends[2], .events = POLLIN},
                               {.fd = ended, .events = POLLIN}};
    int is_there = 1, has_ended = 0;
    while (is_there && (!has_ended || watched[1].revents & POLLIN || watched[2].revents & POLLIN)) {
        poll(watched, 4, has_ended ? 0 : -1);
        if (watched[0].revents)
            is_there = take_frame(connection, &ends[0]);
        if (watched[1].revents && !send_output(connection, FRAME_OUTPUT, ends[1]))
            watched[1].fd = -1;
        if (watched[2].revents && !send_output(connection, FRAME_ERRORS, ends[2]))
            watched[2].fd = -1;
        has_ended |= watched[3].revents != 0;
    }
    int status = 0;
    unsigned char code = 1;
    end_session(command);
    if (waitpid(command, &status, 0) == command)
        code = (unsigned char)(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    send_frame(connection, FRAME_EXIT, &code, 1);
    _exit(0);
}
