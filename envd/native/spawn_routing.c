/* Routing sockets (NETLINK_ROUTE), by which programs list interfaces and addresses. The kernel charges what waits in them to nobody, so the watcher
 * makes them, few and small ones: 32 sockets that nobody reads hold 2 MiB. */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawn.h"

#define MOST_SOCKETS 32            /* of all kinds, in a sandbox that asks for one more of these */
#define WAITING_BYTES (32 * 1024)  /* the kernel doubles it; the longest answer it gives is as long */

static int own = -1;

int routing_prepare(void)
{
    /* a network to come back to: an ordinary user may not enter the host's again */
    own = unshare(CLONE_NEWNET) < 0 ? -1 : open(HIDDEN_PROC "/self/ns/net", O_RDONLY | O_CLOEXEC);
    /* whoever uses such a socket may do no more by it than by one of its own making */
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[2];
    if (own < 0 || syscall(SYS_capget, &header, sets) < 0)
        return -1;
    for (int i = 0; i < 2; i++)
        sets[i].inheritable = 0;
    sets[0].effective &= ~((1u << CAP_NET_ADMIN) | (1u << CAP_NET_RAW));
    sets[0].permitted &= ~((1u << CAP_NET_ADMIN) | (1u << CAP_NET_RAW));
    return (int)syscall(SYS_capset, &header, sets);
}

static bool has_many_sockets(pid_t pid)
{
    char path[64], text[64] = "";
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/net/sockstat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    return size <= 0 || strncmp(text, "sockets: used ", 14) != 0 || strtoul(text + 14, NULL, 10) >= MOST_SOCKETS;
}

int routing_open(pid_t pid, int type)
{
    char path[64];
    if (has_many_sockets(pid)) {
        errno = ENOBUFS;
        return -1;
    }
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/ns/net", pid);
    int theirs = open(path, O_RDONLY | O_CLOEXEC), made = -1, bytes = WAITING_BYTES;
    if (theirs >= 0 && setns(theirs, CLONE_NEWNET) == 0) {
        made = socket(AF_NETLINK, type | SOCK_CLOEXEC, 0);
        if (made >= 0)
            setsockopt(made, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    }
    int saved = errno;
    if (theirs >= 0)
        close(theirs);
    if (setns(own, CLONE_NEWNET) < 0)
        _exit(1); /* else it would keep that network */
    errno = saved;
    return made;
}
