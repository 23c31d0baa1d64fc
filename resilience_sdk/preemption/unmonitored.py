"""One rank's part where no monitor coordinates the stop: what a monitor would say and journal, it does itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from resilience_sdk.console import say_once
from resilience_sdk.events import Event
from resilience_sdk.preemption import reduce_group
from resilience_sdk.preemption.asking import Hindrance, asker, notice_name
from resilience_sdk.preemption.reduce import Reduction
from resilience_sdk.preemption.side import Side, is_request
from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.rank_page import layout as at

_MOST_PATIENCE_S = 30.0  # for a rank that is late


class Unmonitored:
    """Notices from wherever they come, and the agreement by `preemption.reduce`."""

    __slots__ = ("_handlers", "_is_told", "_reduction", "_side", "deaf")

    def __init__(self, side: Side, handlers: Handlers) -> None:
        self._side = side
        self.deaf = side.deaf
        self._handlers = handlers
        self._is_told = False
        self._reduction = Reduction(
            lambda: reduce_group.connect(side.attempt),
            is_alone=side.is_alone,
            # A stop that comes when the time is over helps nobody.
            patience_s=max(1.0, min(_MOST_PATIENCE_S, side.grace_s / 2)),
            clock=time.monotonic,
            give_up=self._give_up,
            first=side.first_check,
        )

    @property
    def ends_at(self) -> float | None:
        """When the time is over (monotonic seconds), as far as another rank knew at the stop."""
        return self._reduction.ends_at

    def look(self) -> None:
        """Look for a file that asks, and for a monitor that was asked; in the helper thread.

        A monitor hears the cloud, and may ask by itself; it has journalled that, and has told the ranks their time.
        """
        if self._side.words[at.W_DEADLINE_NS]:
            self._handlers.note(at.NOTICE_REQUEST)
        if is_request(self._side.request_file, self._side.began_unix):
            self._handlers.note(at.NOTICE_FILE)

    def stops(self, count: int, time_left: Callable[[], float | None]) -> bool:
        """Tell whether all ranks stop at check `count`; the thread that trains."""
        is_asked = self._handlers.noted_at is not None
        if is_asked and not self._is_told:
            self._is_told = True
            number = self._side.words[at.W_NOTICE]
            if number != at.NOTICE_REQUEST:  # which is in the journal with its reason
                kind = asker(number).value
                self._side.journal.emit(Event.PREEMPT_NOTICE, source=notice_name(number), kind=kind)
        if self.deaf:  # who began an all_reduce would wait for them
            if is_asked:
                self._give_up(
                    f"{_named(self.deaf)} cannot be recorded, and hears of no stop", Hindrance.UNSEEN, self.deaf
                )
            return False
        return self._reduction.stops(count, is_asked, time_left)

    def _give_up(self, why: str, hindrance: Hindrance, ranks: Sequence[int]) -> None:
        if say_once("reduce", f"no stop can be agreed from here on: {why}"):
            whom = [{"rank": rank} for rank in ranks]
            self._side.journal.emit(
                Event.DEGRADED, what="preemption", why=why, hindrance=hindrance.value, culprits=whom
            )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
