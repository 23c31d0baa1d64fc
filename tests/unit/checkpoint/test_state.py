from __future__ import annotations

import io
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.state import (
    StateMap,
    capture,
    capture_generators,
    capture_rng,
    classify,
    find_nan,
    restore_generators,
    restore_rng,
    tensor_bytes,
    unwrap,
)
from resilience_sdk.core import resume_limits
from resilience_sdk.errors import CheckpointError, ConfigError


class Loader:
    def __iter__(self):
        return iter(())

    def state_dict(self):
        return {"position": 3}

    def load_state_dict(self, saved):
        self.saved = saved


class Holder:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, saved):
        self.value = saved


def test_who_writes_what():
    """Models and optimizers are shared, loaders and generators belong to a rank, plain loaders are counted."""
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    assert classify("m", model) == "shared"
    assert classify("o", optimizer) == "shared"
    assert classify("s", torch.optim.lr_scheduler.StepLR(optimizer, 2)) == "shared"
    assert classify("t", torch.zeros(3)) == "shared"
    assert classify("d", Loader()) == "rank"
    assert classify("g", torch.Generator()) == "rank"
    assert classify("p", torch.utils.data.DataLoader([1, 2])) == "counted"


@pytest.mark.parametrize("item", [3, 0.5, "text", {"a": 1}, [1], None, object()])
def test_what_cannot_be_saved_is_named_with_the_cure(item):
    """An entry that is no state names itself and where it belongs."""
    with pytest.raises(ConfigError, match=r"state\['best'\]"):
        StateMap({"best": item})


def test_state_is_a_mapping():
    """A bare model in place of a mapping says how to write it."""
    with pytest.raises(ConfigError, match='"model": model'):
        StateMap(nn.Linear(1, 1))


def test_wrappers_are_taken_off():
    """DataParallel and torch.compile around a module do not show in its checkpoint."""
    model = nn.Linear(2, 2)
    compiled = nn.Module()
    compiled._orig_mod = nn.DataParallel(model)  # what torch.compile returns looks like this
    assert unwrap(compiled) is model
    assert list(StateMap({"model": compiled}).capture_shared()["model"]) == ["weight", "bias"]


@pytest.mark.parametrize("value", [object(), frozenset([1]), numpy.ones(2), {"deep": [object()]}, print])
def test_what_could_not_be_loaded_is_refused_at_the_save(value):
    """A state that weights_only loading would refuse is refused when it is taken, with its place."""
    with pytest.raises(CheckpointError, match="holder"):
        capture("holder", Holder({"x": value}))


def test_what_is_accepted_is_loadable():
    """Everything that passes the check can be read by torch.load(weights_only=True)."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    values = {"a": [1, 2.5, None, "x", b"y", True], "b": (torch.Size([1]), torch.float32), "s": {1, 2}}
    for item in (Holder(values), Holder({"n": numpy.float64(2.5)}), optimizer, nn.LSTM(2, 2), torch.ones(2)):
        buffer = io.BytesIO()
        torch.save(capture("x", item), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)


def test_what_torch_offers_can_be_saved():
    """Schedulers, the gradient scaler and averaged models of torch come back from a weights_only load."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    schedulers = torch.optim.lr_scheduler
    steps, plateau = schedulers.MultiStepLR(optimizer, [2, 4]), schedulers.ReduceLROnPlateau(optimizer)
    cosine = schedulers.CosineAnnealingLR(optimizer, 10)
    one_cycle = schedulers.OneCycleLR(optimizer, 0.1, total_steps=10)
    scaler = torch.amp.GradScaler("cpu")
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    for item in (steps, plateau, cosine, one_cycle, scaler, averaged):
        buffer = io.BytesIO()
        torch.save(capture("x", item), buffer)
        buffer.seek(0)
        item.load_state_dict(torch.load(buffer, weights_only=True))


def test_metadata_of_a_state_dict_is_kept():
    """The versions that modules note in their state_dict travel along."""
    saved = StateMap({"model": nn.BatchNorm1d(2)}).capture_shared()["model"]
    assert saved._metadata[""]["version"] == 2


