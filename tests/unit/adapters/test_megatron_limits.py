"""What a resume will not repeat by the arguments of Megatron-LM; what a rank of a loop on megatron.core keeps."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from resilience_sdk.adapters.megatron import limits
from resilience_sdk.adapters.megatron.checkpoints import TrackedState
from resilience_sdk.core import resume_limits


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch):
    """As a process that has just begun."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())


def noted():
    return {limit.key for limit in resume_limits.limits()}


def arguments(**other):
    """Those of a training that resumes exactly."""
    plain = {
        "save": "runs/a",
        "load": "runs/a/",
        "finetune": False,
        "dataloader_type": "single",
        "dataloader_save": None,
        **{f"no_{verb}_{name}": False for verb in ("save", "load") for name in ("optim", "rng")},
        "data_parallel_size": 1,
        "data_parallel_random_init": False,
        "rampup_batch_size": None,
        "iteration": 5,
        "global_batch_size": 4,
        "consumed_train_samples": 20,
    }
    return SimpleNamespace(**{**plain, **other})


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({}, set()),
        ({"save": None, "finetune": True}, set()),
        ({"finetune": True}, {"megatron finetune"}),
        ({"load": None}, {"megatron load"}),
        ({"load": "pretrained"}, {"megatron load"}),
        ({"no_load_optim": True, "no_save_rng": True}, {"megatron optim", "megatron rng"}),
        ({"dataloader_type": "external"}, {"megatron external"}),
        ({"dataloader_type": "external", "dataloader_save": "runs/data"}, set()),
        ({"dataloader_type": "cyclic"}, {"megatron cyclic"}),
        ({"data_parallel_size": 2}, {"megatron random numbers of ranks"}),
        ({"data_parallel_size": 2, "data_parallel_random_init": True}, set()),
    ],
)
def test_arguments_tell_what_is_not_exact(other, told):
    """Before the first step."""
    limits.note_arguments(arguments(**other))
    assert noted() == told


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({}, set()),
        ({"global_batch_size": 8}, {"megatron batch"}),
        ({"global_batch_size": 8, "rampup_batch_size": [2, 2, 8]}, set()),
    ],
)
def test_samples_tell_of_another_batch(other, told):
    """Those that are consumed are saved by Megatron, its arguments are not compared."""
    limits.note_batch(arguments(**other))
    assert noted() == told


class Tracker:
    """The shape of Megatron's tracker of generators."""

    def __init__(self, states):
        self.states_ = states

    def is_initialized(self):
        return bool(self.states_)

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states


@pytest.fixture
def tracker(monkeypatch):
    """One with a state, and one generator as with CUDA graphs."""
    found = Tracker({"model-parallel-rng": torch.zeros(4, dtype=torch.uint8), "graphed": torch.Generator()})
    module = ModuleType("megatron.core.tensor_parallel.random")
    module._CUDA_RNG_STATE_TRACKER = found
    calculator = ModuleType("megatron.core.num_microbatches_calculator")
    calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = SimpleNamespace(get_current_global_batch_size=lambda: 8)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, calculator.__name__, calculator)
    return found


def test_the_tracker_of_generators_travels(tracker):
    """Dropout inside of tensor parallel layers draws from it."""
    graphed = tracker.states_["graphed"]
    graphed.manual_seed(7)
    saved = TrackedState().state_dict()
    expected = torch.rand(2, generator=graphed)
    tracker.states_["model-parallel-rng"] = torch.ones(4, dtype=torch.uint8)
    kept = TrackedState()
    kept.load_state_dict(saved)
    kept.put_back(is_same_job=True)
    assert tracker.states_["model-parallel-rng"].tolist() == [0, 0, 0, 0]
    assert tracker.states_["graphed"] is graphed
    assert torch.equal(torch.rand(2, generator=graphed), expected)
    assert noted() == set()


@pytest.mark.parametrize(
    ("saved", "is_same_job", "told"),
    [
        (None, True, {"megatron tracker"}),
        (None, False, {"megatron ranks"}),
        ({"tracker": {}, "batch": 16, "ranks": 1}, True, {"megatron batch"}),
        ({"tracker": {}, "batch": None, "ranks": 1}, True, set()),
    ],
    ids=["an earlier version", "other ranks", "another batch", "a batch that nobody knew"],
)
def test_what_is_not_there_is_said(tracker, saved, is_same_job, told):
    """With the resume."""
    kept = TrackedState()
    if saved is not None:
        kept.load_state_dict(saved)
    kept.put_back(is_same_job=is_same_job)
    assert noted() == told


@pytest.mark.parametrize(("final", "told"), [(32, set()), (64, {"megatron batch"})])
def test_a_batch_that_grows_with_the_samples_is_not_compared_before_it_has_grown(tracker, final, told):
    """The loop tells the calculator of the samples behind the resume; another way to grow is said."""
    ramp = {"start_global_batch_size": 8, "batch_size_increment": 8, "ramup_samples": 120}
    growing = SimpleNamespace(get_current_global_batch_size=lambda: 16, global_batch_size=32, **ramp)
    sys.modules["megatron.core.num_microbatches_calculator"]._GLOBAL_NUM_MICROBATCHES_CALCULATOR = growing
    kept = TrackedState()
    saved = kept.state_dict()
    growing.get_current_global_batch_size, growing.global_batch_size = (lambda: 8), final
    kept.load_state_dict(saved)
    kept.put_back(is_same_job=True)
    assert noted() == told
