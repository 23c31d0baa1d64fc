"""`resilience slurm`: prints a batch script that runs a script under Slurm and brings it back after a stop.

The script is meant to be read and changed by its user, so what happens with each exit code is plain shell.

Options of sbatch become `#SBATCH` lines, all others are those of `resilience run` and are checked now, not hours
later when the job starts.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.cli.common import print_json
from resilience_sdk.core import environ
from resilience_sdk.core.settings import Settings
from resilience_sdk.core.settings.options import plain_switches
from resilience_sdk.errors import EXIT_PREEMPTED, ConfigError
from resilience_sdk.postmortem.exit_codes import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_HARDWARE,
    EXIT_INTERRUPTED,
    EXIT_STOP,
    EXIT_USAGE,
)
from resilience_sdk.system import installation

# Between the two shells of the script: it failed, and Slurm had asked it to leave, so a retry here would be cut off.
ASKED_AND_FAILED = 79
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
    python_path: str | None = None
    """The PYTHONPATH without which that Python does not find the SDK, None where it does."""
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
        lines = [f"run_dir={run_dir}", f"retries={self.retries}", f"sdk=({quote(self.python)} -m resilience_sdk)"]
        if self.python_path is not None:
            lines.append(f"export PYTHONPATH={quote(self.python_path)}  # as it was when this was printed")
        if self.several_nodes:
            lines.append('head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
        return lines

    def _loop(self) -> str:
        launcher = '"${sdk[@]}" run --run-dir "$run_dir"'
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
            final="|".join(map(str, (EXIT_FINISHED, EXIT_USAGE, EXIT_STOP, EXIT_INTERRUPTED))),
            requeued=f"{EXIT_PREEMPTED}|{EXIT_HARDWARE}|{ASKED_AND_FAILED}",
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
    if [ "$code" -eq {EXIT_FAILED} ] && [ -n "${{asked:-}}" ]; then exit {ASKED_AND_FAILED}; fi
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
        {requeued}) break ;;  # preempted; hardware; failed when it was to leave
    esac
    # A launcher that was killed, or one that has no restarts left: again in this allocation.
    if [ "$try" -ge "$retries" ]; then
        echo "resilience: exit code $code, and no retry is left (of $retries)" >&2
        exit "$code"
    fi
    try=$((try + 1))
    echo "resilience: exit code $code; retry $try of $retries" >&2
done
"""

_REQUEUE = """\
# How often in a row this job came back for nothing. A preemption after new checkpoints, or after a minute, is free.
count="$run_dir/slurm-$SLURM_JOB_ID-$code"
now=("$run_dir"/checkpoints/step-*/manifest.json)
limit=$retries  # 76
why="hardware again; 'resilience why $run_dir' names the node, and 'resilience nodes' what the history suspects"
if [ "$code" = 79 ]; then
    why="failed again when it was to leave; 'resilience why $run_dir' tells what stood still"
    if [ "${now[*]}" != "${saved[*]}" ]; then rm -f "$count"; fi
fi
if [ "$code" = 75 ]; then
    limit=2
    why="preempted again within a minute and without a new checkpoint; 'resilience why $run_dir' names who asked"
    if [ "$SECONDS" -ge 60 ] || [ "${now[*]}" != "${saved[*]}" ]; then rm -f "$count"; limit=; fi
fi
if [ -n "$limit" ]; then
    mkdir -p "$run_dir"
    echo "$SLURM_JOB_NODELIST" >> "$count"
    if [ "$code" = 79 ]; then code=1; fi
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
# What the verdict blames, and what the history suspects, as far as it can be told soon.
suspects=$(timeout 30 "${sdk[@]}" nodes --exclude-list --after "$run_dir") || suspects=
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
# They are left out beside what is left out already. Slurm refuses a list with a node that it does not have: the history
# may be that of several clusters. It takes one of a job that waits, and ends this shell some seconds after the job has
# gone back into the queue.
already=$(sed -n 's/.* ExcNodeList=\\([^ ]*\\) .*/\\1/p' <<< "$shown")
if [ "$already" = "(null)" ]; then already=; fi
leave_out=
if [ -n "$suspects" ]; then
    for node in $(scontrol show hostnames "$suspects"); do
        case ",$already,$leave_out," in *",$node,"*) continue ;; esac
        if scontrol show node "$node" > /dev/null 2>&1; then leave_out+=${leave_out:+,}$node; fi
    done
fi
if [ -n "$already" ]; then leave_out=${leave_out:+$already,$leave_out}; fi
trap '' TERM
echo "resilience: exit code $code; requeue${leave_out:+ without $leave_out}" >&2
if ! scontrol requeue "$job"; then
    echo "resilience: the job cannot be requeued; $by_hand" >&2
elif [ -n "$leave_out" ]; then
    for wait in 0.5 1 2 4 0; do
        if scontrol update "JobId=$job" "ExcNodeList=$leave_out"; then exit "$code"; fi
        sleep "$wait"
    done
    echo "resilience: Slurm was not told to leave out $leave_out; it may choose it again" >&2
fi
exit "$code"
"""