def test_a_misfit_names_the_entry():
    """A model of another shape, or a missing entry, is an error that names it and the cure."""
    saved = StateMap({"model": nn.Linear(2, 2)}).capture_shared()
    with pytest.raises(CheckpointError, match=r"state\['model'\](?s:.*)size mismatch"):
        StateMap({"model": nn.Linear(3, 3)}).apply_shared(saved)
    with pytest.raises(CheckpointError, match="'ema'"):
        StateMap({"model": nn.Linear(2, 2), "ema": nn.Linear(2, 2)}).apply_shared(saved)
    with pytest.raises(CheckpointError, match="shape"):
        StateMap({"t": torch.zeros(3)}).apply_shared({"t": torch.zeros(2)})


def test_entries_that_nobody_asks_for_are_told():
    """A saved entry without a name in state is reported, not an error."""
    saved = StateMap({"model": nn.Linear(2, 2), "old": torch.ones(1)}).capture_shared()
    assert StateMap({"model": nn.Linear(2, 2)}).apply_shared(saved) == ("old",)


def test_all_generators_go_back_together():
    """Python, numpy, torch and own generators give the same numbers again after a restore, through JSON."""
    import json

    own = torch.Generator().manual_seed(5)
    random.gauss(0.0, 1.0)  # leaves a second number waiting inside
    saved = json.loads(json.dumps([capture_rng(), capture_generators({"own": own})]))

    def draw():
        return (
            random.gauss(0.0, 1.0),
            random.random(),
            numpy.random.standard_normal(3).tolist(),
            torch.rand(3).tolist(),
            torch.rand(3, generator=own).tolist(),
        )

    first = draw()
    restore_rng(saved[0])
    restore_generators({"own": own}, saved[1])
    assert draw() == first


def test_reading_a_state_draws_nothing():
    """Capturing does not move the generators."""
    before = torch.get_rng_state()
    assert capture_rng() == capture_rng()
    assert torch.equal(before, torch.get_rng_state())


def test_sizes_count_tensors_at_any_depth():
    """The guess of the write time counts every tensor."""
    assert tensor_bytes({"a": torch.zeros(2, 3), "b": [torch.zeros(1, dtype=torch.int8), 5]}) == 25


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, float("nan")]),
        torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.bfloat16),
        torch.tensor([[complex(1.0, float("nan"))]]),
        nn.Parameter(torch.full((2, 2), float("nan"), dtype=torch.float16)),
    ],
)
def test_a_nan_is_found_and_its_tensor_named(value):
    """At any depth, in any kind of number; the first one is named as one finds it."""
    assert (
        find_nan({"model": {"0.weight": torch.ones(2)}, "optimizer": {"state": {3: [value]}}}) == "optimizer.state.3.0"
    )


def test_what_is_no_nan_is_no_fault():
    """Infinities are masks, and whole numbers, empty and sparse tensors and those of 8 bits are left alone."""
    mask = torch.full((3, 3), -float("inf"))
    others = [torch.arange(3), torch.ones(0), torch.eye(2).to_sparse(), torch.ones(2).to(torch.float8_e4m3fn)]
    assert find_nan({"mask": mask, "big": torch.full((9,), 6e4, dtype=torch.float16), "others": others, "n": 3}) is None


class InParts:
    """As torch's ZeroRedundancyOptimizer: its state is asked for in vain until it was put together."""

    def consolidate_state_dict(self):
        """Put it together."""

    def state_dict(self):
        raise RuntimeError("Optimizer state has not been consolidated on this rank")

    def load_state_dict(self, state):
        """Take it back."""


def test_what_cannot_be_asked_for_its_state_is_named_with_the_cure():
    """Before the first step: it was called a damaged checkpoint, where there was none."""
    with pytest.raises(ConfigError, match=r"state\['opt'\]: InParts\.state_dict\(\) raised .*`optim`"):
        StateMap({"opt": InParts()}).check()


def test_other_names_of_a_module_are_said_at_the_save_that_has_them(tmp_path, monkeypatch):
    """As of a module that is pruned in the loop: the program makes another one at its start, and is refused then."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    model = nn.Sequential(nn.Linear(2, 2))
    saver = Checkpointer({"model": model}, run_dir=tmp_path)
    saver.resume()
    assert saver.save(1)
    assert resume_limits.limits() == ()
    prune.random_unstructured(model[0], "weight", 0.5)
    assert saver.save(2)
    assert saver.save(3)
    [limit] = resume_limits.limits()
    assert "names of its state_dict ('0.weight', '0.weight_mask', '0.weight_orig')" in limit.words()
