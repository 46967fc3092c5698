/* Answers sandboxes' refused system calls and tells the server of them, in a process of its own: code that makes a million of them waits for each,
 * and takes no time from the spawner. It ends with the spawner. */
#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdlib.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "spawn.h"
#include "spawn_calls.h"

#define REPORTS 4       /* of one sandbox in a second */
#define POLITE 10       /* how nice it is */

struct watched {
    int listener;
    uint32_t box;
    time_t second;
    uint32_t said; /* reports in that second */
    uint32_t calls; /* since the last report */
};

static void tell(int control, struct watched *watched, const char *call)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    watched->calls++;
    if (now.tv_sec != watched->second) {
        watched->second = now.tv_sec;
        watched->said = 0;
    }
    if (watched->said++ >= REPORTS)
        return;
    struct report said = {.kind = REPORT_REFUSED, .box = watched->box, .value = watched->calls};
    snprintf(said.words, sizeof said.words, "%s", call);
    if (send(control, &said, sizeof said, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof said)
        watched->calls = 0; /* else the server is behind: it is told with the next */
}

/* Answers a call that wants a routing socket with one: 0, or the error that it is to be answered. */
static int give_routing(const struct watched *watched, const struct seccomp_notif *asked, int type)
{
    int made = routing_open((pid_t)asked->pid, type);
    if (made < 0)
        return errno;
    struct seccomp_notif_addfd given = {.id = asked->id, .flags = SECCOMP_ADDFD_FLAG_SEND, .srcfd = (uint32_t)made};
    given.newfd_flags = type & SOCK_CLOEXEC ? O_CLOEXEC : 0;
    int failure = ioctl(watched->listener, SECCOMP_IOCTL_NOTIF_ADDFD, &given) < 0 ? errno : 0;
    close(made);
    return failure == ENOENT ? 0 : failure; /* ENOENT: it was killed meanwhile */
}

/* One call; false when there will be no more: all that could make them have ended. */
static bool answer(int control, struct watched *watched, uint32_t events)
{
    struct seccomp_notif asked = {0};
    if (!(events & EPOLLIN))
        return !(events & (EPOLLHUP | EPOLLERR));
    if (ioctl(watched->listener, SECCOMP_IOCTL_NOTIF_RECV, &asked) < 0)
        return true; /* its thread was killed meanwhile */
    struct refusal refusal = refusal_of(&asked.data);
    if (refusal.socket >= 0 && (refusal.error = give_routing(watched, &asked, refusal.socket)) == 0)
        return true;
    tell(control, watched, refusal.name); /* first: the event must exist before the call's effect is visible */
    struct seccomp_notif_resp answered = {.id = asked.id, .error = -refusal.error};
    if (refusal.error == 0)
        answered.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE; /* the kernel refuses it itself: whatever changes meanwhile, nothing is granted here */
    ioctl(watched->listener, SECCOMP_IOCTL_NOTIF_SEND, &answered);
    return true;
}

static void add(int loop, int socket)
{
    uint32_t box;
    int fds[2];
    ssize_t size = receive(socket, &box, sizeof box, 0, fds);
    if (size == 0 || (size < 0 && errno != EINTR))
        _exit(0); /* the spawner has ended */
    int listener = fds[0];
    struct watched *watched = listener < 0 ? NULL : calloc(1, sizeof *watched);
    if (!watched) {
        if (listener >= 0)
            close(listener);
        return;
    }
    *watched = (struct watched){.listener = listener, .box = box};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = watched};
    if (epoll_ctl(loop, EPOLL_CTL_ADD, listener, &event) < 0) {
        close(listener);
        free(watched);
    }
}

static _Noreturn void run(int control, int socket)
{
    struct epoll_event events[64], more = {.events = EPOLLIN};
    int loop = epoll_create1(EPOLL_CLOEXEC);
    if (loop < 0 || epoll_ctl(loop, EPOLL_CTL_ADD, socket, &more) < 0)
        _exit(1);
    for (;;) {
        int count = epoll_wait(loop, events, 64, -1);
        for (int i = 0; i < count; i++) {
            struct watched *watched = events[i].data.ptr;
            if (!watched) {
                add(loop, socket);
            } else if (!answer(control, watched, events[i].events)) {
                close(watched->listener);
                free(watched);
            }
        }
    }
}

int watch_start(int control)
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
        setpriority(PRIO_PROCESS, 0, POLITE);
        if (routing_prepare() < 0)
            _exit(1);
        run(control, ends[1]);
    }
    close(ends[1]);
    if (pid > 0)
        return ends[0];
    close(ends[0]);
    return -1;
}

void watch_add(int watcher, uint32_t box, int listener)
{
    pass(watcher, &box, sizeof box, listener); /* where that fails it has gone, and refused calls fail in another way */
    close(listener);
}
