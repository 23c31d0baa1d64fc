"""The culprit of a hang, named by the first rung of a ladder that finds one; its victims are not. Pure.

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

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs

from resilience_sdk.hang.activity import Kind
from resilience_sdk.hang.detect import awaited_components, progress, ranks_text, steps_are_global, they_wait, wait_edges
from resilience_sdk.hang.evidence import Collective, FlightRecord, GroupRecord, is_in_collective
from resilience_sdk.hang.saves import STALL, is_saving, stalls_in_save
from resilience_sdk.hang.timers import RankState
from resilience_sdk.incidents.record import Evidence, step_words

BUSY_SHARE = 0.5  # of a core
# Several culprits have the cause that is told first.
_CAUSES = ("hang_rank_stopped", "hang_rank_stuck", "hang_rank_spinning", "hang_rank_late")
_CAUSE_OF = {
    Kind.STOPPED: "hang_rank_stopped",
    Kind.STUCK: "hang_rank_stuck",
    Kind.SPINNING: "hang_rank_spinning",
    Kind.POLLING: "hang_rank_spinning",
    Kind.BUSY: "hang_rank_late",
}


def _cause(state: RankState) -> str:
    if state.stopped:
        return "hang_rank_stopped"
    if state.activity is not None and state.activity.kind in _CAUSE_OF:
        return _CAUSE_OF[state.activity.kind]
    busy = state.cpu_share is not None and state.cpu_share >= BUSY_SHARE
    return "hang_rank_late" if busy else "hang_rank_stuck"


MISMATCH = "user_collective_mismatch"


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

    @property
    def proves_mismatch(self) -> bool:
        """Whether the ranks' own records show that they call different collectives: a bug, and no matter of time."""
        return self.cause == MISMATCH


@attrs.frozen
class HangScene:
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
    ) -> HangScene:
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
        """Return category and cause of live ranks that did not come, by what they are seen to do."""
        if culprits and all(stalls_in_save(self.states[rank], self.stacks.get(rank, ())) for rank in culprits):
            return ("storage", STALL)
        causes = {_cause(self.states[rank]) for rank in culprits}
        return ("hang", next(cause for cause in _CAUSES if cause in causes) if causes else "hang_rank_stuck")

    def where(self, rank: int) -> str:
        """Return where a rank is, for a sentence: `rank 1 (node a) at step 40 in section fwd`."""
        state = self.states[rank]
        text = f"rank {rank}" + (f" ({state.node})" if state.node else "")
        if state.snapshot is not None and state.snapshot.step is not None:
            text += f" at {step_words(state.snapshot.step, state.snapshot.step_is_global)}"
        text += f" in section {state.section}" if state.section else " outside any section"
        frames = self.stacks.get(rank)
        return text + (f", at {frames[0]}" if frames else "")


UNKNOWN = ("unknown", "unknown")
_IDLE = 0.1


def by_process(scene: HangScene) -> CulpritFinding | None:
    """Rung 1: death, a stop, a call that the kernel does not end, or a loop that was left early."""
    dead = [rank for rank, state in scene.states.items() if state.died]
    if dead:
        text = f"{ranks_text(dead)} dead; the exit status tells the cause"
        return scene.finding(dead, UNKNOWN, 0.9, Evidence("proc", text))
    live = scene.live
    stopped = [rank for rank, state in live.items() if state.stopped]
    if stopped:
        text = "; ".join(
            f"{scene.where(rank)} is stopped (process state {live[rank].process_state})" for rank in stopped
        )
        return scene.finding(stopped, ("hang", "hang_rank_stopped"), 0.95, Evidence("proc", text))
    stuck = _without_leaders(scene, [rank for rank, state in live.items() if state.process_state == "D"])
    if stuck:
        saving = all(_is_saving(scene, rank) for rank in stuck)
        cause = STALL if saving else "filesystem_stall"
        text = "; ".join(f"{scene.where(rank)} is in an uninterruptible call (process state D)" for rank in stuck)
        # All of them at once: the file system is to blame, no rank is.
        named = stuck if len(stuck) < max(2, len(live)) else ()
        return scene.finding(named, ("storage", cause), 0.9, Evidence("proc", text))
    return _left_early(scene)


