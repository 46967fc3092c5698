/* envd-spawn: starts sandboxes in namespaces, and ends them. See spawn.h for what goes in and out. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "spawn.h"

#define CAPACITY 16384
#define MOST_ARCHIVES 64
#define RETRY_MS 2
#define PATIENCE_MS 5000 /* for groups whose last process is still being torn down */
#define NAMESPACES (CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)

struct box {
    int sync;    /* while it starts; else -1 */
    int scratch; /* its tmpfs: what an archive is made of */
    bool killed; /* the server asked for it */
    bool ended;
    int status;
    int64_t ended_ms;
    char name[MAX_NAME];
    char events[64];
};

/* Side by side, so that a search reads little. Not inherited by sandboxes: they would keep copies of the pages that change. */
struct table {
    uint32_t count;
    uint32_t lingering; /* ended, with groups that could not be removed yet */
    uint32_t ids[CAPACITY];
    pid_t pids[CAPACITY];
    struct box boxes[CAPACITY];
    struct { pid_t pid; uint32_t box; } archives[MOST_ARCHIVES];
};

struct parent_directory {
    int fd;
    const char *name;
};

static struct settings settings = {.groups = {-1, -1, -1, -1, false}};
static struct table *table;
static int control = -1, loop = -1;

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void report(enum report_kind kind, uint32_t box, int64_t value, const char *words)
{
    struct report said = {.kind = kind, .box = box, .value = value};
    snprintf(said.words, sizeof said.words, "%s", words);
    while (send(control, &said, sizeof said, MSG_NOSIGNAL) < 0 && errno == EINTR)
        ; /* another failure: the server has gone, which the loop will see */
}

static void shut(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* What process 1 said its start through. Taken out of the loop by hand: sandboxes that are being cloned hold copies of it for a moment, and while
 * there is a copy the kernel goes on reporting it. */
static void hang_up(struct box *box)
{
    if (box->sync >= 0)
        epoll_ctl(loop, EPOLL_CTL_DEL, box->sync, NULL);
    shut(&box->sync);
}

static uint32_t find_id(uint32_t id)
{
    uint32_t i = 0;
    while (i < table->count && table->ids[i] != id)
        i++;
    return i;
}

static uint32_t find_pid(pid_t pid)
{
    uint32_t i = 0;
    while (i < table->count && table->pids[i] != pid)
        i++;
    return i;
}

static void forget(uint32_t i)
{
    uint32_t last = --table->count;
    table->ids[i] = table->ids[last];
    table->pids[i] = table->pids[last];
    table->boxes[i] = table->boxes[last];
}

/* Starting -------------------------------------------------------------------------------------------------------------------------- */

static pid_t clone_into(int group)
{
    struct clone_args arguments = {.flags = NAMESPACES | CLONE_CLEAR_SIGHAND, .exit_signal = SIGCHLD};
    if (group >= 0) {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = (uint64_t)group;
    }
    return (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
}

static bool leaving; /* the server said goodbye: it removes the run directory itself */

static const char *start(const struct request *wanted, int stream, int archive)
{
    static char words[200];
    const char *what = "mount a tmpfs";
    int group = -1, sync[2] = {-1, -1}, scratch = make_scratch(&settings, wanted);
    pid_t pid = -1;
    if (scratch >= 0 && (what = "make its control group", groups_make(&settings.groups, wanted, &group) == 0)
        && (what = "socketpair", socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sync) == 0)) {
        what = "clone";
        pid = clone_into(group);
        if (pid == 0) {
            close(sync[0]); /* else its own copy would keep the spawner's death from it */
            run_box(&settings, wanted, stream, archive, scratch, sync[1]);
        }
    }
    int failure = errno;
    shut(&sync[1]);
    shut(&group);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = wanted->box};
    if (pid > 0 && epoll_ctl(loop, EPOLL_CTL_ADD, sync[0], &event) == 0) {
        uint32_t i = table->count++;
        table->ids[i] = wanted->box;
        table->pids[i] = pid;
        table->boxes[i] = (struct box){.sync = sync[0], .scratch = scratch};
        memcpy(table->boxes[i].name, wanted->name, MAX_NAME);
        return NULL;
    }
    snprintf(words, sizeof words, "%s: %s", what, strerror(failure));
    if (pid > 0) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
    shut(&sync[0]);
    shut(&scratch);
    groups_remove(&settings.groups, wanted->name);
    return words;
}

