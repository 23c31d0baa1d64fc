"""NVRx's `straggler.Detector`: sections and callables timed on every rank, and scores of all ranks when asked.

The scores are those of `resilience_sdk.straggler.reports`. A section is also one of the SDK, so that its monitor
watches it and names who is slow without anybody asking. Works without a GPU; with one, kernels are timed in the first
passes of each report's time, and give the scores of GPUs.

`generate_report` is a collective where ranks are compared or rank 0 has the report of all, as there.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

import attrs

from resilience_sdk.checkpoint.ranks import Alone, Ranks, find_ranks, group_is_ready
from resilience_sdk.core.console import say_once
from resilience_sdk.recorder.page_layout import shortened
from resilience_sdk.straggler.kernels import KernelTime, durations_of, summarize
from resilience_sdk.straggler.reports import OwnHistory, relative_gpu_scores, relative_scores
from resilience_sdk.straggler.sections import section
from resilience_sdk.straggler.windowing import median

_MOST_DURATIONS = 8192  # of a section, between two reports
_STEPS = 16  # whose median tells how many make up the time between two reports
_WINDOWS = 3  # passes in which kernels are timed, between two reports
_MOST_KERNELS = 64  # that a rank tells the others of, with names of so many bytes
_MOST_NAME = 64
_RELATIVE, _INDIVIDUAL = "relative_perf_scores", "individual_perf_scores"


class Statistic(enum.Enum):
    """A figure of the durations of a section (milliseconds) or a kernel (microseconds)."""

    MIN = enum.auto()
    MAX = enum.auto()
    MED = enum.auto()
    AVG = enum.auto()
    STD = enum.auto()
    NUM = enum.auto()


@dataclasses.dataclass(frozen=True)
class StragglerId:
    """A rank that is slow, and its node."""

    rank: int
    node: str


@dataclasses.dataclass(frozen=True)
class CallableId:
    """A function of a module, class or object, by its name there. The other fields have no effect, as in NVRx."""

    obj: object
    name: str
    arg_filter_fn: Callable[..., bool] | None = None
    extra_args_fn: Callable[..., dict[str, Any]] | None = None
    ignored_args: tuple[str, ...] | None = None

    def __str__(self) -> str:
        if inspect.ismodule(self.obj):
            return f"{self.obj.__name__}.{self.name}"
        if inspect.isclass(self.obj):
            return f"{self.obj.__module__}.{self.obj.__name__}.{self.name}"
        return f"{type(self.obj).__name__}.{self.name}"


@dataclasses.dataclass(frozen=True)
class DetectorReport:
    """Scores from 0 to 1, of all ranks on rank 0 or of this rank alone; NaN where nothing was measured."""

    gpu_relative_perf_scores: Mapping[int, float]
    section_relative_perf_scores: Mapping[str, Mapping[int, float]]
    gpu_individual_perf_scores: Mapping[int, float]
    section_individual_perf_scores: Mapping[str, Mapping[int, float]]
    rank_to_node: Mapping[int, str]
    local_section_summaries: Mapping[str, Mapping[Statistic, float]]
    local_kernel_summaries: Mapping[str, Mapping[Statistic, float]]
    generate_report_elapsed_time: float
    """Milliseconds."""
    gather_on_rank0: bool
    rank: int | None

    def identify_stragglers(
        self,
        gpu_rel_threshold: float = 0.75,
        section_rel_threshold: float = 0.75,
        gpu_indiv_threshold: float = 0.75,
        section_indiv_threshold: float = 0.75,
    ) -> dict[str, Any]:
        """Return who is below a threshold: sets of `StragglerId`, for sections by their names."""
        sections = {
            "straggler_sections_relative": (self.section_relative_perf_scores, section_rel_threshold),
            "straggler_sections_individual": (self.section_individual_perf_scores, section_indiv_threshold),
        }
        return {
            "straggler_gpus_relative": self._below(self.gpu_relative_perf_scores, gpu_rel_threshold),
            "straggler_gpus_individual": self._below(self.gpu_individual_perf_scores, gpu_indiv_threshold),
            **{
                key: {name: found for name, scores in table.items() if (found := self._below(scores, threshold))}
                for key, (table, threshold) in sections.items()
            },
        }

    def _below(self, scores: Mapping[int, float], threshold: float) -> set[StragglerId]:
        return {StragglerId(rank, self.rank_to_node[rank]) for rank, score in scores.items() if score < threshold}


Report = DetectorReport
"""Its name in NVRx."""

__all__ = ["CallableId", "Detector", "Report", "Statistic", "StragglerId"]


@attrs.define
class ReportInterval:
    """How many iterations make up the time between two reports, which all ranks have to count alike. Pure."""

    seconds: float
    at_least: int = 1
    iterations: int | None = None
    """None until ranks have agreed on it."""
    is_elapsed: bool = False
    _count: int = 0
    _began: float | None = None
    _took: deque[float] = attrs.field(factory=lambda: deque(maxlen=_STEPS))

    def step(self, now: float) -> None:
        """Take the end of an iteration."""
        if self._began is not None:
            self._took.append(now - self._began)
        self._began = now
        self._count += 1
        self.is_elapsed = self.iterations is not None and self._count >= self.iterations

    def estimate(self) -> float | None:
        """Return how many iterations they are by the newest of this rank; None before 16."""
        if len(self._took) < _STEPS:
            return None
        return self.seconds / max(median(self._took), 1e-9)

    def agree(self, estimates: Sequence[float | None]) -> None:
        """Take the longest of what the ranks have estimated."""
        known = [estimate for estimate in estimates if estimate is not None]
        if known:
            self.iterations = max(1, self.at_least, int(max(known)))

    def begin_anew(self) -> None:
        """Count from here."""
        self._count = 0


class Kernels:
    """Times of the kernels of a few passes, by torch's profiler; nothing where there is no GPU in use.

    With the device `CPU` they are those of operators.
    """

    def __init__(self, device: str = "CUDA") -> None:
        self._device = device
        self._profile: Any = None
        self._windows: list[Any] = []
        self._passes = 0

    def begin(self) -> bool:
        """Begin a window if it is time for one, and tell whether it has begun. Never raises."""
        torch = sys.modules.get("torch")
        self._passes += 1
        # Not the first pass: it compiles, tunes and allocates.
        is_due = self._passes > 1 and self._profile is None and len(self._windows) < _WINDOWS
        if not is_due or torch is None or (self._device == "CUDA" and not torch.cuda.is_initialized()):
            return False
        try:
            if torch._C._autograd._profiler_enabled():
                return False  # the user's own has precedence
            if self._device == "CUDA" and torch.cuda.is_current_stream_capturing():
                return False  # at its end a window waits for the device, which breaks the capture of a graph
            profile = torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, self._device)])
            profile.start()
        except Exception as error:  # noqa: BLE001 - the pass is to run, timed or not
            say_once("nvrx kernels", f"Detector: GPU kernels are not timed: {type(error).__name__}: {error}")
            return False
        self._profile = profile
        return True

    def end(self) -> None:
        """End the window that is open."""
        profile, self._profile = self._profile, None
        try:
            if self._device == "CUDA":
                sys.modules["torch"].cuda.synchronize()  # else the last kernels are still to come
            profile.stop()
            self._windows.append(profile)
        except Exception as error:  # noqa: BLE001 - as in `begin`
            say_once("nvrx kernels", f"Detector: GPU kernels are not timed: {type(error).__name__}: {error}")

    def take(self) -> dict[str, list[float]]:
        """Return the nanoseconds of each kernel since the last call, by name."""
        windows, self._windows = self._windows, []
        found: dict[str, list[float]] = {}
        for profile in windows:
            for name, times in durations_of(profile.events(), self._device).items():
                found.setdefault(shortened(name, _MOST_NAME), []).extend(times)
        return found


@attrs.define
class _Detection:
    """What the detector of this process holds between `initialize` and `shutdown`."""

    scores: frozenset[str]
    gather_on_rank0: bool
    profiling_interval: int
    interval: ReportInterval
    node: str
    durations: dict[str, deque[float]] = attrs.field(factory=dict)
    """Milliseconds, by section."""
    entries: dict[str, int] = attrs.field(factory=dict)
    history: OwnHistory = attrs.field(factory=OwnHistory)
    kernels: Kernels = attrs.field(factory=Kernels)
    originals: list[tuple[object, str, Any]] = attrs.field(factory=list)

    @property
    def asks_others(self) -> bool:
        """Whether a report takes a collective."""
        return self.gather_on_rank0 or _RELATIVE in self.scores

    def is_due(self, name: str) -> bool:
        """Count one entry of a section, and tell whether it is one that is timed."""
        count = self.entries.get(name, 0)
        self.entries[name] = count + 1
        return count % self.profiling_interval == 0

    def ranks(self) -> Ranks:
        return find_ranks() if self.asks_others and group_is_ready() else Alone()

    def report(self) -> DetectorReport | None:
        """Return the report of what was timed since the last one; None on ranks whose scores rank 0 has."""
        began = time.perf_counter_ns()
        rank = _own_rank()
        sections = {name: summary_of(times) for name, times in self.durations.items() if times}
        by_kernel = self.kernels.take()
        rows = summarize(by_kernel, 0).kernels[:_MOST_KERNELS]
        mine = self._measure(rank, {name: one[Statistic.MED] / 1e3 for name, one in sections.items()}, rows)
        told = self.ranks().gather(mine)
        self.interval.agree([one["iterations"] for one in told])
        for times in self.durations.values():
            times.clear()
        by_rank = {one["rank"]: one for one in told}
        shown = by_rank if self.gather_on_rank0 else {rank: mine}
        if self.gather_on_rank0 and rank != 0:
            return None
        return DetectorReport(
            **scores_of(by_rank, shown, self.scores),
            rank_to_node={each: one["node"] for each, one in shown.items()},
            local_section_summaries=sections,
            local_kernel_summaries={name: summary_of([t / 1e3 for t in times]) for name, times in by_kernel.items()},
            generate_report_elapsed_time=(time.perf_counter_ns() - began) * 1e-6,
            gather_on_rank0=self.gather_on_rank0,
            rank=rank,
        )

    def _measure(self, rank: int, medians: Mapping[str, float], rows: Sequence[KernelTime]) -> dict[str, Any]:
        """Return what this rank tells the others: JSON values."""
        individual = {}
        gpu = None
        if _INDIVIDUAL in self.scores:
            individual = {name: self.history.scores(name, {rank: value}).get(rank) for name, value in medians.items()}
            gpu = self.history.gpu_scores({rank: rows}).get(rank)
        return {
            "rank": rank,
            "node": self.node,
            "sections": dict(medians),
            "kernels": [[row.name, row.count, row.median_s, row.total_s] for row in rows],
            "individual": individual,
            "gpu_individual": gpu,
            "iterations": self.interval.estimate(),
        }


def scores_of(
    by_rank: Mapping[int, Mapping[str, Any]], shown: Collection[int], wanted: Collection[str]
) -> dict[str, dict[Any, Any]]:
    """Return the wanted tables of a report, for the ranks that it shows, from what all ranks have told. Pure."""
    relative: dict[str, dict[int, float]] = {}
    individual: dict[str, dict[int, float]] = {}
    for name in sorted({name for told in by_rank.values() for name in told["sections"]}):
        if _RELATIVE in wanted:
            found = relative_scores({r: t["sections"][name] for r, t in by_rank.items() if name in t["sections"]})
            relative[name] = {rank: found[rank] for rank in shown if rank in found}
        if _INDIVIDUAL in wanted:
            own = {rank: by_rank[rank]["individual"].get(name) for rank in shown}
            individual[name] = {rank: score for rank, score in own.items() if score is not None}
    gpus = relative_gpu_scores({rank: [KernelTime(*row) for row in told["kernels"]] for rank, told in by_rank.items()})
    of_gpus = {rank: by_rank[rank]["gpu_individual"] for rank in shown}
    return {
        "gpu_relative_perf_scores": _or_nan(gpus, shown) if _RELATIVE in wanted else {},
        "section_relative_perf_scores": {name: scores for name, scores in relative.items() if scores},
        "gpu_individual_perf_scores": _or_nan(of_gpus, shown) if _INDIVIDUAL in wanted else {},
        "section_individual_perf_scores": {name: scores for name, scores in individual.items() if scores},
    }


def summary_of(times: Sequence[float]) -> dict[Statistic, float]:
    """Return the figures of some durations, in their own unit. Needs one."""
    mean = sum(times) / len(times)
    spread = math.sqrt(sum((each - mean) ** 2 for each in times) / (len(times) - 1)) if len(times) > 1 else math.nan
    return {
        Statistic.MIN: min(times),
        Statistic.MAX: max(times),
        Statistic.MED: median(times),
        Statistic.AVG: mean,
        Statistic.STD: spread,
        Statistic.NUM: len(times),
    }


def _or_nan(scores: Mapping[int, float | None], ranks: Collection[int]) -> dict[int, float]:
    return {rank: math.nan if (score := scores.get(rank)) is None else score for rank in ranks}


def _own_rank() -> int:
    from resilience_sdk.rank.lifecycle import current

    if group_is_ready():
        return int(sys.modules["torch.distributed"].get_rank())
    session = current()
    return 0 if session is None else session.identity.rank


class _Timed:
    """One section of the detector: a block, and a decorator."""

    def __init__(self, detection: _Detection, name: str, profile_cuda: bool) -> None:
        self._detection = detection
        self._name = name
        self._profile_cuda = profile_cuda
        self._has_window = False
        self._block: Any = None
        self._began = 0

    def __enter__(self) -> None:
        if self._detection.is_due(self._name):
            self._has_window = self._profile_cuda and self._detection.kernels.begin()
            self._block = section(self._name)
            self._block.__enter__()
            self._began = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        took = (time.perf_counter_ns() - self._began) * 1e-6
        block.__exit__(kind, error, trace)
        if self._has_window:
            self._detection.kernels.end()
        if kind is None:
            self._detection.durations.setdefault(self._name, deque(maxlen=_MOST_DURATIONS)).append(took)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _Timed(self._detection, self._name, self._profile_cuda):
                return function(*args, **kwargs)

        return run


class Detector:
    """The detector of this process; never instantiated."""

    initialized: bool = False
    _detection: _Detection | None = None

    def __new__(cls) -> Detector:
        """Refuse: everything is asked of the class."""
        raise RuntimeError(f"class {cls.__name__} should not be instantiated")

    @classmethod
    def initialize(
        cls,
        scores_to_compute: Sequence[str] | str = "all",
        gather_on_rank0: bool = True,
        profiling_interval: int = 1,
        report_time_interval: float = 60,
        node_name: str | None = None,
    ) -> None:
        """Begin.

        Args:
            scores_to_compute: `relative_perf_scores`, `individual_perf_scores`, or "all" for both.
            gather_on_rank0: Rank 0 has the scores of all ranks, the others no report; else each has its own.
            profiling_interval: Of so many passes of a section one is timed.
            report_time_interval: Seconds between two reports of `generate_report_if_interval_elapsed`.
            node_name: Of this node, in reports; without it the host's.

        Raises:
            ValueError: No such score, or no such interval.
        """
        assert not cls.initialized, "Detector is initialized already"
        scores = [scores_to_compute] if isinstance(scores_to_compute, str) else list(scores_to_compute)
        if scores == ["all"]:
            scores = [_RELATIVE, _INDIVIDUAL]
        if not scores or not set(scores) <= {_RELATIVE, _INDIVIDUAL}:
            raise ValueError(f"scores_to_compute={scores_to_compute!r}: expected {_RELATIVE}, {_INDIVIDUAL}, or 'all'")
        if profiling_interval < 1:
            raise ValueError(f"profiling_interval={profiling_interval!r}: expected a number of passes from 1")
        interval = ReportInterval(float(report_time_interval), int(profiling_interval))
        node = node_name or socket.gethostname()
        cls._detection = _Detection(frozenset(scores), gather_on_rank0, int(profiling_interval), interval, node)
        cls.initialized = True

    @classmethod
    def shutdown(cls) -> None:
        """End, and give wrapped callables back."""
        cls.restore_original_callables()
        cls._detection, cls.initialized = None, False

    @classmethod
    def detection_section(cls, name: str | None = None, profile_cuda: bool = True) -> _Timed:
        """Time a block: `with Detector.detection_section("fwd"):`; without a name it is called by its place.

        Raises RuntimeError before `initialize`.
        """
        if name is None:
            caller = inspect.currentframe()
            assert caller is not None
            assert caller.f_back is not None
            name = f"{caller.f_back.f_code.co_filename}:{caller.f_back.f_lineno}"
        return _Timed(cls._needed(), name, profile_cuda)

    @classmethod
    def wrap_callables(cls, callable_ids: Sequence[CallableId], profile_cuda: bool = True) -> None:
        """Time each call of these as a section of its name, until `restore_original_callables`."""
        detection = cls._needed()
        for one in callable_ids:
            timed = _Timed(detection, str(one), profile_cuda)
            kept = vars(one.obj).get(one.name, _NOT_THERE)
            descriptor = inspect.getattr_static(one.obj, one.name) if inspect.isclass(one.obj) else None
            if isinstance(descriptor, (staticmethod, classmethod)):
                wrapped: Any = type(descriptor)(timed(descriptor.__func__))
            else:
                wrapped = timed(getattr(one.obj, one.name))
            detection.originals.append((one.obj, one.name, kept))
            setattr(one.obj, one.name, wrapped)

    @classmethod
    def restore_original_callables(cls) -> None:
        """Undo every `wrap_callables`."""
        originals = cls._detection.originals if cls._detection is not None else []
        while originals:
            obj, name, kept = originals.pop()
            if kept is _NOT_THERE:
                delattr(obj, name)
            else:
                setattr(obj, name, kept)

    @classmethod
    def generate_report(cls) -> DetectorReport | None:
        """Return the report of what was timed since the last one. All ranks call it, where it is a collective."""
        detection = cls._needed()
        detection.interval.begin_anew()
        return detection.report()

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> DetectorReport | None:
        """Return a report when it is time for one, else None; called once per iteration, by all ranks."""
        detection = cls._needed()
        interval = detection.interval
        interval.step(time.monotonic())
        if interval.iterations is None and (own := interval.estimate()) is not None:
            interval.agree(detection.ranks().gather(own))
        return cls.generate_report() if interval.is_elapsed else None

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        """Tell whether the last `generate_report_if_interval_elapsed` made a report."""
        return cls._needed().interval.is_elapsed

    @classmethod
    def _needed(cls) -> _Detection:
        if cls._detection is None:
            raise RuntimeError("Detector is not initialized.")
        return cls._detection


_NOT_THERE = object()
