/* WATCH: inotify over a directory, or over a tree of them, one instance an ask. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "agent.h"

#define MAX_PATH 4096
#define MAX_WATCHES 16
#define MAX_DIRECTORIES 8192 /* of one ask */
#define MAX_DEPTH 256
#define MASK (IN_CREATE | IN_MODIFY | IN_ATTRIB | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_DONT_FOLLOW | IN_EXCL_UNLINK)

struct place {
    int number; /* inotify's; they only grow, so that the list is sorted */
    char *path; /* its entries' prefix, with a slash unless empty; without one where a file itself is watched */
};

struct watch {
    struct source source;
    struct watch *next;
    uint32_t id;
    bool recursive, paused;
    struct place *places;
    size_t count, room;
};

/* Changes on their way into one part. */
struct batch {
    struct frame frame;
    size_t count_at;
    uint32_t count, id;
    uint8_t last_kind;
    char last_path[MAX_PATH + NAME_MAX + 2];
};

static struct watch *watches;
static size_t watch_count;

static void watch_drop(struct watch *watch) {
    for (struct watch **at = &watches; *at != NULL; at = &(*at)->next)
        if (*at == watch) {
            *at = watch->next;
            watch_count--;
            break;
        }
    source_close(&watch->source);
    for (size_t i = 0; i < watch->count; i++) free(watch->places[i].path);
    free(watch->places);
    free(watch);
}

static void batch_start(struct batch *batch, uint32_t id) {
    batch->id = id;
    frame_start(&batch->frame, id, ANSWER_PART, 256);
    batch->count_at = batch->frame.size;
    batch->count = 0;
    batch->last_kind = 0;
    put_u32(&batch->frame, 0);
}

static void batch_send(struct batch *batch) {
    set_u32(&batch->frame, batch->count_at, batch->count);
    frame_send(&batch->frame);
}

static void report(struct batch *batch, uint8_t kind, const char *prefix, const char *name) {
    char path[sizeof batch->last_path];
    if (strlen(prefix) + strlen(name) >= sizeof path) return;
    strcpy(stpcpy(path, prefix), name);
    if (batch->last_kind == kind && strcmp(batch->last_path, path) == 0) return; /* one program's write is many changes */
    batch->last_kind = kind;
    strcpy(batch->last_path, path);
    put_u8(&batch->frame, kind);
    put_string(&batch->frame, path);
    batch->count++;
    if (batch->frame.size < CHUNK) return;
    batch_send(batch);
    batch_start(batch, batch->id);
}

static struct place *find_place(struct watch *watch, int number) {
    size_t low = 0, high = watch->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (watch->places[middle].number < number) low = middle + 1;
        else high = middle;
    }
    return low < watch->count && watch->places[low].number == number ? &watch->places[low] : NULL;
}

/* Watches `name` in the directory `parent`, or that itself ("."). inotify takes a path only: the working directory makes it one that can't lead
 * elsewhere. */
static int add_place(struct watch *watch, int parent, const char *name, const char *prefix, uint32_t mask) {
    if (watch->count >= MAX_DIRECTORIES) return ENOSPC;
    int here = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    int number = fchdir(parent) == 0 ? inotify_add_watch(watch->source.fd, name, mask) : -1;
    int code = number < 0 ? errno : 0;
    if (here < 0 || fchdir(here) != 0) code = chdir("/") == 0 ? code : errno;
    if (here >= 0) close(here);
    if (code != 0) return code;
    struct place *known = find_place(watch, number);
    if (known != NULL) { /* the same directory, under a new name */
        free(known->path);
        known->path = copy_string(prefix);
        return 0;
    }
    if (watch->count == watch->room) {
        watch->room = 2 * watch->room + 8;
        watch->places = reallocate(watch->places, watch->room * sizeof *watch->places);
    }
    watch->places[watch->count++] = (struct place){number, copy_string(prefix)};
    return 0;
}

