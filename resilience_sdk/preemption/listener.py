"""One rank's side of a stop.

`check()` and its companions, on the thread that trains, and its part in the agreement.

`check()` is a plain function over one slotted object, as all of the hot path: it counts, publishes the count, and
looks at one word of the page. Everything else happens when that word is not 0.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn, Protocol

import attrs

from resilience_sdk.core.console import say_once
from resilience_sdk.core.journal import Event
from resilience_sdk.errors import Preempted
from resilience_sdk.preemption import agreement
from resilience_sdk.preemption.agreement import (
    ALONE_S,
    PATIENCE_BETWEEN_NODES_S,
    PATIENCE_S,
    TEARDOWN,
    Proposal,
    RankMove,
    StopDecision,
    rank_move,
    unpack,
)
from resilience_sdk.preemption.context import PreemptionContext, end_time, is_time
from resilience_sdk.preemption.reasons import Asker, Hindrance, notice_name
from resilience_sdk.preemption.reduce import Unmonitored
from resilience_sdk.preemption.signals import Handlers, end_by
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder import page_layout as at


class Checks:
    """The state of `check()`; `answer` is asked when `flag` is true. The training thread's.

    As it stands it is the state of a process in which nothing is recorded.
    """

    __slots__ = ("flag", "words")

    def __init__(self, words: Any = None, flag: Any = False) -> None:
        """Take a page's words, or make some that nobody else reads."""
        self.words = [0] * at.LANES_AT if words is None else words
        self.flag = flag

    def answer(self, count: int, step: int | None) -> bool:
        """Tell whether to stop at check `count`."""
        return False


def control_flag(words: Any) -> Any:
    """Return what is true while the control word is not 0; nothing that Python has is asked faster than a C integer."""
    is_memory = isinstance(words, memoryview)
    return ctypes.c_uint64.from_buffer(words, 8 * at.W_CONTROL) if is_memory else _WordFlag(words)


class _WordFlag:
    """The same for words that are no memory."""

    def __init__(self, words: Any) -> None:
        self._words = words

    def __bool__(self) -> bool:
        return bool(self._words[at.W_CONTROL])


_POLL_S = 0.001
_LOOK_S = 1.0  # counts at most for one look: a node that was suspended as a whole has not heard of the others yet
_IN_VAIN_S = 2.0  # after the time to leave was over, and nobody has left


class StepsDone(int):
    """How many steps are complete, for `check()`; a plain number is that of the step that was just made, from 0."""


def completed_at(step: int | None, shown: int | None) -> int | None:
    """Return how many steps were complete at a check that was given `step`: those that heartbeats have `shown`."""
    if shown is not None or step is None:
        return shown
    return step if isinstance(step, StepsDone) else step + 1


