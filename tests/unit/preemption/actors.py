"""Real ranks and real coordinators on real page files, stepped one store or load at a time by whoever holds the baton.

Each actor is a thread of which one runs at a time, until its next access to what is shared. The clock stands unless it
is moved; a rank that sleeps gives the baton back.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace

from resilience_sdk.recorder.page_writer import ControlWords

_local = threading.local()


def pause():
    """Give the baton back, where this is an actor: what follows is one atomic access."""
    actor = getattr(_local, "actor", None)
    if actor is not None:
        actor.give_back()


class Abandoned(BaseException):
    """Ends the thread of an actor that has died."""


class Actor:
    """Runs one function in a thread, from one access to the next."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._is_dead = False
        self.result: object = None
        self.error: BaseException | None = None
        self.is_done = self.waits = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self):
        """Let it run until its next access; raises what it raised."""
        assert not self.is_done
        self.waits = False
        self._go.release()
        assert self._back.acquire(timeout=20)
        if self.error is not None:
            raise self.error

    def die(self):
        """End it where it stands: nothing of what it had in mind happens any more."""
        if not self.is_done:
            self._is_dead = True
            self._go.release()
        self._thread.join(20)

    def give_back(self):
        """Wait for the baton; in the actor's own thread."""
        self._back.release()
        self._go.acquire()
        if self._is_dead:
            raise Abandoned

    def _run(self):
        _local.actor = self
        self._go.acquire()
        try:
            if not self._is_dead:
                self.result = self._work()
        except Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._back.release()


class Hands:
    """Stands in for the module `time`: moved by the test, and by nothing else."""

    def __init__(self):
        self.now = 1000.0
        self.module = SimpleNamespace(
            monotonic=lambda: self.now,
            monotonic_ns=lambda: int(self.now * 1e9),
            time=lambda: self.now,
            sleep=self._sleep,
        )

    def _sleep(self, _):
        _local.actor.waits = True
        pause()


class StepwiseWords:
    """The words of a rank's page, as the rank reaches them."""

    def __init__(self, words):
        self._words = words

    def __getitem__(self, index):
        pause()
        return self._words[index]

    def __setitem__(self, index, value):
        pause()
        self._words[index] = value


class StepwiseControl(ControlWords):
    """The page as the coordinator reaches it."""

    @property
    def checks(self):
        pause()
        return super().checks

    @property
    def acknowledged(self):
        pause()
        return super().acknowledged

    def propose(self, control):
        pause()
        super().propose(control)
