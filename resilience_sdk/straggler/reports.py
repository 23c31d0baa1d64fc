"""The report: the scores of all ranks, who is below the thresholds, and the verdicts that stand."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import attrs

from resilience_sdk.settings import Settings
from resilience_sdk.straggler.rules import LEAST_EXCESS_S
from resilience_sdk.straggler.scores import Medians, OwnHistory, relative_gpu_scores, relative_scores
from resilience_sdk.straggler.verdicts import Verdict
from resilience_sdk.straggler.window import Place, median
from resilience_sdk.wire import from_text

_Value = TypeVar("_Value")
_DEFAULTS = Settings()

GPU_RELATIVE, GPU_INDIVIDUAL = "gpu_relative", "gpu_individual"
SECTION_RELATIVE, SECTION_INDIVIDUAL = "section_relative", "section_individual"
RULES = (GPU_RELATIVE, GPU_INDIVIDUAL, SECTION_RELATIVE, SECTION_INDIVIDUAL)

Named = tuple["int | None", "str | None"]
"""A rank (None: everybody), and a section (None: its GPU)."""

_SHOWN = 8


@attrs.frozen
class Straggler:
    """A rank below a threshold."""

    rule: str
    """`gpu_relative`, `gpu_individual`, `section_relative` or `section_individual`."""
    rank: int
    node: str
    section: str | None
    score: float


@attrs.frozen
class Report:
    """What `straggler.report()` returns. Scores are 0 to 1; a rank that measured nothing has none."""

    nodes: Mapping[int, str]
    """Rank -> node, of every rank that was heard of."""
    gpu_relative: Mapping[int, float] = {}
    gpu_individual: Mapping[int, float] = {}
    section_relative: Mapping[str, Mapping[int, float]] = {}
    section_individual: Mapping[str, Mapping[int, float]] = {}
    relative_threshold: float = _DEFAULTS.relative_threshold
    individual_threshold: float = _DEFAULTS.individual_threshold
    stragglers: tuple[Straggler, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
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

    def text(self, scores_to_print: int = 5) -> str:
        """Return the report in the printed form: the worst and the best of each score, then who is slow.

        With 0 there are no scores, and nothing at all when nobody is slow.
        """
        lines: list[str] = []
        if scores_to_print > 0:
            for title, scores in self._tables():
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
        for name, scores in (
            ("gpu_relative_perf", self.gpu_relative),
            ("gpu_individual_perf", self.gpu_individual),
            *((f"section_relative_perf/{section}", scores) for section, scores in self.section_relative.items()),
            *((f"section_individual_perf/{section}", scores) for section, scores in self.section_individual.items()),
        ):
            if scores:
                values = sorted(scores.values())
                found |= {f"{name}/min": values[0], f"{name}/median": median(values), f"{name}/max": values[-1]}
        return found

    def to_json(self) -> str:
        """Return the report as one line of JSON that `from_json` reads."""
        # Not attrs.asdict throughout: with 16,384 ranks its recursion into the scores takes seconds.
        flat = attrs.asdict(self, recurse=False)
        for name in ("stragglers", "verdicts"):
            flat[name] = [attrs.asdict(record) for record in flat[name]]
        return json.dumps(flat, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report | None:
        """Return the report in a text, or None where there is none; what comes from elsewhere is distrusted."""
        return from_text(cls, text)

    def _tables(self) -> list[tuple[str, Mapping[int, float]]]:
        tables = [("GPU relative", self.gpu_relative), ("GPU individual", self.gpu_individual)]
        for section in sorted(self.section_relative.keys() | self.section_individual.keys()):
            tables.append((f"Section {section} relative", self.section_relative.get(section, {})))
            tables.append((f"Section {section} individual", self.section_individual.get(section, {})))
        return [(title, scores) for title, scores in tables if scores]

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
        threshold = self.relative_threshold if rule in (GPU_RELATIVE, SECTION_RELATIVE) else self.individual_threshold
        shown = sorted((s for s in self.stragglers if s.rule == rule), key=lambda s: s.score)
        names = ", ".join(map(_named, shown[:_SHOWN]))
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        scores = rule.replace("_", " ").replace("gpu", "GPU")
        return f"Below {threshold:g} in {scores} performance: {names}{more}"


class ReportMaker:
    """Makes one report after the other and remembers what the individual scores need."""

    def __init__(
        self,
        places: Mapping[int, Place],
        *,
        relative_threshold: float = _DEFAULTS.relative_threshold,
        individual_threshold: float = _DEFAULTS.individual_threshold,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Thresholds may be set at any time; `clock` gives seconds and times the making itself."""
        self.relative_threshold = relative_threshold
        self.individual_threshold = individual_threshold
        self._places = dict(places)
        self._history = OwnHistory()
        self._clock = clock

    def place(self, rank: int, place: Place) -> None:
        """Say where a rank runs. If that is new, its own best is forgotten."""
        if self._places.get(rank) != place:
            self._places[rank] = place
            self._history.forget(rank)

    def make(
        self,
        medians: Medians,
        verdicts: tuple[Verdict, ...] = (),
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> Report:
        """Return the report over what each rank measured since the last one, and the verdicts that stand."""
        start = self._clock()
        section_relative: dict[str, dict[int, float]] = {}
        section_individual: dict[str, dict[int, float]] = {}
        for section, of_ranks in medians.sections.items():
            relative: dict[int, float] = {}
            for group in self._by_role(of_ranks):
                relative |= relative_scores(group)
            section_relative[section] = relative
            section_individual[section] = self._history.scores(section, of_ranks)
        gpu_relative: dict[int, float] = {}
        for kernels in self._by_role(medians.kernels):
            gpu_relative |= relative_gpu_scores(kernels)
        report = Report(
            nodes={rank: place.node for rank, place in self._places.items()},
            gpu_relative=gpu_relative,
            gpu_individual=self._history.gpu_scores(medians.kernels),
            section_relative=section_relative,
            section_individual=section_individual,
            relative_threshold=self.relative_threshold,
            individual_threshold=self.individual_threshold,
            verdicts=verdicts,
            first_step=first_step,
            last_step=last_step,
        )
        report = attrs.evolve(report, stragglers=_below(report, medians))
        return attrs.evolve(report, processing_s=self._clock() - start)

    def _by_role(self, of_ranks: Mapping[int, _Value]) -> Sequence[Mapping[int, _Value]]:
        if len({place.role for place in self._places.values()}) < 2 and of_ranks.keys() <= self._places.keys():
            return [of_ranks]
        roles: dict[str, dict[int, _Value]] = {}
        for rank, value in of_ranks.items():
            place = self._places.get(rank)
            roles.setdefault(place.role if place is not None else "", {})[rank] = value
        return list(roles.values())


def _below(report: Report, medians: Medians) -> tuple[Straggler, ...]:
    tables: list[tuple[str, float, str | None, Mapping[int, float]]] = [
        (GPU_RELATIVE, report.relative_threshold, None, report.gpu_relative),
        (GPU_INDIVIDUAL, report.individual_threshold, None, report.gpu_individual),
        *((SECTION_RELATIVE, report.relative_threshold, name, of) for name, of in report.section_relative.items()),
        *(
            (SECTION_INDIVIDUAL, report.individual_threshold, name, of)
            for name, of in report.section_individual.items()
        ),
    ]
    return tuple(
        Straggler(rule, rank, report.nodes.get(rank, ""), section, score)
        for rule, threshold, section, scores in tables
        for rank, score in scores.items()
        if score < threshold and (section is None or _loses(medians, section, rank, score))
    )


def _named(straggler: Straggler) -> str:
    node = f" ({straggler.node})" if straggler.node else ""
    section = f" in {straggler.section}" if straggler.section else ""
    return f"rank {straggler.rank}{node}{section} {_shown(straggler.score)}"


def _loses(medians: Medians, section: str, rank: int, score: float) -> bool:
    """Tell whether what a rank takes longer than the reference of its score would be noticed."""
    excess_s = medians.sections[section][rank] * (1.0 - score)
    return excess_s >= medians.least_excess_s.get(section, LEAST_EXCESS_S)


def _shown(score: float) -> str:
    """Return a score with two digits; a very small one with what it has, since 0 would mean that nothing is known."""
    return f"{score:.2f}" if score >= 0.005 else f"{score:.1g}"
