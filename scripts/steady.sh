#!/bin/sh
# Does the test suite pass on a busy machine? Runs the command (default: `make test`) several times
# (default: 10) beside two busy loops, and stops at the first failure.
#
#     scripts/steady.sh [TIMES] [COMMAND ...]
times=${1:-10}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- make test
loops=
for _ in 1 2; do
    (while :; do :; done) &
    loops="$loops $!"
done
trap 'kill $loops 2>/dev/null' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
run=1
while [ "$run" -le "$times" ]; do
    begin=$(date +%s)
    "$@" || { echo "run $run of $times failed after $(($(date +%s) - begin)) s"; exit 1; }
    echo "run $run of $times passed in $(($(date +%s) - begin)) s"
    run=$((run + 1))
done
