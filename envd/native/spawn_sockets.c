/* Looks at what sockets of a sandbox hold beyond what its control group may charge, in a process of its own. Connections that nobody has accepted yet,
 * and those whose process closed them, are charged to nobody; and the kernel lets each socket pass the limit by a little. While the host's TCP holds
 * more than IDLE_BYTES this looks many times a second, and ends a sandbox that holds too much, as the kernel does with memory. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "spawn.h"

#define IDLE_BYTES (4ULL * 1024 * 1024)
#define FEW 32      /* connections that are not worth a look at each */
#define LOOK_MS 10  /* between looks, */
#define IDLE_MS 40  /* and while the host's TCP holds little */
#define LOOK_REST 3 /* and so many times as long as the last took */

static ssize_t read_file(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[length < 0 ? 0 : length] = 0;
    return length;
}

/* The number after `word` in the line of TCP. */
static unsigned long long tcp_count(const char *path, const char *word)
{
    char text[512];
    if (read_file(path, text, sizeof text) < 0)
        return 0;
    const char *line = strstr(text, "TCP: "), *found = line ? strstr(line, word) : NULL;
    return found ? strtoull(found + strlen(word), NULL, 10) : 0;
}

/* Bytes in all queues that a table of connections lists. */
static unsigned long long queued(const char *path)
{
    FILE *table = fopen(path, "re");
    char line[512];
    unsigned long long sum = 0;
    while (table && fgets(line, sizeof line, table)) {
        unsigned state;
        unsigned long long sent, received;
        if (sscanf(line, " %*[0-9]: %*s %*s %x %llx:%llx", &state, &sent, &received) == 3 && state != 0x0A /* listening: a count */)
            sum += sent + received;
    }
    if (table)
        fclose(table);
    return sum;
}

static bool pass_limit(const struct groups *groups, const struct tenant *tenant)
{
    char path[64];
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/net/sockstat", tenant->pid);
    if (tcp_count(path, "inuse ") < FEW)
        return false;
    unsigned long long charged = groups_socket_bytes(groups, tenant->group), share = tenant->memory_bytes / SOCKET_SHARE;
    if (!groups->unified_limits && charged > 2 * share) /* what v2 charges is memory, with the end of that */
        return true;
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/net/tcp", tenant->pid);
    unsigned long long found = queued(path);
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/net/tcp6", tenant->pid);
    found += queued(path);
    return found > charged + share;
}

struct looked_at {
    int process; /* readable when it has ended */
    bool ending; /* by us */
    struct tenant tenant;
    struct looked_at *next, *before;
};

static struct looked_at *all;

static void forget(struct looked_at *each)
{
    *(each->before ? &each->before->next : &all) = each->next;
    if (each->next)
        each->next->before = each->before;
    close(each->process);
    free(each);
}

static void add(int loop, int socket)
{
    struct looked_at *each = calloc(1, sizeof *each);
    ssize_t size = each ? recv(socket, &each->tenant, sizeof each->tenant, 0) : 0;
    if (size == 0 || (size < 0 && errno != EINTR))
        _exit(0); /* the spawner has ended */
    each->process = size == sizeof each->tenant ? (int)syscall(SYS_pidfd_open, each->tenant.pid, 0) : -1;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = each};
    if (each->process < 0 || epoll_ctl(loop, EPOLL_CTL_ADD, each->process, &event) < 0) {
        if (each->process >= 0)
            close(each->process);
        free(each);
        return;
    }
    each->next = all;
    if (all)
        all->before = each;
    all = each;
}

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Ends those whose sockets hold too much. Returns in how many milliseconds to look again. */
static int look(int control, const struct groups *groups)
{
    int64_t began = now_us();
    if (tcp_count(HIDDEN_PROC "/self/net/sockstat", " mem ") * (unsigned long long)sysconf(_SC_PAGESIZE) <= IDLE_BYTES)
        return IDLE_MS;
    for (struct looked_at *each = all; each; each = each->next)
        if (!each->ending && pass_limit(groups, &each->tenant)) {
            struct report said = {.kind = REPORT_SOCKETS, .box = each->tenant.box, .value = 1};
            send(control, &said, sizeof said, MSG_NOSIGNAL); /* first: its end is told next */
            each->ending = syscall(SYS_pidfd_send_signal, each->process, SIGKILL, NULL, 0) == 0;
        }
    int64_t rest_ms = (now_us() - began) * LOOK_REST / 1000;
    return rest_ms > LOOK_MS ? (int)rest_ms : LOOK_MS;
}

static _Noreturn void run(int control, int socket, const struct groups *groups)
{
    struct epoll_event events[64], more = {.events = EPOLLIN};
    int loop = epoll_create1(EPOLL_CLOEXEC);
    if (loop < 0 || epoll_ctl(loop, EPOLL_CTL_ADD, socket, &more) < 0)
        _exit(1);
    for (int64_t next = 0;;) {
        int64_t left = (next - now_us()) / 1000;
        int count = epoll_wait(loop, events, 64, all ? (int)(left > 0 ? left : 0) : -1);
        for (int i = 0; i < count; i++) {
            if (events[i].data.ptr)
                forget(events[i].data.ptr);
            else
                add(loop, socket);
        }
        if (all && now_us() >= next)
            next = now_us() + 1000 * (int64_t)look(control, groups);
    }
}

int sockets_start(int control, const struct groups *groups)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
        return -1;
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(0);
        close(ends[0]);
        run(control, ends[1], groups);
    }
    close(ends[1]);
    if (pid > 0)
        return ends[0];
    close(ends[0]);
    return -1;
}

void sockets_add(int looker, const struct tenant *tenant)
{
    send(looker, tenant, sizeof *tenant, MSG_NOSIGNAL); /* where that fails it has gone, and the spawner with it */
}
