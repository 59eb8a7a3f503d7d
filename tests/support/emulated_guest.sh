#!/bin/sh
# emulated_guest.sh - what runs inside a machine of tests/support/emulated_machine.py.
#
#   step NAME COMMAND [ARG..]    runs it; its output and status go to the host under this name
#   pool_open MODE ISA [ISA..]   a coordinator with --activations MODE and a node for each ISA
#   ask NAME ARG..               `firstlight generate --json ARG..` as a step
#   pool_close NAME              stops it; the nodes' own words are a step of this name
#
# Read by the script that says what to do there; busybox and the programs are all there is.
export PATH=/bin HOME=/tmp TMPDIR=/tmp FIRSTLIGHT_MODELS=/models FIRSTLIGHT_BUILD=build
export FIRSTLIGHT_ADDR=127.0.0.1:7411
# Binding at first call saves registers with XSAVEC, and Bochs 2.7's XRSTOR faults on what that wrote.
export LD_BIND_NOW=1
cd /firstlight || exit
# The host takes this port's lines apart; a line feed is a line feed.
stty -F /dev/ttyS1 115200 raw -echo
ip link set lo up

step() {
    name=$1
    shift
    status=0
    "$@" >/tmp/step 2>&1 </dev/null || status=$?
    { echo "@begin $name"; cat /tmp/step; echo; echo "@end $status"; } >/dev/ttyS1
}

joined() {
    [ "$(build/firstlight status --json 2>/dev/null | grep -o '"state":' | wc -l)" = "$1" ]
}

pool_open() {
    build/firstlight-coordinator --models /models --activations "$1" >/tmp/coordinator.log 2>&1 &
    pids=$!
    shift
    count=0
    for isa; do
        count=$((count + 1))
        build/firstlight-node --join 127.0.0.1:7412 --name "box$count" --models /models \
            --cache "/tmp/cache$count" --threads 1 --isa "$isa" >"/tmp/box$count.log" 2>&1 &
        pids="$pids $!"
    done
    tries=0
    until joined "$count" || [ $tries = 600 ]; do
        tries=$((tries + 1))
        sleep 0.2
    done
}

ask() {
    asked=$1
    shift
    step "$asked" build/firstlight generate --json --temperature 0 --ignore-end --top-logits 20 "$@"
}

pool_close() {
    for pid in $pids; do
        kill "$pid"
    done
    wait
    step "$1" cat /tmp/box*.log /tmp/coordinator.log
    rm -rf /tmp/box*.log /tmp/coordinator.log /tmp/cache*
}
