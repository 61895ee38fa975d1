/*
 * The first process of a guest: makes its root from what the node shares, starts the application's command under the
 * tenant's uid, and speaks with `nagaya vm-run` on the node over a port of virtio-console ("agent").
 *
 * It obeys `/order` of the initial RAM disk and then the configuration that the node sends: one statement in each line,
 * words separated by one space, with %XX for any byte. `initramfs.rs` and `guest_config.rs` write them. Messages of both
 * sides are lines, too:
 *
 *   guest -> node   hello | ready | exit STATUS | failed TEXT
 *   node -> guest   config LENGTH and so many bytes | wake NANOSECONDS SEED | clock NANOSECONDS |
 *                   signal NUMBER | stop
 *
 * Up to the configuration nothing in the guest is of a tenant: a template of a machine is saved there, after "hello".
 *
 * The guest's root is the tenant: nothing here protects the guest from its application. The node trusts no message.
 */
#define _GNU_SOURCE
#include "guest.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/random.h>
#include <net/if.h>
#include <net/route.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    WORDS_MAX = 16,
    LIST_MAX = 1024,
    LINE_MAX_LEN = 4096,
    COPY_LEN = 16384,
    /* A read or a write of 128 KiB, and its head (pump.rs). */
    FILES_LEN_MAX = (128 << 10) + 4096,
    /* Connections at once of one forwarded place. */
    CONNECTIONS_MAX = 256,
    TRY_MS = 20,
    /* An application that starts may have no memory for this share of the time, for so long. */
    STALLED_PERCENT = 50,
    STALLED_SECONDS = 8,
    /* The port to which the node's connections come, and that for commands of an operator. */
    INGRESS_PORT = 8080,
    EXEC_PORT = 8081,
    /* Commands of an operator at once. */
    COMMANDS_MAX = 32,
};

/* Addresses of QEMU's own network (QEMU's documentation, "Network emulation"). */
static const char own_address[] = "10.0.2.15", node_address[] = "10.0.2.2";

/* A place that is forwarded: listens in the guest, and connects to a port of the node's side. */
struct forward {
    const char *path; /* a Unix socket; or else: */
    const char *address;
    int port;
    int target;
};

static char *arguments[LIST_MAX + 1], *variables[LIST_MAX + 1];
int argument_count, variable_count;
static int forward_count;
static struct forward forwards[LIST_MAX];
uid_t uid;
gid_t gid;
static long open_files_max = 1024;
static const char *directory = "/";
/* Where the application listens: a path, a port of loopback, or nothing: it is handed the socket. */
static const char *listen_path;
static int listen_port, hands_socket;
int is_session, has_terminal;
struct winsize terminal_size;
static int agent = -1;
/* The node has said what time it is, and what to run. */
static int has_clock, has_config;

static void tell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* Sends a line to the node. */
static void tell(const char *format, ...)
{
    char line[LINE_MAX_LEN];
    va_list values;
    va_start(values, format);
    int len = vsnprintf(line, sizeof line - 1, format, values);
    va_end(values);
    if (len < 0)
        return;
    if (len > (int)sizeof line - 2)
        len = sizeof line - 2;
    for (int at = 0; at < len; at++)
        if (iscntrl((unsigned char)line[at]))
            line[at] = ' ';
    line[len++] = '\n';
    for (int done = 0; agent >= 0 && done < len;) {
        ssize_t wrote = write(agent, line + done, len - done);
        if (wrote < 0 && errno != EINTR)
            break;
        done += wrote > 0 ? wrote : 0;
    }
}

static void end_machine(void) __attribute__((noreturn));
static void end_machine(void)
{
    sync();
    /* QEMU runs with -no-reboot: it ends. */
    reboot(RB_AUTOBOOT);
    for (;;)
        pause();
}

