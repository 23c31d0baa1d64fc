"""The text of a batch script for Slurm. Pure: values in, text out.

The script is meant to be read and changed by its user, so what happens with each exit code is plain shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

import attrs

from resilience_sdk.errors import EXIT_PREEMPTED, ConfigError
from resilience_sdk.outcome import EXIT_FINISHED, EXIT_HARDWARE, EXIT_INTERRUPTED, EXIT_STOP

_EXIT_USAGE = 2
_PLAIN = re.compile(r"[\w@%+=:,./\[\]{}()*~^&|!-]+", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@attrs.frozen
class BatchScript:
    """What a batch script is made of. `directives` are options of sbatch without `--`; None is one without value."""

    directives: Mapping[str, str | None]
    run: tuple[str, ...]
    """Options of `resilience run`, then the script and its arguments."""
    python: str
    run_dir: str | None
    several_nodes: bool
    array: bool
    retries: int
    """How often the launcher is started again in one allocation, and the job on other hardware."""
    signals: tuple[str, ...] = ("TERM",)
    """Names of the signals that mean: save and leave, without SIG."""

    def text(self) -> str:
        """Return the script; raises ConfigError for a value that Slurm cannot read in a directive."""
        parts = ("#!/bin/bash", *self._directive_lines(), _INTRODUCTION, *self._settings(), self._loop(), _REQUEUE)
        return "\n".join(parts) + "\n"

    def _directive_lines(self) -> list[str]:
        return [
            f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={directive_value(name, value)}"
            for name, value in self.directives.items()
        ]

    def _settings(self) -> list[str]:
        default = "$PWD/resilience-runs/slurm-$SLURM_JOB_ID${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
        run_dir = f'"{default}"' if self.run_dir is None else quote(self.run_dir)
        if self.run_dir is not None and self.array:
            run_dir += '/"$SLURM_ARRAY_TASK_ID"'  # tasks of an array are runs of their own
        lines = [f"run_dir={run_dir}", f"retries={self.retries}"]
        if self.several_nodes:
            lines.append('head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
        return lines

    def _loop(self) -> str:
        launcher = f'{quote(self.python)} -m resilience_sdk run --run-dir "$run_dir"'
        if self.several_nodes:
            launcher += (
                ' \\\n        --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-backend c10d --rdzv-endpoint "$head:$port" \\\n'
                '        --rdzv-id "$SLURM_JOB_ID-$start"'
            )
        words = " ".join(map(quote, self.run))
        return _LOOP.format(
            launch=node_script(self.signals),
            port=_PORT if self.several_nodes else "",
            launcher=launcher,
            words=words,
            final="|".join(map(str, (EXIT_FINISHED, _EXIT_USAGE, EXIT_STOP, EXIT_INTERRUPTED))),
            requeued=f"{EXIT_PREEMPTED}|{EXIT_HARDWARE}",
        )


def node_script(signals: Sequence[str]) -> str:
    """Return what bash runs on each node around the launcher, its words being the command; it holds no single quote.

    Slurm signals bash too, which must outlive the launcher; `signals` are those that ask it to leave.
    """
    return f"""
    trap asked=yes {" ".join(signals)}
    trap : INT QUIT HUP
    "$@"
    code=$?
    if [ "$code" -gt 128 ] && [ "$code" -ne 130 ]; then
        if [ -n "${{asked:-}}" ]; then exit {EXIT_PREEMPTED}; fi
        scancel --signal=KILL "$SLURM_JOB_ID.$SLURM_STEP_ID"
    fi
    exit "$code\""""


def quote(word: str) -> str:
    """Return `word` so that bash reads it as this one word; line ends are spelt, since sbatch refuses DOS ones."""
    if not _CONTROL.search(word):
        return shlex.quote(word)
    spelt = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda found: f"\\{ord(found[0]):03o}", spelt) + "'"


