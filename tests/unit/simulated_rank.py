"""A rank whose time is written down beforehand, as its page and a look at its process would show it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from resilience_sdk.goodput.rank_time import Doing, RankTime
from resilience_sdk.recorder.page_reader import LanePasses, LaneView, OpenSection, RankSnapshot

NS = 1_000_000_000
_KINDS = {
    "step": "heartbeat",
    "eval_batch": "heartbeat",
    "eval": "compute",
    "fwd": "compute",
    "data": "io",
    "checkpoint": "io",
}


@attrs.frozen
class Act:
    """Something that takes seconds. `inner` lies in it, and is a part of them; a `gap` is in no section."""

    what: str
    seconds: float
    doing: Doing = Doing.BUSY
    inner: tuple[Act, ...] = ()


@attrs.frozen
class _Block:
    name: str
    began: float
    ended: float
    depth: int


@attrs.define
class SimulatedRank:
    """One rank that begins with its first step at second 0."""

    blocks: list[_Block] = attrs.field(factory=list)
    doing: list[tuple[float, float, Doing]] = attrs.field(factory=list)
    ends: float = 0.0
    _told: dict[str, int] = attrs.field(factory=dict)

    @classmethod
    def of(cls, acts: Sequence[Act]) -> SimulatedRank:
        """Return one that does all of it, behind a first step of a second."""
        rank = cls()
        for act in (Act("step", 1.0), *acts):
            rank._add(act, rank.ends, 0)
            rank.ends += act.seconds
        return rank

    def _add(self, act: Act, at: float, depth: int) -> None:
        if act.what not in ("gap", "stop"):
            self.blocks.append(_Block(act.what, at, at + act.seconds, depth))
        if not act.inner:
            self.doing.append((at, at + act.seconds, act.doing))
        else:
            rest = act.seconds - sum(one.seconds for one in act.inner)
            self.doing.append((at, at + rest, act.doing))
            at += rest
        for one in act.inner:
            self._add(one, at, depth + 1)
            at += one.seconds

    def doing_at(self, at: float) -> Doing:
        """Return what its process does."""
        return next((what for began, ended, what in self.doing if began <= at < ended), Doing.BUSY)

    def look(self, account: RankTime, at: float, *, is_alive: bool = True) -> None:
        """Have an account look at it."""
        passes = []
        for name in dict.fromkeys(block.name for block in self.blocks):
            done = [block for block in self.blocks if block.name == name and block.ended <= at]
            first = sum(block.ended <= 1.0 for block in done)
            before = self._told.get(name, 0)
            self._told[name] = len(done)
            if new := done[before:]:
                steps = [one for one in self.blocks if one.name == "step" and one.began <= new[-1].began < one.ended]
                start = max(0, len(new) - 63)
                took = [round((block.ended - block.began) * NS) for block in new[start:]]
                kind = _KINDS[name]
                in_step = bool(steps) if kind != "heartbeat" else None
                passes.append(LanePasses(name, kind, 0, before + start, took, False, first, in_step))
        snapshot = self.page(at)
        doing = self.doing_at(at) if is_alive and account.is_late(snapshot, round(at * NS)) else None
        account.look(snapshot, passes, round(at * NS), is_alive=is_alive, doing=doing)

    def page(self, at: float) -> RankSnapshot:
        """Return its page at a moment."""
        over = [block for block in self.blocks if block.ended <= at]
        beats = [block for block in over if _KINDS[block.name] == "heartbeat"]
        open_now = sorted((b for b in self.blocks if b.began <= at < b.ended), key=lambda block: block.depth)
        stack = tuple(OpenSection(b.name, _KINDS[b.name], round(b.began * NS), None, 1) for b in open_now)
        steps = sum(block.name == "step" for block in over)
        lane = LaneView(
            1, round(max((b.ended for b in over), default=0.0) * NS), steps, steps, True, stack,
            beat_ns=round(max((b.ended for b in beats), default=0.0) * NS),
        )  # fmt: skip
        return RankSnapshot(
            rank=0, local_rank=0, world_size=1, attempt=0, pid=2, start_ticks=1, host="a", script="s", created_ns=0,
            provisional=False, declared=True, done=False, dumps_stacks=True, paused=None, exit_state="running",
            beat_source="user", checks=0, collectives=0, first_beat_ns=NS if at >= 1.0 else None, odd_exits=0, lost=0,
            lanes=(lane,),
        )  # fmt: skip
