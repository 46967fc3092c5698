/* What a sandbox's process 1 gives up before it serves anybody: capabilities, resources, files, system calls. */
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawn.h"

int drop_capabilities(void)
{
    /* The kernel ends the loop: it refuses the first number that it does not know. */
    for (int each = 0; prctl(PR_CAPBSET_DROP, each, 0, 0, 0) == 0; each++)
        ;
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {{0}};
    return (int)syscall(SYS_capset, &header, none);
}

static int limit(__rlimit_resource_t resource, rlim_t value)
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

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "the spawner's system call filter knows x86_64 and aarch64 only"
#endif

/* By number where the build machine's headers may not know the call; these are the same on all architectures. */
#define CALL_OPEN_TREE_ATTR 467

static const int refused[] = {
    SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register, SYS_keyctl, SYS_add_key, SYS_request_key, SYS_bpf, SYS_userfaultfd,
    SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_process_madvise, SYS_pidfd_getfd, SYS_kcmp, SYS_perf_event_open, SYS_setns,
    SYS_mount, SYS_umount2, SYS_pivot_root, SYS_move_mount, SYS_open_tree, SYS_fsopen, SYS_fsconfig, SYS_fsmount, SYS_fspick,
    SYS_mount_setattr, CALL_OPEN_TREE_ATTR, SYS_chroot, SYS_kexec_load, SYS_kexec_file_load, SYS_init_module, SYS_finit_module,
    SYS_delete_module, SYS_reboot, SYS_swapon, SYS_swapoff, SYS_acct, SYS_quotactl, SYS_quotactl_fd, SYS_open_by_handle_at,
    SYS_fanotify_init, SYS_syslog, SYS_vhangup, SYS_settimeofday, SYS_clock_settime, SYS_clock_adjtime, SYS_adjtimex,
#if defined(__x86_64__)
    SYS_iopl, SYS_ioperm, SYS_uselib, SYS_modify_ldt,
#endif
};

/* A classic BPF program, written instruction by instruction. */
struct program {
    struct sock_filter code[256];
    size_t length;
};

static void add(struct program *program, uint16_t code, uint8_t yes, uint8_t no, uint32_t value)
{
    if (program->length == sizeof program->code / sizeof *program->code)
        abort();
    program->code[program->length++] = (struct sock_filter){code, yes, no, value};
}

static void load(struct program *program, size_t offset)
{
    add(program, BPF_LD | BPF_W | BPF_ABS, 0, 0, (uint32_t)offset);
}

static void answer(struct program *program, uint32_t value)
{
    add(program, BPF_RET | BPF_K, 0, 0, value);
}

static void answer_if(struct program *program, uint16_t comparison, uint32_t value, uint32_t result)
{
    add(program, BPF_JMP | comparison | BPF_K, 0, 1, value);
    answer(program, result);
}

#define ERRNO(number) (SECCOMP_RET_ERRNO | (number))
#define ARGUMENT(n) offsetof(struct seccomp_data, args[n]) /* its low half: both architectures are little-endian */
#define TIOCSETD_ 0x5423

#define NEW_NAMESPACES (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
#define NEW_TIME 0x80 /* of unshare; to clone it is a part of the exit signal */

static void filter_namespaces(struct program *program, uint32_t flags)
{
    load(program, ARGUMENT(0));
    answer_if(program, BPF_JSET, flags, ERRNO(EPERM));
    answer(program, SECCOMP_RET_ALLOW);
}

/* Sockets of the families that programs use, and of those only the protocols that need no module loaded. */
static void filter_sockets(struct program *program)
{
    load(program, ARGUMENT(0));
    answer_if(program, BPF_JEQ, AF_UNIX, SECCOMP_RET_ALLOW);
    add(program, BPF_JMP | BPF_JEQ | BPF_K, 0, 3, AF_NETLINK);
    load(program, ARGUMENT(2));
    answer_if(program, BPF_JEQ, 0 /* NETLINK_ROUTE */, SECCOMP_RET_ALLOW);
    /* falls through with another protocol in the accumulator: no family below is 0, and the family is loaded again */
    load(program, ARGUMENT(0));
    add(program, BPF_JMP | BPF_JEQ | BPF_K, 2, 0, AF_INET);
    add(program, BPF_JMP | BPF_JEQ | BPF_K, 1, 0, AF_INET6);
    answer(program, ERRNO(EAFNOSUPPORT));
    load(program, ARGUMENT(2));
    static const uint32_t protocols[] = {0, 1 /* ICMP */, 6 /* TCP */, 17 /* UDP */, 58 /* ICMPv6 */};
    for (size_t i = 0; i < sizeof protocols / sizeof *protocols; i++)
        answer_if(program, BPF_JEQ, protocols[i], SECCOMP_RET_ALLOW);
    answer(program, ERRNO(EPROTONOSUPPORT));
}

