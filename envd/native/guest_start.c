/* START: the program's ends of pipes or of a terminal, its directory, its supervisor. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"

static void close_all(const int list[3]) {
    for (int i = 0; i < 3; i++) {
        bool repeated = false;
        for (int j = 0; j < i; j++) repeated = repeated || list[j] == list[i];
        if (list[i] >= 0 && !repeated) close(list[i]);
    }
}

static int open_terminal(struct ends *ends, uint32_t rows, uint32_t columns) {
    int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (master < 0) return errno;
    ends->ours[0] = master;
    int slave = grantpt(master) == 0 && unlockpt(master) == 0 ? ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC) : -1;
    if (slave < 0) {
        const char *name = ptsname(master);
        slave = name != NULL ? open(name, O_RDWR | O_NOCTTY | O_CLOEXEC) : -1;
    }
    if (slave < 0) return errno;
    ends->theirs[0] = ends->theirs[1] = ends->theirs[2] = slave;
    struct winsize size = {.ws_row = (unsigned short)(rows ? rows : 24), .ws_col = (unsigned short)(columns ? columns : 80)};
    ioctl(master, TIOCSWINSZ, &size);
    ends->ours[1] = fcntl(master, F_DUPFD_CLOEXEC, 3);
    return ends->ours[1] < 0 ? errno : 0;
}

static int open_pipe(int *reader, int *writer) {
    int both[2];
    if (pipe2(both, O_CLOEXEC) != 0) return errno;
    *reader = both[0];
    *writer = both[1];
    return 0;
}

static int open_pipes(struct ends *ends, uint8_t flags) {
    int code = 0;
    if (flags & START_STDIN) code = open_pipe(&ends->theirs[0], &ends->ours[0]);
    else if ((ends->theirs[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0) code = errno;
    if (code == 0) code = open_pipe(&ends->ours[1], &ends->theirs[1]);
    if (code == 0) code = open_pipe(&ends->ours[2], &ends->theirs[2]);
    return code;
}

static int open_directory(struct span path) {
    static const char workspace[] = "/workspace";
    char name[4096];
    size_t prefix = sizeof workspace - 1;
    bool inside = path.size == 0 || path.data[0] != '/' ||
                  (path.size >= prefix && memcmp(path.data, workspace, prefix) == 0 && (path.size == prefix || path.data[prefix] == '/'));
    if (!inside) {
        if (path.size >= sizeof name) return -ENAMETOOLONG;
        memcpy(name, path.data, path.size);
        name[path.size] = 0;
        int fd = open(name, O_PATH | O_DIRECTORY | O_CLOEXEC);
        return fd < 0 ? -errno : fd;
    }
    int code = normalise(path, name);
    return code < 0 ? code : open_in_root(name, O_PATH | O_DIRECTORY, 0);
}

/* On failure, all descriptors are closed. */
static int fork_supervisor(struct process *process, struct launch *what) {
    int both[2], code;
    /* Sockets, which what runs below it can't open a second time through /proc/PID/fd; each report is one message. */
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, both) != 0) return errno;
    int reader = both[0], writer = both[1];
    pid_t parent = getpid(), pid = fork();
    if (pid < 0) {
        code = errno;
        close(reader);
        close(writer);
        return code;
    }
    if (pid == 0) {
        if (!config.is_init) prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        supervise(what, writer);
    }
    close(writer);
    fcntl(reader, F_SETFL, O_NONBLOCK);
    process->supervisor = pid;
    process->start = start_ticks(pid);
    process->report.fd = reader;
    return 0;
}

struct start {
    char **argv, **env;
    struct span directory;
    uint8_t flags;
    uint32_t rows, columns, timeout_ms, ring;
};

static int start(uint32_t id, struct start *ask) {
    if (ask->argv[0] == NULL || ask->argv[0][0] == 0) return EINVAL;
    if (!process_room()) return EAGAIN;
    struct ends ends = {{-1, -1, -1}, {-1, -1, -1}};
    int directory = open_directory(ask->directory);
    bool terminal = ask->flags & START_PTY;
    int code = directory < 0 ? -directory : terminal ? open_terminal(&ends, ask->rows, ask->columns) : open_pipes(&ends, ask->flags);
    struct process *process = allocate(sizeof *process);
    *process = (struct process){.start_id = id, .starting = true, .report = {-1, NULL}, .terminal = terminal, .deadline = NEVER};
    char **env = merged_env(ask->env);
    struct launch what = {.argv = ask->argv, .env = env, .directory = directory, .input = ends.theirs[0], .output = ends.theirs[1],
                          .error = ends.theirs[2], .control = -1, .status = -1, .terminal = terminal};
    if (code == 0) code = fork_supervisor(process, &what);
    free(env);
    if (directory >= 0) close(directory);
    close_all(ends.theirs);
    if (code != 0) {
        close_all(ends.ours);
        free(process);
        return code;
    }
    process->argv = ask->argv;
    if (ask->timeout_ms > 0) process->deadline = now_ms() + ask->timeout_ms;
    process_add(process, &ends, ask->ring);
    return 0;
}

void ask_start(uint32_t id, struct reader *from) {
    struct start ask;
    ask.argv = take_strings(from);
    ask.env = take_strings(from);
    ask.directory = take_bytes(from);
    ask.flags = take_u8(from);
    ask.rows = take_u32(from);
    ask.columns = take_u32(from);
    ask.timeout_ms = take_u32(from);
    ask.ring = take_u32(from);
    int code = taken(from) ? start(id, &ask) : 0;
    free(ask.env);
    if (!taken(from) || code != 0) free(ask.argv);
    if (taken(from) && code != 0) answer_error(id, code);
}

