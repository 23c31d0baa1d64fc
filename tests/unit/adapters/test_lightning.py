"""The callbacks for Lightning: their parameters, which of them does what, what they log. No fit is made here."""

import logging
import pickle
import signal
from types import SimpleNamespace

import pytest
from adapter_frameworks import require

from resilience_sdk.adapters import lightning as ours
from resilience_sdk.adapters.lightning import callback, fit
from resilience_sdk.adapters.lightning.drop_in import lines_of, without
from resilience_sdk.adapters.lightning.fault_tolerance import plan
from resilience_sdk.adapters.lightning.fit import is_complete, lines_of_stop
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


# -- what is logged


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


def test_the_signal_is_named_where_it_was_heard():
    """In NeMo's words; a rank that has heard none tells of the stop alone."""
    stop = "Preemption detected, saving checkpoint and exiting"
    assert lines_of_stop(SimpleNamespace(heard=15)) == ["Received signal 15, initiating graceful stop", stop]
    assert lines_of_stop(SimpleNamespace(heard=None)) == lines_of_stop(None) == [stop]


# -- parameters


def test_a_simulated_fault_is_drawn_alike_on_all_ranks():
    """From what they share; what is given is not drawn, and an unknown one is an error with the names of all."""
    params = ours.SimulatedFaultParams("random", 3, rand_delay=2)
    drawn = plan(params, 8, "job")
    assert drawn == plan(params, 8, "job")
    assert 0 <= drawn.rank < 8
    assert 3 <= drawn.delay_s <= 5
    given = plan(ours.SimulatedFaultParams("rank_hung", 1, rank_to_fail=2), 8, "job")
    assert (given.rank, given.number, given.delay_s) == (2, signal.SIGSTOP, 1)
    with pytest.raises(ValueError, match="rank_killed"):
        ours.SimulatedFaultParams("meteor", 1)


@pytest.mark.usefixtures("framework")
def test_both_spellings_of_the_straggler_callback():
    """NVIDIA's documentation, NVIDIA's code and NeMo call the parameters by different names."""
    thresholds = {"gpu_relative_perf_threshold": 0.5, "gpu_individual_perf_threshold": 0.6}
    documented = ours.StragglerDetectionCallback(
        report_time_interval=60, num_gpu_perf_scores_to_log=3, stop_if_detected=False, logger_name="log", **thresholds
    )
    nemo = ours.StragglerDetectionCallback(
        straggler_report_time_interval=60,
        num_gpu_perf_scores_to_print=3,
        stop_if_detected_straggler=False,
        enable_ptl_logging=True,
        **thresholds,
    )
    assert documented._options_of_job == nemo._options_of_job


@pytest.mark.usefixtures("framework")
def test_the_recipe_of_nemo_has_its_defaults():
    """As its documentation has them: 300 s, both scores, five of each printed and plotted, 0.7, and a stop."""
    recipe = ours.straggler_det_callback()
    assert recipe._options_of_job == {
        "report_interval": 300.0,
        "relative_threshold": 0.7,
        "individual_threshold": 0.7,
        "scores_to_print": 5,
        "stop_below_relative": 0.7,
        "stop_below_individual": 0.7,
    }
    assert (recipe._relative, recipe._individual, recipe._logs_scores) == (True, True, True)
    assert recipe.stops_for_stragglers
    assert not ours.straggler_det_callback(stop_if_detected_straggler=False).stops_for_stragglers


