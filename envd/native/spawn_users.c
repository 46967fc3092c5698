/* User numbers of sandboxes' own. What the kernel counts by user (descriptors in flight, inotify instances, queued signals, processes) is then
 * counted for one sandbox: none can use up a neighbour's share, or the host's. Templates belong to one user; through a mapped mount each
 * sandbox sees them as its own. */
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/sched.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "spawn.h"

#define LOWEST 0x30000000u    /* user ids that own no files on the host */
#define SERVERS 16384u        /* of that many servers at a time each has numbers of its own */

static int write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t done = write(fd, text, strlen(text));
    int saved = errno;
    close(fd);
    errno = saved;
    return done < 0 ? -1 : 0;
}

int users_write_map(pid_t pid, const char *map, bool deny_groups)
{
    char path[64];
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/setgroups", pid);
    if (deny_groups && write_file(path, "deny") < 0)
        return -1;
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/uid_map", pid);
    if (write_file(path, map) < 0)
        return -1;
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/gid_map", pid);
    return write_file(path, map);
}

/* A process is in it until it can be opened. It ends when the pipe's other end is closed, also by this process's death. */
int users_map(uint32_t from, uint32_t to)
{
    int ends[2], found = -1;
    char path[64], map[40];
    struct clone_args arguments = {.flags = CLONE_NEWUSER | CLONE_CLEAR_SIGHAND};
    if (pipe2(ends, O_CLOEXEC) < 0)
        return -1;
    pid_t pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
    if (pid == 0) {
        char nothing;
        close(ends[1]);
        while (read(ends[0], &nothing, 1) < 0 && errno == EINTR)
            ;
        _exit(0);
    }
    snprintf(map, sizeof map, "%u %u 1", from, to);
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/ns/user", pid);
    if (pid > 0 && users_write_map(pid, map, false) == 0)
        found = open(path, O_RDONLY | O_CLOEXEC);
    int saved = errno;
    close(ends[0]);
    close(ends[1]);
    while (pid > 0 && waitpid(pid, NULL, __WALL) < 0 && errno == EINTR)
        ;
    errno = saved;
    return found;
}

int users_mount(const char *template, int users)
{
    int tree = (int)syscall(SYS_open_tree, AT_FDCWD, template, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    struct mount_attr mapped = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)users};
    if (tree < 0 || users < 0 || syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &mapped, sizeof mapped) == 0)
        return tree;
    int saved = errno;
    close(tree);
    errno = saved;
    return -1;
}

/* In a child: whether this kernel and the file system that templates are on can do it, and a container has the numbers. */
static int attempt(uint32_t owner, uint32_t first)
{
    int users = users_map(owner, first + CAPACITY - 1);
    int tree = users < 0 ? -1 : users_mount(HIDDEN_TEMPLATES, users);
    if (tree < 0 || unshare(CLONE_NEWNS) < 0 || syscall(SYS_move_mount, tree, "", AT_FDCWD, HIDDEN_LOWER, MOVE_MOUNT_F_EMPTY_PATH) < 0)
        return -1;
    return mount_template("/.template") < 0 ? -1 : setresuid(first, first, first);
}

uint32_t users_prepare(uint32_t owner)
{
    uint32_t first = LOWEST + (uint32_t)getpid() % SERVERS * CAPACITY;
    int status = -1;
    if (owner == 0)
        return 0;
    pid_t pid = fork();
    if (pid == 0)
        _exit(attempt(owner, first) < 0);
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0 ? first : 0;
}
