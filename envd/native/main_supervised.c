/* A process over the agent, for sandboxes without namespaces: it adopts what outlives the agent, and kills it. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"
#include "main.h"

static int exit_code(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

static _Noreturn void supervise_agent(pid_t agent) {
    close_range(0, ~0u, 0); /* the stream is the agent's alone */
    prctl(PR_SET_NAME, "envd-supervisor");
    int status = 0;
    for (pid_t pid; (pid = waitpid(-1, &status, 0)) != agent;)
        if (pid < 0 && errno != EINTR) _exit(1);
    tree_kill(getpid(), NULL);
    _exit(exit_code(status));
}

int supervised_fork(void) {
    pid_t agent = prctl(PR_SET_CHILD_SUBREAPER, 1) < 0 ? -1 : fork();
    if (agent < 0) fprintf(stderr, "envd-guest: can't start its supervisor: %s\n", strerror(errno));
    if (agent > 0) supervise_agent(agent);
    return agent < 0 ? -1 : 0;
}
