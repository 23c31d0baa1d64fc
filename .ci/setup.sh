# Sourced by .ci/run and .ci/release: what both need of a fresh machine, and how both run tests.
# shellcheck shell=bash
results=$PWD/.ci/results # what this run leaves: durations, reruns, the output of what ran beside the tests
rm -rf "$results"
mkdir -p "$results"
scratch=$(mktemp -d)
began=$SECONDS
beside=() # name:pid of what runs in the background
longest_s=3600 # for one part's tests: three times what the longest takes

# -- the machine

# COMMAND, the Debian packages that bring it, what lacks without.
programs=(
    "ip|iproute2|the tests of separate hosts, which are network namespaces, will be skipped"
    "slurmctld|slurmctld slurmd slurm-client munge|the tests of Slurm will be skipped"
    "shellcheck|shellcheck|the tests of shell scripts will fail"
    "gcc|gcc libc6-dev|the tests of GPU probes, whose driver is a library of the tests, will fail"
    "promtool|prometheus|the tests of Prometheus will fail"
    "tmux|tmux|the test of the screen of resilience top will fail"
    "strace|strace|the test of docs/security.md will fail"
    "chromedriver|chromium chromium-driver|the tests of pages will fail"
    "npm|npm|the tests of barriers in pages will fail"
)

# The packages of the programs that are missing, one program a line.
missing_packages() {
    local entry command packages
    for entry in "${programs[@]}"; do
        IFS='|' read -r command packages _ <<<"$entry"
        # Debian's npm does not go with the node of another source.
        if [ "$command" = npm ] && command -v node >/dev/null 2>&1; then
            continue
        fi
        command -v "$command" >/dev/null 2>&1 || echo "$packages"
    done
}

# Install what is missing: in one go, and where that fails one program after another, so that each costs its own tests only.
install_programs() {
    local entry packages command without
    packages=$(missing_packages)
    if [ -n "$packages" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq || true
        # shellcheck disable=SC2086
        if ! apt-get install -y -qq --no-install-recommends $packages; then
            while read -r packages; do
                apt-get install -y -qq --no-install-recommends $packages </dev/null || true
            done < <(missing_packages)
        fi
    fi
    for entry in "${programs[@]}"; do
        IFS='|' read -r command packages without <<<"$entry"
        command -v "$command" >/dev/null 2>&1 || echo "$command is missing (apt-get install $packages): $without"
    done
    if [ ! -e "$TEST_AXE" ]; then
        mkdir -p "$(dirname "$TEST_AXE")"
        (
            cd "$(dirname "$TEST_AXE")" && npm pack --silent axe-core@4.14.1 >/dev/null &&
                tar -xzf axe-core-4.14.1.tgz --strip-components=1 package/axe.min.js
        ) || echo "axe-core cannot be fetched: the tests of barriers in pages will fail"
    fi
}

# What pip brings beside the README's commands: DeepSpeed has no wheel, and its setup imports the torch that is there;
# without its operators it takes seconds. Megatron-LM's own loop comes with newer wheels of megatron-core, which are for
# Python 3.12: what it needs of that is stood in for, so one is unpacked beside the environment.
install_frameworks() {
    python -m pip install -q -c constraints.txt -e '.[docs]' wheel
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu python -m pip install -q -c constraints.txt --no-build-isolation deepspeed
    local wheel=$scratch/megatron-lm
    if python -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 -d "$wheel" megatron-core==0.19.2; then
        python -m zipfile -e "$wheel"/*.whl "$wheel"
        export MEGATRON_LM=$wheel
    else
        echo "megatron-core 0.19.2 cannot be fetched: the tests of Megatron-LM itself will be skipped"
    fi
}

export TEST_AXE=${XDG_CACHE_HOME:-$HOME/.cache}/resilience_sdk/axe-core-4.14.1/axe.min.js
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Hundreds of processes are started: none of them should compile the package anew.
unset PYTHONDONTWRITEBYTECODE
# Every adapter is tested with its framework, and every sink and probe with its library or program; elsewhere tests
# without one are skipped.
export TEST_EVERY_ADAPTER=1 TEST_EVERY_TOOL=1 SHORT_FAILURES=1
python3 -m venv "$scratch/venv"
# shellcheck disable=SC1091
. "$scratch/venv/bin/activate"

# -- running

# Say when a part of the run begins, for who looks where the time goes.
part() {
    echo "== $(((SECONDS - began) / 60)):$(printf %02d $(((SECONDS - began) % 60))) $1" | tee -a "$results/parts.txt"
}

# Run what measures nothing beside what follows; `joined` prints what it said, and fails where it has.
aside() { # NAME COMMAND...
    local name=$1
    shift
    (
        renice -n 10 "$BASHPID" >/dev/null 2>&1 || true
        set -e
        "$@"
    ) >"$results/$name.log" 2>&1 &
    beside+=("$name:$!")
}

joined() {
    local each failed=0
    for each in "${beside[@]}"; do
        wait "${each#*:}" || failed=1
        sed "s/^/${each%%:*}: /" "$results/${each%%:*}.log"
    done
    beside=()
    return "$failed"
}

# A test may lack the processor that it takes for granted: beside another one, or because the machine is shared. What
# failed is run again with the machine for itself, if it is little, and is recorded: what it finds then counts.
tests() { # MARKS ARGUMENT...
    local marks=$1 code=0 failed
    shift
    TEST_DURATIONS=$results/durations.tsv timeout -k 60 "$longest_s" python -m pytest -m "$marks" "$@" || code=$?
    if [ "$code" = 124 ]; then
        echo "the tests '$marks' have not ended within $longest_s s"
    fi
    if [ "$code" -ne 1 ]; then # all passed, or it is not tests that have failed
        return "$code"
    fi
    failed=$(python -c 'import json; print(*sorted(json.load(open(".pytest_cache/v/cache/lastfailed"))), sep="\n")')
    echo "failed at first: $failed"
    [ "$(cut -d: -f1 <<<"$failed" | sort -u | wc -l)" -le 5 ]
    python -m pytest -m "$marks" -n 0 --last-failed --last-failed-no-failures none
    echo "$failed" >>"$results/reruns.txt"
}

# What a run says last, however it ends.
ended() {
    local code=$? each
    for each in "${beside[@]}"; do
        kill "${each#*:}" 2>/dev/null || true
    done
    part "the end, exit code $code" || true
    cat "$results/parts.txt"
    if [ -e "$results/durations.tsv" ]; then
        python -m tests.durations "$results/durations.tsv" || true
        echo "where the machine was idle: cp $results/durations.tsv tests/durations.tsv"
    fi
    if [ -e "$results/reruns.txt" ]; then
        echo "failed at first, and passed with the machine for themselves:"
        cat "$results/reruns.txt"
    fi
    rm -rf "$scratch"
    exit "$code"
}
trap ended EXIT
