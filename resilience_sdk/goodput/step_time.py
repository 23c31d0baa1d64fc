"""The time of a step and its parts: what a rank's page tells, added up, and what the ranks of an attempt come to. Pure.

A step lasts from one heartbeat to the next, so its share of a section counts what is done between two steps, too.
Sections of the thread that beats count; what other threads do at the same time holds no step up.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.recorder.page_layout import BEAT_KINDS, WORK
from resilience_sdk.recorder.page_reader import LanePasses

_NANO = 1e9
_WORDS = re.compile(r"[a-z]+")
_DATA = frozenset({"data", "dataloader", "dataloading", "loader", "batch", "batches", "fetch", "input", "inputs"})
_SAVES = frozenset({"checkpoint", "checkpoints", "ckpt", "save", "saving"})
# A section of kind compute is the usual one, so that its whole name has to say so: `train_batch`, `data_parallel` and
# `activation_checkpoint` compute.
_WAITS = frozenset({"data", "dataloader", "dataloading", "loader", "load", "loading", "fetch", "get", "next", "wait"})
_WRITES = _SAVES | {"write", "writing"}
_EVALUATIONS = frozenset(
    {"eval", "evaluate", "evaluating", "evaluation", "val", "valid", "validate", "validating", "validation"}
)
_OF_EVALUATIONS = frozenset({"batch", "batches", "epoch", "loop", "model", "run", "set", "step", "steps", "test"})
_OF_SAVES = frozenset({"model", "state", "dict", "weights", "async", "to", "disk"})
_STEPS_ROW = "steps"  # amounts of work, of which one is told for each step
_MOST_SECTIONS = 16
_LEAST_RECENT = 10  # steps, by which it is told what a step takes now
_MOST_WORK = 1e18  # of one step
_LEAST_POINTS, _MOST_POINTS = 64, 512
_MOST_WAITING = 256  # durations that wait for the amount of their step, which is told with the next one
_OWN = ("compute", "io")  # kinds of sections whose time is the rank's own; in others it waits for somebody


def is_data(name: str, kind: str) -> bool:
    """Tell whether a section waits for data: by its kind and its name, as adapters and users call it."""
    words = set(_WORDS.findall(name.lower()))
    if kind == "compute":
        return bool(words & _DATA) and bool(words & _WAITS) and words <= _DATA | _WAITS
    return kind in ("io", "idle") and bool(words & _DATA)


def is_save(name: str, kind: str) -> bool:
    """Tell whether a section saves a checkpoint."""
    words = set(_WORDS.findall(name.lower()))
    if kind == "compute":
        return bool(words & _SAVES) and words <= _WRITES | _OF_SAVES
    return kind == "io" and bool(words & _SAVES)


def is_evaluation(name: str, kind: str) -> bool:
    """Tell whether a section evaluates what is trained."""
    words = set(_WORDS.findall(name.lower()))
    return kind in ("compute", "io", "idle") and bool(words & _EVALUATIONS) and words <= _EVALUATIONS | _OF_EVALUATIONS


def is_stop(activity: str, section: str | None) -> bool:
    """Tell whether a rank that does not come on stands still for no good: it is stopped, or stuck in no long wait.

    One that loads or saves for long does what it has to, and has a bucket of its own.
    """
    waits = is_data(section or "", "io") or is_save(section or "", "io")
    return activity == "stopped" or (activity == "stuck" and not waits)


@attrs.define
class WorkFit:
    """The newest steps as points: amounts of work, and what each took. A line through them tells what is fixed."""

    _points: deque[tuple[float, float]] = attrs.field(factory=lambda: deque(maxlen=_MOST_POINTS))

    def add(self, amount: float, seconds: float) -> None:
        """Take one step."""
        self._points.append((amount, seconds))

    def fixed_share(self) -> float | None:
        """Return the share of a usual step that does not grow with its work; None where that cannot be told.

        It takes 64 steps, amounts that vary by 15 %, and a line that explains half of what the times vary by. One step
        in ten may be of another kind: one with a save in it, or in which somebody else had the processor.
        """
        if len(self._points) < _LEAST_POINTS:
            return None
        points = sorted(self._points)
        low, high = (_middle(part) for part in (points[: len(points) // 3], points[-(len(points) // 3) :]))
        if high[0] <= low[0]:
            return None
        slope = (high[1] - low[1]) / (high[0] - low[0])
        points.sort(key=lambda point: abs(point[1] - low[1] - slope * (point[0] - low[0])))
        return _fixed_share(points[: len(points) - len(points) // 10])


def _middle(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sorted(x for x, _ in points)[len(points) // 2], sorted(y for _, y in points)[len(points) // 2]


def _fixed_share(points: Sequence[tuple[float, float]]) -> float | None:
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    vary_x = sum((x - mean_x) ** 2 for x, _ in points)
    vary_y = sum((y - mean_y) ** 2 for _, y in points)
    both = sum((x - mean_x) * (y - mean_y) for x, y in points)
    varies = vary_x > (0.15 * mean_x) ** 2 * count and vary_y > 0
    if not varies or both <= 0 or both**2 < 0.5 * vary_x * vary_y or mean_y <= 0:
        return None
    return min(1.0, max(0.0, 1.0 - both / vary_x * mean_x / mean_y))


@attrs.define
class RankSteps:
    """The passes of one rank, added up from its first completed step on. The monitor's only thread."""

    seconds: dict[tuple[str, str], float] = attrs.field(factory=dict)
    """By name and kind of a section."""
    steps: int = 0
    wall_s: float = 0.0
    amount: float = 0.0
    """All work of its steps, as `straggler.work` tells it."""
    fit: WorkFit = attrs.field(factory=WorkFit)
    longest_s: float = 0.0
    """The longest step that was seen since somebody set this back."""
    _joint: set[tuple[str, str]] = attrs.field(factory=set)  # sections that hold collectives, so waits for others
    _began: tuple[int, int] | None = None  # beats, and when the last of them was, from which on is counted
    _lanes: set[int] = attrs.field(factory=set)  # that beat
    _counts: dict[tuple[int, str, str], int] = attrs.field(factory=dict)
    _took: dict[int, float] = attrs.field(factory=dict)  # by pass of the heartbeat
    _usual_ns: dict[tuple[int, str, str], float] = attrs.field(factory=dict)  # of the passes that were seen last
    _seen_beat: tuple[int, int] = (0, 0)  # beats, and when the last of them was, at the last look
    # For so long the run has stood at least in the step that goes on: by its beats, and by its passes, as those of one
    # look may be of different moments.
    _stood_s: float = 0.0
    _held_s: float = 0.0
    _left_out_s: float = 0.0  # of the time since the first step, as the run stood

    def note_stop(self, for_s: float) -> None:
        """Note that the run stands, for so long by now: the step that goes on is to count as a usual one."""
        self._stood_s = max(self._stood_s, for_s)
        self._held_s = max(self._held_s, for_s)

    def take(self, passes: Sequence[LanePasses], beats: int, beat_ns: int, first_beat_ns: int | None = None) -> None:
        """Take what was completed since the last look, and how many heartbeats there were, the last and first one when.

        More passes between two looks than a ring of the page holds count with the mean of those that are there.
        """
        passes = self._without_stop(passes, beats, beat_ns)
        if self._began is None and first_beat_ns is not None and _is_whole(passes, beats):
            # A short attempt may be over by the first look. The first pass of each section comes before the first beat.
            passes = [new._replace(start=1, samples_ns=new.samples_ns[1:]) if new.start == 0 else new for new in passes]
            for new in passes:
                self._counts.setdefault((new.lane, new.name, new.kind), 1)
            self._began = 1, first_beat_ns
            self.seconds.clear()
            self.amount = 0.0
        self._lanes.update(new.lane for new in passes if new.kind in BEAT_KINDS)
        for new in passes:
            passed = self._passed(new)
            if new.is_joint:
                self._joint.add((new.name, new.kind))
            if new.kind == WORK:
                self._take_work(new, passed)
            elif passed and (not self._lanes or new.lane in self._lanes):
                mean_s = sum(new.samples_ns) / len(new.samples_ns) / _NANO
                self.seconds[new.name, new.kind] = self.seconds.get((new.name, new.kind), 0.0) + passed * mean_s
            if new.kind in BEAT_KINDS and new.samples_ns:
                self.longest_s = max(self.longest_s, max(new.samples_ns) / _NANO)
                self._took.update(enumerate((ns / _NANO for ns in new.samples_ns), new.start))
        self._fit_work(passes)
        if self._began is None:
            if beats > 0:
                self._began = beats, beat_ns
                self.seconds.clear()
                self.amount = 0.0
            self.longest_s = 0.0
            return
        self.steps = max(self.steps, beats - self._began[0])
        self.wall_s = max(self.wall_s, (beat_ns - self._began[1]) / _NANO - self._left_out_s)

    def _without_stop(self, passes: Sequence[LanePasses], beats: int, beat_ns: int) -> Sequence[LanePasses]:
        """Return the passes as if the run had not stood: those that hold the stop last as long as usual ones.

        A section may be over before its step is. So whatever lasted half as long as the stop is taken for it, until the
        rank has completed a step; that one's time beyond a usual step is left out of all.
        """
        limit_ns, is_over = self._held_s / 2 * _NANO, not self._stood_s
        found = []
        for new in passes:
            if new.kind != WORK and new.samples_ns:
                usual = [ns for ns in new.samples_ns if not limit_ns or ns < limit_ns]
                key = new.lane, new.name, new.kind
                usual_ns = sum(usual) / len(usual) if usual else self._usual_ns.get(key, 0.0)
                self._usual_ns[key] = usual_ns
                if len(usual) < len(new.samples_ns):
                    kept = [int(usual_ns) if ns >= limit_ns else ns for ns in new.samples_ns]
                    new = new._replace(samples_ns=kept)
            found.append(new)
        if passes and (is_over or any(new.kind in BEAT_KINDS for new in passes)):
            self._held_s = 0.0
        before, before_ns = self._seen_beat
        self._seen_beat = beats, beat_ns
        if self._stood_s and beats > before:
            # Also of a stop between two steps, of which no pass may tell.
            took_s, usual_s = (beat_ns - before_ns) / _NANO, self.wall_s / self.steps if self.steps else 0.0
            if before and took_s >= self._stood_s / 2:
                self._left_out_s += max(0.0, took_s - (beats - before) * usual_s)
            self._stood_s = 0.0
        return found

    @property
    def completed(self) -> int:
        """How many steps it has completed in this attempt; `steps` are those that are measured: all but the first."""
        return self._seen_beat[0]

    @property
    def own_s(self) -> float | None:
        """Seconds in sections in which the rank itself works; None where it has told of none.

        A section inside one of another name counts twice, on every rank alike: what is compared are ranks of one
        program.
        """
        own = [s for key, s in self.seconds.items() if key[1] in _OWN and key not in self._joint]
        return sum(own) if own else None

    def _passed(self, new: LanePasses) -> int:
        """Return how many passes of a row are new; 0 where none of them is there to be looked at."""
        key = new.lane, new.name, new.kind
        before, count = self._counts.get(key, 0), new.start + len(new.samples_ns)
        self._counts[key] = max(before, count)
        return count - before if new.samples_ns and count > before else 0

    def _take_work(self, new: LanePasses, passed: int) -> None:
        known = [amount for word in new.samples_ns if 0 < (amount := _amount(word)) < _MOST_WORK]
        if new.name == _STEPS_ROW and known:
            self.amount += passed * sum(known) / len(new.samples_ns)

    def _fit_work(self, passes: Sequence[LanePasses]) -> None:
        for new in passes:
            if new.kind == WORK and new.name == _STEPS_ROW:
                for number, word in enumerate(new.samples_ns, new.start):
                    amount, took_s = _amount(word), self._took.get(number)
                    if took_s is not None and number > 0 and 0 < amount < _MOST_WORK:
                        self.fit.add(amount, took_s)
        for number in sorted(self._took)[:-_MOST_WAITING]:
            del self._took[number]


