"""The plan of a rehearsal: which fault strikes whom and when, from what an undisturbed run was seen to do. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.core.settings.fields import Settings
from resilience_sdk.faults import Plan
from resilience_sdk.incidents import Incident
from resilience_sdk.rank.rehearsal import RehearsedRank
from resilience_sdk.rehearse import moments
from resilience_sdk.rehearse.moments import KillMoments

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
    *moments.KINDS,
)
STILL = ("hang", "hang-gil", "pause")
"""Those in which a rank stands still: only there is nobody to wait for as long as in a real job."""
_OF_SAVES = ("disk-full", "corrupt-checkpoint", moments.IN_SAVE)
_MIN_STUCK_AFTER_S = 4.0
_REAL = Settings()
_MIN_STEPS = 4
_SLOW_STEPS = 24  # two windows of eight steps are compared, and they begin at no particular step
_SLOW_S = 0.05
_TOLD_STEPS = 36  # after which a slow rank is told, as a rule
_LAST_STEPS = 4
# What an agreement on a stop, or the start of another monitor, may need; and on a machine that is busy with other work.
_SOON_S = 6.0
_LATE_S = 24.0
_ANSWER_S = 1.5  # what they do need, where nothing else runs
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
    start_s: float
    """From the start of a rank to its first step: what it loads meanwhile, it may have to wait for."""
    saves: tuple[int, ...]
    """After how many steps something is saved."""
    saver: int
    """The rank that saves most."""
    progress: str | None
    section: str | None
    """In which all ranks are compared, the first of several."""
    shows_loss: bool
    end: tuple[RehearsedRank, ...]
    moments: KillMoments = attrs.field(factory=KillMoments)
    is_one_process: bool = False
    """Whether the script is one, however many are asked for."""

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
        start_s=max((one.steps[0][1] - one.began_s for one in traces if one.steps and one.began_s), default=0.0),
        saves=tuple(sorted({after for after in saver.saves if after > 0})),
        saver=saver.rank,
        progress=next(iter(sources)) if len(sources) == 1 else None,
        section=next((name for name in shortest.sections if all(name in one.sections for one in traces)), None),
        shows_loss=bool(facts.named(Event.LOSS)),
        end=traces,
        moments=moments.find(traces),
    )


@attrs.frozen
class Deadlines:
    """The times that a rehearsed job goes by, in seconds. They end what is broken; nobody waits for them elsewhere."""

    stuck_after_s: float = _REAL.stuck_after
    """Without any movement of a rank, until it is called hung."""
    preempt_s: float = _REAL.preempt_time
    """From the signal to the end: for some steps, and a save."""


def deadlines(kind: str, baseline: Baseline, stuck_after_s: float | None = None) -> Deadlines:
    """Return those of one fault; `stuck_after_s` is the user's, if it is his.

    Where a rank stands still, they go with the longest step of the undisturbed run and with its start. Everywhere else
    they are a real job's, so that nobody is called hung who is only slow because the machine is busy.
    """
    quick_s = max(_MIN_STUCK_AFTER_S, 4 * baseline.longest_step_s, baseline.start_s)
    own_s = min(_REAL.stuck_after, quick_s) if kind in STILL else _REAL.stuck_after
    return Deadlines(stuck_after_s or round(own_s, 1), max(_REAL.preempt_time, 6 * baseline.longest_step_s))


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
    saves = kind in _OF_SAVES
    rank = baseline.saver if saves else last
    plan = Plan(kind, rank=rank, step=baseline.numbers[at])
    longer = _longer(baseline, at, stuck_after_s, (baseline.steps - at) // 2)
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
                seconds=round(max(_SLOW_S, baseline.step_s), 3),
            ),
            # It shows by steps, not by time: so only the last ones wait.
            *_longer(baseline, early, stuck_after_s, _LAST_STEPS),
        ],
        "pause": lambda: [attrs.evolve(plan, seconds=round(stuck_after_s / 4, 1))],
        "preempt": lambda: [attrs.evolve(plan, to="job"), *longer],
        "monitor-kill": lambda: [plan, *longer],
        "nan": lambda: [plan, *longer],
        moments.IN_SAVE: lambda: [attrs.evolve(plan, kind="kill", how="sigkill", where="save")],
        # In the next attempt, whose steps may count anew, at the first that comes.
        moments.TWICE: lambda: [Plan("kill", "sigkill", rank=rank, step=plan.step, attempt=attempt)
                                for plan, attempt in ((plan, 0), (attrs.evolve(plan, step=None), 1))],
    }  # fmt: skip
    if kind in moments.OF_THE_RUN:
        return _kill_at(moments.choose(kind, baseline.moments, baseline.numbers, baseline.numbers[at]))
    return own.get(kind, lambda: [plan])()


def _kill_at(found: moments.KillMoment | str) -> list[Plan] | str:
    if isinstance(found, str):
        return found
    return [Plan("kill", "sigkill", rank=found.rank, step=found.step, section=found.section)]


def _longer(baseline: Baseline, at: int, stuck_after_s: float, late: int) -> list[Plan]:
    """Return what makes the steps after `at` longer where need be, so that what follows happens before the end.

    The `late` ones are longer by far: they are not reached but on a busy machine, since the job goes on at its own pace
    as soon as what has to follow was seen.
    """
    plans = []
    for steps, room_s in ((baseline.steps - at, _SOON_S), (late, _LATE_S)):
        # No rank may sleep for so long that it looks hung.
        more_s = round(min(room_s / steps - baseline.step_s, stuck_after_s / 4), 3) if steps else 0.0
        if more_s > 0:
            plans.append(Plan("slow", step=baseline.numbers[baseline.steps - steps], seconds=more_s))
    return plans


def _impossible(kind: str, baseline: Baseline) -> str | None:
    if baseline.progress not in ("heartbeats", "optimizer"):
        return "no step is seen, so there is no moment at which it could strike"
    if baseline.steps < _MIN_STEPS:
        return f"the job takes {baseline.steps} steps, too few to strike between them; let it take more"
    if kind in _OF_SAVES and not baseline.saves:
        return "the script saves nothing with torch.save"
    if kind == "slow" and baseline.is_one_process:
        return "the script is one process, so there is no other rank to compare it with"
    if kind == "slow" and baseline.ranks < 2:
        return "one rank alone is compared with nobody; use --nproc-per-node 2"
    if kind == "slow" and baseline.section is None:
        return (
            "no section shows what a rank does before it waits for the others; straggler.attach(model, optimizer) or "
            "straggler.section() makes them"
        )
    if kind == "slow" and baseline.steps - baseline.steps // 4 < _SLOW_STEPS:
        return f"ranks are compared over windows of 8 steps, and {baseline.steps} steps are too few"
    if kind in moments.OF_THE_RUN:
        found = moments.choose(kind, baseline.moments, baseline.numbers, baseline.numbers[moment(baseline)])
        return found if isinstance(found, str) else None
    if kind == "nan" and not baseline.shows_loss:
        return "the loss is not shown to the SDK; call numerics.check(loss=loss) once per step, or use an adapter"
    return None


def estimate_s(kinds: Sequence[str], baseline: Baseline, stuck_after_s: float | None = None) -> float:
    """Return about how many seconds the rehearsals of these faults take together."""
    return sum(
        _seconds(kind, baseline, deadlines(kind, baseline, stuck_after_s).stuck_after_s)
        for kind in kinds
        if _impossible(kind, baseline) is None
    )


def _seconds(kind: str, baseline: Baseline, stuck_s: float) -> float:
    slow_s = max(_SLOW_S, baseline.step_s) + max(0.0, _SOON_S / baseline.steps - baseline.step_s)
    more = {
        "hang": stuck_s + _RESTART_S,
        "hang-gil": stuck_s + _RESTART_S,
        "slow": _ANSWER_S + min(_TOLD_STEPS, baseline.steps) * slow_s,
        "pause": stuck_s / 4,
        "disk-full": 0.0,
        "preempt": baseline.seconds - baseline.training_s / 2 + _ANSWER_S,
        "monitor-kill": _ANSWER_S,
        "nan": _ANSWER_S,
        moments.TWICE: 2 * _RESTART_S + baseline.start_s + baseline.training_s / 2,
    }
    return baseline.seconds + more.get(kind, _RESTART_S + baseline.training_s / 2)


# -- what has to be seen before a job that is slowed down may go on at its own pace


def has_answer(kind: str, plan: Plan, events: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the journal tells by now of what has to follow from the fault."""
    is_answer = _ANSWERS.get(kind)
    return is_answer is not None and any(is_answer(plan, event) for event in events)


def _names_straggler(plan: Plan, event: Mapping[str, Any]) -> bool:
    ranks = event.get("ranks")
    is_its = isinstance(ranks, list) and plan.rank in ranks and not event.get("is_global")
    return event.get("event") == Event.STRAGGLER and is_its


_ANSWERS: Mapping[str, Callable[[Plan, Mapping[str, Any]], bool]] = {
    "monitor-kill": lambda plan, event: event.get("event") == Event.MONITOR_REPLACED,
    "nan": lambda plan, event: event.get("event") == Event.INCIDENT and event.get("kind") == "numerics",
    "slow": _names_straggler,
}
