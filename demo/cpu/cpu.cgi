#!/bin/sh
# Burns CPU: counts to N (?n=100000 by default) and says how long that took. Ask for it several times at once
# and watch, with `top`, one process per request under the tenant's uid.
n=$(printf '%s' "$QUERY_STRING" | sed -n 's/^n=\([0-9]\{1,8\}\)$/\1/p')
n=${n:-100000}
begun=$(date +%s%N)
i=0
while [ "$i" -lt "$n" ]; do
    i=$((i + 1))
done
ended=$(date +%s%N)
printf 'Content-Type: text/plain\r\n\r\n'
printf 'counted to %s in %s ms\n' "$i" "$(((ended - begun) / 1000000))"
printf 'uid %s, pid %s, host %s\n' "$(id -u)" "$$" "$SERVER_NAME"