static void fail(const char *format, ...)
{
    char text[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    tell("failed %s: %s", text, strerror(errno));
    end_machine();
}

/* Decodes %XX in place. */
static char *decode(char *word)
{
    char *to = word;
    for (const char *from = word; *from; to++) {
        unsigned byte;
        if (*from == '%' && isxdigit((unsigned char)from[1]) && isxdigit((unsigned char)from[2]) &&
            sscanf(from + 1, "%2x", &byte) == 1) {
            *to = (char)byte;
            from += 3;
        } else {
            *to = *from++;
        }
    }
    *to = 0;
    return word;
}

static void make_dir(const char *path, mode_t mode)
{
    char part[4096];
    for (size_t at = 1; at < sizeof part && path[at - 1]; at++) {
        if (path[at] && path[at] != '/')
            continue;
        memcpy(part, path, at);
        part[at] = 0;
        mkdir(part, mode);
    }
}

/* Returns a path below the new root. */
static const char *in_root(const char *path)
{
    static char full[8192];
    snprintf(full, sizeof full, "/root%s", path);
    return full;
}

static void load_module(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "/modules/%s", name);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        fail("module %s", name);
    if (syscall(SYS_finit_module, file, "", 0) < 0 && errno != EEXIST)
        fail("module %s", name);
    close(file);
}

/* Opens the port of virtio-console with this name (Documentation/ABI/testing/sysfs-class-virtio-ports). */
static int open_port(const char *name, int flags)
{
    for (int tries = 0; tries < 500; tries++) {
        DIR *ports = opendir("/sys/class/virtio-ports");
        for (struct dirent *entry; ports && (entry = readdir(ports));) {
            char path[512], text[64] = "";
            snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", entry->d_name);
            int file = open(path, O_RDONLY | O_CLOEXEC);
            ssize_t len = file < 0 ? 0 : read(file, text, sizeof text - 1);
            if (file >= 0)
                close(file);
            text[len > 0 ? len : 0] = 0;
            text[strcspn(text, "\n")] = 0;
            if (strcmp(text, name))
                continue;
            snprintf(path, sizeof path, "/dev/%s", entry->d_name);
            file = open(path, flags | O_CLOEXEC);
            if (file >= 0) {
                closedir(ports);
                return file;
            }
        }
        if (ports)
            closedir(ports);
        usleep(TRY_MS * 1000);
    }
    return -1;
}

/* Passes requests of the guest's kernel for files on to the node, one after the other. Never returns. */
static void send_requests(int fuse, int port) __attribute__((noreturn));
static void send_requests(int fuse, int port)
{
    static char request[FILES_LEN_MAX];
    for (;;) {
        ssize_t len = read(fuse, request, sizeof request);
        if (len < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT))
            continue;
        if (len <= 0)
            _exit(1);
        for (ssize_t done = 0, wrote; done < len; done += wrote)
            if ((wrote = write(port, request + done, len - done)) <= 0)
                _exit(1);
    }
}

/* Passes the node's replies on. Each begins with its length (struct fuse_out_header). Never returns. */
static void take_replies(int port, int fuse) __attribute__((noreturn));
static void take_replies(int port, int fuse)
{
    static char reply[FILES_LEN_MAX];
    uint32_t len = 0;
    for (size_t got = 0;;) {
        size_t wanted = got < sizeof len ? sizeof len : len;
        ssize_t more = read(port, reply + got, wanted - got);
        if (more <= 0)
            _exit(1);
        got += more;
        if (got == sizeof len)
            memcpy(&len, reply, sizeof len);
        if (got >= sizeof len && (len < sizeof len || len > sizeof reply))
            _exit(1);
        if (got < sizeof len || got < len)
            continue;
        /* The kernel may have given the request up: it says so, and goes on. */
        if (write(fuse, reply, len) < 0 && errno != ENOENT && errno != EINVAL)
            _exit(1);
        got = 0;
    }
}

/* Mounts the node's files as the root: FUSE over a port of virtio-console. */
static void mount_files(void)
{
    char options[128];
    int port = open_port("files", O_RDWR), fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (port < 0 || fuse < 0)
        fail("the node's files");
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions", fuse);
    if (mount("nagaya", "/root", "fuse", MS_NODEV | MS_NOSUID, options) < 0)
        fail("the root");
    if (fork() == 0)
        send_requests(fuse, port);
    if (fork() == 0)
        take_replies(port, fuse);
    close(port);
    close(fuse);
}

