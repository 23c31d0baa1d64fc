"""The plan of a rehearsal: which fault strikes whom and when, from what an undisturbed run was seen to do. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.faults import Plan
from resilience_sdk.incidents import Incident
from resilience_sdk.rank.rehearsal import RehearsedRank

FAULTS = (
    "kill",
    "exit",
    "exception",
    "hang",
    "hang-gil",
    "pause",
    "slow",
    "preempt",
    "disk-full",
    "corrupt-checkpoint",
    "nan",
    "monitor-kill",
)
_MIN_STUCK_AFTER_S = 4.0
_MAX_STUCK_AFTER_S = 60.0
_MIN_PREEMPT_S = 10.0
_MIN_STEPS = 4
_SLOW_STEPS = 24  # two windows of eight steps are compared, and they begin at no particular step
_ROOM_S = 6.0  # what an agreement on a stop, or the start of another monitor, may need
_RESTART_S = 2.0


@attrs.frozen
class JobFacts:
    """What one rehearsed job has left behind: of one start, or of two where it was asked to leave."""

    exit_codes: tuple[int | None, ...]
    """Of each start; None: it did not end in its time."""
    seconds: float
    traces: tuple[tuple[RehearsedRank, ...], ...]
    """Of each start, by attempt and rank."""
    incidents: tuple[Incident, ...]
    events: tuple[Mapping[str, Any], ...]

    @property
    def last_attempt(self) -> tuple[RehearsedRank, ...]:
        """The traces of the attempt that came last, by rank; empty where no rank has begun."""
        last = self.traces[-1] if self.traces else ()
        newest = max((trace.attempt for trace in last), default=0)
        return tuple(trace for trace in last if trace.attempt == newest)

    def named(self, *names: Event) -> list[Mapping[str, Any]]:
        """Return the journal's events of these names, in their order."""
        return [event for event in self.events if event.get("event") in names]


@attrs.frozen
class Baseline:
    """What an undisturbed run does. Durations in seconds."""

    ranks: int
    seconds: float
    steps: int
    """That each rank takes at least."""
    numbers: tuple[int, ...]
    """The number of each step, as the loop counts it."""
    step_s: float
    longest_step_s: float
    saves: tuple[int, ...]
    """After how many steps something is saved."""
    saver: int
    """The rank that saves most."""
    progress: str | None
    section: str | None
    """In which all ranks are compared, the first of several."""
    shows_loss: bool
    end: tuple[RehearsedRank, ...]

    @property
    def training_s(self) -> float:
        """How long its steps take."""
        return self.steps * self.step_s


def learn(facts: JobFacts, ranks: int) -> Baseline:
    """Return what the facts of an undisturbed run say."""
    traces = facts.last_attempt
    gaps = [late - early for trace in traces for (_, early), (_, late) in zip(trace.steps, trace.steps[1:])]  # noqa: B905
    shortest = min(traces, key=lambda trace: len(trace.steps), default=RehearsedRank(0, 0))
    saver = max(traces, key=lambda trace: len(set(trace.saves)), default=RehearsedRank(0, 0))
    sources = {trace.progress for trace in traces}
    return Baseline(
        ranks=ranks,
        seconds=facts.seconds,
        steps=len(shortest.steps),
        numbers=tuple(number for number, _ in shortest.steps),
        step_s=statistics.median(gaps) if gaps else 0.0,
        longest_step_s=max(gaps, default=0.0),
        saves=tuple(sorted({after for after in saver.saves if after > 0})),
        saver=saver.rank,
        progress=next(iter(sources)) if len(sources) == 1 else None,
        section=next((name for name in shortest.sections if all(name in one.sections for one in traces)), None),
        shows_loss=bool(facts.named(Event.LOSS)),
        end=traces,
    )


@attrs.frozen
class Deadlines:
    """The times that a rehearsed job goes by, in seconds; shorter than a real one's, for nobody waits for them here."""

    stuck_after_s: float = 10.0
    """Without any movement of a rank, until it is called hung."""
    preempt_s: float = 10.0
    """From the signal to the end: for some steps, and a save."""


def deadlines(baseline: Baseline, stuck_after_s: float | None = None) -> Deadlines:
    """Return what goes with the longest step of the undisturbed run; `stuck_after_s` is the user's, if it is his."""
    longest_s = baseline.longest_step_s
    return Deadlines(
        stuck_after_s or min(_MAX_STUCK_AFTER_S, max(_MIN_STUCK_AFTER_S, 4 * longest_s)),
        max(_MIN_PREEMPT_S, 6 * longest_s),
    )


