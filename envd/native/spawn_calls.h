/* Which system calls a sandbox may make, for the filter that stops the others (spawn_filter.c) and for whoever answers them (spawn_watch.c). */
#ifndef ENVD_SPAWN_CALLS_H
#define ENVD_SPAWN_CALLS_H

#include <linux/audit.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>

#include "libc.h"

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "the spawner's system call filter knows x86_64 and aarch64 only"
#endif

#define KNOWN_CALLS 512      /* beyond every number in the table */
#define X32_CALLS 0x40000000 /* x86_64 programs may ask for these instead, which have other numbers */

/* What is done about a call. */
enum action {
    ALLOW,
    REFUSE,  /* EPERM */
    SILENT,  /* the same, and told to nobody */
    ABSENT,  /* ENOSYS: of calls that are not in the table too */
    NO_SUCH, /* the same, and told to nobody */
    FOREIGN, /* of another ABI, whose numbers mean other calls */
    /* by their arguments */
    CLONE,       /* no new namespaces */
    UNSHARE,     /* the same */
    SOCKET,      /* families and protocols that programs use; routing sockets are made by the watcher, which counts them */
    PAIR,        /* pairs of unix sockets */
    BUFFERS,     /* setsockopt: SO_RCVBUF succeeds without an effect, since memory of netlink sockets is charged to nobody */
    TERMINAL,    /* ioctl: nothing is typed into terminals */
    NOTICE,      /* fcntl: no leases and no directory notification */
    PERSONALITY, /* those of Docker's profile */
    HUGE_MAP,    /* no huge pages, which no memory limit counts, in mmap */
    HUGE_FILE,   /* in memfd_create */
    HUGE_SHARED, /* in shmget */
    FIRST,       /* not of process 1, by the first argument */
    LIMITS,      /* prlimit64: limits of process 1 may be read and not changed */
    PRIORITY,    /* setpriority: not of process 1, of its group or of its user */
    IO_PRIORITY, /* ioprio_set: the same */
    /* the rest is shown: the kernel gives nobody in a sandbox what it asks for, and says so in its own words */
    REAL_TIME, /* sched_setscheduler; besides, refused of process 1 */
    IDS_1,     /* users and groups but the one that there is, by so many arguments */
    IDS_2,
    IDS_3,
    DEVICE_1, /* a device made; the number of the argument with its mode */
    DEVICE_2,
    SIGNAL, /* to process 1, which takes none */
};

enum action action_of(uint32_t number);

struct refusal {
    const char *name; /* of the call */
    int error;        /* what it is answered; 0: the kernel answers it */
    int socket;       /* a routing socket of this type is wanted; else -1 */
};

/* What becomes of a call that the filter stopped. */
struct refusal refusal_of(const struct seccomp_data *asked);

#endif
