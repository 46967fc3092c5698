/* SHELL asks: one after the other; the commands of one ask at the same time. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"

#define MAX_COMMANDS 256
#define MAX_WAITING 256
#define MAX_WAITING_BYTES (64u * 1024 * 1024)
#define ANSWER_BYTES 64u /* of a command's result beside its output, at most */

struct shell_ask {
    struct shell_ask *next;
    uint32_t id; /* 0: its caller has stopped waiting */
    uint32_t limit, count;
    int64_t started;
    size_t size;
    struct pids before; /* what ran when it began lives on whatever becomes of it */
    struct command commands[];
};

static struct shell_ask *asks; /* the first one runs, once it has started */
static size_t waiting, waiting_bytes;
static int death = -1; /* how the shell died while nothing ran in it: the next ask is told, since state it may count on is lost */

static void ask_free(struct shell_ask *ask) {
    for (uint32_t i = 0; i < ask->count; i++) {
        source_close(&ask->commands[i].pipe);
        output_free(ask->commands[i].output);
        free(ask->commands[i].text);
    }
    pids_free(&ask->before);
    waiting--;
    waiting_bytes -= ask->size;
    free(ask);
}

static struct shell_ask *take_first(void) {
    struct shell_ask *ask = asks;
    asks = ask->next;
    return ask;
}

static bool running(void) { return asks != NULL && asks->started != NEVER; }

/* Ends the shell and what the commands started. What the asks of a server started by START is not theirs. */
static void stop_shell(struct shell_ask *ask) {
    processes_supervisors(&ask->before);
    jobs_pids(&ask->before);
    tree_kill(getpid(), &ask->before);
    driver_stop();
}

static void put_result(struct frame *frame, const struct command *command, int code, uint8_t flag) {
    put_u32(frame, (uint32_t)(command->finished ? command->code : code));
    put_u8(frame, command->finished ? 0 : flag);
    put_output(frame, command->output);
}

/* code, flag: of the commands that have not finished. */
static void finish(int code, uint8_t flag) {
    struct shell_ask *ask = take_first();
    for (uint32_t i = 0; i < ask->count; i++) driver_collect(&ask->commands[i]);
    if (ask->id != 0) {
        struct frame frame;
        frame_start(&frame, ask->id, ANSWER_OK, 1024);
        put_u32(&frame, ask->count);
        for (uint32_t i = 0; i < ask->count; i++) put_result(&frame, &ask->commands[i], code, flag);
        frame_send(&frame);
    }
    ask_free(ask);
}

static void fail(int code) {
    if (driver_running()) stop_shell(asks); /* else those that run already would go on, with nobody to read them */
    struct shell_ask *ask = take_first();
    for (uint32_t i = 0; i < ask->count; i++)
        if (ask->commands[i].output != NULL) driver_collect(&ask->commands[i]);
    if (ask->id != 0) answer_error(ask->id, code);
    ask_free(ask);
}

static int put_empty(struct shell_ask *ask) {
    for (uint32_t i = 0; i < ask->count; i++) ask->commands[i].output = output_new(ask->limit);
    int code = death;
    death = -1;
    return code;
}

static void start_first(void) {
    struct shell_ask *ask = asks;
    ask->started = now_ms();
    if (death >= 0 && ask->count > 0) { /* an ask without commands would tell nobody */
        finish(put_empty(ask), SHELL_DIED);
        return;
    }
    int code = driver_running() ? 0 : driver_start();
    if (code != 0) {
        fail(code);
        return;
    }
    struct pids below = {NULL, 0, 0};
    tree_below(getpid(), &below);
    for (size_t i = 0; i < below.count; i++)
        if (below.list[i] != driver_pid()) pids_add(&ask->before, below.list[i]);
    pids_free(&below);
    for (uint32_t i = 0; i < ask->count && code == 0; i++) code = driver_submit(&ask->commands[i], ask->count > 1, ask->limit);
    if (code != 0) fail(code);
}

static bool finished(const struct shell_ask *ask) {
    for (uint32_t i = 0; i < ask->count; i++)
        if (!ask->commands[i].finished) return false;
    return true;
}