# Options of sbatch that are taken over; true: they have a value.
SBATCH_OPTIONS = {
    **dict.fromkeys(
        (
            *("account", "array", "begin", "comment", "constraint", "cpus-per-gpu", "cpus-per-task", "dependency"),
            *("error", "exclude", "gpus-per-node", "gres", "job-name", "licenses", "mail-type", "mail-user", "mem"),
            *("mem-per-cpu", "mem-per-gpu", "nice", "nodelist", "nodes", "output", "partition", "qos"),
            *("reservation", "signal", "switches", "time", "time-min"),
        ),
        True,
    ),
    "exclusive": False,
    "no-requeue": False,
}
_SHORT = {"-N": "nodes", "-p": "partition", "-J": "job-name", "-A": "account", "-C": "constraint", "-x": "exclude"}
_OURS = {"sbatch": True, "python": True, "json": False, "help": False}
# What the batch script decides itself, and what to do instead.
_DECIDED = {
    **dict.fromkeys(("nnodes", "node-rank"), "give --nodes: each node of the allocation gets a launcher"),
    **dict.fromkeys(
        ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port", "standalone"),
        "leave it out: the script takes the rendezvous from the nodes of the allocation",
    ),
    "fresh": "leave it out, or every requeue would start over; name another --run-dir",
}
_TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_NODES = re.compile(r"[1-9]\d*")
_RANK_WORDS = ("auto", "cpu", "gpu", "xpu")
_GPUS = re.compile(r"(?:[\w.-]+:)?([1-9]\d*)")
_SIGNAL = re.compile(r"(?P<name>[A-Za-z0-9+-]+)(?:@(?P<seconds>\d+))?")
_MOST_SECONDS = 65535  # Slurm's own bound

HELP = """\
usage: resilience slurm [options] script.py [arguments]      (or -m module)

Prints a batch script: resilience slurm --nodes 2 --gpus-per-node 8 --time 4:00:00 train.py > job.sh && sbatch job.sh

options of sbatch, written into the script:
{sbatch}
  --sbatch OPTION[=VALUE]   any other option of sbatch; may be repeated

options of its own:
  --python PATH             the Python of the job (default: this one)
  --json                    print an object with the script and what it was made of; docs/slurm.md has the schema

All others are options of `resilience run` (see its --help), such as --run-dir, --nproc-per-node (default: the number
of --gpus-per-node), --max-restarts, --preempt-time, --max-job-retries."""


@attrs.define
class _Words:
    """A command line, sorted by whose word it is."""

    sbatch: dict[str, str | None] = attrs.field(factory=dict)
    own: dict[str, str | None] = attrs.field(factory=dict)
    run: list[str] = attrs.field(factory=list)
    script: list[str] = attrs.field(factory=list)


def main(argv: Sequence[str]) -> int:
    """Print the batch script and return 0; a mistake raises ConfigError, before anything is printed."""
    from resilience_sdk.launcher import options

    run_options = options.known_options()
    words = sort_words(list(argv), run_options)
    if "help" in words.own:
        names = " ".join(f"--{name}" for name in SBATCH_OPTIONS)
        print(HELP.format(sbatch="\n".join(_wrapped(names))))
        return 0
    script = make_script(words)
    text = script.text()
    if "json" in words.own:
        print_json({**_described(script), "script": text})
        return 0
    # Arguments may hold bytes that are no text.
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.buffer.flush()
    return 0


def sort_words(argv: list[str], run_options: Mapping[str, bool]) -> _Words:
    """Tell options of sbatch, of this command and of `resilience run` (name -> has a value) apart.

    Raises:
        ConfigError: An option is unknown, decided by the script, or lacks its value.
    """
    words = _Words()
    ours = {**SBATCH_OPTIONS, **_OURS}
    rest = iter(plain_switches(argv, lambda spelt: ours.get(_name(spelt), run_options.get(spelt, False))))
    for word in rest:
        if word == "--":
            words.script = list(rest)
        elif not word.startswith("-") or word == "-":
            words.script = [word, *rest]
        else:
            _sort_option(words, word, rest, run_options)
    return words


