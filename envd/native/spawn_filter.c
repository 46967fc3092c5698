/* The filter that stops the system calls of spawn_calls.c: a classic BPF program of seccomp's that is put together once. */
#include <errno.h>
#include <linux/filter.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawn.h"
#include "spawn_calls.h"

/* Where a jump leads: so many instructions on, or, past what it could say, to one of the two answers at the end. */
enum { NEXT = 0, TO_ALLOW = 0x100, TO_STOP = 0x101 };

struct step {
    uint16_t code, yes, no;
    uint32_t value;
};

struct program {
    struct step steps[BPF_MAXINSNS / 16];
    size_t length;
    bool watched; /* somebody holds its listener, answers the calls that it stops, and tells of them */
    struct sock_filter code[BPF_MAXINSNS / 16];
};

static void add(struct program *program, uint16_t code, uint16_t yes, uint16_t no, uint32_t value)
{
    if (program->length == sizeof program->steps / sizeof *program->steps)
        abort();
    program->steps[program->length++] = (struct step){code, yes, no, value};
}

static void load(struct program *program, size_t offset)
{
    add(program, BPF_LD | BPF_W | BPF_ABS, NEXT, NEXT, (uint32_t)offset);
}

static void jump_if(struct program *program, uint16_t comparison, uint32_t value, uint16_t yes, uint16_t no)
{
    add(program, BPF_JMP | comparison | BPF_K, yes, no, value);
}

static void answer(struct program *program, uint32_t value)
{
    add(program, BPF_RET | BPF_K, NEXT, NEXT, value);
}

#define ERRNO(number) (SECCOMP_RET_ERRNO | (number))
#define ARGUMENT(n) offsetof(struct seccomp_data, args[n]) /* its low half: both architectures are little-endian */
#define TIOCSETD_ 0x5423

/* To a call that is refused: whoever answers it gives the same error (refusal_of). */
static uint32_t refusal(const struct program *program, int error)
{
    return program->watched ? SECCOMP_RET_USER_NOTIF : ERRNO((uint32_t)error);
}

#define NEW_NAMESPACES (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
#define NEW_TIME 0x80 /* of unshare; to clone it is a part of the exit signal */

static void filter_namespaces(struct program *program, uint32_t flags)
{
    load(program, ARGUMENT(0));
    jump_if(program, BPF_JSET, flags, TO_STOP, TO_ALLOW);
}

#define MPTCP 262 /* told to nobody: Go's runtime asks for it of its own accord, and takes TCP then */

/* Sockets of the families that programs use, and of those only the protocols that need no module loaded. */
static void filter_sockets(struct program *program)
{
    static const uint32_t protocols[] = {0, 1 /* ICMP */, 6 /* TCP */, 17 /* UDP */, 58 /* ICMPv6 */};
    load(program, ARGUMENT(0));
    jump_if(program, BPF_JEQ, AF_UNIX, TO_ALLOW, NEXT);
    jump_if(program, BPF_JEQ, AF_INET, 5, NEXT);
    jump_if(program, BPF_JEQ, AF_INET6, 4, NEXT);
    jump_if(program, BPF_JEQ, AF_NETLINK, NEXT, 2);
    load(program, ARGUMENT(2));
    jump_if(program, BPF_JEQ, 0 /* NETLINK_ROUTE */, TO_ALLOW, NEXT);
    answer(program, refusal(program, EAFNOSUPPORT));
    load(program, ARGUMENT(2));
    for (size_t i = 0; i < sizeof protocols / sizeof *protocols; i++)
        jump_if(program, BPF_JEQ, protocols[i], TO_ALLOW, NEXT);
    jump_if(program, BPF_JEQ, MPTCP, NEXT, 1);
    answer(program, ERRNO(EPROTONOSUPPORT));
    answer(program, refusal(program, EPROTONOSUPPORT));
}

static void filter_terminals(struct program *program)
{
    load(program, ARGUMENT(1));
    jump_if(program, BPF_JEQ, TIOCSTI, TO_STOP, NEXT);
    jump_if(program, BPF_JEQ, TIOCLINUX, TO_STOP, NEXT);
    jump_if(program, BPF_JEQ, TIOCSETD_, TO_STOP, TO_ALLOW);
}

/* Users or groups, by the first `count` arguments, other than 0, which is the only one, and -1, which leaves it. */
static void show_ids(struct program *program, uint8_t count)
{
    for (uint8_t i = 0; i < count; i++) {
        load(program, ARGUMENT(i));
        add(program, BPF_ALU | BPF_ADD | BPF_K, NEXT, NEXT, 1);
        jump_if(program, BPF_JGT, 1, TO_STOP, i + 1 < count ? NEXT : TO_ALLOW);
    }
}

