#!/bin/sh
# The records of every pod of a replica, now, into one bundle on this machine.
#
#   collect.sh [BUNDLE] [SELECTOR]            collect.sh bundle.tar.gz app=sglang
#
# Needs kubectl and hicache. A pod that can't be asked is left out and said; the bundle says which ranks it lacks.
set -eu
bundle=${1:-bundle.tar.gz}
selector=${2:-app=sglang}
umask 077
pods=$(kubectl get pods -l "$selector" -o name)
if [ -z "$pods" ]; then
    echo "error: no pod has $selector" >&2
    exit 2
fi
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
for pod in $pods; do
    name=${pod#pod/}
    if ! kubectl exec "$name" -c evidence -- tar -C /var/log/hicache -cf - . >"$parts/$name.tar"; then
        # What has come is kept: a part of a host is more than nothing.
        echo "$name: not all of its records have come" >&2
    fi
done
hicache collect "$parts"/*.tar -o "$bundle"
