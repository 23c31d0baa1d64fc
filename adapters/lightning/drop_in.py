"""Straggler and preemption callbacks of NVIDIA's extension and of NeMo, by their names and parameters."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import attrs

from resilience_sdk import straggler
from resilience_sdk.adapters.lightning import fit as roles
from resilience_sdk.adapters.lightning.background_look import BackgroundLook
from resilience_sdk.adapters.lightning.callback import SdkCallback, apply_options
from resilience_sdk.adapters.lightning.fit import Fit
from resilience_sdk.core.console import say_once
from resilience_sdk.core.settings import load_settings
from resilience_sdk.errors import ConfigError
from resilience_sdk.straggler.published import note_logging, note_no_logging
from resilience_sdk.straggler.reports import Report, Straggler

_UNSET: Any = object()
_PERIOD_S = 1.0
_OF_SECTIONS = (
    "the thresholds of the straggler callback are for the scores of the sections (data, fwd, bwd, optim and your own, "
    "each weighted by its time): GPU kernels are not timed here"
)
_WINDOWS_PER_REPORT = 3
_MAX_PAUSE_S = 30.0


class StragglerDetectionCallback(SdkCallback):
    """NVIDIA's `StragglerDetectionCallback`: logs scores of all ranks now and then, and who is slow.

    On CUDA the kernels of one step are timed three times per report, every 30 s at least, unless the setting
    `kernels_every` says otherwise: "GPU relative performance" and "GPU individual performance". The scores of the
    sections come beside them; on a CPU they are all there is, which is said once. No collective. A step whose kernels
    are timed waits for the device once; what that costs is printed, and kept below 1 %.

    Args:
        report_time_interval: Seconds between two reports; also as `straggler_report_time_interval`.
        calc_relative_gpu_perf: Compare the ranks.
        calc_individual_gpu_perf: Compare each rank with its own best.
        num_gpu_perf_scores_to_log: How many of the best and worst are printed; also `num_gpu_perf_scores_to_print`.
        gpu_relative_perf_threshold: A score below it, from 0 to 1, makes a straggler.
        gpu_individual_perf_threshold: The same of the individual scores.
        stop_if_detected: All ranks save and leave with 76 at the first report in which the score of a rank as a whole
            is below `gpu_relative_perf_threshold` or `gpu_individual_perf_threshold`, as far as these scores are
            calculated, and at nothing else; also as `stop_if_detected_straggler`. For a stop on the SDK's own verdict,
            which sees 3 to 5 %, give the job the setting `stop_if_detected`.
        enable_ptl_logging: Log minimum, median and maximum of the scores to the loggers of the trainer.
        profiling_interval: Has no meaning here: sections are timed in every step, kernels by the clock.
        logger_name: The name of the logger that is written to.

    Raises:
        ConfigError: A value is wrong, two spellings are given, or neither kind of score is to be calculated.
    """

    duties = frozenset({roles.SECTIONS, roles.REPORT})

    def __init__(
        self,
        report_time_interval: float = _UNSET,
        calc_relative_gpu_perf: bool = True,
        calc_individual_gpu_perf: bool = True,
        num_gpu_perf_scores_to_log: int = _UNSET,
        gpu_relative_perf_threshold: float = 0.7,
        gpu_individual_perf_threshold: float = 0.7,
        stop_if_detected: bool = _UNSET,
        enable_ptl_logging: bool = False,
        profiling_interval: int = 1,
        logger_name: str | None = "nemo_logger.StragglerDetectionCallback",
        *,
        straggler_report_time_interval: float = _UNSET,
        num_gpu_perf_scores_to_print: int = _UNSET,
        stop_if_detected_straggler: bool = _UNSET,
    ) -> None:
        del profiling_interval
        if not (calc_relative_gpu_perf or calc_individual_gpu_perf):
            raise ConfigError(
                "No straggler performance scores specified. Check if calc_relative_gpu_perf=True or "
                "calc_individual_gpu_perf=True"
            )
        interval = _either(
            300.0,
            report_time_interval=report_time_interval,
            straggler_report_time_interval=straggler_report_time_interval,
        )
        self._scores_to_print = _either(
            5,
            num_gpu_perf_scores_to_log=num_gpu_perf_scores_to_log,
            num_gpu_perf_scores_to_print=num_gpu_perf_scores_to_print,
        )
        stops = bool(
            _either(False, stop_if_detected=stop_if_detected, stop_if_detected_straggler=stop_if_detected_straggler)
        )
        self._options_of_job = {
            "report_interval": float(interval),
            "relative_threshold": gpu_relative_perf_threshold,
            "individual_threshold": gpu_individual_perf_threshold,
            "scores_to_print": self._scores_to_print,
            "stop_below_relative": gpu_relative_perf_threshold if stops and calc_relative_gpu_perf else 0.0,
            "stop_below_individual": gpu_individual_perf_threshold if stops and calc_individual_gpu_perf else 0.0,
        }
        super().__init__(None, logger_name=logger_name)
        load_settings(arguments=self._options_of_job, strict_env=False)
        self.kernels_every = min(_MAX_PAUSE_S, float(interval) / _WINDOWS_PER_REPORT)
        self.stops_for_stragglers = stops
        self._relative, self._individual = calc_relative_gpu_perf, calc_individual_gpu_perf
        self._logs_scores = enable_ptl_logging  # also to the loggers of the trainer
        self._look: BackgroundLook[Report | None] | None = None
        self._last: Report | None = None

    def begins(self, fit: Fit) -> None:
        """Tell the monitor of the job what is asked for, and log in its place, so that nobody reads a report twice."""
        session = fit.session
        apply_options(session, self._options_of_job)
        self._last = straggler.report()
        self._look = BackgroundLook(straggler.report, _PERIOD_S, self._last)
        if session.identity.rank == 0:
            if fit.trainer.strategy.root_device.type != "cuda" or session.settings.kernels_every == 0:
                say_once("scores of sections", _OF_SECTIONS)
            with suppress(OSError):
                note_logging(session.run_dir.path, session.config.job, session.attempt)

    def steps(self, fit: Fit) -> None:
        """Log a report that is new, which another thread looks for."""
        if self._look is not None and self._look.newest is not self._last:
            self._log_news(fit, self._look.newest)

    def leaves(self, fit: Fit) -> None:
        """Log the report that all ranks stop for, in the words of the original."""
        if self._look is not None:
            self._log_news(fit, self._look.end())
        report, below = self._last, self._options_of_job
        if not self.stops_for_stragglers or report is None or not fit.trainer.is_global_zero:
            return
        if report.below(relative=below["stop_below_relative"], individual=below["stop_below_individual"]):
            logging.getLogger(self._logger_name).error("Detected stragglers. Terminating training...")

    def _log_news(self, fit: Fit, report: Report | None) -> None:
        if report is None or report is self._last:
            return
        self._last = report
        trainer = fit.trainer
        if not trainer.is_global_zero:
            return
        report = without(report, relative=self._relative, individual=self._individual)
        log = logging.getLogger(self._logger_name)
        for level, text in lines_of(report, self._scores_to_print):
            log.log(level, text)
        if self._logs_scores:
            # Not by the module's `log`: that hands on what is logged in every 50th step, and forgets the others.
            for logger in trainer.loggers:
                logger.log_metrics(report.summary(), step=trainer.global_step)

    def ends(self, fit: Fit) -> None:
        """Leave the reports to the monitor again."""
        if self._look is not None:
            self._look.end()
            self._look = None
        if fit.session.identity.rank == 0:
            with suppress(OSError):
                note_no_logging(fit.session.run_dir.path)


def without(report: Report, *, relative: bool, individual: bool) -> Report:
    """Return what is wanted of a report. Pure."""
    left_out: dict[str, Any] = {}
    if not relative:
        left_out |= {"gpu_relative": {}, "section_relative": {}, "overall_relative": {}}
    if not individual:
        left_out |= {"gpu_individual": {}, "section_individual": {}, "overall_individual": {}}
    kinds = [kind for kind, is_wanted in (("relative", relative), ("individual", individual)) if is_wanted]
    below = tuple(one for one in report.stragglers if one.rule.rpartition("_")[2] in kinds)
    return attrs.evolve(report, stragglers=below, **left_out)


def lines_of(report: Report, scores_to_print: int) -> list[tuple[int, str]]:
    """Return what is logged of a report, each with its level. Pure."""
    lines = []
    for kind, what in (("relative", "have worse relative performance"), ("individual", "performance dropped")):
        for unit, shown in (("gpu", "GPUs"), ("section", "sections")):
            if found := [one for one in report.stragglers if one.rule == f"{unit}_{kind}"]:
                text = f"STRAGGLER DETECTION WARNING: Some {shown} {what}. Affected ranks: {_named(found)}"
                lines.append((logging.WARNING, text))
    if text := report.text(scores_to_print):
        lines.append((logging.WARNING, f"\n{text}"))
    return lines


def _named(found: Iterable[Straggler]) -> str:
    ids = dict.fromkeys(f"StragglerId(rank={one.rank}, node='{one.node}')" for one in found)
    return "{" + ", ".join(ids) + "}"


class PreemptionCallback(SdkCallback):
    """NeMo's `PreemptionCallback`: on `sig` to any rank all ranks save behind the same step and leave with 75.

    So they do on the signals of the settings, such as SIGTERM. It saves where your `ModelCheckpoint` does, as its last:
    `fit(ckpt_path="last")` resumes.
    """

    duties = frozenset({roles.PREEMPTION})

    def __init__(
        self, sig: int | signal.Signals | None = None, logger_name: str = "resilience_sdk.PreemptionCallback"
    ) -> None:
        self.sig = signal.SIGTERM if sig is None else signal.Signals(sig)
        self.signals = (int(self.sig),)
        super().__init__(None, logger_name=logger_name)


def straggler_det_callback(
    straggler_report_time_interval: float = 300,
    stop_if_detected_straggler: bool = True,
    gpu_relative_perf_threshold: float = 0.7,
    gpu_individual_perf_threshold: float = 0.7,
) -> StragglerDetectionCallback:
    """Return NeMo's recipe of the straggler callback: a report every 300 seconds, and a stop at a score below 0.7."""
    return StragglerDetectionCallback(
        report_time_interval=straggler_report_time_interval,
        calc_relative_gpu_perf=True,
        calc_individual_gpu_perf=True,
        num_gpu_perf_scores_to_print=5,
        gpu_relative_perf_threshold=gpu_relative_perf_threshold,
        gpu_individual_perf_threshold=gpu_individual_perf_threshold,
        stop_if_detected=stop_if_detected_straggler,
        enable_ptl_logging=True,
    )


def _either(default: Any, **spellings: Any) -> Any:
    """Return the value of an option that has two names."""
    given = {name: value for name, value in spellings.items() if value is not _UNSET}
    if len(given) > 1:
        names = "=..., ".join(given)
        raise ConfigError(f"StragglerDetectionCallback({names}=...): both mean the same, give one of them")
    return next(iter(given.values()), default)
