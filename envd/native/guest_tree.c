/* The processes below one, and killing those that one call started. What was there before lives on, with what it started. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

#define ROUNDS 50

struct entry {
    pid_t pid, parent;
    uint64_t start;
    bool below, spared;
};

struct table {
    struct entry *list;
    size_t count, room;
};

void pids_add(struct pids *pids, pid_t pid) {
    if (pids->count == pids->room) {
        pids->room = 2 * pids->room + 16;
        pids->list = reallocate(pids->list, pids->room * sizeof *pids->list);
    }
    pids->list[pids->count++] = pid;
}

void pids_free(struct pids *pids) {
    free(pids->list);
    *pids = (struct pids){NULL, 0, 0};
}

static bool has_pid(const struct pids *pids, pid_t pid) {
    for (size_t i = 0; i < pids->count; i++)
        if (pids->list[i] == pid) return true;
    return false;
}

static ssize_t read_proc(const char *path, char *into, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t count = read(fd, into, size - 1);
    close(fd);
    into[count > 0 ? count : 0] = 0;
    return count;
}

/* state, parent and start of a process; false where it is gone or a zombie. */
static bool read_stat(pid_t pid, struct entry *entry) {
    char path[32], text[512], state = 'Z';
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    if (read_proc(path, text, sizeof text) <= 0) return false;
    char *after = strrchr(text, ')'); /* the name before it may hold anything */
    int parent = 0;
    unsigned long long start = 0;
    if (after == NULL ||
        sscanf(after + 1, " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &parent, &start) != 3)
        return false;
    *entry = (struct entry){pid, parent, start, false, false};
    return state != 'Z' && state != 'X';
}

uint64_t start_ticks(pid_t pid) {
    struct entry entry;
    return read_stat(pid, &entry) ? entry.start : 0;
}

static void scan(struct table *table) {
    table->count = 0;
    DIR *directory = opendir("/proc");
    if (directory == NULL) return;
    for (struct dirent *each; (each = readdir(directory)) != NULL;) {
        struct entry entry;
        if (!isdigit((unsigned char)each->d_name[0]) || !read_stat(atoi(each->d_name), &entry)) continue;
        if (table->count == table->room) {
            table->room = 2 * table->room + 64;
            table->list = reallocate(table->list, table->room * sizeof *table->list);
        }
        table->list[table->count++] = entry;
    }
    closedir(directory);
}

static struct entry *find(const struct table *table, pid_t pid) { /* /proc is in the order of pids */
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table->list[middle].pid < pid) low = middle + 1;
        else high = middle;
    }
    return low < table->count && table->list[low].pid == pid ? &table->list[low] : NULL;
}

static int by_pid(const void *left, const void *right) {
    pid_t first = ((const struct entry *)left)->pid, second = ((const struct entry *)right)->pid;
    return (first > second) - (first < second);
}

/* Marks all below root, and of those the spared with all that is below them. */
static void mark(struct table *table, pid_t root, const struct pids *spared) {
    qsort(table->list, table->count, sizeof *table->list, by_pid);
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < table->count; i++) {
            struct entry *entry = &table->list[i], *parent = find(table, entry->parent);
            bool below = entry->parent == root || (parent != NULL && parent->below);
            bool kept = (spared != NULL && has_pid(spared, entry->pid)) || (parent != NULL && parent->spared);
            if (below > entry->below || (kept && below && !entry->spared)) {
                entry->below = below;
                entry->spared = kept && below;
                changed = true;
            }
        }
    }
}

/* The kernel's own lists of children, where it keeps them: a few reads where /proc has an entry a process of the machine. */
static bool add_children(pid_t pid, pid_t thread, struct pids *into) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)pid, (int)thread);
    ssize_t size = read_proc(path, text, sizeof text);
    if (size < 0 || size == (ssize_t)sizeof text - 1) return false;
    for (char *at = text, *end; (end = strchr(at, ' ')) != NULL; at = end + 1) pids_add(into, atoi(at));
    return true;
}

static bool walk_children(pid_t root, struct pids *into) {
    if (!add_children(root, root, into)) return false;
    for (size_t i = 0; i < into->count; i++) {
        pid_t pid = into->list[i];
        char path[32];
        struct stat about;
        snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
        if (stat(path, &about) != 0) continue; /* ended meanwhile */
        if (about.st_nlink > 3) return false;  /* of several threads each has children */
        if (!add_children(pid, pid, into) && access(path, F_OK) == 0) return false;
    }
    return true;
}

void tree_below(pid_t root, struct pids *into) {
    if (walk_children(root, into)) return;
    into->count = 0;
    struct table table = {NULL, 0, 0};
    scan(&table);
    mark(&table, root, NULL);
    for (size_t i = 0; i < table.count; i++)
        if (table.list[i].below) pids_add(into, table.list[i].pid);
    free(table.list);
}

static bool doomed(const struct entry *entry) { return entry->below && !entry->spared; }

static size_t signal_all(const struct table *table, int number) {
    size_t count = 0;
    for (size_t i = 0; i < table->count; i++)
        if (doomed(&table->list[i]) && kill(table->list[i].pid, number) == 0) count++;
    return count;
}

/* Repeats until none is left, so that nothing escapes by forking while it is hunted; each round stops before it kills. What is dying may take
 * some time to be gone: it can't fork any more. */
void tree_kill(pid_t root, const struct pids *spared) {
    struct table table = {NULL, 0, 0};
    for (int round = 0; round < ROUNDS; round++) {
        scan(&table);
        mark(&table, root, spared);
        if (signal_all(&table, SIGSTOP) == 0) break;
        signal_all(&table, SIGKILL);
        if (round > 2) nanosleep(&(struct timespec){0, 500000}, NULL);
    }
    free(table.list);
}

int tree_signal(pid_t root, int number) {
    struct table table = {NULL, 0, 0};
    scan(&table);
    mark(&table, root, NULL);
    size_t count = signal_all(&table, number);
    free(table.list);
    return count > 0 ? 0 : ESRCH;
}

void tree_kill_orphans_since(uint64_t start, const struct pids *spared) {
    struct table table = {NULL, 0, 0};
    struct pids kept = {NULL, 0, 0};
    for (size_t i = 0; i < spared->count; i++) pids_add(&kept, spared->list[i]);
    scan(&table);
    for (size_t i = 0; i < table.count; i++)
        if (table.list[i].parent == getpid() && table.list[i].start < start) pids_add(&kept, table.list[i].pid);
    free(table.list);
    tree_kill(getpid(), &kept);
    pids_free(&kept);
}
