/* What the files of the agent share. One process, one thread, one loop: each file keeps its own state and is called from the loop. */
#ifndef ENVD_AGENT_H
#define ENVD_AGENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "guest.h"
#include "libc.h"
#include "protocol.h"

#define NEVER INT64_MAX

extern struct guest_config config;

/* guest_bytes.c: fields of frames. A reader that ran over its end is `bad` and gives zeros from then on. */
struct reader { const uint8_t *at, *end; bool bad; };
struct span { const char *data; uint32_t size; };
uint8_t take_u8(struct reader *from);
uint32_t take_u32(struct reader *from);
uint64_t take_u64(struct reader *from);
struct span take_bytes(struct reader *from);
char **take_strings(struct reader *from); /* one block to free(), NULL at its end; sets bad when one holds a zero byte */
bool taken(const struct reader *from);    /* all fields fitted and nothing is left */

struct frame { uint8_t *data; size_t size, room; };
void frame_start(struct frame *frame, uint32_t id, enum answer kind, size_t room);
void put_u8(struct frame *frame, uint8_t value);
void put_u32(struct frame *frame, uint32_t value);
void put_u64(struct frame *frame, uint64_t value);
void put_bytes(struct frame *frame, const void *data, size_t size);
void put_string(struct frame *frame, const char *text);
uint8_t *put_room(struct frame *frame, size_t size); /* `size` bytes to fill in later; valid until the next put */
void set_u32(struct frame *frame, size_t at, uint32_t value);
void frame_send(struct frame *frame);
void answer_ok(uint32_t id);
void answer_error(uint32_t id, int code);
void *allocate(size_t size);              /* never NULL: an agent without memory for its own needs ends */
void *reallocate(void *old, size_t size);
char *copy_string(const char *text);

/* guest_stream.c */
bool stream_open(int fd_in, int fd_out, int listener);
void stream_send(uint8_t *data, size_t size); /* takes data over */
bool stream_full(void);                       /* the peer does not read: produce nothing that can wait */
void stream_fault(void);                      /* the peer broke the protocol */
bool stream_flush(int64_t until_ms);
int64_t stream_deadline(void);
void stream_tick(int64_t now);

/* guest_escape.c: byte stuffing and resets (protocol.h) */
struct unescaper {
    bool after_escape;
    size_t left; /* bytes of a reset's nonce still to come */
    uint8_t nonce[RESET_NONCE];
};
uint8_t *escape(const uint8_t *data, size_t size, size_t *escaped_size); /* to free() */
size_t unescape(struct unescaper *state, uint8_t *data, size_t size, bool *reset);

/* guest_loop.c */
struct source { int fd; void (*ready)(struct source *source, uint32_t events); };
bool source_add(struct source *source, uint32_t events);
void source_change(struct source *source, uint32_t events);
void source_remove(struct source *source);
void source_close(struct source *source); /* also closes the descriptor */
int64_t now_ms(void);
void loop_end(int code);
int loop_run(void);
bool loop_open(void);

/* guest_asks.c */
bool ask_arrived(uint32_t id, uint8_t kind, const uint8_t *body, size_t size); /* false: not a frame that may be sent */
void asks_forget(void); /* the server that asked is gone */
char **merged_env(char *const *more); /* one block to free() */

/* guest_paths.c: everything returns a descriptor or -errno. Paths are normalised: no leading slash, "." for the root. */
int normalise(struct span path, char into[4096]);
int root_open(void);
int open_in_root(const char *path, uint64_t flags, mode_t mode);
int open_parent(const char *path, const char **name); /* of what may not exist; refuses the root with -EBUSY */
int make_directories(const char *path);               /* as mkdir -p; 0 or -errno */

/* guest_files.c */
void put_entry(struct frame *frame, const char *path, const struct stat *about, const char *target);
void put_link_entry(struct frame *frame, const char *path, const struct stat *about, int parent, const char *name);
void answer_entry(uint32_t id, const char *path);
void ask_read(uint32_t id, struct reader *from);
void ask_stat(uint32_t id, struct reader *from);
void ask_move(uint32_t id, struct reader *from);
void ask_remove(uint32_t id, struct reader *from);
void ask_mkdir(uint32_t id, struct reader *from);

/* guest_upload.c */
void ask_write(uint32_t id, struct reader *from);
bool upload_cancel(uint32_t id);
void uploads_forget(void);

/* guest_list.c */
void ask_list(uint32_t id, struct reader *from);
bool list_cancel(uint32_t id);
void lists_forget(void);
bool lists_busy(void);
void lists_step(void);

/* guest_watch.c */
void ask_watch(uint32_t id, struct reader *from);
bool watch_cancel(uint32_t id);
void watches_forget(void);
void watches_resume(void); /* the stream has room again */

/* guest_jobs.c: what may take long runs in a forked child, so that no other ask waits for it. */
int job_start(uint32_t id, int (*work)(const char *first, const char *second), const char *first, const char *second, bool entry_of_second);
bool job_cancel(uint32_t id);
void jobs_forget(void);
bool job_reaped(pid_t pid, int status);
int remove_tree(const char *path, const char *unused);
int copy_and_remove(const char *source, const char *target);