/* Watches a directory and all below it. batch: tells of what is already in it. Takes fd over. */
static int add_tree(struct watch *watch, int fd, const char *prefix, int depth, struct batch *batch) {
    int code = add_place(watch, fd, ".", prefix, MASK | IN_ONLYDIR);
    if (code != 0 || !watch->recursive || depth >= MAX_DEPTH) {
        close(fd);
        return code;
    }
    DIR *directory = fdopendir(fd);
    if (directory == NULL) {
        close(fd);
        return errno;
    }
    for (struct dirent *each; code == 0 && (each = readdir(directory)) != NULL;) {
        if (strcmp(each->d_name, ".") == 0 || strcmp(each->d_name, "..") == 0) continue;
        if (batch != NULL) report(batch, CHANGE_CREATED, prefix, each->d_name);
        int below = each->d_type == DT_DIR || each->d_type == DT_UNKNOWN
                        ? openat(fd, each->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
        if (below < 0) continue; /* no directory, unreadable, or gone meanwhile */
        char *deeper = allocate(strlen(prefix) + strlen(each->d_name) + 2);
        strcpy(stpcpy(stpcpy(deeper, prefix), each->d_name), "/");
        code = strlen(deeper) < MAX_PATH ? add_tree(watch, below, deeper, depth + 1, batch) : (close(below), 0);
        free(deeper);
    }
    closedir(directory);
    return code;
}

/* A directory that moved away is watched no longer: its paths are not what they were. */
static void forget_tree(struct watch *watch, const char *prefix, const char *name) {
    size_t first = strlen(prefix), second = strlen(name);
    for (size_t i = 0; i < watch->count; i++) {
        const char *path = watch->places[i].path;
        if (strncmp(path, prefix, first) == 0 && strncmp(path + first, name, second) == 0 && path[first + second] == '/')
            inotify_rm_watch(watch->source.fd, watch->places[i].number); /* IN_IGNORED follows and removes the place */
    }
}

static void follow(struct watch *watch, const char *prefix, const char *name, struct batch *batch) {
    char path[MAX_PATH + NAME_MAX + 2];
    if (strlen(prefix) + strlen(name) + 2 > MAX_PATH) return;
    strcpy(stpcpy(path, prefix), name);
    int fd = open_in_root(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
    if (fd < 0) return;
    strcat(path, "/");
    if (add_tree(watch, fd, path, 0, batch) != 0) report(batch, CHANGE_OVERFLOW, "", "");
}

static void take_event(struct watch *watch, const struct inotify_event *event, struct batch *batch) {
    if (event->mask & IN_Q_OVERFLOW) report(batch, CHANGE_OVERFLOW, "", "");
    struct place *place = find_place(watch, event->wd);
    if (place == NULL) return;
    if (event->mask & IN_IGNORED) {
        free(place->path);
        memmove(place, place + 1, (size_t)(watch->places + watch->count - place - 1) * sizeof *place);
        watch->count--;
        return;
    }
    char *prefix = copy_string(place->path); /* following a new directory may move the list */
    const char *name = event->len > 0 ? event->name : "";
    bool directory = event->mask & IN_ISDIR;
    bool itself = prefix[0] == 0 || prefix[strlen(prefix) - 1] == '/'; /* an event of the directory, told by its parent's watch too */
    if (event->mask & IN_CREATE) report(batch, CHANGE_CREATED, prefix, name);
    if ((event->mask & (IN_MODIFY | IN_ATTRIB)) && !(itself && event->len == 0)) report(batch, CHANGE_CHANGED, prefix, name);
    if (event->mask & IN_DELETE) report(batch, CHANGE_REMOVED, prefix, name);
    if ((event->mask & IN_DELETE_SELF) && !itself) report(batch, CHANGE_REMOVED, prefix, name);
    if (event->mask & IN_MOVED_FROM) report(batch, CHANGE_MOVED_FROM, prefix, name);
    if (event->mask & IN_MOVED_TO) report(batch, CHANGE_MOVED_TO, prefix, name);
    if (watch->recursive && directory && (event->mask & IN_MOVED_FROM)) forget_tree(watch, prefix, name);
    if (watch->recursive && directory && (event->mask & (IN_CREATE | IN_MOVED_TO)))
        follow(watch, prefix, name, batch);
    free(prefix);
}

static void watch_ready(struct source *source, uint32_t events) {
    (void)events;
    struct watch *watch = (struct watch *)((char *)source - offsetof(struct watch, source));
    if (stream_full()) { /* the kernel keeps what it can and then says that it overflowed */
        source_change(source, 0);
        watch->paused = true;
        return;
    }
    _Alignas(struct inotify_event) char buffer[8192];
    ssize_t count = read(source->fd, buffer, sizeof buffer);
    struct batch batch;
    batch_start(&batch, watch->id);
    for (ssize_t at = 0; at < count;) {
        const struct inotify_event *event = (const struct inotify_event *)(buffer + at);
        take_event(watch, event, &batch);
        at += (ssize_t)sizeof *event + event->len;
    }
    if (batch.count > 0) batch_send(&batch);
    else free(batch.frame.data);
}

void watches_resume(void) {
    if (stream_full()) return;
    for (struct watch *watch = watches; watch != NULL; watch = watch->next)
        if (watch->paused) {
            watch->paused = false;
            source_change(&watch->source, EPOLLIN);
        }
}

static int watch_path(struct watch *watch, const char *path) {
    char prefix[MAX_PATH + 1] = "";
    int fd = open_in_root(path, O_RDONLY | O_DIRECTORY, 0);
    if (fd >= 0) {
        if (strcmp(path, ".") != 0) strcpy(stpcpy(prefix, path), "/");
        return add_tree(watch, fd, prefix, 0, NULL);
    }
    if (fd != -ENOTDIR) return -fd;
    const char *name;
    int parent = open_parent(path, &name);
    if (parent < 0) return -parent;
    int code = add_place(watch, parent, name, path, MASK | IN_DELETE_SELF);
    close(parent);
    return code;
}

void ask_watch(uint32_t id, struct reader *from) {
    char path[MAX_PATH];
    int code = -normalise(take_bytes(from), path);
    bool recursive = take_u8(from) != 0;
    if (!taken(from)) return;
    if (code == 0 && watch_count >= MAX_WATCHES) code = EMFILE;
    int fd = code == 0 ? inotify_init1(IN_NONBLOCK | IN_CLOEXEC) : -1;
    if (code == 0 && fd < 0) code = errno;
    if (code != 0) {
        answer_error(id, code);
        return;
    }
    struct watch *watch = allocate(sizeof *watch);
    *watch = (struct watch){.source = {fd, watch_ready}, .next = watches, .id = id, .recursive = recursive};
    watches = watch;
    watch_count++;
    code = watch_path(watch, path);
    if (code == 0 && !source_add(&watch->source, EPOLLIN)) code = errno;
    if (code != 0) {
        watch_drop(watch);
        answer_error(id, code);
        return;
    }
    struct batch first; /* an empty part says that it watches */
    batch_start(&first, id);
    batch_send(&first);
}

bool watch_cancel(uint32_t id) {
    for (struct watch *watch = watches; watch != NULL; watch = watch->next)
        if (watch->id == id) {
            watch_drop(watch);
            answer_error(id, ECANCELED);
            return true;
        }
    return false;
}

void watches_forget(void) {
    while (watches != NULL) watch_drop(watches);
}
