"""The time of a step and its parts: what a rank's page tells, added up, and what the ranks of an attempt come to. Pure.

A step lasts from one heartbeat to the next, so its share of a section counts what is done between two steps, too.
Sections of the thread that beats count; what other threads do at the same time holds no step up.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.recorder.page_layout import BEAT_KINDS, WORK
from resilience_sdk.recorder.page_reader import LanePasses

_NANO = 1e9
_DATA = re.compile(r"(^|[^a-z])(data|dataloader|loader|batch|fetch|input)([^a-z]|$)")
_SAVES = re.compile(r"(^|[^a-z])(checkpoint|ckpt|save|saving)([^a-z]|$)")
_STEPS_ROW = "steps"  # amounts of work, of which one is told for each step
_MOST_SECTIONS = 16
_MOST_WAITING = 256  # durations that wait for the amount of their step, which is told with the next one
_OWN = ("compute", "io")  # kinds of sections whose time is the rank's own; in others it waits for somebody


def is_data(name: str, kind: str) -> bool:
    """Tell whether a section waits for data: by its kind and its name, as adapters and users call it."""
    return kind in ("io", "compute", "idle") and _DATA.search(name.lower()) is not None


def is_save(name: str, kind: str) -> bool:
    """Tell whether a section saves a checkpoint."""
    return kind in ("io", "compute") and _SAVES.search(name.lower()) is not None


@attrs.define
class WorkFit:
    """Sums for a straight line of step times over amounts of work."""

    count: int = 0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _yy: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Take one step."""
        self.count += 1
        self._x += amount
        self._y += seconds
        self._xx += amount * amount
        self._xy += amount * seconds
        self._yy += seconds * seconds

    @property
    def amount(self) -> float:
        """All work that was told."""
        return self._x

    def fixed_share(self) -> float | None:
        """Return the share of a usual step that does not grow with its work; None where that cannot be told.

        It takes 64 steps, amounts that vary by 15 %, and a line that explains half of what the times vary by.
        """
        if self.count < 64 or self._x <= 0 or self._y <= 0:
            return None
        n = self.count
        vary_x, vary_y = self._xx - self._x**2 / n, self._yy - self._y**2 / n
        both = self._xy - self._x * self._y / n
        if vary_x <= (0.15 * self._x / n) ** 2 * n or vary_y <= 0 or both <= 0 or both**2 < 0.5 * vary_x * vary_y:
            return None
        return min(1.0, max(0.0, 1.0 - both / vary_x * self._x / self._y))


@attrs.define
class RankSteps:
    """The passes of one rank, added up from its first completed step on. The monitor's only thread."""

    seconds: dict[tuple[str, str], float] = attrs.field(factory=dict)
    """By name and kind of a section."""
    steps: int = 0
    wall_s: float = 0.0
    fit: WorkFit = attrs.field(factory=WorkFit)
    longest_s: float = 0.0
    """The longest step that was seen since somebody set this back."""
    _joint: set[tuple[str, str]] = attrs.field(factory=set)  # sections that hold collectives, so waits for others
    _began: tuple[int, int] | None = None  # beats, and when the last of them was, from which on is counted
    _counts: dict[tuple[str, str], int] = attrs.field(factory=dict)
    _took: dict[int, float] = attrs.field(factory=dict)  # by pass of the heartbeat

    def take(self, passes: Sequence[LanePasses], beats: int, beat_ns: int) -> None:
        """Take what was completed since the last look, and how many heartbeats there were, the last one when.

        More passes between two looks than a ring of the page holds count with the mean of those that are there.
        """
        lanes = {new.lane for new in passes if new.kind in BEAT_KINDS}
        for new in passes:
            key = new.name, new.kind
            count = new.start + len(new.samples_ns)
            before = self._counts.get(key, 0)
            if new.is_joint:
                self._joint.add(key)
            if new.kind != WORK and (not lanes or new.lane in lanes):
                self._counts[key] = max(before, count)
                if new.samples_ns and count > before:
                    passed = count - before
                    mean_s = sum(new.samples_ns) / len(new.samples_ns) / _NANO
                    self.seconds[key] = self.seconds.get(key, 0.0) + passed * mean_s
            if new.kind in BEAT_KINDS and new.samples_ns:
                self.longest_s = max(self.longest_s, max(new.samples_ns) / _NANO)
                self._took.update(enumerate((ns / _NANO for ns in new.samples_ns), new.start))
        self._fit_work(passes)
        if self._began is None:
            if beats > 0:
                self._began = beats, beat_ns
                self.seconds.clear()
            self.longest_s = 0.0
            return
        self.steps = max(self.steps, beats - self._began[0])
        self.wall_s = max(self.wall_s, (beat_ns - self._began[1]) / _NANO)

    @property
    def own_s(self) -> float | None:
        """Seconds in sections in which the rank itself works; None where it has told of none.

        A section inside another one counts twice, on every rank alike: what is compared are ranks of one program.
        """
        own = [s for key, s in self.seconds.items() if key[1] in _OWN and key not in self._joint]
        return sum(own) if own else None

    def _fit_work(self, passes: Sequence[LanePasses]) -> None:
        for new in passes:
            if new.kind == WORK and new.name == _STEPS_ROW:
                for number, word in enumerate(new.samples_ns, new.start):
                    (amount,) = struct.unpack("d", struct.pack("Q", word & (1 << 64) - 1))
                    took_s = self._took.get(number)
                    if took_s is not None and number > 0 and 0 < amount < 1e18:
                        self.fit.add(amount, took_s)
        for number in sorted(self._took)[:-_MOST_WAITING]:
            del self._took[number]


