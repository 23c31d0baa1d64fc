"""`resilience slurm`: prints a batch script that runs a script under Slurm and brings it back after a stop.

Options of sbatch become `#SBATCH` lines, all others are those of `resilience run` and are checked now, not hours
later when the job starts.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk import environ
from resilience_sdk.cli.common import print_json
from resilience_sdk.cli.slurm_script import BatchScript
from resilience_sdk.errors import ConfigError
from resilience_sdk.settings import Settings
from resilience_sdk.settings.options import plain_switches

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
