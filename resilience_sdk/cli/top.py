"""`resilience top`: a run while it runs, its worst ranks first, on a screen that is drawn anew every second.

Without a terminal, without rich, or with `--once` it is one look as plain text. It reads what the monitor reads and
writes nothing; what it costs is told in docs/top.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from resilience_sdk.cli import top_screen
from resilience_sdk.cli.common import open_run_dir, print_json, print_lines, reading_parser
from resilience_sdk.cli.top_screen import Sheet
from resilience_sdk.core import environ
from resilience_sdk.core.console import hide_progress, say
from resilience_sdk.core.run_directory import DEFAULT_ROOT, newest_run_dir
from resilience_sdk.errors import RunDirectoryError
from resilience_sdk.report.live_view import MOST_ROWS, PAGE, SORTS, LiveView
from resilience_sdk.report.run_watch import RunWatch

_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 0.2, 3600.0
_SAMPLE_S = 1.0  # a rank that stands still is looked at so often, however seldom the screen is drawn
_LOOKS = 4  # of a single snapshot in which somebody stands still: what it does shows in what changes meanwhile
_SHARE = 0.02  # of a core: a look at thousands of ranks takes its time, and is taken less often
_PAGE_ROWS = 10
_AWAIT_S = 0.5
_ENDED = 128  # and the number of a signal: the exit code that a shell tells


def main(argv: Sequence[str]) -> int:
    """Show the run until `q`, Ctrl-C or its end, and return 0; raises RunDirectoryError for what cannot be read."""
    options = _parser().parse_args(argv)
    is_live = not (options.json or options.once) and _has_terminal() and _has_rich()
    watch = _begun(options.run_dir) if is_live else RunWatch(open_run_dir(options.run_dir))
    try:
        if options.json:
            print_json(_snapshot(watch, options.sort).to_json())
        elif is_live:
            _Top(watch, options.interval, options.sort).run()
        else:
            _print(_snapshot(watch, options.sort))
    finally:
        watch.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = reading_parser("top", "Show a run while it runs: its ranks, the worst first, goodput, what happened last.")
    parser.add_argument("--once", action="store_true", help="print one look as plain text, as without a terminal")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between two looks (default: 1)"
    )
    parser.add_argument("--sort", choices=SORTS, default=SORTS[0], help="order of the ranks (default: %(default)s)")
    return parser


def _begun(named: str | None) -> RunWatch:
    """Return the run that was named, else the newest, once one has begun in it; raises RunDirectoryError."""
    is_said = False
    while True:
        try:
            watch = RunWatch(open_run_dir(named))
            if watch.look().state != "empty":
                return watch
            watch.close()
        except RunDirectoryError:
            if not _is_to_come(named):
                raise
        if not is_said:
            is_said = True
            path = named or environ.environment().get(environ.RUN_DIR)
            place = os.path.abspath(os.path.expanduser(path)) if path else f"a run in {os.path.abspath(DEFAULT_ROOT)}"
            hide_progress()
            say(f"waiting for {place} ...; Ctrl-C ends", wrap=False)
        time.sleep(_AWAIT_S)


def _is_to_come(named: str | None) -> bool:
    """Tell whether what is no run directory may become one: nothing is there yet, or a directory without content."""
    try:
        return not os.listdir(newest_run_dir() if named is None else named)
    except (FileNotFoundError, RunDirectoryError):
        return True
    except OSError:
        return False


def _interval(text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = float("nan")
    if not _LEAST_INTERVAL_S <= seconds <= _MOST_INTERVAL_S:
        expected = f"{_LEAST_INTERVAL_S:g} to {_MOST_INTERVAL_S:g} seconds"
        raise argparse.ArgumentTypeError(f"expected {expected}, not {text!r}")
    return seconds


def _has_terminal() -> bool:
    """Tell whether there is a screen to draw on and a keyboard to listen to."""
    is_dumb = environ.environment().get("TERM", "dumb") in ("dumb", "unknown", "")
    return not is_dumb and sys.stdout.isatty() and sys.stdin.isatty()


def _has_rich() -> bool:
    """Tell whether rich can be loaded; where it cannot, one line says how to get it."""
    try:
        import rich.live  # noqa: F401
    except ImportError:
        say("one look only; for a screen that is drawn anew each second: pip install 'resilience-sdk[top]'", wrap=False)
        return False
    return True


def _is_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def _snapshot(watch: RunWatch, sort: str) -> LiveView:
    """Return one view; where a rank stands still, after looking at it for some seconds."""
    view = watch.look(sort=sort)
    for _ in range(_LOOKS - 1):
        if not any(row.activity == "unknown" and row.seen == PAGE for row in view.rows):
            break
        time.sleep(_SAMPLE_S)
        view = watch.look(sort=sort)
    return view


def _print(view: LiveView) -> None:
    sheet = Sheet(shutil.get_terminal_size((80, 24)).columns, is_unicode=_is_unicode())
    print_lines([top_screen.plain(line) for line in top_screen.lines(view, sheet)])


class _Top:
    """The screen and the keyboard."""

    def __init__(self, watch: RunWatch, interval_s: float, sort: str) -> None:
        self._watch = watch
        self._interval_s = interval_s
        self._sort = sort
        self._first = 0
        self._took_s: float | None = None

    def run(self) -> None:
        """Draw until somebody leaves or the run is over; what it came to stands on the terminal then."""
        view = self._look()
        hide_progress()
        if view.is_running:
            with _Terminal() as terminal:
                while view.is_running:
                    terminal.draw(view, self._keys())
                    if not self._wait(terminal):
                        return
                    view = self._look()
        _print(view)

    def _look(self) -> LiveView:
        began_s = time.process_time()
        view = self._watch.look(sort=self._sort, first=self._first, most=MOST_ROWS)
        # The first one reads the whole journal, which happens once.
        self._took_s = 0.0 if self._took_s is None else time.process_time() - began_s
        self._first = view.first
        return view

    def _keys(self) -> str:
        return f"q quit   s sort: {self._sort}   j/k, arrows: further down, up"

    def _wait(self, terminal: _Terminal) -> bool:
        """Wait for the next look, or a key that asks for one now; tell whether to go on."""
        until = time.monotonic() + max(self._interval_s, (self._took_s or 0.0) / _SHARE)
        while (left_s := until - time.monotonic()) > 0:
            key = terminal.key(min(left_s, _SAMPLE_S))
            if key in ("q", "Q", "end"):
                return False
            if key == "s":
                self._sort, self._first = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)], 0
            elif key in _MOVES:
                self._first = max(0, self._first + _MOVES[key])
            elif key is None:
                if left_s > _SAMPLE_S:
                    self._watch.sample()
                continue
            return True
        return True


_MOVES = {"j": 1, "\x1b[B": 1, "\x1bOB": 1, "k": -1, "\x1b[A": -1, "\x1bOA": -1}
_MOVES |= {"\x1b[6~": _PAGE_ROWS, " ": _PAGE_ROWS, "\x1b[5~": -_PAGE_ROWS, "g": -(1 << 30)}


class _Terminal:
    """The terminal while the screen is ours: another page, no echo, keys one by one; as it was before, at the end.

    That holds for every way out: an exception, Ctrl-C, SIGTERM, and Ctrl-Z with the return from it.
    """

    def __init__(self) -> None:
        from rich.console import Console

        # What a job says is no markup, and nothing in it is to be coloured.
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
        self._is_unicode = _is_unicode()
        self._live: Any = None
        self._modes: list[Any] = []
        self._asked: list[int] = []
        self._before: dict[int, Any] = {}
        self._bell = (-1, -1)

    def __enter__(self) -> _Terminal:
        self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._bell[1], warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH):
            self._before[number] = signal.signal(number, lambda number, _: self._asked.append(number))
        self._take()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._give_back()
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            for fd in self._bell:
                os.close(fd)

    def draw(self, view: LiveView, keys: str) -> None:
        """Draw a view in the size that the terminal has now, with `keys` below it."""
        from rich.text import Text

        width, height = self._console.size
        sheet = Sheet(width, height, self._is_unicode, keys)
        drawn = [Text.assemble(*line, end="") for line in top_screen.lines(view, sheet)]
        self._live.update(Text("\n", no_wrap=True, overflow="crop", end="").join(drawn), refresh=True)

    def key(self, timeout_s: float) -> str | None:
        """Return the next key, None when there was none; `end` where the keyboard is gone."""
        ready, _, _ = select.select([0, self._bell[0]], [], [], timeout_s)
        if self._bell[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell[0], 512)
        asked, self._asked[:] = list(self._asked), []
        for number in asked:
            if number in (signal.SIGTERM, signal.SIGHUP):
                raise SystemExit(_ENDED + number)
            if number == signal.SIGTSTP:
                self._pause()
        if asked:
            return "drawn anew"
        if 0 in ready:
            data = os.read(0, 64)
            return data.decode(errors="replace") if data else "end"
        return None

    def _take(self) -> None:
        import termios
        import tty

        from rich.live import Live

        self._modes = termios.tcgetattr(0)
        tty.setcbreak(0)
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def _give_back(self) -> None:
        import termios

        try:
            if self._live is not None:
                self._live.stop()
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, self._modes)

    def _pause(self) -> None:
        """Stop as Ctrl-Z asks, with the terminal as it was, and take it again when somebody goes on."""
        self._give_back()
        ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, ours)
        self._take()
