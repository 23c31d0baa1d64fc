"""The facts that a report shows: values alone, read from a run directory by `read`, drawn by `page` and by `dashboard`.

Times are Unix seconds, durations seconds. None: nothing is known. Every list is bounded, whatever the size of the run,
so that a page stays readable and small; what was left out is counted beside it. Texts come from jobs and are to be
escaped by whoever shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen
class Headline:
    """The first thing that is read: what happened, why, what to do; sentences. `commands` are to be copied."""

    state: str
    """running, finished, ended, lost or empty, as `resilience status` has it."""
    what: str
    why: str | None = None
    next: str | None = None
    commands: tuple[str, ...] = ()


@attrs.frozen
class Segment:
    """A stretch of the run's time; `attempt` is the place among the attempts of all jobs, None while none ran.

    Of training it is known how long it waited for data, saved and did lost steps, but not when: `parts` then has
    several buckets, which are those of the whole attempt in proportion.
    """

    bucket: str
    """The one that takes most of it."""
    began_at: float
    ended_at: float
    attempt: int | None
    parts: Mapping[str, float] = attrs.field(
        default=attrs.Factory(lambda self: {self.bucket: self.ended_at - self.began_at}, takes_self=True)
    )
    """Seconds by bucket, which add up to its length. Over all segments they add up to the buckets of the run."""

    @property
    def is_shared(self) -> bool:
        """Whether it is known what it went into, but not when."""
        return len(self.parts) > 1


@attrs.frozen
class AttemptTimes:
    """One attempt: the seconds of each bucket, in the order in which they began, and what it did."""

    job: str
    attempt: int
    """As its job counts, from 0."""
    began_at: float
    ended_at: float
    buckets: Mapping[str, float]
    first_step: int | None
    steps: int | None
    """Completed at its end, counted over attempts; None where nobody counts so."""
    lost_steps: int | None
    incidents: tuple[str, ...]
    """Ids."""
    job_number: int = 1
    """Which job of the run directory it belongs to, from 1."""
    completed: int | None = None
    """How many steps it has completed itself."""


@attrs.frozen
class Pin:
    """Something that is marked in every picture with a time axis: an incident, or a stop that all ranks agreed on."""

    id: str
    at: float
    kind: str
    """crash, hang, slow, preemption or numerics."""
    label: str
    step: int | None = None


@attrs.frozen
class StandstillFacts:
    """A rank stood still and went on by itself, so that there is no incident of it."""

    id: str
    at: float
    seconds: float
    text: str
    attempt: int
    job_number: int


@attrs.frozen
class CurveFacts:
    """One line of a picture: points in the order of time, thinned to some hundreds. The arrays have one length."""

    name: str
    unit: str
    at: tuple[float, ...]
    steps: tuple[int | None, ...]
    """The step of each point; global where the run counts so."""
    values: tuple[float | None, ...]
    """None: a gap, as between two attempts; also what is no finite number (`is_finite` has it)."""
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    """The band around the values: least and most among the ranks, or of what was thinned; empty: none."""
    not_finite: tuple[tuple[float, int | None, str], ...] = ()
    """Time, step and text (`nan`, `inf`) of points that cannot be drawn."""


@attrs.frozen
class HeatMap:
    """Ranks over time: each cell compares a rank's own time in a step with the others' at that time.

    With more ranks than rows can be read, a row is a group of ranks that follow one another, and its cells are those of
    its slowest member, who is named; the slowest single ranks stand as rows of their own as well (`worst`).
    """

    times: tuple[float, ...]
    """Edges of the columns: one more than there are columns."""
    rows: tuple[tuple[int, int], ...]
    """First and last rank of each row."""
    cells: tuple[tuple[float | None, ...], ...]
    """By row and column: own time over the median of all ranks (1.0: as the others); None: nothing was told."""
    slowest: tuple[tuple[int | None, ...], ...]
    """By row and column: the rank whose value it is."""
    nodes: tuple[str | None, ...]
    """By row: the node, where all its ranks are on one."""
    worst: tuple[tuple[int, str | None, float, tuple[float | None, ...]], ...]
    """Of the slowest ranks: rank, node, mean ratio, and its cells."""
    measure: str
    """`own`: time in its own sections, waits for others left out; `step`: whole steps, as no sections were told."""


@attrs.frozen
class ScoreFacts:
    """Scores of one kind in the newest straggler report, 0 (slow) to 1: over all ranks, and the worst of them."""

    name: str
    """relative or individual, and the section."""
    least: float
    median: float
    most: float
    worst: tuple[tuple[int, str | None, float], ...]
    """Rank, node, score."""


@attrs.frozen
class StragglerFacts:
    """Slow ranks: the newest report's scores, and every verdict in the order of time."""

    at: float | None
    ranks: int
    threshold: float | None
    scores: tuple[ScoreFacts, ...]
    verdicts: tuple[tuple[float, str, str], ...]
    """Time, what (`found`, `over`, ...) and a sentence."""
    hidden_verdicts: int = 0


