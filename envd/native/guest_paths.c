/* Opening paths that can't leave the workspace, whatever links it holds: the kernel resolves them (openat2), so there is no gap between a
 * check and its use. Kernels without openat2 (gVisor's) get a walk that opens one component after the other and follows links itself. */
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agent.h"

#define MAX_PATH 4096
#define MAX_LINKS 40
#define MAX_LEVELS 256

int normalise(struct span path, char into[MAX_PATH]) {
    static const char workspace[] = "/workspace";
    const char *at = path.data, *end = path.data + path.size;
    if (memchr(at, 0, path.size) != NULL) return -EINVAL;
    size_t prefix = sizeof workspace - 1;
    if (path.size >= prefix && memcmp(at, workspace, prefix) == 0 && (path.size == prefix || at[prefix] == '/')) at += prefix;
    size_t size = 0;
    while (at < end) {
        const char *stop = memchr(at, '/', (size_t)(end - at));
        if (stop == NULL) stop = end;
        size_t piece = (size_t)(stop - at);
        if (piece > 0 && !(piece == 1 && at[0] == '.')) {
            if (size + piece + 2 > MAX_PATH) return -ENAMETOOLONG;
            if (size > 0) into[size++] = '/';
            memcpy(into + size, at, piece);
            size += piece;
        }
        at = stop < end ? stop + 1 : end;
    }
    if (size == 0) into[size++] = '.';
    into[size] = 0;
    return 0;
}

