# SIGTERM on a full run directory that stays full: the time of the preemption is not overrun, and nothing is told as saved.
. "$(dirname "$0")/lib.sh"
disk "$HERE/store" size=60m
EVERY=50 STEPS=300 begin run.log --nproc-per-node 2 --standalone --preempt-time 30 --run-dir "$HERE/store/run" train.py
until_step run.log 115
good=$(newest store/run)
[ "$good" -gt 0 ] || fail "no checkpoint yet at step 115: the case is unsound"
fill "$HERE/store"
asked=$SECONDS
kill -TERM $JOB
finish $JOB 60
took=$((SECONDS - asked))
[ "$RC" != late ] || fail "still there 60 s after SIGTERM with 30 s of preempt_time"
[ $took -le 50 ] || fail "ended $took s after SIGTERM"
case $RC in 1 | 75) ;; *) fail "exit $RC" ;; esac
[ -e store/run/finished ] && fail "the finished flag is set"
tail -n 25 run.log | grep -qiE 'not saved|lost|could not|unsaved|no space' || fail "exit $RC and nothing says that the last state is not saved"
tail -n 25 run.log | grep -qE "\b0*$good\b" || fail "the last lines do not name the newest good step $good"
[ "$(newest store/run)" = "$good" ] || fail "the newest good one was $good and is $(newest store/run)"
[ "$RC" = 1 ] || fail "exit $RC for a stop that could not be saved (wanted: 1), though it is said"
make_room "$HERE/store"
EVERY=50 STEPS=300 begin again.log --nproc-per-node 2 --standalone --run-dir "$HERE/store/run" train.py
finish $JOB 150
[ "$RC" = 0 ] || fail "the rerun ended with $RC"
[ "$(froms again.log)" = "$good " ] || fail "the rerun began at $(froms again.log), not at $good"
pass
