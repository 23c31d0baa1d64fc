"""The snippets of NVIDIA's and NeMo's documentation run where their imports alone are changed."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from adapter_frameworks import require
from documented_snippets import FOR_LIGHTNING
from harness import job

from resilience_sdk.adapters import lightning as ours

CALLBACKS = {
    "fault tolerance": "FaultToleranceCallback",
    "straggler detection": "StragglerDetectionCallback",
    "straggler detection of NeMo": "StragglerDetectionCallback",
    "preemption of NeMo": "PreemptionCallback",
}


@pytest.mark.slow
def test_each_snippet_trains(tmp_path):
    """One after another in one process of one device; the flag of a finished training is that of the first."""
    require("lightning.pytorch", "lightning")
    flag = tmp_path / "flag"
    env = {"FAULT_TOL_FINISHED_FLAG_FILE": str(flag)}
    with job(tmp_path, "--nproc-per-node", "1", "lightning_documented.py", env=env) as run:
        assert run.finish() == 0, run.screen
    assert flag.exists()
    for name in FOR_LIGHTNING:
        found = json.loads((tmp_path / "told" / name).read_text())
        assert found["step"] == 6
        assert CALLBACKS[name] in found["callbacks"]


UNSET = inspect.Parameter.empty
FAULT_TOLERANCE = {
    "autoresume": UNSET,
    "calculate_timeouts": UNSET,
    "simulated_fault_params": None,
    "exp_dir": None,
    "logger_name": "nemo_logger.FaultToleranceCallback",
}


@pytest.mark.parametrize(
    ("name", "documented"),
    [
        ("FaultToleranceCallback", FAULT_TOLERANCE),
        ("FaultToleranceSectionsCallback", {**FAULT_TOLERANCE, "exc_handling_policy": None}),
    ],
)
def test_the_parameters_of_fault_tolerance_are_those_of_the_documentation(name, documented):
    """In their order, with their defaults."""
    found = list(inspect.signature(getattr(ours, name).__init__).parameters.values())[1:]
    assert {each.name: each.default for each in found} == documented


def test_the_parameters_of_straggler_detection_may_be_given_as_the_original_takes_them():
    """In the order of its code; its documentation has another name for one, and NeMo's for two more."""
    by_position = [
        "report_time_interval",
        "calc_relative_gpu_perf",
        "calc_individual_gpu_perf",
        "num_gpu_perf_scores_to_log",
        "gpu_relative_perf_threshold",
        "gpu_individual_perf_threshold",
        "stop_if_detected",
        "enable_ptl_logging",
        "profiling_interval",
        "logger_name",
    ]
    found = inspect.signature(ours.StragglerDetectionCallback.__init__).parameters
    assert [name for name, each in found.items() if each.kind is each.POSITIONAL_OR_KEYWORD][1:] == by_position
    assert found["logger_name"].default == "nemo_logger.StragglerDetectionCallback"
    for name in ("num_gpu_perf_scores_to_print", "straggler_report_time_interval", "stop_if_detected_straggler"):
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY
