#!/bin/busybox sh
# The guest's first process, in its initial RAM disk: finds the disks and goes on with what is on them.
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
echo "guest: up"
for module in /modules/*; do
    /bin/busybox insmod "$module"
done
/bin/busybox mount -t ext4 /dev/vda /root
/bin/busybox mount -t ext4 -o ro /dev/vdb /root/tests
for place in proc sys dev; do
    /bin/busybox mount -o move "/$place" "/root/$place"
done
exec /bin/busybox switch_root /root /bin/sh /tests/run
