/* The filter's instructions for calls that are allowed or refused by their arguments. */
#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "spawn_filter.h"

#define ERRNO(number) (SECCOMP_RET_ERRNO | (number))
#define ARGUMENT(n) offsetof(struct seccomp_data, args[n]) /* its low half: both architectures are little-endian */
#define HIGH_HALF(n) (ARGUMENT(n) + sizeof(uint32_t))
#define TIOCSETD_ 0x5423
#define HUGE_TABLE_FILE 4 /* MFD_HUGETLB; linux/memfd.h */
#define IO_PROCESS 1      /* IOPRIO_WHO_PROCESS, _PGRP and _USER; linux/ioprio.h */
#define IO_GROUP 2
#define IO_USER 3

/* To a call that is refused: whoever answers it gives the same error (refusal_of). */
static uint32_t refusal(const struct program *program, int error)
{
    return program->watched ? SECCOMP_RET_USER_NOTIF : ERRNO((uint32_t)error);
}

#define NEW_NAMESPACES (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
#define NEW_TIME 0x80 /* of unshare; to clone it is a part of the exit signal */

/* Stops a call if any of these bits is set. */
static void stop_bits(struct program *program, int argument, uint32_t bits)
{
    load(program, ARGUMENT(argument));
    jump_if(program, BPF_JSET, bits, TO_STOP, TO_ALLOW);
}

#define MPTCP 262 /* told to nobody: Go's runtime asks for it of its own accord, and takes TCP then */

static void filter_sockets(struct program *program)
{
    static const uint32_t protocols[] = {0, 1 /* ICMP */, 6 /* TCP */, 17 /* UDP */, 58 /* ICMPv6 */};
    load(program, ARGUMENT(0));
    jump_if(program, BPF_JEQ, AF_UNIX, TO_ALLOW, NEXT);
    jump_if(program, BPF_JEQ, AF_INET, 2, NEXT);
    jump_if(program, BPF_JEQ, AF_INET6, 1, NEXT);
    answer(program, refusal(program, EAFNOSUPPORT)); /* routing sockets too: the watcher makes them */
    load(program, ARGUMENT(2));
    for (size_t i = 0; i < sizeof protocols / sizeof *protocols; i++)
        jump_if(program, BPF_JEQ, protocols[i], TO_ALLOW, NEXT);
    jump_if(program, BPF_JEQ, MPTCP, NEXT, TO_STOP);
    answer(program, ERRNO(EPROTONOSUPPORT));
}

static void filter_buffers(struct program *program)
{
    load(program, ARGUMENT(1));
    jump_if(program, BPF_JEQ, SOL_SOCKET, NEXT, TO_ALLOW);
    load(program, ARGUMENT(2));
    jump_if(program, BPF_JEQ, SO_RCVBUF, NEXT, TO_ALLOW);
    answer(program, ERRNO(0)); /* as where net.core.rmem_max is what it has */
}

static void filter_values(struct program *program, int argument, const uint32_t *values, size_t count, uint16_t found, uint16_t other)
{
    load(program, ARGUMENT(argument));
    for (size_t i = 0; i < count; i++)
        jump_if(program, BPF_JEQ, values[i], found, i + 1 < count ? NEXT : other);
}

static void filter_limits(struct program *program)
{
    load(program, ARGUMENT(0));
    jump_if(program, BPF_JEQ, 1, NEXT, TO_ALLOW);
    load(program, ARGUMENT(2));
    jump_if(program, BPF_JEQ, 0, NEXT, TO_STOP);
    load(program, HIGH_HALF(2));
    jump_if(program, BPF_JEQ, 0, TO_ALLOW, TO_STOP);
}