def _is_whole(passes: Sequence[LanePasses], beats: int) -> bool:
    """Tell whether the ring of the page still holds each heartbeat: who sees a rank for the first time has seen all."""
    return any(new.kind in BEAT_KINDS and new.start == 0 and len(new.samples_ns) == beats > 1 for new in passes)


def _amount(word: int) -> float:
    """Return the amount of work that a row holds in place of a duration."""
    (amount,) = struct.unpack("d", struct.pack("Q", word & (1 << 64) - 1))
    return float(amount)


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
        "completed": max(steps.completed for steps in known.values()),
        "wall_s": round(max(steps.wall_s for steps in known.values()), 3),
        "ranks": list(known),
        "data_s": round(max(_sum(steps, is_data) for steps in known.values()), 3),
        "saves_s": round(max(_sum(steps, is_save) for steps in known.values()), 3),
        "work_per_s": sum(steps.amount / steps.wall_s for steps in known.values()) or None,
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
    recent_steps: int | None = None
    """How many steps the newest `progress` told of; None where those are too few to tell what a step takes."""
    recent_wall_s: float | None = None
    """What they took."""

    @property
    def step_s(self) -> float:
        """Mean time of a step over the attempt, in seconds."""
        return self.wall_s / self.steps

    @property
    def recent_s(self) -> float:
        """Mean time of the newest steps, in seconds; of all where those are too few."""
        return (
            self.step_s
            if not self.recent_steps or self.recent_wall_s is None
            else self.recent_wall_s / self.recent_steps
        )

    def section(self, kinds: Iterable[str], belongs: Any = None) -> SectionShare | None:
        """Return the section with the largest share among those of `kinds` that belong."""
        found = (one for one in self.sections if one.kind in kinds and (not belongs or belongs(one.name, one.kind)))
        return max(found, key=lambda one: one.share, default=None)


