"""Rung 2: what the flight recorders of all ranks say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from resilience_sdk.hang.findings import CulpritFinding, Scene
from resilience_sdk.hang.flight import Collective, FlightRecord, GroupRecord
from resilience_sdk.hang.judge import ranks_text
from resilience_sdk.hang.waits import awaited_components, wait_edges
from resilience_sdk.incidents.record import Evidence

# Operations to which every rank must bring the same number of elements. The others may rightly differ.
_EQUAL_SIZES = ("all_reduce", "allreduce", "reduce", "broadcast", "_allgather_base", "all_gather_into_tensor")


def by_flight_record(scene: Scene) -> CulpritFinding | None:
    """Return who did not come to a collective, who came with another one, or that all are in the same one."""
    records = {rank: r for rank, r in scene.flight.items() if r is not None and rank in scene.live}
    if len(records) < 2 and not (records and scene.unseen + len(scene.live) > 1):
        return None
    mismatch = _mismatch(scene, records)
    if mismatch is not None:
        return mismatch
    edges = wait_edges({rank: record.positions() for rank, record in records.items()})
    if not edges:
        return None
    silent = [rank for rank in scene.live if rank not in records]
    found = awaited_components(edges)
    alone = {rank for component in found if len(component) == 1 for rank in component}
    late = sorted(rank for rank in alone if rank not in edges)  # else it stands in a collective itself
    if late:
        return _did_not_come(scene, records, edges, late)
    if silent or scene.unseen:
        return _silent(scene, records, edges, silent)
    findings = [f for f in (_knot(scene, records, sorted(ranks)) for ranks in found) if f is not None]
    # The program's own order explains why others wait elsewhere; the network does not explain that.
    return min(findings, key=lambda finding: finding.category != "user", default=None)


def _did_not_come(
    scene: Scene, records: Mapping[int, FlightRecord], edges: Mapping[int, set[int]], late: list[int]
) -> CulpritFinding:
    texts: list[Evidence] = []
    for rank in late[:8]:
        waiters = sorted(waiter for waiter, targets in edges.items() if rank in targets)
        for name, group in records[waiters[0]].groups.items() if waiters else ():
            position = group.position
            theirs = records[rank].groups.get(name)
            count = theirs.enqueued if theirs is not None else 0
            if position.blocked and count <= group.completed:
                text = (
                    f"{scene.where(rank)} has entered {count} collectives of {group.label}; "
                    f"{ranks_text(waiters)} wait in number {group.completed + 1}{_named(group)}"
                )
                texts.append(Evidence("flight", text))
                break
        else:
            texts.append(Evidence("flight", f"{scene.where(rank)} has not started what {ranks_text(waiters)} wait in"))
    return scene.finding(late, scene.cause_of(late), 0.9, *texts)


def _silent(
    scene: Scene, records: Mapping[int, FlightRecord], edges: Mapping[int, set[int]], silent: list[int]
) -> CulpritFinding | None:
    """Judge when all whose record is known wait, and not everybody's is known."""
    blocked = sorted(edges)
    asked = [rank for rank in silent if rank in scene.flight]
    if asked and len(asked) == len(silent) and not scene.unseen and len(blocked) == len(records):
        text = (
            f"{ranks_text(asked)} did not answer (it holds the interpreter lock, or does not run); "
            f"{ranks_text(blocked)} wait in a collective"
        )
        return scene.finding(asked, scene.cause_of(asked), 0.6, Evidence("flight", text))
    return None


def _knot(scene: Scene, records: Mapping[int, FlightRecord], ranks: list[int]) -> CulpritFinding | None:
    """Judge ranks that wait for one another: in one collective the network, in several the program."""
    places: dict[tuple[str, int], list[int]] = {}
    for rank in ranks:
        for name, group in records[rank].groups.items():
            if group.position.blocked:
                places.setdefault((name, group.completed + 1), []).append(rank)
    shared = [(place, there) for place, there in places.items() if len(there) == len(ranks)]
    if shared:
        (name, seq), _ = shared[0]
        group = records[ranks[0]].groups[name]
        text = f"{ranks_text(ranks)} all wait in the same collective, "
        text += f"number {seq}{_named(group)} of {group.label}"
        return scene.finding((), ("network", "network_partition"), 0.8, Evidence("flight", text))
    texts = [
        f"{ranks_text(there)} wait in number {seq} of {records[there[0]].groups[name].label}"
        for (name, seq), there in sorted(places.items())
    ]
    if len(texts) < 2:
        return None
    if any(
        {r for (name, _), there in places.items() if name == group for r in there} == set(ranks) for group, _ in places
    ):
        # Who is a collective behind entered it, and the others have completed it: what they sent did not arrive.
        text = "; ".join(texts) + ": nobody is missing, data got lost between them"
        return scene.finding((), ("network", "network_partition"), 0.8, Evidence("flight", text))
    text = "; ".join(texts) + ": the ranks use their process groups in different orders"
    return scene.finding((), ("user", "user_deadlock"), 0.85, Evidence("flight", text))


def _named(group: GroupRecord) -> str:
    entry = group.entries.get(group.completed + 1)
    return f" ({entry.text()})" if entry is not None else ""


def _mismatch(scene: Scene, records: Mapping[int, FlightRecord]) -> CulpritFinding | None:
    """Find a sequence number at which ranks stand in different operations, or bring different sizes."""
    for name in sorted({name for record in records.values() for name in record.groups}):
        groups = {rank: record.groups[name] for rank, record in records.items() if name in record.groups}
        done = min(group.completed for group in groups.values())
        pending = {seq for group in groups.values() for seq in group.entries if seq > done}
        for seq in sorted(pending):
            calls = {rank: g.entries[seq] for rank, g in groups.items() if seq in g.entries}
            waits = any(groups[rank].completed < seq for rank in calls)
            kinds = Counter(_signature(call) for call in calls.values())
            if waits and len(kinds) > 1:
                return _mismatched(scene, next(iter(groups.values())), seq, calls)
    return None


def _mismatched(scene: Scene, group: GroupRecord, seq: int, calls: Mapping[int, Collective]) -> CulpritFinding:
    kinds = Counter(_signature(call) for call in calls.values())
    ordered = kinds.most_common()
    majority = ordered[0][0] if ordered[0][1] > ordered[1][1] else None
    culprits = [rank for rank, call in calls.items() if _signature(call) != majority]
    shown = "; ".join(f"rank {rank} calls {call.text()}" for rank, call in list(calls.items())[:8])
    text = f"at number {seq} of {group.label} the ranks disagree: {shown}"
    if majority is None:
        text += "; there is no majority, so every one of them is named"
    confidence = 0.9 if majority is not None else 0.8
    return scene.finding(culprits, ("user", "user_collective_mismatch"), confidence, Evidence("flight", text))


def _signature(call: Collective) -> tuple[object, ...]:
    """Return what must be equal on all ranks at one sequence number."""
    if call.op not in _EQUAL_SIZES:
        return (call.op,)
    elements = []
    for size in call.input_sizes or call.output_sizes:
        product = 1
        for n in size:
            product *= n
        elements.append(product)
    return (call.op, tuple(elements), call.dtypes)
