"""Names the ranks without which no stop can be agreed: on the screen, and in the journal for the incident."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import attrs

from resilience_sdk import console
from resilience_sdk.events import Event
from resilience_sdk.incidents import Culprit
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.monitor.stop_nodes import StopNodes
from resilience_sdk.preemption.account import Hindered, culprit_of, hindered_by
from resilience_sdk.preemption.asking import Hindrance
from resilience_sdk.preemption.protocol import RankView

_SILENT_S = 5.0  # after which a rank without a check is named
_LATE_S = 30.0  # after which one is named that has not checked since; an optimizer step may take that long


@attrs.define
class Hindrances:
    """One attempt's. The monitor's only thread."""

    journal: Journal
    nodes: StopNodes
    _since_s: float | None = None
    _half_s: float = 0.0
    _counts: Mapping[int, int] = attrs.field(factory=dict)  # how often ranks had checked when the job was asked
    _named: set[Hindrance] = attrs.field(factory=set)

    def begin(self, left_s: float, own: Mapping[int, RankView]) -> None:
        """Note that the job was asked to leave, within `left_s` seconds; `own` are the ranks of this node."""
        if self._since_s is None:
            self._since_s, self._half_s = time.monotonic(), left_s / 2
            self._counts = {rank: view.count for rank, view in own.items()}

    def look(self, ranks: Sequence[WatchedRank], own: Mapping[int, RankView]) -> bool:
        """Tell whether every rank of the job calls `check()`; name those that do not, or not any more."""
        silent = {
            (node, rank) for node, views in self._views(own).items() for rank, view in views.items() if not view.count
        }
        everybody = sum(map(len, self._views(own).values()))
        if silent and len(silent) < everybody and self._is_time(_SILENT_S):
            ours = {rank for node, rank in silent if node == self.nodes.name}
            others = [Culprit(rank, node) for node, rank in sorted(silent) if node != self.nodes.name]
            self._name(Hindrance.NO_CHECK, self._culprits(ranks, ours), others)
        late = {rank for rank, view in own.items() if view.count and view.count == self._counts.get(rank)}
        if late and not silent and self._is_time(_LATE_S):
            self._name(Hindrance.LATE, self._culprits(ranks, late))
        return not silent

    def missing(self, ranks: Sequence[WatchedRank], unseen: Collection[int]) -> None:
        """Name ranks that have left early, or that no monitor sees."""
        if not self._is_time(_SILENT_S) or self._named & {Hindrance.ENDED, Hindrance.UNSEEN}:
            return
        ended = {watched.rank for watched in ranks if not watched.alive}
        if ended:
            self._name(Hindrance.ENDED, self._culprits(ranks, ended))
        elif unseen:  # else one of another node, which says it
            self._name(Hindrance.UNSEEN, [Culprit(rank) for rank in sorted(unseen)])

    def _is_time(self, patience_s: float) -> bool:
        return self._since_s is not None and time.monotonic() - self._since_s > min(patience_s, self._half_s)

    def _views(self, own: Mapping[int, RankView]) -> dict[str, Mapping[int, RankView]]:
        return {self.nodes.name: own, **{node.name: node.ranks for node in self.nodes.others}}

    def _culprits(self, ranks: Sequence[WatchedRank], wanted: Collection[int]) -> list[Culprit]:
        found = {watched.rank: watched for watched in ranks if watched.rank in wanted}
        return [culprit_of(found[rank].snapshot, self.nodes.name) for rank in sorted(found)]

    def _name(self, kind: Hindrance, ours: Sequence[Culprit], others: Sequence[Culprit] = ()) -> None:
        """Say it once, with those of other nodes; what is journalled is of this node, as each journals its own."""
        if kind in self._named:
            return
        self._named.add(kind)
        found: Hindered = hindered_by(kind, (*ours, *others))
        outcome = "the stop waits for it" if kind is Hindrance.LATE else "so no stop can be agreed"
        console.say(f"{found}, {outcome}; {found.cure}")
        if ours:
            self.journal.emit(
                Event.DEGRADED,
                what="preemption",
                why=str(hindered_by(kind, tuple(ours))),
                hindrance=kind.value,
                ranks=[culprit.rank for culprit in ours],
                culprits=[attrs.asdict(culprit) for culprit in ours],
            )
