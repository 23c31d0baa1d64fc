"""Waiting for a job that begins later than those who are to tell of it.

`resilience run` starts the same program for its own run. This command serves runs under other launchers, and delivers
what was left of a run that has ended. It ends when all is delivered and no job runs in the directory; where none has
begun yet, it waits for one.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from resilience_sdk.core.console import say
from resilience_sdk.core.lease import current_holder
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings.options import add_setting_options, settings_from_options
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.system.installation import PACKAGE, refusal
from resilience_sdk.telemetry.exporter import ExporterTask, ending_with_signals, main_from_launcher, serve

_LOOK_S = 0.5


def wait_for_run(path: str | os.PathLike[str], stop: threading.Event, *, for_a_job: bool) -> RunDirectory | None:
    """Return the run directory `path` once a job has used it (`for_a_job`: once one uses it); None if `stop` is set.

    That it waits is said once.

    Raises:
        RunDirectoryError: `path` is a file, or cannot be read.
    """
    told = False
    while (run := _used(Path(path), held=for_a_job)) is None:
        if not told:
            told = True
            say(f"telemetry: no job has begun in {os.path.abspath(path)} yet; waiting for one (Ctrl-C ends this)")
        if stop.wait(_LOOK_S):
            return None
    return run


def _has_nothing_of_ours(run: RunDirectory) -> bool:
    return run.path.is_dir() and not any(place.exists() for place in (run.journal, run.outcome, run.finished))


def _used(path: Path, *, held: bool) -> RunDirectory | None:
    """Return the run directory where a job has used it or, with `held`, uses it now."""
    run = RunDirectory(path.absolute())
    if not run.path.exists() or (os.access(run.path, os.R_OK | os.X_OK) and _has_nothing_of_ours(run)):
        return None
    run = RunDirectory.open(run.path)
    if current_holder(run) is not None:
        return run
    return None if held or run.is_unused() else run


_FROM_LAUNCHER = "--from-launcher"
_FILES = "--files"


def main(argv: Sequence[str]) -> int:
    """Export; return 0 when all was delivered, 1 when something was left, 2 for a bad option or directory."""
    if (why := refusal()) is not None:
        say(why)
        return 2
    if list(argv) == [_FROM_LAUNCHER]:
        return main_from_launcher()
    if list(argv) == [_FILES]:
        sys.stdout.write("".join(f"{path}\n" for path in provided_files()))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m resilience_sdk.telemetry",
        description="Tell what happens in a run directory to the sinks that the settings name.",
    )
    parser.add_argument(
        _FILES, action="store_true", help="print where the alert rules and the dashboard are, and do nothing else"
    )
    parser.add_argument("run_directory", metavar="RUN_DIR", help="the run directory")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait for a job to begin, though others have ended in the directory; one that no job has used is always "
        "waited for",
    )
    add_setting_options(parser)
    options = parser.parse_args(argv)
    with ending_with_signals() as ending:
        try:
            settings = settings_from_options(options)
            # Where nobody holds the directory yet, what its journal tells so far is not of the job that is waited for.
            holder = current_holder(RunDirectory(Path(options.run_directory).absolute()))
            since = time.time() if options.wait and holder is None else 0.0
            run_dir = wait_for_run(options.run_directory, ending.event, for_a_job=options.wait)
        except (ConfigError, RunDirectoryError) as error:
            say(str(error))
            return 2
        if run_dir is None:
            return 0
        holder = current_holder(run_dir)
        return serve(
            ExporterTask(run_dir.path, holder.job if holder is not None else "", settings, since=since), ending
        )


def provided_files() -> list[Path]:
    """Return what the SDK brings for other programs: alert rules for Prometheus, their tests, a Grafana dashboard."""
    return sorted((Path(PACKAGE) / "telemetry" / "provided").iterdir())


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a library that is stuck must not keep the process