static int write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t done = write(fd, text, strlen(text));
    close(fd);
    return done < 0 ? -1 : 0;
}

static int map_user(pid_t pid)
{
    char path[64], map[32];
    snprintf(map, sizeof map, "0 %u 1", settings.owner);
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/setgroups", pid);
    if (settings.owner == 0 && write_file(path, "deny") < 0) /* without privilege only so can groups be mapped */
        return -1;
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/uid_map", pid);
    if (write_file(path, map) < 0)
        return -1;
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/gid_map", pid);
    return write_file(path, map);
}

/* What process 1 says of its start: "m" map my user, "r" ready, "e..." an error. */
static void hear(uint32_t id)
{
    uint32_t i = find_id(id);
    if (i == table->count || table->boxes[i].sync < 0)
        return;
    struct box *box = &table->boxes[i];
    char said[220];
    ssize_t size = recv(box->sync, said, sizeof said - 1, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size == 1 && said[0] == 'm') {
        if (map_user(table->pids[i]) == 0 && send(box->sync, "g", 1, MSG_NOSIGNAL) == 1)
            return;
        report(REPORT_FAILED, id, 0, "its user can't be mapped");
        kill(table->pids[i], SIGKILL);
    } else if (size == 1 && said[0] == 'r') {
        report(REPORT_STARTED, id, table->pids[i], "");
    } else if (size > 1) {
        said[size] = 0;
        report(REPORT_FAILED, id, 0, said + 1);
    } /* else it ended without a word: its wait status is reported */
    hang_up(box);
}

/* Ending ---------------------------------------------------------------------------------------------------------------------------- */

/* Removes an ended sandbox's groups and reports its end; false when they are busy. Its index is free afterwards. */
static bool bury(uint32_t i)
{
    struct box *box = &table->boxes[i];
    if (groups_remove(&settings.groups, box->name) < 0 && errno == EBUSY && now_ms() - box->ended_ms < PATIENCE_MS)
        return false;
    report(REPORT_ENDED, table->ids[i], box->status, box->events);
    forget(i);
    return true;
}

static void finish_archive(pid_t pid, int status)
{
    for (int i = 0; i < MOST_ARCHIVES; i++) {
        if (table->archives[i].pid != pid)
            continue;
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        const char *words = code == 127 ? "there is no /usr/bin/tar: install tar" : "tar failed: a full disk, or files changed under it";
        report(REPORT_ARCHIVED, table->archives[i].box, code, code ? words : "");
        table->archives[i].pid = 0;
        return;
    }
}

static void reap(void)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        uint32_t i = find_pid(pid);
        if (i == table->count) {
            finish_archive(pid, status);
            continue;
        }
        struct box *box = &table->boxes[i];
        if (box->sync >= 0)
            hear(table->ids[i]); /* its last words may be waiting */
        hang_up(box);
        shut(&box->scratch);
        table->pids[i] = -1;
        box->ended = true;
        box->status = status;
        box->ended_ms = now_ms();
        if (!box->killed)
            groups_events(&settings.groups, box->name, box->events, sizeof box->events);
        if (!bury(i))
            table->lingering++;
    }
}

static void bury_lingering(void)
{
    for (uint32_t i = table->count; i-- > 0 && table->lingering > 0;)
        if (table->boxes[i].ended && bury(i))
            table->lingering--;
}

