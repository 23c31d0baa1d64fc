"""One rank's side: `check()` and its companions.

`check()` is a plain function over one slotted object, as all of the hot path: it counts, publishes the count, and
reads one word of the page. Everything else happens when that word is not 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import attrs

from resilience_sdk import lanes
from resilience_sdk.console import say_once
from resilience_sdk.errors import Preempted
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.preemption import cell
from resilience_sdk.preemption.protocol import TEARDOWN, Decision, Proposal, RankMove, rank_move, unpack
from resilience_sdk.preemption.scheduler import end_time
from resilience_sdk.preemption.signals import Handlers, end_by
from resilience_sdk.rank_page import layout as at

_PATIENCE_S = 0.5  # at the proposed check, for the decision of a coordinator that is busy
_POLL_S = 0.001


class _Checks:
    """The state of `check()`; `answer` is asked when the control word is not 0. The training thread's."""

    __slots__ = ("words",)

    def __init__(self, words: Any) -> None:
        self.words = words

    def answer(self, count: int, step: int | None) -> bool:
        """Say no: nothing is recorded in this process."""
        return False


class _Unstarted(_Checks):
    """Before the first check: the control word of its make-believe page is set, so that the first one comes here."""

    __slots__ = ()

    def answer(self, count: int, step: int | None) -> bool:
        """Start, and answer as what was started does."""
        return check(step) if _start() else False


class Listener(_Checks):
    """A rank that listens: its handlers are installed, its page takes part in the agreement."""

    __slots__ = ("attempt", "grace_s", "handlers", "journal", "pages", "stopped_at")

    def __init__(self, side: Side, handlers: Handlers) -> None:
        super().__init__(side.words)
        self.pages = side.pages
        self.journal = side.journal
        self.attempt = side.attempt
        self.grace_s = side.grace_s
        self.handlers = handlers
        self.stopped_at: int | None = None

    def answer(self, count: int, step: int | None) -> bool:
        """Take part in the agreement at check `count`. Waits only at the very check that is proposed."""
        if self.stopped_at is not None:
            return True
        control = self.words[at.W_CONTROL]
        if control == TEARDOWN:
            self.handlers.act_by_default()
            return False
        proposal = unpack(control)
        if proposal is None:
            return False
        move = rank_move(count, proposal, self.words[at.W_ACKNOWLEDGED])
        if move is RankMove.GO_ON:
            return False
        self.words[at.W_ACKNOWLEDGED] = proposal.round
        if move is RankMove.ACKNOWLEDGE:
            return False
        if self._decided(proposal) is not Decision.COMMIT:
            return False
        self.stopped_at = count
        self.journal.emit(Event.STOP_AGREED, check=count, step=step, round=proposal.round)
        return True

    def _decided(self, proposal: Proposal) -> Decision:
        deadline = time.monotonic() + _PATIENCE_S
        try:
            while (decision := cell.read_decision(self.pages, self.attempt, proposal.round)) is None:
                if time.monotonic() > deadline:
                    return cell.decide(self.pages, self.attempt, proposal.round, Decision.VOID)
                time.sleep(_POLL_S)
        except (OSError, ValueError) as error:
            say_once("stop", f"the decision to stop cannot be read, this rank goes on: {error}")
            return Decision.VOID
        return decision

    def time_left(self) -> float | None:
        """See `time_left`."""
        ends = []
        if until_ns := self.words[at.W_DEADLINE_NS]:
            ends.append((until_ns - time.monotonic_ns()) / 1e9)
        elif (noted := self.handlers.noted_at) is not None:
            ends.append(noted + self.grace_s - time.monotonic())
        if (end := end_time()) is not None:
            ends.append(end - time.time())
        return max(0.0, min(ends)) if ends else None


class Check(Protocol):
    """The type of `check`."""

    def __call__(self, step: int | None = None) -> bool:
        """See `check`."""
        ...


_me: _Checks = _Unstarted([1] * at.LANES_AT)
_side: Side | None = None
_is_starting = False


