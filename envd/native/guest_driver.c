/* The stateful bash: working directory, variables, functions and background processes live on between commands.
 *
 * bash reads commands from a private descriptor and reports exit codes on another; both are closed while a command runs, and both are sockets, which
 * nobody can open a second time through /proc/PID/fd. Every command writes to its own fifo, so what an earlier command left running can't mix into a
 * later answer. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

#define MAX_BACKGROUND 256

#define READ "builtin read -r -d '' -u 200 __envd_"
#define REPORT "builtin printf '%s %d\\n' \"$__envd_id\" \"$?\" >&201"
#define TOGETHER "{ ( exec 200<&-; builtin eval \"$__envd_command\" 201>&- ) </dev/null >\"$__envd_out\" 2>&1; " REPORT "; } &"
#define ALONE "builtin eval \"$__envd_command\" 200<&- 201>&- </dev/null >\"$__envd_out\" 2>&1; " REPORT
/* On one line, so that bash counts an error's line from the command's own first line. */
#define DRIVER                                                                                       \
    "while " READ "mode && " READ "out && " READ "id && " READ "command; do if [[ $__envd_mode == together ]]; then " \
    TOGETHER " else " ALONE "; fi; done"

static pid_t shell;
static struct source control = {-1, NULL}, status = {-1, NULL};
static uint8_t *unsent; /* what bash has not yet read */
static size_t unsent_size, unsent_room;
static uint64_t counter;

/* Pipes that background processes may still write to: drained, so that they never block on a full one. */
static struct source *background[MAX_BACKGROUND];
static size_t oldest;

bool driver_running(void) { return shell != 0; }
pid_t driver_pid(void) { return shell; }

static void forget_unsent(void) {
    free(unsent);
    unsent = NULL;
    unsent_size = unsent_room = 0;
}

static void send_unsent(struct source *source, uint32_t events) {
    bool closed = events & (EPOLLERR | EPOLLHUP);
    ssize_t count = unsent_size > 0 && !closed ? write(source->fd, unsent, unsent_size) : 0;
    if ((count < 0 && errno != EAGAIN && errno != EINTR) || closed) {
        source_remove(source); /* the shell has died or will: its end tells what became of it */
        forget_unsent();
        return;
    }
    if (count > 0) {
        unsent_size -= (size_t)count;
        memmove(unsent, unsent + count, unsent_size);
    }
    source_change(source, unsent_size > 0 ? EPOLLOUT : 0);
    if (unsent_size == 0) forget_unsent();
}

static void queue(const char *data, size_t size) {
    if (unsent_size + size > unsent_room) unsent = reallocate(unsent, unsent_room = unsent_size + size + 256);
    memcpy(unsent + unsent_size, data, size);
    unsent_size += size;
}

/* Lines of "number code". Anything may write there that guesses the descriptor: what is no such line counts for nothing. */
void driver_read_status(void) {
    static char line[48];
    static size_t size;
    char buffer[512];
    if (status.fd < 0) return;
    ssize_t count = read(status.fd, buffer, sizeof buffer);
    if (count == 0) source_remove(&status); /* its end; SIGCHLD tells what became of the shell */
    for (ssize_t i = 0; i < count; i++) {
        if (buffer[i] != '\n') {
            if (size < sizeof line) line[size++] = buffer[i];
            continue;
        }
        uint64_t number;
        unsigned code;
        int end = 0;
        bool whole = size < sizeof line;
        line[whole ? size : 0] = 0;
        size = 0;
        if (whole && sscanf(line, "%" SCNu64 " %u%n", &number, &code, &end) == 2 && line[end] == 0 && code < 256) driver_report(number, (int)code);
    }
}

static void status_ready(struct source *source, uint32_t events) {
    if (events & EPOLLIN) driver_read_status();
    else source_remove(source);
}

static char *script(void) {
    /* Quoted for the shell; a quote in the path is closed, escaped and opened again. */
    char *text = allocate(4 * strlen(config.workspace) + sizeof DRIVER + 16), *at = stpcpy(text, "cd '");
    for (const char *from = config.workspace; *from != 0; from++) {
        if (*from == '\'') at = stpcpy(at, "'\\'");
        *at++ = *from;
    }
    stpcpy(stpcpy(at, "'; "), DRIVER);
    return text;
}

/* The same bash without libraries to find and to relocate (Debian's package bash-static): it starts in two thirds of the time and takes a
 * third less memory. It is called bash like the other, so that no message tells which one runs. */
#define STATIC_BASH "/bin/bash-static"

