"""What the ladder works on and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from resilience_sdk.hang.flight import FlightRecord
from resilience_sdk.hang.states import RankState
from resilience_sdk.incidents.record import Evidence
from resilience_sdk.incidents.steps import step_words

BUSY_SHARE = 0.5  # of a core


@attrs.frozen
class CulpritFinding:
    """Who holds the job up. `culprits` may be empty: the network, a program's own order, or "cannot tell"."""

    culprits: tuple[int, ...]
    victims: tuple[int, ...]
    category: str
    cause: str
    confidence: float
    evidence: tuple[Evidence, ...]

    @property
    def conclusive(self) -> bool:
        """Whether a cause was found, be it a rank or not."""
        return self.cause != "unknown" or bool(self.culprits)


@attrs.frozen
class Scene:
    """All evidence of one hang."""

    states: Mapping[int, RankState]
    stacks: Mapping[int, Sequence[str]]
    flight: Mapping[int, FlightRecord | None]

    @classmethod
    def of(
        cls,
        states: Sequence[RankState],
        stacks: Mapping[int, Sequence[str]],
        flight: Mapping[int, FlightRecord | None],
    ) -> Scene:
        """Collect the evidence; of ranks that are not among the states, there is none."""
        known = {state.rank: state for state in sorted(states, key=lambda state: state.rank)}
        return cls(
            states=known,
            stacks={rank: frames for rank, frames in stacks.items() if rank in known and frames},
            flight={rank: record for rank, record in flight.items() if rank in known},
        )

    @property
    def live(self) -> dict[int, RankState]:
        """Ranks that still run their program and are in its loop, as far as is known."""
        return {
            rank: state
            for rank, state in self.states.items()
            if state.running and state.silent_s is None and not (state.snapshot is not None and state.snapshot.done)
        }

    @property
    def unseen(self) -> int:
        """How many ranks of the world nothing is known of."""
        world = max((s.snapshot.world_size for s in self.states.values() if s.snapshot), default=0)
        return max(0, world - len(self.states))

    def victims_of(self, culprits: Sequence[int]) -> tuple[int, ...]:
        """Return the running ranks that are not culprits."""
        return tuple(rank for rank in self.live if rank not in culprits)

    def finding(
        self,
        culprits: Sequence[int],
        verdict: tuple[str, str],
        confidence: float,
        *evidence: Evidence,
    ) -> CulpritFinding:
        """Return a finding with everybody else who runs as victims."""
        named = tuple(sorted(culprits))
        category, cause = verdict
        return CulpritFinding(named, self.victims_of(named), category, cause, confidence, tuple(evidence))

    def cause_of(self, culprits: Sequence[int]) -> tuple[str, str]:
        """Return category and cause of live ranks that did not come: busy elsewhere, or standing still."""
        shares = [self.states[rank].cpu_share for rank in culprits]
        busy = bool(shares) and all(share is not None and share >= BUSY_SHARE for share in shares)
        return ("hang", "hang_rank_late" if busy else "hang_rank_stopped")

    def where(self, rank: int) -> str:
        """Return where a rank is, for a sentence: `rank 1 (node a) at step 40 in section fwd`."""
        state = self.states[rank]
        text = f"rank {rank}" + (f" ({state.node})" if state.node else "")
        if state.snapshot is not None and state.snapshot.step is not None:
            text += f" at {step_words(state.snapshot.step, state.snapshot.step_is_global)}"
        text += f" in section {state.section}" if state.section else " outside any section"
        frames = self.stacks.get(rank)
        return text + (f", at {frames[0]}" if frames else "")
