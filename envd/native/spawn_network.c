/* Network namespaces. To make one and to take it down again costs more than the rest of a sandbox, so the next sandbox is given that of one
 * before, where nothing is left of that: no socket, no packet, no count that differs from a new one's. A sandbox has no capability over it. */
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "spawn.h"

#define COUNTS 32768
#define WAITING 32 /* connections that nobody has accepted */

static const char *const counted[] = {"dev", "snmp", "snmp6", "netstat"};

/* What is counted in a new namespace; shared with the child that finds it out. Empty: unknown, and none is used again. */
static char *fresh;

static int raise_loopback(void)
{
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    int done = ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
    return done;
}

/* Connections that nobody has accepted hold what they receive at nobody's charge until their sandbox is ended for it (spawn_sockets.c): a quarter of the
 * usual first buffer slows that down. Accepted ones grow as they are read. Where /proc/sys is read-only, as in containers, it stays as it is. */
static void shrink_buffers(void)
{
    static const char sizes[] = "4096 32768 1048576";
    int fd = open(HIDDEN_PROC "/sys/net/ipv4/tcp_rmem", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t done = write(fd, sizes, sizeof sizes - 1);
    (void)done;
    close(fd);
}

static int make(void)
{
    if (unshare(CLONE_NEWNET) < 0)
        return -1;
    shrink_buffers();
    return raise_loopback();
}

static int open_counts(const char *name)
{
    char path[64];
    snprintf(path, sizeof path, HIDDEN_PROC "/self/net/%s", name);
    return open(path, O_RDONLY | O_CLOEXEC);
}

static bool has_no_sockets(void)
{
    char text[512];
    int fd = open_counts("sockstat");
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[size < 0 ? 0 : size] = 0;
    return strncmp(text, "sockets: used 0\n", 16) == 0 && strstr(text, "TCP: inuse 0 orphan 0 tw 0 ");
}

/* Goes through what is counted: into `into`, else compares it with `fresh`. By pieces, so that no memory of a sandbox is spent on it. */
static bool go_through(char *into)
{
    char piece[1024];
    size_t at = 0;
    for (size_t i = 0; i < sizeof counted / sizeof *counted; i++) {
        int fd = open_counts(counted[i]);
        ssize_t size = -1;
        while (fd >= 0 && (size = read(fd, piece, sizeof piece)) > 0 && at + (size_t)size < COUNTS) {
            if (into)
                memcpy(into + at, piece, (size_t)size);
            else if (memcmp(fresh + at, piece, (size_t)size) != 0)
                break;
            at += (size_t)size;
        }
        if (fd >= 0)
            close(fd);
        if (size != 0)
            return false;
    }
    return into || fresh[at] == 0;
}

static bool is_as_new(void)
{
    return fresh && *fresh && has_no_sockets() && go_through(NULL);
}

void network_prepare(void)
{
    char *shared = mmap(NULL, COUNTS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return;
    pid_t pid = fork();
    if (pid == 0) {
        if (make() == 0 && has_no_sockets() && !go_through(shared))
            *shared = 0;
        _exit(0);
    }
    while (pid > 0 && waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
    fresh = shared;
    mprotect(fresh, COUNTS, PROT_READ); /* shared with the first process of each sandbox, which must not write to it */
}

int network_join(int before)
{
    return before >= 0 && setns(before, CLONE_NEWNET) == 0 && is_as_new() ? 0 : make();
}

int network_of(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/ns/net", pid);
    return open(path, O_RDONLY | O_CLOEXEC);
}

int network_offer(int stream)
{
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(PROXY_PORT), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    bool done = bind(fd, (struct sockaddr *)&here, sizeof here) == 0 && listen(fd, WAITING) == 0 && pass(stream, "p", 1, fd) == 1;
    int saved = errno;
    close(fd);
    errno = saved;
    return done ? 0 : -1;
}