static void set_interface(const char *name, const char *address, const char *mask)
{
    int socket_fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq request = {0};
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    struct sockaddr_in *to = (struct sockaddr_in *)&request.ifr_addr;
    to->sin_family = AF_INET;
    inet_pton(AF_INET, address, &to->sin_addr);
    if (ioctl(socket_fd, SIOCSIFADDR, &request) < 0)
        fail("network interface %s", name);
    inet_pton(AF_INET, mask, &to->sin_addr);
    ioctl(socket_fd, SIOCSIFNETMASK, &request);
    if (ioctl(socket_fd, SIOCGIFFLAGS, &request) == 0) {
        request.ifr_flags |= IFF_UP | IFF_RUNNING;
        ioctl(socket_fd, SIOCSIFFLAGS, &request);
    }
    close(socket_fd);
}

static void set_route(const char *gateway)
{
    int socket_fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
    ((struct sockaddr_in *)&route.rt_dst)->sin_family = AF_INET;
    ((struct sockaddr_in *)&route.rt_genmask)->sin_family = AF_INET;
    struct sockaddr_in *to = (struct sockaddr_in *)&route.rt_gateway;
    to->sin_family = AF_INET;
    inet_pton(AF_INET, gateway, &to->sin_addr);
    if (ioctl(socket_fd, SIOCADDRT, &route) < 0 && errno != EEXIST)
        fail("the route to %s", gateway);
    close(socket_fd);
}

/* Shows a text in place of a file of the root, if the root has that file. */
static void show_text(const char *path, const char *name, const char *text)
{
    char own[512];
    snprintf(own, sizeof own, "/root/run/.nagaya-%s", name);
    int file = open(own, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0 || write(file, text, strlen(text)) < 0)
        fail("%s", own);
    close(file);
    if (access(in_root(path), F_OK) == 0 && mount(own, in_root(path), NULL, MS_BIND, NULL) < 0)
        fail("%s", path);
}

static void add_word(char **list, int *count, const char *word)
{
    if (*count >= LIST_MAX) {
        errno = E2BIG;
        fail("arguments or variables");
    }
    list[(*count)++] = strdup(word);
}

/* Obeys what a command of an operator may say, too. Returns 0 for anything else. */
static int obey_session(char **words, int count)
{
    const char *what = words[0];
    if (!strcmp(what, "directory") && count == 2)
        directory = strdup(words[1]);
    else if (!strcmp(what, "argument") && count == 2)
        add_word(arguments, &argument_count, words[1]);
    else if (!strcmp(what, "variable") && count == 2)
        add_word(variables, &variable_count, words[1]);
    else if (is_session && !strcmp(what, "terminal") && count == 3) {
        has_terminal = 1;
        terminal_size.ws_row = (unsigned short)atoi(words[1]);
        terminal_size.ws_col = (unsigned short)atoi(words[2]);
    } else
        return 0;
    return 1;
}

