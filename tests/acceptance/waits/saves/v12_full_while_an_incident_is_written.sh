# Rank 1 is stopped while neither bytes nor inodes are left, so that the incident of the hang finds no room.
. "$(dirname "$0")/lib.sh"
disk "$HERE/store" size=60m,nr_inodes=600
EVERY=50 STEPS=250 begin run.log --nproc-per-node 2 --standalone --stuck-after 15 --run-dir "$HERE/store/run" train.py
until_step run.log 110
good=$(newest store/run)
[ "$good" -gt 0 ] || fail "no checkpoint yet at step 110: the case is unsound"
fill_inodes "$HERE/store"
dd if=/dev/zero of="$HERE/store/fillers/0" bs=64k 2>/dev/null
kill -STOP "$(pid_of_rank run.log 1)"
until_line run.log 'resilience: HANG: rank 1' 60 || fail "a stopped rank was not called hung within 60 s (stuck_after 15) on a full disk"
sleep 10
make_room "$HERE/store"
finish $JOB 150
[ "$RC" = 0 ] || fail "exit $RC"
both_end run.log || fail "no END"
set -- $(froms run.log)
[ $# = 2 ] || fail "attempts began at: $*"
[ "$2" -ge "$good" ] || fail "the second attempt began at $2, the newest good one was $good"
seen=$(kinds store/run)
case " $seen " in *" hang "*) ;; *) fail "why tells: '$seen', no hang" ;; esac
[ "$(newest store/run)" = 250 ] || fail "the last checkpoint is $(newest store/run)"
pass
