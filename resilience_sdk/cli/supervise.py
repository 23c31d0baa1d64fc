"""`resilience supervise`: the command line of the job-level loop."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from resilience_sdk import environ
from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.init_process import below_init
from resilience_sdk.launcher.supervise import Supervision, supervise
from resilience_sdk.run_directory import RunDirectory, choose_run_dir
from resilience_sdk.settings import load_settings
from resilience_sdk.settings.parse import duration_or_zero

_DESCRIPTION = (
    "Runs CMD again until training is complete: until the finished flag exists, or CMD exits with 0 without an agreed "
    "stop. A preempted run (75) is no failure. It ends early when the retries are spent, when the verdict is stop (77) "
    "or hardware (76), and when it is told to leave. CMD finds the run directory in RESILIENCE_RUN_DIR."
)
_EPILOG = "example: resilience supervise --run-dir runs/exp1 -- resilience run --nproc-per-node 8 train.py"
_OURS = ("resilience", "resilience_sdk", "resilience_sdk.launcher")


def main(argv: Sequence[str]) -> int:
    """Supervise a command and return the exit code of the job (0, 1, 2, 75, 76, 77, 130).

    Raises:
        ConfigError: An option is wrong, or there is no such command.
        RunDirectoryError: The run directory cannot be used.
    """
    options, command = _parse(argv)
    env = environ.environment()
    named = options.run_dir or command_run_dir(command)
    arguments = {"run_dir": named, "max_job_retries": options.max_job_retries}
    settings = load_settings(
        arguments={name: value for name, value in arguments.items() if value is not None},
        config_file=options.config,
        env=env,
        strict_env=True,
    )
    if runs_ours(command) and "--fresh" in command:
        raise ConfigError(
            "--fresh in the command would throw away in each run what the last one saved; leave it out and name a "
            "new directory with --run-dir"
        )
    path, _ = choose_run_dir(script_of(command), env, settings.run_dir)
    supervision = Supervision(
        command=command,
        run_dir=RunDirectory.create(path, group_readable=settings.group_readable),
        max_retries=settings.max_job_retries,
        first_delay_s=options.retry_delay,
        grace_s=settings.preempt_time,
        signals=settings.preempt_signals,
        env=env,
    )
    return below_init(lambda: supervise(supervision))


def runs_ours(command: Sequence[str]) -> bool:
    """Tell whether the command is `resilience run`, however it is spelt."""
    return any(os.path.basename(word) in _OURS for word in command)


def command_run_dir(command: Sequence[str]) -> str | None:
    """Return the run directory that a `resilience run` in the command names for itself, so that both are one."""
    if not runs_ours(command):
        return None
    for word, following in zip(command, [*command[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name in ("--run-dir", "--run_dir"):
            return value if equals else following
    return None


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
