# Inodes are used up behind the second save and stay so; wait_limit 20 s.
. "$(dirname "$0")/lib.sh"
disk "$HERE/store" size=200m,nr_inodes=400
EVERY=50 STEPS=200 begin run.log --nproc-per-node 2 --standalone --wait-limit 20 --run-dir "$HERE/store/run" train.py
until_step run.log 115
fill_inodes "$HERE/store"
good=$(newest store/run)
[ "$good" -gt 0 ] || fail "no checkpoint yet at step 115: the case is unsound"
finish $JOB 120
[ "$RC" = 1 ] || fail "exit $RC, not 1: the last state is not saved"
[ -e store/run/finished ] && fail "the finished flag is set though the last state is lost"
[ "$(newest store/run)" = "$good" ] || fail "the newest good one was $good and is $(newest store/run)"
tail -n 25 run.log | grep -qiE "lost|not saved|not be saved|unsaved|could not|cannot be|no space" || fail "the last lines do not say what is lost"
tail -n 25 run.log | grep -qE "\b0*$good\b" || fail "the last lines do not name the newest good step $good"
make_room "$HERE/store"
EVERY=50 STEPS=200 begin again.log --nproc-per-node 2 --standalone --run-dir "$HERE/store/run" train.py
finish $JOB 120
[ "$RC" = 0 ] || fail "the rerun ended with $RC"
[ "$(froms again.log)" = "$good " ] || fail "the rerun began at $(froms again.log), not at $good"
[ "$(newest store/run)" = 200 ] || fail "the rerun's last checkpoint is $(newest store/run)"
[ -e store/run/finished ] || fail "no finished flag after the rerun"
pass
