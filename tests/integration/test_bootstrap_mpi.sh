#!/bin/sh
# mpirun forms a cluster: addresses and a key are exchanged, every pair of ranks meets over UCX,
# and wrong line-ups are refused with a sentence.
set -eu

probe=$FIRSTLIGHT_BUILD/tests/mpi_probe
command -v mpirun >/dev/null || { echo "skipped: no mpirun"; exit 77; }
[ -x "$probe" ] || { echo "no $probe"; exit 1; }
out=$(mktemp)
trap 'rm -f "$out"' EXIT

launch() { # launch ARGS..
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        timeout 60 mpirun --oversubscribe "$@" >"$out" 2>&1
}
fail() {
    echo "FAIL: $1"
    cat "$out"
    exit 1
}
refused() { # refused SENTENCE ARGS..
    sentence=$1
    shift
    ! launch "$@" || fail "not refused: $*"
    grep -q "$sentence" "$out" || fail "refused without \"$sentence\": $*"
}

launch -np 1 "$probe" coordinator : -np 3 "$probe" node || fail "a coordinator and three nodes"
[ "$(grep -c 'of 4: up 3, received 3' "$out")" -eq 4 ] || fail "not every pair of ranks met"
cat "$out"
refused 'started no node' -np 1 "$probe" coordinator
refused 'rank 0 is a node' -np 2 "$probe" node
refused 'another coordinator' -np 2 "$probe" coordinator
! "$probe" node >"$out" 2>&1 || fail "ran without mpirun"
echo "ok"
