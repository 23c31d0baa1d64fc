"""Reports: the scores of all ranks, those below the thresholds, and the verdicts that stand.

Scores go from 0 to 1, as NVIDIA's resiliency extension and NeMo define them:

* relative: the fastest rank's median over the own median. 0.5 is half as fast as the fastest.
* individual: the own best median over the median now. 0.5 is half as fast as it once was.

A section's score is that of its median duration. A GPU's score is the mean over its kernels of the ratio of medians,
weighted by the total time that the rank spent in each kernel. The overall score of a rank is the same mean over its
sections: a section of microseconds cannot make a rank slow.

Two things are done differently, because there they fail (both were tried): a section or kernel that one rank lacks
leaves the scores of all others as they are, and a reference that is itself out of the ordinary, one abnormally fast
rank or one lucky report, is not one: see `reference`.
"""

from __future__ import annotations

import heapq
import math
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import attrs

from resilience_sdk.core.json_records import from_text, to_text
from resilience_sdk.core.settings import Settings
from resilience_sdk.straggler.kernels import KernelTime
from resilience_sdk.straggler.verdicts import LEAST_EXCESS_S, SlowVerdict
from resilience_sdk.straggler.windowing import SIGMA_OF_DEVIATION, RankPlace, median

_Value = TypeVar("_Value")
_DEFAULTS = Settings()

REPORTS_REMEMBERED = 24
"""Reports (two hours, at 300 s) over which a rank's own best is taken.

A window rather than the best ever: clocks, data and batch sizes change, and what was reached under other conditions is
no measure. Rather than the warm-up: that is the slowest time of all. What lasts for longer becomes the norm here; the
verdicts keep it, see `detector`."""

_ODD = 0.7  # a reference this much faster than the middle is looked at
_ODD_DEVIATIONS = 5.0
_ONE_IN = 64  # ranks, of which one may be left out
_MEASURE = 10.0  # of what would be noticed: sections that take less altogether are no measure of a rank


@attrs.frozen
class Medians:
    """What a report is made of: what each rank measured since the last one."""

    sections: Mapping[str, Mapping[int, float]]
    """Section -> rank -> median duration in seconds, of sections whose time is the rank's own (no collectives)."""
    kernels: Mapping[int, Sequence[KernelTime]] = {}
    """Rank -> its kernels, without those that communicate."""
    least_excess_s: Mapping[str, float] = {}
    """Section -> from how many seconds per pass on it is a loss at all; where none is given, 0.5 ms."""
    passes_per_step: Mapping[str, float] = {}
    """Section -> how often it is passed in a step; where none is given, once."""

    def loses(self, section: str, rank: int, score: float) -> bool:
        """Tell whether what a rank takes longer than the reference of its score would be noticed."""
        excess_s = self.sections[section][rank] * (1.0 - score)
        return excess_s >= self.least_excess_s.get(section, LEAST_EXCESS_S)


