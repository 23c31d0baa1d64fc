"""`resilience supervise`: the command line of the job-level loop."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from resilience_sdk.core import environ
from resilience_sdk.core.run_directory import RunDirectory, choose_run_dir
from resilience_sdk.core.settings import Settings, load_settings, nvrx
from resilience_sdk.core.settings.options import plain_switches
from resilience_sdk.core.settings.parse import duration_or_zero
from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.signals import below_init
from resilience_sdk.launcher.supervise import Supervision, find_program, supervise

_DESCRIPTION = (
    "Runs CMD again until training is complete: until the finished flag exists, or CMD exits with 0 without an agreed "
    "stop. A preempted run (75) is no failure. It ends early when the retries are spent, when the verdict is stop (77) "
    "or hardware (76), and when it is told to leave. CMD finds the run directory in RESILIENCE_RUN_DIR."
)
_EPILOG = "example: resilience supervise --run-dir runs/exp1 -- resilience run --nproc-per-node 8 train.py"
_OURS = ("resilience", "resilience_sdk", "resilience_sdk.launcher", "ft_launcher")
_SHARED = ("run_dir", "preempt_time", "preempt_signals", "term_grace")
_VERDICT_S = 10.0  # for the launcher to write incident and outcome after its ranks have gone
# Options of `resilience run` without a value. Its own parser would load torch; a test compares.
FLAGS = frozenset(
    (
        *("-h", "--help", "--help-all", "-m", "--module", "--fresh", "--no-python", "--preflight", "--run-path"),
        *("--standalone", "--provide-nvrx", "--ft-ignore-missing-cfg", "--ignore-missing-fault-tol-cfg"),
        *("--checkpoint-async", "--no-checkpoint-async", "--group-readable", "--no-group-readable"),
        *("--report", "--no-report"),
        *("--stop-if-detected", "--no-stop-if-detected", "--virtual-local-rank"),
        *("--straggler-detection", "--no-straggler-detection"),
    )
)


def main(argv: Sequence[str]) -> int:
    """Supervise a command and return the exit code of the job (0, 1, 2, 75, 76, 77, 130).

    Raises:
        ConfigError: An option is wrong, or there is no such command.
        RunDirectoryError: The run directory cannot be used.
    """
    options, command = _parse(argv)
    env = environ.environment()
    arguments, config = shared_options(command)
    ours = {"run_dir": options.run_dir, "max_job_retries": options.max_job_retries}
    settings = load_settings(
        arguments=arguments | {name: value for name, value in ours.items() if value is not None},
        config_file=options.config or config,
        env=env,
        strict_env=True,
    )
    if "fresh" in _run_options(command):
        raise ConfigError(
            "--fresh in the command would throw away in each run what the last one saved; leave it out and name a "
            "new directory with --run-dir"
        )
    find_program(command[0])
    path, _ = choose_run_dir(script_of(command), env, settings.run_dir)
    supervision = Supervision(
        command=command,
        run_dir=RunDirectory.create(path, group_readable=settings.group_readable),
        max_retries=settings.max_job_retries,
        first_delay_s=options.retry_delay,
        grace_s=settings.preempt_time,
        patience_s=patience_s(settings),
        signals=settings.preempt_signals,
        env=env,
    )
    return below_init(lambda: supervise(supervision))


def patience_s(settings: Settings) -> float:
    """Return the seconds that a command has which was asked to leave, the graces of a launcher of ours in it."""
    return settings.preempt_time + settings.term_grace + _VERDICT_S


def shared_options(command: Sequence[str]) -> tuple[dict[str, str], str | None]:
    """Return what a `resilience run` in the command says that the supervisor must know too, and its config file.

    Else the two would look at different directories, or the supervisor would end a command that still has time.
    """
    given = _run_options(command)
    as_nvrx = {field: given[name] for name, field in nvrx.OPTIONS_TRANSLATED.items() if name in given}
    given = {**as_nvrx, **given}
    return {name: given[name] for name in _SHARED if name in given}, given.get("config")


def _run_options(command: Sequence[str]) -> dict[str, str]:
    """Return the options of a `resilience run` in the command, up to its script, by the names of settings."""
    at = next((at for at, word in enumerate(command) if os.path.basename(word) in _OURS), None)
    if at is None:
        return {}
    given: dict[str, str] = {}
    rest = command[at + 2 if tuple(command[at + 1 : at + 2]) == ("run",) else at + 1 :]
    words = iter(plain_switches(rest, _takes_next))
    for word in words:
        spelt, equals, value = word.partition("=")
        name = spelt.replace("_", "-")
        if not word.startswith("-") or word == "--":
            break
        if _is_attached(word):
            continue
        following = "" if name in FLAGS else value if equals else next(words, None)
        if following is not None:
            given[name.removeprefix("--").replace("-", "_")] = following
    return given


def _is_attached(word: str) -> bool:
    """Tell whether a word is an option with its value, such as -r3."""
    return word[:2] != "--" and len(word) > 2


def _takes_next(word: str) -> bool:
    return not _is_attached(word) and word.replace("_", "-") not in FLAGS


def script_of(command: Sequence[str]) -> str:
    """Return the word that names the run: the script, else the program."""
    return next((word for word in command if word.endswith((".py", ".sh"))), command[0])


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="resilience supervise",
        usage="resilience supervise [options] -- CMD [arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", help="run directory of all runs; without it as for resilience run, once for all"
    )
    parser.add_argument(
        "--max-job-retries",
        metavar="N",
        help="how often a failed CMD is run again, counted from the newest checkpoint; default: 2",
    )
    parser.add_argument(
        "--retry-delay",
        metavar="SECONDS",
        type=_seconds,
        default=5.0,
        help="pause before the first retry; doubles up to a minute; default: 5",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings")
    options, rest = parser.parse_known_args(words[:at])
    if rest and not rest[0].startswith("-"):
        raise ConfigError(f"write -- before the command: resilience supervise -- {' '.join(rest)}")
    if rest:
        raise ConfigError(f"unknown option {rest[0]}; see resilience supervise --help (options of CMD go after --)")
    command = tuple(words[at + 1 :])
    if not command:
        raise ConfigError("no command given; usage: resilience supervise [options] -- CMD [arguments]")
    return options, command


def _seconds(text: str) -> float:
    try:
        return duration_or_zero(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {text!r}") from None
