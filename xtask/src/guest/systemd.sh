#!/bin/sh
# The guest's process 1, once its root file system is there, where tests need a service manager: it becomes systemd, whose one
# task is to run the tests.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd/system /usr/local/lib/nagaya /var/log
# A machine that starts for the first time asks its console for a time zone and a password.
echo 00000000000000000000000000000001 >/etc/machine-id
: >/etc/resolv.conf
[ ! -e "${0%/*}/criu" ] || ln -s "${0%/*}/criu" /usr/local/lib/nagaya/criu

cat >/run/nagaya-tests <<'SCRIPT'
#!/bin/sh
set --
while IFS= read -r word; do
    set -- "$@" "$word"
done </tests/words
cd /root || exit
"$@" </dev/null
echo "guest: status $?"
SCRIPT
cat >/run/systemd/system/nagaya-tests.service <<'UNIT'
[Unit]
Description=the tests
Requires=multi-user.target
After=multi-user.target

[Service]
Type=oneshot
ExecStart=/bin/sh /run/nagaya-tests
Environment=HOME=/root LANG=C.UTF-8
StandardOutput=tty
StandardError=tty
TTYPath=/dev/console
LimitNOFILE=65536
UNIT
exec /lib/systemd/systemd --unit=nagaya-tests.service --show-status=no --log-level=warning