def step_time_of(events: Iterable[Mapping[str, Any]]) -> StepTime | None:
    """Return the step time of the newest attempt; None where nothing is told. `events` are in the order of time."""
    told: dict[str, Mapping[str, Any]] = {}
    recent: dict[tuple[str, int], tuple[int, float]] = {}
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
        elif name == Event.PROGRESS.value and (counted := _recent(event)) is not None:
            recent[key] = counted  # type: ignore[index]
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
        recent_steps=recent[newest][0] if newest in recent else None,
        recent_wall_s=recent[newest][1] if newest in recent else None,
    )


def _recent(event: Mapping[str, Any]) -> tuple[int, float] | None:
    """Return steps and seconds of a `progress` event that are enough to tell what a step takes, None otherwise."""
    steps, wall_s = event.get("steps"), event.get("wall_s")
    is_told = type(steps) is int and type(wall_s) in (int, float)
    return (steps, float(wall_s)) if is_told and steps >= _LEAST_RECENT and 0 < wall_s < 1e15 else None  # type: ignore[operator, arg-type, return-value]


def measures_data(events: Iterable[Mapping[str, Any]]) -> bool | None:
    """Tell whether some loop of the run says when it waits for its data; None before any step was measured."""
    measured = None
    for event in events:
        if event.get("event") == Event.STEP_TIME.value and _is_sound(event):
            measured = bool(measured) or any(is_data(str(s["name"]), str(s["kind"])) for s in event["sections"])
    return measured


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
        _ = [(told["name"], told["kind"]) for told in event["sections"]]
        are_lists = isinstance(event["ranks"], list) and isinstance(event["sections"], list)
        has_ranks = are_lists and bool(event["ranks"])
        return has_ranks and event["steps"] > 0 and numbers[0] > 0 and all(0 <= n < 1e15 for n in numbers)
    except (KeyError, TypeError, ValueError, OverflowError):
        return False