def by_silence(scene: HangScene) -> CulpritFinding | None:
    """Rung 1, of whole nodes: the ones that are not heard; where that is all others, the one that hears nobody."""
    silent: dict[str, list[int]] = {}
    for rank, state in scene.states.items():
        if state.silent_s is not None:
            silent.setdefault(state.node, []).append(rank)
    heard: dict[str, list[int]] = {}
    for rank, state in scene.states.items():
        if state.silent_s is None:
            heard.setdefault(state.node, []).append(rank)
    if not silent:
        return None
    for_s = max(state.silent_s or 0.0 for state in scene.states.values())
    if len(heard) == 1 and len(silent) > 1:
        ((node, named),) = heard.items()
        text = f"{node} ({ranks_text(named)}) has heard none of the {len(silent)} other nodes for {for_s:.0f} s"
        text += ": it is cut off"
    else:
        named = sorted(rank for ranks in silent.values() for rank in ranks)
        nodes = ", ".join(f"{node} ({ranks_text(ranks)})" for node, ranks in silent.items())
        text = f"nothing has been heard of {nodes} for {for_s:.0f} s: it died, or the network to it is cut"
    confidence = 0.6 if len(heard) == len(silent) == 1 else 0.8  # of two nodes either may be the one that is cut off
    return scene.finding(named, ("network", "network_node_unreachable"), confidence, Evidence("relay", text))


def _without_leaders(scene: HangScene, ranks: list[int]) -> list[int]:
    """Drop those that came further than another one: they wrote a file at that moment, and nobody waits for it."""
    states = [state for state in scene.live.values() if state.has_signal]
    if len(ranks) == len(scene.live) or not states:
        return ranks
    use_steps = steps_are_global(states)
    places = {state.rank: progress(state, use_steps) for state in states}
    lowest = min(places.values())
    return [rank for rank in ranks if places.get(rank, lowest) == lowest]


def _is_saving(scene: HangScene, rank: int) -> bool:
    return is_saving(scene.states[rank].section, scene.stacks.get(rank, ()))


def _left_early(scene: HangScene) -> CulpritFinding | None:
    """Find ranks that finished their loop while others are inside a step of it."""
    inside = [rank for rank, state in scene.live.items() if _in_step(scene, state)]
    gone = [
        rank
        for rank, state in scene.states.items()
        if state.snapshot is not None and (state.snapshot.done or state.left_cleanly) and state.snapshot.beats
    ]
    if not inside or not gone:
        return None
    counts = {rank: state.snapshot.beats for rank, state in scene.states.items() if state.snapshot is not None}
    # Who is behind the ones that left hangs on its own; who is level with them, or beyond, waits for them.
    if any(counts[rank] < min(counts[g] for g in gone) for rank in inside):
        return None
    text = (
        f"{ranks_text(gone)} left the loop after {min(counts[g] for g in gone)} steps, "
        f"{ranks_text(inside)} began step {max(counts[rank] for rank in inside)}"
    )
    return scene.finding(gone, ("user", "user_uneven_inputs"), 0.9, Evidence("page", text))


def _in_step(scene: HangScene, state: RankState) -> bool:
    kinds = {section.kind for section in state.stack}
    # Between two pulses a rank may as well be through with its loop, unless it waits for the others.
    return "heartbeat" in kinds or ("pulse" in kinds and _waits(scene, state) is True)


def by_progress(scene: HangScene) -> CulpritFinding | None:
    """Rung 3: who is behind, in steps or else in calls of `preemption.check()`."""
    states = [state for state in scene.live.values() if state.has_signal]
    if len(states) < 2:
        return None
    use_steps = steps_are_global(states)
    places = {state.rank: progress(state, use_steps) for state in states}
    behind = [rank for rank, place in places.items() if place == min(places.values())]
    if len(behind) < len(states):
        ahead = max(places.values())
        text = "; ".join(scene.where(rank) for rank in behind)
        text += f"; others have come to {'step' if use_steps else 'count'} {ahead[0]}"
        text += "" if ahead[0] > min(places.values())[0] else " and are in it"
        return scene.finding(behind, scene.cause_of(behind), 0.75, Evidence("page", text))
    checks = {state.rank: state.snapshot.checks for state in states if state.snapshot is not None}
    behind = [rank for rank, count in checks.items() if count == min(checks.values())]
    if 0 < min(checks.values()) < max(checks.values()):
        low, high = min(checks.values()), max(checks.values())
        text = f"{ranks_text(behind)} made {low} calls of check(), others {high}"
        return scene.finding(behind, scene.cause_of(behind), 0.6, Evidence("page", text))
    return None


