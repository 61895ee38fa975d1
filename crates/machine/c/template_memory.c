/*
 * A library for QEMU, loaded with LD_PRELOAD. It opens two files in another way:
 *
 * - NAGAYA_TEMPLATE: the memory of a template, a file of root's that all its machines map privately. QEMU 7.2 opens it
 *   for writing all the same, and gives memory back by punching holes into it. Here it is opened for reading, and a hole
 *   is only made in the private copy, by the call of madvise(2) that follows. Later releases of QEMU refuse to give
 *   memory back if they are told that the file cannot be written.
 * - /dev/kvm: a sandbox has no devices of the node's. NAGAYA_KVM is the number of a descriptor that QEMU inherits.
 *
 * Nothing relies on it for safety: the file is root's and cannot be written by the tenant.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The kernel's own calls are used: the library needs no other one to be found. */
static int is_template(const char *path)
{
    const char *template = getenv("NAGAYA_TEMPLATE");
    return template && path && !strcmp(path, template);
}

static int is_open_template(int fd)
{
    struct stat own, template;
    const char *path = getenv("NAGAYA_TEMPLATE");
    return path && !fstat(fd, &own) && !stat(path, &template) && own.st_dev == template.st_dev &&
           own.st_ino == template.st_ino;
}

static int open_file(const char *path, int flags, mode_t mode)
{
    const char *kvm = getenv("NAGAYA_KVM");
    if (kvm && path && !strcmp(path, "/dev/kvm"))
        return fcntl(atoi(kvm), F_DUPFD_CLOEXEC, 3);
    if (is_template(path))
        flags = (flags & ~(O_ACCMODE | O_CREAT | O_TRUNC)) | O_RDONLY;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static mode_t mode_of(int flags, va_list rest)
{
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

int open64(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = mode_of(flags, rest);
    va_end(rest);
    return open_file(path, flags | O_LARGEFILE, mode);
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = mode_of(flags, rest);
    va_end(rest);
    return open_file(path, flags, mode);
}

int __open64_2(const char *path, int flags)
{
    return open_file(path, flags | O_LARGEFILE, 0);
}

int __open_2(const char *path, int flags)
{
    return open_file(path, flags, 0);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t len)
{
    if (is_open_template(fd))
        return 0;
    return (int)syscall(SYS_fallocate, fd, mode, offset, len);
}

int fallocate(int fd, int mode, off_t offset, off_t len)
{
    return fallocate64(fd, mode, offset, len);
}