static void filter_terminals(struct program *program)
{
    load(program, ARGUMENT(1));
    answer_if(program, BPF_JEQ, TIOCSTI, ERRNO(EPERM));
    answer_if(program, BPF_JEQ, TIOCLINUX, ERRNO(EPERM));
    answer_if(program, BPF_JEQ, TIOCSETD_, ERRNO(EPERM));
    answer(program, SECCOMP_RET_ALLOW);
}

/* What is done about a call. */
enum action { ALLOW, REFUSE, NO_SUCH, CLONE, UNSHARE, SOCKET, TERMINAL };

#define KNOWN 512           /* beyond any number that a kernel has today; later ones are allowed */
#define X32_CALLS 0x40000000 /* x86_64 programs may ask for these instead, which have other numbers */

static void act(struct program *program, enum action action)
{
    switch (action) {
    case ALLOW: answer(program, SECCOMP_RET_ALLOW); break;
    case REFUSE: answer(program, ERRNO(EPERM)); break;
    case NO_SUCH: answer(program, ERRNO(ENOSYS)); break;
    case CLONE: filter_namespaces(program, NEW_NAMESPACES); break;
    case UNSHARE: filter_namespaces(program, NEW_NAMESPACES | NEW_TIME); break;
    case SOCKET: filter_sockets(program); break;
    case TERMINAL: filter_terminals(program); break;
    }
}

/* Numbers from `first` up to the next range's are treated alike. */
struct range {
    uint32_t first;
    enum action action;
};

/* A binary search: the kernel tries the filter on every call there is when it is installed, in each sandbox, so a chain would be felt. */
static void search(struct program *program, const struct range *ranges, size_t count)
{
    if (count == 1) {
        act(program, ranges[0].action);
        return;
    }
    size_t half = count / 2, jump = program->length;
    add(program, BPF_JMP | BPF_JGE | BPF_K, 0, 0, ranges[half].first);
    search(program, ranges, half);
    size_t distance = program->length - jump - 1;
    if (distance > UINT8_MAX)
        abort();
    program->code[jump].jt = (uint8_t)distance;
    search(program, ranges + half, count - half);
}

static void write_filter(struct program *program)
{
    enum action actions[KNOWN] = {ALLOW};
    struct range ranges[KNOWN + 2];
    size_t count = 0;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        actions[refused[i]] = REFUSE;
    actions[SYS_clone3] = NO_SUCH; /* its flags are out of a filter's sight: the C library takes clone instead */
    actions[SYS_clone] = CLONE;
    actions[SYS_unshare] = UNSHARE;
    actions[SYS_socket] = SOCKET;
    actions[SYS_ioctl] = TERMINAL;
    for (uint32_t call = 0; call < KNOWN; call++)
        if (call == 0 || actions[call] != actions[call - 1])
            ranges[count++] = (struct range){call, actions[call]};
    ranges[count++] = (struct range){KNOWN, ALLOW};
    ranges[count++] = (struct range){X32_CALLS, NO_SUCH};
    load(program, offsetof(struct seccomp_data, arch));
    add(program, BPF_JMP | BPF_JEQ | BPF_K, 1, 0, ARCHITECTURE);
    answer(program, ERRNO(ENOSYS)); /* 32-bit calls have other numbers */
    load(program, offsetof(struct seccomp_data, nr));
    search(program, ranges, count);
}

static struct program calls_filter;

void prepare_filter(void)
{
    if (calls_filter.length == 0)
        write_filter(&calls_filter);
}

int filter_calls(void)
{
    prepare_filter();
    struct sock_fprog whole = {.len = (unsigned short)calls_filter.length, .filter = calls_filter.code};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &whole);
}
