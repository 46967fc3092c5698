/* The table of system calls that a sandbox is refused: those that programs do not need, and through which faults of kernels have been reached; and
 * of those that are shown: what the kernel itself gives nobody without a capability, and that hardly any program asks for in good faith. */
#include "spawn_calls.h"

#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/syscall.h>

/* By number where the build machine's headers may not know the call; these are the same on all architectures. */
#define CALL_OPEN_TREE_ATTR 467

struct call {
    uint32_t number;
    const char *name;
    enum action action;
};

#define CALL(name, action) {SYS_##name, #name, action}
#define NOT(name) CALL(name, REFUSE)

static const struct call calls[] = {
    NOT(io_uring_setup), NOT(io_uring_enter), NOT(io_uring_register), NOT(keyctl), NOT(add_key), NOT(request_key), NOT(bpf), NOT(userfaultfd),
    NOT(ptrace), NOT(process_vm_readv), NOT(process_vm_writev), NOT(process_madvise), NOT(pidfd_getfd), NOT(kcmp), NOT(perf_event_open),
    NOT(setns), NOT(mount), NOT(umount2), NOT(pivot_root), NOT(move_mount), NOT(open_tree), NOT(fsopen), NOT(fsconfig), NOT(fsmount),
    NOT(fspick), NOT(mount_setattr), {CALL_OPEN_TREE_ATTR, "open_tree_attr", REFUSE}, NOT(chroot), NOT(kexec_load), NOT(kexec_file_load),
    NOT(init_module), NOT(finit_module), NOT(delete_module), NOT(reboot), NOT(swapon), NOT(swapoff), NOT(acct), NOT(quotactl),
    NOT(quotactl_fd), NOT(open_by_handle_at), NOT(fanotify_init), NOT(syslog), NOT(vhangup), NOT(settimeofday), NOT(clock_settime),
    NOT(clock_adjtime), NOT(adjtimex), NOT(setgroups),
    CALL(clone3, NO_SUCH), /* its flags are out of a filter's sight: the C library takes clone instead */
    CALL(clone, CLONE), CALL(unshare, UNSHARE), CALL(socket, SOCKET), CALL(ioctl, TERMINAL),
    CALL(setuid, IDS_1), CALL(setgid, IDS_1), CALL(setreuid, IDS_2), CALL(setregid, IDS_2), CALL(setresuid, IDS_3), CALL(setresgid, IDS_3),
    CALL(mknodat, DEVICE_2), CALL(sched_setscheduler, REAL_TIME), CALL(kill, SIGNAL),
#if defined(__x86_64__)
    NOT(iopl), NOT(ioperm), NOT(uselib), NOT(modify_ldt), CALL(mknod, DEVICE_1),
#endif
};

static const struct call *find(uint32_t number)
{
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (calls[i].number == number)
            return &calls[i];
    return NULL;
}

enum action action_of(uint32_t number)
{
    const struct call *call = find(number);
    if (call)
        return call->action;
    return number >= X32_CALLS ? FOREIGN : ALLOW;
}

struct refusal refusal_of(const struct seccomp_data *asked)
{
    if (asked->arch != ARCHITECTURE)
        return (struct refusal){"32-bit call", ENOSYS};
    const struct call *call = find((uint32_t)asked->nr);
    if (!call)
        return (struct refusal){"x32 call", ENOSYS};
    uint32_t family = (uint32_t)asked->args[0];
    if (call->action == SOCKET)
        return (struct refusal){call->name, family == AF_INET || family == AF_INET6 ? EPROTONOSUPPORT : EAFNOSUPPORT};
    return (struct refusal){call->name, call->action >= FIRST_SHOWN ? 0 : EPERM};
}