def moment(baseline: Baseline) -> int:
    """Return behind how many steps a fault strikes: between two saves where there are any, else in the middle."""
    middle = baseline.steps // 2
    earlier = [after for after in baseline.saves if after < baseline.steps - 1]
    if not earlier:
        return middle
    newest = max([after for after in earlier if after <= middle], default=earlier[0])
    following = next((after for after in baseline.saves if after > newest), baseline.steps)
    return min(newest + max(1, (following - newest) // 2), baseline.steps - 2)


def faults_for(kind: str, baseline: Baseline, stuck_after_s: float) -> list[Plan] | str:
    """Return the faults of one rehearsal, the one that it is about first, or why it cannot be rehearsed."""
    if (why := _impossible(kind, baseline)) is not None:
        return why
    at, last = moment(baseline), baseline.ranks - 1
    saves = kind in ("disk-full", "corrupt-checkpoint")
    rank = baseline.saver if saves else last
    plan = Plan(kind, rank=rank, step=baseline.numbers[at])
    longer = _longer(baseline, at)
    early = baseline.steps // 4
    own = {
        "hang": lambda: [attrs.evolve(plan, how="c")],
        "hang-gil": lambda: [attrs.evolve(plan, kind="hang", how="gil")],
        "kill": lambda: [attrs.evolve(plan, how="sigkill")],
        "exit": lambda: [attrs.evolve(plan, kind="kill", how="exit")],
        "exception": lambda: [attrs.evolve(plan, kind="kill", how="exception")],
        "slow": lambda: [
            attrs.evolve(
                plan,
                step=baseline.numbers[early],
                section=baseline.section,
                seconds=round(max(0.05, baseline.step_s), 3),
            ),
            *_longer(baseline, early),
        ],
        "pause": lambda: [attrs.evolve(plan, seconds=round(stuck_after_s / 2, 1))],
        "preempt": lambda: [attrs.evolve(plan, to="job"), *longer],
        "monitor-kill": lambda: [plan, *longer],
        "nan": lambda: [plan, *longer],
    }
    return own.get(kind, lambda: [plan])()


def _longer(baseline: Baseline, at: int) -> list[Plan]:
    """Return what makes each step after `at` longer where need be, so that what follows happens before the end."""
    more_s = round(_ROOM_S / (baseline.steps - at) - baseline.step_s, 3)
    return [Plan("slow", step=baseline.numbers[at], seconds=more_s)] if more_s > 0 else []


def _impossible(kind: str, baseline: Baseline) -> str | None:
    if baseline.progress not in ("heartbeats", "optimizer"):
        return "no step is seen, so there is no moment at which it could strike"
    if baseline.steps < _MIN_STEPS:
        return f"the job takes {baseline.steps} steps, too few to strike between them; let it take more"
    if kind in ("disk-full", "corrupt-checkpoint") and not baseline.saves:
        return "the script saves nothing with torch.save"
    if kind == "slow" and baseline.ranks < 2:
        return "one rank alone is compared with nobody; use --nproc-per-node 2"
    if kind == "slow" and baseline.section is None:
        return (
            "no section shows what a rank does before it waits for the others; straggler.attach(model, optimizer) or "
            "straggler.section() makes them"
        )
    if kind == "slow" and baseline.steps - baseline.steps // 4 < _SLOW_STEPS:
        return f"ranks are compared over windows of 8 steps, and {baseline.steps} steps are too few"
    if kind == "nan" and not baseline.shows_loss:
        return "the loss is not shown to the SDK; call numerics.check(loss=loss) once per step, or use an adapter"
    return None


def estimate_s(kinds: Sequence[str], baseline: Baseline, stuck_after_s: float) -> float:
    """Return about how many seconds the rehearsals of these faults take together."""
    return sum(_seconds(kind, baseline, stuck_after_s) for kind in kinds if _impossible(kind, baseline) is None)


def _seconds(kind: str, baseline: Baseline, stuck_s: float) -> float:
    more = {
        "hang": stuck_s + _RESTART_S,
        "hang-gil": stuck_s + _RESTART_S,
        "slow": _ROOM_S + baseline.steps * max(0.05, baseline.step_s),
        "pause": stuck_s / 2,
        "preempt": baseline.seconds - baseline.training_s / 2 + _RESTART_S,
        "monitor-kill": _ROOM_S,
        "nan": _ROOM_S,
    }
    return baseline.seconds + more.get(kind, _RESTART_S + baseline.training_s / 2)
