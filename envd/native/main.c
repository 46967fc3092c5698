/* envd-guest: the agent as a program, for containers, virtual machines and plain directories. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/vm_sockets.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#include "main.h"

#define SERIAL_WAIT_MS 10000

struct options {
    struct guest_config config;
    const char *serial;
    int fd;
    long port;
    bool stdio, init, supervised;
    struct container container;
};

static int fail(const char *what, const char *why) {
    fprintf(stderr, "envd-guest: %s: %s\n", what, why);
    return 2;
}

static int usage(void) {
    fputs("usage: envd-guest (--fd N | --stdio | --serial PATH | --vsock PORT) --workspace DIR --scratch DIR\n"
          "                  [--escaped] [--init] [--supervised] [--template DIR --disk DIR [--read-only] [--two-users]]\n"
          "       envd-guest --name-host NAME\n"
          "  --escaped     the stream can be reset (envd/native/protocol.h); --serial implies it\n"
          "  --init        process 1 of a virtual machine: mounts what is missing, owns the clock, powers off at the end\n"
          "  --supervised  a process over the agent kills what an agent leaves that was killed, where no namespace does\n"
          "  --template    process 1 of a container: mounts the workspace over that directory and the tmpfs --disk, then gives up its capabilities\n",
          stderr);
    return 2;
}

static bool number(const char *text, long most, long *value) {
    char *end;
    errno = 0;
    *value = strtol(text, &end, 10);
    return errno == 0 && end != text && *end == 0 && *value >= 0 && *value <= most;
}

static bool parse(int count, char **words, struct options *options) {
    static const struct option known[] = {
        {"fd", required_argument, NULL, 'f'},      {"stdio", no_argument, NULL, 'o'},     {"serial", required_argument, NULL, 's'},
        {"vsock", required_argument, NULL, 'v'},   {"workspace", required_argument, NULL, 'w'}, {"scratch", required_argument, NULL, 't'},
        {"escaped", no_argument, NULL, 'e'},       {"init", no_argument, NULL, 'i'},
        {"template", required_argument, NULL, 'p'}, {"disk", required_argument, NULL, 'd'},    {"read-only", no_argument, NULL, 'r'},
        {"two-users", no_argument, NULL, 'y'},
        {"supervised", no_argument, NULL, 'u'},    {NULL, 0, NULL, 0}};
    long value = 0;
    for (int option; (option = getopt_long(count, words, "", known, NULL)) != -1;) {
        switch (option) {
        case 'f': if (!number(optarg, 1 << 20, &value)) return false; options->fd = (int)value; break;
        case 'o': options->stdio = true; break;
        case 's': options->serial = optarg; options->config.escaped = options->config.stays = true; break;
        case 'v': if (!number(optarg, UINT32_MAX, &options->port)) return false; break;
        case 'w': options->config.workspace = optarg; break;
        case 't': options->config.scratch = optarg; break;
        case 'e': options->config.escaped = true; break;
        case 'i': options->init = true; break;
        case 'p': options->container.template = optarg; break;
        case 'd': options->container.disk = optarg; break;
        case 'u': options->supervised = true; break;
        case 'r': options->container.read_only = true; break;
        case 'y': options->container.supervised = true; break;
        default: return false;
        }
    }
    if ((options->container.template == NULL) != (options->container.disk == NULL)) return false;
    int streams = (options->fd >= 0) + options->stdio + (options->serial != NULL) + (options->port >= 0);
    return optind == count && streams == 1 && options->config.workspace != NULL && options->config.scratch != NULL;
}

/* Whether /proc shows the processes of this pid namespace. */
static bool own_proc(void) {
    char pid[16] = "";
    return readlink("/proc/self", pid, sizeof pid - 1) > 0 && atoi(pid) == getpid();
}

/* What a kernel gives its first process is a root file system and nothing else. What is mounted already stays. */
static void mount_system(void) {
    static const struct { const char *type, *where, *data; unsigned long flags; } mounts[] = {
        {"proc", "/proc", "", MS_NOSUID | MS_NODEV | MS_NOEXEC}, {"sysfs", "/sys", "", MS_NOSUID | MS_NODEV | MS_NOEXEC},
        {"devtmpfs", "/dev", "", MS_NOSUID},                     {"devpts", "/dev/pts", "ptmxmode=0666,mode=0620", MS_NOSUID | MS_NOEXEC},
        {"tmpfs", "/dev/shm", "mode=1777", MS_NOSUID | MS_NODEV}, {"tmpfs", "/tmp", "mode=1777", MS_NOSUID | MS_NODEV}};
    for (size_t i = 0; i < sizeof mounts / sizeof *mounts; i++) {
        mkdir(mounts[i].where, 0755);
        struct stat about, above;
        char parent[64];
        snprintf(parent, sizeof parent, "%s/..", mounts[i].where);
        bool mounted = stat(mounts[i].where, &about) == 0 && stat(parent, &above) == 0 && about.st_dev != above.st_dev;
        if (i == 0 && mounted) mounted = own_proc();
        if (!mounted && mount(mounts[i].type, mounts[i].where, mounts[i].type, mounts[i].flags, mounts[i].data) != 0)
            fprintf(stderr, "envd-guest: %s is not mounted: %s\n", mounts[i].where, strerror(errno));
    }
}

/* A port's device appears some time after the kernel has started its first process. */
static int open_serial(const char *path) {
    int fd = -1;
    for (int waited = 0; waited < SERIAL_WAIT_MS; waited += 10) {
        fd = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
        if (fd >= 0 || (errno != ENOENT && errno != ENXIO && errno != EBUSY)) break;
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    struct termios line;
    if (fd >= 0 && tcgetattr(fd, &line) == 0) {
        cfmakeraw(&line);
        tcsetattr(fd, TCSANOW, &line);
    }
    return fd;
}

static int listen_vsock(uint32_t port) {
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_port = port, .svm_cid = VMADDR_CID_ANY};
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 4) != 0) return -1;
    return fd;
}

static int serve(struct options *options) {
    if (options->stdio) return agent_run(0, 1, -1, &options->config);
    if (options->fd >= 0) return agent_run(options->fd, options->fd, -1, &options->config);
    if (options->serial != NULL) {
        int fd = open_serial(options->serial);
        return fd < 0 ? fail(options->serial, strerror(errno)) : agent_run(fd, fd, -1, &options->config);
    }
    int listener = listen_vsock((uint32_t)options->port);
    return listener < 0 ? fail("vsock", strerror(errno)) : agent_run(-1, -1, listener, &options->config);
}

/* A copy's new name: the agent in it has no right to give it one; what the container's runtime starts in it has. */
static int name_host(const char *name) {
    return sethostname(name, strlen(name)) == 0 ? 0 : fail("name the host", strerror(errno));
}

int main(int count, char **words) {
    if (count == 3 && strcmp(words[1], "--name-host") == 0) return name_host(words[2]);
    struct options options = {.fd = -1, .port = -1};
    if (!parse(count, words, &options)) return usage();
    options.config.is_init = getpid() == 1;
    options.config.owns_machine = options.init;
    if (options.init) mount_system();
    if (options.container.template != NULL && container_enter(&options.container, options.config.workspace) < 0) return 2;
    if (options.supervised && supervised_fork() < 0) return 2;
    int code = serve(&options);
    if (options.init && getpid() == 1) {
        sync();
        reboot(RB_POWER_OFF);
    }
    return code;
}
