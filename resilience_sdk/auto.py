"""Watches a script that knows nothing of the SDK, under a launcher that is not ours.

    python -m resilience_sdk.auto train.py --lr 0.1
    torchrun --nproc-per-node 2 -m resilience_sdk.auto train.py --lr 0.1
    torchrun --nproc-per-node 2 -m resilience_sdk.auto -m package.program --lr 0.1

The script runs as it would without us: its own `__main__`, arguments, import path, output and exit code. Steps
of its optimizers, else its collectives, tell that it moves. A hang or crash is explained in the run directory;
restarting is up to the launcher (see `on_hang`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from resilience_sdk import rank
from resilience_sdk.core import environ
from resilience_sdk.core.console import say
from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.forkserver_wire import Script
from resilience_sdk.launcher.worker import run_script

_USAGE = "usage: python -m resilience_sdk.auto [-m] script.py|module [arguments]"
_EXIT_USAGE = 2


def parse(words: Sequence[str]) -> Script:
    """Return the script that the arguments name, with its own arguments. Raises ConfigError."""
    rest = list(words)
    is_module = rest[:1] == ["-m"]
    if is_module:
        del rest[0]
    if not rest:
        raise ConfigError(f"no {'module' if is_module else 'script'} given; {_USAGE}")
    if rest[0].startswith("-"):
        raise ConfigError(
            f"unknown option {rest[0]}; {_USAGE} (settings are RESILIENCE_* variables here; options of the "
            "script go after the script)"
        )
    script = Script.parse(rest[0], rest[1:], module=is_module)
    script.check()
    return script


def main() -> None:
    """Run the script of this process's command line and return or raise as it does."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{_USAGE}\n")
        return
    try:
        script = parse(words)
    except ConfigError as error:
        say(str(error))
        raise SystemExit(_EXIT_USAGE) from None
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the working directory, there because we were started with -m
    if environ.is_disabled(environ.environment()):
        rank.ensure_started()  # says so
    run_script(script)


if __name__ == "__main__":
    main()
