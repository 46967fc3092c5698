/* File asks that are done at once. Nothing here blocks: no open waits for a peer, no read is of anything but a regular file. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent.h"

#define MAX_PATH 4096

static uint8_t entry_type(mode_t mode) {
    if (S_ISREG(mode)) return ENTRY_FILE;
    if (S_ISDIR(mode)) return ENTRY_DIRECTORY;
    return S_ISLNK(mode) ? ENTRY_LINK : ENTRY_OTHER;
}

void put_entry(struct frame *frame, const char *path, const struct stat *about, const char *target) {
    put_string(frame, path);
    put_u8(frame, entry_type(about->st_mode));
    put_u32(frame, about->st_mode & 07777);
    put_u64(frame, (uint64_t)about->st_size);
    put_u64(frame, (uint64_t)about->st_mtim.tv_sec * 1000000000 + (uint64_t)about->st_mtim.tv_nsec); /* wraps for times beyond 64 bits */
    put_string(frame, target);
}

/* With its target where it is a link. name: in the directory `parent`, or empty where `parent` is the link itself. */
void put_link_entry(struct frame *frame, const char *path, const struct stat *about, int parent, const char *name) {
    char target[MAX_PATH] = "";
    if (S_ISLNK(about->st_mode)) {
        ssize_t size = readlinkat(parent, name, target, sizeof target - 1);
        target[size > 0 ? size : 0] = 0;
    }
    put_entry(frame, path, about, target);
}

/* Reply of the requests whose result is the state of `path` (of the link itself, for a link). */
void answer_entry(uint32_t id, const char *path) {
    int fd = open_in_root(path, O_PATH | O_NOFOLLOW, 0);
    struct stat about;
    if (fd < 0 || fstat(fd, &about) != 0) {
        answer_error(id, fd < 0 ? -fd : errno);
        if (fd >= 0) close(fd);
        return;
    }
    struct frame frame;
    frame_start(&frame, id, ANSWER_OK, 64 + strlen(path));
    put_link_entry(&frame, path, &about, fd, "");
    close(fd);
    frame_send(&frame);
}

static ssize_t read_fully(int fd, uint8_t *into, size_t size, uint64_t offset) {
    size_t have = 0;
    while (have < size) {
        ssize_t count = pread(fd, into + have, size - have, (off_t)(offset + have));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return -errno;
        if (count == 0) break;
        have += (size_t)count;
    }
    return (ssize_t)have;
}

static int answer_content(uint32_t id, const char *path, int fd, uint64_t offset, uint32_t most) {
    struct stat about;
    if (fstat(fd, &about) != 0) return errno;
    if (S_ISDIR(about.st_mode)) return EISDIR;
    if (!S_ISREG(about.st_mode)) return ENXIO;
    if (offset > INT64_MAX - CHUNK) return EINVAL;
    uint64_t left = (uint64_t)about.st_size > offset ? (uint64_t)about.st_size - offset : 0;
    size_t size = most < CHUNK ? most : CHUNK;
    if (left < size) size = (size_t)left;
    struct frame frame;
    frame_start(&frame, id, ANSWER_OK, 64 + strlen(path) + size);
    put_entry(&frame, path, &about, "");
    size_t length_at = frame.size;
    put_u32(&frame, 0);
    ssize_t have = read_fully(fd, put_room(&frame, size), size, offset);
    if (have < 0) {
        free(frame.data);
        return (int)-have;
    }
    frame.size -= size - (size_t)have;
    set_u32(&frame, length_at, (uint32_t)have);
    frame_send(&frame);
    return 0;
}

