/* Berths: control groups, user numbers and network namespaces, which take longer to make and to remove than all else of a sandbox.
 *
 *   take -> ready, for these limits; else a free one, whose groups are made
 *   leave -> ready, where the sandbox left no trace; else its groups are removed and it is free */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "spawn.h"

struct berths {
    struct berth all[CAPACITY];
    uint32_t free[CAPACITY]; /* a stack of those that have no groups */
    uint32_t free_count;
    uint32_t ready[CAPACITY]; /* first in, first out: what the kernel still does for one that ended is then long done */
    uint32_t ready_count;
    uint32_t keep;
};

static struct berths *berths;

int berths_prepare(const struct settings *settings, uint32_t keep)
{
    berths = mmap(NULL, sizeof *berths, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (berths == MAP_FAILED)
        return -1;
    for (uint32_t i = 0; i < CAPACITY; i++) {
        struct berth *berth = &berths->all[i];
        *berth = (struct berth){.users = -1, .network = -1, .owner = settings->own_users ? settings->own_users + i : settings->owner};
        snprintf(berth->name, sizeof berth->name, "box-%u", i);
        berths->free[CAPACITY - 1 - i] = i; /* low numbers first */
    }
    berths->free_count = CAPACITY;
    berths->keep = keep < CAPACITY ? keep : CAPACITY;
    return 0;
}

static void shut(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static struct berth *pull_ready(uint32_t at)
{
    struct berth *berth = &berths->all[berths->ready[at]];
    berths->ready_count--;
    memmove(&berths->ready[at], &berths->ready[at + 1], (berths->ready_count - at) * sizeof *berths->ready);
    return berth;
}

/* Removes its groups; false when they are busy. */
static bool clear(const struct settings *settings, struct berth *berth)
{
    if (groups_remove(&settings->groups, berth->name) < 0 && errno == EBUSY)
        return false;
    shut(&berth->network);
    shut(&berth->users);
    berth->made = false;
    berth->used_us = 0;
    berths->free[berths->free_count++] = (uint32_t)(berth - berths->all);
    return true;
}

static bool fits(const struct berth *berth, const struct request *wanted)
{
    return berth->memory_bytes == wanted->memory_bytes && berth->pids == wanted->pids && berth->cpu_quota_us == wanted->cpu_quota_us;
}

struct berth *berth_take(const struct settings *settings, const struct request *wanted)
{
    for (uint32_t i = 0; i < berths->ready_count; i++)
        if (fits(&berths->all[berths->ready[i]], wanted))
            return pull_ready(i);
    if (berths->free_count == 0) {
        errno = EAGAIN;
        return NULL;
    }
    struct berth *berth = &berths->all[berths->free[--berths->free_count]];
    berth->memory_bytes = wanted->memory_bytes;
    berth->pids = wanted->pids;
    berth->cpu_quota_us = wanted->cpu_quota_us;
    if (settings->own_users)
        berth->users = users_map(settings->owner, berth->owner);
    if ((settings->own_users && berth->users < 0) || groups_make(&settings->groups, berth, wanted) < 0) {
        int saved = errno;
        clear(settings, berth);
        errno = saved;
        return NULL;
    }
    return berth;
}

bool berth_leave(const struct settings *settings, struct berth *berth, int network, bool again)
{
    if (!again || berths->keep == 0 || !groups_clean(&settings->groups, berth->name, &berth->used_us)) {
        if (!clear(settings, berth))
            return false;
        shut(&network);
        return true;
    }
    berth->made = true;
    berth->network = network;
    if (berths->ready_count >= berths->keep) {
        struct berth *oldest = pull_ready(0);
        if (!clear(settings, oldest))
            berths->ready[berths->ready_count++] = (uint32_t)(oldest - berths->all);
    }
    berths->ready[berths->ready_count++] = (uint32_t)(berth - berths->all);
    return true;
}
