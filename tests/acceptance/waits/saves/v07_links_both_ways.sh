# RUN_DIR is reached by a link; inside of it checkpoints (absolute), incidents (relative) and logs are links to other storage.
. "$(dirname "$0")/lib.sh"
disk "$HERE/scratch" size=100m
disk "$HERE/real" size=100m
mkdir -m 700 -p real/run scratch/ckpt scratch/logs real/inc
ln -s real here
ln -s "$HERE/scratch/ckpt" real/run/checkpoints
ln -s ../inc real/run/incidents
ln -s "$HERE/scratch/logs" real/run/logs
export EVERY=50 STEPS=200
begin run.log --nproc-per-node 2 --standalone --run-dir "$HERE/here/run" train.py
for _ in $(seq $((600 * PATIENCE))); do
    kill -0 $JOB 2>/dev/null || break
    grep -qE 'STEP 1[1-9][05]$' run.log && break
    sleep 0.2
done
if ! kill -0 $JOB 2>/dev/null; then
    wait $JOB; RC=$?
    [ "$RC" = 2 ] && grep -qE '(checkpoints|incidents|logs|here)\b.*link|link.*(checkpoints|incidents|logs|here)\b' run.log && ! grep -q 'FROM' run.log && pass
    fail "it ended with $RC before anything was done to it"
fi
kill -KILL "$(pid_of_rank run.log 1)"
finish $JOB 120
[ "$RC" = 0 ] || fail "exit $RC after a rank was killed"
set -- $(froms run.log)
[ $# = 2 ] && [ "$2" -ge 50 ] || fail "attempts began at: $*"
ls scratch/ckpt/step-00000200/manifest.json >/dev/null 2>&1 || fail "the last checkpoint is not on the other storage: $(ls scratch/ckpt | tr '\n' ' ')"
ls real/inc/*/report.json >/dev/null 2>&1 || fail "no incident behind the link: $(ls real/inc | tr '\n' ' ')"
for link in checkpoints incidents logs; do [ -L real/run/$link ] || fail "$link is a link no more"; done
[ "$(kinds here/run)" = crash ] || fail "why tells: $(kinds here/run)"
[ -e real/run/finished ] || fail "no finished flag"
pass