static int start_bash(int control_read, int status_write) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0) return errno;
    char *text = script(), **env = merged_env(NULL);
    char *const argv[] = {"bash", "--norc", "--noprofile", "-c", text, NULL};
    struct launch what = {.file = STATIC_BASH, .argv = argv, .env = env, .directory = -1, .input = null, .output = null, .error = null,
                          .control = control_read, .status = status_write, .parent = config.is_init ? 0 : getpid()};
    int code = launch(&what, &shell);
    close(null);
    free(env);
    free(text);
    return code;
}

int driver_start(void) {
    int down[2], up[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, down) != 0) return errno;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, up) != 0) {
        int code = errno;
        close(down[0]);
        close(down[1]);
        return code;
    }
    int code = start_bash(down[0], up[1]);
    close(down[0]);
    close(up[1]);
    if (code != 0) {
        close(down[1]);
        close(up[0]);
        return code;
    }
    fcntl(down[1], F_SETFL, O_NONBLOCK);
    fcntl(up[0], F_SETFL, O_NONBLOCK);
    control = (struct source){down[1], send_unsent};
    status = (struct source){up[0], status_ready};
    source_add(&control, 0);
    source_add(&status, EPOLLIN);
    return 0;
}

static void fifo_path(const char *name, char path[4096]) {
    snprintf(path, 4096, "%s/%s", config.scratch, name);
}

static void pump(struct source *source, uint32_t events) {
    (void)events;
    struct command *command = (struct command *)((char *)source - offsetof(struct command, pipe));
    ssize_t count = read(source->fd, pipe_buffer(), PIPE_PIECE);
    if (count > 0) output_feed(command->output, pipe_buffer(), (size_t)count);
    else if (count == 0) source_remove(source); /* no writer is left; the status is still to come */
}

static int open_fifo(struct command *command) {
    char path[4096];
    fifo_path(command->name, path);
    if (mkfifo(path, 0600) != 0) return errno;
    command->pipe = (struct source){open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC), pump};
    int code = command->pipe.fd < 0 || !source_add(&command->pipe, EPOLLIN) ? errno : 0;
    if (code == 0) return 0;
    unlink(path);
    if (command->pipe.fd >= 0) close(command->pipe.fd);
    command->pipe.fd = -1;
    return code;
}

int driver_submit(struct command *command, bool together, uint32_t limit) {
    command->number = ++counter;
    snprintf(command->name, sizeof command->name, "out-%" PRIu64, counter);
    int code = open_fifo(command);
    if (code != 0) return code;
    command->output = output_new(limit);
    char path[4096], number[24];
    fifo_path(command->name, path);
    const char *mode = together ? "together" : "alone";
    queue(mode, strlen(mode) + 1);
    queue(path, strlen(path) + 1);
    queue(number, (size_t)snprintf(number, sizeof number, "%" PRIu64, counter) + 1);
    queue(command->text, command->size + 1);
    send_unsent(&control, 0);
    return 0;
}

static void drain(struct source *source, uint32_t events) {
    (void)events;
    ssize_t count = read(source->fd, pipe_buffer(), PIPE_PIECE);
    if (count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR))) return;
    for (size_t i = 0; i < MAX_BACKGROUND; i++)
        if (background[i] == source) background[i] = NULL;
    source_close(source);
    free(source);
}

/* Beyond what can be kept the oldest pipe is closed: its writers then get SIGPIPE, which beats blocking them for ever. */
static void keep_pipe(int fd) {
    size_t place = 0;
    while (place < MAX_BACKGROUND && background[place] != NULL) place++;
    if (place == MAX_BACKGROUND) {
        place = oldest++ % MAX_BACKGROUND;
        source_close(background[place]);
        free(background[place]);
    }
    struct source *source = allocate(sizeof *source);
    *source = (struct source){fd, drain};
    background[place] = source;
    if (!source_add(source, EPOLLIN)) drain(source, 0);
}

/* Takes what a finished command left in its pipe: a bounded amount, so that a flood can't hold us here. */
void driver_collect(struct command *command) {
    if (command->pipe.fd < 0) return;
    char path[4096];
    fifo_path(command->name, path);
    unlink(path);
    bool ended = false;
    for (int i = 0; i < 64 && !ended; i++) {
        ssize_t count = read(command->pipe.fd, pipe_buffer(), PIPE_PIECE);
        if (count > 0) output_feed(command->output, pipe_buffer(), (size_t)count);
        else if (count < 0 && errno == EAGAIN) break;
        else ended = count == 0;
    }
    if (ended) {
        source_close(&command->pipe);
        return;
    }
    source_remove(&command->pipe);
    keep_pipe(command->pipe.fd);
    command->pipe.fd = -1;
}

void driver_stop(void) {
    source_close(&control);
    source_close(&status);
    forget_unsent();
    shell = 0;
}
