"""One rank's side: `check()` and its companions.

`check()` is a plain function over one slotted object, as all of the hot path: it counts, publishes the count, and
looks at one word of the page. Everything else happens when that word is not 0.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn, Protocol

import attrs

from resilience_sdk import lanes
from resilience_sdk.console import say_once
from resilience_sdk.errors import Preempted
from resilience_sdk.events import Event
from resilience_sdk.preemption.asking import Asker
from resilience_sdk.preemption.checks import Checks
from resilience_sdk.preemption.listener import Listener
from resilience_sdk.preemption.scheduler import is_time
from resilience_sdk.preemption.side import Side
from resilience_sdk.preemption.signals import Handlers, end_by
from resilience_sdk.rank_page import layout as at


class _Unstarted(Checks):
    """Before the first check, which comes here."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(flag=True)

    def answer(self, count: int, step: int | None) -> bool:
        """Start, and answer as what was started does."""
        _start()
        me = _asked
        if isinstance(me, _Unstarted):
            return False  # in a handler of a signal that came while this thread was starting
        me.words[at.W_CHECKS] = count
        return me.answer(count, step) if me.flag else False


class Check(Protocol):
    """The type of `check`."""

    def __call__(self, step: int | None = None) -> bool:
        """See `check`."""
        ...


_me: Checks = _Unstarted()  # what this process is
_asked: Checks = _me  # what `check()` asks; for a moment another one
_side: Side | None = None
_lock = threading.RLock()
_is_starting = False


def _make_check() -> tuple[Check, Callable[[Checks], None]]:
    """Return `check` and what changes whom it asks: variables of a closure are the cheapest to reach."""
    check_word = at.W_CHECKS
    words, flag, answer, count = _me.words, _me.flag, _me.answer, 0

    def check(step: int | None = None) -> bool:
        """Tell whether to stop now: True on every rank at the same call, once somebody has asked the job to leave.

        Call it once per optimizer step, equally often on all ranks, from the thread that trains. The first call
        installs handlers for `preempt_signals`. Then it costs about 0.1 us and no system call; while a stop is being
        agreed, a rank may wait up to half a second at one of its calls, if the monitor is busy. Where there is no
        monitor, see `preemption.reduce`. `step` is for the journal only.
        """
        nonlocal count
        count += 1
        words[check_word] = count
        return answer(count, step) if flag else False

    def ask(new: Checks) -> None:
        nonlocal words, flag, answer, count
        if isinstance(new, _Unstarted):
            count = 0  # a forked child; while a process starts, its checks count on, whichever thread starts it
        words, flag, answer = new.words, new.flag, new.answer

    return check, ask


check, _tell_check = _make_check()


def _ask(new: Checks) -> None:
    global _asked
    _asked = new
    _tell_check(new)


def _flag_changed(listener: Checks) -> None:
    if _asked is listener:
        _ask(listener)


def time_left() -> float | None:
    """Return the seconds until this job is ended, 0 or more; None when nobody has asked and no end is known."""
    me = _started()
    return me.time_left() if me is not None else None


def request(reason: str) -> None:
    """Ask the job to leave, from any rank and thread: all ranks stop at one of their next checks."""
    me = _started()
    if me is None:
        why = "nothing is watched or recorded in this process; call it in a rank of the job"
        say_once("request", f"preemption.request({str(reason)!r}) asks nobody: {why}")
    else:
        me.handlers.note(at.NOTICE_REQUEST)
        me.journal.emit(Event.PREEMPT_NOTICE, source="request", kind=Asker.REQUEST.value, reason=str(reason))


def exit() -> NoReturn:
    """Leave with exit code 75, which launchers and schedulers requeue; raises `Preempted`, a `SystemExit`."""
    raise Preempted


def listen(side: Side) -> None:
    """Take the session's page: from the first `check()` on, this process listens. Called by the session."""
    global _side
    _side = side


def is_heard() -> bool:
    """Tell whether this process has what it takes to agree on a stop."""
    return _side is not None


def leave_to_ranks(deaf: Sequence[int] = ()) -> None:
    """Let the ranks agree on a stop by themselves from here on, without monitors. On all ranks at the same place.

    `deaf`: ranks that cannot take part.
    """
    if _side is None:
        return
    listen(attrs.evolve(_side, has_coordinator=lambda: False, first_check=int, deaf=tuple(deaf)))
    if isinstance(_me, Listener):
        _me.leave_to_ranks(_side)


