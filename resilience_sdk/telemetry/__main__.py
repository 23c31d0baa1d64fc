"""`python -m resilience_sdk.telemetry RUN_DIR [settings]`: exports a run that nobody exports, while it runs or later.

`resilience run` starts the same program for its own run. This command serves runs under other launchers, and delivers
what was left of a run that has ended. It ends when all is delivered and no job runs in the directory; where none has
begun yet, it waits for one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from resilience_sdk.console import say
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.lease import current_holder
from resilience_sdk.run_directory import RunDirectory
from resilience_sdk.settings.options import add_setting_options, settings_from_options
from resilience_sdk.telemetry.exporter import Task, ending_with_signals, main_from_launcher, serve
from resilience_sdk.telemetry.waiting import wait_for_run

_FROM_LAUNCHER = "--from-launcher"


def main(argv: Sequence[str]) -> int:
    """Export; return 0 when all was delivered, 1 when something was left, 2 for a bad option or directory."""
    if list(argv) == [_FROM_LAUNCHER]:
        return main_from_launcher()
    parser = argparse.ArgumentParser(
        prog="python -m resilience_sdk.telemetry",
        description="Tell what happens in a run directory to the sinks that the settings name.",
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
        return serve(Task(run_dir.path, holder.job if holder is not None else "", settings, since=since), ending)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a library that is stuck must not keep the process
