# The disk of the run directory is unmounted in mid-training: nothing may be written under the mount point.
. "$(dirname "$0")/lib.sh"
disk "$HERE/back" size=100m
mkdir -m 700 store
mount --bind "$HERE/back" "$HERE/store" || fail "cannot bind"
MOUNTS=("$HERE/store" "${MOUNTS[@]}")
EVERY=50 STEPS=250 begin run.log --nproc-per-node 2 --standalone --wait-limit 20 --run-dir "$HERE/store/run" train.py
until_step run.log 115
umount -l "$HERE/store"
finish $JOB 180
under=$(find store -mindepth 1 | head -n 5 | tr '\n' ' ')
[ -z "$under" ] || fail "written under the mount point (exit $RC): $under"
[ "$RC" != late ] || fail "not over after 180 s"
if [ "$RC" = 0 ]; then # only if it went on through what it had open
    [ "$(newest back/run)" = 250 ] && [ -e back/run/finished ] || fail "exit 0, but the newest checkpoint is $(newest back/run)"
else
    [ "$RC" = 1 ] || fail "exit $RC, not 1"
    [ -e back/run/finished ] && fail "exit 1 with the finished flag"
    told run.log 'unmount|mount|is gone|removed|not there|another device|other device|no longer' || fail "nobody said what happened to the directory"
fi
good=$(newest back/run)
[ "$good" -gt 0 ] || fail "what was saved before is gone"
mount --bind "$HERE/back" "$HERE/store"
EVERY=50 STEPS=250 begin again.log --nproc-per-node 2 --standalone --run-dir "$HERE/store/run" train.py
was=$RC
finish $JOB 120
[ "$RC" = 0 ] || fail "the rerun ended with $RC"
[ "$was" = 0 ] || [ "$(froms again.log)" = "$good " ] || fail "the rerun began at $(froms again.log), not at $good"
pass