static void end(uint32_t id)
{
    uint32_t i = find_id(id);
    if (i == table->count) {
        report(REPORT_ENDED, id, 0, "");
        return;
    }
    if (table->boxes[i].ended)
        return;
    /* first, so that its files are freed by its own last process and not here */
    shut(&table->boxes[i].scratch);
    table->boxes[i].killed = true;
    kill(table->pids[i], SIGKILL);
}

static void archive(uint32_t id, int out)
{
    int slot = 0;
    uint32_t i = find_id(id);
    while (slot < MOST_ARCHIVES && table->archives[slot].pid != 0)
        slot++;
    if (i == table->count || table->boxes[i].scratch < 0 || slot == MOST_ARCHIVES || out < 0) {
        report(REPORT_ARCHIVED, id, ESRCH, slot == MOST_ARCHIVES ? "too many snapshots at a time" : "the sandbox has ended");
        return;
    }
    int scratch = table->boxes[i].scratch; /* a child does not have the table */
    pid_t pid = fork();
    if (pid == 0) {
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        write_archive(scratch, out);
    }
    if (pid < 0) {
        report(REPORT_ARCHIVED, id, errno, "fork failed");
        return;
    }
    table->archives[slot].pid = pid;
    table->archives[slot].box = id;
}

/* The loop -------------------------------------------------------------------------------------------------------------------------- */

static bool is_plain_name(const char *name)
{
    size_t length = strnlen(name, MAX_NAME);
    return length > 0 && length < MAX_NAME && name[0] != '.' && !memchr(name, '/', length);
}

static void create(const struct request *wanted, int stream, int source)
{
    const char *words = NULL;
    if (!is_plain_name(wanted->name) || !is_plain_name(wanted->template) || !memchr(wanted->host_name, 0, MAX_NAME))
        words = "a name is no plain file name";
    else if (stream < 0 || (wanted->flags & FLAG_RESTORE && source < 0))
        words = "a descriptor is missing: raise the server's limit of open files (ulimit -n)";
    else if (table->count == CAPACITY)
        words = "the spawner holds as many sandboxes as it can";
    else
        words = start(wanted, stream, source);
    if (words) {
        report(REPORT_FAILED, wanted->box, 0, words);
        report(REPORT_ENDED, wanted->box, 0, "");
    }
}

