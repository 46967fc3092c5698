/* Which system calls a sandbox may not make, for the filter that stops them (spawn_filter.c) and for whoever answers them (spawn_watch.c). */
#ifndef ENVD_SPAWN_CALLS_H
#define ENVD_SPAWN_CALLS_H

#include <linux/audit.h>
#include <linux/seccomp.h>
#include <stdint.h>

#include "libc.h"

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "the spawner's system call filter knows x86_64 and aarch64 only"
#endif

#define KNOWN_CALLS 512      /* beyond any number that a kernel has today; later ones are allowed */
#define X32_CALLS 0x40000000 /* x86_64 programs may ask for these instead, which have other numbers */

/* What is done about a call. */
enum action {
    ALLOW,
    REFUSE,
    NO_SUCH,  /* refused, and told to nobody: C libraries ask for it in vain as a matter of course */
    FOREIGN,  /* of another ABI, whose numbers mean other calls */
    CLONE,    /* refused for some arguments, from here on */
    UNSHARE,
    SOCKET,
    TERMINAL,
    IDS_1,    /* shown for some arguments, from here on: for these the kernel gives nobody in a sandbox what it asks for, and goes on to say so in
                 its own words. Users and groups but the one that there is, by so many arguments */
    IDS_2,
    IDS_3,
    DEVICE_1, /* a device made; the number of the argument with its mode */
    DEVICE_2,
    REAL_TIME,
    SIGNAL,   /* to process 1, which takes none */
};
#define FIRST_SHOWN IDS_1

enum action action_of(uint32_t number);

struct refusal {
    const char *name; /* of the call */
    int error;        /* what it is answered; 0: the kernel answers it */
};

struct refusal refusal_of(const struct seccomp_data *asked); /* of a call that the filter stopped */

#endif
