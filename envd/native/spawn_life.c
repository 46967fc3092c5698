/* The sandboxes that there are: how they start, what becomes of them, how they end. `clone_into` makes process 1 of a
   sandbox in its mount, PID, IPC and UTS namespaces; spawn_box.c adds user and cgroup, spawn_network.c the network. */
#include <errno.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "spawn_table.h"

#define MOST_DISK (1ULL << 50)
#define PATIENCE_MS 5000 /* for groups whose last process is still being torn down */
#define NAMESPACES (CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS) /* its network and user are made by itself, meanwhile */

static const struct settings *settings;
static int control = -1, loop = -1, watcher = -1, looker = -1;

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void report(enum report_kind kind, uint32_t box, int64_t value, const char *words)
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

static pid_t clone_into(int group)
{
    struct clone_args arguments = {.flags = NAMESPACES | CLONE_CLEAR_SIGHAND, .exit_signal = SIGCHLD};
    if (group >= 0) {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = (uint64_t)group;
    }
    return (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
}

static void add(const struct request *wanted, pid_t pid, int sync, int scratch, struct berth *berth)
{
    uint32_t i = table->count++;
    table->ids[i] = wanted->box;
    table->pids[i] = pid;
    table->boxes[i] = (struct box){.sync = sync, .scratch = scratch, .network = -1, .berth = berth, .proxied = wanted->flags & FLAG_PROXY};
}

/* Gives up a berth in which no process is, or one that was just killed and waited for. */
static void give_up(struct berth *berth)
{
    while (!berth_leave(settings, berth, -1, false))
        usleep(1000);
}

static const char *start(const struct request *wanted, int stream, int archive)
{
    static char words[200];
    const char *what = "make its control group";
    int group = -1, sync[2] = {-1, -1}, scratch = -1;
    pid_t pid = -1;
    struct berth *berth = berth_take(settings, wanted);
    if (berth && (what = "mount a tmpfs", (scratch = make_scratch(berth, wanted)) >= 0)
        && (what = "socketpair", socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sync) == 0)) {
        what = "clone";
        group = groups_open(&settings->groups, berth);
        pid = clone_into(group);
        if (pid == 0) {
            close(sync[0]); /* else its own copy would keep the spawner's death from it */
            run_box(settings, wanted, berth, stream, archive, scratch, sync[1]);
        }
    }
    int failure = errno;
    shut(&sync[1]);
    shut(&group);
    if (berth)
        shut(&berth->network); /* process 1 has it */
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = wanted->box};
    if (pid > 0 && epoll_ctl(loop, EPOLL_CTL_ADD, sync[0], &event) == 0) {
        add(wanted, pid, sync[0], scratch, berth);
        return NULL;
    }
    snprintf(words, sizeof words, "%s: %s", what, strerror(failure));
    if (pid > 0) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
    shut(&sync[0]);
    shut(&scratch);
    if (berth)
        give_up(berth);
    return words;
}

static int map_user(pid_t pid, const struct berth *berth)
{
    char map[32];
    snprintf(map, sizeof map, "0 %u 1", berth->owner);
    return users_write_map(pid, map, settings->owner == 0); /* without privilege groups can be mapped only so */
}

static void started(uint32_t i, int listener)
{
    char words[64];
    const struct berth *berth = table->boxes[i].berth;
    struct tenant tenant = {.box = table->ids[i], .pid = table->pids[i], .memory_bytes = berth->memory_bytes};
    memcpy(tenant.group, berth->name, sizeof tenant.group);
    sockets_add(looker, &tenant);
    if (listener >= 0)
        watch_add(watcher, table->ids[i], listener);
    snprintf(words, sizeof words, "%s %llu", berth->name, (unsigned long long)berth->used_us);
    report(REPORT_STARTED, table->ids[i], table->pids[i], words);
    table->boxes[i].again = settings->reuses;
    if (settings->reuses && !table->boxes[i].proxied)
        table->boxes[i].network = network_of(table->pids[i]);
}

/* What process 1 says of its start: "m" map my user, "r" ready, "e..." an error. */
void life_hear(uint32_t id)
{
    uint32_t i = table_find(id);
    if (i == table->count || table->boxes[i].sync < 0)
        return;
    struct box *box = &table->boxes[i];
    char said[220];
    int fds[2];
    ssize_t size = receive(box->sync, said, sizeof said - 1, MSG_DONTWAIT, fds);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size == 1 && said[0] == 'm') {
        if (map_user(table->pids[i], box->berth) == 0 && send(box->sync, "g", 1, MSG_NOSIGNAL) == 1)
            return;
        report(REPORT_FAILED, id, 0, "its user can't be mapped");
        kill(table->pids[i], SIGKILL);
    } else if (size == 1 && said[0] == 'r') {
        started(i, fds[0]);
    } else if (size > 1) {
        said[size] = 0;
        report(REPORT_FAILED, id, 0, said + 1);
    } /* else it ended without a word: its wait status is reported */
    hang_up(box);
}