/* One request; false when there will be no more. */
static bool serve(void)
{
    struct request wanted = {0};
    union { struct cmsghdr align; char space[CMSG_SPACE(2 * sizeof(int))]; } extra;
    struct iovec data = {&wanted, sizeof wanted};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra};
    ssize_t size = recvmsg(control, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (size < 0)
        return errno == EAGAIN || errno == EINTR;
    if (size == 0)
        return false;
    int fds[2] = {-1, -1};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
        memcpy(fds, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
    if (size == sizeof wanted && wanted.kind == REQUEST_CREATE)
        create(&wanted, fds[0], wanted.flags & FLAG_RESTORE ? fds[1] : -1);
    else if (size == sizeof wanted && wanted.kind == REQUEST_KILL)
        end(wanted.box);
    else if (size == sizeof wanted && wanted.kind == REQUEST_ARCHIVE)
        archive(wanted.box, fds[0]);
    else if (size == sizeof wanted && wanted.kind == REQUEST_LEAVE)
        leaving = true;
    shut(&fds[0]);
    shut(&fds[1]);
    return !leaving;
}

#define EVENT_CONTROL (1ULL << 32)
#define EVENT_CHILD (2ULL << 32)

static void run(int children)
{
    struct epoll_event events[64];
    for (;;) {
        int count = epoll_wait(loop, events, 64, table->lingering ? RETRY_MS : -1);
        bool gone = false, ended = false;
        for (int i = 0; i < count; i++) {
            if (events[i].data.u64 == EVENT_CONTROL)
                gone = !serve();
            else if (events[i].data.u64 == EVENT_CHILD)
                ended = true;
            else
                hear((uint32_t)events[i].data.u64);
        }
        if (gone)
            return;
        if (ended) {
            struct signalfd_siginfo ignored[16];
            while (read(children, ignored, sizeof ignored) > 0)
                ;
            reap();
        }
        if (table->lingering)
            bury_lingering();
    }
}

static void clean_up(const struct parent_directory *groups, int group_count, const struct parent_directory *run_dir)
{
    for (uint32_t i = 0; i < table->count; i++) {
        shut(&table->boxes[i].scratch);
        if (table->pids[i] > 0)
            kill(table->pids[i], SIGKILL);
    }
    for (int64_t deadline = now_ms() + 2 * PATIENCE_MS; table->count > 0 && now_ms() < deadline; usleep(1000)) {
        reap();
        bury_lingering();
    }
    groups_remove_all(&settings.groups);
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

static int prepare(void)
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
    table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (table == MAP_FAILED || madvise(table, sizeof *table, MADV_DONTFORK) < 0 || sigprocmask(SIG_BLOCK, &child, NULL) < 0)
        return -1;
    loop = epoll_create1(EPOLL_CLOEXEC);
    int children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    struct epoll_event of_control = {.events = EPOLLIN, .data.u64 = EVENT_CONTROL};
    struct epoll_event of_children = {.events = EPOLLIN, .data.u64 = EVENT_CHILD};
    if (loop < 0 || children < 0 || epoll_ctl(loop, EPOLL_CTL_ADD, control, &of_control) < 0
        || epoll_ctl(loop, EPOLL_CTL_ADD, children, &of_children) < 0)
        return -1;
    return children;
}

static void greet(void)
{
    const struct groups *groups = &settings.groups;
    bool all = groups->unified_limits;
    char words[120];
    snprintf(words, sizeof words, "%s%s%s%sseccomp", all || groups->memory >= 0 ? "memory " : "", all || groups->pids >= 0 ? "pids " : "",
             all || groups->cpu >= 0 ? "cpu " : "", settings.landlock ? "landlock " : "");
    report(REPORT_READY, 0, settings.landlock, words);
}

int main(int count, char **arguments)
{
    enum { MEMORY, PIDS, CPU, UNIFIED, LIMITS, OWNER, GROUP, RUN_DIR };
    static const struct option options[] = {
        {"memory", 1, 0, MEMORY}, {"pids", 1, 0, PIDS},   {"cpu", 1, 0, CPU},     {"unified", 1, 0, UNIFIED}, {"unified-limits", 0, 0, LIMITS},
        {"owner", 1, 0, OWNER},   {"group", 1, 0, GROUP}, {"run-dir", 1, 0, RUN_DIR}, {0, 0, 0, 0},
    };
    struct parent_directory groups[8], run_dir = {-1, ""};
    int group_count = 0;
    for (int option; (option = getopt_long(count, arguments, "", options, NULL)) >= 0;) {
        switch (option) {
        case MEMORY: settings.groups.memory = atoi(optarg); break;
        case PIDS: settings.groups.pids = atoi(optarg); break;
        case CPU: settings.groups.cpu = atoi(optarg); break;
        case UNIFIED: settings.groups.unified = atoi(optarg); break;
        case LIMITS: settings.groups.unified_limits = true; break;
        case OWNER: settings.owner = (uint32_t)strtoul(optarg, NULL, 10); break;
        case RUN_DIR: run_dir = parse_directory(optarg); break;
        case GROUP:
            if (group_count < (int)(sizeof groups / sizeof *groups))
                groups[group_count++] = parse_directory(optarg);
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
    settings.landlock = landlock_abi();
    prepare_filter();
    int children = prepare();
    if (children < 0) {
        perror("envd-spawn");
        return 1;
    }
    greet();
    run(children);
    clean_up(groups, group_count, &run_dir);
    return 0;
}
