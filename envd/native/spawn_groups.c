/* Control groups of a sandbox: v1, v2, or v1 with a v2 hierarchy without controllers, which still freezes, kills and counts. */
#include <errno.h>
#include <fcntl.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "spawn.h"

static int put(int base, const char *group, const char *file, const char *value)
{
    char path[2 * MAX_NAME];
    snprintf(path, sizeof path, "%s/%s", group, file);
    int fd = openat(base, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t done = write(fd, value, strlen(value));
    int saved = errno;
    close(fd);
    errno = saved;
    return done < 0 ? -1 : 0;
}

static int put_number(int base, const char *group, const char *file, unsigned long long value)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", value);
    return put(base, group, file, text);
}

int groups_make(const struct groups *groups, const struct berth *berth, const struct request *wanted)
{
    const char *name = berth->name;
    int base = groups->unified;
    if (base < 0)
        return 0;
    if (mkdirat(base, name, 0755) < 0)
        return -1;
    if (!groups->unified_limits)
        return 0;
    char quota[64];
    snprintf(quota, sizeof quota, "%u %u", wanted->cpu_quota_us, CPU_PERIOD_US);
    if (put_number(base, name, "memory.max", wanted->memory_bytes) < 0 || put_number(base, name, "pids.max", wanted->pids) < 0
        || put(base, name, "cpu.max", quota) < 0)
        return -1;
    if (put(base, name, "memory.swap.max", "0") < 0 && errno != ENOENT) /* a kernel without swap accounting */
        return -1;
    return 0;
}

int groups_open(const struct groups *groups, const struct berth *berth)
{
    return groups->unified < 0 ? -1 : openat(groups->unified, berth->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* Process 1 moves itself, through `tasks`: the kernel moves a single thread that asks for itself without waiting for a grace period, while moving
 * another process through cgroup.procs waits for one, which takes up to a millisecond a controller. */
static int enter(int base, const char *name)
{
    return put(base, name, "tasks", "0");
}

#define SOCKETS "memory.kmem.tcp."
#define SOCKET_SLACK (256 * 1024) /* bytes: what is charged at once, and refused when it would pass the limit */

static int make_memory(int base, const char *name, const struct request *wanted)
{
    if (mkdirat(base, name, 0755) < 0 || put_number(base, name, "memory.limit_in_bytes", wanted->memory_bytes) < 0)
        return -1;
    if (put_number(base, name, "memory.memsw.limit_in_bytes", wanted->memory_bytes) < 0 && errno != ENOENT && errno != EACCES)
        return -1; /* a kernel without swap accounting has no such file */
    /* v1 counts what sockets hold beside the rest; without a limit it does not count it at all */
    if (put_number(base, name, SOCKETS "limit_in_bytes", wanted->memory_bytes / SOCKET_SHARE) < 0 && errno != ENOENT)
        return -1;
    return 0;
}

static int make_pids(int base, const char *name, const struct request *wanted)
{
    return mkdirat(base, name, 0755) < 0 ? -1 : put_number(base, name, "pids.max", wanted->pids);
}

static int make_cpu(int base, const char *name, const struct request *wanted)
{
    if (mkdirat(base, name, 0755) < 0 || put_number(base, name, "cpu.cfs_period_us", CPU_PERIOD_US) < 0)
        return -1;
    return put_number(base, name, "cpu.cfs_quota_us", wanted->cpu_quota_us);
}

int groups_enter(const struct groups *groups, const struct berth *berth, const struct request *wanted)
{
    const struct {
        int base;
        int (*make)(int base, const char *name, const struct request *wanted);
    } each[] = {{groups->memory, make_memory}, {groups->pids, make_pids}, {groups->cpu, make_cpu}};
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        if (each[i].base < 0)
            continue;
        if (!berth->made && each[i].make(each[i].base, berth->name, wanted) < 0)
            return -1;
        if (enter(each[i].base, berth->name) < 0)
            return -1;
    }
    return 0;
}

int groups_remove(const struct groups *groups, const char *name)
{
    const int bases[] = {groups->memory, groups->pids, groups->cpu, groups->unified};
    int worst = 0;
    for (size_t i = 0; i < sizeof bases / sizeof *bases; i++)
        if (bases[i] >= 0 && unlinkat(bases[i], name, AT_REMOVEDIR) < 0 && errno != ENOENT)
            worst = errno;
    errno = worst;
    return worst ? -1 : 0;
}

/* The number after `key` in a file of lines `key number`; with an empty key the only one. 0 where there is none. */
static unsigned long long count(int base, const char *group, const char *file, const char *key)
{
    char path[2 * MAX_NAME], text[512];
    snprintf(path, sizeof path, "%s/%s", group, file);
    int fd = base < 0 ? -1 : openat(base, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    text[size < 0 ? 0 : size] = 0;
    char *found = strstr(text, key);
    return found ? strtoull(found + strlen(key), NULL, 10) : 0;
}

void groups_events(const struct groups *groups, const char *name, char *words, size_t size)
{
    int memory = groups->unified_limits ? groups->unified : groups->memory;
    int pids = groups->unified_limits ? groups->unified : groups->pids;
    const char *file = groups->unified_limits ? "memory.events" : "memory.oom_control";
    /* v1 counts no failure of it; of v2 kernels from 6.19 on do */
    unsigned long long sockets = groups->unified_limits ? count(memory, name, "memory.events", "sock_throttled ")
                                                        : count(memory, name, SOCKETS "max_usage_in_bytes", "") + SOCKET_SLACK
                                                              >= count(memory, name, SOCKETS "limit_in_bytes", "");
    snprintf(words, size, "memory %llu pids %llu sockets %llu", count(memory, name, file, "oom_kill "), count(pids, name, "pids.events", "max "), sockets);
}

unsigned long long groups_socket_bytes(const struct groups *groups, const char *name)
{
    return groups->unified_limits ? count(groups->unified, name, "memory.stat", "sock ") : count(groups->memory, name, SOCKETS "usage_in_bytes", "");
}

#define LEFT_OVER (2u * 1024 * 1024) /* bytes: what the kernel has cached for a group, and gives back under pressure */

bool groups_clean(const struct groups *groups, const char *name, uint64_t *used_us)
{
    int memory = groups->unified_limits ? groups->unified : groups->memory;
    char events[96];
    groups_events(groups, name, events, sizeof events);
    *used_us = count(groups->unified, name, "cpu.stat", "usage_usec ");
    return strcmp(events, "memory 0 pids 0 sockets 0") == 0 && count(groups->unified, name, "cgroup.events", "frozen ") == 0
           && count(memory, name, groups->unified_limits ? "memory.current" : "memory.usage_in_bytes", "") < LEFT_OVER;
}

static void empty(int base)
{
    int again = base < 0 ? -1 : openat(base, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *listing = again < 0 ? NULL : fdopendir(again);
    if (!listing) {
        if (again >= 0)
            close(again);
        return;
    }
    for (struct dirent *entry; (entry = readdir(listing));)
        if (entry->d_type == DT_DIR && entry->d_name[0] != '.')
            unlinkat(base, entry->d_name, AT_REMOVEDIR);
    closedir(listing);
}

void groups_remove_all(const struct groups *groups)
{
    empty(groups->memory);
    empty(groups->pids);
    empty(groups->cpu);
    empty(groups->unified);
}
