"""Calls that may never return, made so that the launcher can go on without them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

_LOOK_S = 1.0  # how often a wait is looked after
_ASK_S = 1.0


def within(
    seconds: float,
    call: Callable[[], Answer],
    *,
    look: Callable[[float], None] = lambda _: None,
    name: str = "resilience-bounded",
) -> Answer:
    """Return what `call` returns, or raise what it raises; it runs in a thread of its own.

    `look` is called about once a second with the seconds that have passed; what it raises ends the wait, and so
    does what a signal handler raises. The thread is then left behind.

    Raises:
        TimeoutError: The time is over.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - for the thread that waits
            errors.append(error)
        finally:
            done.set()

    began = time.monotonic()
    threading.Thread(target=run, name=name, daemon=True).start()
    while not done.wait(min(_LOOK_S, max(0.0, seconds - (time.monotonic() - began)))):
        passed = time.monotonic() - began
        if passed >= seconds:
            raise TimeoutError(f"no answer for {seconds:.0f} s")
        look(passed)
    if errors:
        raise errors[0]
    return answers[0]


class Asked:
    """The newest answer to a question that may take long; it is asked again in a thread, about once a second."""

    def __init__(self, ask: Callable[[], int]) -> None:
        """Nothing is asked before the first `newest()`; `ask` must not raise."""
        self._ask = ask
        self._answer = 0
        self._thread: threading.Thread | None = None
        self._asked_at = float("-inf")

    def newest(self) -> int:
        """Return the last answer, 0 before there is one. Never waits."""
        idle = self._thread is None or not self._thread.is_alive()
        if idle and time.monotonic() - self._asked_at >= _ASK_S:
            self._asked_at = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="resilience-asks", daemon=True)
            self._thread.start()
        return self._answer

    def settle(self) -> None:
        """Wait for a question that is out, and forget the answer."""
        if self._thread is not None:
            self._thread.join()
        self._answer = 0

    def _run(self) -> None:
        self._answer = self._ask()
