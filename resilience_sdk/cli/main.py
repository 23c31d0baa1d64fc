"""The `resilience` command: finds the subcommand and turns our errors into one line and exit code 2.

A subcommand is a module imported only when it is asked for, so `resilience status` needs no torch.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

import attrs

from resilience_sdk._version import __version__
from resilience_sdk.core import console
from resilience_sdk.core.console import drop_unwritten, nobody_reads, open_closed_streams, printable, say
from resilience_sdk.core.early_signals import job_is_over, leaving_at_once
from resilience_sdk.errors import ConfigError, ResilienceError
from resilience_sdk.system.installation import refusal

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141  # what a shell tells of a program that SIGPIPE ended


@attrs.frozen
class Command:
    """A subcommand: `main(argv) -> exit code` in `module`, and its line in the help."""

    module: str
    summary: str
    reads_only: bool = True  # its OSErrors are about the files it was asked to read
    work: str | None = None  # what is done before it prints anything, where that may take long


_READS = "reading the journal"
_ASKED_TO_LEAVE = ("run", "supervise")  # by schedulers, which go by the exit code

COMMANDS = {
    "run": Command(
        "resilience_sdk.launcher.main",
        "run a script on all ranks, with restart (a drop-in for torchrun)",
        reads_only=False,
    ),
    "supervise": Command(
        "resilience_sdk.cli.supervise",
        "run a command again until training is complete",
        reads_only=False,
    ),
    "preempt": Command("resilience_sdk.cli.preempt", "ask a running job to save and stop"),
    "straggler": Command(
        "resilience_sdk.cli.straggler", "who is slow in a run; change its thresholds while it runs", work=_READS
    ),
    "status": Command(
        "resilience_sdk.cli.status", "how a run is doing: state, ranks, checkpoints, incidents", work=_READS
    ),
    "top": Command(
        "resilience_sdk.cli.top", "a run while it runs: the worst ranks first, goodput, what happened last", work=_READS
    ),
    "why": Command("resilience_sdk.cli.why", "every incident: which rank, where, why, what to do", work=_READS),
    "report": Command(
        "resilience_sdk.cli.report", "one page of a run in one file: what happened, why, where time went", work=_READS
    ),
    "dashboard": Command("resilience_sdk.cli.dashboard", "a page with many runs, and the live report of each"),
    "goodput": Command("resilience_sdk.cli.goodput", "where the time of a run went, over all its jobs", work=_READS),
    "plan": Command(
        "resilience_sdk.cli.plan",
        "how often to save, and the expected share of useful time",
        work="simulating failures",
    ),
    "history": Command(
        "resilience_sdk.cli.history",
        "what recurs over many runs; history index DIR... takes runs in",
        work="asking the history",
    ),
    "nodes": Command(
        "resilience_sdk.cli.nodes",
        "which nodes are suspect, and the list that keeps jobs off them",
        work="asking the history",
    ),
    "diagnose": Command(
        "resilience_sdk.cli.diagnose", "cause, culprit and next action from a log alone", work="reading the logs"
    ),
    "outcome": Command(
        "resilience_sdk.cli.outcome", "verdict and exit code of the last job of a run directory", work=_READS
    ),
    "doctor": Command(
        "resilience_sdk.cli.doctor",
        "what will work on this machine and what will not, each with its cure",
        work="looking at this machine",
    ),
    "slurm": Command("resilience_sdk.cli.slurm", "print a batch script for Slurm, with signal, requeue and resume"),
    "nvrx": Command(
        "resilience_sdk.cli.nvrx",
        "print where ft_launcher is, for the PATH of scripts of NVIDIA's resiliency extension",
    ),
    "rehearse": Command(
        "resilience_sdk.cli.rehearse",
        "inject faults into your own job, and tell which promises hold",
        reads_only=False,
    ),
    "demo": Command(
        "resilience_sdk.demo",
        "train a small model on 2 CPU ranks while it is hung and killed",
        reads_only=False,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of this process) and return its exit code.

    Mistakes of the user end with one line on standard error and 2; a subcommand's own exit codes pass. Where nobody
    reads what it prints (`resilience why | head`) it ends quietly with 141.
    """
    open_closed_streams()
    if (why := refusal()) is not None:
        return _refuse(ConfigError(why))
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except ResilienceError as error:
        return _refuse(error)
    except BrokenPipeError:
        if not nobody_reads():
            raise
        return EXIT_UNREAD
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        drop_unwritten()


def _refuse(error: Exception) -> int:
    say(" ".join(printable(str(error)).split()), wrap=False)
    return EXIT_USAGE


def _reading(command: Callable[[list[str]], int], words: list[str], work: str | None = None) -> int:
    """Run a command that only reads and prints."""
    console.stay_light()
    try:
        try:
            with contextlib.nullcontext() if work is None else console.progress(work):
                return command(words)
        finally:
            sys.stdout.flush()  # what cannot be written is noticed here, not at exit
    except BrokenPipeError:
        raise
    except OSError as error:
        return _refuse(error)


def _dispatch(words: list[str]) -> int:
    if not words:
        print(usage(), file=sys.stderr)
        return EXIT_USAGE
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        return _reading(_help, rest)
    if name == "--version":
        return _reading(_version, rest)
    if name not in COMMANDS:
        raise ConfigError(_unknown(name))
    if name in _ASKED_TO_LEAVE:
        with leaving_at_once():
            return job_is_over(_load(name)(rest))  # to load it may take seconds
    command = _load(name)
    return _reading(command, rest, COMMANDS[name].work) if COMMANDS[name].reads_only else command(rest)


def _help(words: list[str]) -> int:
    if words and words[0] in COMMANDS:
        return _load(words[0])(["--help"])
    if words:
        raise ConfigError(_unknown(words[0]))
    print(usage())
    return EXIT_OK


def _version(_: list[str]) -> int:
    print(__version__)
    return EXIT_OK


def _unknown(name: str) -> str:
    kind = "option" if name.startswith("-") else "command"
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    if not close and name.endswith(".py"):
        return f"unknown {kind} {name!r}; to run a script: resilience run {name}"
    hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
    return f"unknown {kind} {name!r}; {hint}"


def _load(name: str) -> Callable[[list[str]], int]:
    entry: Callable[[list[str]], int] = importlib.import_module(COMMANDS[name].module).main
    return entry


def usage() -> str:
    """Return the help of the command itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: resilience COMMAND [arguments]",
            "",
            "commands:",
            *lines,
            "",
            "resilience COMMAND --help tells more; resilience --version prints the version.",
        ]
    )
