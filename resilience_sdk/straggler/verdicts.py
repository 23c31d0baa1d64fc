"""Verdicts about slow ranks: they begin, last and end with what is found in single windows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from resilience_sdk.straggler.windowing import WINDOW_STEPS, median

LEAST_EXCESS_S = 5e-4
"""Who loses less time than this is not called slow, however small the section: one of a tenth of a millisecond takes
twice as long when a processor clocks down or its caches are cold, on some ranks or on all, and for minutes."""


@attrs.frozen
class Rules:
    """Thresholds of the verdicts; `attrs.evolve` makes others. Ratios are shares: 0.05 is 5 % slower."""

    # (windows, least excess): what lasts longer is known better, so it may be smaller.
    spans: tuple[tuple[int, float], ...] = ((2, 0.05), (4, 0.04), (8, 0.03))
    # Least distance from the middle of the ranks, in standard deviations (from the median absolute deviation).
    z: float = 6.0
    # How many false flags a window may have over all its ranks: raises `z` in large fleets, see `needed_z`.
    false_flags: float = 1e-4
    # With fewer comparable ranks (or nodes) than this there are no statistics of peers.
    few: int = 5
    # Least excess over the median of the others where there are few.
    excess_of_few: float = 0.10
    # Least distance of what takes twice as long as the others where there are few, whose noise is known badly.
    z_of_few: float = 3.0
    # Least excess that also counts where there are few, when it began while we watched: a change point.
    change_of_few: float = 0.03
    # Least excess in standard deviations of the own level, as the scatter of the unit's own steps tells them.
    own_z: float = 5.0
    # Least excess as a share of the whole step: what nobody would notice is not reported.
    share_of_step: float = 0.02
    # And in seconds per step. From steps of 25 ms on the share of the step is more.
    least_excess_s: float = LEAST_EXCESS_S
    # A verdict that has stood for so many windows is persistent, before that it is transient.
    persistent_windows: int = 6
    # Least change of the median of all ranks that is called a global regression, and its least distance from the old
    # level in standard deviations.
    regression: float = 0.03
    regression_z: float = 5.5
    # A pass is a stall that takes longer than on the others by so many steps' time, by so many times the step that it
    # is in where that one is longer than usual (a long sequence), by so many times what the others take longer than
    # these where a pass lasts for many steps (a checkpoint), and by so many seconds.
    stall_steps: float = 8.0
    stall_own_steps: float = 4.0
    stall_ratio: float = 2.0
    stall_s: float = 0.2
    # In larger fleets somebody stalls once all the time: there it takes two stalls of a rank in `stall_windows`.
    stall_windows: int = 8
    lone_stall_ranks: int = 8

    def least_excess_of_pass_s(self, step_s: float, passes_per_step: float) -> float:
        """Return from which excess on somebody would notice it: seconds per pass of a section.

        `step_s` is the time of a step in seconds, 0.0 where it is not known.
        """
        return max(self.share_of_step * step_s, self.least_excess_s) / passes_per_step

    def needed_z(self, units: int) -> float:
        """Return the distance from the middle that is enough among so many ranks (or nodes).

        The tail of the normal distribution is at most exp(-z²/2)/2, so one of n values exceeds sqrt(2 ln(n / 2f)) less
        than f times. The tails of levels are heavier than that, so n is the square of the number of units.
        """
        return max(self.z, math.sqrt(2.0 * math.log(max(2.0, units**2 / (2.0 * self.false_flags)))))


MOST_Z = 99.0
"""No distance from the middle is said to be more."""

FOUND, STILL, OVER = "found", "still", "over"
TRANSIENT, PERSISTENT, GLOBAL = "transient", "persistent", "global"
_SHOWN_RANKS = 8


@attrs.frozen
class SlowVerdict:
    """Who is slow in what, since when and by how much."""

    kind: str
    """`transient`: seen, and not for long yet; `persistent`; `global`: everybody has become slower at once."""
    section: str
    section_kind: str
    """What was measured: `compute`, `io`, `comm`, or `gpu` for the time on the device."""
    role: str
    ranks: tuple[int, ...]
    """The slow ranks; empty in a global verdict, but for a job of a single rank."""
    nodes: tuple[str, ...]
    whole_node: bool
    """Whether it is the node that is slow: all its ranks are."""
    since_step: int
    """First step of the window in which it was seen first."""
    last_step: int
    """Last step of the window in which it was seen last."""
    ratio: float = 1.0
    """How slow: 1.10 is 10 % slower than the others, or than before in a global verdict."""
    excess_s: float = 0.0
    """Seconds that this costs in each step."""
    share: float = 0.0
    """The same as a share of the median time of a step."""
    z: float = 0.0
    """Distance from the middle in standard deviations."""
    windows: int = 0
    """For how many windows it has stood."""
    confidence: float = 0.0
    """0 to 1, see `confidence()`."""
    until_step: int | None = None
    """Last step before it was over."""
    waits_least: bool | None = None
    """Whether the others wait for these ranks (True), or these wait as much as others (False); None: cannot tell."""
    unseen_steps: int | None = 0
    """How many steps before `since_step` it may have begun, as no window of them was judged; None: no window was
    judged before, so that it may have been so from the beginning."""
    load: str = ""
    """What the machine's load has to do with it, where that is the cause: then it is not the training's."""

    @property
    def is_global(self) -> bool:
        """Whether everybody has become slower."""
        return self.kind == GLOBAL

    @property
    def where(self) -> str:
        """What was measured, in words: the section, and whether on the device."""
        return f"section {self.section}{' on the GPU' if self.section_kind in ('gpu', 'gpu_comm') else ''}"

    @property
    def who(self) -> str:
        """Who is slow, in words."""
        if self.is_global:
            return "all ranks" + (f" of role {self.role}" if self.role else "") + " together"
        shown = ", ".join(str(rank) for rank in self.ranks[:_SHOWN_RANKS])
        more = f" and {len(self.ranks) - _SHOWN_RANKS} more" if len(self.ranks) > _SHOWN_RANKS else ""
        ranks = f"rank{'s' if len(self.ranks) != 1 else ''} {shown}{more}"
        if self.whole_node:
            return f"node {self.nodes[0]} ({ranks})"
        nodes = [node for node in dict.fromkeys(self.nodes) if node]
        return ranks + (f" (node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)})" if nodes else "")

    def text(self) -> str:
        """Return the verdict as one line."""
        others = "before" if self.is_global else "the others"
        is_over = self.until_step is not None
        slower = f"{'was' if is_over else 'is'} {100 * (self.ratio - 1):.0f} % slower than {others}"
        if self.ratio >= 2.0:
            slower = f"{'took' if is_over else 'takes'} {self.ratio:.1f} times as long as {others}"
        when = f"since step {self.since_step}"
        if self.unseen_steps is None:
            when += " or before"
        elif self.unseen_steps:
            when += f" or up to {self.unseen_steps} steps before"
        if is_over:
            when = f"from{when.removeprefix('since')} to {self.until_step}"
        waits = {True: ", the others wait for it", False: ", but it waits as long as the others", None: ""}
        return (
            f"{self.who}: {self.where} {slower} {when} "
            f"({1000 * self.excess_s:.3g} ms a step, {100 * self.share:.0f} % of it{waits[self.waits_least]}); "
            f"{self.kind}, confidence {self.confidence:.2f}"
            + (f"; the machine's load, not the training: {self.load}" if self.load else "")
        )

    def ended(self) -> SlowVerdict:
        """Return the verdict as it is over."""
        return attrs.evolve(self, until_step=self.last_step)


@attrs.frozen
class Change:
    """What has changed about a verdict."""

    what: str
    """`found`, `still` (it has become persistent, or its ranks have changed) or `over`."""
    verdict: SlowVerdict
    number: int = 0
    """Which change of the attempt it is, from 1; 0: not published yet."""


def confidence(*, z: float, needed_z: float, windows: int, few: bool, waits_least: bool | None) -> float:
    """Return how sure a verdict is, 0 to 1.

    0.6 for what has passed all thresholds; + 0.05 for each window more than two, up to four of them; + 0.1 when it
    is twice as far out as it needs to be; + 0.1 when the waits agree, - 0.3 when they contradict; and at most 0.7
    where there are too few ranks to know how much they differ by themselves.
    """
    sure = 0.6 + 0.05 * min(4, max(0, windows - 2))
    sure += 0.1 if z >= 2.0 * needed_z else 0.0
    sure += {True: 0.1, False: -0.3, None: 0.0}[waits_least]
    return round(min(sure, 0.7 if few else 0.99), 2)


RANK, NODE, STALL, EVERYBODY = "rank", "node", "stall", "everybody"

Subject = tuple[str, "int | str"]
"""Who a verdict is about: `(RANK, 3)`, `(STALL, 3)`, `(NODE, "n0")`, `(EVERYBODY, "")`."""

QUIET = 3
"""Windows out of sight or below the bound, after which a verdict is over."""
_REMEMBERED = 64  # windows, of which it is known where they began; no history is longer


@attrs.frozen
class Slowness:
    """How slow somebody is by one window, or by the last ones."""

    excess: float  # logarithm of the ratio
    z: float  # of a stall: how much longer it was than it needs to be, in the place of a distance in deviations
    needed_z: float
    bound: float  # below this level it is normal again
    windows: int = 1  # for which it has been slow
    few: bool = False  # too few ranks to know how much they differ by themselves


@attrs.frozen
class Suspicion:
    """What one window says against somebody."""

    subject: Subject
    ranks: tuple[int, ...]
    excess_s: float  # per pass
    slowness: Slowness


@attrs.frozen
class Moment:
    """What a window says that concerns all of its sections."""

    first_step: int
    last_step: int
    step_s: float  # per pass
    passes_per_step: float
    node_of: Mapping[int, str]
    waits: Mapping[int, float]  # rank -> the seconds per pass that it waits for others

    def waits_least(self, ranks: Sequence[int], excess_s: float) -> bool | None:
        """Tell whether `ranks` wait less than the others by half of what they are late, or no less than they.

        Where everybody waits for a slow rank, it is the one that has the shortest wait.
        """
        own = [self.waits[rank] for rank in ranks if rank in self.waits]
        others = [wait for rank, wait in self.waits.items() if rank not in ranks]
        if not own or not others:
            return None
        less = median(others) - median(own)
        if less >= 0.5 * excess_s:
            return True
        return False if less <= 0.0 else None


@attrs.define
class _Standing:
    verdict: SlowVerdict
    bound: float
    quiet: int = 0


class Verdicts:
    """The verdicts about one section that stand."""

    def __init__(self, section: str, kind: str, role: str) -> None:
        """Begin with none."""
        self._section, self._kind, self._role = section, kind, role
        self._standing: dict[Subject, _Standing] = {}
        self._windows: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # first and last step of each

    def __iter__(self) -> Iterator[SlowVerdict]:
        """Iterate over what stands."""
        return iter([standing.verdict for standing in self._standing.values()])

    def settle(
        self, findings: Sequence[Suspicion], level_of: Callable[[Subject], float], moment: Moment, rules: Rules
    ) -> list[Change]:
        """Take what one window says, and return what has changed."""
        self._windows.append((moment.first_step, moment.last_step))
        often = moment.passes_per_step
        least_s = rules.least_excess_of_pass_s(moment.step_s * often, often)
        fresh = {finding.subject: finding for finding in findings if finding.excess_s >= least_s}
        changes = []
        for subject in list(self._standing):
            changes += self._go_on(subject, fresh.pop(subject, None), level_of(subject), moment, rules)
        for finding in fresh.values():
            changes += self._begin(finding, moment, rules)
        return changes

    def _begin(self, finding: Suspicion, moment: Moment, rules: Rules) -> list[Change]:
        what, windows = finding.subject[0], finding.slowness.windows
        about = [o for o, s in self._standing.items() if set(s.verdict.ranks) & set(finding.ranks)]
        if what != NODE and any(other[0] == NODE or what == STALL for other in about):
            return []  # that is known already
        changes = []
        if what != EVERYBODY:  # one verdict about a rank: of its node, or of the stalls that it had before
            changes = [self._end(other) for other in about if other[0] != EVERYBODY]
        place = len(self._windows) - min(windows, len(self._windows))
        since_step = self._windows[place][0]
        begun = SlowVerdict(
            kind=GLOBAL if what == EVERYBODY else TRANSIENT,
            section=self._section,
            section_kind=self._kind,
            role=self._role,
            ranks=finding.ranks,
            nodes=tuple(dict.fromkeys(moment.node_of[rank] for rank in finding.ranks)),
            whole_node=what == NODE,
            since_step=since_step,
            last_step=moment.last_step,
            unseen_steps=self._unseen_before(place, since_step),
        )
        verdict = _updated(begun, finding, windows, moment, rules)
        self._standing[finding.subject] = _Standing(verdict, finding.slowness.bound)
        return [*changes, Change(FOUND, verdict)]

    def _unseen_before(self, place: int, since_step: int) -> int | None:
        """Return how many steps before a window nobody has judged: of many ranks only every 2^i-th window is."""
        if place > 0:
            return max(0, since_step - self._windows[place - 1][1] - 1)
        return 0 if since_step <= WINDOW_STEPS else None

    def _go_on(
        self, subject: Subject, finding: Suspicion | None, level: float, moment: Moment, rules: Rules
    ) -> list[Change]:
        standing = self._standing[subject]
        before = standing.verdict
        if finding is None and not level >= standing.bound:
            standing.quiet += 1
            return [self._end(subject)] if standing.quiet >= QUIET else []
        standing.quiet = 0
        if finding is not None:
            standing.bound = finding.slowness.bound
        after = standing.verdict = _updated(before, finding, before.windows + 1, moment, rules)
        return [Change(STILL, after)] if (after.kind, after.ranks) != (before.kind, before.ranks) else []

    def _end(self, subject: Subject) -> Change:
        return Change(OVER, self._standing.pop(subject).verdict.ended())


def _updated(
    verdict: SlowVerdict, finding: Suspicion | None, windows: int, moment: Moment, rules: Rules
) -> SlowVerdict:
    """Return a verdict that has stood for `windows` windows, with the figures of a finding where there is one."""
    lasts = verdict.kind == TRANSIENT and windows >= rules.persistent_windows
    verdict = attrs.evolve(
        verdict, kind=PERSISTENT if lasts else verdict.kind, windows=windows, last_step=moment.last_step
    )
    if finding is None:
        return verdict
    slowness = finding.slowness
    waits_least = None if verdict.is_global else moment.waits_least(finding.ranks, finding.excess_s)
    return attrs.evolve(
        verdict,
        ranks=finding.ranks,
        ratio=math.exp(slowness.excess),
        excess_s=finding.excess_s,
        share=finding.excess_s / moment.step_s if moment.step_s > 0.0 else 0.0,
        z=slowness.z,
        confidence=confidence(
            z=slowness.z, needed_z=slowness.needed_z, windows=windows, few=slowness.few, waits_least=waits_least
        ),
        waits_least=waits_least,
    )
