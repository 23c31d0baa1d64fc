"""What the monitor knows at one moment: states of the ranks, and evidence taken while it is fresh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from resilience_sdk.hang import RankState
from resilience_sdk.hang.flight import FlightRecord, parse_flight_record
from resilience_sdk.hang.stacks import busy_with, is_in_collective, main_frames, parse_faulthandler
from resilience_sdk.hang.states import CollectivePosition
from resilience_sdk.hostinfo import process_state
from resilience_sdk.incidents.record import Evidence
from resilience_sdk.monitor import procfs
from resilience_sdk.monitor.evidence import CpuReading, RankEvidence, read_cpu
from resilience_sdk.monitor.ranks import WatchedRank


@attrs.frozen
class CloseLook:
    """Evidence about all ranks from one moment, and where each rank stood then."""

    places: Mapping[int, object]
    frames: Mapping[int, tuple[str, ...]]
    flight: Mapping[int, FlightRecord | None]
    positions: Mapping[int, Mapping[str, CollectivePosition]]
    texts: Mapping[int, str]
    """Whole stack dumps, as written."""
    facts: tuple[Evidence, ...]
    cpu: Mapping[int, CpuReading]

    @classmethod
    def of(cls, ranks: Sequence[WatchedRank], found: Mapping[int, RankEvidence]) -> CloseLook:
        """Read the answers of the ranks."""
        frames: dict[int, tuple[str, ...]] = {}
        flight: dict[int, FlightRecord | None] = {}
        positions: dict[int, Mapping[str, CollectivePosition]] = {}
        for rank, evidence in found.items():
            if evidence.stacks:
                frames[rank] = main_frames(parse_faulthandler(evidence.stacks))
            record = parse_flight_record(evidence.flight) if evidence.flight else None
            flight[rank] = record
            if record is not None:
                positions[rank] = record.positions()
        return cls(
            places={watched.rank: place(watched) for watched in ranks},
            frames=frames,
            flight=flight,
            positions=positions,
            texts={rank: evidence.stacks for rank, evidence in found.items() if evidence.stacks},
            facts=tuple(line for evidence in found.values() for line in evidence.evidence),
            cpu={w.rank: reading for w in ranks if (reading := read_cpu(w.snapshot.pid)) is not None},
        )

    def covers(self, ranks: Sequence[WatchedRank]) -> bool:
        """Tell whether no rank has moved since the look."""
        return self.places == {watched.rank: place(watched) for watched in ranks}


def place(watched: WatchedRank) -> object:
    """Return what changes when a rank does anything."""
    snapshot = watched.snapshot
    lane = snapshot.main_lane
    return (snapshot.pid, watched.alive, snapshot.exit_state, lane.last_ns, lane.beats, lane.stack)


def states_of(
    ranks: Sequence[WatchedRank], node: str, *, closely: bool, look: CloseLook | None, now_ns: int
) -> list[RankState]:
    """Return the ranks as the analysis takes them; with `closely` /proc is read, which costs."""
    return [_state(watched, node, closely, look, now_ns) for watched in ranks]


def _state(watched: WatchedRank, node: str, closely: bool, look: CloseLook | None, now_ns: int) -> RankState:
    rank, pid = watched.rank, watched.snapshot.pid
    snapshot = watched.snapshot if watched.readable else None
    state = RankState(rank=rank, node=node, alive=watched.alive, snapshot=snapshot)
    if not closely or not watched.alive:
        return state
    state = attrs.evolve(
        state,
        process_state=process_state(pid) or "",
        traced=procfs.is_traced(pid),
        reads_terminal=procfs.reads_terminal(pid),
    )
    if look is None or look.places.get(rank) != place(watched):
        return state
    frames = look.frames.get(rank)
    earlier, latest = look.cpu.get(rank), read_cpu(pid)
    share = None
    if earlier is not None and latest is not None and latest.at_ns - earlier.at_ns > 50_000_000:
        share = (latest.cpu_ns - earlier.cpu_ns) / (latest.at_ns - earlier.at_ns)
    return attrs.evolve(
        state,
        collectives=look.positions.get(rank),
        in_collective=is_in_collective(frames) if frames else None,
        activity=busy_with(frames) if frames else None,
        cpu_share=share,
    )