def _name(spelt: str) -> str:
    return {**_SHORT, "-h": "help"}.get(spelt, spelt.removeprefix("--").replace("_", "-"))


def _sort_option(words: _Words, word: str, rest: Iterator[str], run_options: Mapping[str, bool]) -> None:
    spelt, equals, given = word.partition("=")
    name = _name(spelt)
    if name in _DECIDED and spelt.startswith("--"):
        raise ConfigError(f"{spelt}: {_DECIDED[name]}")
    if spelt in _SHORT or spelt == "-h" or (spelt.startswith("--") and name in {**SBATCH_OPTIONS, **_OURS}):
        value = _value(spelt, equals, given, rest, {**SBATCH_OPTIONS, **_OURS}[name])
        if name == "sbatch":
            other, has_value, text = str(value).removeprefix("--").partition("=")
            words.sbatch[other] = text if has_value else None
        else:
            (words.own if name in _OURS else words.sbatch)[name] = value
    elif spelt in run_options:
        words.run.append(word)
        if run_options[spelt] and not equals:
            words.run.append(str(_value(spelt, equals, given, rest, True)))
    elif word[:2] in run_options and not word.startswith("--"):
        words.run.append(word)  # -r3
    else:
        known = [f"--{known}" for known in (*SBATCH_OPTIONS, *_OURS)]
        known += [other for other in run_options if "_" not in other]
        close = difflib.get_close_matches(spelt, known, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}?" if close else f"an option of sbatch can be given as --sbatch {word[2:]}"
        raise ConfigError(f"unknown option {spelt}; {hint} (options of the script go after the script)")


def _value(spelt: str, equals: str, given: str, rest: Iterator[str], has_value: bool) -> str | None:
    if not has_value:
        if equals:
            raise ConfigError(f"{spelt} takes no value, not {given!r}")
        return None
    value = given if equals else next(rest, None)
    if value is None:
        raise ConfigError(f"{spelt}: a value is missing")
    return value


def make_script(words: _Words) -> BatchScript:
    """Check everything and return the script.

    Raises:
        ConfigError: A value is bad; it names option, value and cure.
    """
    sbatch = dict(words.sbatch)
    nodes = _matching("nodes", sbatch.get("nodes") or "1", _NODES, "a number of nodes such as 2")
    _matching("time", sbatch.get("time") or "1", _TIME, "minutes, hours:minutes:seconds or days-hours")
    run = _with_ranks(words.run, sbatch.get("gpus-per-node"))
    settings, target = _checked(run, words.script)
    name, seconds, run = _signal(sbatch.pop("signal", None), settings, run)
    limit_s = time_limit_s(sbatch.get("time") or "UNLIMITED")
    if limit_s <= seconds:
        raise ConfigError(
            f"--time {sbatch['time']!r}: the signal comes {seconds} s before the end, so the job would stop at once, "
            f"again and again; give more time, or a shorter --preempt-time"
        )
    requeue = "no-requeue" not in sbatch
    sbatch.pop("no-requeue", None)
    directives: dict[str, str | None] = {
        "job-name": os.path.splitext(os.path.basename(target))[0] or "train",
        "nodes": nodes,
        **sbatch,
        "ntasks-per-node": "1",
        "signal": f"{name}@{seconds}",
        "requeue" if requeue else "no-requeue": None,
        "open-mode": "append",
    }
    return BatchScript(
        directives=directives,
        run=(*_without_run_dir(run), *words.script),
        python=words.own.get("python") or sys.executable,
        python_path=None if words.own.get("python") else installation.needed_python_path(environ.environment()),
        run_dir=None if settings.run_dir is None else os.path.abspath(settings.run_dir),
        several_nodes=int(nodes) > 1,
        array="array" in sbatch,
        retries=settings.max_job_retries,
        signals=tuple(dict.fromkeys(("TERM", name, *(signal[3:] for signal in settings.preempt_signals)))),
    )


def _matching(name: str, value: str, pattern: re.Pattern[str], expected: str) -> str:
    if not pattern.fullmatch(value):
        raise ConfigError(f"--{name} {value!r}: expected {expected}")
    return value


