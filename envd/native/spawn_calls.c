/* Looks system calls up in the table, and says how those are answered that the filter stops. */
#include "spawn_calls.h"

#include <errno.h>
#include <stdbool.h>
#include <sys/socket.h>

#define NONE UINT32_MAX
#if defined(__x86_64__)
#define CALL(name, x86_64, aarch64, action) {x86_64, #name, action},
#else
#define CALL(name, x86_64, aarch64, action) {aarch64, #name, action},
#endif

static const struct call {
    uint32_t number;
    const char *name;
    enum action action;
} calls[] = {
#include "spawn_calls_table.h"
};

static const struct call *find(uint32_t number)
{
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (calls[i].number == number && number != NONE)
            return &calls[i];
    return NULL;
}

enum action action_of(uint32_t number)
{
    const struct call *call = find(number);
    if (call)
        return call->action;
    return number >= X32_CALLS ? FOREIGN : ABSENT;
}

static struct refusal of_socket(const struct call *call, const struct seccomp_data *asked)
{
    uint32_t family = (uint32_t)asked->args[0];
    if (call->action == SOCKET && family == AF_NETLINK && (uint32_t)asked->args[2] == 0)
        return (struct refusal){call->name, EAFNOSUPPORT, (int)(uint32_t)asked->args[1]};
    bool known = call->action == SOCKET && (family == AF_INET || family == AF_INET6);
    return (struct refusal){call->name, known ? EPROTONOSUPPORT : EAFNOSUPPORT, -1};
}

static int error_of(const struct call *call, const struct seccomp_data *asked)
{
    switch (call->action) {
    case ABSENT: return ENOSYS;
    case HUGE_MAP:
    case HUGE_FILE:
    case HUGE_SHARED: return ENOMEM;
    case REAL_TIME: return (uint32_t)asked->args[0] == 1 ? EPERM : 0;
    case IDS_1:
    case IDS_2:
    case IDS_3:
    case DEVICE_1:
    case DEVICE_2:
    case SIGNAL: return 0;
    default: return EPERM;
    }
}

struct refusal refusal_of(const struct seccomp_data *asked)
{
    uint32_t number = (uint32_t)asked->nr;
    if (asked->arch != ARCHITECTURE)
        return (struct refusal){"32-bit call", ENOSYS, -1};
    const struct call *call = find(number);
    if (!call)
        return (struct refusal){number >= X32_CALLS ? "x32 call" : "unknown call", ENOSYS, -1};
    if (call->action == SOCKET || call->action == PAIR)
        return of_socket(call, asked);
    return (struct refusal){call->name, error_of(call, asked), -1};
}
