/* The system calls that a sandbox is refused: a seccomp filter that is put together once. */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawn.h"

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "the spawner's system call filter knows x86_64 and aarch64 only"
#endif

/* By number where the build machine's headers may not know the call; these are the same on all architectures. */
#define CALL_OPEN_TREE_ATTR 467

struct call {
    int number;
    const char *name;
};

#define CALL(name) {SYS_##name, #name}

static const struct call refused[] = {
    CALL(io_uring_setup), CALL(io_uring_enter), CALL(io_uring_register), CALL(keyctl), CALL(add_key), CALL(request_key), CALL(bpf),
    CALL(userfaultfd), CALL(ptrace), CALL(process_vm_readv), CALL(process_vm_writev), CALL(process_madvise), CALL(pidfd_getfd), CALL(kcmp),
    CALL(perf_event_open), CALL(setns), CALL(mount), CALL(umount2), CALL(pivot_root), CALL(move_mount), CALL(open_tree), CALL(fsopen),
    CALL(fsconfig), CALL(fsmount), CALL(fspick), CALL(mount_setattr), {CALL_OPEN_TREE_ATTR, "open_tree_attr"}, CALL(chroot), CALL(kexec_load),
    CALL(kexec_file_load), CALL(init_module), CALL(finit_module), CALL(delete_module), CALL(reboot), CALL(swapon), CALL(swapoff), CALL(acct),
    CALL(quotactl), CALL(quotactl_fd), CALL(open_by_handle_at), CALL(fanotify_init), CALL(syslog), CALL(vhangup), CALL(settimeofday),
    CALL(clock_settime), CALL(clock_adjtime), CALL(adjtimex),
#if defined(__x86_64__)
    CALL(iopl), CALL(ioperm), CALL(uselib), CALL(modify_ldt),
#endif
};

/* A classic BPF program, written instruction by instruction. */
struct program {
    struct sock_filter code[256];
    size_t length;
    uint32_t refusal; /* what is answered to a call that is refused */
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
    answer_if(program, BPF_JSET, flags, program->refusal);
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
    answer_if(program, BPF_JEQ, TIOCSTI, program->refusal);
    answer_if(program, BPF_JEQ, TIOCLINUX, program->refusal);
    answer_if(program, BPF_JEQ, TIOCSETD_, program->refusal);
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
    case REFUSE: answer(program, program->refusal); break;
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
        actions[refused[i].number] = REFUSE;
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

static struct program quiet = {.refusal = ERRNO(EPERM)}, watched = {.refusal = SECCOMP_RET_USER_NOTIF};

void prepare_filter(void)
{
    if (quiet.length == 0)
        write_filter(&quiet);
    if (watched.length == 0)
        write_filter(&watched);
}

static int install(struct program *program, unsigned flags)
{
    prepare_filter();
    struct sock_fprog whole = {.len = (unsigned short)program->length, .filter = program->code};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &whole);
}

int filter_calls(void)
{
    return install(&quiet, 0);
}

#ifndef SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
#define SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (1UL << 5) /* 5.19 */
#endif

int filter_calls_watched(int *listener)
{
    *listener = install(&watched, SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV);
    return *listener >= 0 ? 0 : filter_calls();
}

const char *refused_name(int number)
{
    static const struct call flagged[] = {CALL(clone), CALL(unshare), CALL(ioctl)};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (refused[i].number == number)
            return refused[i].name;
    for (size_t i = 0; i < sizeof flagged / sizeof *flagged; i++)
        if (flagged[i].number == number)
            return flagged[i].name;
    return "unknown";
}
