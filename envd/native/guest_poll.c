/* OUTPUT and WAIT: requests that wait for a process's output or end, for a bounded time. */
#include <errno.h>
#include <stdlib.h>

#include "agent.h"

#define MAX_POLLS 1024

struct poll {
    struct poll *next;
    uint32_t id, process, most;
    int channel; /* 0: a WAIT */
    uint64_t offset;
    int64_t deadline;
};

static struct poll *polls;
static size_t poll_count;
static bool awake;

void polls_wake(void) { awake = true; }

static int answer_output(const struct poll *poll, struct process *process) {
    const struct channel *channel = &process->output[poll->channel - 1];
    const struct ring *ring = &channel->ring;
    uint64_t start = poll->offset > ring_start(ring) ? poll->offset : ring_start(ring);
    if (start > ring->total) start = ring->total;
    uint64_t left = ring->total - start;
    size_t most = poll->most < CHUNK ? poll->most : CHUNK;
    size_t size = left < most ? (size_t)left : most;
    struct frame frame;
    frame_start(&frame, poll->id, ANSWER_OK, 24 + size);
    put_u64(&frame, start);
    put_u64(&frame, ring->total);
    put_u8(&frame, channel->ended && start + size == ring->total);
    put_u32(&frame, (uint32_t)size);
    ring_copy(ring, start, size, put_room(&frame, size));
    frame_send(&frame);
    return 0;
}

static void answer_state(const struct poll *poll, const struct process *process) {
    struct frame frame;
    frame_start(&frame, poll->id, ANSWER_OK, 128);
    put_state(&frame, process);
    frame_send(&frame);
}

/* Answers what can be answered now; false: it has to wait. */
static bool settle(const struct poll *poll, int64_t now) {
    struct process *process = process_find(poll->process);
    bool due = poll->deadline <= now;
    if (process == NULL) {
        answer_error(poll->id, ESRCH);
    } else if (poll->channel == 0) {
        if (process->running && !due) return false;
        answer_state(poll, process);
    } else {
        const struct channel *channel = &process->output[poll->channel - 1];
        if (channel->ring.total <= poll->offset && !channel->ended && !due) return false;
        answer_output(poll, process);
    }
    return true;
}

static void begin(struct poll poll, uint32_t wait_ms) {
    int64_t now = now_ms();
    poll.deadline = now + wait_ms;
    if (settle(&poll, now)) return;
    if (poll_count >= MAX_POLLS) {
        answer_error(poll.id, EAGAIN);
        return;
    }
    struct poll *kept = allocate(sizeof *kept);
    *kept = poll;
    kept->next = polls;
    polls = kept;
    poll_count++;
}

void ask_output(uint32_t id, struct reader *from) {
    struct poll poll = {.id = id, .process = take_u32(from)};
    poll.channel = take_u8(from);
    poll.offset = take_u64(from);
    poll.most = take_u32(from);
    uint32_t wait_ms = take_u32(from);
    if (!taken(from)) return;
    if (poll.channel == CHANNEL_STDOUT || poll.channel == CHANNEL_STDERR) begin(poll, wait_ms);
    else answer_error(id, EINVAL);
}

void ask_wait(uint32_t id, struct reader *from) {
    struct poll poll = {.id = id, .process = take_u32(from)};
    uint32_t wait_ms = take_u32(from);
    if (taken(from)) begin(poll, wait_ms);
}

static void drop(struct poll **at) {
    struct poll *poll = *at;
    *at = poll->next;
    poll_count--;
    free(poll);
}

void polls_check(int64_t now) {
    if (!awake && polls_deadline() > now) return;
    for (struct poll **at = &polls; *at != NULL;) {
        if (stream_full()) return; /* asked again when there is room: `awake` stays set */
        if (settle(*at, now)) drop(at);
        else at = &(*at)->next;
    }
    awake = false;
}

int64_t polls_deadline(void) {
    if (stream_full()) return NEVER;
    int64_t due = awake && polls != NULL ? 0 : NEVER;
    for (struct poll *poll = polls; poll != NULL; poll = poll->next)
        if (poll->deadline < due) due = poll->deadline;
    return due;
}

bool poll_cancel(uint32_t id) {
    for (struct poll **at = &polls; *at != NULL; at = &(*at)->next)
        if ((*at)->id == id) {
            drop(at);
            answer_error(id, ECANCELED);
            return true;
        }
    return false;
}

void polls_forget(void) {
    while (polls != NULL) drop(&polls);
}
