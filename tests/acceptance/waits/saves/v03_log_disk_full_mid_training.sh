# The ranks write more than their log disk (--log-dir, --tee 3) can hold.
. "$(dirname "$0")/lib.sh"
disk "$HERE/logdisk" size=1m
VERBOSE=30000 EVERY=50 STEPS=120 begin run.log --nproc-per-node 2 --standalone --run-dir "$HERE/run" --log-dir "$HERE/logdisk/logs" --tee 3 train.py
(while sleep 0.3; do df --output=avail "$HERE/logdisk" | tail -n 1; done >"$HERE/avail.txt") &
STARTED+=("$!")
finish $JOB 150
[ "$(sort -n avail.txt | head -n 1)" -lt 64 ] || fail "the log disk was never full: the case is unsound"
[ "$RC" = 0 ] || fail "exit $RC for a full log disk"
both_end run.log || fail "no END on the screen"
[ "$(grep -o 'FROM [0-9]*' run.log | wc -l)" = 1 ] || fail "restarted: $(grep -o 'FROM [0-9]*' run.log | tr '\n' ' ')"
[ "$(newest run)" = 120 ] || fail "the last checkpoint is $(newest run)"
[ -e run/finished ] || fail "no finished flag"
case " $(kinds run) " in *hang* | *crash* | *unreadable*) fail "incidents: $(kinds run)" ;; esac
pass