class Listener(Checks):
    """A rank that listens: its handlers are installed, its page takes part in the agreement."""

    __slots__ = (
        "attempt",
        "flag_changed",
        "grace_s",
        "handlers",
        "is_settled",
        "journal",
        "pages",
        "save_s",
        "side",
        "stopped_at",
        "unmonitored",
    )

    def __init__(self, side: PreemptionContext, handlers: Handlers, flag_changed: Callable[[Checks], None]) -> None:
        """Listen by `side`. `flag_changed` is told, in a check, when `flag` becomes another one."""
        super().__init__(side.words, flag=True)
        self.side = side
        self.flag_changed = flag_changed
        self.save_s: Callable[[], float] = float
        self.unmonitored: Unmonitored | None = None
        self.is_settled = False
        self.pages = side.pages
        self.journal = side.journal
        self.attempt = side.attempt
        self.grace_s = side.grace_s
        self.handlers = handlers
        self.stopped_at: int | None = None
        self.settle()

    def settle(self) -> bool:
        """Tell whether it is known who coordinates the stop, and do as that one needs. Waits for nobody."""
        if not self.is_settled and (found := self.side.has_coordinator()) is not None:
            if found:
                self.flag = control_flag(self.words)
            else:
                self.unmonitored = Unmonitored(self.side, self.handlers)  # is asked at each check
            self.is_settled = True
        return self.is_settled

    def leave_to_ranks(self, side: PreemptionContext) -> None:
        """Agree with the other ranks from the next check on, whoever was to coordinate; `side` says who cannot."""
        self.side = side
        if self.unmonitored is None:
            self.unmonitored = Unmonitored(side, self.handlers)
        self.unmonitored.deaf = side.deaf
        self.is_settled = self.flag = True
        self.flag_changed(self)

    def answer(self, count: int, step: int | None) -> bool:
        """Take part in the agreement at check `count`. Waits only at the very check that is proposed."""
        if self.stopped_at is not None:
            return True
        control = self.words[at.W_CONTROL]
        if control == TEARDOWN:
            self.handlers.act_by_default()
            return False
        if not self.is_settled:
            if not self.settle():
                return False
            self.flag_changed(self)
        if self.unmonitored is not None:
            if self.unmonitored.stops(count, self.time_left):
                self._stop(count, step)
            return self.stopped_at is not None
        proposal = unpack(control)
        if proposal is None:
            return False
        move = rank_move(count, proposal, self.words[at.W_ACKNOWLEDGED])
        if move is RankMove.GO_ON:
            return False
        self.words[at.W_ACKNOWLEDGED] = proposal.round
        if move is RankMove.ACKNOWLEDGE:
            return False
        if self._decided(proposal) is not StopDecision.COMMIT:
            return False
        self._stop(count, step, round=proposal.round)
        return True

    def _stop(self, count: int, step: int | None, **facts: int) -> None:
        """Note that this rank stops here; that it has heard a signal tells who may have sent that."""
        self.stopped_at = count
        heard = None if self.handlers.heard is None else notice_name(self.handlers.heard)
        done = completed_at(step, self.side.completed(step))
        self.journal.emit(Event.STOP_AGREED, check=count, step=done, heard=heard, **facts)
        self.side.stopping(done, heard)

    def _decided(self, proposal: Proposal) -> StopDecision:
        looked_at, waited_s, round_ = time.monotonic(), 0.0, proposal.round
        try:
            words = agreement.FileCell(self.pages, self.attempt)
            patience_s = PATIENCE_BETWEEN_NODES_S if words.shared else PATIENCE_S
            while (decision := words.decision(round_)) is None:
                now = time.monotonic()
                waited_s, looked_at = waited_s + min(now - looked_at, _LOOK_S), now
                if waited_s > ALONE_S:
                    if words.decide_alone(round_):
                        self._say_alone(waited_s)
                elif waited_s <= patience_s or words.decide(round_, StopDecision.VOID) is None:
                    time.sleep(_POLL_S)
        except (OSError, ValueError) as error:
            say_once("stop", f"the decision to stop cannot be read, this rank goes on: {error}")
            return StopDecision.VOID
        return decision

    def _say_alone(self, waited_s: float) -> None:
        why = f"nothing was heard from the other nodes for {waited_s:.0f} s"
        if say_once("alone", f"whether all nodes stop is not known, this one goes on: {why}"):
            self.journal.emit(Event.DEGRADED, what="preemption", why=why, hindrance=Hindrance.CUT_OFF.value)

    def time_left(self) -> float | None:
        """See `time_left`."""
        ends = self._asked_left()
        if (end := end_time()) is not None:
            ends.append(end - time.time())
        return max(0.0, min(ends)) if ends else None

    def is_asked(self) -> bool:
        """See `is_asked`."""
        return bool(self._asked_left()) or self.words[at.W_NOTICE] == at.NOTICE_END

    def _asked_left(self) -> list[float]:
        """Return the seconds that are left by each way in which somebody has asked."""
        now, ends = time.monotonic(), []
        asked_end = self._asked_end()
        # A request that no stop was agreed about ends nobody; what it kept for the last save is free again.
        if asked_end is not None and (self.stopped_at is not None or now < asked_end + _IN_VAIN_S):
            ends.append(asked_end - now)
        if (heard := self.handlers.heard_at) is not None:
            ends.append(heard + min(self.grace_s, self.side.signal_grace_s) - now)
        if self.unmonitored is not None and (end_s := self.unmonitored.ends_at) is not None:
            ends.append(end_s - now)
        return ends

    def _asked_end(self) -> float | None:
        """Return when the time is over (monotonic seconds) by what was asked, None when nobody has."""
        if until_ns := self.words[at.W_DEADLINE_NS]:
            return float(until_ns / 1e9)
        noted_at = self.handlers.noted_at
        if noted_at is None or self.words[at.W_NOTICE] == at.NOTICE_END:
            return None  # the scheduler's end counts as what it is
        return noted_at + self.grace_s


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
_side: PreemptionContext | None = None
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
        monitor, see `reduce`. `step` is the number of the step that was just made, counted from 0 as for
        `heartbeat(step=...)`; it is for the journal only.
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


def is_asked() -> bool:
    """Tell whether this process knows that the job was asked to leave, or that its time is nearly over. Starts nothing.

    Unlike `time_left`, which counts towards a scheduler's end from the first step on.
    """
    return isinstance(_me, Listener) and _me.is_asked()


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


def listen(side: PreemptionContext) -> None:
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


def hears() -> bool:
    """Tell whether this process hears a signal to leave now."""
    return isinstance(_me, Listener) and _me.handlers.are_in_place()


def give_back(*, all_of_them: bool = False) -> None:
    """Hear the signals of the settings alone again, or none; for an adapter that has taken over, in the main thread."""
    if isinstance(_me, Listener):
        _me.handlers.give_back(all_of_them=all_of_them)


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
            lookup.recorder()  # starts the session, which calls `listen`
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
