/* envd-spawn: starts sandboxes in namespaces, and ends them. See spawn.h for what goes in and out.
 *
 * server --request--> spawn.c --> spawn_life.c --clone--> spawn_box.c = process 1 of a sandbox; its root: spawn_root.c
 *                                     |  berths: spawn_berths.c over spawn_groups.c, spawn_users.c, spawn_network.c
 *        <--reports-------------------+-- spawn_watch.c (refused system calls) */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "spawn.h"

#define RETRY_MS 2

struct parent_directory {
    int fd;
    const char *name;
};

static struct settings settings = {.groups = {-1, -1, -1, -1, false}};
static int control = -1, loop = -1;
static bool leaving; /* the server said goodbye: it removes the run directory itself */

/* One request; false when there will be no more. */
static bool serve(void)
{
    struct request wanted = {0};
    int fds[2];
    ssize_t size = receive(control, &wanted, sizeof wanted, MSG_DONTWAIT, fds);
    if (size < 0)
        return errno == EAGAIN || errno == EINTR;
    if (size == 0)
        return false;
    if (size == sizeof wanted && wanted.kind == REQUEST_CREATE)
        life_create(&wanted, fds[0], wanted.flags & FLAG_RESTORE ? fds[1] : -1);
    else if (size == sizeof wanted && wanted.kind == REQUEST_KILL)
        life_end(wanted.box, wanted.flags & FLAG_CHANGED);
    else if (size == sizeof wanted && wanted.kind == REQUEST_ARCHIVE)
        life_archive(wanted.box, fds[0]);
    else if (size == sizeof wanted && wanted.kind == REQUEST_LEAVE)
        leaving = true;
    for (int i = 0; i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return !leaving;
}

#define EVENT_CONTROL (1ULL << 32)
#define EVENT_CHILD (2ULL << 32)

static void run(int children)
{
    struct epoll_event events[64];
    for (;;) {
        int count = epoll_wait(loop, events, 64, life_lingers() ? RETRY_MS : -1);
        bool gone = false, ended = false;
        for (int i = 0; i < count; i++) {
            if (events[i].data.u64 == EVENT_CONTROL)
                gone = !serve();
            else if (events[i].data.u64 == EVENT_CHILD)
                ended = true;
            else
                life_hear((uint32_t)events[i].data.u64);
        }
        if (gone)
            return;
        if (ended) {
            struct signalfd_siginfo ignored[16];
            while (read(children, ignored, sizeof ignored) > 0)
                ;
            life_reap();
        }
        life_bury();
    }
}

static void clean_up(const struct parent_directory *groups, int group_count, const struct parent_directory *run_dir)
{
    life_finish();
    for (int i = 0; i < group_count; i++)
        unlinkat(groups[i].fd, groups[i].name, AT_REMOVEDIR);
    /* rm is one of the programs of the root here; the directory is reached by a descriptor, its path is out of sight */
    if (!leaving && run_dir->fd >= 0 && fchdir(run_dir->fd) == 0)
        execl("/usr/bin/rm", "rm", "--recursive", "--force", "--", run_dir->name, (char *)NULL);
}

static struct parent_directory parse_directory(char *text)
{
    char *colon = strchr(text, ':');
    if (!colon)
        return (struct parent_directory){-1, ""};
    return (struct parent_directory){atoi(text), strdup(colon + 1)};
}

/* Process 1 of a sandbox shows the spawner's command line to its code: there is nothing to see but the program's name. */
static void hide_arguments(int count, char **arguments)
{
    char *end = arguments[count - 1] + strlen(arguments[count - 1]);
    memset(arguments[1], 0, (size_t)(end - arguments[1]));
}

static int prepare(uint32_t keep)
{
    struct rlimit files;
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    signal(SIGTERM, SIG_IGN); /* the server decides; its end is ours */
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    prepare_filter();
    network_prepare();
    settings.landlock = landlock_abi();
    settings.own_users = users_prepare(settings.owner);
    int watcher = watch_start(control), looker = watcher < 0 ? -1 : sockets_start(control, &settings.groups);
    if (looker < 0 || sigprocmask(SIG_BLOCK, &child, NULL) < 0)
        return -1;
    loop = epoll_create1(EPOLL_CLOEXEC);
    int children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    struct epoll_event of_control = {.events = EPOLLIN, .data.u64 = EVENT_CONTROL};
    struct epoll_event of_children = {.events = EPOLLIN, .data.u64 = EVENT_CHILD};
    if (loop < 0 || children < 0 || epoll_ctl(loop, EPOLL_CTL_ADD, control, &of_control) < 0
        || epoll_ctl(loop, EPOLL_CTL_ADD, children, &of_children) < 0)
        return -1;
    settings.reuses = keep > 0;
    if (berths_prepare(&settings, keep) < 0 || life_prepare(&settings, control, loop, watcher, looker) < 0)
        return -1;
    return children;
}

static void greet(void)
{
    const struct groups *groups = &settings.groups;
    bool all = groups->unified_limits;
    char words[120];
    snprintf(words, sizeof words, "%s%s%s%s%sseccomp", all || groups->memory >= 0 ? "memory " : "", all || groups->pids >= 0 ? "pids " : "",
             all || groups->cpu >= 0 ? "cpu " : "", settings.landlock ? "landlock " : "", settings.own_users ? "users " : "");
    report(REPORT_READY, 0, settings.landlock, words);
}

int main(int count, char **arguments)
{
    if (count == 2 && strcmp(arguments[1], "--print-filter") == 0)
        return print_filter(STDOUT_FILENO) < 0;
    enum { MEMORY, PIDS, CPU, UNIFIED, LIMITS, OWNER, GROUP, RUN_DIR, KEEP, SYSTEM, PACKAGES };
    static const struct option options[] = {
        {"memory", 1, 0, MEMORY}, {"pids", 1, 0, PIDS},   {"cpu", 1, 0, CPU},     {"unified", 1, 0, UNIFIED}, {"unified-limits", 0, 0, LIMITS},
        {"owner", 1, 0, OWNER},   {"group", 1, 0, GROUP}, {"run-dir", 1, 0, RUN_DIR}, {"keep", 1, 0, KEEP},
        {"system", 1, 0, SYSTEM}, {"packages", 1, 0, PACKAGES},
        {0, 0, 0, 0},
    };
    struct parent_directory groups[8], run_dir = {-1, ""};
    int group_count = 0;
    uint32_t keep = 0;
    for (int option; (option = getopt_long(count, arguments, "", options, NULL)) >= 0;) {
        switch (option) {
        case MEMORY: settings.groups.memory = atoi(optarg); break;
        case PIDS: settings.groups.pids = atoi(optarg); break;
        case CPU: settings.groups.cpu = atoi(optarg); break;
        case UNIFIED: settings.groups.unified = atoi(optarg); break;
        case LIMITS: settings.groups.unified_limits = true; break;
        case OWNER: settings.owner = (uint32_t)strtoul(optarg, NULL, 10); break;
        case KEEP: keep = (uint32_t)strtoul(optarg, NULL, 10); break;
        case RUN_DIR: run_dir = parse_directory(optarg); break;
        case GROUP:
            if (group_count < (int)(sizeof groups / sizeof *groups))
                groups[group_count++] = parse_directory(optarg);
            break;
        case SYSTEM:
            if (strlen(optarg) >= PATH_SIZE || settings.system_count == MOST_SYSTEM)
                return 2;
            settings.system[settings.system_count++] = strdup(optarg);
            break;
        case PACKAGES:
            if (strlen(optarg) >= PATH_SIZE || settings.packages_count == MOST_PACKAGES)
                return 2;
            settings.packages[settings.packages_count++] = strdup(optarg);
            break;
        default: return 2;
        }
    }
    if (optind != count - 1) {
        fputs("envd-spawn: started by envd, with a control socket as its argument\n", stderr);
        return 2;
    }
    control = atoi(arguments[optind]);
    hide_arguments(count, arguments);
    int children = prepare(keep);
    if (children < 0) {
        perror("envd-spawn");
        return 1;
    }
    greet();
    run(children);
    clean_up(groups, group_count, &run_dir);
    return 0;
}
