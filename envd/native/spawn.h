/* The spawner of namespaces sandboxes: what its parts share, and its control protocol (envd/backends/spawner.py says the same in Python).
 *
 * One single-threaded process. It is started in a mount namespace whose root is what a sandbox sees (envd/sandbox/rootfs.py), with the things
 * that no sandbox may see below HIDDEN; each sandbox gets a copy of that namespace in which HIDDEN is unmounted. So a start binds no
 * directory tree anew and changes no root.
 *
 * The control connection is a SOCK_SEQPACKET pair: each datagram is one struct request or one struct report. */
#ifndef ENVD_SPAWN_H
#define ENVD_SPAWN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define HIDDEN "/.scratch"
#define HIDDEN_PROC HIDDEN "/proc"
#define HIDDEN_TEMPLATES HIDDEN "/templates"
#define HIDDEN_BOX HIDDEN "/box" /* where a sandbox's tmpfs is while it is being set up */
#define MAX_NAME 96

enum request_kind {
    REQUEST_CREATE = 1,   /* descriptors: the agent's stream; with FLAG_RESTORE also the archive to read */
    REQUEST_KILL = 2,     /* end it; answered by REPORT_ENDED, also where it is not known */
    REQUEST_ARCHIVE = 3,  /* descriptor: the file that its changed files are written to, as a tar; answered by REPORT_ARCHIVED */
    REQUEST_LEAVE = 4,    /* end all of them and then itself, and leave the run directory to the server */
};

enum request_flags { FLAG_READ_ONLY = 1, FLAG_RESTORE = 2 };

struct request {
    uint32_t kind;
    uint32_t box; /* the server's number of it, never used twice */
    uint64_t memory_bytes;
    uint64_t disk_bytes;
    uint32_t pids;
    uint32_t cpu_quota_us; /* of each CPU_PERIOD_US */
    uint32_t open_files;
    uint32_t flags;
    char name[MAX_NAME]; /* of its control groups */
    char template[MAX_NAME];
    char host_name[MAX_NAME];
};

enum report_kind {
    REPORT_READY = 1,    /* once, at the start; words: the limits that are enforced and the walls that stand, by spaces */
    REPORT_STARTED = 2,  /* value: its process 1; its agent reads its stream from now on */
    REPORT_FAILED = 3,   /* it could not be set up; words say why; REPORT_ENDED follows */
    REPORT_ENDED = 4,    /* nothing is left of it: value: the wait status of process 1; words: how often limits were hit, as `memory N pids N` */
    REPORT_ARCHIVED = 5, /* value: 0, or what went wrong: words */
};

struct report {
    uint32_t kind;
    uint32_t box;
    int64_t value;
    char words[240];
};

#define CPU_PERIOD_US 100000

/* Directory descriptors of our own groups, -1 where there is none. */
struct groups {
    int memory, pids, cpu; /* v1 */
    int unified;           /* v2 */
    bool unified_limits;   /* v2 carries the controllers; else it only freezes and counts */
};

struct settings {
    struct groups groups;
    uint32_t owner; /* the user and group here that a sandbox's root is */
    int landlock;   /* the ABI, 0 where there is none */
};

/* spawn_groups.c. All return 0 or -1 with errno. */
int groups_make(const struct groups *groups, const struct request *wanted, int *unified_out); /* in the spawner */
int groups_enter(const struct groups *groups, const struct request *wanted);                  /* in process 1: makes those of v1 too */
int groups_remove(const struct groups *groups, const char *name); /* EBUSY: its last process is not gone yet */
void groups_remove_all(const struct groups *groups);
void groups_events(const struct groups *groups, const char *name, char *words, size_t size);

/* spawn_walls.c: confine this process and what it starts, for good. */
int drop_capabilities(void);
int limit_resources(const struct settings *settings, const struct request *wanted);
int restrict_files(int abi); /* Landlock */
int landlock_abi(void);
void prepare_filter(void); /* once, in the spawner: its children inherit it */
int filter_calls(void);    /* seccomp; needs no_new_privs */

/* spawn_box.c */
int make_scratch(const struct settings *settings, const struct request *wanted); /* the detached tmpfs of a sandbox; -1 with errno */
_Noreturn void run_box(const struct settings *settings, const struct request *wanted, int stream, int archive, int scratch, int sync);
_Noreturn void write_archive(int scratch, int out); /* in a child of the spawner */

#endif