static void obey(char **words, int count)
{
    const char *what = words[0];
    if (obey_session(words, count))
        return;
    if (is_session)
        _exit(1);
    if (!strcmp(what, "module") && count == 2)
        load_module(words[1]);
    else if (!strcmp(what, "files") && count == 1)
        mount_files();
    else if (!strcmp(what, "memory") && count == 3) {
        /* Files in memory, at most so many MiB. */
        char options[64], own[64];
        /* nagaya's own files in the sandbox stay in their place. */
        int kept = open("/root/run/nagaya", O_PATH | O_DIRECTORY | O_CLOEXEC);
        snprintf(options, sizeof options, "size=%sm,mode=1777", words[2]);
        if (mount("tmpfs", in_root(words[1]), "tmpfs", MS_NODEV | MS_NOSUID, options) < 0)
            fail("%s", words[1]);
        snprintf(own, sizeof own, "/proc/self/fd/%d", kept);
        if (kept >= 0 && !strcmp(words[1], "/run") && mkdir("/root/run/nagaya", 0755) == 0 &&
            mount(own, "/root/run/nagaya", NULL, MS_BIND, NULL) < 0)
            fail("/run/nagaya");
        close(kept);
    } else if (!strcmp(what, "show") && count == 4)
        show_text(words[1], words[2], words[3]);
    else if (!strcmp(what, "hostname") && count == 2)
        sethostname(words[1], strlen(words[1]));
    else if (!strcmp(what, "user") && count == 4) {
        uid = (uid_t)strtoul(words[1], NULL, 10);
        gid = (gid_t)strtoul(words[2], NULL, 10);
        open_files_max = strtol(words[3], NULL, 10);
    } else if (!strcmp(what, "listen") && count == 3 && !strcmp(words[1], "port"))
        listen_port = atoi(words[2]);
    else if (!strcmp(what, "listen") && count == 3 && !strcmp(words[1], "path"))
        listen_path = strdup(words[2]);
    else if (!strcmp(what, "listen") && count == 2 && !strcmp(words[1], "socket"))
        hands_socket = 1;
    else if (!strcmp(what, "forward") && (count == 4 || count == 5) && forward_count < LIST_MAX) {
        struct forward *forward = &forwards[forward_count++];
        if (!strcmp(words[1], "path")) {
            forward->path = strdup(words[2]);
            forward->target = atoi(words[3]);
        } else {
            forward->address = strdup(words[2]);
            forward->port = atoi(words[3]);
            forward->target = count == 5 ? atoi(words[4]) : 0;
        }
    } else {
        errno = EINVAL;
        fail("statement '%s' of the configuration", what);
    }
}

/* Obeys statements, one in each line. */
void obey_text(char *text)
{
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        char *words[WORDS_MAX];
        int count = 0;
        for (char *word; count < WORDS_MAX && (word = strsep(&line, " "));)
            words[count++] = decode(word);
        if (count && *words[0])
            obey(words, count);
    }
}

/* Obeys a file of statements. */
static void obey_file(const char *path)
{
    static char text[CONFIG_MAX];
    int file = open(path, O_RDONLY | O_CLOEXEC);
    size_t len = 0;
    for (ssize_t got; file >= 0 && (got = read(file, text + len, sizeof text - 1 - len)) > 0;)
        len += got;
    if (file < 0 || len == sizeof text - 1)
        fail("%s", path);
    text[len] = 0;
    close(file);
    obey_text(text);
}

/* Makes the node's directories the root of everything. */
static void enter_root(void)
{
    static const char *const kept[] = {"/dev", "/proc", "/sys"};
    for (size_t at = 0; at < sizeof kept / sizeof *kept; at++) {
        if (mount(kept[at], in_root(kept[at]), NULL, MS_MOVE, NULL) < 0)
            fail("%s of the root", kept[at]);
    }
    if (chdir("/root") < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
        fail("the new root");
    mkdir("/dev/pts", 0755);
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "mode=620,ptmxmode=666");
    mkdir("/dev/shm", 01777);
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777");
}

/* === Connections === */

static int listen_at(const char *path, const char *address, int port)
{
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    struct sockaddr_in remote = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1, listener = socket(path ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0)
        fail("a socket");
    if (path) {
        snprintf(local.sun_path, sizeof local.sun_path, "%s", path);
        char *slash = strrchr(local.sun_path, '/');
        *slash = 0;
        make_dir(local.sun_path, 0755);
        *slash = '/';
        unlink(path);
        if (bind(listener, (struct sockaddr *)&local, sizeof local) < 0)
            fail("socket %s", path);
        chmod(path, 0666);
    } else {
        inet_pton(AF_INET, address, &remote.sin_addr);
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(listener, (struct sockaddr *)&remote, sizeof remote) < 0)
            fail("address %s:%d", address, port);
    }
    if (listen(listener, 512) < 0)
        fail("listening");
    return listener;
}

