"""From what is found in single windows to verdicts that begin, last and end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from resilience_sdk.straggler.history import Evidence
from resilience_sdk.straggler.rules import Rules
from resilience_sdk.straggler.stalls import Stall
from resilience_sdk.straggler.verdicts import (
    FOUND,
    GLOBAL,
    OVER,
    PERSISTENT,
    STILL,
    TRANSIENT,
    Change,
    Verdict,
    confidence,
)

RANK, NODE, STALL, EVERYBODY = "rank", "node", "stall", "everybody"
QUIET = 3
"""Windows out of sight or below the bound, after which a verdict is over."""
_REMEMBERED = 64  # windows, of which it is known where they began; no history is longer


@attrs.frozen
class Subject:
    """Who a verdict is about."""

    what: str
    name: str
    """The rank as text, or the node; empty for everybody."""


@attrs.frozen
class Finding:
    """What one window says against somebody."""

    subject: Subject
    ranks: tuple[int, ...]
    ratio: float
    excess_s: float
    z: float
    needed_z: float
    windows: int
    bound: float
    """Below this level the subject is normal again."""
    few: bool = False

    @classmethod
    def of_level(cls, subject: Subject, ranks: tuple[int, ...], evidence: Evidence, own_s: float) -> Finding:
        """Return what the levels of a rank or node say that takes `own_s` seconds for a pass."""
        return cls(
            subject=subject,
            ranks=ranks,
            ratio=math.exp(evidence.excess),
            excess_s=-math.expm1(-evidence.excess) * own_s,
            z=evidence.z,
            needed_z=evidence.needed_z,
            windows=evidence.windows,
            bound=evidence.bound,
            few=evidence.few,
        )

    @classmethod
    def of_stall(cls, subject: Subject, rank: int, stall: Stall, needed_z: float) -> Finding:
        """Return what a stall says; in place of a distance in deviations stands how much longer than needed it was."""
        return cls(
            subject=subject,
            ranks=(rank,),
            ratio=stall.ratio,
            excess_s=stall.lost_s,
            z=needed_z * stall.patience,
            needed_z=needed_z,
            windows=1,
            bound=math.inf,
        )


@attrs.frozen
class Moment:
    """What a window says that concerns all of its sections."""

    first_step: int
    last_step: int
    step_s: float
    node_of: Mapping[int, str]
    waits_least: Callable[[Sequence[int], float], bool | None]
    """(ranks, seconds of excess) -> whether the others wait for these ranks."""
    passes_per_step: float = 1.0

    def least_excess_s(self, rules: Rules) -> float:
        """Return from which excess on somebody would notice it: seconds per pass."""
        return rules.least_excess_of_pass_s(self.step_s * self.passes_per_step, self.passes_per_step)


@attrs.define
class _Standing:
    verdict: Verdict
    bound: float
    quiet: int = 0


class Verdicts:
    """The verdicts about one section that stand."""

    def __init__(self, section: str, kind: str, role: str) -> None:
        """Begin with none."""
        self._section = section
        self._kind = kind
        self._role = role
        self._standing: dict[Subject, _Standing] = {}
        self._first_steps: deque[int] = deque(maxlen=_REMEMBERED)

    def __iter__(self) -> Iterator[Verdict]:
        """Iterate over what stands."""
        return iter([standing.verdict for standing in self._standing.values()])

    def settle(
        self, findings: Sequence[Finding], level_of: Callable[[Subject], float], moment: Moment, rules: Rules
    ) -> list[Change]:
        """Take what one window says, and return what has changed."""
        self._first_steps.append(moment.first_step)
        changes = []
        fresh = {f.subject: f for f in findings if f.excess_s >= moment.least_excess_s(rules)}
        for subject in list(self._standing):
            finding = fresh.pop(subject, None)
            changes += self._go_on(subject, finding, level_of(subject), moment, rules)
        for finding in fresh.values():
            changes += self._begin(finding, moment, rules)
        return changes

    def _begin(self, finding: Finding, moment: Moment, rules: Rules) -> list[Change]:
        subject = finding.subject
        if subject.what != NODE and any(
            set(finding.ranks) & set(standing.verdict.ranks)
            for other, standing in self._standing.items()
            if other.what == NODE or subject.what == STALL
        ):
            return []  # that is known already
        changes = []
        if subject.what != EVERYBODY:  # one verdict about a rank: of its node, or of the stalls that it had before
            merged = [
                o
                for o, s in self._standing.items()
                if o.what != EVERYBODY and set(s.verdict.ranks) & set(finding.ranks)
            ]
            changes = [Change(OVER, self._end(other)) for other in merged]
        verdict = _updated(
            Verdict(
                kind=GLOBAL if subject.what == EVERYBODY else TRANSIENT,
                section=self._section,
                section_kind=self._kind,
                role=self._role,
                ranks=finding.ranks,
                nodes=tuple(dict.fromkeys(moment.node_of[rank] for rank in finding.ranks)),
                whole_node=subject.what == NODE,
                since_step=self._first_steps[-min(finding.windows, len(self._first_steps))],
                last_step=moment.last_step,
                windows=0,
            ),
            finding,
            finding.windows,
            moment,
            rules,
        )
        self._standing[subject] = _Standing(verdict, finding.bound)
        return [*changes, Change(FOUND, verdict)]

    def _go_on(
        self, subject: Subject, finding: Finding | None, level: float, moment: Moment, rules: Rules
    ) -> list[Change]:
        standing = self._standing[subject]
        before = standing.verdict
        if finding is None and not level >= standing.bound:
            standing.quiet += 1
            return [Change(OVER, self._end(subject))] if standing.quiet >= QUIET else []
        standing.quiet = 0
        windows = before.windows + 1
        if finding is not None:
            standing.bound = finding.bound
            standing.verdict = _updated(attrs.evolve(before, ranks=finding.ranks), finding, windows, moment, rules)
        else:
            standing.verdict = _aged(before, windows, moment, rules)
        after = standing.verdict
        return [Change(STILL, after)] if (after.kind, after.ranks) != (before.kind, before.ranks) else []

    def _end(self, subject: Subject) -> Verdict:
        verdict = self._standing.pop(subject).verdict
        return attrs.evolve(verdict, until_step=verdict.last_step)


def _updated(verdict: Verdict, finding: Finding, windows: int, moment: Moment, rules: Rules) -> Verdict:
    """Return a verdict with the figures of a finding."""
    waits_least = None if verdict.is_global else moment.waits_least(finding.ranks, finding.excess_s)
    sure = confidence(z=finding.z, needed_z=finding.needed_z, windows=windows, few=finding.few, waits_least=waits_least)
    return attrs.evolve(
        _aged(verdict, windows, moment, rules),
        ratio=finding.ratio,
        excess_s=finding.excess_s,
        share=finding.excess_s / moment.step_s if moment.step_s > 0.0 else 0.0,
        z=finding.z,
        confidence=sure,
        waits_least=waits_least,
    )


def _aged(verdict: Verdict, windows: int, moment: Moment, rules: Rules) -> Verdict:
    """Return a verdict that has stood for `windows` windows."""
    kind = PERSISTENT if verdict.kind == TRANSIENT and windows >= rules.persistent_windows else verdict.kind
    return attrs.evolve(verdict, kind=kind, windows=windows, last_step=moment.last_step)
