/* What a sandbox's process 1 gives up before it serves anybody: capabilities, resources, files. System calls: spawn_filter.c. */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/landlock.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawn.h"

int drop_capabilities(uint32_t kept)
{
    /* The kernel ends the loop: it refuses the first number that it does not know. */
    for (int each = 0; (each < 32 && kept >> each & 1) || prctl(PR_CAPBSET_DROP, each, 0, 0, 0) == 0; each++)
        ;
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {{.effective = kept, .permitted = kept}};
    return (int)syscall(SYS_capset, &header, data);
}

static int limit(int resource, rlim_t value)
{
    struct rlimit now;
    if (getrlimit(resource, &now) < 0)
        return -1;
    if (value > now.rlim_max)
        value = now.rlim_max;
    now.rlim_cur = now.rlim_max = value;
    return setrlimit(resource, &now);
}

int limit_resources(const struct settings *settings, const struct request *wanted)
{
    const struct groups *groups = &settings->groups;
    if (limit(RLIMIT_CORE, 0) < 0 || limit(RLIMIT_NOFILE, wanted->open_files) < 0 || limit(RLIMIT_FSIZE, wanted->disk_bytes) < 0)
        return -1;
    if (limit(RLIMIT_RTPRIO, 0) < 0 || limit(RLIMIT_NICE, 0) < 0) /* also if the server may use real-time or negative nice values */
        return -1;
    if (groups->pids < 0 && !groups->unified_limits && limit(RLIMIT_NPROC, wanted->pids) < 0)
        return -1;
    if (groups->memory < 0 && !groups->unified_limits && limit(RLIMIT_AS, wanted->memory_bytes) < 0)
        return -1;
    return 0;
}

/* Landlock: rights of later ABIs that the build machine's header may not know. Source: include/uapi/linux/landlock.h. */
#define RIGHT_REFER (1ULL << 13)    /* ABI 2 */
#define RIGHT_TRUNCATE (1ULL << 14) /* ABI 3 */
#define SCOPE_ABSTRACT_SOCKET (1ULL << 0)
#define SCOPE_SIGNAL (1ULL << 1) /* both ABI 6 */
#define RIGHTS_READ (LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR)
#define RIGHTS_DEVICE_NODES (LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_BLOCK)
#define RIGHTS_ABI_1 ((1ULL << 13) - 1)

struct ruleset {
    uint64_t files, network, scopes;
};

int landlock_abi(void)
{
    long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
    return abi < 2 ? 0 : (int)abi; /* ABI 1 forbids every rename between directories: git would not work */
}

static int allow_below(int ruleset, const char *path, uint64_t rights)
{
    struct landlock_path_beneath_attr rule = {.allowed_access = rights, .parent_fd = open(path, O_PATH | O_CLOEXEC)};
    if (rule.parent_fd < 0)
        return -1;
    long done = syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
    close(rule.parent_fd);
    return (int)done;
}

int restrict_files(int abi)
{
    static const char *const devices[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"};
    if (abi == 0)
        return 0;
    uint64_t all = RIGHTS_ABI_1 | RIGHT_REFER | (abi >= 3 ? RIGHT_TRUNCATE : 0);
    uint64_t write = LANDLOCK_ACCESS_FS_WRITE_FILE | (all & RIGHT_TRUNCATE);
    struct ruleset wanted = {.files = all, .scopes = abi >= 6 ? SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL : 0};
    size_t size = abi >= 6 ? sizeof wanted : sizeof wanted.files;
    int ruleset = (int)syscall(SYS_landlock_create_ruleset, &wanted, size, 0);
    if (ruleset < 0)
        return -1;
    int bad = allow_below(ruleset, "/", RIGHTS_READ);
    bad |= allow_below(ruleset, "/workspace", all & ~RIGHTS_DEVICE_NODES);
    bad |= allow_below(ruleset, "/tmp", all & ~RIGHTS_DEVICE_NODES);
    bad |= allow_below(ruleset, "/dev/pts", write | LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR);
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        bad |= allow_below(ruleset, devices[i], write | LANDLOCK_ACCESS_FS_READ_FILE);
    if (!bad)
        bad = (int)syscall(SYS_landlock_restrict_self, ruleset, 0);
    int saved = errno;
    close(ruleset);
    errno = saved;
    return bad ? -1 : 0;
}
