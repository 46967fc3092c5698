/* The filter of system calls: classic BPF programs of seccomp's that are put together once, one for sandboxes that somebody watches and one for all
 * others, the verifier's among them. */
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawn.h"
#include "spawn_filter.h"

void add(struct program *program, uint16_t code, uint16_t yes, uint16_t no, uint32_t value)
{
    if (program->length == MOST_STEPS)
        abort();
    program->steps[program->length++] = (struct step){code, yes, no, value};
}

void load(struct program *program, size_t offset)
{
    add(program, BPF_LD | BPF_W | BPF_ABS, NEXT, NEXT, (uint32_t)offset);
}

void jump_if(struct program *program, uint16_t comparison, uint32_t value, uint16_t yes, uint16_t no)
{
    add(program, BPF_JMP | comparison | BPF_K, yes, no, value);
}

void answer(struct program *program, uint32_t value)
{
    add(program, BPF_RET | BPF_K, NEXT, NEXT, value);
}

/* Numbers from `first` up to the next range's are treated alike. */
struct range {
    uint32_t first;
    enum action action;
};

#define NEAR 16 /* ranges whose instructions a conditional jump can pass */

/* A binary search: the kernel tries the filter on every call there is when it is installed, in each sandbox, so a chain would be felt. */
static void search(struct program *program, const struct range *ranges, size_t count)
{
    if (count == 1) {
        act(program, ranges->action);
        return;
    }
    size_t half = count / 2, jump = program->length;
    bool far = count > NEAR;
    jump_if(program, BPF_JGE, ranges[half].first, NEXT, far ? 1 : NEXT);
    if (far)
        add(program, BPF_JMP | BPF_JA, NEXT, NEXT, 0);
    size_t below = program->length;
    search(program, ranges, half);
    if (far)
        program->steps[jump + 1].value = (uint32_t)(program->length - below);
    else
        program->steps[jump].yes = (uint16_t)(program->length - below);
    search(program, ranges + half, count - half);
}

static void write_filter(struct program *program)
{
    struct range ranges[KNOWN_CALLS + 1];
    size_t count = 0;
    for (uint32_t call = 0; call < KNOWN_CALLS; call++) {
        enum action action = action_of(call);
        if (count == 0 || action != ranges[count - 1].action)
            ranges[count++] = (struct range){call, action};
    }
    ranges[count++] = (struct range){X32_CALLS, FOREIGN};
    load(program, offsetof(struct seccomp_data, arch));
    jump_if(program, BPF_JEQ, ARCHITECTURE, 1, NEXT);
    act(program, FOREIGN);
    load(program, offsetof(struct seccomp_data, nr));
    search(program, ranges, count);
    for (size_t i = 0; i < program->length; i++) {
        const struct step *step = &program->steps[i];
        if (step->yes > UINT8_MAX || step->no > UINT8_MAX)
            abort(); /* lower NEAR */
        program->code[i] = (struct sock_filter){step->code, (uint8_t)step->yes, (uint8_t)step->no, step->value};
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

int print_filter(int out)
{
    prepare_filter();
    size_t size = quiet.length * sizeof *quiet.code;
    return write(out, quiet.code, size) == (ssize_t)size ? 0 : -1;
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
