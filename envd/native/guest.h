/* The agent in a sandbox, as what starts sandboxes links it in. */
#ifndef ENVD_GUEST_H
#define ENVD_GUEST_H

#include <stdbool.h>

struct guest_config {
    const char *workspace;  /* absolute path of the workspace as the sandbox sees it */
    const char *scratch;    /* a private directory outside the workspace, made (mode 0700) where missing; the shell's fifos go there */
    char *const *env;       /* NULL-terminated K=V that all processes start with, below what INIT gives; NULL: this process's own */
    bool is_init;           /* process 1 of its pid namespace: the kernel ends all with it. Else it is a subreaper and kills what it started */
    bool owns_machine;      /* may set the clock, mix the kernel's entropy with credit, name the host (a VM's init) */
    bool escaped;           /* the stream is byte-stuffed and can be reset (protocol.h), for serial lines and restored snapshots */
    bool stays;             /* with `escaped`: where the line ends, wait for the next server instead of ending */
};

/* Serves one stream until it ends, then ends all that was started. fd_in and fd_out may be the same descriptor; every other descriptor is closed
 * and 0, 1 and 2 become /dev/null. Single-threaded: call it in a process of its own (after fork), with no other thread, and exit with what
 * it returns: 0 the stream ended, 1 the peer broke the protocol, 2 it could not start. */
int guest_main(int fd_in, int fd_out, const struct guest_config *config);

#endif
