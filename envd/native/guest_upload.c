/* WRITE: pieces go to a hidden file beside the target, which the last piece renames into place; or into place, as a program's own write. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "agent.h"

#define MAX_PATH 4096
#define MAX_UPLOADS 64

struct upload {
    struct upload *next;
    uint32_t id;
    int parent, fd;
    char hidden[32];
    char path[MAX_PATH];
    const char *name; /* within path */
    mode_t mode;
    uint64_t size;
    bool must_create;
};

static struct upload *uploads;
static size_t upload_count;

static int write_fully(int fd, struct span data, uint64_t offset) {
    if (offset > (uint64_t)INT64_MAX - data.size) return EFBIG;
    for (size_t done = 0; done < data.size;) {
        ssize_t count = pwrite(fd, data.data + done, data.size - done, (off_t)(offset + done));
        if (count == 0) return EIO;
        if (count < 0 && errno != EINTR) return errno;
        if (count > 0) done += (size_t)count;
    }
    return 0;
}

static void upload_drop(struct upload *upload) {
    for (struct upload **at = &uploads; *at != NULL; at = &(*at)->next)
        if (*at == upload) {
            *at = upload->next;
            upload_count--;
            break;
        }
    if (upload->fd >= 0) {
        close(upload->fd);
        unlinkat(upload->parent, upload->hidden, 0);
    }
    if (upload->parent >= 0) close(upload->parent);
    free(upload);
}

/* Looks at what is in the place of the file: what it may not be, and the mode to keep. */
static int check_target(struct upload *upload, mode_t mode) {
    struct stat about;
    upload->mode = mode ? mode & 07777 : 0644;
    if (fstatat(upload->parent, upload->name, &about, AT_SYMLINK_NOFOLLOW) != 0) return errno == ENOENT ? 0 : errno;
    if (S_ISDIR(about.st_mode)) return EISDIR;
    if (upload->must_create) return EEXIST;
    if (mode == 0 && S_ISREG(about.st_mode)) upload->mode = about.st_mode & 07777;
    return 0;
}

