"""Telling of a stall: a line and an event when nothing comes on, again while it lasts, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resilience_sdk.core import console
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.goodput.step_time import is_stop
from resilience_sdk.hang.culprit import CulpritFinding, find_culprits
from resilience_sdk.hang.detect import Judgement
from resilience_sdk.hang.notices import StallNotices, innermost_of_user, notice_text
from resilience_sdk.hang.saves import STALL, stalls_in_save
from resilience_sdk.hang.timers import HangRules, RankState, wait_granted_s
from resilience_sdk.monitor.evidence import CloseLook
from resilience_sdk.monitor.pending_exceptions import blame_exceptions

if TYPE_CHECKING:
    from resilience_sdk.monitor.nodes import Nodes
    from resilience_sdk.monitor.ranks import WatchedRank
    from resilience_sdk.monitor.stragglers import StepTimeWatch

_MAX_FRAMES = 32


class StallTeller:
    """Tells of the stalls of one job, on the node of the first rank that is waited for. The monitor's only thread."""

    def __init__(self, stuck_after: float, journal: Journal, nodes: Nodes, step_times: StepTimeWatch) -> None:
        """Nothing is told yet."""
        self._rules = HangRules(stuck_after)
        self._journal = journal
        self._nodes = nodes
        self._step_times = step_times
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._notices = StallNotices(self._rules.stuck_after)

    @property
    def is_open(self) -> bool:
        """Whether a stall was told and has not ended."""
        return self._notices.is_open

    def went_on(self, states: Sequence[RankState], for_s: float) -> bool:
        """Tell whether the open stall has ended, because the ranks that were named have come on; it is closed then."""
        return self._notices.went_on(states, for_s)

    def note_stop(self, judgement: Judgement, states: Sequence[RankState], for_s: float) -> None:
        """Keep a stop out of what steps take, on each node by itself: one node alone tells of the stall."""
        named = [state for state in states if state.rank in judgement.waited_for]
        if judgement.kind not in ("held", "quiet") and any(
            is_stop(state.activity.kind.value, state.section) for state in named if state.activity is not None
        ):
            self._step_times.note_stop(for_s)

    def tell(
        self,
        judgement: Judgement,
        states: Sequence[RankState],
        look: CloseLook,
        for_s: float,
        usual_s: float,
        storage: Mapping[int, str],
        ranks: Sequence[WatchedRank],
    ) -> None:
        """Tell that nothing comes on, where it is time; `storage`: into what a rank that stands in a save saves."""
        named = [state for state in states if state.rank in judgement.waited_for]
        is_ours = bool(named) and named[0].now_ns is None
        if not is_ours or not self._notices.due(judgement, states, for_s, usual_s):
            return
        frames, flight = self._nodes.evidence(states, look)
        now = time.time()
        text = notice_text(judgement, states, frames, flight, for_s, now=now, storage=storage)
        self._journal.emit(
            Event.STALL,
            since=now - for_s,
            for_s=for_s,
            ranks=[
                {
                    **_stalled_rank(state, frames.get(state.rank, ()), storage.get(state.rank)),
                    "wait_ends": self._wait_ends(state, now),
                }
                for state in named
            ],
            waiting=[s.rank for s in states if s.running and s.rank not in judgement.waited_for],
            verdict_in_s=judgement.due.in_s if judgement.due is not None and judgement.due.in_s < 1e9 else None,
            rule=judgement.due.rule if judgement.due is not None else judgement.detail,
            proof=_proof(blame_exceptions(find_culprits(states, frames, flight, on_cuda=False), ranks)),
            text=text,
        )
        console.say(text)

    def _wait_ends(self, state: RankState, now: float) -> float | None:
        """Return when the wait of a rank ends by itself, where it is granted that; Unix seconds."""
        activity = state.activity
        if activity is None or activity.ends_in_s is None or wait_granted_s(activity, self._rules) is None:
            return None
        return now + activity.ends_in_s

    def end(self, why: str) -> None:
        """Close the notice that is open, if one is."""
        if why != "went on" and not self._notices.is_open:
            return
        after_s = self._notices.lasted_s
        self._notices.close()
        self._journal.emit(Event.STALL_END, after_s=after_s, why=why)
        if why == "went on":
            console.say(f"went on after {after_s:.0f} s")


def _proof(finding: CulpritFinding) -> dict[str, Any] | None:
    """Return what the ranks' records prove whatever comes next: the library may end them before any verdict does."""
    if not finding.proves_mismatch:
        return None
    return {
        "category": finding.category,
        "cause": finding.cause,
        "confidence": finding.confidence,
        "culprits": list(finding.culprits),
        "evidence": [{"source": one.source, "text": one.text} for one in finding.evidence],
    }


def _stalled_rank(state: RankState, frames: Sequence[str], storage: str | None) -> dict[str, Any]:
    """Return what is journalled of a rank that is waited for."""
    snapshot, activity = state.snapshot, state.activity
    return {
        "rank": state.rank,
        "node": state.node,
        "step": snapshot.step if snapshot is not None else None,
        "step_is_global": snapshot is not None and snapshot.step_is_global,
        "section": state.section,
        "activity": activity.kind.value if activity is not None else "unknown",
        "still_s": activity.still_s if activity is not None else 0.0,
        "cause": STALL if stalls_in_save(state, frames) else None,
        "storage": storage,
        "detail": activity.detail if activity is not None else "",
        "frame": innermost_of_user(frames),
        "stack": list(frames[:_MAX_FRAMES]),
    }
