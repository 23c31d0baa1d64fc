# FIFOs and sockets in place of files, for the commands and for a run.
. "$(dirname "$0")/lib.sh"
export EVERY=20 STEPS=60 MB=1
RESILIENCE_FAULT=kill:rank=1,step=30 begin first.log --nproc-per-node 2 --standalone --run-dir "$HERE/run" train.py
finish $JOB 90
[ "$RC" = 0 ] || fail "the first run ended with $RC: the case is unsound"
bounded() { # bounded WHAT COMMAND...
    local what=$1
    shift
    timeout -k 5 $((30 * PATIENCE)) "$@" >>commands.log 2>&1 </dev/null
    local rc=$?
    case $rc in 124 | 137) fail "$* blocks for 30 s with $what" ;; esac
    grep -q 'Traceback (most recent call last)' commands.log && fail "$* shows a traceback with $what"
    : >commands.log
}
socket() { python3 -c 'import socket,sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])' "$1"; }
odd=0
for file in $(find run -maxdepth 1 -type f -printf '%f\n') incidents/$(ls run/incidents | head -n 1)/report.json; do
    mv "run/$file" "kept"
    odd=$((odd + 1))
    if [ $((odd % 3)) = 0 ]; then (cd "$(dirname "run/$file")" && socket "$(basename "$file")"); else mkfifo "run/$file"; fi
    for command in status why outcome; do bounded "$file" resilience $command "$HERE/run"; done
    bounded "$file" resilience report "$HERE/run" -o "$HERE/page.html"
    rm -f "run/$file" && mv kept "run/$file"
done
# a run that meets them: what the directory of a fresh job may hold before it begins
mkdir -m 700 second
mkfifo second/timeouts.json second/outcome.json second/journal
(cd second && socket lease.json)
export STEPS=400 MB=1
begin second.log --nproc-per-node 2 --standalone --run-dir "$HERE/second" train.py
for _ in $(seq $((500 * PATIENCE))); do kill -0 $JOB 2>/dev/null || break; grep -q 'STEP 20' second.log && break; sleep 0.2; done
if kill -0 $JOB 2>/dev/null; then
    grep -q 'STEP 20' second.log || { kill -TERM $JOB; finish $JOB 15; fail "a run stands for 100 s before FIFOs (after SIGTERM: $RC)"; }
    kill -TERM $JOB
    finish $JOB 70
    [ "$RC" != late ] || fail "SIGTERM is not answered beside FIFOs"
else
    wait $JOB; RC=$?
    grep -qE 'timeouts.json|outcome.json|journal|lease.json' second.log || fail "exit $RC and no name of what is in the way"
fi
# and one that gets a FIFO while it runs
begin third.log --nproc-per-node 2 --standalone --run-dir "$HERE/third" train.py
until_step third.log 40
mkfifo third/preempt
rm -f third/timeouts.json && mkfifo third/timeouts.json
before=$(grep -oE 'STEP [0-9]+' third.log | tail -n 1)
sleep 8
kill -0 $JOB 2>/dev/null || { wait $JOB; fail "a FIFO named preempt ended the run with $?"; }
[ "$(grep -oE 'STEP [0-9]+' third.log | tail -n 1)" != "$before" ] || fail "the training stands since a FIFO is named preempt"
kill -TERM $JOB
asked=$SECONDS
finish $JOB 70
[ "$RC" = 75 ] || fail "exit $RC after SIGTERM beside a FIFO named preempt"
[ $((SECONDS - asked)) -le 20 ] || fail "it took $((SECONDS - asked)) s to leave"
pass
