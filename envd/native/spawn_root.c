/* The root file system of a sandbox: put together below HIDDEN_VIEW and then moved over the spawner's, by process 1.
 *
 * /, /usr ...  overlays of what the spawner has there, which all sandboxes share, read-only. Each has inodes of its own, so that locks and
 *              notifications on system files end at the sandbox: on shared ones neighbours could wait for each other and watch each other.
 *              With a runtime that takes the place of the host's packages, whose other directories are empty then, or of all but /dev
 * /workspace   an overlay of the template and the sandbox's tmpfs; /tmp is on that tmpfs */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawn.h"

#define SAFE (MS_NOSUID | MS_NODEV)
#define TERMINALS "64" /* the kernel has 4,096 for all there are */

int mount_template(const char *target)
{
    /* a second layer, which is empty: without an upper one there must be two */
    return mount("overlay", target, "overlay", SAFE | MS_RDONLY, "lowerdir=" HIDDEN_LOWER ":" HIDDEN_NONE ",userxattr");
}

/* A directory of the spawner's at a path of the view; empty: at its root. */
static int mount_at(const char *path, const char *at_path, unsigned long flags)
{
    char options[2 * PATH_SIZE + 64] = "lowerdir=", target[PATH_SIZE + sizeof HIDDEN_VIEW];
    size_t at = strlen(options);
    for (const char *each = path; *each; each++) {
        if (strchr("\\:,", *each))
            options[at++] = '\\';
        options[at++] = *each;
    }
    snprintf(options + at, sizeof options - at, ":" HIDDEN_NONE ",userxattr");
    snprintf(target, sizeof target, HIDDEN_VIEW "%s", at_path);
    return mount("overlay", target, "overlay", flags | MS_RDONLY, options);
}

static int mount_system(const char *path, unsigned long flags)
{
    return mount_at(path, path, flags);
}

/* A runtime that is a whole root, with the spawner's devices. */
static int mount_root(const char *runtime)
{
    char source[sizeof HIDDEN_RUNTIMES + MAX_NAME];
    snprintf(source, sizeof source, "%s/%s", HIDDEN_RUNTIMES, runtime);
    return mount_at(source, "", SAFE) < 0 ? -1 : mount_system("/dev", MS_NOSUID);
}

/* The runtime instead of the host's packages. The empty ones are file systems of their own, since locks on a shared one would reach neighbours. */
static int mount_runtime(const struct settings *settings, const char *runtime)
{
    char source[sizeof HIDDEN_RUNTIMES + MAX_NAME], target[PATH_SIZE + sizeof HIDDEN_VIEW];
    snprintf(source, sizeof source, "%s/%s", HIDDEN_RUNTIMES, runtime);
    if (settings->packages_count == 0 || mount_at(source, settings->packages[0], SAFE) < 0)
        return -1;
    for (size_t i = 1; i < settings->packages_count; i++) {
        snprintf(target, sizeof target, HIDDEN_VIEW "%s", settings->packages[i]);
        if (mount("tmpfs", target, "tmpfs", SAFE | MS_RDONLY, "size=4k,mode=755") < 0)
            return -1;
    }
    return 0;
}

/* Without privilege devices are the host's, and mounted one by one. */
static int bind_devices(void)
{
    static const char *const names[] = {"null", "zero", "full", "random", "urandom"};
    struct stat about;
    if (stat(HIDDEN_VIEW "/dev/null", &about) == 0 && S_ISCHR(about.st_mode))
        return 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char source[32], target[64];
        snprintf(source, sizeof source, "/dev/%s", names[i]);
        snprintf(target, sizeof target, HIDDEN_VIEW "%s", source);
        if (mount(source, target, NULL, MS_BIND, NULL) < 0)
            return -1;
    }
    return 0;
}

static const char *mount_own(const struct request *wanted)
{
    unsigned long flags = SAFE | (wanted->flags & FLAG_READ_ONLY ? MS_RDONLY : 0);
    const char *layers = "lowerdir=" HIDDEN_LOWER ",upperdir=" HIDDEN_BOX "/upper,workdir=" HIDDEN_BOX "/work,userxattr";
    if (mount("overlay", HIDDEN_VIEW "/workspace", "overlay", flags, layers) < 0)
        return "mount its overlay";
    if (mount(HIDDEN_BOX "/tmp", HIDDEN_VIEW "/tmp", NULL, MS_BIND, NULL) < 0)
        return "bind its /tmp";
    if (mount("proc", HIDDEN_VIEW "/proc", "proc", SAFE | MS_NOEXEC, NULL) < 0)
        return "mount its /proc";
    if (mount("devpts", HIDDEN_VIEW "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "ptmxmode=0666,mode=0620,max=" TERMINALS) < 0)
        return "mount its /dev/pts";
    return NULL;
}

/* The spawner's own root stays mounted below; reaching it needs a capability. */
static int enter(void)
{
    int view = open(HIDDEN_VIEW, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (view < 0 || mount(HIDDEN_VIEW, "/", NULL, MS_MOVE, NULL) < 0 || umount2(HIDDEN, MNT_DETACH) < 0 || fchdir(view) < 0 || chroot(".") < 0)
        return -1;
    close(view);
    return chdir("/workspace");
}

const char *root_enter(const struct settings *settings, const struct request *wanted, const struct berth *berth, int scratch, int archive)
{
    const char *failure = NULL;
    char template[sizeof HIDDEN_TEMPLATES + MAX_NAME];
    snprintf(template, sizeof template, "%s/%s", HIDDEN_TEMPLATES, wanted->template);
    if (move_mount(scratch, "", AT_FDCWD, HIDDEN_BOX, MOVE_MOUNT_F_EMPTY_PATH) < 0)
        return "mount its tmpfs";
    if (archive >= 0)
        archive_unpack(berth->owner, archive, &failure);
    if (failure)
        return failure;
    bool own_root = wanted->flags & FLAG_ROOT;
    if ((own_root ? mount_root(wanted->runtime) : mount_system("/", MS_NOSUID)) < 0 || bind_devices() < 0)
        return "mount its root";
    for (size_t i = 0; i < settings->system_count && !own_root; i++)
        if (mount_system(settings->system[i], SAFE) < 0)
            return "mount its system directories";
    if (wanted->runtime[0] && !own_root && mount_runtime(settings, wanted->runtime) < 0)
        return "mount its runtime";
    int lower = users_mount(template, berth->users);
    if (lower < 0 || move_mount(lower, "", AT_FDCWD, HIDDEN_LOWER, MOVE_MOUNT_F_EMPTY_PATH) < 0 || mount_template(HIDDEN_VIEW "/.template") < 0)
        return "mount its template";
    failure = mount_own(wanted);
    return failure ? failure : enter() < 0 ? "move to its root" : NULL;
}
