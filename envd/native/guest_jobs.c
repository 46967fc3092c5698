/* What may take long (a tree to remove or to copy) runs in a forked child whose exit code is the errno. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"

#define MAX_JOBS 32
#define MAX_PATH 4096
#define MAX_DEPTH 100 /* directories open at once */

static struct job {
    pid_t pid;   /* 0: free */
    uint32_t id; /* 0: its caller has stopped waiting */
    char *entry; /* whose entry is the answer */
} jobs[MAX_JOBS];

int job_start(uint32_t id, int (*work)(const char *, const char *), const char *first, const char *second, bool entry_of_second) {
    struct job *job = jobs;
    while (job < jobs + MAX_JOBS && job->pid != 0) job++;
    if (job == jobs + MAX_JOBS) return EAGAIN;
    pid_t parent = getpid(), pid = fork();
    if (pid < 0) return errno;
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(ECHILD);
        close_range(0, ~0u, 0); /* else pipes would stay open that their readers wait to see closed */
        _exit(work(first, second));
    }
    *job = (struct job){pid, id, entry_of_second ? copy_string(second) : NULL};
    return 0;
}

bool job_reaped(pid_t pid, int status) {
    for (struct job *job = jobs; job < jobs + MAX_JOBS; job++) {
        if (job->pid != pid) continue;
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : EINTR;
        if (job->id != 0 && code != 0) answer_error(job->id, code);
        else if (job->id != 0 && job->entry != NULL) answer_entry(job->id, job->entry);
        else if (job->id != 0) answer_ok(job->id);
        free(job->entry);
        *job = (struct job){0, 0, NULL};
        return true;
    }
    return false;
}

bool job_cancel(uint32_t id) {
    for (struct job *job = jobs; job < jobs + MAX_JOBS; job++) {
        if (job->pid == 0 || job->id != id) continue;
        kill(job->pid, SIGKILL);
        job->id = 0;
        answer_error(id, ECANCELED);
        return true;
    }
    return false;
}

/* Jobs run to their end: a half-removed tree is useless. */
void jobs_forget(void) {
    for (struct job *job = jobs; job < jobs + MAX_JOBS; job++) job->id = 0;
}

void jobs_pids(struct pids *into) {
    for (struct job *job = jobs; job < jobs + MAX_JOBS; job++)
        if (job->pid != 0) pids_add(into, job->pid);
}

/* The functions below run in the child: they may block, and what they allocate goes with it. */

static bool is_dots(const char *name) {
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

/* A tree may be deeper than there are descriptors: deeper directories are moved to the top, which is read until it is empty. */
static int remove_at(int parent, const char *name, int top, int depth) {
    static unsigned moved;
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT) return 0;
    int code = errno;
    if (depth == MAX_DEPTH) {
        char hidden[48];
        snprintf(hidden, sizeof hidden, ".envd-deep-%d-%u", (int)getpid(), moved++);
        if (renameat(parent, name, top, hidden) == 0) return 0;
    }
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno == ENOTDIR || errno == ELOOP ? code : errno;
    DIR *directory = fdopendir(fd);
    code = directory == NULL ? errno : 0;
    do {
        if (directory != NULL) rewinddir(directory);
        for (struct dirent *each; code == 0 && (each = readdir(directory)) != NULL;)
            if (!is_dots(each->d_name)) code = remove_at(fd, each->d_name, depth == 0 ? fd : top, depth + 1);
        if (code == 0) code = unlinkat(parent, name, AT_REMOVEDIR) == 0 || errno == ENOENT ? -1 : errno == ENOTEMPTY && depth == 0 ? 0 : errno;
    } while (code == 0);
    if (directory != NULL) closedir(directory);
    return code < 0 ? 0 : code;
}

int remove_tree(const char *path, const char *unused) {
    (void)unused;
    const char *name;
    int parent = open_parent(path, &name);
    return parent < 0 ? -parent : remove_at(parent, name, -1, 0);
}

static int copy_content(int in, int out) {
    static char buffer[65536];
    ssize_t count;
    while ((count = read(in, buffer, sizeof buffer)) > 0)
        for (ssize_t done = 0; done < count;) {
            ssize_t written = write(out, buffer + done, (size_t)(count - done));
            if (written < 0) return errno;
            done += written;
        }
    return count < 0 ? errno : 0;
}

static int copy_file(int from, const char *name, int to, const char *copy, const struct stat *about) {
    int in = openat(from, name, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (in < 0) return errno;
    int out = openat(to, copy, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    int code = out < 0 ? errno : copy_content(in, out);
    const struct timespec times[] = {about->st_atim, about->st_mtim};
    if (code == 0 && fchmod(out, about->st_mode & 07777) != 0) code = errno;
    if (code == 0 && futimens(out, times) != 0) code = errno;
    close(in);
    if (out >= 0) close(out);
    return code;
}

static int copy_link(int from, const char *name, int to, const char *copy) {
    char target[MAX_PATH];
    ssize_t size = readlinkat(from, name, target, sizeof target - 1);
    if (size < 0) return errno;
    target[size] = 0;
    return symlinkat(target, to, copy) == 0 ? 0 : errno;
}

static int copy_at(int from, const char *name, int to, const char *copy);

static int copy_directory(int from, const char *name, int to, const char *copy, const struct stat *about) {
    int in = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (in < 0) return errno;
    if (mkdirat(to, copy, 0700) != 0) return errno;
    int out = openat(to, copy, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (out < 0) return errno;
    DIR *directory = fdopendir(in);
    int code = directory == NULL ? errno : 0;
    for (struct dirent *each; code == 0 && (each = readdir(directory)) != NULL;)
        if (!is_dots(each->d_name)) code = copy_at(in, each->d_name, out, each->d_name);
    const struct timespec times[] = {about->st_atim, about->st_mtim};
    if (code == 0 && (fchmod(out, about->st_mode & 07777) != 0 || futimens(out, times) != 0)) code = errno;
    if (directory != NULL) closedir(directory);
    close(out);
    return code;
}

static int copy_at(int from, const char *name, int to, const char *copy) {
    struct stat about;
    if (fstatat(from, name, &about, AT_SYMLINK_NOFOLLOW) != 0) return errno;
    if (S_ISDIR(about.st_mode)) return copy_directory(from, name, to, copy, &about);
    if (S_ISLNK(about.st_mode)) return copy_link(from, name, to, copy);
    if (S_ISREG(about.st_mode)) return copy_file(from, name, to, copy, &about);
    return mknodat(to, copy, about.st_mode, 0) == 0 ? 0 : errno; /* fifos and sockets; devices are refused by the kernel */
}

/* Moves what can't be renamed. A failure leaves the source whole and the target as it was. */
int copy_and_remove(const char *source, const char *target) {
    size_t length = strlen(source);
    if (strncmp(source, target, length) == 0 && target[length] == '/') return EINVAL; /* into itself */
    const char *old, *name;
    int from = open_parent(source, &old), to = open_parent(target, &name);
    if (from < 0 || to < 0) return from < 0 ? -from : -to;
    char hidden[32];
    snprintf(hidden, sizeof hidden, ".envd-move-%d", (int)getpid());
    int code = copy_at(from, old, to, hidden);
    if (code == 0 && renameat(to, hidden, to, name) != 0) code = errno;
    if (code != 0) {
        if (code != EEXIST) remove_at(to, hidden, -1, 0);
        return code;
    }
    return remove_at(from, old, -1, 0);
}
