/* Messages that carry descriptors. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "spawn.h"

ssize_t pass(int socket, const void *data, size_t size, int fd)
{
    union { struct cmsghdr align; char space[CMSG_SPACE(sizeof(int))]; } extra = {0};
    struct iovec piece = {(void *)data, size};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = &extra;
        message.msg_controllen = sizeof extra;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    ssize_t sent;
    while ((sent = sendmsg(socket, &message, MSG_NOSIGNAL)) < 0 && errno == EINTR)
        ;
    return sent;
}

ssize_t receive(int socket, void *data, size_t size, int flags, int fds[2])
{
    union { struct cmsghdr align; char space[CMSG_SPACE(2 * sizeof(int))]; } extra;
    struct iovec piece = {data, size};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra};
    ssize_t got = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
    struct cmsghdr *header = got < 0 ? NULL : CMSG_FIRSTHDR(&message);
    fds[0] = fds[1] = -1;
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
        memcpy(fds, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
    return got;
}