def node_facts(ranks: Mapping[int, RankSteps]) -> dict[str, Any] | None:
    """Return what the `step_time` event of a node tells of its ranks so far; None before any has made a step.

    `share` is the part of the ranks' wall time that a section took, their mean; `most` and `rank` of the rank in which
    it is largest, `least` where it is smallest.
    """
    known = {rank: steps for rank, steps in sorted(ranks.items()) if steps.steps > 0 and steps.wall_s > 0}
    if not known:
        return None
    keys = {key for steps in known.values() for key in steps.seconds}
    sections: list[dict[str, Any]] = []
    for name, kind in keys:
        shares = {rank: steps.seconds.get((name, kind), 0.0) / steps.wall_s for rank, steps in known.items()}
        most = max(shares, key=lambda rank: shares[rank])
        mean = sum(shares.values()) / len(shares)
        told = {"share": mean, "least": min(shares.values()), "most": shares[most]}
        sections.append({"name": name, "kind": kind, **{k: round(v, 4) for k, v in told.items()}, "rank": most})
    sections.sort(key=lambda section: (-section["share"], section["name"], section["kind"]))
    fits = [share for steps in known.values() if (share := steps.fit.fixed_share()) is not None]
    return {
        "steps": max(steps.steps for steps in known.values()),
        "wall_s": round(max(steps.wall_s for steps in known.values()), 3),
        "ranks": list(known),
        "data_s": round(max(_sum(steps, is_data) for steps in known.values()), 3),
        "saves_s": round(max(_sum(steps, is_save) for steps in known.values()), 3),
        "work_per_s": sum(steps.fit.amount / steps.wall_s for steps in known.values()) or None,
        "fixed_share": round(sorted(fits)[len(fits) // 2], 4) if fits else None,
        "sections": sections[:_MOST_SECTIONS],
    }


@attrs.define
class NodeProgress:
    """What the ranks of a node have done since it was told last. The monitor's only thread."""

    _told: dict[int, tuple[int, float, float]] = attrs.field(factory=dict)
    """Rank -> its steps, seconds and own seconds at that time."""

    def take(self, ranks: Mapping[int, RankSteps]) -> dict[str, Any] | None:
        """Return what the `progress` event of a node tells, and begin anew; None, and nothing begins, without a step.

        `own_ms` is what each of `ranks` took of a step by itself, None where it has told no section of its own or has
        made no step; the means are those of the rank that has made most steps.
        """
        done, made = [], (0, 0.0)
        for rank, now in sorted(ranks.items()):
            steps, wall_s, own_s = self._told.get(rank, (0, 0.0, 0.0))
            own = now.own_s
            new = now.steps - steps
            done.append((rank, None if own is None or new <= 0 else (own - own_s) / new))
            made = max(made, (new, now.wall_s - wall_s))
        steps, wall_s = made
        if steps <= 0:
            return None
        longest_s = max(now.longest_s for now in ranks.values())
        for rank, now in ranks.items():
            # Before its first step is over, what a rank has in its sections is set back again.
            self._told[rank] = now.steps, now.wall_s, (now.own_s or 0.0) if now.steps else 0.0
            now.longest_s = 0.0
        return {
            "steps": steps,
            "wall_s": round(wall_s, 3),
            "mean_ms": _short(wall_s / steps),
            "longest_ms": _short(max(longest_s, wall_s / steps)),
            "ranks": [rank for rank, _ in done],
            "own_ms": [None if own_s is None else _short(own_s) for _, own_s in done],
        }


def _short(seconds: float) -> float:
    """Return milliseconds with as many digits as a picture shows: there is a number for each rank."""
    return float(f"{1000 * max(0.0, seconds):.4g}")


def _sum(steps: RankSteps, belongs: Any) -> float:
    """Return the longest of the sections that belong: they may lie in one another."""
    return max((seconds for key, seconds in steps.seconds.items() if belongs(*key)), default=0.0)


@attrs.frozen
class SectionShare:
    """One section over all ranks: parts of the wall time, 0 to 1. `rank`: where it is largest."""

    name: str
    kind: str
    share: float
    least: float
    most: float
    rank: int


@attrs.frozen
class StepTime:
    """The steps of the newest attempt that has told any."""

    job: str
    attempt: int
    at: float
    """Unix seconds of the newest event."""
    steps: int
    wall_s: float
    ranks: int
    sections: tuple[SectionShare, ...]
    work_per_s: float | None
    """Of all ranks, in the unit of `straggler.work`."""
    fixed_share: float | None
    """Share of a usual step that does not grow with its work."""

    @property
    def step_s(self) -> float:
        """Mean time of a step, in seconds."""
        return self.wall_s / self.steps

    def section(self, kinds: Iterable[str], belongs: Any = None) -> SectionShare | None:
        """Return the section with the largest share among those of `kinds` that belong."""
        found = (one for one in self.sections if one.kind in kinds and (not belongs or belongs(one.name, one.kind)))
        return max(found, key=lambda one: one.share, default=None)


def step_time_of(events: Iterable[Mapping[str, Any]]) -> StepTime | None:
    """Return the step time of the newest attempt; None where nothing is told. `events` are in the order of time."""
    told: dict[str, Mapping[str, Any]] = {}
    newest: tuple[str, int] | None = None
    for event in events:
        name = event.get("event")
        key = str(event.get("job")), event.get("attempt") if isinstance(event.get("attempt"), int) else 0
        if name == Event.RUN_START.value:
            told, newest = {}, None
        elif name == Event.STEP_TIME.value and _is_sound(event):
            if key != newest:
                told, newest = {}, key  # type: ignore[assignment]
            told[str(event.get("host"))] = event
    if newest is None:
        return None
    nodes = list(told.values())
    ranks = [len(node["ranks"]) for node in nodes]
    works = [node["work_per_s"] for node in nodes if isinstance(node.get("work_per_s"), (int, float))]
    fixed = [node["fixed_share"] for node in nodes if isinstance(node.get("fixed_share"), (int, float))]
    return StepTime(
        job=newest[0],
        attempt=newest[1],
        at=max(float(node["t"]) for node in nodes),
        steps=max(node["steps"] for node in nodes),
        wall_s=max(float(node["wall_s"]) for node in nodes),
        ranks=sum(ranks),
        sections=_merged(nodes, ranks),
        work_per_s=sum(works) if works else None,
        fixed_share=sorted(fixed)[len(fixed) // 2] if fixed else None,
    )


def _merged(nodes: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> tuple[SectionShare, ...]:
    """Add up the nodes' sections, each by the number of its ranks; one that a node lacks took it no time."""
    found: dict[tuple[str, str], list[tuple[SectionShare, int]]] = {}
    for node, count in zip(nodes, ranks, strict=True):
        for told in node["sections"]:
            share, least, most = (float(told[key]) for key in ("share", "least", "most"))
            section = SectionShare(str(told["name"]), str(told["kind"]), share, least, most, int(told["rank"]))
            found.setdefault((section.name, section.kind), []).append((section, count))
    merged = []
    for (name, kind), parts in found.items():
        largest = max((section for section, _ in parts), key=lambda section: section.most)
        least = min(section.least for section, _ in parts) if len(parts) == len(nodes) else 0.0
        share = sum(section.share * count for section, count in parts) / sum(ranks)
        merged.append(SectionShare(name, kind, share, least, largest.most, largest.rank))
    return tuple(sorted(merged, key=lambda section: -section.share))


def _is_sound(event: Mapping[str, Any]) -> bool:
    """Tell whether an event can be understood as a whole."""
    try:
        shares = [float(told[key]) for told in event["sections"] for key in ("share", "least", "most")]
        numbers = [float(event["wall_s"]), *shares, *(int(told["rank"]) for told in event["sections"])]
        is_whole = isinstance(event["ranks"], list) and bool(event["ranks"]) and isinstance(event["sections"], list)
        return is_whole and event["steps"] > 0 and numbers[0] > 0 and all(0 <= n < 1e15 for n in numbers)
    except (KeyError, TypeError, ValueError, OverflowError):
        return False
