"""NVIDIA's callbacks of fault tolerance: their parameters, their words, and the three sections. No fit is made here."""

import inspect
from types import SimpleNamespace

import pytest
from adapter_frameworks import require

from resilience_sdk.adapters import lightning as ours
from resilience_sdk.adapters.lightning.fault_tolerance import ThreeSections, heartbeat_timeouts, section_timeouts
from resilience_sdk.core.settings import Settings
from resilience_sdk.hang.timeouts import LearnedTimeouts
from resilience_sdk.recorder import lookup


class Strategy:
    """What is hung on: a step that may fail, and saves that call one another."""

    def __init__(self):
        self.checkpoint_io = SimpleNamespace(maybe_finalize_save_checkpoint=lambda: self.remove_checkpoint())

    def training_step(self, fails=False):
        if fails:
            raise OSError("step")
        return 3

    def validation_step(self):
        return self.training_step()

    def save_checkpoint(self):
        self.checkpoint_io.maybe_finalize_save_checkpoint()

    def remove_checkpoint(self):
        pass


def passes(recording):
    return {name: len(durations) for name, durations in recording.harvest().items()}


def open_sections(recording):
    return [section.name for lane in recording.reader.snapshot().lanes for section in lane.stack]


def test_three_sections_of_which_nested_ones_count_once(recording):
    """A save that removes an older one is one pass; after `detach` the trainer is as it was, and nothing is timed."""
    strategy = Strategy()
    three = ThreeSections(SimpleNamespace(strategy=strategy))
    assert open_sections(recording) == ["setup"]
    three.setup_ends()
    three.setup_ends()
    assert strategy.training_step() == strategy.validation_step() == 3
    strategy.save_checkpoint()
    assert passes(recording) == {"setup": 1, "step": 2, "checkpointing": 1}
    three.detach()
    strategy.training_step()
    assert vars(strategy).keys() == {"checkpoint_io"}
    assert passes(recording) == {}


def test_a_step_that_raises_is_closed_and_the_next_fit_begins_anew(recording):
    """The original called that a section which was open already."""
    strategy = Strategy()
    first = ThreeSections(SimpleNamespace(strategy=strategy))
    with pytest.raises(OSError, match="step"):
        strategy.training_step(fails=True)
    first.detach()
    assert open_sections(recording) == []
    second = ThreeSections(SimpleNamespace(strategy=strategy))
    second.setup_ends()
    strategy.training_step()
    second.detach()
    assert open_sections(recording) == []


def test_a_process_that_records_nothing_times_nothing():
    """And calls what it wraps."""
    lookup.disable()
    strategy = Strategy()
    three = ThreeSections(SimpleNamespace(strategy=strategy))
    assert strategy.training_step() == 3
    three.detach()


def test_timeouts_are_shown_as_the_original_shows_them():
    """Calculated are those that were learned; what is set or a default is not."""
    assert heartbeat_timeouts(LearnedTimeouts(Settings())) == (
        "HeartbeatTimeouts(initial=3600.00, subsequent=600.00, were_calculated=False)"
    )
    assert section_timeouts(LearnedTimeouts(Settings(section_timeouts={"step": 180}))) == (
        "SectionTimeouts(section={'setup': None, 'step': 180.0, 'checkpointing': None}, out_of_section=1800.00, "
        "calculated_sections=[], is_out_of_section_calculated=False)"
    )
    book = LearnedTimeouts(Settings())
    book.add("step", "heartbeat", [10.0] * 8)
    book.add("step", "compute", [8.0] * 8)
    for _ in range(8):
        book.add_startup(100.0)
        book.begin_attempt()
    assert heartbeat_timeouts(book) == "HeartbeatTimeouts(initial=500.00, subsequent=50.00, were_calculated=True)"
    assert "'step': 40.0" in section_timeouts(book)
    assert "calculated_sections=['step']" in section_timeouts(book)


def test_without_calculated_timeouts_none_is_learned():
    """Also none of before counts: what is set holds, else the defaults, and the file says so."""
    book = LearnedTimeouts(Settings(section_timeouts={"step": 180}), script="train.py")
    book.add("step", "heartbeat", [0.1, *[10.0] * 100], first=True)
    book.add_out_of_section([2.0])
    book.keep()
    book.add("step", "heartbeat", [10.0] * 100)
    book.add("checkpointing", "io", [10.0] * 100)
    book.add_out_of_section([2.0])
    book.survive("step", "heartbeat", 50.0)
    assert book.double("step") is None
    for _ in range(8):
        book.add_startup(100.0)
        book.begin_attempt()
    assert heartbeat_timeouts(LearnedTimeouts(Settings())) == (
        "HeartbeatTimeouts(initial=3600.00, subsequent=600.00, were_calculated=False)"
    )
    assert book.startup_limit().seconds == 3600
    assert book.out_of_section_limit().seconds == 1800
    assert book.step_limit("train").seconds == 600
    assert "'step': 180" in section_timeouts(book)
    assert "calculated_sections=[]" in section_timeouts(book)
    (job,) = book.to_json()["jobs"]
    assert (job["learns"], job["entries"]) == (False, {})


def test_no_trainer_of_lightning_2_takes_resume_from_checkpoint():
    """As documented: the guides of NVIDIA name it, and what resumes there is `fit(ckpt_path=...)`."""
    require("lightning.pytorch", "lightning")
    import lightning.pytorch as pl

    with pytest.raises(TypeError, match="resume_from_checkpoint"):
        pl.Trainer(resume_from_checkpoint=True)
    assert "ckpt_path" in inspect.signature(pl.Trainer.fit).parameters


def test_a_fault_may_be_a_mapping():
    """As a configuration file has it; a wrong one is an error at once."""
    require("lightning.pytorch", "lightning")
    required = {"autoresume": True, "calculate_timeouts": True}
    made = ours.FaultToleranceCallback(**required, simulated_fault_params={"fault_type": "rank_hung", "base_delay": 3})
    assert made._fault == ours.SimulatedFaultParams("rank_hung", 3)
    with pytest.raises(ValueError, match="rank_killed"):
        ours.FaultToleranceSectionsCallback(**required, simulated_fault_params={"fault_type": "x", "base_delay": 3})


@pytest.mark.parametrize(("rank_to_fail", "is_said"), [(2, True), (-1, True), (1, False)])
def test_a_fault_that_strikes_nobody_is_said(capsys, rank_to_fail, is_said):
    """A rehearsal that does nothing must not look like a promise that held."""
    require("lightning.pytorch", "lightning")
    params = {"fault_type": "rank_killed", "base_delay": 1000, "rank_to_fail": rank_to_fail}
    callback = ours.FaultToleranceCallback(True, True, simulated_fault_params=params)
    session = SimpleNamespace(attempt=0, config=SimpleNamespace(job="j"))
    callback._arm(SimpleNamespace(trainer=SimpleNamespace(world_size=2, global_rank=0), session=session))
    assert (f"of 2 ranks none is number {rank_to_fail}" in capsys.readouterr().err) is is_said
    assert callback._timer is None
