# Sourced by each case. The case has its own empty working directory; WAITS_HOME is where this set lies.
set -u
NAME=$(basename "$0" .sh)
HOME_OF_SET=${WAITS_HOME:-$(cd "$(dirname "$0")/.." && pwd)}
HERE=$PWD
MOUNTS=() STARTED=() VERDICT=
PATIENCE=${PATIENCE:-1} # a factor of the time limits below, for a machine that is busy with something else
cp "$HOME_OF_SET/saves/train.py" "$HERE/train.py"

clean() {
    for pid in "${STARTED[@]:-}"; do [ -n "$pid" ] && kill -KILL "$pid" 2>/dev/null; done
    cd /
    for place in "${MOUNTS[@]:-}"; do [ -n "$place" ] && umount -l "$place" 2>/dev/null; done
    [ -n "$VERDICT" ] || echo "FAIL $NAME: the case itself ended early"
}
trap clean EXIT
trap 'exit 143' TERM INT

fail() {
    VERDICT=FAIL
    for file in "$HERE"/*.log; do [ -f "$file" ] && { echo "--- $file"; grep -v 'vvvvv' "$file" | tail -n 40 | cut -c1-300; }; done
    echo "FAIL $NAME: $*"
    exit 1
}
pass() { VERDICT=PASS; echo "PASS $NAME"; exit 0; }

disk() { # disk PLACE OPTIONS: a tmpfs of its own
    mkdir -p "$1" && mount -t tmpfs -o "$2,mode=0755" tmpfs "$1" || fail "cannot mount a tmpfs at $1"
    MOUNTS+=("$1")
}
fill() { # use up all bytes of a file system
    dd if=/dev/zero of="$1/filler" bs=64k 2>/dev/null
    dd if=/dev/zero of="$1/filler2" bs=1k 2>/dev/null
    [ "$(df --output=avail "$1" | tail -n 1)" -lt 5 ] || fail "could not fill $1"
}
fill_inodes() { # and all inodes
    mkdir -p "$1/fillers" 2>/dev/null
    python3 - "$1/fillers" <<'PY'
import sys
n = 0
try:
    while True:
        open(f"{sys.argv[1]}/{n}", "w").close()
        n += 1
except OSError:
    pass
PY
}
make_room() { rm -rf "$1/filler" "$1/filler2" "$1/fillers"; }

until_line() { # until_line FILE REGEX SECONDS
    local end=$((SECONDS + $3 * PATIENCE))
    until grep -qE "$2" "$1" 2>/dev/null; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.2
    done
}
until_step() { # until_step FILE N: rank 0 has printed STEP m with m >= N
    local end=$((SECONDS + ${3:-120} * PATIENCE))
    until [ "$(grep -oE '^(\[[^]]*\]: ?)?STEP [0-9]+' "$1" 2>/dev/null | grep -oE '[0-9]+$' | tail -n 1)" -ge "$2" ] 2>/dev/null; do
        [ $SECONDS -lt $end ] || fail "the training did not come to step $2 of $1"
        sleep 0.1
    done
}
begin() { # begin LOG ARGS...: resilience run in the background, its pid in JOB
    local log=$1
    shift
    resilience run "$@" >"$log" 2>&1 </dev/null &
    JOB=$!
    STARTED+=("$JOB")
}
finish() { # finish PID SECONDS: its exit code in RC, "late" if it has not ended by then
    local end=$((SECONDS + $2 * PATIENCE))
    while kill -0 "$1" 2>/dev/null; do
        [ $SECONDS -lt $end ] || { RC=late; return; }
        sleep 0.2
    done
    wait "$1"
    RC=$?
}
pid_of_rank() { grep -oE "PID rank=$2 pid=[0-9]+" "$1" | tail -n 1 | grep -oE '[0-9]+$'; }
newest() { # the newest complete checkpoint of a run directory, as its number; 0 for none
    python3 - "$1" <<'PY'
import glob, os, re, sys
steps = [0]
for path in glob.glob(os.path.join(sys.argv[1], "checkpoints", "step-*", "manifest.json")):
    found = re.fullmatch(r"step-(\d+)", os.path.basename(os.path.dirname(path)))
    if found:
        steps.append(int(found.group(1)))
print(max(steps))
PY
}
froms() { grep -oE 'FROM [0-9]+' "$1" | grep -oE '[0-9]+' | tr '\n' ' '; }
told() { grep -qiE "$2" "$1"; }
attempts() { resilience outcome --json "$1" 2>/dev/null | python3 -c 'import json,sys; a=json.load(sys.stdin)["attempts"]; print(a if isinstance(a,int) else len(a))' 2>/dev/null || echo "?"; }
kinds() { resilience why --json "$1" 2>/dev/null | python3 -c 'import json,sys; print(" ".join(sorted(i["kind"] for i in json.load(sys.stdin)["incidents"])))' 2>/dev/null || echo unreadable; }
both_end() { grep -q 'END rank=0' "$1" && grep -q 'END rank=1' "$1"; }
