/* Fields of frames, little-endian whatever the machine. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent.h"

void *allocate(size_t size) {
    return reallocate(NULL, size);
}

void *reallocate(void *old, size_t size) {
    void *found = realloc(old, size ? size : 1);
    if (found == NULL) _exit(3);
    return found;
}

char *copy_string(const char *text) {
    size_t size = strlen(text) + 1;
    return memcpy(allocate(size), text, size);
}

static uint64_t take(struct reader *from, size_t size) {
    if (from->bad || (size_t)(from->end - from->at) < size) {
        from->bad = true;
        return 0;
    }
    uint64_t value = 0;
    for (size_t i = 0; i < size; i++) value |= (uint64_t)from->at[i] << (8 * i);
    from->at += size;
    return value;
}

uint8_t take_u8(struct reader *from) { return (uint8_t)take(from, 1); }
uint32_t take_u32(struct reader *from) { return (uint32_t)take(from, 4); }
uint64_t take_u64(struct reader *from) { return take(from, 8); }

struct span take_bytes(struct reader *from) {
    uint32_t size = take_u32(from);
    if (from->bad || (size_t)(from->end - from->at) < size) {
        from->bad = true;
        return (struct span){"", 0};
    }
    struct span found = {(const char *)from->at, size};
    from->at += size;
    return found;
}

char **take_strings(struct reader *from) {
    uint32_t count = take_u32(from);
    size_t left = (size_t)(from->end - from->at);
    if (from->bad || count > left / 4) {
        from->bad = true;
        count = 0;
    }
    /* Each item has four bytes of length on the wire and one of zero here: the block suffices for all that are there. */
    char **list = allocate(((size_t)count + 1) * sizeof *list + left);
    char *text = (char *)(list + count + 1);
    list[0] = NULL;
    for (uint32_t i = 0; i < count; i++) {
        struct span item = take_bytes(from);
        if (from->bad) return list; /* fewer than were counted: nobody uses what was taken */
        if (memchr(item.data, 0, item.size) != NULL) from->bad = true;
        list[i] = text;
        memcpy(text, item.data, item.size);
        text[item.size] = 0;
        text += item.size + 1;
    }
    list[count] = NULL;
    return list;
}

bool taken(const struct reader *from) { return !from->bad && from->at == from->end; }

uint8_t *put_room(struct frame *frame, size_t size) {
    if (frame->size + size > frame->room) {
        frame->room = frame->size + size + frame->room / 2;
        frame->data = reallocate(frame->data, frame->room);
    }
    frame->size += size;
    return frame->data + frame->size - size;
}

static void put(struct frame *frame, uint64_t value, size_t size) {
    uint8_t *at = put_room(frame, size);
    for (size_t i = 0; i < size; i++) at[i] = (uint8_t)(value >> (8 * i));
}

void put_u8(struct frame *frame, uint8_t value) { put(frame, value, 1); }
void put_u32(struct frame *frame, uint32_t value) { put(frame, value, 4); }
void put_u64(struct frame *frame, uint64_t value) { put(frame, value, 8); }

void put_bytes(struct frame *frame, const void *data, size_t size) {
    put_u32(frame, (uint32_t)size);
    uint8_t *at = put_room(frame, size);
    if (size > 0) memcpy(at, data, size);
}

void put_string(struct frame *frame, const char *text) { put_bytes(frame, text, strlen(text)); }

void set_u32(struct frame *frame, size_t at, uint32_t value) {
    for (size_t i = 0; i < 4; i++) frame->data[at + i] = (uint8_t)(value >> (8 * i));
}

void frame_start(struct frame *frame, uint32_t id, enum answer kind, size_t room) {
    *frame = (struct frame){allocate(HEAD_SIZE + room), 0, HEAD_SIZE + room};
    put_u32(frame, 0);
    put_u32(frame, id);
    put_u8(frame, (uint8_t)kind);
}

void frame_send(struct frame *frame) {
    set_u32(frame, 0, (uint32_t)(frame->size - 4));
    stream_send(frame->data, frame->size);
    frame->data = NULL;
}

void answer_ok(uint32_t id) {
    struct frame frame;
    frame_start(&frame, id, ANSWER_OK, 0);
    frame_send(&frame);
}

void answer_error(uint32_t id, int code) {
    struct frame frame;
    frame_start(&frame, id, ANSWER_ERROR, 64);
    put_u32(&frame, (uint32_t)code);
    put_string(&frame, strerror(code));
    frame_send(&frame);
}
