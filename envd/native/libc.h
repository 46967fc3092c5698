/* What glibc declares and musl does not, which `ziglang` links: wrappers of system calls, and their numbers. */
#ifndef ENVD_LIBC_H
#define ENVD_LIBC_H

#include <stdlib.h> /* defines __GLIBC__ where it is that one */

#ifndef __GLIBC__

#include <asm/unistd.h>
#include <linux/mount.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
static inline int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    return (int)syscall(__NR_renameat2, from, old, to, new, flags);
}
#endif

static inline int close_range(unsigned first, unsigned last, int flags) { return (int)syscall(__NR_close_range, first, last, flags); }

static inline int fsopen(const char *name, unsigned flags) { return (int)syscall(__NR_fsopen, name, flags); }
static inline int fsconfig(int fd, unsigned command, const char *key, const void *value, int aux) {
    return (int)syscall(__NR_fsconfig, fd, command, key, value, aux);
}
static inline int fsmount(int fd, unsigned flags, unsigned attributes) { return (int)syscall(__NR_fsmount, fd, flags, attributes); }
static inline int move_mount(int from, const char *source, int to, const char *target, unsigned flags) {
    return (int)syscall(__NR_move_mount, from, source, to, target, flags);
}

#ifndef SYS_quotactl_fd
#define SYS_quotactl_fd __NR_quotactl_fd
#endif

#endif
#endif
