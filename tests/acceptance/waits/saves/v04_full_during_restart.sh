# A rank is killed while neither bytes nor inodes are left; both come back 25 s later.
. "$(dirname "$0")/lib.sh"
disk "$HERE/store" size=60m,nr_inodes=600
EVERY=50 STEPS=250 begin run.log --nproc-per-node 2 --standalone --run-dir "$HERE/store/run" train.py
until_step run.log 110
good=$(newest store/run)
[ "$good" -gt 0 ] || fail "no checkpoint yet at step 110: the case is unsound"
fill_inodes "$HERE/store"
dd if=/dev/zero of="$HERE/store/fillers/0" bs=64k 2>/dev/null # into an inode that is there
kill -KILL "$(pid_of_rank run.log 1)"
sleep 25
kill -0 $JOB 2>/dev/null || { wait $JOB; fail "it ended with $? instead of waiting for space"; }
make_room "$HERE/store"
finish $JOB 150
[ "$RC" = 0 ] || fail "exit $RC"
both_end run.log || fail "no END"
set -- $(froms run.log)
[ $# = 2 ] || fail "attempts began at: $*"
[ "$2" -ge "$good" ] || fail "the second attempt began at $2, the newest good one was $good"
[ "$(newest store/run)" = 250 ] || fail "the last checkpoint is $(newest store/run)"
case " $(kinds store/run) " in *hang* | *unreadable*) fail "incidents: $(kinds store/run)" ;; esac
pass
