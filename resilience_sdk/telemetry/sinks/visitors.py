"""Who fetches metrics, how often, and whether they have fetched the last ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

import attrs

LONGEST_STAY_S = 75.0
_UNKNOWN_INTERVAL_S = 60.0  # of one who came only once: Prometheus' own default
_LATE = 1.5  # scrapes are a little late now and then
_GONE_AFTER = 3.0  # intervals without a visit
_MOST = 64  # whose pods come and go with new addresses
_PAUSES = 4  # somebody else may have come in between, so the longest of them counts


@attrs.define
class _Visitor:
    last: float
    pauses: deque[float] = attrs.field(factory=lambda: deque(maxlen=_PAUSES))
    knows_the_end: bool = False

    @property
    def interval_s(self) -> float:
        return max(self.pauses, default=_UNKNOWN_INTERVAL_S)


class Visitors:
    """Those who come from one address count as one. Thread-safe."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._changed = threading.Condition()
        self._known: dict[str, _Visitor] = {}
        self._is_over = False
        self._here = threading.local()

    @contextlib.contextmanager
    def visit(self, address: str) -> Iterator[None]:
        """Serve a request from `address` on this thread in the block."""
        self._here.address, self._here.got_the_end = address, False
        try:
            yield
        finally:
            if self._here.got_the_end:  # only now is it written
                with self._changed:
                    if (visitor := self._known.get(address)) is not None:
                        visitor.knows_the_end = True
                    self._changed.notify_all()

    def note_request(self) -> None:
        """Take into account that the request of this thread is given the metrics of now, if it is one."""
        address = getattr(self._here, "address", None)
        if address is None:
            return
        now = time.monotonic()
        with self._changed:
            self._here.got_the_end = self._is_over
            visitor = self._known.get(address)
            if visitor is None:
                if len(self._known) >= _MOST:
                    del self._known[min(self._known, key=lambda known: self._known[known].last)]
                self._known[address] = _Visitor(now)
            else:
                visitor.pauses.append(now - visitor.last)
                visitor.last = now

    def wait_for_all(self) -> None:
        """Wait until everybody who comes regularly has been given what is true now, or has stayed away."""
        began = time.monotonic()
        with self._changed:
            self._is_over = True
            while (until := self._awaited_until(began)) > (now := time.monotonic()):
                self._changed.wait(until - now)

    def _awaited_until(self, began: float) -> float:
        """Return until when somebody is still to come who came before; `began` when nobody is."""
        awaited = [
            began + min(LONGEST_STAY_S, _LATE * visitor.interval_s + 1.0)
            for visitor in self._known.values()
            if not visitor.knows_the_end and began - visitor.last <= _GONE_AFTER * visitor.interval_s
        ]
        return max(awaited, default=began)