def directive_value(name: str, value: str) -> str:
    """Return a value as sbatch reads it in a directive; raises ConfigError for one that it cannot hold."""
    if _PLAIN.fullmatch(value):
        return value
    if not value:
        raise ConfigError(f"--{name}: a value is missing")
    if _CONTROL.search(value) or set(value) & set("\"'\\"):
        raise ConfigError(
            f"--{name} {value!r}: a #SBATCH line cannot hold quotes, backslashes or line ends; leave the option out "
            f"here and give it to sbatch itself"
        )
    return f'"{value}"'


_INTRODUCTION = """\
# Printed by `resilience slurm`; submit it with sbatch. Slurm sends the signal above to the launchers before the
# time is up: they save and leave with 75, and the job goes back into the queue and resumes.

set -u
# srun does not take this over from sbatch by itself since 22.05.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
# One name in all steps and after a requeue, so that the run directory is known to be this job's.
export RESILIENCE_JOB_ID="slurm-$SLURM_JOB_ID"
"""

_PORT = """\
    start="${SLURM_RESTART_COUNT:-0}-$try"
    # Another one in each start, in case somebody has this one.
    port=$((20000 + (SLURM_JOB_ID + 97 * (${SLURM_RESTART_COUNT:-0} + try)) % 10000))
"""

_LOOP = """
# A launcher that was killed ends the step, since the others would wait for it for minutes; one that dies after Slurm
# has asked it to leave has left. Else its exit code counts.
# shellcheck disable=SC2016
launch='{launch}'

saved=("$run_dir"/checkpoints/step-*/manifest.json)
try=0
while :; do
{port}    # One launcher per node. A node that has finished early must not end the others.
    srun --ntasks-per-node=1 --kill-on-bad-exit=0 --cpu-bind=none bash -c "$launch" launch \\
        {launcher} \\
        {words}
    code=$?
    case $code in
        {final}) exit "$code" ;;  # finished, bad usage, stop, interrupted by a person: never again
        {requeued}) break ;;  # preempted; hardware
    esac
    # A launcher that was killed, or one that has no restarts left: again in this allocation.
    if [ "$try" -ge "$retries" ]; then
        echo "resilience: exit code $code, and $retries retries are spent" >&2
        exit "$code"
    fi
    try=$((try + 1))
    echo "resilience: exit code $code; retry $try of $retries" >&2
done
"""

_REQUEUE = """\
# How often in a row this job came back for nothing. A preemption after new checkpoints, or after a minute, is free.
count="$run_dir/slurm-$SLURM_JOB_ID-$code"
limit=$retries  # 76: Slurm may choose the same node again
why="hardware again; exclude the node that 'resilience why $run_dir' names"
if [ "$code" = 75 ]; then
    limit=2
    why="preempted again within a minute and without a new checkpoint; 'resilience why $run_dir' names who asked"
    now=("$run_dir"/checkpoints/step-*/manifest.json)
    if [ "$SECONDS" -ge 60 ] || [ "${now[*]}" != "${saved[*]}" ]; then rm -f "$count"; limit=; fi
fi
if [ -n "$limit" ]; then
    mkdir -p "$run_dir"
    echo "$SLURM_JOB_NODELIST" >> "$count"
    if [ "$(wc -l < "$count")" -gt "$limit" ]; then
        rm -f "$count"
        echo "resilience: $why" >&2
        exit "$code"
    fi
fi

# The bare number of an array means all of its tasks, and one of them has it as its own.
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
by_hand="submit it again with the run directory $run_dir"
# The controller may be away for a moment, as when it restarts.
for wait in 1 2 4 8 16 0; do
    if shown=$(scontrol show job --oneliner "$job"); then break; fi
    sleep "$wait"
done
# A job that was cancelled, or is being requeued by somebody else, is left alone.
case $shown in
    *' JobState=RUNNING '*) ;;
    *' JobState='*) exit "$code" ;;
    *)
        echo "resilience: Slurm does not tell whether the job may be requeued; $by_hand" >&2
        exit "$code"
        ;;
esac
echo "resilience: exit code $code; requeue" >&2
if ! scontrol requeue "$job"; then
    echo "resilience: the job cannot be requeued; $by_hand" >&2
fi
exit "$code"
"""
