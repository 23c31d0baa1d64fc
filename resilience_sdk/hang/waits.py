"""Who waits for whom: from collective sequences where they are known, else from steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from resilience_sdk.hang.states import CollectivePosition, RankState

Positions = Mapping[int, Mapping[str, CollectivePosition]]


def wait_edges(positions: Positions) -> dict[int, set[int]]:
    """Return, for every rank that stands in a collective, the ranks that have not come to it.

    Ranks that stand in the same collective, with nobody missing, wait for one another.
    """
    edges: dict[int, set[int]] = {}
    for group in sorted({name for groups in positions.values() for name in groups}):
        listed = {rank: groups[group] for rank, groups in positions.items() if group in groups}
        blocked = {rank for rank, at in listed.items() if at.blocked}
        for rank in blocked:
            missing = _missing(rank, group, listed, positions)
            if not missing:
                missing = {other for other in blocked if other != rank}
            edges.setdefault(rank, set()).update(missing)
    return edges


def _missing(rank: int, group: str, listed: Mapping[int, CollectivePosition], positions: Positions) -> set[int]:
    mine = listed[rank]
    missing = {other for other, at in listed.items() if other != rank and _is_behind(at, mine)}
    members = next((at.members for at in listed.values() if at.members is not None), None)
    unlisted = set(positions) - set(listed)
    if members is not None:
        missing |= unlisted & set(members)
    elif any(at.is_world for at in listed.values()):
        missing |= unlisted
    elif not missing and len(listed) == 1:
        # Alone in a group of unknown members: whoever has never used the group may be awaited.
        missing |= unlisted
    return missing


def _is_behind(other: CollectivePosition, mine: CollectivePosition) -> bool:
    """Tell whether `other` has not come to the collective that `mine` stands in."""
    if other.enqueued <= mine.completed or other.completed < mine.completed:
        return True
    return other.started is not None and other.started <= mine.completed and other.enqueued > other.started


def awaited_components(edges: Mapping[int, set[int]]) -> list[frozenset[int]]:
    """Return the ends of all waiting: sets of ranks that wait for nobody but one another.

    One rank alone in a set that waits for nobody is who everybody waits for; several are a knot.
    """
    nodes = sorted(set(edges) | {other for targets in edges.values() for other in targets})
    reach = {node: _reachable(node, edges) for node in nodes}
    components = {frozenset({node} | {o for o in reach[node] if node in reach[o]}) for node in nodes}
    return sorted((c for c in components if all(reach[node] <= c for node in c)), key=sorted)


def _reachable(start: int, edges: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    pending = list(edges.get(start, ()))
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(edges.get(node, ()))
    return found


def awaited_by_collectives(states: Iterable[RankState]) -> frozenset[int]:
    """Return the ranks that are waited for by their collectives; empty when not known of every rank."""
    positions: dict[int, Mapping[str, CollectivePosition]] = {}
    for state in states:
        if state.collectives is None:
            return frozenset()
        positions[state.rank] = state.collectives
    return frozenset().union(*awaited_components(wait_edges(positions)))


def progress(state: RankState, use_steps: bool) -> tuple[int, int]:
    """Return how far a rank came: steps begun, and whether it is in one. Comparable within one attempt."""
    assert state.snapshot is not None
    in_step = any(section.kind in ("heartbeat", "pulse") for section in state.stack)
    beats, step = state.snapshot.beats, state.snapshot.step
    if use_steps and step is not None:
        # A step number is published on entry and stays after the exit.
        return (step, 1) if in_step else (step + (1 if beats else 0), 0)
    return (beats, int(in_step))


def steps_are_global(states: Iterable[RankState]) -> bool:
    """Tell whether every rank publishes global step numbers, which then compare better than counts."""
    snapshots = [state.snapshot for state in states]
    return bool(snapshots) and all(s is not None and s.step_is_global and s.step is not None for s in snapshots)


def least_advanced(states: Sequence[RankState]) -> frozenset[int]:
    """Return the ranks with the lowest step; of those, the ones that do not wait themselves.

    Different sections of one step are not ordered, so whoever may be waited for is kept: the verdict then
    needs all of them to be late. Only a rank that is seen in a collective, or in a section of kind `comm`,
    beside ranks of the same step that are not, is known to wait for those.
    """
    use_steps = steps_are_global(states)
    lowest = min((progress(state, use_steps) for state in states), default=(0, 0))
    tied = [state for state in states if progress(state, use_steps) == lowest]
    busy = [state for state in tied if not waits_visibly(state)]
    return frozenset(state.rank for state in busy or tied)


def waits_visibly(state: RankState) -> bool:
    """Tell whether the stack, or else the kind of the innermost section, shows that a rank waits."""
    if state.in_collective is not None:
        return state.in_collective
    return bool(state.stack) and state.stack[-1].kind == "comm"
