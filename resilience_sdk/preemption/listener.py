"""A rank that listens: it takes part in the agreement on a stop, and knows how long it has."""

from __future__ import annotations

import time
from collections.abc import Callable

from resilience_sdk.console import say_once
from resilience_sdk.events import Event
from resilience_sdk.preemption import cell
from resilience_sdk.preemption.asking import Hindrance, notice_name
from resilience_sdk.preemption.checks import Checks, control_flag
from resilience_sdk.preemption.protocol import (
    ALONE_S,
    PATIENCE_BETWEEN_NODES_S,
    PATIENCE_S,
    TEARDOWN,
    Decision,
    Proposal,
    RankMove,
    rank_move,
    unpack,
)
from resilience_sdk.preemption.scheduler import end_time
from resilience_sdk.preemption.side import Side
from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.preemption.unmonitored import Unmonitored
from resilience_sdk.rank_page import layout as at

_POLL_S = 0.001
_LOOK_S = 1.0  # counts at most for one look: a node that was suspended as a whole has not heard of the others yet
_IN_VAIN_S = 2.0  # after the time to leave was over, and nobody has left


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

    def __init__(self, side: Side, handlers: Handlers, flag_changed: Callable[[Checks], None]) -> None:
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

    def leave_to_ranks(self, side: Side) -> None:
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
        if self._decided(proposal) is not Decision.COMMIT:
            return False
        self._stop(count, step, round=proposal.round)
        return True

    def _stop(self, count: int, step: int | None, **facts: int) -> None:
        """Note that this rank stops here; that it has heard a signal tells who may have sent that."""
        self.stopped_at = count
        heard = None if self.handlers.heard is None else notice_name(self.handlers.heard)
        self.journal.emit(Event.STOP_AGREED, check=count, step=step, heard=heard, **facts)
        self.side.stopping(step, heard)

    def _decided(self, proposal: Proposal) -> Decision:
        looked_at, waited_s, round_ = time.monotonic(), 0.0, proposal.round
        try:
            words = cell.Words(self.pages, self.attempt)
            patience_s = PATIENCE_BETWEEN_NODES_S if words.shared else PATIENCE_S
            while (decision := words.decision(round_)) is None:
                now = time.monotonic()
                waited_s, looked_at = waited_s + min(now - looked_at, _LOOK_S), now
                if waited_s > ALONE_S:
                    if words.decide_alone(round_):
                        self._say_alone(waited_s)
                elif waited_s <= patience_s or words.decide(round_, Decision.VOID) is None:
                    time.sleep(_POLL_S)
        except (OSError, ValueError) as error:
            say_once("stop", f"the decision to stop cannot be read, this rank goes on: {error}")
            return Decision.VOID
        return decision

    def _say_alone(self, waited_s: float) -> None:
        why = f"nothing was heard from the other nodes for {waited_s:.0f} s"
        if say_once("alone", f"whether all nodes stop is not known, this one goes on: {why}"):
            self.journal.emit(Event.DEGRADED, what="preemption", why=why, hindrance=Hindrance.CUT_OFF.value)

    def time_left(self) -> float | None:
        """See `time_left`."""
        now, ends = time.monotonic(), []
        asked_end = self._asked_end()
        # A request that no stop was agreed about ends nobody; what it kept for the last save is free again.
        if asked_end is not None and (self.stopped_at is not None or now < asked_end + _IN_VAIN_S):
            ends.append(asked_end - now)
        if (heard := self.handlers.heard_at) is not None:
            ends.append(heard + min(self.grace_s, self.side.signal_grace_s) - now)
        if self.unmonitored is not None and (end_s := self.unmonitored.ends_at) is not None:
            ends.append(end_s - now)
        if (end := end_time()) is not None:
            ends.append(end - time.time())
        return max(0.0, min(ends)) if ends else None

    def _asked_end(self) -> float | None:
        """Return when the time is over (monotonic seconds) by what was asked, None when nobody has."""
        if until_ns := self.words[at.W_DEADLINE_NS]:
            return float(until_ns / 1e9)
        noted_at = self.handlers.noted_at
        if noted_at is None or self.words[at.W_NOTICE] == at.NOTICE_END:
            return None  # the scheduler's end counts as what it is
        return noted_at + self.grace_s
