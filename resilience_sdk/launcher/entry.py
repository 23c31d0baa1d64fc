"""The file that `python -u` is given: the first lines of the fork server and of an exec'd worker.

    entry.py serve FD PARENT MODE MASK COMMAND...   the fork server; COMMAND is only what `ps` shows
    entry.py run KIND TARGET ARGS...                a worker without it, for `--start-method exec`

It is run by its path and not by `-m`, so that nothing from the working directory can be imported in our
place.
"""

import os
import sys


def _import_ourselves() -> None:
    """Import the package from where the launcher has it, and leave `sys.path` as a script finds it."""
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == here:
        # Put there by Python; our modules would shadow the user's.
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(os.path.dirname(here)))
    try:
        import resilience_sdk.launcher.worker
        import resilience_sdk.launcher.zygote  # noqa: F401
    finally:
        del sys.path[0]


if __name__ == "__main__":
    _import_ourselves()
    if sys.argv[1] == "serve":
        from resilience_sdk.launcher.zygote import main

        main(
            channel_fd=int(sys.argv[2]),
            launcher_pid=int(sys.argv[3]),
            mode=sys.argv[4],
            mask={int(number) for number in sys.argv[5].split(",") if number},
        )
    else:
        from resilience_sdk.launcher.script import Script
        from resilience_sdk.launcher.worker import run_script

        run_script(Script(sys.argv[2], sys.argv[3], tuple(sys.argv[4:])))  # type: ignore[arg-type]
