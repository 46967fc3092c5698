/* What sockets of a sandbox hold beyond what its control group may charge. Connections that nobody has accepted yet, and those whose process closed
 * them, are charged to nobody; and the kernel lets each socket pass the limit by a little. The watcher looks at it some times a second, while the
 * host's TCP holds more than IDLE_BYTES; it ends a sandbox whose memory and buffers together pass the limit, as the kernel does with memory alone. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "spawn.h"

#define IDLE_BYTES (4ULL * 1024 * 1024)
#define SLACK_BYTES (4ULL * 1024 * 1024)
#define FEW 32 /* connections that are not worth a look at each */

static ssize_t read_file(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[length < 0 ? 0 : length] = 0;
    return length;
}

/* The number after `word` in the line of TCP. */
static unsigned long long tcp_count(const char *path, const char *word)
{
    char text[512];
    if (read_file(path, text, sizeof text) < 0)
        return 0;
    const char *line = strstr(text, "TCP: "), *found = line ? strstr(line, word) : NULL;
    return found ? strtoull(found + strlen(word), NULL, 10) : 0;
}

bool sockets_worth_a_look(void)
{
    return tcp_count(HIDDEN_PROC "/self/net/sockstat", " mem ") * (unsigned long long)sysconf(_SC_PAGESIZE) > IDLE_BYTES;
}

/* Bytes in all queues that a table of connections lists. */
static unsigned long long queued(const char *path)
{
    FILE *table = fopen(path, "re");
    char line[512];
    unsigned long long sum = 0;
    while (table && fgets(line, sizeof line, table)) {
        unsigned state;
        unsigned long long sent, received;
        if (sscanf(line, " %*[0-9]: %*s %*s %x %llx:%llx", &state, &sent, &received) == 3 && state != 0x0A /* listening: a count */)
            sum += sent + received;
    }
    if (table)
        fclose(table);
    return sum;
}

bool sockets_pass_limit(const struct groups *groups, const struct tenant *tenant)
{
    char path[64];
    unsigned long long memory, charged = groups_socket_bytes(groups, tenant->group, &memory), found = 0;
    snprintf(path, sizeof path, HIDDEN_PROC "/%d/net/sockstat", tenant->pid);
    if (tcp_count(path, "inuse ") >= FEW) {
        snprintf(path, sizeof path, HIDDEN_PROC "/%d/net/tcp", tenant->pid);
        found = queued(path);
        snprintf(path, sizeof path, HIDDEN_PROC "/%d/net/tcp6", tenant->pid);
        found += queued(path);
    }
    unsigned long long beside = found > charged ? found - charged : 0, most = tenant->memory_bytes + tenant->memory_bytes / SOCKET_SHARE;
    return memory + beside > most + SLACK_BYTES;
}
