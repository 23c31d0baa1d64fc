"""Who is to blame for a hang: the culprit, not its victims.

A ladder of evidence, from what proves to what hints; the first rung that names somebody decides:

1. a process is dead, stopped (T) or stuck in the kernel (D), or left the loop that others are in;
   a whole node is silent;
2. flight recorders: somebody did not come to a collective, or came with another operation or shape; all in
   the same one is the network;
3. step, then check ordinal;
4. stack (or a section of kind `comm`) inside or outside a collective;
5. CPU time.

"Cannot tell" is an answer. Rungs 3 to 5 alone cap the confidence at 0.5 on CUDA, where Python runs ahead of
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from resilience_sdk.hang import rungs
from resilience_sdk.hang.findings import CulpritFinding, Scene
from resilience_sdk.hang.flight import FlightRecord
from resilience_sdk.hang.flight_rung import by_flight_record
from resilience_sdk.hang.states import RankState

_CUDA_CAP = 0.5
_CORROBORATION = 0.05
_MOST = 0.95

__all__ = ["CulpritFinding", "find_culprits"]


def find_culprits(
    states: Sequence[RankState],
    stacks: Mapping[int, Sequence[str]],
    flight: Mapping[int, FlightRecord | None],
    on_cuda: bool,
) -> CulpritFinding:
    """Return who holds the job up, who only waits, and why.

    Args:
        states: Every known rank of the attempt.
        stacks: Main thread's frames by rank, innermost first.
        flight: Flight records by rank; None for a rank that was asked and did not answer.
        on_cuda: Whether the collectives run on CUDA.
    """
    scene = Scene.of(states, stacks, flight)
    proofs: tuple[Callable[[Scene], CulpritFinding | None], ...] = (
        rungs.by_process,
        rungs.by_silence,
        by_flight_record,
    )
    hints: tuple[Callable[[Scene], CulpritFinding | None], ...] = (
        rungs.by_progress,
        rungs.by_stack,
        rungs.by_cpu,
    )
    for rung in proofs:
        finding = rung(scene)
        if finding is not None:
            return finding
    hinted = [finding for rung in hints if (finding := rung(scene)) is not None]
    if not hinted:
        return rungs.cannot_tell(scene)
    first = hinted[0]
    agreeing = [other for other in hinted[1:] if first.culprits and other.culprits == first.culprits]
    confidence = min(_MOST, first.confidence + _CORROBORATION * len(agreeing))
    return attrs.evolve(
        first,
        confidence=min(confidence, _CUDA_CAP) if on_cuda else confidence,
        evidence=first.evidence + tuple(e for other in agreeing for e in other.evidence),
    )
