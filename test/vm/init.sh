#!/bin/busybox sh
# Process 1 of the guest: gets the kernel ready, runs the command that /command holds, and says how it ended.
set -u
export PATH=/usr/sbin:/usr/bin HOME=/tmp TMPDIR=/tmp

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run

die() {
	echo "init: $*" >/dev/console
	/bin/reboot -f
}

# The port "out" of virtio-serial takes what the command writes: a line at a time, not a byte with an interrupt each.
/usr/sbin/modprobe -a virtio_pci virtio_console || die "no virtio"
out=
for port in /sys/class/virtio-ports/*; do
	[ "$(cat "$port/name")" = out ] && out=/dev/${port##*/}
done
[ -n "$out" ] || die "no port"
exec 3>"$out" || die "can't write to $out"

# All of IPVS, before anything else runs. The kernel would load a scheduler by itself, but holds a lock of IPVS while it waits for
# modprobe. lblc and lblcr then want the lock that the end of a network namespace holds, which in turn wants that of IPVS: no
# network call of the whole machine ever returns (seen on 6.1.192 and 6.12.117). The other modules come when they are asked for, but for
# those that nothing asks for.
ipvs=$(find /usr/lib/modules -name 'ip_vs*.ko' | sed 's|.*/||; s|\.ko$||')
[ -n "$ipvs" ] || die "no IPVS"
/usr/sbin/modprobe -a $ipvs nf_tables nf_conntrack_netlink br_netfilter dummy sctp || die "a module is missing"

/usr/sbin/ip link set lo up
ulimit -n 65536

set --
while IFS= read -r word; do set -- "$@" "$word"; done </command/args
while IFS= read -r setting; do export "$setting"; done </command/env
IFS= read -r dir </command/dir
cd "$dir" || die "no folder $dir"

"$@" </dev/null >&3 2>&3
status=$?
printf '\nVM-EXIT:%d\n' "$status" >&3
/bin/reboot -f