def time_limit_s(text: str) -> float:
    """Return the seconds of a time limit as Slurm reads it: minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s."""
    if not text[0].isdigit():
        return math.inf
    days, dash, clock = text.rpartition("-")
    fields = [int(field) for field in clock.split(":")]
    if dash:
        hours, minutes, seconds = (*fields, 0, 0)[:3]
        return 86400 * int(days) + 3600 * hours + 60 * minutes + seconds
    hours, minutes, seconds = fields if len(fields) == 3 else (0, *(*fields, 0)[:2])
    return 3600 * hours + 60 * minutes + seconds


def _with_ranks(run: list[str], gpus: str | None) -> list[str]:
    """Add one rank per GPU where the number of ranks was not given."""
    found = None if gpus is None else _GPUS.fullmatch(gpus)
    if gpus is not None and found is None:
        raise ConfigError(f"--gpus-per-node {gpus!r}: expected a number, or a type and a number such as a100:4")
    given = any(word.partition("=")[0].replace("_", "-") == "--nproc-per-node" for word in run)
    return run if found is None or given else [*run, "--nproc-per-node", found[1]]


def _checked(run: list[str], script: list[str]) -> tuple[Settings, str]:
    """Let the launcher's own parser check its options; return the settings and the script's name."""
    from resilience_sdk.launcher import options

    # The machine that prints the script may have no GPU, and its number of threads is not the job's.
    env = {**environ.environment(), "OMP_NUM_THREADS": "1"}
    _check_ranks(run)
    chosen = options.parse_options([*run, "--nproc-per-node", "1", *script], env)
    return chosen.settings, chosen.script.target


def _without_run_dir(run: list[str]) -> list[str]:
    """Drop `--run-dir`, which the script gives itself: one per task of an array."""
    kept, rest = [], iter(run)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != "--run-dir":
            kept.append(word)
        elif not equals:
            next(rest)
    return kept


def _check_ranks(run: list[str]) -> None:
    for number, word in enumerate(run):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != "--nproc-per-node":
            continue
        value = value if equals else run[number + 1]
        if not _NODES.fullmatch(value) and value not in _RANK_WORDS:
            raise ConfigError(f"{name} {value!r}: expected a number, or one of {', '.join(_RANK_WORDS)}")


def _signal(given: str | None, settings: Settings, run: list[str]) -> tuple[str, int, list[str]]:
    """Return name and seconds of `--signal`, and the launcher's options made consistent with them."""
    if given is None:
        seconds = max(1, math.ceil(settings.preempt_time))
        if seconds > _MOST_SECONDS:
            raise ConfigError(f"preempt_time {seconds}: Slurm's --signal allows {_MOST_SECONDS} s at most")
        return settings.preempt_signals[0].removeprefix("SIG"), seconds, run
    if given.upper().startswith(("B:", "R")) and ":" in given:
        raise ConfigError(f"--signal {given!r}: only the launchers can use the signal; give NAME@SECONDS, as TERM@60")
    found = _SIGNAL.fullmatch(given)
    if found is None or not 1 <= int(found["seconds"] or 60) <= _MOST_SECONDS:
        raise ConfigError(f"--signal {given!r}: expected NAME@SECONDS such as TERM@60, up to {_MOST_SECONDS} s")
    name, seconds = found["name"].upper().removeprefix("SIG"), int(found["seconds"] or 60)
    if f"SIG{name}" not in settings.preempt_signals:
        wanted = ",".join(settings.preempt_signals)
        close = difflib.get_close_matches(f"SIG{name}", settings.preempt_signals, n=1)
        hint = f"did you mean {close[0].removeprefix('SIG')}? Else" if close else "for another one"
        raise ConfigError(
            f"--signal {given!r}: the launcher takes {wanted} for a preemption; {hint} give "
            f"--preempt-signals {wanted},SIG{name} too"
        )
    if "preempt_time" not in settings.sources:
        return name, seconds, [*run, "--preempt-time", str(seconds)]
    if settings.preempt_time > seconds:
        raise ConfigError(
            f"--signal {given!r}: the launcher would take preempt_time {settings.preempt_time:g} s, longer than the "
            f"job has; give --preempt-time {seconds} or less"
        )
    return name, seconds, run


def _described(script: BatchScript) -> dict[str, Any]:
    return {
        "directives": dict(script.directives),
        "command": [script.python, "-m", "resilience_sdk", "run", *script.run],
        "run_dir": script.run_dir,
        "retries": script.retries,
    }


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