/* Gives its berth back and reports its end; false when that is busy. Its index is free afterwards. */
static bool bury(uint32_t i)
{
    struct box *box = &table->boxes[i];
    bool asked = box->killed || box->status == 0; /* process 1 ends so when the server closes its stream */
    if (!berth_leave(settings, box->berth, box->network, box->again && asked)) {
        if (now_ms() - box->ended_ms < PATIENCE_MS)
            return false;
        shut(&box->network); /* a process hangs in the kernel: its berth is lost */
    }
    report(REPORT_ENDED, table->ids[i], box->status, box->events);
    table_forget(i);
    return true;
}

void life_reap(void)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        uint32_t i = table_find_pid(pid);
        if (i == table->count) {
            archive_reaped(pid, status);
            continue;
        }
        struct box *box = &table->boxes[i];
        if (box->sync >= 0)
            life_hear(table->ids[i]); /* its last words may be waiting */
        hang_up(box);
        shut(&box->scratch);
        table->pids[i] = -1;
        box->ended = true;
        box->status = status;
        box->ended_ms = now_ms();
        if (!box->killed)
            groups_events(&settings->groups, box->berth->name, box->events, sizeof box->events);
        if (!bury(i))
            table->lingering++;
    }
}

bool life_lingers(void)
{
    return table->lingering > 0;
}

void life_bury(void)
{
    for (uint32_t i = table->count; i-- > 0 && table->lingering > 0;)
        if (table->boxes[i].ended && bury(i))
            table->lingering--;
}

void life_end(uint32_t id, bool changed)
{
    uint32_t i = table_find(id);
    if (i == table->count) {
        report(REPORT_ENDED, id, 0, "");
        return;
    }
    if (table->boxes[i].ended)
        return;
    /* first, so that its files are freed by its own last process and not here */
    shut(&table->boxes[i].scratch);
    table->boxes[i].killed = true;
    table->boxes[i].again = table->boxes[i].again && !changed;
    kill(table->pids[i], SIGKILL);
}

void life_archive(uint32_t id, int out)
{
    uint32_t i = table_find(id);
    archive_write(id, i == table->count ? -1 : table->boxes[i].scratch, out);
}

static bool is_plain_name(const char *name)
{
    size_t length = strnlen(name, MAX_NAME);
    return length > 0 && length < MAX_NAME && name[0] != '.' && !memchr(name, '/', length);
}

void life_create(const struct request *wanted, int stream, int source)
{
    const char *words = NULL;
    if (!is_plain_name(wanted->template) || !memchr(wanted->host_name, 0, MAX_NAME) || (wanted->runtime[0] && !is_plain_name(wanted->runtime)))
        words = "a name is no plain file name";
    else if (stream < 0 || (wanted->flags & FLAG_RESTORE && source < 0))
        words = "a descriptor is missing: raise the server's limit of open files (ulimit -n)";
    else if (wanted->disk_bytes == 0 || wanted->disk_bytes > MOST_DISK)
        words = "its disk must have 1 byte to 1 PiB: the kernel takes other sizes for no limit";
    else if (table->count == CAPACITY)
        words = "the spawner holds as many sandboxes as it can";
    else
        words = start(wanted, stream, source);
    if (words) {
        report(REPORT_FAILED, wanted->box, 0, words);
        report(REPORT_ENDED, wanted->box, 0, "");
    }
}

int life_prepare(const struct settings *given, int to_server, int of_events, int to_watcher, int to_looker)
{
    settings = given;
    control = to_server;
    loop = of_events;
    watcher = to_watcher;
    looker = to_looker;
    return table_prepare();
}

void life_finish(void)
{
    for (uint32_t i = 0; i < table->count; i++) {
        shut(&table->boxes[i].scratch);
        if (table->pids[i] > 0)
            kill(table->pids[i], SIGKILL);
    }
    for (int64_t deadline = now_ms() + 2 * PATIENCE_MS; table->count > 0 && now_ms() < deadline; usleep(1000)) {
        life_reap();
        life_bury();
    }
    groups_remove_all(&settings->groups);
}
