/* Which ask goes where, and what belongs to no other file: INIT, CANCEL. */
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

#define MAX_HOST_NAME 64
#define MAX_SEED 1024

static char **init_env; /* what INIT gave */

/* The entries of each list override those of the ones before. */
char **merged_env(char *const *more) {
    char *const *lists[] = {config.env != NULL ? config.env : environ, init_env, more};
    size_t count = 0, size = 0;
    for (size_t i = 0; i < 3; i++)
        for (char *const *at = lists[i]; at != NULL && *at != NULL; at++) {
            count++;
            size += strlen(*at) + 1;
        }
    char **merged = allocate((count + 1) * sizeof *merged + size);
    char *text = (char *)(merged + count + 1);
    size_t used = 0;
    for (size_t i = 0; i < 3; i++)
        for (char *const *at = lists[i]; at != NULL && *at != NULL; at++) {
            size_t name = strcspn(*at, "="), place = 0;
            while (place < used && (strncmp(merged[place], *at, name) != 0 || merged[place][name] != '=')) place++;
            merged[place] = strcpy(text, *at);
            text += strlen(*at) + 1;
            if (place == used) used++;
        }
    merged[used] = NULL;
    return merged;
}

/* Only a machine's own agent may credit entropy; elsewhere writing still mixes the seed in, where there is such a device. */
static void mix_entropy(struct span seed) {
    if (seed.size == 0) return;
    int fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return;
    union { struct rand_pool_info info; uint8_t space[sizeof(struct rand_pool_info) + MAX_SEED]; } pool;
    uint32_t size = seed.size < MAX_SEED ? seed.size : MAX_SEED;
    pool.info.entropy_count = (int)size * 8;
    pool.info.buf_size = (int)size;
    memcpy(pool.space + sizeof pool.info, seed.data, size);
    bool credited = config.owns_machine && ioctl(fd, RNDADDENTROPY, &pool) == 0 && ioctl(fd, RNDRESEEDCRNG) == 0;
    if (!credited && write(fd, seed.data, size) < 0) { /* not permitted: then the kernel's own entropy must suffice */
    }
    close(fd);
}

static void ask_init(uint32_t id, struct reader *from) {
    struct span name = take_bytes(from), seed = take_bytes(from);
    char **env = take_strings(from);
    int64_t clock_ns = (int64_t)take_u64(from);
    if (!taken(from)) {
        free(env);
        return;
    }
    free(init_env);
    init_env = env;
    bool own = config.is_init || config.owns_machine; /* else the name is that of the machine around it */
    if (own && name.size > 0 && name.size <= MAX_HOST_NAME && sethostname(name.data, name.size) != 0 && errno != EPERM) {
        answer_error(id, errno);
        return;
    }
    mix_entropy(seed);
    if (clock_ns > 0 && config.owns_machine) {
        struct timespec clock = {clock_ns / 1000000000, clock_ns % 1000000000};
        clock_settime(CLOCK_REALTIME, &clock);
    }
    struct frame frame;
    frame_start(&frame, id, ANSWER_OK, 8);
    put_u32(&frame, PROTOCOL_VERSION);
    put_u32(&frame, (uint32_t)getpid());
    frame_send(&frame);
}

static void ask_cancel(uint32_t id, struct reader *from) {
    uint32_t cancelled = take_u32(from);
    if (!taken(from)) return;
    bool (*const places[])(uint32_t) = {poll_cancel, watch_cancel, list_cancel, job_cancel, shell_cancel, upload_cancel};
    for (size_t i = 0; cancelled != 0 && i < sizeof places / sizeof *places; i++) /* 0: the caller has stopped waiting */
        if (places[i](cancelled)) break;
    answer_ok(id);
}

void asks_forget(void) {
    polls_forget();
    watches_forget();
    lists_forget();
    jobs_forget();
    shells_forget();
    uploads_forget();
    processes_forget();
}

static void (*const handlers[ASK_COUNT])(uint32_t, struct reader *) = {
    [ASK_INIT] = ask_init,     [ASK_SHELL] = ask_shell,         [ASK_START] = ask_start,
    [ASK_OUTPUT] = ask_output, [ASK_WAIT] = ask_wait,           [ASK_PROCESSES] = ask_processes,
    [ASK_STDIN] = ask_stdin,   [ASK_CLOSE_STDIN] = ask_close_stdin, [ASK_SIGNAL] = ask_signal,
    [ASK_RESIZE] = ask_resize, [ASK_READ] = ask_read,           [ASK_WRITE] = ask_write,
    [ASK_STAT] = ask_stat,     [ASK_LIST] = ask_list,           [ASK_MOVE] = ask_move,
    [ASK_REMOVE] = ask_remove, [ASK_MKDIR] = ask_mkdir,         [ASK_WATCH] = ask_watch,
    [ASK_CANCEL] = ask_cancel,
};

/* Every handler takes its fields, does nothing unless they are all that the frame holds, and is done with the body when it returns. */
bool ask_arrived(uint32_t id, uint8_t kind, const uint8_t *body, size_t size) {
    if (id == 0 || kind >= ASK_COUNT || handlers[kind] == NULL) return false;
    struct reader from = {body, body + size, false};
    handlers[kind](id, &from);
    return taken(&from);
}