@pytest.mark.usefixtures("framework")
@pytest.mark.parametrize(
    ("make", "wrong", "said"),
    [
        ("StragglerDetectionCallback", {"report_time_interval": 1, "straggler_report_time_interval": 2}, "give one of"),
        ("StragglerDetectionCallback", {"gpu_relative_perf_threshold": 7}, "relative_threshold"),
        (
            "StragglerDetectionCallback",
            {"calc_relative_gpu_perf": False, "calc_individual_gpu_perf": False},
            "No straggler performance scores specified",
        ),
        ("ResilienceCallback", {"checkpoint_evry": 3}, "checkpoint_every"),
        ("ResilienceCallback", {"stop_if_detected": 7.0}, r"stop_if_detected=7\.0: expected"),
        ("ResilienceCallback", {"stop_if_detected": 0.7, "stop_below_relative": 0.6}, "give one of them"),
        ("PreemptionCallback", {"sig": 99999}, "99999"),
    ],
)
def test_wrong_parameters_are_errors(make, wrong, said):
    """That name the parameter, or the setting that it becomes."""
    with pytest.raises((ConfigError, ValueError), match=said):
        getattr(ours, make)(**wrong)


@pytest.mark.usefixtures("framework")
def test_a_stop_of_the_callback_is_a_verdict_or_a_threshold():
    """Of either kind, or none; what was not asked for is left to the settings."""
    assert ours.ResilienceCallback()._live == {}
    assert ours.ResilienceCallback(stop_if_detected=True)._live == {"stop_if_detected": True}
    at_a_score = ours.ResilienceCallback(stop_if_detected=0.7, report_interval=60)
    assert at_a_score._live == {"stop_if_detected": False, "stop_below_relative": 0.7, "report_interval": 60}
    none = ours.ResilienceCallback(stop_if_detected=False)._live
    assert none == {"stop_if_detected": False, "stop_below_relative": 0.0, "stop_below_individual": 0.0}
    only_own = ours.StragglerDetectionCallback(calc_relative_gpu_perf=False, stop_if_detected=True)._options_of_job
    assert (only_own["stop_below_relative"], only_own["stop_below_individual"]) == (0.0, 0.7)


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
def test_hooks_that_do_nothing_cannot_be_called_during_a_fit():
    """Lightning does more around each than we do in a step; one that a subclass has filled is called as ever."""

    class Own(ours.ResilienceCallback):
        def on_before_backward(self, trainer, pl_module, loss):
            """Look at the loss."""

    callback = Own("runs/a")
    before = dict(vars(callback))
    callback._leave_unused_hooks_out()
    assert [callable(getattr(callback, name)) for name in ("on_after_backward", "on_before_backward")] == [False, True]
    callback.teardown(None, None, "fit")
    assert vars(callback) == before
    assert callable(callback.on_after_backward)


@pytest.mark.usefixtures("framework")
def test_trainers_get_a_callback_with_no_code_only_where_that_is_asked(monkeypatch):
    """By `RESILIENCE_AUTO=1`: the entry point is asked by every trainer of this machine."""
    monkeypatch.delenv("RESILIENCE_AUTO", raising=False)
    assert ours.callbacks_from_environment() == []
    monkeypatch.setenv("RESILIENCE_AUTO", "1")
    [found] = ours.callbacks_from_environment()
    assert found.is_automatic


@pytest.mark.usefixtures("framework")
def test_kernels_are_timed_some_times_per_report_by_whichever_callback_times_the_sections():
    """Three times per report, and every 30 seconds at least; nobody else asks for it."""
    every_minute, recipe = ours.StragglerDetectionCallback(report_time_interval=60), ours.straggler_det_callback()
    assert (every_minute.kernels_every, recipe.kernels_every) == (20.0, 30.0)
    beats = ours.FaultToleranceCallback(autoresume=False, calculate_timeouts=True)
    assert fit.kernels_every([object(), beats]) is None
    assert fit.kernels_every([object(), beats, recipe]) == 30.0


# -- which of several does what

ALL = frozenset({fit.BEAT, fit.SECTIONS, fit.PREEMPTION, fit.CHECKPOINT, fit.FINISH})


class Duties:
    """What is looked at of a callback."""

    def __init__(self, *duties, automatic=False, stops=False):
        self.duties = frozenset(duties)
        self.is_automatic = automatic
        self.stops_for_stragglers = stops


