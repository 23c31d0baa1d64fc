"""Watches a script that knows nothing of the SDK, under a launcher that is not ours.

    python -m resilience_sdk.auto train.py --lr 0.1
    torchrun --nproc-per-node 2 -m resilience_sdk.auto train.py --lr 0.1
    torchrun --nproc-per-node 2 -m resilience_sdk.auto -m package.program --lr 0.1

The script runs as it would without us: its own `__main__`, arguments, import path, output and exit code. Steps
of its optimizers, else its collectives, tell that it moves. A hang or crash is explained in the run directory;
restarting is up to the launcher (see `on_hang`).
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from resilience_sdk import rank
from resilience_sdk.core import environ
from resilience_sdk.core.console import say
from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.forkserver_wire import Script
from resilience_sdk.launcher.worker import run_script
from resilience_sdk.postmortem.facts import LEAVE_SIGNALS
from resilience_sdk.preemption.signals import end_by

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


_ENDS_WITHIN_S = 10.0  # for one that was asked to leave: torchrun waits for it for 30 s
_WATCHED_WITHIN_S = 3.0  # a monitor starts in a few tenths of a second


class EarlySignals:
    """Keeps a signal that asks to leave back until this rank is watched, and then lets it do what it always does.

    A rank that ends before that ends unseen: nobody could tell it from one that failed. While the script runs, signals
    are the script's.
    """

    def __init__(self) -> None:
        """Take those signals that would end this process."""
        self._heard: int | None = None
        self._taken = [number for number in LEAVE_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._taken:
            signal.signal(number, self._hear)

    def let_go(self) -> None:
        """Give the signals back, once a monitor would see how this process ends; never raises."""
        with contextlib.suppress(Exception):
            rank.await_watch(_WATCHED_WITHIN_S if self._heard is None else _ENDS_WITHIN_S)
        for number in self._taken:
            if signal.getsignal(number) == self._hear:
                signal.signal(number, signal.SIG_DFL)
        if self._heard is not None:
            rank.note_early_signal(self._heard)
            end_by(self._heard)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._heard = self._heard or number


def main() -> None:
    """Run the script of this process's command line and return or raise as it does."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{_USAGE}\n")
        return
    early = EarlySignals()
    try:
        script = parse(words)
    except ConfigError as error:
        say(str(error))
        raise SystemExit(_EXIT_USAGE) from None
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the working directory, there because we were started with -m
    if environ.is_disabled(environ.environment()):
        rank.ensure_started()  # says so
    run_script(script, bootstrapped=early.let_go)


if __name__ == "__main__":
    main()
