/* The table of the sandboxes that there are. */
#ifndef ENVD_SPAWN_TABLE_H
#define ENVD_SPAWN_TABLE_H

#include "spawn.h"

struct box {
    int sync;    /* while it starts; else -1 */
    int scratch; /* its tmpfs: what an archive is made of */
    int network; /* its network namespace, for the next */
    bool killed; /* the server asked for it */
    bool ended;
    bool again; /* its berth may be used again */
    bool proxied; /* others than the sandbox hold a socket of its network, which is not used again */
    int status;
    int64_t ended_ms;
    struct berth *berth;
    char events[96];
};

/* Side by side, so that a search reads little. Not inherited by sandboxes: they would keep copies of the pages that change. */
struct table {
    uint32_t count;
    uint32_t lingering; /* ended, with groups that could not be removed yet */
    uint32_t ids[CAPACITY];
    pid_t pids[CAPACITY];
    struct box boxes[CAPACITY];
};

extern struct table *table;

int table_prepare(void);
uint32_t table_find(uint32_t id); /* table->count where it is not there */
uint32_t table_find_pid(pid_t pid);
void table_forget(uint32_t i); /* another takes its index */

#endif
