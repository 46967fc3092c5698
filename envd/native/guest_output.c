/* Output of bounded size: what a shell answer keeps (head and tail), and the replay ring of a process. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "agent.h"

#define RING_FIRST 4096u

struct output {
    uint8_t *data;  /* `half` bytes of head, then a ring of `half` bytes that is in order until it is full */
    size_t half, room;
    uint64_t total;
};

struct output *output_new(uint32_t limit) {
    struct output *output = allocate(sizeof *output);
    *output = (struct output){.half = limit / 2};
    return output;
}

static void make_room(struct output *output, uint64_t wanted) {
    size_t most = 2 * output->half;
    size_t size = wanted < most ? (size_t)wanted : most;
    if (size <= output->room) return;
    size_t room = output->room ? output->room : 256;
    while (room < size) room *= 2;
    output->room = room < most ? room : most;
    output->data = reallocate(output->data, output->room);
}

void output_feed(struct output *output, const void *data, size_t size) {
    const uint8_t *from = data;
    size_t half = output->half;
    if (half == 0) {
        output->total += size;
        return;
    }
    make_room(output, output->total + size);
    if (output->total >= half && size > half) { /* only the last of it can stay */
        output->total += size - half;
        from += size - half;
        size = half;
    }
    while (size > 0) {
        size_t at = output->total < half ? (size_t)output->total : half + (size_t)((output->total - half) % half);
        size_t piece = (output->total < half ? half : 2 * half) - at;
        if (piece > size) piece = size;
        memcpy(output->data + at, from, piece);
        output->total += piece;
        from += piece;
        size -= piece;
    }
}

void put_output(struct frame *frame, const struct output *output) {
    size_t half = output->half;
    put_u64(frame, output->total);
    if (output->total <= 2 * half) {
        put_bytes(frame, output->data, (size_t)output->total);
        put_bytes(frame, NULL, 0);
        return;
    }
    put_bytes(frame, output->data, half);
    put_u32(frame, (uint32_t)half);
    if (half == 0) return;
    size_t oldest = (size_t)((output->total - half) % half);
    uint8_t *at = put_room(frame, half);
    memcpy(at, output->data + half + oldest, half - oldest);
    memcpy(at + half - oldest, output->data + half, oldest);
}

void output_free(struct output *output) {
    if (output == NULL) return;
    free(output->data);
    free(output);
}

/* Rings are mapped separately and not inherited, so that a forked supervisor keeps no copies. */
static uint8_t *ring_map(size_t size) {
    void *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return NULL;
    madvise(data, size, MADV_DONTFORK);
    return data;
}

uint64_t ring_start(const struct ring *ring) {
    return ring->total > ring->room ? ring->total - ring->room : 0;
}

void ring_copy(const struct ring *ring, uint64_t from, size_t size, uint8_t *into) {
    while (size > 0) {
        size_t at = (size_t)(from % ring->room);
        size_t piece = ring->room - at < size ? ring->room - at : size;
        memcpy(into, ring->data + at, piece);
        into += piece;
        from += piece;
        size -= piece;
    }
}

static void ring_grow(struct ring *ring, size_t wanted) {
    size_t room = ring->room ? ring->room : RING_FIRST;
    while (room < wanted && room < ring->most) room *= 2;
    if (room > ring->most) room = ring->most;
    uint8_t *data = room > ring->room ? ring_map(room) : NULL;
    if (data == NULL) return; /* no memory: the ring stays as large as it is and drops more */
    struct ring bigger = {data, room, ring->most, ring_start(ring)};
    while (bigger.total < ring->total) {
        size_t at = (size_t)(bigger.total % room);
        size_t piece = room - at;
        if (piece > ring->total - bigger.total) piece = (size_t)(ring->total - bigger.total);
        ring_copy(ring, bigger.total, piece, data + at);
        bigger.total += piece;
    }
    ring_free(ring);
    *ring = bigger;
}

void ring_feed(struct ring *ring, const uint8_t *data, size_t size) {
    uint64_t held = ring->total - ring_start(ring);
    if (held + size > ring->room && ring->room < ring->most) ring_grow(ring, (size_t)held + size);
    if (ring->room == 0) {
        ring->total += size;
        return;
    }
    while (size > 0) {
        size_t at = (size_t)(ring->total % ring->room);
        size_t piece = ring->room - at < size ? ring->room - at : size;
        memcpy(ring->data + at, data, piece);
        ring->total += piece;
        data += piece;
        size -= piece;
    }
}

void ring_free(struct ring *ring) {
    if (ring->data != NULL) munmap(ring->data, ring->room);
    ring->data = NULL;
    ring->room = 0;
}

uint8_t *pipe_buffer(void) {
    static uint8_t buffer[PIPE_PIECE];
    return buffer;
}
