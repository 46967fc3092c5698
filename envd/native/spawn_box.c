/* Process 1 of a sandbox: its user, network, limits and seccomp filter, then its agent's loop. spawn_life.c clones it into the other namespaces;
 * spawn_root.c makes its root. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"
#include "spawn.h"

#define INODES "65536"

/* Tells the spawner what went wrong, in words, and ends. */
static _Noreturn void fail(int sync, const char *what)
{
    char words[200];
    snprintf(words, sizeof words, "e%s: %s", what, strerror(errno));
    send(sync, words, strlen(words), MSG_NOSIGNAL);
    _exit(1);
}

static int make_directory(int base, const char *name, mode_t mode, uint32_t owner)
{
    if (mkdirat(base, name, mode) < 0)
        return -1;
    if (owner != 0 && fchownat(base, name, owner, owner, AT_SYMLINK_NOFOLLOW) < 0)
        return -1;
    return fchmodat(base, name, mode, 0); /* past the umask */
}

int make_scratch(const struct berth *berth, const struct request *wanted)
{
    char size[32];
    snprintf(size, sizeof size, "%llu", (unsigned long long)wanted->disk_bytes);
    int context = fsopen("tmpfs", FSOPEN_CLOEXEC);
    if (context < 0)
        return -1;
    int root = -1;
    if (fsconfig(context, FSCONFIG_SET_STRING, "size", size, 0) == 0 && fsconfig(context, FSCONFIG_SET_STRING, "mode", "755", 0) == 0
        && fsconfig(context, FSCONFIG_SET_STRING, "nr_inodes", INODES, 0) == 0 && fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        root = fsmount(context, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    int saved = errno;
    close(context);
    errno = saved;
    if (root < 0)
        return -1;
    uint32_t owner = berth->owner;
    if (make_directory(root, "upper", 0755, owner) < 0 || make_directory(root, "work", 0755, owner) < 0
        || make_directory(root, "tmp", 01777, owner) < 0) {
        saved = errno;
        close(root);
        errno = saved;
        return -1;
    }
    return root;
}

/* Until here process 1 was the spawner's own user; from here it is root of a user namespace that owns nothing. */
static void become_nobody(const struct settings *settings, const struct berth *berth, int sync)
{
    char go;
    /* what the kernel counts by user it also charges to whoever made the user namespace */
    if (settings->own_users && setresuid(berth->owner, berth->owner, berth->owner) < 0)
        fail(sync, "become the maker of its user namespace");
    if (unshare(CLONE_NEWUSER | CLONE_NEWCGROUP) < 0)
        fail(sync, "unshare its user namespace");
    if (send(sync, "m", 1, MSG_NOSIGNAL) != 1 || recv(sync, &go, 1, 0) != 1)
        _exit(1); /* the spawner has gone */
    setgroups(0, NULL); /* refused where groups can't be mapped; there the user's own stay, as everywhere for that user */
    if (setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0)
        fail(sync, "become its user");
}

/* All that was the spawner's: other sandboxes' files and the control groups among them. Where many sandboxes are, they are more than process 1
 * may have open itself. */
static int close_others(int one, int other)
{
    unsigned low = (unsigned)(one < other ? one : other), high = (unsigned)(one < other ? other : one);
    if (low > 3 && close_range(3, low - 1, 0) < 0)
        return -1;
    if (high > low + 1 && close_range(low + 1, high - 1, 0) < 0)
        return -1;
    return close_range(high + 1, ~0U, 0);
}

static void confine(const struct settings *settings, const struct request *wanted, int stream, int sync)
{
    if (close_others(stream, sync) < 0)
        fail(sync, "close the spawner's files");
    if (drop_capabilities(0) < 0)
        fail(sync, "drop capabilities");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
        fail(sync, "prctl");
    /* not earlier: a change of user undoes it */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0)
        fail(sync, "prctl");
    if (limit_resources(settings, wanted) < 0)
        fail(sync, "setrlimit");
    if (restrict_files(settings->landlock) < 0)
        fail(sync, "Landlock");
    int listener;
    if (filter_calls_watched(&listener) < 0)
        fail(sync, "seccomp");
    if (pass(sync, "r", 1, listener) != 1)
        _exit(1); /* the spawner died before its death could be signalled */
    if (listener >= 0)
        close(listener);
}

_Noreturn void run_box(const struct settings *settings, const struct request *wanted, const struct berth *berth, int stream, int archive,
                       int scratch, int sync)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    umask(022);
    if (groups_enter(&settings->groups, berth, wanted) < 0)
        fail(sync, "enter its control groups");
    if (network_join(berth->network) < 0)
        fail(sync, "make its network");
    if (wanted->flags & FLAG_PROXY && network_offer(stream) < 0)
        fail(sync, "open its proxy's port");
    const char *failure = root_enter(settings, wanted, berth, scratch, archive);
    if (failure && failure[0] == 'e') /* words of its own */
        send(sync, failure, strlen(failure), MSG_NOSIGNAL);
    else if (failure)
        fail(sync, failure);
    if (failure)
        _exit(1);
    if (sethostname(wanted->host_name, strlen(wanted->host_name)) < 0)
        fail(sync, "set its host name");
    become_nobody(settings, berth, sync);
    confine(settings, wanted, stream, sync);
    const struct guest_config config = {.workspace = "/workspace", .scratch = "/tmp/.envd", .is_init = true};
    _exit(guest_main(stream, stream, &config));
}
