/* What the first process of a container mounts, before it becomes the agent: containers whose kernel is their own (gVisor), so that capabilities
 * in them are over nothing else. Where the container is already as it should be, the agent is started without these options. */
#include <errno.h>
#include <linux/capability.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "main.h"

#define LAST_CAPABILITY 63
#define NOBODY 65534

static int failed(const char *what)
{
    fprintf(stderr, "envd-guest: can't %s: %s\n", what, strerror(errno));
    return -1;
}

static int make_directory(const char *disk, const char *name, mode_t mode, char *path, size_t size)
{
    snprintf(path, size, "%s/%s", disk, name);
    return mkdir(path, mode) < 0 || chmod(path, mode) < 0 ? failed(path) : 0; /* chmod: whatever the umask */
}

/* /dev is memory that no limit of the disk covers: shared memory goes to /tmp, and nothing else can be made there. It is handed to nobody rather than
 * mounted read-only, since gVisor then lets nobody write to its devices either. */
static int close_devices(void)
{
    if (rmdir("/dev/shm") < 0 && errno != ENOENT)
        return failed("replace /dev/shm");
    if (symlink("/tmp", "/dev/shm") < 0)
        return failed("link /dev/shm");
    if (chown("/dev/net", NOBODY, NOBODY) < 0 && errno != ENOENT)
        return failed("close /dev/net");
    return chown("/dev", NOBODY, NOBODY) < 0 ? failed("close /dev") : 0;
}

static int mount_workspace(const struct container *container, const char *workspace)
{
    char upper[128], work[128], temporary[128], layers[512];
    if (make_directory(container->disk, "upper", 0755, upper, sizeof upper) < 0
        || make_directory(container->disk, "work", 0755, work, sizeof work) < 0
        || make_directory(container->disk, "tmp", 01777, temporary, sizeof temporary) < 0)
        return -1;
    snprintf(layers, sizeof layers, "lowerdir=%s,upperdir=%s,workdir=%s", container->template, upper, work);
    unsigned long flags = MS_NOSUID | MS_NODEV;
    if (mount("overlay", workspace, "overlay", flags | (container->read_only ? MS_RDONLY : 0), layers) < 0)
        return failed("mount its workspace");
    if (mount(temporary, "/tmp", NULL, MS_BIND, NULL) < 0)
        return failed("mount /tmp");
    return umount2(container->disk, MNT_DETACH) < 0 ? failed("hide its disk") : 0;
}

/* CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, SETPCAP: over the container's own kernel only. */
#define SUPERVISORS (1u << 0 | 1u << 1 | 1u << 3 | 1u << 5 | 1u << 6 | 1u << 7 | 1u << 8)

static int give_up_capabilities(bool supervised)
{
    unsigned kept = supervised ? SUPERVISORS : 0;
    for (unsigned long capability = 0; capability <= LAST_CAPABILITY; capability++)
        if (capability >= 32 || !(kept >> capability & 1))
            prctl(PR_CAPBSET_DROP, capability, 0, 0, 0); /* those that this kernel does not have are refused */
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct left[2] = {{.effective = kept, .permitted = kept}};
    if (syscall(SYS_capset, &header, left) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return failed("give up its capabilities");
    return 0;
}

/* gVisor remembers a thousand names of its /proc, and with each the process that it was of, 85 KB a dead process: in memory, and in snapshots, which
 * then take seconds. */
static int forget_processes(void)
{
    return mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "dentry_cache_limit=16") < 0 ? failed("mount /proc") : 0;
}

int container_enter(const struct container *container, const char *workspace)
{
    if (forget_processes() < 0 || close_devices() < 0 || mount_workspace(container, workspace) < 0)
        return -1;
    if (chdir(workspace) < 0)
        return failed("enter its workspace");
    return give_up_capabilities(container->supervised);
}
