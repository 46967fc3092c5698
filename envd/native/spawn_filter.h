/* Classic BPF programs of seccomp's, while they are put together. */
#ifndef ENVD_SPAWN_FILTER_H
#define ENVD_SPAWN_FILTER_H

#include <linux/filter.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "spawn_calls.h"

#define MOST_STEPS 1024

/* Where a jump leads: so many instructions on, or to one of the two answers at the end of a call's instructions. */
enum { NEXT = 0, TO_ALLOW = 0x100, TO_STOP = 0x101 };

struct step {
    uint16_t code, yes, no;
    uint32_t value;
};

struct program {
    struct step steps[MOST_STEPS];
    size_t length;
    bool watched; /* somebody holds its listener, answers the calls that it stops, and tells of them */
    struct sock_filter code[MOST_STEPS];
};

void add(struct program *program, uint16_t code, uint16_t yes, uint16_t no, uint32_t value);
void load(struct program *program, size_t offset);
void jump_if(struct program *program, uint16_t comparison, uint32_t value, uint16_t yes, uint16_t no);
void answer(struct program *program, uint32_t value);

/* spawn_filter_calls.c: the instructions for calls that are treated so; the last of them answers. */
void act(struct program *program, enum action action);

#endif
