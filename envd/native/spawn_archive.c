/* Snapshots: tar writes and reads what a sandbox changed, without any privilege. */
#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "spawn.h"

#define MOST_ARCHIVES 64

static struct {
    pid_t pid;
    uint32_t box;
} archives[MOST_ARCHIVES];

/* Runs tar as the user that owns the files, unprivileged, on what a snapshot holds. */
void archive_unpack(uint32_t owner, int archive, const char **failure)
{
    pid_t worker = fork();
    if (worker < 0) {
        *failure = "efork for tar failed";
        return;
    }
    if (worker == 0) {
        if (chdir(HIDDEN_BOX) < 0 || dup2(archive, 0) < 0 || (setgroups(0, NULL) < 0 && owner != 0))
            _exit(126);
        if (setresgid(owner, owner, owner) < 0 || setresuid(owner, owner, owner) < 0)
            _exit(126);
        close_range(3, ~0U, 0);
        /* As uid 0 tar expects to enter the directories that it makes, whatever their mode. */
        if (owner == 0 && drop_capabilities(1U << CAP_DAC_OVERRIDE) < 0)
            _exit(126);
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || filter_calls() < 0)
            _exit(126);
        execl("/usr/bin/tar", "tar", "--extract", "--file=-", "--no-same-owner", "--preserve-permissions", "--xattrs",
              "--xattrs-include=user.overlay.opaque", "--delay-directory-restore", "--", "upper", "tmp", (char *)NULL);
        _exit(127);
    }
    int status;
    while (waitpid(worker, &status, 0) < 0 && errno == EINTR)
        ;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return;
    *failure = "etar can't unpack the snapshot: it is damaged, or larger than disk_mb";
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        *failure = "ethere is no /usr/bin/tar: install tar";
}

static _Noreturn void run_tar(int scratch, int out)
{
    if (fchdir(scratch) < 0 || dup2(out, 1) < 0)
        _exit(126);
    close_range(3, ~0U, 0);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || filter_calls() < 0)
        _exit(126);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execl("/usr/bin/tar", "tar", "--create", "--file=-", "--format=pax", "--numeric-owner", "--sparse", "--xattrs",
          "--xattrs-include=user.overlay.opaque", "--warning=no-file-ignored", "--exclude=tmp/.envd", "--", "upper", "tmp", (char *)NULL);
    _exit(127);
}

void archive_write(uint32_t id, int scratch, int out)
{
    int slot = 0;
    while (slot < MOST_ARCHIVES && archives[slot].pid != 0)
        slot++;
    if (scratch < 0 || slot == MOST_ARCHIVES || out < 0) {
        report(REPORT_ARCHIVED, id, ESRCH, slot == MOST_ARCHIVES ? "too many snapshots at a time" : "the sandbox has ended");
        return;
    }
    pid_t pid = fork();
    if (pid == 0) {
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        run_tar(scratch, out);
    }
    if (pid < 0) {
        report(REPORT_ARCHIVED, id, errno, "fork failed");
        return;
    }
    archives[slot].pid = pid;
    archives[slot].box = id;
}

void archive_reaped(pid_t pid, int status)
{
    for (int i = 0; i < MOST_ARCHIVES; i++) {
        if (archives[i].pid != pid)
            continue;
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        const char *words = code == 127 ? "there is no /usr/bin/tar: install tar" : "tar failed: a full disk, or files changed under it";
        report(REPORT_ARCHIVED, archives[i].box, code, code ? words : "");
        archives[i].pid = 0;
        return;
    }
}
