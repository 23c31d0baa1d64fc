"""The drop-in callbacks: their parameters, and the form of what they log."""

import logging
import pickle
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from adapter_frameworks import require

from resilience_sdk.adapters import lightning as ours
from resilience_sdk.adapters.lightning.reporting import lines_of, without
from resilience_sdk.adapters.lightning.simulated_fault import plan
from resilience_sdk.errors import ConfigError
from resilience_sdk.straggler.reports import Report, Straggler

REPORT = Report(
    nodes={0: "n0", 1: "n1"},
    gpu_relative={0: 1.0, 1: 0.5},
    gpu_individual={0: 1.0, 1: 0.99},
    section_relative={"fwd": {0: 1.0, 1: 0.5}},
    stragglers=(Straggler("gpu_relative", 1, "n1", None, 0.5),),
    processing_s=0.042,
)


@pytest.fixture
def framework():
    require("lightning.pytorch", "lightning")


def test_a_report_has_the_form_of_the_original():
    """The warning, the tables, the time."""
    (level, warning), (_, text) = lines_of(REPORT, 5)
    assert level == logging.WARNING
    assert warning == (
        "STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. "
        "Affected ranks: {StragglerId(rank=1, node='n1')}"
    )
    assert text.startswith("\nGPU relative performance:\n")
    assert "  Rank=1 Node=n1 Score=0.50" in text
    assert text.endswith("Straggler report processing time: 0.042 sec.")


def test_what_is_not_wanted_is_left_out():
    """Scores, and the stragglers by them."""
    individual = without(REPORT, relative=False, individual=True)
    assert (individual.gpu_relative, individual.section_relative, individual.stragglers) == ({}, {}, ())
    assert individual.gpu_individual == REPORT.gpu_individual
    assert without(REPORT, relative=True, individual=True) == REPORT


def test_a_simulated_fault_is_drawn_alike_on_all_ranks():
    """From what they share; what is given is not drawn."""
    params = ours.SimulatedFaultParams("random", 3, rand_delay=2)
    drawn = plan(params, 8, "job")
    assert drawn == plan(params, 8, "job")
    assert 0 <= drawn.rank < 8
    assert 3 <= drawn.delay_s <= 5
    given = plan(ours.SimulatedFaultParams("rank_hung", 1, rank_to_fail=2), 8, "job")
    assert (given.rank, given.number, given.delay_s) == (2, signal.SIGSTOP, 1)


def test_an_unknown_fault_is_an_error():
    """With the names that there are."""
    with pytest.raises(ValueError, match="rank_killed"):
        ours.SimulatedFaultParams("meteor", 1)


@pytest.mark.usefixtures("framework")
def test_both_spellings_of_the_straggler_callback():
    """NVIDIA's documentation, NVIDIA's code and NeMo call the parameters by different names."""
    documented = ours.StragglerDetectionCallback(
        report_time_interval=60,
        calc_relative_gpu_perf=True,
        calc_individual_gpu_perf=True,
        num_gpu_perf_scores_to_log=3,
        gpu_relative_perf_threshold=0.5,
        gpu_individual_perf_threshold=0.6,
        stop_if_detected=False,
        logger_name="test_logger",
    )
    nemo = ours.StragglerDetectionCallback(
        straggler_report_time_interval=60,
        num_gpu_perf_scores_to_print=3,
        gpu_relative_perf_threshold=0.5,
        gpu_individual_perf_threshold=0.6,
        stop_if_detected_straggler=False,
        enable_ptl_logging=True,
    )
    assert documented._options == nemo._options
    assert ours.straggler_det_callback().stops_for_stragglers
    assert not ours.straggler_det_callback(stop_if_detected_straggler=False).stops_for_stragglers


@pytest.mark.usefixtures("framework")
def test_wrong_parameters_are_errors():
    """That name the parameter, or the setting that it becomes."""
    with pytest.raises(ConfigError, match="give one of them"):
        ours.StragglerDetectionCallback(report_time_interval=1, straggler_report_time_interval=2)
    with pytest.raises(ConfigError, match="relative_threshold"):
        ours.StragglerDetectionCallback(gpu_relative_perf_threshold=7)
    with pytest.raises(ConfigError, match="checkpoint_every"):
        ours.ResilienceCallback(checkpoint_evry=3)
    with pytest.raises(ValueError, match="99999"):
        ours.PreemptionCallback(sig=99999)


@pytest.mark.usefixtures("framework")
def test_a_callback_is_one_of_the_framework_and_of_ours():
    """So that a trainer takes it alone, without a list; and a launcher may send it to another process."""
    import lightning.pytorch as pl

    callback = ours.ResilienceCallback("runs/a")
    assert isinstance(callback, pl.Callback)
    assert isinstance(callback, ours.ResilienceCallback)
    copy = pickle.loads(pickle.dumps(callback))
    assert isinstance(copy, pl.Callback)
    assert copy.state_key == callback.state_key == "ResilienceCallback"


@pytest.mark.usefixtures("framework")
def test_trainers_get_a_callback_with_no_code_only_where_that_is_asked(monkeypatch):
    """By `RESILIENCE_AUTO=1`: the entry point is asked by every trainer of this machine."""
    monkeypatch.delenv("RESILIENCE_AUTO", raising=False)
    assert ours.callbacks_from_environment() == []
    monkeypatch.setenv("RESILIENCE_AUTO", "1")
    [callback] = ours.callbacks_from_environment()
    assert callback.is_automatic


@pytest.mark.usefixtures("framework")
def test_the_recipe_of_nemo_has_its_defaults():
    """As its documentation has them: 300 s, both scores, five of each printed and plotted, 0.7, and a stop."""
    recipe = ours.straggler_det_callback()
    assert recipe._options == {
        "report_interval": 300.0,
        "relative_threshold": 0.7,
        "individual_threshold": 0.7,
        "scores_to_print": 5,
        "stop_if_detected": True,
    }
    wanted = recipe._wanted
    assert (wanted.relative, wanted.individual, wanted.scores_to_print, wanted.logs_scores) == (True, True, 5, True)