def begin(save_s: Callable[[], float] = float) -> None:
    """Listen from now on, before the first check; for a `Run`. `save_s` tells how long a save takes (any thread).

    The object whose method it is may go: a training that has ended must not keep its model for that.
    """
    me = _started()
    if me is None:
        return
    if not isinstance(save_s, MethodType):
        me.save_s = save_s
        return
    method = weakref.WeakMethod(save_s)

    def save_s_while_it_lives() -> float:
        tell = method()
        return 0.0 if tell is None else tell()

    me.save_s = save_s_while_it_lives


def take_over(behind: Mapping[int, Any], also: Sequence[int] = ()) -> None:
    """Listen in the place of a framework that has handlers of its own; `behind` has what was there before, by number.

    `also`: signals that ask to leave beside those of the settings.

    For an adapter, in the main thread: chained, such a handler would do its own idea of a stop beside ours.
    """
    me = _started()
    if me is not None:
        me.handlers.take_over(behind, also)


def give_back() -> None:
    """Hear the signals of the settings alone again; for an adapter that has taken over others, in the main thread."""
    if isinstance(_me, Listener):
        _me.handlers.give_back()


def handlers() -> Handlers | None:
    """Return the handlers of this process, once it listens."""
    return _me.handlers if isinstance(_me, Listener) else None


def look() -> None:
    """Do what must be done now and then, in the helper thread: ask who sends no signal, and end what was ignored."""
    me = _me
    if not isinstance(me, Listener) or me.stopped_at is not None:
        return
    side = me.side
    if me.handlers.noted_at is None:
        if is_time(side.began_unix, side.grace_s, me.save_s()):
            me.handlers.note(at.NOTICE_END)
        elif me.unmonitored is not None:
            me.unmonitored.look()
    number = me.handlers.overdue(me.grace_s)
    if number is not None and say_once(
        "overdue",
        f"no stop was agreed within {me.grace_s:g} s of a signal to leave: it ends this rank now; "
        "call preemption.check() more often, or raise preempt_time",
    ):
        me.journal.emit(Event.DEGRADED, what="preemption", why="no check answered the signal", signal=number)
        end_by(number)


def _started() -> Listener | None:
    """Return who listens in this process, None where nothing is recorded. Any thread."""
    if isinstance(_me, _Unstarted):
        _start()
    if isinstance(_asked, _Uninstalled):
        _asked.install()
    return _me if isinstance(_me, Listener) else None


class _Uninstalled(Checks):
    """Started by another thread than the main one, which alone may handle signals; there the next check comes here."""

    __slots__ = ("_listener",)

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener.words, flag=True)
        self._listener = listener

    def install(self) -> bool:
        """Install the handlers if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        listener = self._listener
        _ask(listener)
        listener.handlers.install()
        listener.handlers.take_wakeup(listener.side.wakeup())
        return True

    def answer(self, count: int, step: int | None) -> bool:
        """Answer as the listener does."""
        if not self.install() and self._listener.handlers.numbers:
            say_once(
                "thread",
                "preemption.check() is called outside the main thread, and only that one can handle signals; call "
                "preemption.time_left() once in the main thread",
            )
        listener = self._listener
        return listener.answer(count, step) if listener.flag else False


def _start() -> None:
    """Begin to listen, or to say no for good where nothing is recorded; another thread that does so is waited for."""
    global _me, _is_starting
    with _lock:
        if _is_starting or not isinstance(_me, _Unstarted):
            return
        _is_starting = True
        try:
            lanes.recorder()  # starts the session, which calls `listen`
            side = _side
            if side is None:
                _me = Checks()
                _ask(_me)
                return
            _me = Listener(side, Handlers(side.words, side.pages, side.attempt, side.signals), _flag_changed)
            _ask(_Uninstalled(_me))
        finally:
            _is_starting = False


def orphan() -> None:
    """Forget the parent's page and put the signals back, in a forked child."""
    global _me, _side, _lock, _is_starting
    _lock, _is_starting = threading.RLock(), False  # another thread of the parent may have been starting
    me, _me, _side = _me, _Unstarted(), None
    _ask(_me)
    if isinstance(me, Listener):
        me.handlers.become_child()


def _before_fork() -> None:
    if isinstance(_me, Listener):
        _me.handlers.hold()


def _after_fork_in_parent() -> None:
    if isinstance(_me, Listener):
        _me.handlers.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=orphan)