static int open_hidden(struct upload *upload) {
    for (int i = 0; i < 8; i++) {
        uint64_t random = 0;
        if (getrandom(&random, sizeof random, GRND_NONBLOCK) < 0) random = (uint64_t)now_ms() + (uint64_t)i;
        snprintf(upload->hidden, sizeof upload->hidden, ".envd-%016llx", (unsigned long long)random);
        upload->fd = openat(upload->parent, upload->hidden, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (upload->fd >= 0) return 0;
        if (errno != EEXIST) return errno;
    }
    return EEXIST;
}

static int upload_start(uint32_t id, const char *path, uint8_t flags, mode_t mode, struct upload **found) {
    if (upload_count >= MAX_UPLOADS) return EMFILE;
    struct upload *upload = allocate(sizeof *upload);
    *upload = (struct upload){.next = uploads, .id = id, .parent = -1, .fd = -1, .must_create = flags & WRITE_MUST_CREATE};
    strcpy(upload->path, path);
    uploads = upload;
    upload_count++;
    upload->parent = open_parent(upload->path, &upload->name);
    int code = upload->parent == -EBUSY ? EISDIR : upload->parent < 0 ? -upload->parent : check_target(upload, mode);
    if (code == 0) code = open_hidden(upload);
    if (code != 0) upload_drop(upload);
    *found = upload;
    return code;
}

static int rename_new(struct upload *upload) {
    if (!upload->must_create) return renameat(upload->parent, upload->hidden, upload->parent, upload->name) == 0 ? 0 : errno;
    if (renameat2(upload->parent, upload->hidden, upload->parent, upload->name, RENAME_NOREPLACE) == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS) return errno;
    if (linkat(upload->parent, upload->hidden, upload->parent, upload->name, 0) != 0) return errno;
    return unlinkat(upload->parent, upload->hidden, 0) == 0 ? 0 : errno;
}

static int upload_finish(struct upload *upload, struct stat *about) {
    if (fchmod(upload->fd, upload->mode) != 0) return errno;
    int code = rename_new(upload);
    if (code != 0) return code;
    code = fstat(upload->fd, about) == 0 ? 0 : errno;
    close(upload->fd);
    upload->fd = -1; /* nothing hidden is left to remove */
    return code;
}

static int write_piece(uint32_t id, const char *path, uint8_t flags, mode_t mode, uint64_t offset, struct span data, struct stat *about) {
    struct upload *upload = uploads;
    while (upload != NULL && upload->id != id) upload = upload->next;
    if (upload != NULL && (offset != upload->size || strcmp(path, upload->path) != 0)) {
        upload_drop(upload);
        return ESTALE; /* not the next piece of what this id writes */
    }
    if (upload == NULL && offset != 0) return ESTALE;
    int code = upload == NULL ? upload_start(id, path, flags, mode, &upload) : 0;
    if (code != 0) return code;
    code = write_fully(upload->fd, data, offset);
    if (code == 0 && (flags & WRITE_LAST)) code = upload_finish(upload, about);
    else if (code == 0) code = fstat(upload->fd, about) == 0 ? 0 : errno;
    upload->size += data.size;
    if (code != 0 || (flags & WRITE_LAST)) upload_drop(upload);
    return code;
}

static int write_in_place(const char *path, uint8_t flags, mode_t mode, uint64_t offset, struct span data, struct stat *about) {
    uint64_t open_flags = O_WRONLY | O_NONBLOCK | O_NOCTTY;
    if (offset == 0) open_flags |= O_CREAT | (flags & WRITE_MUST_CREATE ? O_EXCL : 0);
    if (strcmp(path, ".") == 0) return EISDIR;
    int fd = open_in_root(path, open_flags, mode ? mode & 07777 : 0644);
    if (fd < 0) return -fd;
    int code = fstat(fd, about) == 0 ? 0 : errno;
    if (code == 0 && !S_ISREG(about->st_mode)) code = ENXIO;
    if (code == 0 && offset == 0 && ftruncate(fd, 0) != 0) code = errno;
    if (code == 0) code = write_fully(fd, data, offset);
    if (code == 0 && mode != 0 && (about->st_mode & 07777) != (mode & 07777) && fchmod(fd, mode & 07777) != 0) code = errno;
    if (code == 0 && fstat(fd, about) != 0) code = errno;
    close(fd);
    return code;
}

void ask_write(uint32_t id, struct reader *from) {
    char path[MAX_PATH], parents[MAX_PATH];
    int code = -normalise(take_bytes(from), path);
    uint8_t flags = take_u8(from);
    mode_t mode = take_u32(from);
    uint64_t offset = take_u64(from);
    struct span data = take_bytes(from);
    if (!taken(from)) return;
    char *slash = code == 0 ? strrchr(strcpy(parents, path), '/') : NULL;
    if (slash != NULL && offset == 0 && (flags & WRITE_PARENTS)) {
        *slash = 0;
        code = -make_directories(parents);
    }
    struct stat about;
    if (code == 0 && (flags & WRITE_IN_PLACE)) code = write_in_place(path, flags, mode, offset, data, &about);
    else if (code == 0) code = write_piece(id, path, flags, mode, offset, data, &about);
    if (code != 0) {
        answer_error(id, code);
        return;
    }
    struct frame frame;
    frame_start(&frame, id, ANSWER_OK, 64 + strlen(path));
    put_entry(&frame, path, &about, "");
    frame_send(&frame);
}

bool upload_cancel(uint32_t id) {
    for (struct upload *upload = uploads; upload != NULL; upload = upload->next)
        if (upload->id == id) {
            upload_drop(upload); /* its pieces were answered: only the file is dropped */
            return true;
        }
    return false;
}

void uploads_forget(void) {
    while (uploads != NULL) upload_drop(uploads);
}