def reference(medians: Iterable[float]) -> float:
    """Return the fastest of some medians, or the next one if the fastest is out of the ordinary. Needs one.

    It is, if it takes less than 0.7 of the middle one's time *and* lies more than five standard deviations (from the
    median absolute deviation of the logarithms) from it. One value in 64 is left out so, at least one. Of two values
    nobody can tell which is the odd one.
    """
    ordered = sorted(medians)
    middle = median(ordered)
    if len(ordered) < 3 or ordered[0] >= _ODD * middle or ordered[0] <= 0.0:
        return ordered[0]
    deviation = SIGMA_OF_DEVIATION * median(abs(math.log(value / middle)) for value in ordered)
    left_out = max(1, len(ordered) // _ONE_IN)
    for value in ordered[:left_out]:
        if value >= _ODD * middle or math.log(middle / value) <= _ODD_DEVIATIONS * deviation:
            return value
    return ordered[left_out]


def relative_scores(medians: Mapping[int, float]) -> dict[int, float]:
    """Return rank -> score for one section on ranks of one role; who has no duration has no score."""
    known = {rank: value for rank, value in medians.items() if 0.0 < value < math.inf}
    if not known:
        return {}
    best = reference(known.values())
    return {rank: best / value if value > best else 1.0 for rank, value in known.items()}


def relative_gpu_scores(kernels: Mapping[int, Sequence[KernelTime]]) -> dict[int, float]:
    """Return rank -> score of its GPU, on ranks of one role.

    A kernel counts if at least half of the ranks ran it, two at least (all of them, if there is one only). Who has
    no such kernel has no score.
    """
    times: dict[str, list[float]] = {}
    for rows in kernels.values():
        for kernel in rows:
            if kernel.median_s > 0.0:
                times.setdefault(kernel.name, []).append(kernel.median_s)
    least = min(len(kernels), max(2, (len(kernels) + 1) // 2))
    best = {name: reference(values) for name, values in times.items() if len(values) >= least}
    return _of_gpus(kernels, {rank: best for rank in kernels})


def _of_gpus(kernels: Mapping[int, Sequence[KernelTime]], best: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Return rank -> mean of its kernels' scores, weighted by their time; who has no kernel with a best has none."""
    found = {}
    for rank, rows in kernels.items():
        known = [
            (kernel, best[rank][kernel.name]) for kernel in rows if kernel.median_s > 0.0 and kernel.name in best[rank]
        ]
        weight = sum(kernel.total_s for kernel, _ in known)
        if weight > 0.0:
            found[rank] = (
                sum(kernel.total_s * min(1.0, fastest / kernel.median_s) for kernel, fastest in known) / weight
            )
    return found


def overall_scores(
    scores: Mapping[str, Mapping[int, float]], medians: Medians, *, least_ranks: int
) -> dict[int, float]:
    """Return rank -> mean of its sections' `scores` (section -> rank -> score), weighted by its time in each.

    A section counts if so many ranks have a score in it. A rank whose sections take less than 5 ms or a tenth of a step
    altogether has no score.
    """
    weight: dict[int, float] = {}
    whole: dict[int, float] = {}
    noticed_s = 0.0
    for section, of_ranks in scores.items():
        if len(of_ranks) < least_ranks:
            continue
        often = medians.passes_per_step.get(section, 1.0)
        noticed_s = max(noticed_s, often * medians.least_excess_s.get(section, LEAST_EXCESS_S))
        for rank, score in of_ranks.items():
            a_step_s = often * medians.sections[section][rank]
            weight[rank] = weight.get(rank, 0.0) + a_step_s
            whole[rank] = whole.get(rank, 0.0) + a_step_s * score
    return {rank: whole[rank] / own_s for rank, own_s in weight.items() if own_s >= _MEASURE * noticed_s}


class OwnHistory:
    """What each rank has reached in the last reports: the reference of the individual scores."""

    def __init__(self, reports: int = REPORTS_REMEMBERED) -> None:
        """Remember so many reports."""
        self._reports = reports
        self._sections: dict[int, dict[str, array[float]]] = {}  # rank -> name -> medians
        self._kernels: dict[int, dict[str, array[float]]] = {}

    def scores(self, section: str, medians: Mapping[int, float]) -> dict[int, float]:
        """Remember one report of a section and return rank -> score; the first one is 1.0."""
        return {
            rank: self._best(self._sections.setdefault(rank, {}), section, value) / value
            for rank, value in medians.items()
            if 0.0 < value < math.inf
        }

    def gpu_scores(self, kernels: Mapping[int, Sequence[KernelTime]]) -> dict[int, float]:
        """Remember one report of all ranks' kernels and return rank -> score of its GPU; a new kernel has 1.0."""
        best = {}
        for rank, rows in kernels.items():
            past = self._kernels.setdefault(rank, {})
            best[rank] = {k.name: self._best(past, k.name, k.median_s) for k in rows if k.median_s > 0.0}
        return _of_gpus(kernels, best)

    def forget(self, rank: int) -> None:
        """Drop what is known of a rank: it runs elsewhere now."""
        self._sections.pop(rank, None)
        self._kernels.pop(rank, None)

    def _best(self, of_rank: dict[str, array[float]], name: str, value: float) -> float:
        past = of_rank.get(name)
        if past is None:
            past = of_rank[name] = array("d")
        past.append(value)
        if len(past) > self._reports:
            del past[0]
        best = min(past)
        # Only a best that makes the rank look slow is worth the question whether it was luck. The oldest was not: a
        # rank that has been slow ever since is slow.
        if best >= _ODD * value or best == past[0] or reference(past) == best:
            return best
        past.remove(best)
        return min(past)


GPU_RELATIVE, GPU_INDIVIDUAL = "gpu_relative", "gpu_individual"
SECTION_RELATIVE, SECTION_INDIVIDUAL = "section_relative", "section_individual"
OVERALL_RELATIVE, OVERALL_INDIVIDUAL = "overall_relative", "overall_individual"
RULES = (GPU_RELATIVE, GPU_INDIVIDUAL, SECTION_RELATIVE, SECTION_INDIVIDUAL)

Named = tuple["int | None", "str | None"]
"""A rank (None: everybody), and a section (None: its GPU)."""

_SHOWN = 8


@attrs.frozen
class Straggler:
    """A rank below a threshold."""

    rule: str
    """`gpu_relative`, `gpu_individual`, `section_relative` or `section_individual`; see also `Report.below`."""
    rank: int
    node: str
    section: str | None
    score: float

    def __str__(self) -> str:
        node = f" ({self.node})" if self.node else ""
        section = f" in {self.section}" if self.section else ""
        return f"rank {self.rank}{node}{section} {_shown(self.score)}"


@attrs.frozen
class Report:
    """What `straggler.report()` returns. Scores are 0 to 1; a rank that measured nothing has none."""

    nodes: Mapping[int, str]
    """Rank -> node, of every rank that was heard of."""
    gpu_relative: Mapping[int, float] = {}
    gpu_individual: Mapping[int, float] = {}
    section_relative: Mapping[str, Mapping[int, float]] = {}
    section_individual: Mapping[str, Mapping[int, float]] = {}
    overall_relative: Mapping[int, float] = {}
    """Rank -> its score over all its sections, weighted by its time in each."""
    overall_individual: Mapping[int, float] = {}
    relative_threshold: float = _DEFAULTS.relative_threshold
    individual_threshold: float = _DEFAULTS.individual_threshold
    stragglers: tuple[Straggler, ...] = ()
    verdicts: tuple[SlowVerdict, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    processing_s: float = 0.0
    """Seconds that making the report took."""

    @property
    def ranks(self) -> int:
        """How many ranks were heard of."""
        return len(self.nodes)

    @property
    def names_somebody(self) -> bool:
        """Whether a rank is below a threshold, or a verdict stands."""
        return bool(self.stragglers or self.verdicts)

    @property
    def named(self) -> frozenset[Named]:
        """Who is named in what, by scores or verdicts."""
        by_scores = {(straggler.rank, straggler.section) for straggler in self.stragglers}
        by_verdicts = {(rank, verdict.section) for verdict in self.verdicts for rank in (verdict.ranks or (None,))}
        return frozenset(by_scores | by_verdicts)

    def tables(self) -> Iterator[tuple[str, str | None, Mapping[int, float]]]:
        """Yield rule, section and scores (rank -> score) of all tables that have any."""
        yield from (
            (rule, None, scores)
            for rule in (GPU_RELATIVE, GPU_INDIVIDUAL, OVERALL_RELATIVE, OVERALL_INDIVIDUAL)
            if (scores := getattr(self, rule))
        )
        for section in sorted(self.section_relative.keys() | self.section_individual.keys()):
            for rule in (SECTION_RELATIVE, SECTION_INDIVIDUAL):
                if scores := getattr(self, rule).get(section):
                    yield rule, section, scores

    def threshold_of(self, rule: str) -> float:
        """Return below what a score of that rule names a rank."""
        return self.relative_threshold if rule.endswith("relative") else self.individual_threshold

    def below(self, *, relative: float, individual: float) -> tuple[Straggler, ...]:
        """Return who as a whole is below one of two thresholds, the worst first; 0 is below no score.

        By the score of its GPU, where kernels are timed, else by the overall score of its sections. Their `section` is
        the one with the lowest score, or None.
        """
        whole = "gpu" if self.gpu_relative or self.gpu_individual else "overall"
        found = []
        for kind, threshold in (("relative", relative), ("individual", individual)):
            sections = getattr(self, f"section_{kind}") if whole == "overall" else {}
            found += [
                Straggler(f"{whole}_{kind}", rank, self.nodes.get(rank, ""), _worst(sections, rank), score)
                for rank, score in getattr(self, f"{whole}_{kind}").items()
                if score < threshold
            ]
        return tuple(sorted(found, key=lambda one: one.score))

    def text(self, scores_to_print: int = 5) -> str:
        """Return the report in the printed form: the worst and the best of each score, then who is slow.

        With 0 there are no scores, and nothing at all when nobody is slow.
        """
        lines: list[str] = []
        if scores_to_print > 0:
            sections = self.section_relative.keys() | self.section_individual.keys()
            for rule, section, scores in self.tables():
                what, _, kind = rule.partition("_")
                if what != "overall" or len(sections) > 1:
                    title = f"Section {section} {kind}" if section else f"{_TITLES[what]} {kind}"
                    lines += [f"{title} performance:", *self._extremes(scores, scores_to_print), ""]
        elif not self.names_somebody:
            return ""
        lines += [self._below(rule) for rule in RULES if any(s.rule == rule for s in self.stragglers)]
        lines += [f"Straggler: {verdict.text()}" for verdict in self.verdicts[:_SHOWN]]
        if len(self.verdicts) > _SHOWN:
            lines += [f"Stragglers: and {len(self.verdicts) - _SHOWN} more verdicts"]
        lines += [f"Straggler report processing time: {self.processing_s:.3f} sec."]
        return "\n".join(lines)

    def line(self) -> str:
        """Return what a person needs to read of a report that names nobody, or nobody who was not named before."""
        steps = f" in steps {self.first_step} to {self.last_step}" if self.first_step is not None else ""
        if self.names_somebody:
            return f"nobody new{steps}"
        return f"{'nobody' if self.ranks == 1 else f'none of {self.ranks} ranks'} was slow{steps}"

    def summary(self) -> dict[str, float]:
        """Return the minimum, median and maximum of each score, for plots: `gpu_relative_perf/min` and so on."""
        found: dict[str, float] = {}
        for rule, section, scores in self.tables():
            name = f"{rule}_perf/{section}" if section else f"{rule}_perf"
            values = sorted(scores.values())
            found |= {f"{name}/min": values[0], f"{name}/median": median(values), f"{name}/max": values[-1]}
        return found

    def to_json(self) -> str:
        """Return the report as one line of JSON that `from_json` reads."""
        return to_text(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Report | None:
        """Return the report in a text, or None where there is none; what comes from elsewhere is distrusted."""
        return from_text(cls, text)

    def _extremes(self, scores: Mapping[int, float], count: int) -> list[str]:
        pairs = [(score, rank) for rank, score in scores.items()]
        if len(pairs) <= 2 * count:
            return [self._row(*pair) for pair in sorted(pairs)]
        return [
            f" Worst performing {count}/{len(pairs)} ranks:",
            *(self._row(*pair) for pair in heapq.nsmallest(count, pairs)),
            f" Best performing {count}/{len(pairs)} ranks:",
            *(self._row(*pair) for pair in heapq.nlargest(count, pairs)),
        ]

    def _row(self, score: float, rank: int) -> str:
        return f"  Rank={rank} Node={self.nodes.get(rank, '')} Score={_shown(score)}"

    def _below(self, rule: str) -> str:
        shown = sorted((s for s in self.stragglers if s.rule == rule), key=lambda s: s.score)
        names = ", ".join(map(str, shown[:_SHOWN]))
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        scores = rule.replace("_", " ").replace("gpu", "GPU")
        return f"Below {self.threshold_of(rule):g} in {scores} performance: {names}{more}"


_TITLES = {"gpu": "GPU", "overall": "Overall"}


class ReportMaker:
    """Makes one report after the other and remembers what the individual scores need."""

    def __init__(self, places: Mapping[int, RankPlace]) -> None:
        """Begin with ranks at `places`, of which nothing is remembered."""
        self._places = dict(places)
        self._history = OwnHistory()

    def place(self, rank: int, place: RankPlace) -> None:
        """Say where a rank runs. If that is new, its own best is forgotten."""
        if self._places.get(rank) != place:
            self._places[rank] = place
            self._history.forget(rank)

    def make(
        self,
        medians: Medians,
        verdicts: tuple[SlowVerdict, ...] = (),
        *,
        first_step: int | None = None,
        last_step: int | None = None,
        relative_threshold: float = _DEFAULTS.relative_threshold,
        individual_threshold: float = _DEFAULTS.individual_threshold,
    ) -> Report:
        """Return the report over what each rank measured since the last one, and the verdicts that stand."""
        start = time.perf_counter()
        relative = {
            section: {rank: score for of_role in self._by_role(of) for rank, score in relative_scores(of_role).items()}
            for section, of in medians.sections.items()
        }
        individual = {section: self._history.scores(section, of) for section, of in medians.sections.items()}
        gpus = map(relative_gpu_scores, self._by_role(medians.kernels))
        report = Report(
            nodes={rank: place.node for rank, place in self._places.items()},
            gpu_relative={rank: score for of_role in gpus for rank, score in of_role.items()},
            gpu_individual=self._history.gpu_scores(medians.kernels),
            section_relative=relative,
            section_individual=individual,
            overall_relative=overall_scores(relative, medians, least_ranks=min(2, len(self._places))),
            overall_individual=overall_scores(individual, medians, least_ranks=1),
            relative_threshold=relative_threshold,
            individual_threshold=individual_threshold,
            verdicts=verdicts,
            first_step=first_step,
            last_step=last_step,
        )
        stragglers = [
            Straggler(rule, rank, report.nodes.get(rank, ""), section, score)
            for rule, section, scores in report.tables()
            if rule in RULES
            for rank, score in scores.items()
            if score < report.threshold_of(rule) and (section is None or medians.loses(section, rank, score))
        ]
        stragglers.sort(key=lambda one: RULES.index(one.rule))
        return attrs.evolve(report, stragglers=tuple(stragglers), processing_s=time.perf_counter() - start)

    def _by_role(self, of_ranks: Mapping[int, _Value]) -> list[dict[int, _Value]]:
        roles: dict[str, dict[int, _Value]] = {}
        for rank, value in of_ranks.items():
            place = self._places.get(rank)
            roles.setdefault(place.role if place is not None else "", {})[rank] = value
        return list(roles.values())


def _worst(scores: Mapping[str, Mapping[int, float]], rank: int) -> str | None:
    """Return the section in which a rank has its lowest score."""
    of_rank = {section: of_ranks[rank] for section, of_ranks in scores.items() if rank in of_ranks}
    return min(of_rank, key=of_rank.__getitem__, default=None)


def _shown(score: float) -> str:
    """Return a score with two digits; a very small one with what it has, since 0 would mean that nothing is known."""
    return f"{score:.2f}" if score >= 0.005 else f"{score:.1g}"


_OF_ONE = {
    "gpu": "the GPU there: its clocks, temperature and errors (nvidia-smi -q), and who else uses it",
    "io": "the storage and the network mounts there, and the workers of the data loader",
}
_OF_ONE_ELSE = (
    "who else uses the processors there, and their clocks and limits (top, cpu.max); with a GPU its clocks too"
)
_OF_ALL = {
    "comm": "the network, and who else uses it",
    "gpu_comm": "the network, and who else uses it",
    "io": "the storage that all ranks share, and who else uses it",
}
_OF_ALL_ELSE = "what all ranks share, and what has changed in the job since then: data, batch size, code, clocks"
_IO_SECTIONS = ("data", "checkpoint")


def advice(verdict: SlowVerdict, *, stop: bool) -> str:
    """Return what to look at, and how to go on without the slow node; `stop`: the job leaves it out by itself."""
    kind = "io" if verdict.section in _IO_SECTIONS and verdict.section_kind != "gpu" else verdict.section_kind
    if not verdict.ranks or verdict.is_global:
        return f"{verdict.who} in {verdict.where}: look at {_OF_ALL.get(kind, _OF_ALL_ELSE)}"
    look = f"{verdict.who} in {verdict.where}: look at {_OF_ONE.get(kind, _OF_ONE_ELSE)}"
    if stop:
        return look
    node = verdict.nodes[0] if len(set(verdict.nodes)) == 1 and verdict.nodes[0] else "the node"
    return (
        f"{look}; to leave {node} out: give resilience run --stop-if-detected, or while the job runs "
        "resilience straggler RUN_DIR --stop-if-detected, and exclude it where you submit (Slurm: sbatch --exclude)"
    )
