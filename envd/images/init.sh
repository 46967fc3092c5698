#!/bin/busybox sh
# The first program in a guest: loads drivers, puts the file systems together as every sandbox sees them, and becomes the agent.
# The server's settings come on the kernel's command line: envd.disk_mb envd.pids envd.stream envd.read_only.
set -e
export PATH=/bin
/bin/busybox mkdir -p /bin /proc /sys /dev /new
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
while read -r module; do insmod "/modules/$module" || echo "envd: no driver $module"; done </modules/order

setting() { sed -n "s/.*\benvd\.$1=\([A-Za-z0-9:_.-]*\).*/\1/p" /proc/cmdline; }
disk() { # a disk by its serial number; under Firecracker, which gives none, by its place
    for found in /sys/block/vd*; do
        if [ "$(cat "$found/serial" 2>/dev/null)" = "$1" ]; then echo "/dev/${found##*/}"; return; fi
    done
    echo "/dev/$2"
}
stream=$(setting stream)
mount -t squashfs -o ro,nosuid,nodev "$(disk root vda)" /new
mount -t squashfs -o ro,nosuid,nodev "$(disk template vdb)" /new/.template
packages=$(disk packages vdc)
if [ -b "$packages" ]; then # a runtime's, in place of the image's own
    for place in /new/usr/local/lib/python3*/dist-packages /new/usr/lib/python3/dist-packages; do
        if [ -d "$place" ]; then mount -t tmpfs -o ro,nosuid,nodev,mode=755,size=4k empty "$place"; fi
    done
    mount -t squashfs -o ro,nosuid,nodev "$packages" /new/usr/lib/python3/dist-packages
fi
mount -t tmpfs -o "nosuid,nodev,mode=755,nr_inodes=65536,size=$(setting disk_mb)m" scratch /new/.scratch
mkdir /new/.scratch/upper /new/.scratch/work /new/.scratch/tmp
chmod 1777 /new/.scratch/tmp
if [ "$(setting read_only)" = 1 ]; then
    mount -o bind,ro /new/.template /new/workspace
else
    mount -t overlay -o nosuid,nodev,lowerdir=/new/.template,upperdir=/new/.scratch/upper,workdir=/new/.scratch/work overlay /new/workspace
fi
mount -o bind /new/.scratch/tmp /new/tmp
umount /new/.scratch
mount -t tmpfs -o nosuid,nodev,mode=700,size=8m agent /new/.agent
cp /envd-guest /new/.agent/envd-guest
mkdir -m 700 /new/.agent/scratch

# everything from here on is one group, so that a fork bomb ends at the sandbox's limit and not at the machine's memory
mount -t cgroup2 -o nosuid,nodev,noexec group /sys/fs/cgroup
echo +pids >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/sandbox
setting pids >/sys/fs/cgroup/sandbox/pids.max
echo $$ >/sys/fs/cgroup/sandbox/cgroup.procs
umount -l /sys/fs/cgroup
# a machine out of memory kills, instead of reading its programs from the disk again and again for minutes
if [ -e /sys/kernel/mm/lru_gen/min_ttl_ms ]; then
    echo y >/sys/kernel/mm/lru_gen/enabled
    echo 1000 >/sys/kernel/mm/lru_gen/min_ttl_ms
fi
echo 7 >/proc/sys/kernel/printk # from here on the console tells which limits the kernel held: the server reads it
ip link set lo up
mount -o move /proc /new/proc
mount -o move /sys /new/sys
mount -o move /dev /new/dev
ln -sf /tmp /new/dev/shm 2>/dev/null || true

if [ "$stream" = serial ]; then
    for port in /new/sys/class/virtio-ports/*; do
        if [ "$(cat "$port/name")" = envd ]; then set -- --serial "/dev/${port##*/}"; fi
    done
else
    set -- --vsock "${stream#vsock:}" --escaped
fi
echo "envd: the agent takes over ($*)"
exec switch_root /new /.agent/envd-guest --init "$@" --workspace /workspace --scratch /.agent/scratch
