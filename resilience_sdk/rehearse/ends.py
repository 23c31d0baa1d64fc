"""The judgement of what a rehearsed job has come to: the steps and the weights of the undisturbed run, or others.

Pure. What two undisturbed runs do not repeat is not compared: a script without a seed is no failure of its resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from resilience_sdk.incidents.record import count_words, ranks_words
from resilience_sdk.rank.rehearsal import RehearsedRank, Weight
from resilience_sdk.rehearse import components, records
from resilience_sdk.rehearse.components import SAME_WEIGHTS, Compared, Difference
from resilience_sdk.rehearse.cures import cure_of, cure_of_place, cure_of_record
from resilience_sdk.rehearse.judge import FAIL, PASS, SKIPPED, PromiseResult
from resilience_sdk.rehearse.plan import Baseline, JobFacts
from resilience_sdk.rehearse.records import RecordDifference
from resilience_sdk.rehearse.resumes import last_resume

_PROMISE = "end equal"


@attrs.frozen
class Distance:
    """How far the weights of two ends are apart at most, in parts of their norm, and where that is."""

    most: float
    weight: int = 0
    """The number of that weight among those of its rank's optimizers, from 0."""
    shape: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    """Those whose weights are not the same."""
    name: str = ""
    """What the modules call it; empty where that is not known."""

    @property
    def words(self) -> str:
        """Return which weight it is."""
        return self.name or f"weight {self.weight} of the optimizers, shape {list(self.shape)}"

    @property
    def is_none(self) -> bool:
        """Whether the ends are equal: a reduction in another order rounds otherwise."""
        return self.most <= SAME_WEIGHTS


def judge_end(kind: str, baseline: Baseline, facts: JobFacts, again: JobFacts | None) -> PromiseResult | None:
    """Return whether steps and weights are those of the undisturbed run; None where another one has to tell.

    `again`: a second undisturbed run, which says what the script repeats at all.
    """
    if kind == "nan":
        return PromiseResult(_PROMISE, SKIPPED, "a step with a bad gradient cannot end as one without")
    if facts.exit_codes[-1] != 0 or not facts.traces[-1]:
        return PromiseResult(_PROMISE, SKIPPED, "the job did not come to its end")
    twins = {} if again is None else own_variation(baseline, again)
    without = components.UNTIL_TWINS if again is None else components.with_consequences(twins)
    steps = components.compare(baseline.end, facts.last_attempt, without)
    first = steps.first if steps.first is not None and steps.first.has_proof else None
    apart = difference(baseline.end, facts.last_attempt)
    ends_apart = isinstance(apart, Distance) and not apart.is_none
    if first is None and not ends_apart:
        if isinstance(apart, str):
            return PromiseResult(_PROMISE, SKIPPED, apart)
        without_records = [] if again is None else records.varying(baseline.end, again.last_attempt)
        logged = None if twins else records.compare(baseline.end, facts.last_attempt, without_records)
        if logged is not None:
            return None if again is None else _other_record(baseline, logged, facts)
        told = "the same weights" if apart.most == 0 else f"the same weights to {apart.most:.0e}"
        logs = records.count(baseline.end, facts.last_attempt)
        also = "" if twins or not logs else f"; records of {count_words(logs)} compared"
        is_witnessed = any(trace.witnessed for trace in baseline.end)
        return PromiseResult(_PROMISE, PASS, f"{told}{_steps_words(steps, is_witnessed=is_witnessed)}{also}")
    if again is None:
        return None
    own = difference(baseline.end, again.last_attempt)
    if first is None and (isinstance(own, str) or not own.is_none):
        return PromiseResult(_PROMISE, SKIPPED, "two undisturbed runs end with other weights, too: seed the script")
    return _broken(baseline, first, apart, facts)


def own_variation(baseline: Baseline, again: JobFacts) -> dict[str, int]:
    """Return what two undisturbed runs do not repeat, each from which step on."""
    return components.varying(baseline.end, again.last_attempt)


def variation_words(variation: Mapping[str, int]) -> str:
    """Return the line that says what is not compared; empty where all is."""
    if not variation:
        return ""
    told = ", ".join(f"{name} from step {step} on" for name, step in variation.items())
    return f"two undisturbed runs differ by themselves, which is not compared: {told}"


