#!/bin/sh
# In the guest: an experiment with what lies beside this script, and its results as lines of the console. $CHECKOUT is where the
# experiment's program was built, which is where it looks for applications.
here=${0%/*}
mkdir -p "$CHECKOUT" /usr/local/lib/nagaya /root/results
ln -s "$here/demo" "$CHECKOUT/demo"
ln -s "$here/criu" /usr/local/lib/nagaya/criu
cd "$CHECKOUT" || exit
"$here/xtask" experiment "$@" --program "$here/nagaya" --out /root/results
status=$?
for file in /root/results/*; do
    [ -e "$file" ] || continue
    # Each line ends, also the last one of a file that does not.
    awk -v name="${file##*/}" '{ print "result " name " " $0 }' "$file"
done
exit $status