def _make_check() -> tuple[Check, Callable[[_Checks], None]]:
    """Return `check` and what changes whom it asks: variables of a closure are the cheapest to reach."""
    check_word, control_word = at.W_CHECKS, at.W_CONTROL
    words, answer, count = _me.words, _me.answer, 0

    def check(step: int | None = None) -> bool:
        """Tell whether to stop now: True on every rank at the same call, once somebody has asked the job to leave.

        Call it once per optimizer step, equally often on all ranks, from the thread that trains. The first call
        installs handlers for `preempt_signals`. Then it costs about 0.1 us and no system call; while a stop is being
        agreed, a rank may wait up to half a second at one of its calls, if the monitor is busy. `step` is for the
        journal only.
        """
        nonlocal count
        count += 1
        words[check_word] = count
        return answer(count, step) if words[control_word] else False

    def ask(new: _Checks) -> None:
        nonlocal words, answer, count
        words, answer, count = new.words, new.answer, 0

    return check, ask


check, _ask = _make_check()


def time_left() -> float | None:
    """Return the seconds until this job is ended, 0 or more; None when nobody has asked and no end is known."""
    me = _me
    if isinstance(me, _Unstarted) and _start():
        me = _me
    return me.time_left() if isinstance(me, Listener) else None


def request(reason: str) -> None:
    """Ask the job to leave, from any rank and thread: all ranks stop at one of their next checks."""
    if isinstance(_me, _Unstarted):
        _start()
    me = _me
    if isinstance(me, Listener):
        me.handlers.note(at.NOTICE_REQUEST)
        me.journal.emit(Event.PREEMPT_NOTICE, source="request", reason=str(reason))


def exit() -> NoReturn:
    """Leave with exit code 75, which launchers and schedulers requeue; raises `Preempted`, a `SystemExit`."""
    raise Preempted


@attrs.frozen
class Side:
    """What the session gives: the page's words, where decisions are, and the settings."""

    words: Any
    pages: Path
    journal: Journal
    attempt: int
    signals: tuple[int, ...]
    grace_s: float
    wakeup: int
    """A descriptor that the helper thread reads."""


def listen(side: Side) -> None:
    """Take the session's page: from the first `check()` on, this process listens. Called by the session."""
    global _side
    _side = side


def begin() -> None:
    """Listen from now on, before the first check; for a `Run`."""
    if isinstance(_me, _Unstarted):
        _start()


def handlers() -> Handlers | None:
    """Return the handlers of this process, once it listens."""
    return _me.handlers if isinstance(_me, Listener) else None


def end_if_ignored() -> None:
    """Let a signal end this process after all, if no check has answered it within the grace. Any thread."""
    me = _me
    if not isinstance(me, Listener) or me.stopped_at is not None:
        return
    number = me.handlers.overdue(me.grace_s)
    if number is not None and say_once(
        "overdue",
        f"no stop was agreed within {me.grace_s:g} s of a signal to leave: it ends this rank now; "
        "call preemption.check() more often, or raise preempt_time",
    ):
        me.journal.emit(Event.DEGRADED, what="preemption", why="no check answered the signal", signal=number)
        end_by(number)


def _start() -> bool:
    """Begin to listen, or to say no for good where nothing is recorded; False while that goes on already."""
    global _me, _is_starting
    if _is_starting:
        return False
    _is_starting = True
    try:
        recorder = lanes.recorder()
        if recorder is None or (side := _side) is None:
            _me = _Checks([0] * at.LANES_AT)
            _ask(_me)
            return True
        handlers = Handlers(side.words, side.pages, side.attempt, side.signals)
        _me = Listener(side, handlers)
        _ask(_me)
        handlers.install()
        handlers.take_wakeup(side.wakeup)
        return True
    finally:
        _is_starting = False


def orphan() -> None:
    """Forget the parent's page and put the signals back, in a forked child."""
    global _me, _side
    me, _me, _side = _me, _Unstarted([1] * at.LANES_AT), None
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
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
