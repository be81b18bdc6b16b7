#!/usr/bin/env bash
# Boot a systemd as the first process of a machine of its own: namespaces for processes, mounts, network and
# the rest, and a file system that shows this machine's and keeps its changes in a folder. Needs root.
#
#   boot.sh DISK CGROUP     DISK: a folder on a tmpfs for the changes; CGROUP: a new group, of the unified hierarchy
set -euo pipefail

if [ "${3:-}" != inside ]; then
    echo $$ >"$2/cgroup.procs"
    exec unshare --fork --pid --mount --net --uts --ipc --cgroup bash "$0" "$1" "$2" inside
fi

mount --make-rprivate /
mkdir -p "$1/changes" "$1/work" "$1/root"
root=$1/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/changes,workdir=$1/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/dev"
while read -r name major minor; do
    mknod -m 666 "$root/dev/$name" c "$major" "$minor"
done <<<$'null 1 3\nzero 1 5\nfull 1 7\nrandom 1 8\nurandom 1 9\ntty 5 0'
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
touch "$root/dev/console"
ip link set lo up

# Nothing of this machine starts there, and nothing that would change the kernel's settings.
units=$root/etc/systemd/system
rm -rf "$units"/*.wants/
for unit in console-getty kmod-static-nodes systemd-{binfmt,firstboot,hwdb-update,logind,modules-load} \
    systemd-{networkd,random-seed,remount-fs,resolved,sysctl,sysusers,timesyncd,tmpfiles-clean} \
    systemd-{tmpfiles-setup,tmpfiles-setup-dev,udev-trigger,udevd,update-utmp}; do
    ln -sf /dev/null "$units/$unit.service"
done
# The units of w5xde that were enabled in an earlier boot.
mkdir "$units/multi-user.target.wants"
for unit in "$units"/w5xde-*.service; do
    if [ -e "$unit" ]; then ln -s "$unit" "$units/multi-user.target.wants/"; fi
done
printf '127.0.0.1 localhost pool.lan\n' >"$root/etc/hosts"

cd "$root"
mkdir -p old
# Not chroot: there no process may have user namespaces, which PrivateUsers= needs.
pivot_root . old
umount -l /old
# As on any machine; systemd leaves that to the makers of containers. Credentials are mounted by another process.
mount --make-rshared /
exec env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin container=docker \
    /lib/systemd/systemd --system --unit=multi-user.target --log-target=journal --show-status=0
