/* LIST: walks a tree in slices, so that other asks are answered meanwhile, and pauses while the peer does not read. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent.h"

#define MAX_PATH 4096
#define MAX_LISTS 16
#define OPEN_LEVELS 64 /* the innermost; a tree may be deeper than descriptors last, so others are opened again by their paths */
#define MAX_NAMES (64u * 1024 * 1024) /* bytes of names in one directory */
#define SLICE 256

struct level {
    int fd;           /* -1: closed meanwhile */
    char *names;      /* concatenated, each ended by a zero byte */
    uint32_t *order;  /* where they start, sorted by name */
    size_t count, at;
    size_t prefix;    /* length of the directory's path and its slash */
};

struct listing {
    struct listing *next;
    uint32_t id, depth, left;
    uint8_t flags;
    struct level *levels;
    size_t level_count, level_room;
    size_t sent;      /* bytes of parts */
    char path[MAX_PATH + 256];
};

static struct listing *listings;
static size_t listing_count;

static void listing_drop(struct listing *listing) {
    for (struct listing **at = &listings; *at != NULL; at = &(*at)->next)
        if (*at == listing) {
            *at = listing->next;
            listing_count--;
            break;
        }
    for (size_t i = 0; i < listing->level_count; i++) {
        struct level *level = &listing->levels[i];
        if (level->fd >= 0) close(level->fd);
        free(level->names);
        free(level->order);
    }
    free(listing->levels);
    free(listing);
}

static bool left_out(const char *name, uint8_t flags) {
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) return true;
    return (flags & LIST_VISIBLE) && (strcmp(name, ".git") == 0 || strcmp(name, "__pycache__") == 0 || strcmp(name, ".pytest_cache") == 0);
}

static int by_name(const void *left, const void *right, void *names) {
    return strcmp((char *)names + *(const uint32_t *)left, (char *)names + *(const uint32_t *)right);
}

/* Reads and sorts a directory's names. Takes fd over. */
static int read_names(struct level *level, uint8_t flags) {
    int copy = fcntl(level->fd, F_DUPFD_CLOEXEC, 3);
    DIR *directory = copy < 0 ? NULL : fdopendir(copy);
    if (directory == NULL) return errno;
    size_t size = 0, room = 0, order_room = 0;
    int code = 0;
    for (struct dirent *each; code == 0 && (each = readdir(directory)) != NULL;) {
        if (left_out(each->d_name, flags)) continue;
        size_t length = strlen(each->d_name) + 1;
        if (size + length > room) level->names = reallocate(level->names, room = 2 * room + 1024);
        if (level->count == order_room) level->order = reallocate(level->order, (order_room = 2 * order_room + 64) * sizeof *level->order);
        level->order[level->count++] = (uint32_t)size;
        memcpy(level->names + size, each->d_name, length);
        size += length;
        if (size > MAX_NAMES) code = EFBIG;
    }
    closedir(directory);
    if (level->count > 1) qsort_r(level->order, level->count, sizeof *level->order, by_name, level->names);
    return code;
}

static int push_level(struct listing *listing, int fd, size_t prefix) {
    if (listing->level_count == listing->level_room) {
        listing->level_room = 2 * listing->level_room + 8;
        listing->levels = reallocate(listing->levels, listing->level_room * sizeof *listing->levels);
    }
    if (listing->level_count >= OPEN_LEVELS) {
        struct level *outer = &listing->levels[listing->level_count - OPEN_LEVELS];
        close(outer->fd);
        outer->fd = -1;
    }
    struct level *level = &listing->levels[listing->level_count++];
    *level = (struct level){.fd = fd, .prefix = prefix};
    return read_names(level, listing->flags);
}

static void pop_level(struct listing *listing) {
    struct level *level = &listing->levels[--listing->level_count];
    if (level->fd >= 0) close(level->fd);
    free(level->names);
    free(level->order);
}

/* Removed or replaced meanwhile, or locked by the sandbox's own code: such is left out, as what is too deep to name is. */
static bool unreadable(int code) {
    return code == ENOENT || code == ENOTDIR || code == ELOOP || code == EACCES || code == ENAMETOOLONG;
}

