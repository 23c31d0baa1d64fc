"""The callbacks of NVIDIA's extension and of NeMo by their names and parameters: a script changes an import."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

from resilience_sdk import environ
from resilience_sdk.adapters.lightning import roles
from resilience_sdk.adapters.lightning.base import SdkCallback
from resilience_sdk.adapters.lightning.fit import Fit
from resilience_sdk.adapters.lightning.reporting import ReportLog, Wanted, apply_options
from resilience_sdk.adapters.lightning.simulated_fault import SimulatedFaultParams, arm, plan
from resilience_sdk.errors import ConfigError
from resilience_sdk.session import Session
from resilience_sdk.settings import load_settings

_UNSET: Any = object()


class FaultToleranceCallback(SdkCallback):
    """NVIDIA's `FaultToleranceCallback`: heartbeats, sections, learned timeouts, and the flag of a finished training.

    Saving and resuming stay with your `ModelCheckpoint` and `fit(ckpt_path=...)`; `ResilienceCallback` does that too.

    Args:
        autoresume: Create the file that `FAULT_TOL_FINISHED_FLAG_FILE` names, and the run directory's own flag, when
            training is complete. One device alone does it, too.
        calculate_timeouts: Timeouts are learned from the first steps on and kept in the run directory. With False,
            those that the job was started with hold, and what was not set is learned all the same: never none at all.
        simulated_fault_params: A fault to rehearse, see `SimulatedFaultParams`.
        exp_dir: The run directory is `resilience` in it, where neither launcher nor environment names one.
        logger_name: The name of the logger that is written to.
    """

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str = "resilience_sdk.FaultToleranceCallback",
    ) -> None:
        super().__init__(_run_dir_in(exp_dir), logger_name=logger_name)
        self.duties = frozenset({roles.BEAT, roles.SECTIONS} | ({roles.FINISH} if autoresume else set()))
        self._fault = simulated_fault_params
        self._timer: threading.Timer | None = None

    def begins(self, fit: Fit, session: Session) -> None:
        """Arm the simulated fault, in the first attempt."""
        if self._fault is None or session.attempt > 0:
            return
        trainer = fit.trainer
        self._timer = arm(plan(self._fault, trainer.world_size, session.config.job), trainer.global_rank)

    def ends(self) -> None:
        """Disarm it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class StragglerDetectionCallback(SdkCallback):
    """NVIDIA's `StragglerDetectionCallback`: logs scores of all ranks now and then, and who is slow.

    On a GPU the scores are of its time, on a CPU of the sections. No collective, no synchronisation with the device.

    Args:
        report_time_interval: Seconds between two reports; also as `straggler_report_time_interval`.
        calc_relative_gpu_perf: Compare the ranks.
        calc_individual_gpu_perf: Compare each rank with its own best.
        num_gpu_perf_scores_to_log: How many of the best and worst are printed; also `num_gpu_perf_scores_to_print`.
        gpu_relative_perf_threshold: A score below it, from 0 to 1, makes a straggler.
        gpu_individual_perf_threshold: The same of the individual scores.
        stop_if_detected: All ranks save and leave when a straggler is sure; also as `stop_if_detected_straggler`.
        enable_ptl_logging: Log minimum, median and maximum of the scores to the loggers of the trainer.
        profiling_interval: Has no meaning here: every step is timed.
        logger_name: The name of the logger that is written to.
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
        logger_name: str = "resilience_sdk.StragglerDetectionCallback",
        *,
        straggler_report_time_interval: float = _UNSET,
        num_gpu_perf_scores_to_print: int = _UNSET,
        stop_if_detected_straggler: bool = _UNSET,
    ) -> None:
        del profiling_interval
        given = {
            "report_time_interval": report_time_interval,
            "straggler_report_time_interval": straggler_report_time_interval,
            "num_gpu_perf_scores_to_log": num_gpu_perf_scores_to_log,
            "num_gpu_perf_scores_to_print": num_gpu_perf_scores_to_print,
            "stop_if_detected": stop_if_detected,
            "stop_if_detected_straggler": stop_if_detected_straggler,
        }
        count = _either(given, "num_gpu_perf_scores_to_log", "num_gpu_perf_scores_to_print", 5)
        self._options = {
            "report_interval": float(_either(given, "report_time_interval", "straggler_report_time_interval", 300.0)),
            "relative_threshold": gpu_relative_perf_threshold,
            "individual_threshold": gpu_individual_perf_threshold,
            "scores_to_print": count,
            "stop_if_detected": bool(_either(given, "stop_if_detected", "stop_if_detected_straggler", False)),
        }
        super().__init__(None, logger_name=logger_name)
        load_settings(arguments=self._options, strict_env=False)
        self.stops_for_stragglers = self._options["stop_if_detected"]
        self._wanted = Wanted(calc_relative_gpu_perf, calc_individual_gpu_perf, count, enable_ptl_logging)
        self._reports: ReportLog | None = None

    def begins(self, fit: Fit, session: Session) -> None:
        """Tell the monitor of the job what is asked for, and begin to look for reports."""
        apply_options(session, self._options)
        self._reports = ReportLog(self._wanted, logging.getLogger(self._logger_name))
        self._reports.begin(session)

    def steps(self, fit: Fit) -> None:
        """Log a report that is new."""
        if self._reports is not None:
            self._reports.look(fit.trainer)

    def ends(self) -> None:
        """Look no more."""
        if self._reports is not None:
            self._reports.end()
            self._reports = None


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
    straggler_report_time_interval: float = 300, stop_if_detected_straggler: bool = True
) -> StragglerDetectionCallback:
    """Return NeMo's recipe of the straggler callback: a report every 300 seconds, and a stop when one is sure."""
    return StragglerDetectionCallback(
        report_time_interval=straggler_report_time_interval,
        calc_relative_gpu_perf=True,
        calc_individual_gpu_perf=True,
        num_gpu_perf_scores_to_print=5,
        gpu_relative_perf_threshold=0.7,
        gpu_individual_perf_threshold=0.7,
        stop_if_detected=stop_if_detected_straggler,
        enable_ptl_logging=True,
    )


def _either(given: dict[str, Any], name: str, other: str, default: Any) -> Any:
    """Return the value of an option that has two names."""
    values = {key: given[key] for key in (name, other) if given[key] is not _UNSET}
    if len(values) > 1:
        raise ConfigError(f"StragglerDetectionCallback({name}=..., {other}=...): both mean the same, give one of them")
    return next(iter(values.values()), default)


def _run_dir_in(exp_dir: str | os.PathLike[str] | None) -> Path | None:
    env = environ.environment()
    if exp_dir is None or environ.INTERNAL_JOB in env or environ.RUN_DIR in env:
        return None
    return Path(exp_dir) / "resilience"
