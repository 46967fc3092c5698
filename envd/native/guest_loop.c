/* The loop: waits for descriptors, ended children and deadlines, and runs what is due. */
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

static int epoll = -1;
static int ended = -1; /* the exit code, once the loop is to end */
static struct source children;

int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

bool source_add(struct source *source, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = source};
    return epoll_ctl(epoll, EPOLL_CTL_ADD, source->fd, &event) == 0;
}

void source_change(struct source *source, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = source};
    epoll_ctl(epoll, EPOLL_CTL_MOD, source->fd, &event);
}

void source_remove(struct source *source) {
    epoll_ctl(epoll, EPOLL_CTL_DEL, source->fd, NULL);
}

void source_close(struct source *source) {
    if (source->fd < 0) return;
    source_remove(source); /* a forked child may still hold the descriptor, and epoll would go on reporting it */
    close(source->fd);
    source->fd = -1;
}

void loop_end(int code) {
    if (ended < 0) ended = code;
}

static void reap(struct source *source, uint32_t events) {
    (void)events;
    struct signalfd_siginfo info;
    while (read(source->fd, &info, sizeof info) > 0) continue;
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (shell_reaped(pid, status) || process_reaped(pid)) continue;
        job_reaped(pid, status); /* all others are orphaned descendants */
    }
}

bool loop_open(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_SETMASK, &set, NULL);
    epoll = epoll_create1(EPOLL_CLOEXEC);
    children = (struct source){signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC), reap};
    return epoll >= 0 && children.fd >= 0 && source_add(&children, EPOLLIN);
}

static int wait_time(int64_t now) {
    if (lists_busy() && !stream_full()) return 0;
    int64_t due = shell_deadline();
    const int64_t others[] = {processes_deadline(), polls_deadline(), stream_deadline()};
    for (size_t i = 0; i < 3; i++)
        if (others[i] < due) due = others[i];
    if (due == NEVER) return -1;
    if (due <= now) return 0;
    return due - now > INT_MAX ? INT_MAX : (int)(due - now);
}

int loop_run(void) {
    int64_t now = now_ms();
    while (ended < 0) {
        struct epoll_event event;
        /* One event a turn: a handler may free any other source, and epoll takes turns among those that are ready. */
        int count = epoll_wait(epoll, &event, 1, wait_time(now));
        if (count < 0 && errno != EINTR) return 2;
        if (count == 1) {
            struct source *source = event.data.ptr;
            source->ready(source, event.events);
        }
        now = now_ms();
        shell_tick(now);
        processes_tick(now);
        stream_tick(now);
        polls_check(now);
        lists_step();
        watches_resume();
    }
    return ended;
}