/* By kind and number: process 1, its group, or all processes of a user. */
static void filter_priorities(struct program *program, uint32_t process, uint32_t group, uint32_t user)
{
    load(program, ARGUMENT(0));
    jump_if(program, BPF_JEQ, user, TO_STOP, NEXT);
    jump_if(program, BPF_JEQ, process, 1, NEXT);
    jump_if(program, BPF_JEQ, group, NEXT, TO_ALLOW);
    load(program, ARGUMENT(1));
    jump_if(program, BPF_JEQ, 1, TO_STOP, TO_ALLOW);
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

static void filter_schedulers(struct program *program)
{
    load(program, ARGUMENT(0));
    jump_if(program, BPF_JEQ, 1, TO_STOP, program->watched ? NEXT : TO_ALLOW);
    if (!program->watched)
        return; /* there is nobody to show it to */
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

#define COUNT(values) (sizeof(values) / sizeof *(values))

/* Its instructions, whose jumps may lead to the answers at their end; returns the error of those that stop. */
static int check_arguments(struct program *program, enum action action)
{
    static const uint32_t terminals[] = {TIOCSTI, TIOCLINUX, TIOCSETD_}, notices[] = {F_SETLEASE, F_NOTIFY}, families[] = {AF_UNIX}, first[] = {1};
    static const uint32_t personalities[] = {0, 0x8, 0x20000, 0x20008, 0xffffffff};
    switch (action) {
    case CLONE: stop_bits(program, 0, NEW_NAMESPACES); break;
    case UNSHARE: stop_bits(program, 0, NEW_NAMESPACES | NEW_TIME); break;
    case HUGE_MAP: stop_bits(program, 3, MAP_HUGETLB); return ENOMEM;
    case HUGE_FILE: stop_bits(program, 1, HUGE_TABLE_FILE); return ENOMEM;
    case HUGE_SHARED: stop_bits(program, 2, SHM_HUGETLB); return ENOMEM;
    case SOCKET: filter_sockets(program); return EPROTONOSUPPORT;
    case PAIR: filter_values(program, 0, families, COUNT(families), TO_ALLOW, TO_STOP); return EAFNOSUPPORT;
    case BUFFERS: filter_buffers(program); break;
    case TERMINAL: filter_values(program, 1, terminals, COUNT(terminals), TO_STOP, TO_ALLOW); break;
    case NOTICE: filter_values(program, 1, notices, COUNT(notices), TO_STOP, TO_ALLOW); break;
    case PERSONALITY: filter_values(program, 0, personalities, COUNT(personalities), TO_ALLOW, TO_STOP); break;
    case FIRST: filter_values(program, 0, first, COUNT(first), TO_STOP, TO_ALLOW); break;
    case LIMITS: filter_limits(program); break;
    case PRIORITY: filter_priorities(program, PRIO_PROCESS, PRIO_PGRP, PRIO_USER); break;
    case IO_PRIORITY: filter_priorities(program, IO_PROCESS, IO_GROUP, IO_USER); break;
    case REAL_TIME: filter_schedulers(program); break;
    case IDS_1: show_ids(program, 1); break;
    case IDS_2: show_ids(program, 2); break;
    case IDS_3: show_ids(program, 3); break;
    case DEVICE_1: show_devices(program, 1); break;
    case DEVICE_2: show_devices(program, 2); break;
    case SIGNAL: show_signals(program); break;
    default: break;
    }
    return EPERM;
}

void act(struct program *program, enum action action)
{
    bool shown = action >= IDS_1;
    size_t start = program->length;
    switch (shown && !program->watched ? ALLOW : action) {
    case ALLOW: answer(program, SECCOMP_RET_ALLOW); return;
    case REFUSE: answer(program, refusal(program, EPERM)); return;
    case SILENT: answer(program, ERRNO(EPERM)); return;
    case NO_SUCH: answer(program, ERRNO(ENOSYS)); return;
    case ABSENT:
    case FOREIGN: answer(program, refusal(program, ENOSYS)); return;
    default: break;
    }
    int error = check_arguments(program, action);
    size_t allow = program->length, stop = allow + 1;
    answer(program, SECCOMP_RET_ALLOW);
    answer(program, refusal(program, error));
    for (size_t i = start; i < allow; i++) {
        struct step *step = &program->steps[i];
        step->yes = (uint16_t)(step->yes == TO_ALLOW ? allow - i - 1 : step->yes == TO_STOP ? stop - i - 1 : step->yes);
        step->no = (uint16_t)(step->no == TO_ALLOW ? allow - i - 1 : step->no == TO_STOP ? stop - i - 1 : step->no);
    }
}