@attrs.frozen
class CheckpointFacts:
    """One save, or one that failed or was passed over."""

    at: float
    step: int | None
    outcome: str
    """committed, failed, skipped or quarantined."""
    seconds: float | None
    """From its beginning to its commit."""
    stall_s: float | None
    size_bytes: int | None
    why: str | None = None


@attrs.frozen
class FindingFacts:
    """What the doctor, the preflight or the watch found on a node, the newest of each kind; `count` of how many."""

    at: float
    node: str | None
    check: str
    status: str
    """warning or failure."""
    text: str
    cure: str | None
    count: int = 1


@attrs.frozen
class StackFacts:
    """The stack of one rank in an incident, innermost frame first; `is_users` by frame."""

    rank: int
    node: str | None
    frames: tuple[str, ...]
    is_users: tuple[bool, ...]

    @property
    def line(self) -> str | None:
        """The innermost frame of the user's own, which may stand below dozens of libraries'."""
        return next((frame for frame, is_users in zip(self.frames, self.is_users, strict=True) if is_users), None)


@attrs.frozen
class IncidentFacts:
    """One incident as its card shows it."""

    id: str
    kind: str
    attempt: int | None
    at: float | None
    headline: str
    paragraph: str
    """What `resilience why` says below the headline, without stack and commands."""
    culprits: tuple[tuple[int, str | None, str | None, str | None], ...]
    """Rank, node, step in words, section."""
    victims: str
    """Ranks in short (`0-6, 8`)."""
    category: str | None
    cause: str | None
    meaning: str | None
    """The cause in words, from the taxonomy."""
    action: str | None
    what_to_change: str | None
    confidence: float | None
    latency_s: float | None
    recovered_at: float | None
    recovery_s: float | None
    lost_steps: int | None
    stacks: tuple[StackFacts, ...]
    evidence: tuple[tuple[str, str], ...]
    """Source and text."""
    rerun: str | None
    """The command that goes on after it."""
    before: str | None = None
    """That it is not the first of its kind, where the history knows."""


@attrs.frozen
class RankFacts:
    """A rank at the end of what is known, or now: for the table of a small run, and the worst ranks of a large one."""

    rank: int
    node: str | None
    state: str
    step: str | None
    last_beat_s: float | None
    sections: tuple[str, ...]
    memory: str = ""
    """What it had last, and the most of it; host, then device."""


@attrs.frozen
class RunFacts:
    """Everything that a report shows of one run directory, at one moment."""

    run_dir: str
    name: str
    at: float
    """When it was read."""
    version: str
    """Of the SDK."""
    headline: Headline
    job: str | None = None
    """The newest one."""
    job_number: int = 1
    """Which job of the run directory that is, from 1."""
    job_started_at: float | None = None
    script: str | None = None
    world_size: int | None = None
    nodes: int | None = None
    started_at: float | None = None
    """When the first job began."""
    ended_at: float | None = None
    """When the last thing happened; now while it runs."""
    goodput: Mapping[str, Any] = attrs.field(factory=dict)
    """As `resilience goodput --json` prints it, without its attempts."""
    segments: tuple[Segment, ...] = ()
    attempts: tuple[AttemptTimes, ...] = ()
    hidden_attempts: int = 0
    pins: tuple[Pin, ...] = ()
    step_time: tuple[CurveFacts, ...] = ()
    loss: tuple[CurveFacts, ...] = ()
    shares: tuple[tuple[str, str, float, float, float], ...] = ()
    """Of the newest attempt: section, kind, and its share of a step: mean, least and most over the ranks."""
    why_slow: str | None = None
    throughput: str | None = None
    heat: HeatMap | None = None
    stragglers: StragglerFacts | None = None
    checkpoints: tuple[CheckpointFacts, ...] = ()
    hidden_checkpoints: int = 0
    resume: Mapping[str, Any] | None = None
    """What is known of the newest resume, as `resilience status --json` has it."""
    findings: tuple[FindingFacts, ...] = ()
    incidents: tuple[IncidentFacts, ...] = ()
    hidden_incidents: int = 0
    standstills: tuple[StandstillFacts, ...] = ()
    """Those of the jobs in which they matter."""
    stood: str | None = None
    """What the newest job tells of them, one sentence."""
    ranks: tuple[RankFacts, ...] = ()
    memory_grows: tuple[str, ...] = ()
    """What is known of ranks whose memory grew with the steps to the end, one sentence each."""
    hidden_ranks: int = 0
    events: tuple[tuple[float, str, str], ...] = ()
    """The newest ones that a person cares about: time, name and a sentence."""
    problems: tuple[str, ...] = ()
    """What could not be read."""
