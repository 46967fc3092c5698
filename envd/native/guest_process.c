/* The processes that START started, and what is done to them. Each is the child of a supervisor of its own (guest_supervisor.c), which reports its start and end. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "agent.h"

#define MAX_PROCESSES 256
#define MAX_ENDED 32 /* of which so many are remembered when they have ended, with their output */
#define MAX_RING (16u * 1024 * 1024)
#define MIN_RING 4096u
#define END_OF_INPUT 4 /* Ctrl-D, which a terminal reads as end of input */

static struct process *processes; /* in the order of their start */
static size_t process_count;
static uint32_t last_number;
static uint64_t last_end;

struct process *process_find(uint32_t number) {
    for (struct process *process = processes; process != NULL; process = process->next)
        if (process->number == number && !process->starting) return process;
    return NULL;
}

static void process_free(struct process *process) {
    for (struct process **at = &processes; *at != NULL; at = &(*at)->next)
        if (*at == process) {
            *at = process->next;
            process_count--;
            break;
        }
    source_close(&process->report);
    source_close(&process->input);
    for (int i = 0; i < 2; i++) {
        source_close(&process->output[i].source);
        ring_free(&process->output[i].ring);
    }
    free(process->argv);
    free(process);
}

static bool over(const struct process *process) {
    return !process->running && !process->starting && process->supervisor == 0;
}

/* Forgets what ended first until few ended ones are left: who waits for an end has time to hear of it, however old the process is. */
bool process_room(void) {
    for (;;) {
        size_t ended = 0;
        struct process *first = NULL;
        for (struct process *process = processes; process != NULL; process = process->next) {
            if (!over(process)) continue;
            ended++;
            if (first == NULL || process->ended < first->ended) first = process;
        }
        if (ended < MAX_ENDED) break;
        process_free(first);
    }
    return process_count < MAX_PROCESSES;
}

static void output_ready(struct source *source, uint32_t events) {
    (void)events;
    struct channel *channel = (struct channel *)((char *)source - offsetof(struct channel, source));
    ssize_t count = read(source->fd, pipe_buffer(), PIPE_PIECE);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count > 0) ring_feed(&channel->ring, pipe_buffer(), (size_t)count);
    polls_wake();
    if (count > 0) return;
    channel->ended = true; /* EIO is how a terminal without users says so */
    source_close(source);
}

static void process_ended(struct process *process, int code) {
    process->running = false;
    process->code = code;
    process->ended = ++last_end;
    process->deadline = NEVER;
    source_close(&process->input);
    polls_wake();
}

static void started(struct process *process, pid_t pid) {
    process->pid = pid;
    process->running = true;
    process->starting = false;
    if (process->start_id == 0) return;
    struct frame frame;
    frame_start(&frame, process->start_id, ANSWER_OK, 8);
    put_u32(&frame, process->number);
    put_u32(&frame, (uint32_t)process->pid);
    frame_send(&frame);
}

static void start_failed(struct process *process, int code) {
    if (process->start_id != 0) answer_error(process->start_id, code);
    process_free(process);
}

/* Somebody killed the supervisor: what was below it is now below the agent, and no longer told apart but by its age. */
static void supervisor_lost(struct process *process) {
    struct pids spared = {NULL, 0, 0};
    processes_supervisors(&spared);
    jobs_pids(&spared);
    if (driver_running()) pids_add(&spared, driver_pid());
    tree_kill_orphans_since(process->start, &spared);
    pids_free(&spared);
}

static void report_ready(struct source *source, uint32_t events) {
    (void)events;
    struct process *process = (struct process *)((char *)source - offsetof(struct process, report));
    struct report report;
    ssize_t count = read(source->fd, &report, sizeof report);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count == sizeof report && report.kind == REPORT_STARTED && process->starting) {
        started(process, report.value);
    } else if (count == sizeof report && report.kind == REPORT_ENDED) {
        process_ended(process, report.value);
    } else if (process->starting) {
        start_failed(process, count == sizeof report ? report.value : EAGAIN);
    } else {
        source_close(source);
        if (!process->running) return;
        process_ended(process, -SIGKILL);
        supervisor_lost(process);
    }
}

static void listen_to(struct process *process, const struct ends *ends, uint32_t ring) {
    uint32_t room = ring < MIN_RING ? MIN_RING : ring > MAX_RING ? MAX_RING : ring;
    process->input = (struct source){ends->ours[0], NULL};
    if (ends->ours[0] >= 0) fcntl(ends->ours[0], F_SETFL, O_NONBLOCK);
    for (int i = 0; i < 2; i++) {
        struct channel *channel = &process->output[i];
        *channel = (struct channel){.source = {ends->ours[i + 1], output_ready}, .ring = {.most = room}, .ended = ends->ours[i + 1] < 0};
        if (channel->ended) continue;
        fcntl(channel->source.fd, F_SETFL, O_NONBLOCK);
        source_add(&channel->source, EPOLLIN);
    }
}