def _broken(baseline: Baseline, first: Difference | None, apart: Distance | str, facts: JobFacts) -> PromiseResult:
    every, resume = len(baseline.end), last_resume(baseline, facts)
    if resume.after is not None and resume.more > 0:
        # The steps of both runs do not belong to each other, so what differs between them says nothing.
        why = (
            f"gone on with the state after {count_words(resume.after)}, and {resume.more} more were run than were "
            "left: samples of the epoch came twice"
        )
        cure = cure_of_place(facts.last_attempt, resume)
        return PromiseResult(_PROMISE, FAIL, why, cure, components.SAMPLES, None, tuple(t.rank for t in baseline.end))
    if first is not None:
        where = f", {ranks_words(first.ranks)}" if len(first.ranks) < every else ""
        why = f"step {first.step}{where}: {first.words}, where two undisturbed runs are alike"
        if isinstance(apart, Distance) and not apart.is_none:
            why += f"; the weights end apart by {apart.most:.1e} of their norm"
        cure = cure_of(first, facts.last_attempt, resume, is_of_all=len(first.ranks) == every)
        return PromiseResult(_PROMISE, FAIL, why, cure, first.component, first.step, first.ranks)
    assert isinstance(apart, Distance)
    is_of_all = len(apart.ranks) == every
    only = "" if is_of_all else f" of {ranks_words(apart.ranks)} alone"
    why = (
        f"the weights{only} end otherwise, where two undisturbed runs end alike: norm or sum of {apart.words} "
        f"by {apart.most:.1e} of its norm"
    )
    cure = cure_of(None, facts.last_attempt, resume, is_of_all=is_of_all)
    return PromiseResult(_PROMISE, FAIL, why, cure, components.WEIGHTS, None, apart.ranks)


def _steps_words(steps: Compared, *, is_witnessed: bool) -> str:
    """Return what was compared of the steps: of a loop that leaves no witnesses neither the order nor the losses."""
    if not steps.steps:
        return ""
    other = steps.first
    names = components.components_of(steps.names) if is_witnessed else components.in_order(steps.names)
    told = f"; {count_words(steps.steps)} compared: {', '.join(names)}"
    told += "" if is_witnessed else "; no witnesses of this loop's steps, so not the order of samples, nor losses"
    return told if other is None else f"{told}; {other.name} differ from step {other.step} on, and nothing follows"


def _other_record(baseline: Baseline, logged: RecordDifference, facts: JobFacts) -> PromiseResult:
    is_of_all = len(logged.ranks) == len(baseline.end)
    where = "" if is_of_all else f", {ranks_words(logged.ranks)}"
    why = f"step {logged.step}{where}: {logged.words}, where two undisturbed runs are alike"
    cure = cure_of_record(facts.last_attempt)
    return PromiseResult(_PROMISE, FAIL, why, cure, logged.component, logged.step, logged.ranks)


def difference(one: Sequence[RehearsedRank], other: Sequence[RehearsedRank]) -> Distance | str:
    """Return how far the weights of two ends are apart, or why they cannot be compared."""
    theirs = {trace.rank: trace.weights for trace in other}
    found = Distance(0.0)
    for trace in one:
        weights, others = trace.weights, theirs.get(trace.rank)
        if weights is None:
            return "there is no optimizer of torch, whose weights could be compared"
        if others is None or len(weights) != len(others):
            return "the last start had no step left to run"
        if not all(math.isfinite(one.norm) for one in weights):
            return "the undisturbed run ends with weights that are no numbers"
        apart = [_apart(x, y) for x, y in zip(weights, others, strict=True)]
        most = max(apart, default=0.0)
        ranks = (*found.ranks, trace.rank) if most > SAME_WEIGHTS else found.ranks
        worst = apart.index(most) if apart else 0
        if most > found.most:
            name = trace.names[worst] if worst < len(trace.names) else ""
            found = Distance(most, worst, weights[worst].shape, name=name)
        found = attrs.evolve(found, ranks=ranks)
    return found if one else "there is no optimizer of torch, whose weights could be compared"


def _apart(one: Weight, other: Weight) -> float:
    """Return how far norm or sum of two weights are apart, whichever is further, in parts of the norm."""
    if not all(map(math.isfinite, (one.norm, one.sum, other.norm, other.sum))):
        return math.inf
    scale = max(one.norm, other.norm, 1e-12)
    return max(abs(one.norm - other.norm), abs(one.sum - other.sum)) / scale