def by_stack(scene: HangScene) -> CulpritFinding | None:
    """Rung 4: who is outside a collective while others are inside one."""
    waiting = {rank: waits for rank, state in scene.live.items() if (waits := _waits(scene, state)) is not None}
    inside = [rank for rank, waits in waiting.items() if waits]
    outside = [rank for rank, waits in waiting.items() if not waits]
    waited_in = "a collective"
    if not inside and len(scene.live) > 1:  # no stack is in one of torch: the user's word counts, for other libraries
        waited_in = "a section of kind comm"
        inside = [rank for rank in outside if scene.live[rank].stack and scene.live[rank].stack[-1].kind == "comm"]
        outside = [rank for rank in outside if rank not in inside]
    if inside and outside and _same_role(scene, inside + outside):
        text = "; ".join(scene.where(rank) for rank in outside) + f"; {they_wait(inside)} in {waited_in}"
        return scene.finding(outside, scene.cause_of(outside), 0.7, Evidence("stack", text))
    everybody = len(inside) == len(scene.live) > 1 and not scene.unseen
    if everybody and all(rank in scene.stacks for rank in inside):
        return _all_inside(scene, inside)
    if len(scene.live) == 1 and not scene.unseen and outside:
        text = f"{scene.where(outside[0])}; it is the only rank"
        return scene.finding(outside, scene.cause_of(outside), 0.8, Evidence("stack", text))
    return None


def _waits(scene: HangScene, state: RankState) -> bool | None:
    frames = scene.stacks.get(state.rank)
    if frames:
        return is_in_collective(frames)
    if state.in_collective is not None:
        return state.in_collective
    if len(scene.states) > 1 and state.stack and state.stack[-1].kind == "comm":
        return True
    # Sections of other kinds may hide a collective (a backward does), so they prove nothing.
    return False if len(scene.states) == 1 and state.has_signal else None


def _same_role(scene: HangScene, ranks: Sequence[int]) -> bool:
    return len({scene.states[rank].role for rank in ranks}) == 1


def _all_inside(scene: HangScene, ranks: Sequence[int]) -> CulpritFinding | None:
    """Judge by stacks alone a job whose ranks all stand in collectives: in the same line, or in several."""
    if not _same_role(scene, ranks):
        return None
    lines = {rank: _user_line(scene.stacks[rank]) for rank in ranks}
    if len(set(lines.values())) == 1:
        text = f"all {len(ranks)} ranks wait in the same collective, called at {next(iter(lines.values()))}"
        return scene.finding((), ("network", "network_partition"), 0.5, Evidence("stack", text))
    text = "every rank waits, but in different places: " + "; ".join(
        f"rank {rank} at {line}" for rank, line in list(lines.items())[:8]
    )
    return scene.finding((), ("user", "user_deadlock"), 0.5, Evidence("stack", text))


def _user_line(frames: Sequence[str]) -> str:
    return next((frame for frame in frames if "/torch/" not in frame), frames[0])


def by_cpu(scene: HangScene) -> CulpritFinding | None:
    """Rung 5: one rank works while the others sleep, or the reverse (waiting for a device burns a core)."""
    shares = {rank: s.cpu_share for rank, s in scene.live.items() if s.cpu_share is not None}
    if len(shares) < max(3, len(scene.live)):
        return None
    busy = [rank for rank, share in shares.items() if share >= BUSY_SHARE]
    idle = [rank for rank, share in shares.items() if share <= _IDLE]
    if len(busy) + len(idle) < len(shares) or not busy or not idle:
        return None
    odd = busy if len(busy) < len(idle) else idle
    if 2 * len(odd) >= len(shares):
        return None
    verdict = ("hang", "hang_rank_late" if odd is busy else "hang_rank_stuck")
    text = f"{ranks_text(odd)} use {'much' if odd is busy else 'no'} CPU time, unlike all others"
    return scene.finding(odd, verdict, 0.4, Evidence("cpu", text))


def cannot_tell(scene: HangScene) -> CulpritFinding:
    """Return the answer when no rung sees anything."""
    text = "no evidence tells the ranks apart" if len(scene.live) > 1 else "too little is known of the rank"
    return scene.finding((), UNKNOWN, 0.0, Evidence("ladder", text))


# Operations to which every rank must bring the same number of elements. The others may rightly differ.
_EQUAL_SIZES = ("all_reduce", "allreduce", "reduce", "broadcast", "_allgather_base", "all_gather_into_tensor")