/* mode: the number of that argument. A character device 0 is what overlays say a removed file by, and needs no capability. */
static void show_devices(struct program *program, uint8_t mode)
{
    load(program, ARGUMENT(mode));
    add(program, BPF_ALU | BPF_AND | BPF_K, NEXT, NEXT, S_IFMT);
    jump_if(program, BPF_JEQ, S_IFBLK, TO_STOP, NEXT);
    jump_if(program, BPF_JEQ, S_IFCHR, NEXT, TO_ALLOW);
    load(program, ARGUMENT(mode + 1));
    jump_if(program, BPF_JEQ, 0, TO_ALLOW, TO_STOP);
}

static void show_real_time(struct program *program)
{
    load(program, ARGUMENT(1));
    add(program, BPF_ALU | BPF_AND | BPF_K, NEXT, NEXT, ~(uint32_t)SCHED_RESET_ON_FORK);
    jump_if(program, BPF_JEQ, SCHED_FIFO, TO_STOP, NEXT);
    jump_if(program, BPF_JEQ, SCHED_RR, TO_STOP, TO_ALLOW);
}

static void show_signals(struct program *program)
{
    load(program, ARGUMENT(0));
    jump_if(program, BPF_JEQ, 1, NEXT, TO_ALLOW);
    load(program, ARGUMENT(1));
    jump_if(program, BPF_JEQ, 0 /* asks whether it is there */, TO_ALLOW, TO_STOP);
}

static void act(struct program *program, enum action action)
{
    switch (action) {
    case ALLOW: answer(program, SECCOMP_RET_ALLOW); break;
    case REFUSE: answer(program, refusal(program, EPERM)); break;
    case NO_SUCH: answer(program, ERRNO(ENOSYS)); break;
    case FOREIGN: answer(program, refusal(program, ENOSYS)); break;
    case CLONE: filter_namespaces(program, NEW_NAMESPACES); break;
    case UNSHARE: filter_namespaces(program, NEW_NAMESPACES | NEW_TIME); break;
    case SOCKET: filter_sockets(program); break;
    case TERMINAL: filter_terminals(program); break;
    case IDS_1: show_ids(program, 1); break;
    case IDS_2: show_ids(program, 2); break;
    case IDS_3: show_ids(program, 3); break;
    case DEVICE_1: show_devices(program, 1); break;
    case DEVICE_2: show_devices(program, 2); break;
    case REAL_TIME: show_real_time(program); break;
    case SIGNAL: show_signals(program); break;
    }
}

/* Numbers from `first` up to the next range's are treated alike. */
struct range {
    uint32_t first;
    enum action action;
};

/* A binary search: the kernel tries the filter on every call there is when it is installed, in each sandbox, so a chain would be felt, as is each
 * instruction. Returns where a jump to it leads. */
static uint16_t search(struct program *program, const struct range *ranges, size_t count)
{
    if (count == 1 && ranges->action <= REFUSE)
        return ranges->action == ALLOW ? TO_ALLOW : TO_STOP;
    if (count == 1) {
        act(program, ranges->action);
        return NEXT;
    }
    size_t half = count / 2, jump = program->length;
    jump_if(program, BPF_JGE, ranges[half].first, NEXT, NEXT);
    program->steps[jump].no = search(program, ranges, half);
    uint16_t distance = (uint16_t)(program->length - jump - 1);
    uint16_t end = search(program, ranges + half, count - half);
    program->steps[jump].yes = end == NEXT ? distance : end;
    return NEXT;
}

static uint8_t jump_to(size_t from, uint16_t where, size_t allow, size_t stop)
{
    size_t distance = where == TO_ALLOW ? allow - from - 1 : where == TO_STOP ? stop - from - 1 : where;
    if (distance > UINT8_MAX)
        abort();
    return (uint8_t)distance;
}

static void write_filter(struct program *program)
{
    struct range ranges[KNOWN_CALLS + 2];
    size_t count = 0;
    for (uint32_t call = 0; call < KNOWN_CALLS; call++) {
        enum action action = action_of(call);
        if (action >= FIRST_SHOWN && !program->watched)
            action = ALLOW; /* there is nobody to show it to */
        if (count == 0 || action != ranges[count - 1].action)
            ranges[count++] = (struct range){call, action};
    }
    ranges[count++] = (struct range){KNOWN_CALLS, ALLOW};
    ranges[count++] = (struct range){X32_CALLS, FOREIGN};
    load(program, offsetof(struct seccomp_data, arch));
    jump_if(program, BPF_JEQ, ARCHITECTURE, 1, NEXT);
    act(program, FOREIGN);
    load(program, offsetof(struct seccomp_data, nr));
    search(program, ranges, count);
    size_t allow = program->length, stop = allow + 1;
    act(program, ALLOW);
    act(program, REFUSE);
    for (size_t i = 0; i < program->length; i++) {
        const struct step *step = &program->steps[i];
        program->code[i] = (struct sock_filter){step->code, jump_to(i, step->yes, allow, stop), jump_to(i, step->no, allow, stop), step->value};
    }
}

static struct program quiet, watched = {.watched = true};

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
