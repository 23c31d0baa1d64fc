# Somebody removes the run directory in mid-training.
. "$(dirname "$0")/lib.sh"
mkdir -p place
EVERY=50 STEPS=250 begin run.log --nproc-per-node 2 --standalone --run-dir "$HERE/place/run" train.py
until_step run.log 115
rm -rf place/run
[ -e place/run ] && rm -rf place/run
finish $JOB 150
[ "$RC" = 0 ] || fail "exit $RC"
both_end run.log || fail "no END"
[ "$(froms run.log)" = "0 " ] || fail "attempts began at: $(froms run.log)"
told run.log 'removed|is gone|disappeared|made again|no longer|missing|not there any more|vanished' || fail "nobody said that it was removed"
[ "$(newest place/run)" = 250 ] || fail "the last checkpoint is $(newest place/run), not 250"
[ -e place/run/finished ] || fail "told as finished, no flag"
resilience outcome --json place/run | python3 -c 'import json,sys; o=json.load(sys.stdin); sys.exit(0 if o["verdict"]=="finished" and o["exit_code"]==0 else 1)' || fail "the outcome is not there, or another one"
told_dir=$(grep -oE 'run directory: ?/[^ ]+' run.log | tail -n 1 | sed 's/.*: *//')
[ -z "$told_dir" ] || [ -d "$told_dir" ] || fail "the directory that is told at the end is not there: $told_dir"
for path in $(grep -oE "$HERE/place/run/[A-Za-z0-9_./-]+" run.log | tail -n 5 | sed 's/[.:,]*$//'); do
    case $path in */step-00000050 | */step-00000100) ;; *) [ -e "$path" ] || fail "told at the end and not there: $path" ;; esac
done
pass