static int connect_to(const char *path, const char *address, int port)
{
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    struct sockaddr_in remote = {.sin_family = AF_INET, .sin_port = htons(port)};
    int socket_fd = socket(path ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), status;
    if (path) {
        snprintf(local.sun_path, sizeof local.sun_path, "%s", path);
        status = connect(socket_fd, (struct sockaddr *)&local, sizeof local);
    } else {
        inet_pton(AF_INET, address, &remote.sin_addr);
        status = connect(socket_fd, (struct sockaddr *)&remote, sizeof remote);
    }
    if (status == 0)
        return socket_fd;
    close(socket_fd);
    return -1;
}

/* Passes bytes on until one end is closed. Never returns. */
static void copy(int from, int to) __attribute__((noreturn));
static void copy(int from, int to)
{
    static char bytes[COPY_LEN];
    for (ssize_t got; (got = read(from, bytes, sizeof bytes)) > 0;)
        for (ssize_t done = 0, wrote; done < got; done += wrote)
            if ((wrote = write(to, bytes + done, got - done)) < 0) {
                /* Nobody reads it any more: so nothing more is read, either. */
                shutdown(from, SHUT_RD);
                _exit(1);
            }
    shutdown(to, SHUT_WR);
    _exit(0);
}

/* Passes one connection on in two processes, one for each direction. Never returns. */
static void pass(int one, int other) __attribute__((noreturn));
static void pass(int one, int other)
{
    if (other < 0) {
        /* The nearest thing to a refusal. */
        struct linger now = {.l_onoff = 1};
        setsockopt(one, SOL_SOCKET, SO_LINGER, &now, sizeof now);
        _exit(1);
    }
    pid_t child = fork();
    if (child == 0)
        copy(one, other);
    copy(other, one);
}

/* Serves one forwarded place in a process of its own; or commands of an operator, without a place. */
static void serve(int listener, const char *path, const char *address, int port)
{
    int is_of_commands = !path && !address, running_max = is_of_commands ? COMMANDS_MAX : CONNECTIONS_MAX;
    pid_t child = fork();
    if (child != 0) {
        close(listener);
        return;
    }
    signal(SIGCHLD, SIG_DFL);
    prctl(PR_SET_NAME, "nagaya-forward");
    for (int running = 0;;) {
        while (waitpid(-1, NULL, running >= running_max ? 0 : WNOHANG) > 0)
            running--;
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0) {
            usleep(TRY_MS * 1000);
            continue;
        }
        child = fork();
        if (child == 0 && is_of_commands)
            serve_session(connection);
        if (child == 0)
            pass(connection, connect_to(path, address, port));
        running += child > 0;
        close(connection);
    }
}

static void start_forwards(void)
{
    for (int at = 0; at < forward_count; at++) {
        const struct forward *forward = &forwards[at];
        int listener = listen_at(forward->path, forward->address, forward->port);
        serve(listener, NULL, node_address, forward->target);
    }
}

/* === The application === */

