/* The stream to the server: frames in, frames out, both bounded; resets on escaped streams; new connections on a listening socket. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "agent.h"

#define QUEUE_FULL (2u * 1024 * 1024)
#define RETRY_MS 50

struct block {
    struct block *next;
    uint8_t *data;
    size_t size, sent;
};

static struct source input = {-1, NULL}, output = {-1, NULL}, listening = {-1, NULL};
static bool one_descriptor;
static bool lost; /* a write failed. Dealt with in the loop's next turn, since whoever sends may be amid what that would free */
static struct block *queue, **queue_end = &queue;
static size_t queued;
static int64_t retry_at = NEVER; /* a line nobody has open is looked at again then */

static uint8_t raw[4096]; /* what was read and not yet taken apart */
static size_t raw_at, raw_size;
static struct {
    uint8_t head[HEAD_SIZE];
    size_t head_size;
    uint8_t *body;
    size_t body_size, body_have;
} partial;

static bool skipping;      /* after an escape: discard everything up to a reset */
static struct unescaper unescaper;

static void readable(struct source *source, uint32_t events);

bool stream_full(void) { return queued >= QUEUE_FULL; }

static void watch_stream(void) {
    uint32_t in = stream_full() ? 0 : EPOLLIN;
    uint32_t out = queue != NULL ? EPOLLOUT : 0;
    if (input.fd < 0 || retry_at != NEVER) return;
    source_change(&input, one_descriptor ? in | out : in);
    if (!one_descriptor) source_change(&output, out);
}

static void queue_clear(void) {
    while (queue != NULL) {
        struct block *block = queue;
        queue = block->next;
        free(block->data);
        free(block);
    }
    queue_end = &queue;
    queued = 0;
}

static void connection_lost(void) {
    lost = false;
    asks_forget();
    queue_clear();
    free(partial.body);
    memset(&partial, 0, sizeof partial);
    raw_at = raw_size = 0;
    unescaper = (struct unescaper){.after_escape = false};
    if (listening.fd >= 0) {
        source_close(&input);
        output.fd = -1;
    } else if (config.stays) {
        skipping = true;
        retry_at = now_ms() + RETRY_MS;
        source_remove(&input); /* epoll reports a hung-up descriptor forever */
    } else {
        loop_end(0);
    }
}

static bool write_some(const uint8_t *data, size_t size, size_t *sent) {
    ssize_t count = write(one_descriptor ? input.fd : output.fd, data, size);
    if (count < 0 && errno != EAGAIN && errno != EINTR) return false;
    *sent = count < 0 ? 0 : (size_t)count;
    return true;
}

static void send_raw(uint8_t *data, size_t size) {
    size_t sent = 0;
    if (queue == NULL && !lost && retry_at == NEVER) lost = !write_some(data, size, &sent);
    if (lost || sent == size) {
        free(data);
        return;
    }
    struct block *block = allocate(sizeof *block);
    *block = (struct block){NULL, data, size, sent};
    *queue_end = block;
    queue_end = &block->next;
    queued += size - sent;
    watch_stream();
}

void stream_send(uint8_t *data, size_t size) {
    if (input.fd < 0 || skipping) {
        free(data);
        return;
    }
    if (config.escaped) {
        uint8_t *escaped = escape(data, size, &size);
        free(data);
        data = escaped;
    }
    send_raw(data, size);
}

static void send_queue(void) {
    while (queue != NULL) {
        struct block *block = queue;
        size_t sent;
        if (!write_some(block->data + block->sent, block->size - block->sent, &sent)) {
            connection_lost();
            return;
        }
        block->sent += sent;
        queued -= sent;
        if (block->sent < block->size) break;
        queue = block->next;
        if (queue == NULL) queue_end = &queue;
        free(block->data);
        free(block);
    }
    watch_stream();
}

void stream_fault(void) {
    if (config.escaped) {
        asks_forget();
        skipping = true;
    } else if (listening.fd >= 0) {
        connection_lost();
    } else {
        loop_end(1);
    }
}

static bool alive(void) { return input.fd >= 0 && !skipping; }

static bool deliver(const uint8_t *body, size_t size) {
    struct reader head = {partial.head, partial.head + HEAD_SIZE, false};
    take_u32(&head);
    uint32_t id = take_u32(&head);
    if (ask_arrived(id, take_u8(&head), body, size)) return true;
    stream_fault();
    return false;
}

/* Takes one frame, or the part of one that is there. Returns how many bytes it used. */
static size_t take_frame(const uint8_t *data, size_t size) {
    size_t used = 0;
    if (partial.body == NULL) {
        used = HEAD_SIZE - partial.head_size < size ? HEAD_SIZE - partial.head_size : size;
        memcpy(partial.head + partial.head_size, data, used);
        partial.head_size += used;
        if (partial.head_size < HEAD_SIZE) return used;
        struct reader head = {partial.head, partial.head + HEAD_SIZE, false};
        uint32_t counted = take_u32(&head);
        if (counted < HEAD_COUNTED || counted > MAX_FRAME) {
            stream_fault();
            return size;
        }
        partial.body_size = counted - HEAD_COUNTED;
        partial.body_have = 0;
        if (partial.body_size <= size - used) { /* all of it is here: no copy */
            partial.head_size = 0;
            deliver(data + used, partial.body_size);
            return used + partial.body_size;
        }
        partial.body = allocate(partial.body_size);
    }
    size_t left = partial.body_size - partial.body_have;
    size_t piece = left < size - used ? left : size - used;
    memcpy(partial.body + partial.body_have, data + used, piece);
    partial.body_have += piece;
    if (partial.body_have == partial.body_size) {
        uint8_t *body = partial.body;
        partial.body = NULL;
        partial.head_size = 0;
        deliver(body, partial.body_size);
        free(body);
    }
    return used + piece;
}

