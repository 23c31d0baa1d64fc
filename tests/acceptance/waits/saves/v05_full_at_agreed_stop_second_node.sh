# Two launchers on one host; SIGTERM to the second one while the shared run directory is full for 15 s.
. "$(dirname "$0")/lib.sh"
disk "$HERE/store" size=60m
port=$(python3 -c 'import socket; s=socket.socket(); s.bind(("127.0.0.1",0)); print(s.getsockname()[1])')
nodes() { # nodes PREFIX: both launchers, pids in ONE and TWO
    local options=(--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint "127.0.0.1:$port" --run-dir "$HERE/store/run")
    begin "$1-one.log" "${options[@]}" train.py; ONE=$JOB
    sleep 1
    begin "$1-two.log" "${options[@]}" train.py; TWO=$JOB
}
export EVERY=40 STEPS=260
nodes first
both() { cat "$1-one.log" "$1-two.log"; }
for _ in $(seq $((600 * PATIENCE))); do both first >first-both.txt; grep -qE 'STEP (9[05]|1[0-9][05])$' first-both.txt && break; sleep 0.2; done
grep -qE 'STEP (9[05]|1[0-9][05])$' first-both.txt || fail "the two nodes did not come to step 90"
fill "$HERE/store"
kill -TERM $TWO
sleep 15
make_room "$HERE/store"
finish $TWO 60; two=$RC
finish $ONE 30; one=$RC
[ "$one $two" = "75 75" ] || fail "exit codes $one (first node) and $two (second node), not 75"
stop=$(newest store/run)
at=$(both first | grep -oE 'STEP [0-9]+' | grep -oE '[0-9]+' | tail -n 1)
[ "$stop" -ge "$at" ] || fail "the newest checkpoint is $stop, steps were made up to $at"
nodes again
finish $ONE 120; one=$RC
finish $TWO 30; two=$RC
[ "$one $two" = "0 0" ] || fail "the rerun ended with $one and $two"
both again >again-both.txt
[ "$(froms again-both.txt)" = "$stop " ] || fail "the rerun began at $(froms again-both.txt), not at $stop"
[ "$(newest store/run)" = 260 ] || fail "the last checkpoint is $(newest store/run)"
pass
