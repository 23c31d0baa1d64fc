# The disk fills up before the only save, the last one; space comes 80 s later (longer than a hang's verdict).
. "$(dirname "$0")/lib.sh"
disk "$HERE/store" size=40m
EVERY=100000 STEPS=160 begin run.log --nproc-per-node 2 --standalone --run-dir "$HERE/store/run" train.py
until_step run.log 60
fill "$HERE/store"
until_step run.log 155
sleep 80
kill -0 $JOB 2>/dev/null || { wait $JOB; fail "it ended with $? instead of waiting for space"; }
[ -e store/run/finished ] && fail "the finished flag is set while nothing is saved"
make_room "$HERE/store"
finish $JOB 60
[ "$RC" = 0 ] || fail "exit $RC after space was made"
both_end run.log || fail "no END"
[ "$(newest store/run)" = 160 ] || fail "the newest checkpoint is $(newest store/run), not 160"
[ -e store/run/finished ] || fail "no finished flag"
case " $(kinds store/run) " in *hang* | *crash* | *unreadable*) fail "incidents: $(kinds store/run)" ;; esac
[ "$(froms run.log)" = "0 " ] || fail "more than one attempt: from $(froms run.log)"
told run.log 'no space|full|space' || fail "nobody said what is waited for"
pass
