"""The rungs of the ladder without the flight recorder. Each returns a finding, or None if it sees nothing."""

from __future__ import annotations

from collections.abc import Sequence

from resilience_sdk.hang.findings import BUSY_SHARE, CulpritFinding, Scene
from resilience_sdk.hang.judge import ranks_text
from resilience_sdk.hang.stacks import busy_with, is_in_collective
from resilience_sdk.hang.states import RankState
from resilience_sdk.hang.waits import progress, steps_are_global
from resilience_sdk.incidents.record import Evidence

UNKNOWN = ("unknown", "unknown")
_IDLE = 0.1


def by_process(scene: Scene) -> CulpritFinding | None:
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
        cause = "checkpoint_stall" if saving else "filesystem_stall"
        text = "; ".join(f"{scene.where(rank)} is in an uninterruptible call (process state D)" for rank in stuck)
        # All of them at once: the file system is to blame, no rank is.
        named = stuck if len(stuck) < max(2, len(live)) else ()
        return scene.finding(named, ("storage", cause), 0.9, Evidence("proc", text))
    return _left_early(scene)


def by_silence(scene: Scene) -> CulpritFinding | None:
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


def _without_leaders(scene: Scene, ranks: list[int]) -> list[int]:
    """Drop those that came further than another one: they wrote a file at that moment, and nobody waits for it."""
    states = [state for state in scene.live.values() if state.has_signal]
    if len(ranks) == len(scene.live) or not states:
        return ranks
    use_steps = steps_are_global(states)
    places = {state.rank: progress(state, use_steps) for state in states}
    lowest = min(places.values())
    return [rank for rank in ranks if places.get(rank, lowest) == lowest]


def _is_saving(scene: Scene, rank: int) -> bool:
    section = scene.states[rank].section or ""
    return "checkpoint" in section.lower() or busy_with(scene.stacks.get(rank, ())) == "checkpoint"


def _left_early(scene: Scene) -> CulpritFinding | None:
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
        f"{ranks_text(inside)} began step {max(counts[rank] for rank in inside) + 1}"
    )
    return scene.finding(gone, ("user", "user_uneven_inputs"), 0.9, Evidence("page", text))


def _in_step(scene: Scene, state: RankState) -> bool:
    kinds = {section.kind for section in state.stack}
    # Between two pulses a rank may as well be through with its loop, unless it waits for the others.
    return "heartbeat" in kinds or ("pulse" in kinds and _waits(scene, state) is True)


def by_progress(scene: Scene) -> CulpritFinding | None:
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


def by_stack(scene: Scene) -> CulpritFinding | None:
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
        text = "; ".join(scene.where(rank) for rank in outside) + f"; {ranks_text(inside)} wait in {waited_in}"
        return scene.finding(outside, scene.cause_of(outside), 0.7, Evidence("stack", text))
    everybody = len(inside) == len(scene.live) > 1 and not scene.unseen
    if everybody and all(rank in scene.stacks for rank in inside):
        return _all_inside(scene, inside)
    if len(scene.live) == 1 and not scene.unseen and outside:
        text = f"{scene.where(outside[0])}; it is the only rank"
        return scene.finding(outside, scene.cause_of(outside), 0.8, Evidence("stack", text))
    return None


def _waits(scene: Scene, state: RankState) -> bool | None:
    frames = scene.stacks.get(state.rank)
    if frames:
        return is_in_collective(frames)
    if state.in_collective is not None:
        return state.in_collective
    if len(scene.states) > 1 and state.stack and state.stack[-1].kind == "comm":
        return True
    # Sections of other kinds may hide a collective (a backward does), so they prove nothing.
    return False if len(scene.states) == 1 and state.has_signal else None


def _same_role(scene: Scene, ranks: Sequence[int]) -> bool:
    return len({scene.states[rank].role for rank in ranks}) == 1


def _all_inside(scene: Scene, ranks: Sequence[int]) -> CulpritFinding | None:
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


def by_cpu(scene: Scene) -> CulpritFinding | None:
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
    verdict = ("hang", "hang_rank_late" if odd is busy else "hang_rank_stopped")
    text = f"{ranks_text(odd)} use {'much' if odd is busy else 'no'} CPU time, unlike all others"
    return scene.finding(odd, verdict, 0.4, Evidence("cpu", text))


def cannot_tell(scene: Scene) -> CulpritFinding:
    """Return the answer when no rung sees anything."""
    text = "no evidence tells the ranks apart" if len(scene.live) > 1 else "too little is known of the rank"
    return scene.finding((), UNKNOWN, 0.0, Evidence("ladder", text))
