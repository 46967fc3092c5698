/* Parts of the program envd-guest that are not the agent's. */
#ifndef ENVD_MAIN_H
#define ENVD_MAIN_H

#include <stdbool.h>

struct container {
    const char *template; /* the pristine workspace, read-only; NULL: this is no container */
    const char *disk;     /* an empty tmpfs, whose size is what the sandbox may write; out of sight afterwards */
    bool read_only;       /* the workspace can't be written */
    bool supervised;      /* what is started keeps the capabilities by which a verifier becomes another user than the tests */
};

/* Mounts the workspace over the template and /tmp, and gives up every capability. 0, or -1 after its reason was printed. */
int container_enter(const struct container *container, const char *workspace);

/* Forks and returns in the child, which is to become the agent. The parent stays as its supervisor: when the agent has ended, however that was, it kills
 * all that the agent left and ends with its code. 0, or -1 after its reason was printed. */
int supervised_fork(void);

#endif
