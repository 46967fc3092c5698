/* The agent's start and end: a known state of the process before, nothing left of what it started after. */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"

#define FLUSH_MS 1000
#define HEAP_KEPT (32 * 1024)

struct guest_config config;

/* Ignored signals and blocked ones would be inherited by all that is started. */
static void reset_signals(void) {
    struct sigaction usual = {.sa_handler = SIG_DFL};
    for (int number = 1; number <= SIGRTMAX; number++) sigaction(number, &usual, NULL);
    signal(SIGPIPE, SIG_IGN); /* a write into what nobody reads, and beyond RLIMIT_FSIZE, answers an errno */
    signal(SIGXFSZ, SIG_IGN);
}

/* Out of the way of 0, 1 and 2, which become /dev/null. */
static int lift(int fd) {
    return fd < 0 || fd > 2 ? fd : fcntl(fd, F_DUPFD_CLOEXEC, 3);
}

static void close_between(int first, int last) {
    if (first <= last) close_range((unsigned)first, (unsigned)last, 0);
}

static bool keep_only(int fds[3]) {
    for (int i = 0; i < 3; i++)
        for (int j = i + 1; j < 3; j++)
            if (fds[j] < fds[i]) {
                int swapped = fds[i];
                fds[i] = fds[j];
                fds[j] = swapped;
            }
    int next = 3;
    for (int i = 0; i < 3; i++) {
        if (fds[i] < next) continue;
        close_between(next, fds[i] - 1);
        next = fds[i] + 1;
    }
    close_range((unsigned)next, ~0u, 0);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0) return false;
    for (int number = 0; number < 3; number++)
        if (null != number) dup2(null, number);
    if (null > 2) close(null);
    return true;
}

static bool prepare(void) {
    reset_signals();
    umask(022);
    prctl(PR_SET_DUMPABLE, 0); /* what runs in the sandbox can't trace it or read its memory */
    prctl(PR_SET_NAME, "envd-guest");
    if (!config.is_init) prctl(PR_SET_CHILD_SUBREAPER, 1);
#ifdef __GLIBC__
    mallopt(M_TRIM_THRESHOLD, HEAP_KEPT); /* an idle agent needs little memory: thousands run on one machine */
    mallopt(M_TOP_PAD, 4096);
    mallopt(M_MMAP_THRESHOLD, 64 * 1024);
#endif
    return mkdir(config.scratch, 0700) == 0 || errno == EEXIST;
}

/* The kernel ends what is below process 1. Elsewhere nothing else would. */
static void end_all(void) {
    if (config.is_init) return;
    tree_kill(getpid(), NULL);
    while (waitpid(-1, NULL, WNOHANG) > 0) continue;
}

int agent_run(int fd_in, int fd_out, int listener, const struct guest_config *given) {
    config = *given;
    bool same = fd_in == fd_out;
    fd_in = lift(fd_in);
    fd_out = same ? fd_in : lift(fd_out);
    listener = lift(listener);
    int kept[3] = {fd_in, fd_out, listener};
    if (!keep_only(kept) || !prepare() || !loop_open() || !stream_open(fd_in, fd_out, listener)) return 2;
    int code = loop_run();
    uploads_forget();
    stream_flush(now_ms() + FLUSH_MS);
    end_all();
    return code;
}

int guest_main(int fd_in, int fd_out, const struct guest_config *given) {
    return agent_run(fd_in, fd_out, -1, given);
}
