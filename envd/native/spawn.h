/* The spawner of namespaces sandboxes: what its parts share, and its control protocol (envd/backends/namespaces/spawner.py says the same in Python).
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

#include "libc.h"

#define HIDDEN "/.scratch"
#define HIDDEN_PROC HIDDEN "/proc"
#define HIDDEN_TEMPLATES HIDDEN "/templates"
#define HIDDEN_RUNTIMES HIDDEN "/runtimes"
#define HIDDEN_BOX HIDDEN "/box"     /* where a sandbox's tmpfs is while it is being set up */
#define HIDDEN_LOWER HIDDEN "/lower" /* where its template is meanwhile */
#define HIDDEN_VIEW HIDDEN "/view"   /* where its root is put together */
#define HIDDEN_NONE HIDDEN "/none"   /* empty */
#define MAX_NAME 96
#define PATH_SIZE 1024
#define MOST_SYSTEM 32
#define MOST_PACKAGES 256
#define CAPACITY 16384
#define PROXY_PORT 3128 /* envd/backends/namespaces/proxied.py has it too */

enum request_kind {
    REQUEST_CREATE = 1,   /* descriptors: the agent's stream; with FLAG_RESTORE also the archive to read */
    REQUEST_KILL = 2,     /* end it; with FLAG_CHANGED its berth is not used again; answered by REPORT_ENDED, also where it is not known */
    REQUEST_ARCHIVE = 3,  /* descriptor: the file that its changed files are written to, as a tar; answered by REPORT_ARCHIVED */
    REQUEST_LEAVE = 4,    /* end all of them and then itself, and leave the run directory to the server */
};

/* FLAG_ROOT: the runtime is a whole root file system. FLAG_PROXY: process 1 sends one byte on the agent's stream first, with a listening socket of its network: see network_offer */
enum request_flags { FLAG_READ_ONLY = 1, FLAG_RESTORE = 2, FLAG_CHANGED = 4, FLAG_PROXY = 8, FLAG_ROOT = 16 };

struct request {
    uint32_t kind;
    uint32_t box; /* the server's number of it, never used twice */
    uint64_t memory_bytes;
    uint64_t disk_bytes;
    uint32_t pids;
    uint32_t cpu_quota_us; /* of each CPU_PERIOD_US */
    uint32_t open_files;
    uint32_t flags;
    char template[MAX_NAME];
    char host_name[MAX_NAME];
    char runtime[MAX_NAME]; /* packages, or a root, that it sees instead of the host's; empty: the host's */
};

enum report_kind {
    REPORT_READY = 1,    /* once, at the start; words: the limits that are enforced and the walls that stand, by spaces */
    REPORT_STARTED = 2,  /* value: its process 1; words: the name of its control groups, and the microseconds of CPU time that they counted before */
    REPORT_FAILED = 3,   /* it could not be set up; words say why; REPORT_ENDED follows */
    REPORT_ENDED = 4,    /* nothing is left of it: value: the wait status of process 1; words: how often limits were hit, as `memory N pids N sockets N` */
    REPORT_ARCHIVED = 5, /* value: 0, or what went wrong: words */
    REPORT_SOCKETS = 7,  /* it is ended, since its sockets held more than it may have */
    REPORT_REFUSED = 6,  /* words: a system call that it was refused (spawn_calls.h); value: how many were since the last such report */
};

struct report {
    uint32_t kind;
    uint32_t box;
    int64_t value;
    char words[240];
};

#define SOCKET_SHARE 8 /* of a sandbox's memory, what its sockets' buffers may hold beside it where that is counted apart */
#define CPU_PERIOD_US 100000

/* Directory descriptors of our own groups, -1 where there is none. */
struct groups {
    int memory, pids, cpu; /* v1 */
    int unified;           /* v2 */
    bool unified_limits;   /* v2 carries the controllers; else it only freezes and counts */
};

struct settings {
    struct groups groups;
    uint32_t owner;     /* the user and group here that owns templates, and that a sandbox's root is where it has no number of its own */
    uint32_t own_users; /* the first of the numbers that sandboxes' roots are; 0: they all are `owner` */
    int landlock;       /* the ABI, 0 where there is none */
    bool reuses;        /* berths are used again */
    const char *system[MOST_SYSTEM]; /* directories that sandboxes see, by their paths */
    size_t system_count;
    const char *packages[MOST_PACKAGES]; /* directories of the host's packages; a runtime takes the place of the first and hides the others */
    size_t packages_count;
};

/* What is costly to make and outlives a sandbox: control groups, a user number, a network namespace. Those of a sandbox that left no trace in
 * them are used again, for the same limits. */
struct berth {
    char name[24];  /* of its control groups */
    uint32_t owner; /* the user and group here that a sandbox's root is */
    int users;      /* a user namespace by which templates' owner appears as that number; -1: they are the same */
    int network;    /* while it is ready: the network namespace of the one before, if there is one; else -1 */
    bool made;      /* the groups are there, with these limits */
    uint64_t memory_bytes;
    uint32_t pids, cpu_quota_us;
    uint64_t used_us; /* CPU time that the ones before used */
};

/* spawn_berths.c */
int berths_prepare(const struct settings *settings, uint32_t keep); /* keep: how many that are ready are held */
struct berth *berth_take(const struct settings *settings, const struct request *wanted); /* NULL with errno */
/* False: its groups are busy, ask again. network: of the sandbox that ended. again: it may be used again. */
bool berth_leave(const struct settings *settings, struct berth *berth, int network, bool again);

