#!/bin/sh
# The guest's process 1, once its root file system is there: what tests expect of a running machine, then the tests.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8

mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /dev/pts /dev/shm
mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
# As a service manager does for those to whom it delegates.
for controller in cpu io memory pids cpuset; do
    echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control
done
ip link set lo up
# No nameserver; tests mount theirs over it.
: >/etc/resolv.conf
ulimit -n 65536

set --
while IFS= read -r word; do
    set -- "$@" "$word"
done <"${0%/*}/words"
cd /root || exit
"$@" </dev/null
echo "guest: status $?"
# The machine is switched off from outside, once that line has come through.
exec sleep infinity