def by_flight_record(scene: HangScene) -> CulpritFinding | None:
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
    scene: HangScene, records: Mapping[int, FlightRecord], edges: Mapping[int, set[int]], late: list[int]
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
                    f"{they_wait(waiters)} in number {group.completed + 1}{_named(group)}"
                )
                texts.append(Evidence("flight", text))
                break
        else:
            texts.append(Evidence("flight", f"{scene.where(rank)} has not started what {they_wait(waiters)} in"))
    return scene.finding(late, scene.cause_of(late), 0.9, *texts)


def _silent(
    scene: HangScene, records: Mapping[int, FlightRecord], edges: Mapping[int, set[int]], silent: list[int]
) -> CulpritFinding | None:
    """Judge when all whose record is known wait, and not everybody's is known."""
    blocked = sorted(edges)
    asked = [rank for rank in silent if rank in scene.flight]
    if asked and len(asked) == len(silent) and not scene.unseen and len(blocked) == len(records):
        text = (
            f"{ranks_text(asked)} did not answer (it holds the interpreter lock, or does not run); "
            f"{they_wait(blocked)} in a collective"
        )
        return scene.finding(asked, scene.cause_of(asked), 0.6, Evidence("flight", text))
    return None


def _knot(scene: HangScene, records: Mapping[int, FlightRecord], ranks: list[int]) -> CulpritFinding | None:
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
        f"{they_wait(there)} in number {seq} of {records[there[0]].groups[name].label}"
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


def _mismatch(scene: HangScene, records: Mapping[int, FlightRecord]) -> CulpritFinding | None:
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


def _mismatched(scene: HangScene, group: GroupRecord, seq: int, calls: Mapping[int, Collective]) -> CulpritFinding:
    kinds = Counter(_signature(call) for call in calls.values())
    ordered = kinds.most_common()
    majority = ordered[0][0] if ordered[0][1] > ordered[1][1] else None
    culprits = [rank for rank, call in calls.items() if _signature(call) != majority]
    shown = "; ".join(f"rank {rank} calls {call.text()}" for rank, call in list(calls.items())[:8])
    text = f"at number {seq} of {group.label} the ranks disagree: {shown}"
    if majority is None:
        text += "; there is no majority, so every one of them is named"
    confidence = 0.9 if majority is not None else 0.8
    return scene.finding(culprits, ("user", MISMATCH), confidence, Evidence("flight", text))


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


_CUDA_CAP = 0.5
_CORROBORATION = 0.05
_MOST = 0.95
_MOST_BY_KIND = {Kind.SPINNING: 0.6, Kind.POLLING: 0.6, Kind.BUSY: 0.5, Kind.UNKNOWN: 0.5}
_MAX_TEXTS = 8


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
    scene = HangScene.of(states, stacks, flight)
    proofs: tuple[Callable[[HangScene], CulpritFinding | None], ...] = (
        by_process,
        by_silence,
        by_flight_record,
    )
    hints: tuple[Callable[[HangScene], CulpritFinding | None], ...] = (
        by_progress,
        by_stack,
        by_cpu,
    )
    for rung in proofs:
        finding = rung(scene)
        if finding is not None:
            return _as_sure_as_seen(finding, scene)
    hinted = [finding for rung in hints if (finding := rung(scene)) is not None]
    if not hinted:
        return cannot_tell(scene)
    first = hinted[0]
    agreeing = [other for other in hinted[1:] if first.culprits and other.culprits == first.culprits]
    confidence = min(_MOST, first.confidence + _CORROBORATION * len(agreeing))
    found = attrs.evolve(
        first,
        confidence=min(confidence, _CUDA_CAP) if on_cuda else confidence,
        evidence=first.evidence + tuple(e for other in agreeing for e in other.evidence),
    )
    return _as_sure_as_seen(found, scene)


def _as_sure_as_seen(finding: CulpritFinding, scene: HangScene) -> CulpritFinding:
    """Say what each culprit is seen to do, and be no surer than that allows: one that works may yet come."""
    if finding.category != "hang" and finding.cause != STALL:
        return finding
    seen = {rank: scene.states[rank].activity for rank in finding.culprits if rank in scene.states}
    texts = [Evidence("activity", f"rank {rank}: {seen_.detail}") for rank, seen_ in seen.items() if seen_ is not None]
    most = min((_MOST_BY_KIND.get(seen_.kind, _MOST) for seen_ in seen.values() if seen_ is not None), default=_MOST)
    return attrs.evolve(
        finding, confidence=min(finding.confidence, most), evidence=(*finding.evidence, *texts[:_MAX_TEXTS])
    )
