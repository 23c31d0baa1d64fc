# Who reads the output goes away: `| head`, and a reader of a FIFO that is killed in mid-training.
. "$(dirname "$0")/lib.sh"
export EVERY=50 STEPS=150
resilience run --nproc-per-node 2 --standalone --run-dir "$HERE/one" train.py 2>&1 </dev/null | head -n 2 >head.log
RC=${PIPESTATUS[0]}
[ "$RC" = 0 ] || fail "run | head ended with $RC; newest checkpoint $(newest one)"
[ "$(newest one)" = 150 ] && [ -e one/finished ] || fail "after run | head the newest checkpoint is $(newest one)"
case " $(kinds one) " in *hang* | *crash* | *unreadable*) fail "incidents: $(kinds one)" ;; esac
grep -rqs 'END rank=0' one || fail "the ranks' output does not go on to a file of the run directory"
mkfifo screen
cat screen >seen.log &
reader=$!
STARTED+=("$reader")
resilience run --nproc-per-node 2 --standalone --run-dir "$HERE/two" train.py >screen 2>&1 </dev/null &
JOB=$!
STARTED+=("$JOB")
until_step seen.log 60
kill -KILL $reader
finish $JOB 90
[ "$RC" = 0 ] || fail "exit $RC after the reader of a FIFO was killed; newest checkpoint $(newest two)"
[ "$(newest two)" = 150 ] && [ -e two/finished ] || fail "after that the newest checkpoint is $(newest two)"
pass