/* Becomes the tenant, with no way back, and runs the command. */
void run_as_tenant(int first_closed)
{
    struct rlimit files = {.rlim_cur = open_files_max, .rlim_max = open_files_max};
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    setrlimit(RLIMIT_NOFILE, &files);
    close_range(first_closed, ~0U, 0);
    if (setgroups(0, NULL) < 0 || setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0)
        _exit(126);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (chdir(directory) < 0) {
        dprintf(2, "%s: %s\n", directory, strerror(errno));
        _exit(126);
    }
    arguments[argument_count] = variables[variable_count] = NULL;
    environ = variables;
    execvp(arguments[0], arguments);
    dprintf(2, "%s: %s\n", arguments[0], strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

static void run_command(int listener, int log) __attribute__((noreturn));
static void run_command(int listener, int log)
{
    setsid();
    int nothing = open("/dev/null", O_RDONLY);
    if (nothing < 0 || dup2(nothing, 0) < 0 || dup2(log, 1) < 0 || dup2(log, 2) < 0)
        fail("the application's descriptors");
    if (listener >= 0) {
        static char count[] = "LISTEN_FDS=1", pid[64];
        if (listener == 3)
            fcntl(3, F_SETFD, 0);
        else if (dup2(listener, 3) < 0)
            fail("the application's socket");
        snprintf(pid, sizeof pid, "LISTEN_PID=%d", getpid());
        add_word(variables, &variable_count, count);
        add_word(variables, &variable_count, pid);
    }
    run_as_tenant(listener >= 0 ? 4 : 3);
}

/* === The application's state === */

/* Whether something listens where the application is to. */
static int listens(void)
{
    int probe = connect_to(listen_path, "127.0.0.1", listen_port);
    if (probe >= 0)
        close(probe);
    return probe >= 0;
}

/* === Messages === */

static int digit(char letter)
{
    return letter <= '9' ? letter - '0' : tolower((unsigned char)letter) - 'a' + 10;
}

/* Random bytes of the last wake. */
static struct {
    struct rand_pool_info head;
    unsigned char bytes[64];
} pool;

/* Shows the random bytes to programs that keep random numbers of their own. */
static void write_wake_file(void)
{
    int file = open("/run/nagaya.wake", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0 || write(file, pool.bytes, pool.head.buf_size) < 0)
        tell("failed /run/nagaya.wake: %s", strerror(errno));
    if (file >= 0)
        close(file);
}

static void set_clock(const char *nanoseconds)
{
    unsigned long long now = strtoull(nanoseconds, NULL, 10);
    struct timespec time = {.tv_sec = (time_t)(now / 1000000000), .tv_nsec = (long)(now % 1000000000)};
    clock_settime(CLOCK_REALTIME, &time);
    has_clock = 1;
}

/* Sets the clock, and gives the kernel random bytes that no other guest has (random(4)). */
static void wake(const char *nanoseconds, const char *seed)
{
    set_clock(nanoseconds);
    size_t len = 0;
    for (; len < sizeof pool.bytes && isxdigit((unsigned char)seed[0]) && isxdigit((unsigned char)seed[1]); seed += 2)
        pool.bytes[len++] = (unsigned char)(digit(seed[0]) << 4 | digit(seed[1]));
    pool.head.buf_size = (int)len;
    pool.head.entropy_count = (int)len * 8;
    int device = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
    if (device >= 0) {
        ioctl(device, RNDADDENTROPY, &pool);
        ioctl(device, RNDRESEEDCRNG);
        close(device);
    }
    if (has_config)
        write_wake_file();
}

/* Takes so many bytes of configuration, of which some have been read, and obeys them. */
static void take_config(size_t len, const char *read_already, size_t read_len)
{
    static char text[CONFIG_MAX];
    if (len >= sizeof text || read_len > len) {
        errno = EMSGSIZE;
        fail("the configuration of %zu bytes", len);
    }
    memcpy(text, read_already, read_len);
    for (ssize_t got; read_len < len; read_len += got) {
        got = read(agent, text + read_len, len - read_len);
        if (got <= 0) {
            usleep(TRY_MS * 1000);
            got = 0;
        }
    }
    text[len] = 0;
    obey_text(text);
    has_config = 1;
}

static void obey_node(char *line, pid_t application)
{
    if (!strncmp(line, "wake ", 5)) {
        char *seed = strchr(line + 5, ' ');
        wake(line + 5, seed ? seed + 1 : "");
    } else if (!strncmp(line, "clock ", 6)) {
        set_clock(line + 6);
    } else if (!strncmp(line, "signal ", 7) && application > 0) {
        kill(application, atoi(line + 7));
    } else if (!strcmp(line, "stop") && application > 0) {
        kill(application, SIGTERM);
    }
}

/* Reads what the node has sent. */
static void hear_node(pid_t application)
{
    static char text[LINE_MAX_LEN];
    static size_t len;
    ssize_t got = read(agent, text + len, sizeof text - 1 - len);
    if (got <= 0) {
        /* Nobody is at the other end now. */
        usleep(TRY_MS * 1000);
        return;
    }
    len += got;
    text[len] = 0;
    for (char *end; (end = strchr(text, '\n'));) {
        *end = 0;
        len -= end + 1 - text;
        if (!has_config && !strncmp(text, "config ", 7)) {
            /* Nothing comes after it before the guest has answered. */
            take_config(strtoul(text + 7, NULL, 10), end + 1, len);
            len = 0;
            return;
        }
        obey_node(text, application);
        memmove(text, end + 1, len + 1);
    }
    if (len == sizeof text - 1)
        len = 0;
}

/* Returns a number of a file of `/proc`: the one after this text. 0 if there is none. */
static double number_after(const char *path, const char *text)
{
    static char content[32768];
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t len = file < 0 ? 0 : read(file, content, sizeof content - 1);
    if (file >= 0)
        close(file);
    content[len > 0 ? len : 0] = 0;
    const char *found = strstr(content, text);
    return found ? atof(found + strlen(text)) : 0;
}

/* Ends a machine whose application cannot start because it has too little memory: it would take for ever. */
static void check_memory(void)
{
    static time_t checked, since;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec == checked)
        return;
    checked = now.tv_sec;
    if (number_after("/proc/pressure/memory", "full avg10=") < STALLED_PERCENT)
        since = 0;
    else if (since == 0)
        since = checked;
    else if (checked - since >= STALLED_SECONDS) {
        tell("failed its programs wait for memory most of the time: give it more (--vm-memory)");
        end_machine();
    }
}

/* Reaps what has ended. Ends the machine with the application. */
static void reap(pid_t application)
{
    int status;
    for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {
        if (ended != application)
            continue;
        if (number_after("/proc/vmstat", "oom_kill ") > 0)
            tell("note a program was ended because the memory was full: give it more (--vm-memory)");
        tell("exit %d", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
        end_machine();
    }
}

static void tend(pid_t application, int children, int is_ready)
{
    for (;;) {
        struct pollfd watched[] = {{.fd = children, .events = POLLIN}, {.fd = agent, .events = POLLIN}};
        poll(watched, 2, is_ready ? -1 : TRY_MS);
        if (watched[0].revents) {
            struct signalfd_siginfo told;
            if (read(children, &told, sizeof told) > 0)
                reap(application);
        }
        if (watched[1].revents & POLLIN)
            hear_node(application);
        else if (watched[1].revents)
            usleep(TRY_MS * 1000);
        if (!is_ready)
            check_memory();
        if (!is_ready && listens()) {
            is_ready = 1;
            serve(listen_at(NULL, own_address, INGRESS_PORT), listen_path, "127.0.0.1", listen_port);
            tell("ready");
        }
    }
}

int main(void)
{
    sigset_t ended;
    signal(SIGPIPE, SIG_IGN);
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    mkdir("/dev", 0755);
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "");
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "");
    mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "");
    make_dir("/root", 0755);
    obey_file("/order");
    agent = open_port("agent", O_RDWR);
    int log = open_port("log", O_WRONLY);
    if (agent < 0 || log < 0)
        fail("the ports of the node");
    tell("hello");
    while (!has_clock || !has_config)
        hear_node(0);
    enter_root();
    write_wake_file();
    set_interface("lo", "127.0.0.1", "255.0.0.0");
    set_interface("eth0", own_address, "255.255.255.0");
    set_route(node_address);
    start_forwards();
    serve(listen_at(NULL, own_address, EXEC_PORT), NULL, NULL, 0);
    sigemptyset(&ended);
    sigaddset(&ended, SIGCHLD);
    sigprocmask(SIG_BLOCK, &ended, NULL);
    int children = signalfd(-1, &ended, SFD_CLOEXEC);
    int listener = hands_socket ? listen_at(NULL, "0.0.0.0", INGRESS_PORT) : -1;
    pid_t application = fork();
    if (application == 0)
        run_command(listener, log);
    if (application < 0)
        fail("the application");
    if (listener >= 0) {
        close(listener);
        tell("ready");
    }
    tend(application, children, listener >= 0);
}