RESILIENCE, AUTO, OTHER_AUTO = Duties(*ALL), Duties(*ALL, automatic=True), Duties(*ALL, automatic=True)
PREEMPTION, BEATS = Duties(fit.PREEMPTION), Duties(fit.BEAT, fit.SECTIONS)
REPORTS, STOPS = Duties(fit.SECTIONS, fit.REPORT), Duties(fit.SECTIONS, fit.REPORT, stops=True)


@pytest.mark.parametrize(
    ("callbacks", "roles"),
    [
        ([RESILIENCE], [ALL]),  # callbacks of others do not matter
        ([BEATS, REPORTS], [{fit.BEAT, fit.SECTIONS}, {fit.REPORT}]),  # sections are timed once, by the first
        ([AUTO, PREEMPTION], [set(), {fit.PREEMPTION}]),  # one that somebody has asked for
        ([AUTO, OTHER_AUTO], [ALL, set()]),
        ([STOPS], [{fit.SECTIONS, fit.REPORT, fit.PREEMPTION}]),  # a stop takes somebody who checks
        ([STOPS, PREEMPTION], [{fit.SECTIONS, fit.REPORT}, {fit.PREEMPTION}]),
    ],
)
def test_each_duty_is_done_once(callbacks, roles):
    """By the callback that was asked for it, or came by itself where none was."""
    assert [fit.role_of(each, [object(), *callbacks]) for each in callbacks] == roles


def test_two_that_do_the_same_are_an_error_that_names_both():
    """Whichever is asked."""
    for each in (RESILIENCE, PREEMPTION):
        with pytest.raises(ConfigError, match="Duties and Duties, and both do the preemption: remove one"):
            fit.role_of(each, [RESILIENCE, PREEMPTION])


# -- trainers


def trainer(**values):
    given = {"global_step": 5, "max_steps": -1, "current_epoch": 1, "max_epochs": None, "callbacks": []}
    return SimpleNamespace(**{**given, **values})


def timer(left_s):
    return [SimpleNamespace(time_remaining=lambda: left_s)]


@pytest.mark.parametrize(
    ("values", "has_ended", "expected"),
    [
        ({"max_steps": 5}, True, True),
        ({"max_epochs": 1}, True, True),
        ({"max_epochs": 3}, True, True),  # ended early, by an EarlyStopping
        ({"max_epochs": 3, "callbacks": timer(0.0)}, True, False),
        ({"max_epochs": 3, "callbacks": timer(9.0)}, True, True),
        ({"max_epochs": 3, "callbacks": timer(None)}, True, True),
        ({"max_steps": 5, "callbacks": timer(0.0)}, True, True),
        ({"max_epochs": 3}, False, False),  # `Tuner.lr_find` begins one
        ({"max_steps": 5}, False, True),  # where nothing is left to do, none is begun
    ],
)
def test_a_fit_is_complete_unless_its_time_was_up_or_it_was_only_begun(values, has_ended, expected):
    """Steps or epochs that are reached count first."""
    assert is_complete(trainer(**values), has_ended=has_ended) is expected


def test_a_trainer_of_another_kind_is_an_error_with_a_cure():
    """It names what is missing."""
    with pytest.raises(ConfigError, match=r"SimpleNamespace has no strategy, .*adapters\.pytorch\.attach"):
        callback.check(trainer())
    seams = {"profiler": 0, "fit_loop": 0, "save_checkpoint": 0, "fast_dev_run": 0}
    with pytest.raises(ConfigError, match=r"no strategy\.restore_checkpoint_after_setup"):
        callback.check(trainer(strategy=object(), **seams))


def test_what_saves_on_an_exception_is_named():
    """By its class, or a class above it, or its option."""
    base = type("OnExceptionCheckpoint", (), {})
    own = type("Own", (base,), {})
    saving = type("ModelCheckpoint", (), {"save_on_exception": True})
    plain = type("ModelCheckpoint", (), {"save_on_exception": False})
    found = callback.deadlocking([own(), plain(), saving(), object()])
    assert found == ["Own", "ModelCheckpoint(save_on_exception=True)"]
