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
    SYS_iopl, SYS_ioperm, SYS_uselib, SYS_ustat, SYS_modify_ldt,
#endif
};

/* A classic BPF program, written instruction by instruction. */
struct program {
    struct sock_filter code[192];
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

/* The length of what follows is patched in when it is known. */
static size_t begin_call(struct program *program, int call)
{
    add(program, BPF_JMP | BPF_JEQ | BPF_K, 0, 0, (uint32_t)call);
    return program->length - 1;
}

static void end_call(struct program *program, size_t begin)
{
    answer(program, SECCOMP_RET_ALLOW);
    program->code[begin].jf = (uint8_t)(program->length - begin - 1);
}

static void filter_namespaces(struct program *program)
{
    const uint32_t flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;
    size_t begin = begin_call(program, SYS_clone);
    load(program, ARGUMENT(0));
    answer_if(program, BPF_JSET, flags, ERRNO(EPERM));
    end_call(program, begin);
    begin = begin_call(program, SYS_unshare);
    load(program, ARGUMENT(0));
    answer_if(program, BPF_JSET, flags | 0x80 /* CLONE_NEWTIME */, ERRNO(EPERM));
    end_call(program, begin);
}

/* Sockets of the families that programs use, and of those only the protocols that need no module loaded. */
static void filter_sockets(struct program *program)
{
    size_t begin = begin_call(program, SYS_socket);
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
    end_call(program, begin);
}

static void filter_terminals(struct program *program)
{
    size_t begin = begin_call(program, SYS_ioctl);
    load(program, ARGUMENT(1));
    answer_if(program, BPF_JEQ, TIOCSTI, ERRNO(EPERM));
    answer_if(program, BPF_JEQ, TIOCLINUX, ERRNO(EPERM));
    answer_if(program, BPF_JEQ, TIOCSETD_, ERRNO(EPERM));
    end_call(program, begin);
}

static void write_filter(struct program *program)
{
    load(program, offsetof(struct seccomp_data, arch));
    add(program, BPF_JMP | BPF_JEQ | BPF_K, 1, 0, ARCHITECTURE);
    answer(program, ERRNO(ENOSYS)); /* 32-bit calls have other numbers */
    load(program, offsetof(struct seccomp_data, nr));
#if defined(__x86_64__)
    answer_if(program, BPF_JGE, 0x40000000, ERRNO(ENOSYS)); /* x32 */
#endif
    /* flags of clone3 are out of a filter's sight: the C library takes clone instead */
    answer_if(program, BPF_JEQ, SYS_clone3, ERRNO(ENOSYS));
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        answer_if(program, BPF_JEQ, (uint32_t)refused[i], ERRNO(EPERM));
    filter_namespaces(program);
    filter_sockets(program);
    filter_terminals(program);
    answer(program, SECCOMP_RET_ALLOW);
}

int filter_calls(void)
{
    static struct program program;
    if (program.length == 0) /* the spawner writes it once, its children inherit it */
        write_filter(&program);
    struct sock_fprog whole = {.len = (unsigned short)program.length, .filter = program.code};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &whole);
}
