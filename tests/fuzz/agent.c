/* The agent as the fuzzer runs it: on a listening socket, so that it outlives each input, and without running what an input names. Everything else of
 * it is the real one. What it would start is played by forked children: a shell that answers, in its way, and programs that write something. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "agent.h"

void coverage_open(const char *path);
int __wrap_launch(const struct launch *what, pid_t *pid);

static unsigned draw(unsigned below)
{
    return (unsigned)random() % below;
}

static void put_noise(int fd, size_t most)
{
    static char noise[70000];
    size_t size = draw((unsigned)most) + 1;
    memset(noise, 'a' + (int)draw(26), size);
    for (size_t done = 0; done < size;) {
        ssize_t count = write(fd, noise + done, size - done);
        if (count <= 0)
            return;
        done += (size_t)count;
    }
}

/* Sandboxed code can guess the descriptor that a shell reports on, and write to it. */
static void say_status(int status, const char *id)
{
    switch (draw(8)) {
    case 0: dprintf(status, "%s %u\nnonsense\n18446744073709551615 4294967295\n", id, draw(300)); break;
    case 1: dprintf(status, "%0100d %s", 7, id); put_noise(status, 600); dprintf(status, "\n%s %u\n", id, draw(256)); break;
    default: dprintf(status, "%s %u\n", id, draw(256));
    }
}

enum { INPUT, OUTPUT, ERROR, CONTROL, STATUS, KEPT };

/* As a program's start leaves them: nothing else of the agent's is open, least of all its stream. */
static void keep_only(const struct launch *what)
{
    const int given[KEPT] = {what->input, what->output, what->error, what->control, what->status};
    int lifted[KEPT];
    for (int i = 0; i < KEPT; i++)
        lifted[i] = given[i] < 0 ? -1 : fcntl(given[i], F_DUPFD, KEPT);
    for (int i = 0; i < KEPT; i++)
        if (lifted[i] < 0 || dup2(lifted[i], i) < 0)
            close(i);
    close_range(KEPT, ~0u, 0);
}

static _Noreturn void play_shell(void)
{
    char *fields[4] = {NULL, NULL, NULL, NULL};
    size_t rooms[4] = {0, 0, 0, 0};
    FILE *commands = fdopen(CONTROL, "r");
    while (commands != NULL) {
        for (int i = 0; i < 4; i++)
            if (getdelim(&fields[i], &rooms[i], 0, commands) < 0)
                _exit(0);
        if (draw(16) == 0)
            _exit((int)draw(256));
        int out = open(fields[1], O_WRONLY | O_NONBLOCK | O_CLOEXEC);
        if (out >= 0)
            put_noise(out, draw(4) == 0 ? 70000 : 600);
        if (draw(16) != 0)
            say_status(STATUS, fields[2]);
        if (out >= 0)
            close(out);
    }
    _exit(1);
}

static _Noreturn void play_program(bool terminal)
{
    if (terminal && setsid() >= 0)
        ioctl(INPUT, TIOCSCTTY, 0);
    put_noise(OUTPUT, draw(3) == 0 ? 70000 : 600);
    put_noise(ERROR, 600);
    if (draw(3) == 0)
        usleep(1000 * draw(30));
    _exit((int)draw(256));
}

int __wrap_launch(const struct launch *what, pid_t *pid)
{
    unsigned seed = (unsigned)random();
    *pid = fork();
    if (*pid != 0)
        return *pid < 0 ? errno : 0;
    srandom(seed ^ (unsigned)getpid());
    keep_only(what);
    if (what->control >= 0)
        play_shell();
    play_program(what->terminal);
}

/* fuzz-agent LISTENER plain|escaped DIRECTORY COVERAGE */
int main(int count, char **words)
{
    char workspace[4096], scratch[4096];
    if (count != 5)
        return 2;
    snprintf(workspace, sizeof workspace, "%s/workspace", words[3]);
    snprintf(scratch, sizeof scratch, "%s/scratch", words[3]);
    coverage_open(words[4]);
    struct guest_config given = {.workspace = workspace, .scratch = scratch, .escaped = strcmp(words[2], "escaped") == 0};
    return agent_run(-1, -1, atoi(words[1]), &given);
}