static bool reopened(struct listing *listing, struct level *level) {
    if (level->fd >= 0) return true;
    listing->path[level->prefix == 0 ? 0 : level->prefix - 1] = '\0';
    int fd = open_in_root(level->prefix == 0 ? "." : listing->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
    if (level->prefix != 0) listing->path[level->prefix - 1] = '/';
    level->fd = fd < 0 ? -1 : fd;
    return fd >= 0;
}

/* Adds the next entry to the frame. Sets `full` where the limit leaves it out. 0 or errno. */
static int next_entry(struct listing *listing, struct frame *frame, uint32_t *count, bool *full) {
    struct level *level = &listing->levels[listing->level_count - 1];
    if (level->at == level->count || !reopened(listing, level)) {
        pop_level(listing);
        return 0;
    }
    const char *name = level->names + level->order[level->at++];
    size_t length = strlen(name), prefix = level->prefix;
    int fd = level->fd;
    struct stat about;
    if (fstatat(fd, name, &about, AT_SYMLINK_NOFOLLOW) != 0) return unreadable(errno) ? 0 : errno;
    if (prefix + length + 1 >= sizeof listing->path) return 0;
    memcpy(listing->path + prefix, name, length + 1);
    bool listed = !(listing->flags & LIST_FILES) || S_ISREG(about.st_mode) || S_ISLNK(about.st_mode);
    bool too_long = listing->sent + frame->size + 3 * sizeof listing->path > LIST_BYTES;
    if (listed && (listing->left == 0 || too_long)) {
        *full = true;
        return 0;
    }
    if (listed) {
        listing->left--;
        ++*count;
        put_link_entry(frame, listing->path, &about, fd, name);
    }
    if (!S_ISDIR(about.st_mode) || (listing->depth != 0 && listing->level_count >= listing->depth)) return 0;
    int below = openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (below < 0) return unreadable(errno) ? 0 : errno;
    listing->path[prefix + length] = '/';
    return push_level(listing, below, prefix + length + 1);
}

static void finish(struct listing *listing, bool truncated) {
    struct frame frame;
    frame_start(&frame, listing->id, ANSWER_OK, 1);
    put_u8(&frame, truncated);
    frame_send(&frame);
    listing_drop(listing);
}

static void step(struct listing *listing) {
    struct frame frame;
    frame_start(&frame, listing->id, ANSWER_PART, 4096);
    size_t count_at = frame.size;
    put_u32(&frame, 0);
    uint32_t count = 0;
    bool full = false;
    int code = 0;
    for (int i = 0; i < SLICE && code == 0 && !full && listing->level_count > 0; i++) code = next_entry(listing, &frame, &count, &full);
    set_u32(&frame, count_at, count);
    listing->sent += frame.size;
    if (code != 0) {
        uint32_t id = listing->id;
        free(frame.data);
        listing_drop(listing);
        answer_error(id, code);
        return;
    }
    if (count > 0) frame_send(&frame);
    else free(frame.data);
    if (full || listing->level_count == 0) finish(listing, full);
}

void ask_list(uint32_t id, struct reader *from) {
    char path[MAX_PATH];
    int fd = normalise(take_bytes(from), path);
    uint32_t depth = take_u32(from), limit = take_u32(from);
    uint8_t flags = take_u8(from);
    if (!taken(from)) return;
    if (fd == 0) fd = listing_count >= MAX_LISTS ? -EAGAIN : open_in_root(path, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) {
        answer_error(id, -fd);
        return;
    }
    struct listing *listing = allocate(sizeof *listing);
    *listing = (struct listing){.next = NULL, .id = id, .depth = depth, .left = limit, .flags = flags};
    struct listing **end = &listings;
    while (*end != NULL) end = &(*end)->next;
    *end = listing;
    listing_count++;
    size_t prefix = 0;
    if (strcmp(path, ".") != 0) {
        prefix = strlen(path);
        memcpy(listing->path, path, prefix);
        listing->path[prefix++] = '/';
    }
    int code = push_level(listing, fd, prefix);
    if (code != 0) {
        listing_drop(listing);
        answer_error(id, code);
    }
}

bool lists_busy(void) { return listings != NULL; }

void lists_step(void) {
    if (listings == NULL || stream_full()) return;
    struct listing *listing = listings; /* served round-robin */
    if (listing->next != NULL) {
        listings = listing->next;
        struct listing **end = &listings;
        while (*end != NULL) end = &(*end)->next;
        *end = listing;
        listing->next = NULL;
    }
    step(listing);
}

bool list_cancel(uint32_t id) {
    for (struct listing *listing = listings; listing != NULL; listing = listing->next)
        if (listing->id == id) {
            listing_drop(listing);
            answer_error(id, ECANCELED);
            return true;
        }
    return false;
}

void lists_forget(void) {
    while (listings != NULL) listing_drop(listings);
}