void ask_read(uint32_t id, struct reader *from) {
    char path[MAX_PATH];
    int fd = normalise(take_bytes(from), path);
    uint64_t offset = take_u64(from);
    uint32_t most = take_u32(from);
    if (!taken(from)) return;
    if (fd == 0) fd = open_in_root(path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    int code = fd < 0 ? -fd : answer_content(id, path, fd, offset, most);
    if (code != 0) answer_error(id, code);
    if (fd >= 0) close(fd);
}

void ask_stat(uint32_t id, struct reader *from) {
    char path[MAX_PATH];
    int fd = normalise(take_bytes(from), path);
    bool follow = take_u8(from) != 0;
    if (!taken(from)) return;
    if (fd == 0 && !follow) {
        answer_entry(id, path);
        return;
    }
    if (fd == 0) fd = open_in_root(path, O_PATH, 0);
    struct stat about;
    if (fd < 0 || fstat(fd, &about) != 0) {
        answer_error(id, fd < 0 ? -fd : errno);
    } else {
        struct frame frame;
        frame_start(&frame, id, ANSWER_OK, 64 + strlen(path));
        put_entry(&frame, path, &about, "");
        frame_send(&frame);
    }
    if (fd >= 0) close(fd);
}

/* Where the file system knows no RENAME_NOREPLACE the look before the rename is the best there is. */
static int rename_once(int from, const char *old, int to, const char *name, bool overwrite) {
    if (renameat2(from, old, to, name, overwrite ? 0 : RENAME_NOREPLACE) == 0) return 0;
    if (overwrite || (errno != EINVAL && errno != ENOSYS)) return errno;
    struct stat about;
    if (fstatat(to, name, &about, AT_SYMLINK_NOFOLLOW) == 0) return EEXIST;
    return renameat(from, old, to, name) == 0 ? 0 : errno;
}

static int move(const char *source, const char *target, bool overwrite) {
    const char *old, *name;
    int from = open_parent(source, &old);
    if (from < 0) return -from;
    int to = open_parent(target, &name);
    int code = to < 0 ? -to : rename_once(from, old, to, name, overwrite);
    close(from);
    if (to >= 0) close(to);
    return code;
}

void ask_move(uint32_t id, struct reader *from) {
    char source[MAX_PATH], target[MAX_PATH];
    int bad = normalise(take_bytes(from), source);
    int worse = normalise(take_bytes(from), target);
    bool overwrite = take_u8(from) != 0;
    if (!taken(from)) return;
    int code = bad != 0 ? -bad : worse != 0 ? -worse : move(source, target, overwrite);
    if (code == EXDEV) { /* an overlay can't rename a directory of its template: it is copied, as mv does */
        code = job_start(id, copy_and_remove, source, target, true);
        if (code == 0) return;
    }
    if (code != 0) answer_error(id, code);
    else answer_entry(id, target);
}

void ask_remove(uint32_t id, struct reader *from) {
    char path[MAX_PATH];
    const char *name;
    int parent = normalise(take_bytes(from), path);
    bool recursive = take_u8(from) != 0;
    if (!taken(from)) return;
    if (parent == 0) parent = open_parent(path, &name);
    if (parent < 0) {
        answer_error(id, -parent);
        return;
    }
    int code = unlinkat(parent, name, 0) == 0 ? 0 : errno;
    if (code == EISDIR || code == EPERM) code = unlinkat(parent, name, AT_REMOVEDIR) == 0 ? 0 : errno == ENOTDIR ? code : errno;
    close(parent);
    if (recursive && (code == ENOTEMPTY || code == EEXIST)) {
        code = job_start(id, remove_tree, path, "", false);
        if (code == 0) return;
    }
    if (code != 0) answer_error(id, code);
    else answer_ok(id);
}

void ask_mkdir(uint32_t id, struct reader *from) {
    char path[MAX_PATH];
    const char *name;
    int code = -normalise(take_bytes(from), path);
    bool parents = take_u8(from) != 0;
    if (!taken(from)) return;
    if (code == 0 && parents) {
        code = -make_directories(path);
    } else if (code == 0) {
        int parent = open_parent(path, &name);
        code = parent == -EBUSY ? EEXIST : parent < 0 ? -parent : mkdirat(parent, name, 0777) == 0 ? 0 : errno;
        if (parent >= 0) close(parent);
    }
    if (code != 0) answer_error(id, code);
    else answer_entry(id, path);
}
