/* One small process over each START: what the program starts and leaves behind becomes its child, however often it forks away, so that a kill of
 * the tree finds all of it. It ends when nothing of the tree is left. */
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"

static void tell(int report, uint32_t kind, int32_t value) {
    struct report message = {kind, value};
    if (write(report, &message, sizeof message) < 0) _exit(1); /* the agent is gone */
}

/* What it keeps open would look like an open pipe of the program to the agent. */
static void keep_only(int report) {
    if (report > 0) close_range(0, (unsigned)report - 1, 0);
    close_range((unsigned)report + 1, ~0u, 0);
}

void supervise(const struct launch *what, int report) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_NAME, "envd-supervisor");
    struct launch own = *what;
    own.parent = getpid();
    pid_t main_pid = 0;
    int code = launch(&own, &main_pid);
    keep_only(report);
    tell(report, code == 0 ? REPORT_STARTED : REPORT_FAILED, code == 0 ? main_pid : code);
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, 0)) > 0 || errno == EINTR;)
        if (pid == main_pid) tell(report, REPORT_ENDED, WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
    _exit(0);
}