void driver_report(uint64_t number, int code) {
    for (uint32_t i = 0; running() && i < asks->count; i++) {
        struct command *command = &asks->commands[i];
        if (command->number == number && !command->finished) {
            command->finished = true;
            command->code = code;
        }
    }
}

static int64_t deadline(const struct shell_ask *ask) {
    int64_t due = NEVER;
    for (uint32_t i = 0; i < ask->count; i++)
        if (!ask->commands[i].finished && ask->started + ask->commands[i].deadline_ms < due) due = ask->started + ask->commands[i].deadline_ms;
    return due;
}

int64_t shell_deadline(void) {
    if (asks == NULL) return NEVER;
    if (!running()) return stream_full() ? NEVER : 0;
    return finished(asks) ? 0 : deadline(asks);
}

void shell_tick(int64_t now) {
    if (running() && finished(asks)) {
        finish(0, 0);
    } else if (running() && deadline(asks) <= now) {
        driver_read_status(); /* what has come meanwhile counts */
        bool late = !finished(asks);
        if (late) stop_shell(asks);
        finish(128 + SIGKILL, SHELL_TIMED_OUT);
    }
    while (asks != NULL && !running() && !stream_full()) start_first();
}

bool shell_reaped(pid_t pid, int status) {
    if (pid != driver_pid() || pid == 0) return false;
    driver_read_status();
    int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (running() && !finished(asks)) {
        stop_shell(asks);
        finish(code, SHELL_DIED);
    } else {
        driver_stop();
        death = code;
    }
    return true;
}

static bool take_commands(struct shell_ask *ask, struct reader *from) {
    bool good = true;
    for (uint32_t i = 0; i < ask->count; i++) {
        struct span text = take_bytes(from);
        struct command *command = &ask->commands[i];
        *command = (struct command){.pipe = {-1, NULL}, .deadline_ms = take_u32(from), .size = text.size};
        if (memchr(text.data, 0, text.size) != NULL) good = false; /* bash reads up to a zero byte */
        command->text = allocate((size_t)text.size + 1);
        memcpy(command->text, text.data, text.size);
        command->text[text.size] = 0;
    }
    return good;
}

void ask_shell(uint32_t id, struct reader *from) {
    size_t size = (size_t)(from->end - from->at);
    uint32_t limit = take_u32(from), count = take_u32(from);
    if (from->bad || count > size / 8) {
        from->bad = true;
        return;
    }
    if (count > MAX_COMMANDS) { /* before memory is taken for them */
        from->at = from->end;
        answer_error(id, EINVAL);
        return;
    }
    struct shell_ask *ask = allocate(sizeof *ask + count * sizeof *ask->commands);
    *ask = (struct shell_ask){.id = id, .limit = limit, .count = count, .started = NEVER, .size = size};
    bool good = take_commands(ask, from);
    int code = 0;
    if (!good) code = EINVAL;
    else if (count * ((uint64_t)limit + ANSWER_BYTES) > MAX_FRAME - 64) code = EMSGSIZE;
    else if (waiting >= MAX_WAITING || waiting_bytes + size > MAX_WAITING_BYTES) code = EAGAIN;
    waiting++;
    waiting_bytes += size;
    if (!taken(from) || code != 0) {
        if (taken(from)) answer_error(id, code);
        ask_free(ask);
        return;
    }
    struct shell_ask **end = &asks;
    while (*end != NULL) end = &(*end)->next;
    *end = ask;
}

bool shell_cancel(uint32_t id) {
    for (struct shell_ask **at = &asks; *at != NULL; at = &(*at)->next) {
        struct shell_ask *ask = *at;
        if (ask->id != id) continue;
        if (ask->started != NEVER) {
            fail(ECANCELED);
            return true;
        }
        *at = ask->next;
        ask_free(ask);
        answer_error(id, ECANCELED);
        return true;
    }
    return false;
}

/* What runs goes on, since its effects were asked for; what waits was never begun and is not. */
void shells_forget(void) {
    if (asks == NULL) return;
    asks->id = 0;
    bool begun = running();
    struct shell_ask *ask = begun ? asks->next : asks;
    if (begun) asks->next = NULL;
    else asks = NULL;
    while (ask != NULL) {
        struct shell_ask *next = ask->next;
        ask_free(ask);
        ask = next;
    }
}
