"""Goodput as metrics: the ledger of this node, with counters that never become less."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from resilience_sdk.goodput.ledger import Ledger, RunPhase
from resilience_sdk.goodput.summary import ettr
from resilience_sdk.telemetry.metrics import FAMILIES, Sample


@attrs.define
class GoodputMetrics:
    """The account of one run on one node. Not thread-safe.

    Of each node by itself: who restarts waits for all nodes, so they hardly differ, but what was lost is journalled by
    the node of rank 0 alone.
    """

    ledger: Ledger = attrs.field(factory=Ledger)
    _shown: dict[str, float] = attrs.field(factory=dict)

    def samples(self, now: float | None) -> Iterator[Sample]:
        """Return the values at `now`, as the ledger's `when` told it; None where the job is not running.

        What is counted never becomes less, though an event may come later than the moment that it tells of.
        """
        reading = self.ledger.read(now)
        for phase in RunPhase:
            yield Sample(FAMILIES["run.time"], (phase.value,), self._at_least(phase.value, reading.phases[phase]))
        yield Sample(FAMILIES["run.lost_time"], (), self._at_least("lost", reading.lost_s))
        if (ratio := ettr(reading.buckets)) is not None:
            yield Sample(FAMILIES["run.ettr"], (), ratio)

    def _at_least(self, name: str, value: float) -> float:
        self._shown[name] = max(value, self._shown.get(name, 0.0))
        return self._shown[name]
