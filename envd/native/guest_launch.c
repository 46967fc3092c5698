/* Starts a program as posix_spawn does (a vfork: no page tables are copied), with exactly the descriptors it is meant to have. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agent.h"

#define CONTROL 200 /* the numbers that the shell's driver knows */
#define STATUS 201
#define DEFAULT_PATH "/usr/local/bin:/usr/bin:/bin"

static const char *path_of(char *const *env) {
    for (; *env != NULL; env++)
        if (strncmp(*env, "PATH=", 5) == 0) return *env + 5;
    return DEFAULT_PATH;
}

static int execute(const struct launch *what) {
    const char *name = what->argv[0];
    if (what->file != NULL) execve(what->file, what->argv, what->env);
    if (strchr(name, '/') != NULL) {
        execve(name, what->argv, what->env);
        return errno;
    }
    int code = ENOENT;
    char file[4096];
    for (const char *at = path_of(what->env);; at++) {
        size_t size = strcspn(at, ":");
        if (size + strlen(name) + 2 <= sizeof file) {
            memcpy(file, at, size);
            file[size] = '/';
            strcpy(file + size + (size > 0), name);
            execve(file, what->argv, what->env);
            if (errno == EACCES) code = EACCES; /* remembered, as execvp does: another directory may have the program */
            else if (errno != ENOENT && errno != ENOTDIR) return errno;
        }
        at += size;
        if (*at == 0) return code;
    }
}

struct child {
    const struct launch *what;
    volatile int code;
};

static bool place(int fd, int number) {
    return fd == number ? fcntl(fd, F_SETFD, 0) == 0 : dup2(fd, number) == number;
}

/* The agent's own descriptors lie below those of a shell only by chance: all that could be overwritten is lifted first. */
static int lifted(int fd) {
    return fd < 0 || fd > STATUS ? fd : fcntl(fd, F_DUPFD_CLOEXEC, STATUS + 1);
}

/* Runs in the parent's memory until it executes: only system calls, and the one word that says what went wrong. */
static int child_main(void *given) {
    struct child *child = given;
    const struct launch *what = child->what;
    sigset_t none;
    sigemptyset(&none);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_DFL);
    int input = lifted(what->input), output = lifted(what->output), error = lifted(what->error);
    int control = lifted(what->control), status = lifted(what->status), directory = lifted(what->directory);
    bool good = setsid() >= 0;
    if (what->parent > 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != what->parent) _exit(1);
    }
    good = good && place(input, 0) && place(output, 1) && place(error, 2);
    good = good && (control < 0 || (place(control, CONTROL) && place(status, STATUS)));
    good = good && (!what->terminal || ioctl(0, TIOCSCTTY, 0) == 0);
    good = good && (directory < 0 || fchdir(directory) == 0);
    good = good && sigprocmask(SIG_SETMASK, &none, NULL) == 0;
    child->code = good ? execute(what) : errno;
    _exit(127);
}

int launch(const struct launch *what, pid_t *pid) {
    static char stack[32768] __attribute__((aligned(16)));
    struct child child = {what, 0};
    sigset_t all, old;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &old); /* no handler may run in memory that two processes share */
    pid_t found = clone(child_main, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, &child);
    int code = found < 0 ? errno : child.code;
    sigprocmask(SIG_SETMASK, &old, NULL);
    if (found > 0 && code == 0) *pid = found;
    return code;
}