static void take_reset(void) {
    asks_forget();
    queue_clear();
    free(partial.body);
    memset(&partial, 0, sizeof partial);
    skipping = false;
    uint8_t *reply = allocate(2 + RESET_NONCE);
    reply[0] = ESCAPE;
    reply[1] = ESCAPED_RESET;
    memcpy(reply + 2, unescaper.nonce, RESET_NONCE);
    send_raw(reply, 2 + RESET_NONCE);
}

static void take_apart(void) {
    while (raw_at < raw_size && !stream_full() && input.fd >= 0) {
        if (skipping) {
            raw_at = raw_size;
            break;
        }
        raw_at += take_frame(raw + raw_at, raw_size - raw_at);
    }
    if (raw_at >= raw_size) raw_at = raw_size = 0;
}

static bool read_body(void) {
    ssize_t count = read(input.fd, partial.body + partial.body_have, partial.body_size - partial.body_have);
    if (count <= 0) {
        if (count == 0 || (errno != EAGAIN && errno != EINTR)) connection_lost();
        return false;
    }
    partial.body_have += (size_t)count;
    if (partial.body_have == partial.body_size) {
        uint8_t *body = partial.body;
        partial.body = NULL;
        partial.head_size = 0;
        deliver(body, partial.body_size);
        free(body);
    }
    return alive();
}

static void read_some(void) {
    if (!config.escaped && partial.body != NULL) { /* large bodies are read to where they belong */
        for (int i = 0; i < 16 && partial.body != NULL && read_body(); i++) continue;
        return;
    }
    ssize_t count = read(input.fd, raw, sizeof raw);
    if (count <= 0) {
        if (count == 0 || (errno != EAGAIN && errno != EINTR)) connection_lost();
        return;
    }
    raw_at = 0;
    raw_size = (size_t)count;
    bool reset = false;
    if (config.escaped) raw_size = unescape(&unescaper, raw, raw_size, &reset);
    if (reset) take_reset();
}

static void readable(struct source *source, uint32_t events) {
    (void)source;
    if (events & EPOLLOUT) send_queue();
    if (input.fd < 0 || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    if (stream_full()) { /* the peer neither reads nor is there to send */
        if (events & (EPOLLHUP | EPOLLERR)) connection_lost();
        return;
    }
    if (raw_size == 0) read_some();
    take_apart();
}

static void writable(struct source *source, uint32_t events) {
    (void)source;
    if (events & (EPOLLERR | EPOLLHUP)) {
        connection_lost();
        return;
    }
    send_queue();
}

static bool adopt(int fd_in, int fd_out) {
    input = (struct source){fd_in, readable};
    output = (struct source){fd_out, writable};
    one_descriptor = fd_in == fd_out;
    for (int i = 0; i < 2; i++) {
        int fd = i == 0 ? fd_in : fd_out;
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
    return source_add(&input, EPOLLIN) && (one_descriptor || source_add(&output, 0));
}

static void accepted(struct source *source, uint32_t events) {
    (void)events;
    int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    if (input.fd >= 0) connection_lost(); /* the newest server counts: the one before is gone or was in another life */
    adopt(fd, fd);
}

bool stream_open(int fd_in, int fd_out, int listener) {
    skipping = config.escaped;
    if (listener < 0) return adopt(fd_in, fd_out);
    listening = (struct source){listener, accepted};
    return source_add(&listening, EPOLLIN);
}

int64_t stream_deadline(void) {
    if (lost) return 0;
    return raw_size > 0 && !stream_full() && input.fd >= 0 ? 0 : retry_at;
}

/* Goes on with what was read while the peer did not read, and looks whether a line has a server again. */
void stream_tick(int64_t now) {
    if (lost) connection_lost();
    if (raw_size > 0 && input.fd >= 0) take_apart();
    if (now < retry_at) return;
    struct pollfd line = {input.fd, POLLIN, 0};
    poll(&line, 1, 0);
    retry_at = line.revents & (POLLHUP | POLLERR) ? now + RETRY_MS : NEVER;
    if (retry_at == NEVER) source_add(&input, EPOLLIN);
}

bool stream_flush(int64_t until_ms) {
    while (queue != NULL && input.fd >= 0) {
        struct pollfd ready = {one_descriptor ? input.fd : output.fd, POLLOUT, 0};
        int64_t left = until_ms - now_ms();
        if (left <= 0 || poll(&ready, 1, (int)left) <= 0) return false;
        send_queue();
    }
    return true;
}
