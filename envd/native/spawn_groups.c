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

int groups_make(const struct groups *groups, const struct request *wanted, int *unified_out)
{
    *unified_out = -1;
    if (groups->unified < 0)
        return 0;
    int base = groups->unified;
    if (mkdirat(base, wanted->name, 0755) < 0)
        return -1;
    if (groups->unified_limits) {
        char quota[64];
        snprintf(quota, sizeof quota, "%u %u", wanted->cpu_quota_us, CPU_PERIOD_US);
        if (put_number(base, wanted->name, "memory.max", wanted->memory_bytes) < 0
            || put_number(base, wanted->name, "pids.max", wanted->pids) < 0 || put(base, wanted->name, "cpu.max", quota) < 0)
            return -1;
        if (put(base, wanted->name, "memory.swap.max", "0") < 0 && errno != ENOENT) /* a kernel without swap accounting */
            return -1;
    }
    *unified_out = openat(base, wanted->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *unified_out < 0 ? -1 : 0;
}

/* Process 1 moves itself, through `tasks`: the kernel moves a single thread that asks for itself without waiting for a grace period, while moving
 * another process through cgroup.procs waits for one, which takes up to a millisecond a controller. */
static int enter(int base, const char *name)
{
    return put(base, name, "tasks", "0");
}

int groups_enter(const struct groups *groups, const struct request *wanted)
{
    const char *name = wanted->name;
    if (groups->memory >= 0) {
        if (mkdirat(groups->memory, name, 0755) < 0
            || put_number(groups->memory, name, "memory.limit_in_bytes", wanted->memory_bytes) < 0)
            return -1;
        if (put_number(groups->memory, name, "memory.memsw.limit_in_bytes", wanted->memory_bytes) < 0 && errno != ENOENT
            && errno != EACCES) /* a kernel without swap accounting has no such file */
            return -1;
        if (enter(groups->memory, name) < 0)
            return -1;
    }
    if (groups->pids >= 0) {
        if (mkdirat(groups->pids, name, 0755) < 0 || put_number(groups->pids, name, "pids.max", wanted->pids) < 0
            || enter(groups->pids, name) < 0)
            return -1;
    }
    if (groups->cpu >= 0) {
        if (mkdirat(groups->cpu, name, 0755) < 0 || put_number(groups->cpu, name, "cpu.cfs_period_us", CPU_PERIOD_US) < 0
            || put_number(groups->cpu, name, "cpu.cfs_quota_us", wanted->cpu_quota_us) < 0 || enter(groups->cpu, name) < 0)
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

/* The number after `key` in a file of lines `key number`. 0 where there is none. */
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
    snprintf(words, size, "memory %llu pids %llu", count(memory, name, file, "oom_kill "), count(pids, name, "pids.events", "max "));
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