/* Takes over a process that is being started, and the agent's ends of its pipes. */
void process_add(struct process *process, const struct ends *ends, uint32_t ring) {
    process->number = ++last_number;
    process->report.ready = report_ready;
    source_add(&process->report, EPOLLIN);
    listen_to(process, ends, ring);
    struct process **end = &processes;
    while (*end != NULL) end = &(*end)->next;
    *end = process;
    process_count++;
}

void put_state(struct frame *frame, const struct process *process) {
    put_u32(frame, process->number);
    put_u32(frame, (uint32_t)process->pid);
    put_u8(frame, process->running);
    put_u32(frame, (uint32_t)process->code);
    put_u8(frame, process->timed_out);
    put_u64(frame, process->output[0].ring.total);
    put_u64(frame, process->output[1].ring.total);
    size_t count_at = frame->size;
    uint32_t count = 0;
    put_u32(frame, 0);
    for (; process->argv[count] != NULL; count++) put_string(frame, process->argv[count]);
    set_u32(frame, count_at, count);
}

void ask_processes(uint32_t id, struct reader *from) {
    if (!taken(from)) return;
    struct frame frame;
    frame_start(&frame, id, ANSWER_OK, 256);
    size_t count_at = frame.size;
    uint32_t count = 0;
    put_u32(&frame, 0);
    for (struct process *process = processes; process != NULL; process = process->next) {
        size_t before = frame.size;
        if (process->starting) continue;
        put_state(&frame, process);
        if (frame.size > MAX_FRAME) { /* arguments beyond what a frame holds */
            frame.size = before;
            break;
        }
        count++;
    }
    set_u32(&frame, count_at, count);
    frame_send(&frame);
}

void ask_stdin(uint32_t id, struct reader *from) {
    struct process *process = process_find(take_u32(from));
    struct span data = take_bytes(from);
    if (!taken(from)) return;
    int code = process == NULL ? ESRCH : process->input.fd < 0 ? EPIPE : 0;
    ssize_t count = code == 0 ? write(process->input.fd, data.data, data.size) : 0;
    if (count < 0 && errno != EAGAIN && errno != EINTR) code = errno;
    if (code != 0) {
        answer_error(id, code);
        return;
    }
    struct frame frame;
    frame_start(&frame, id, ANSWER_OK, 4);
    put_u32(&frame, count > 0 ? (uint32_t)count : 0);
    frame_send(&frame);
}

void ask_close_stdin(uint32_t id, struct reader *from) {
    struct process *process = process_find(take_u32(from));
    if (!taken(from)) return;
    int code = process == NULL ? ESRCH : 0;
    const char end = END_OF_INPUT;
    if (code == 0 && process->terminal && process->input.fd >= 0) code = write(process->input.fd, &end, 1) == 1 ? 0 : errno;
    else if (code == 0) source_close(&process->input);
    if (code != 0) answer_error(id, code);
    else answer_ok(id);
}

void ask_signal(uint32_t id, struct reader *from) {
    struct process *process = process_find(take_u32(from));
    uint32_t number = take_u32(from);
    bool tree = take_u8(from) != 0;
    if (!taken(from)) return;
    int code = 0;
    if (process == NULL || (!tree && !process->running) || (tree && process->supervisor == 0)) code = ESRCH;
    else if (number == 0 || number > (uint32_t)SIGRTMAX) code = EINVAL;
    else if (!tree) code = kill(process->pid, (int)number) == 0 ? 0 : errno;
    else if (number == SIGKILL) tree_kill(process->supervisor, NULL);
    else code = tree_signal(process->supervisor, (int)number);
    if (code != 0) answer_error(id, code);
    else answer_ok(id);
}

void ask_resize(uint32_t id, struct reader *from) {
    struct process *process = process_find(take_u32(from));
    uint32_t rows = take_u32(from), columns = take_u32(from);
    if (!taken(from)) return;
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    int code = process == NULL || !process->running ? ESRCH : !process->terminal ? ENOTTY : 0;
    if (code == 0 && ioctl(process->input.fd, TIOCSWINSZ, &size) != 0) code = errno;
    if (code != 0) answer_error(id, code);
    else answer_ok(id);
}

bool process_reaped(pid_t pid) {
    for (struct process *process = processes; process != NULL; process = process->next)
        if (process->supervisor == pid) {
            process->supervisor = 0;
            return true;
        }
    return false;
}

void processes_supervisors(struct pids *into) {
    for (struct process *process = processes; process != NULL; process = process->next)
        if (process->supervisor != 0) pids_add(into, process->supervisor);
}

/* A process that is only just starting is kept, though nobody is told its number: PROCESSES lists it. */
void processes_forget(void) {
    for (struct process *process = processes; process != NULL; process = process->next)
        process->start_id = 0;
}

int64_t processes_deadline(void) {
    int64_t due = NEVER;
    for (struct process *process = processes; process != NULL; process = process->next)
        if (!process->starting && process->deadline < due) due = process->deadline;
    return due;
}

void processes_tick(int64_t now) {
    for (struct process *process = processes; process != NULL; process = process->next)
        if (!process->starting && process->deadline <= now) {
            process->deadline = NEVER;
            process->timed_out = true;
            if (process->supervisor != 0) tree_kill(process->supervisor, NULL);
        }
}