/* guest_tree.c */
struct pids { pid_t *list; size_t count, room; };
void pids_add(struct pids *pids, pid_t pid);
void pids_free(struct pids *pids);
void jobs_pids(struct pids *into);
void tree_below(pid_t root, struct pids *into);                       /* all descendants now */
void tree_kill(pid_t root, const struct pids *spared);                /* all below root but the spared and what is below them */
int tree_signal(pid_t root, int number);                              /* once, all below root; ESRCH when there was none */
void tree_kill_orphans_since(uint64_t start, const struct pids *spared); /* children of this process that are no older than `start` */
uint64_t start_ticks(pid_t pid);                                      /* when a process started, 0 if unknown */

/* guest_launch.c */
struct launch {
    const char *file;   /* is tried first, where not NULL; then argv[0], along PATH */
    char *const *argv;
    char *const *env;
    int directory;      /* descriptor, or -1: where the agent is */
    int input, output, error;
    int control, status; /* given as 200 and 201 where not -1 */
    bool terminal;       /* input is to be the controlling terminal */
    pid_t parent;        /* end with it where above 0 */
};
int launch(const struct launch *what, pid_t *pid); /* 0 or errno, of exec too */

/* guest_shell.c */
void ask_shell(uint32_t id, struct reader *from);
bool shell_cancel(uint32_t id);
void shells_forget(void);
bool shell_reaped(pid_t pid, int status);
int64_t shell_deadline(void);
void shell_tick(int64_t now);

/* guest_driver.c */
struct command {
    char name[24];         /* of its fifo, in the scratch directory */
    uint64_t number;
    char *text;
    uint32_t size, deadline_ms;
    struct source pipe;
    struct output *output;
    bool finished;
    int code;
};
int driver_start(void); /* 0 or errno */
bool driver_running(void);
pid_t driver_pid(void);
int driver_submit(struct command *command, bool together, uint32_t limit); /* 0 or errno */
void driver_collect(struct command *command);   /* what is still in the pipe; the pipe then belongs to what runs in the background */
void driver_stop(void);                         /* closes the descriptors; the process was killed by the caller */
void driver_read_status(void);
void driver_report(uint64_t number, int code);  /* called back: in guest_shell.c */

/* guest_output.c */
struct output;
struct output *output_new(uint32_t limit);
void output_feed(struct output *output, const void *data, size_t size);
void put_output(struct frame *frame, const struct output *output);
void output_free(struct output *output);
struct ring { uint8_t *data; size_t room, most; uint64_t total; };
void ring_feed(struct ring *ring, const uint8_t *data, size_t size);
uint64_t ring_start(const struct ring *ring);
void ring_copy(const struct ring *ring, uint64_t from, size_t size, uint8_t *into);
void ring_free(struct ring *ring);
#define PIPE_PIECE 16384
uint8_t *pipe_buffer(void); /* PIPE_PIECE bytes for reading pipes */

/* guest_process.c */
struct channel { struct source source; struct ring ring; bool ended; };
struct process {
    struct process *next;
    uint32_t number, start_id; /* start_id 0: nobody waits for its start */
    pid_t pid, supervisor;
    uint64_t start;         /* ticks */
    uint64_t ended;         /* which end of the sandbox's it was */
    struct source report;
    struct channel output[2];
    struct source input;    /* fd -1: closed; a pty's is its output's, dup'ed */
    char **argv;
    int64_t deadline;
    int code;
    bool terminal, starting, running, timed_out;
};
struct ends { int ours[3], theirs[3]; }; /* of standard input, output and error; -1: none */
bool process_room(void);
void process_add(struct process *process, const struct ends *ends, uint32_t ring);
void ask_stdin(uint32_t id, struct reader *from);
void ask_close_stdin(uint32_t id, struct reader *from);
void ask_signal(uint32_t id, struct reader *from);
void ask_resize(uint32_t id, struct reader *from);
void ask_processes(uint32_t id, struct reader *from);
struct process *process_find(uint32_t number);
void put_state(struct frame *frame, const struct process *process);
bool process_reaped(pid_t pid);
void processes_supervisors(struct pids *into);
void processes_forget(void);
int64_t processes_deadline(void);
void processes_tick(int64_t now);

/* guest_start.c */
void ask_start(uint32_t id, struct reader *from);

/* guest_supervisor.c */
enum { REPORT_STARTED = 1, REPORT_FAILED = 2, REPORT_ENDED = 3 };
struct report { uint32_t kind; int32_t value; };
_Noreturn void supervise(const struct launch *what, int report);

/* guest_poll.c: asks that wait for a process */
void ask_output(uint32_t id, struct reader *from);
void ask_wait(uint32_t id, struct reader *from);
bool poll_cancel(uint32_t id);
void polls_forget(void);
void polls_check(int64_t now);
int64_t polls_deadline(void);
void polls_wake(void); /* something they may wait for has happened */

/* guest_main.c */
int agent_run(int fd_in, int fd_out, int listener, const struct guest_config *given);

#endif