int root_open(void) {
    int fd = open(config.workspace, O_PATH | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

/* The directories from the root down to where the walk is: ".." goes back along them and never asks the kernel for a parent. */
struct walk {
    int levels[MAX_LEVELS];
    int depth;
    int links;
    char left[2 * MAX_PATH]; /* not resolved yet */
};

static int walk_into(struct walk *walk, const char *name, size_t size) {
    if (size == 2 && name[0] == '.' && name[1] == '.') {
        if (walk->depth > 0) close(walk->levels[walk->depth--]);
        return 0;
    }
    char part[256];
    if (size >= sizeof part) return -ENAMETOOLONG;
    memcpy(part, name, size);
    part[size] = 0;
    int fd = openat(walk->levels[walk->depth], part, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return -errno;
    struct stat about = {.st_mode = 0};
    if (fstat(fd, &about) == 0 && S_ISDIR(about.st_mode)) {
        if (walk->depth + 1 == MAX_LEVELS) {
            close(fd);
            return -ENAMETOOLONG;
        }
        walk->levels[++walk->depth] = fd;
        return 0;
    }
    char target[MAX_PATH];
    ssize_t length = S_ISLNK(about.st_mode) ? readlinkat(fd, "", target, sizeof target - 1) : -1;
    close(fd);
    if (length < 0) return -ENOTDIR;
    target[length] = 0;
    if (++walk->links > MAX_LINKS) return -ELOOP;
    size_t rest = strlen(name + size);
    if (length + rest + 2 > sizeof walk->left) return -ENAMETOOLONG;
    memmove(walk->left + length, name + size, rest + 1);
    memcpy(walk->left, target, (size_t)length);
    if (target[0] == '/')
        while (walk->depth > 0) close(walk->levels[walk->depth--]);
    return 1; /* resolve what is left from its start */
}

/* Puts the target of a final link in place of the name; 0: it is no link. */
static int walk_link(struct walk *walk, const char *name) {
    char target[MAX_PATH];
    ssize_t length = readlinkat(walk->levels[walk->depth], name, target, sizeof target - 1);
    if (length < 0) return 0;
    if (++walk->links > MAX_LINKS) return -ELOOP;
    target[length] = 0;
    memcpy(walk->left, target, (size_t)length + 1);
    if (target[0] == '/')
        while (walk->depth > 0) close(walk->levels[walk->depth--]);
    return 1;
}

static int walk_all(struct walk *walk, uint64_t flags, mode_t mode) {
    char *at = walk->left;
    for (;;) {
        while (*at == '/') at++;
        size_t size = strcspn(at, "/");
        bool last = at[size + strspn(at + size, "/")] == 0;
        bool plain = size > 0 && !(size == 1 && at[0] == '.') && !(size == 2 && at[0] == '.' && at[1] == '.');
        if (!last || !plain) {
            int done = size == 1 && at[0] == '.' ? 0 : size > 0 ? walk_into(walk, at, size) : 0;
            if (done < 0) return done;
            at = done == 1 ? walk->left : at + size;
            if (!last || done == 1) continue;
            int fd = openat(walk->levels[walk->depth], ".", (int)flags & ~(O_CREAT | O_EXCL | O_NOFOLLOW), mode);
            return fd < 0 ? -errno : fd;
        }
        bool slash = at[size] == '/';
        at[size] = 0;
        bool follow = !(flags & O_NOFOLLOW) && !((flags & O_CREAT) && (flags & O_EXCL));
        int linked = follow ? walk_link(walk, at) : 0;
        if (linked < 0) return linked;
        if (linked == 1) {
            at = walk->left;
            continue;
        }
        int fd = openat(walk->levels[walk->depth], at, (int)flags | O_NOFOLLOW | (slash ? O_DIRECTORY : 0), mode);
        return fd < 0 ? -errno : fd;
    }
}

static int open_by_walk(int root, const char *path, uint64_t flags, mode_t mode) {
    struct walk walk = {.depth = 0, .links = 0};
    walk.levels[0] = root;
    memcpy(walk.left, path, strlen(path) + 1);
    int fd = walk_all(&walk, flags, mode);
    while (walk.depth > 0) close(walk.levels[walk.depth--]);
    return fd;
}

int open_in_root(const char *path, uint64_t flags, mode_t mode) {
    static bool unknown;
    int root = root_open();
    if (root < 0) return root;
    flags |= O_CLOEXEC;
    struct open_how how = {
        .flags = flags, .mode = flags & O_CREAT ? mode : 0, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    int fd = -ENOSYS;
    if (!unknown) {
        /* EAGAIN: something was renamed meanwhile, so that the kernel could not be sure about a "..". */
        for (int i = 0; i < 16; i++) {
            fd = (int)syscall(SYS_openat2, root, path, &how, sizeof how);
            if (fd >= 0 || (errno != EAGAIN && errno != EINTR)) break;
        }
        if (fd < 0) fd = -errno;
        unknown = fd == -ENOSYS;
    }
    if (fd == -ENOSYS) fd = open_by_walk(root, path, flags, mode);
    close(root);
    return fd;
}

int open_parent(const char *path, const char **name) {
    const char *slash = strrchr(path, '/');
    *name = slash != NULL ? slash + 1 : path;
    if (strcmp(*name, ".") == 0 || strcmp(*name, "..") == 0) return -EBUSY;
    char parent[MAX_PATH] = ".";
    if (slash != NULL) {
        memcpy(parent, path, (size_t)(slash - path));
        parent[slash - path] = 0;
    }
    return open_in_root(parent, O_PATH | O_DIRECTORY, 0);
}

int make_directories(const char *path) {
    if (strcmp(path, ".") == 0) return 0;
    int fd = open_in_root(path, O_PATH | O_DIRECTORY, 0);
    char part[MAX_PATH];
    for (size_t end = strcspn(path, "/"); fd == -ENOENT; end += 1 + strcspn(path + end + 1, "/")) {
        memcpy(part, path, end);
        part[end] = 0;
        const char *name;
        int parent = open_parent(part, &name);
        if (parent >= 0) {
            int made = mkdirat(parent, name, 0777);
            int code = errno;
            close(parent);
            if (made != 0 && code != EEXIST) return -code;
        } else if (parent != -EBUSY) { /* ".." needs no making */
            return parent;
        }
        if (path[end] == 0) fd = open_in_root(path, O_PATH | O_DIRECTORY, 0);
        if (path[end] == 0 && fd < 0) return fd;
    }
    if (fd < 0) return fd;
    close(fd);
    return 0;
}