/* spawn_groups.c. All return 0 or -1 with errno. */
int groups_make(const struct groups *groups, const struct berth *berth, const struct request *wanted); /* in the spawner */
int groups_open(const struct groups *groups, const struct berth *berth); /* the descriptor to clone into, or -1 where there is none */
int groups_enter(const struct groups *groups, const struct berth *berth, const struct request *wanted); /* in process 1: makes those of v1 too */
int groups_remove(const struct groups *groups, const char *name); /* EBUSY: its last process is not gone yet */
void groups_remove_all(const struct groups *groups);
void groups_events(const struct groups *groups, const char *name, char *words, size_t size);
unsigned long long groups_socket_bytes(const struct groups *groups, const char *name); /* that are charged to it */
bool groups_clean(const struct groups *groups, const char *name, uint64_t *used_us); /* whether it is as good as new but for CPU time */

/* spawn_network.c */
void network_prepare(void);                   /* once, in the spawner */
int network_join(int before);                 /* in process 1: the namespace of a sandbox before where nothing is left of it there, else a new one */
int network_of(pid_t pid);                    /* -1 where there is none */
int network_offer(int stream);                /* in process 1: listens on PROXY_PORT of its loopback and sends that socket; 0, or -1 with errno */

/* spawn_users.c */
int users_map(uint32_t from, uint32_t to);    /* a user namespace as mounts are mapped by; -1 with errno */
uint32_t users_prepare(uint32_t owner);       /* the first of CAPACITY numbers that sandboxes' roots can be; 0 where that does not work */
int users_mount(const char *template, int users); /* a template as a detached mount, read-only */
int users_write_map(pid_t pid, const char *map, bool deny_groups);

/* spawn_walls.c: confine this process and what it starts, for good. */
int drop_capabilities(uint32_t kept); /* kept: a mask */
int limit_resources(const struct settings *settings, const struct request *wanted);
int restrict_files(int abi); /* Landlock */
int landlock_abi(void);

/* spawn_filter.c: seccomp; needs no_new_privs */
void prepare_filter(void);                /* once, in the spawner: its children inherit it */
int filter_calls(void);                   /* refused calls fail */
int print_filter(int out);               /* the program of those, as an array of struct sock_filter */
int filter_calls_watched(int *listener);  /* the holder of the listener answers them; it is -1 where kernels can't do that, and they fail */

/* A sandbox as whoever looks at its sockets knows it. */
struct tenant {
    uint32_t box;
    pid_t pid; /* its process 1 */
    uint64_t memory_bytes;
    char group[24];
};

/* spawn_watch.c: a process that answers refused calls, so that no flood of them reaches the spawner */
int watch_start(int control);                            /* the socket that listeners are given it by; -1 with errno */
void watch_add(int watcher, uint32_t box, int listener);

/* spawn_sockets.c: a process that ends sandboxes whose sockets hold too much */
int sockets_start(int control, const struct groups *groups); /* the socket that it is told of sandboxes by; -1 with errno */
void sockets_add(int looker, const struct tenant *tenant);

/* spawn_routing.c: in the watcher */
int routing_prepare(void);
int routing_open(pid_t pid, int type); /* a routing socket of that process's network; -1 with errno, also where it has many sockets */

/* spawn_pass.c */
ssize_t pass(int socket, const void *data, size_t size, int fd);                       /* fd: -1 for none */
ssize_t receive(int socket, void *data, size_t size, int flags, int fds[2]);           /* fds: those that came with it, else -1 */

/* spawn_box.c */
int make_scratch(const struct berth *berth, const struct request *wanted); /* the detached tmpfs of a sandbox; -1 with errno */
_Noreturn void run_box(const struct settings *settings, const struct request *wanted, const struct berth *berth, int stream, int archive,
                       int scratch, int sync);

/* spawn_root.c, in process 1 */
int mount_template(const char *target); /* what is at HIDDEN_LOWER, so that no mount names where it is on the host */
/* NULL, or what it could not do: beginning with "e" words of their own, else errno says why. */
const char *root_enter(const struct settings *settings, const struct request *wanted, const struct berth *berth, int scratch, int archive);

/* spawn_archive.c */
void archive_unpack(uint32_t owner, int archive, const char **failure); /* in process 1: into HIDDEN_BOX; failure: NULL, or words */
void archive_write(uint32_t id, int scratch, int out);                  /* in a child; answered by REPORT_ARCHIVED */
void archive_reaped(pid_t pid, int status);                             /* a child of ours that is no sandbox has ended */

/* spawn_life.c: the sandboxes there are. Reports go to `control`, events of sandboxes come by `loop`, listeners go to `watcher`. */
int life_prepare(const struct settings *settings, int control, int loop, int watcher, int looker);
void life_create(const struct request *wanted, int stream, int source);
void life_hear(uint32_t id); /* its process 1 has said something */
void life_end(uint32_t id, bool changed);
void life_archive(uint32_t id, int out);
void life_reap(void);
bool life_lingers(void); /* whether some have ended whose groups could not be removed yet */
void life_bury(void);    /* tries it again */
void life_finish(void);  /* ends them all */

void report(enum report_kind kind, uint32_t box, int64_t value, const char *words); /* to the server */

#endif
