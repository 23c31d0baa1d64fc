"""The place of a training with DeepSpeed, without it: at an epoch's end, in a window, on other ranks; its loaders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk.adapters.deepspeed import loaders
from resilience_sdk.adapters.deepspeed.attached import Attached
from resilience_sdk.adapters.deepspeed.place import EngineState, Place, is_window_open
from resilience_sdk.adapters.deepspeed.proof import SampleTap
from resilience_sdk.core import resume_limits
from resilience_sdk.errors import CheckpointError
from resilience_sdk.rank.fingerprints import print_of_indices

BATCHES = 6


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch):
    """As a process that has just begun."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())


def engine(*, micro=2, accumulation=2, replicas=1, micro_steps=0, lr=0.1):
    """What a place asks an engine for."""
    return SimpleNamespace(
        module=nn.BatchNorm1d(1),
        optimizer=SimpleNamespace(param_groups=[{"lr": lr, "betas": (0.9, 0.99), "params": []}]),
        train_micro_batch_size_per_gpu=lambda: micro,
        gradient_accumulation_steps=lambda: accumulation,
        train_batch_size=lambda: micro * accumulation * replicas,
        dp_world_size=replicas,
        micro_steps=micro_steps,
    )


def loader(batch=2, samples=12):
    return DataLoader(TensorDataset(torch.arange(float(samples))), batch_size=batch)


def noted():
    return {limit.key for limit in resume_limits.limits()}


def read(place, source, batches):
    """Read so many batches of a pass as the adapter does."""
    place.prepare_epoch(source)
    place.pass_begins(is_open=False)
    walked = place.enter_epoch(iter(source), lambda: None, is_speaker=False)
    for _ in range(batches):
        next(walked)
        place.batches += 1
    return walked


def test_a_place_is_that_of_the_last_step():
    """What was read since is read again."""
    source = loader()
    place = Place(engine(), source)
    read(place, source, 2)
    place.step_ends()
    place.batches += 1
    assert place.goes_back
    assert place.capture()["batches"] == 2
    assert place.batches == 3


def test_behind_the_batches_of_an_epoch_is_before_what_follows_them():
    """The next start has an empty pass of the same epoch; an older version's place is the next epoch's begin."""
    source = loader()
    place = Place(engine(), source)
    read(place, source, BATCHES)
    place.step_ends()
    saved = place.capture()
    again = Place(engine(), source)
    again.restore(saved, 1, 1)
    assert again.capture()["batches"] == BATCHES  # what a proof compares
    again.fit()
    assert (again.epoch, again.is_unread) == (0, True)
    again.finish_epoch()
    assert (again.epoch, again.batches, again.is_unread) == (1, 0, False)
    old = Place(engine(), source)
    old.restore({"epoch": 1, "batches": 0, "rng": saved["rng"]}, 1, 1)
    old.fit()
    assert (old.epoch, old.is_unread, noted()) == (1, False, set())


@given(
    st.integers(0, 40), *(st.sampled_from([1, 2, 3, 4, 8]) for _ in range(4))
)  # batches; micro-batch and replicas before and now
def test_no_sample_is_left_out_by_another_number_of_ranks_or_batch(batches, micro, replicas, micro_now, replicas_now):
    """At most a step's samples are used twice."""
    before = Place(engine(micro=micro, replicas=replicas), None)
    before.batches = batches
    before.step_ends()
    now = Place(engine(micro=micro_now, replicas=replicas_now), None)
    now.restore(before.capture(), replicas, replicas_now)
    now.fit()
    done, goes_on_at = batches * micro * replicas, now.batches * micro_now * replicas_now
    assert done - micro_now * replicas_now < goes_on_at <= done


@pytest.mark.parametrize(
    ("other", "source", "told"),
    [
        ({"accumulation": 4, "micro": 1}, loader(batch=1), {"deepspeed accumulation"}),
        ({"accumulation": 4}, loader(), {"deepspeed batch"}),
        ({"replicas": 2}, loader(), {"deepspeed batch"}),
        ({}, loader(samples=14), {"deepspeed length"}),
        ({}, None, {"deepspeed counted"}),
        ({}, loader(), set()),
    ],
    ids=["accumulation", "batch", "ranks", "length", "no loader", "the same"],
)
def test_what_is_other_is_said(other, source, told):
    """Once, with the resume."""
    place = Place(engine(), loader())
    read(place, loader(), 2)
    place.step_ends()
    again = Place(engine(**other), source)
    again.restore(place.capture(), 1, other.get("replicas", 1))
    again.fit()
    assert noted() == told


def test_another_number_of_ranks_is_refused_with_zero(tmp_path):
    """With the number to start; a universal checkpoint of DeepSpeed's takes any."""
    now = engine(replicas=4)
    place = Place(now, None)
    place.restore(Place(engine(replicas=2), None).capture(), 2, 4)
    place.check_ranks(tmp_path)
    now.zero_optimization = lambda: True
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks, and is resumed by 4 ranks.*start 2"):
        place.check_ranks(tmp_path)
    now.load_universal_checkpoint = lambda: True
    place.check_ranks(tmp_path)


def test_learning_rates_that_the_framework_has_not_put_back_are_put_back():
    """ZeRO's elastic checkpoints leave them as the configuration has them."""
    place = Place(engine(lr=0.025), None)
    now = engine(lr=0.1)
    again = Place(now, None)
    again.restore(place.capture(), 1, 1)
    again.put_back_rates()
    assert now.optimizer.param_groups[0] == {"lr": 0.025, "betas": (0.9, 0.99), "params": []}


def test_each_rank_has_its_own_buffers(monkeypatch):
    """DeepSpeed saves those of one; of an earlier version they are not there, which is said."""
    monkeypatch.setattr("resilience_sdk.adapters.deepspeed.place._has_several_ranks", lambda: True)
    one, other = engine(), engine()
    one.module(torch.randn(4, 1))
    kept = EngineState(other)
    kept.load_state_dict({name: value for name, value in EngineState(one).state_dict().items()})
    kept.put_back(is_same_job=True)
    assert torch.equal(other.module.running_mean, one.module.running_mean)
    assert noted() == set()
    EngineState(other).put_back(is_same_job=True)
    assert noted() == {"deepspeed buffers of ranks"}


@pytest.mark.parametrize(("micro_steps", "is_open"), [(0, False), (1, True), (2, False)])
def test_a_window_is_open_between_the_micro_batches_of_a_step(micro_steps, is_open):
    """By the engine's own count, where it keeps one."""
    assert is_window_open(engine(micro_steps=micro_steps)) is is_open
    forced = engine(micro_steps=micro_steps)
    forced._is_gradient_accumulation_boundary = False
    assert not is_window_open(forced)
    unmanaged = engine(micro_steps=micro_steps)
    unmanaged.managed_gradient_accumulation, unmanaged._unmanaged_backward_count = lambda: False, 1
    assert is_window_open(unmanaged)


class DeepSpeedDataLoader:
    """The shape of the loader of `training_data=`, which is its own iterator."""

    def __init__(self, source):
        self.dataset, self.batch_size, self.data_sampler = source.dataset, source.batch_size, source.sampler
        self.dataloader_drop_last, self.num_local_io_workers = False, 0
        self.passes = 0
        self.data = None

    def __iter__(self):
        self.passes += 1
        self.data = iter([(one,) for one in range(3)])
        return self

    def __next__(self):
        return next(self.data)


class RepeatingLoader:
    """The shape of DeepSpeed's."""

    def __init__(self, inner):
        self.loader, self.data_iter = inner, iter(inner)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class Loop:
    """What a timed loader tells of its passes."""

    def __init__(self, *, takes_over=True):
        self.told = []
        self._takes_over = takes_over

    def takes_over(self, _loader):
        self.told.append("taken over")
        return self._takes_over

    def pass_begins(self):
        self.told.append("begins")

    def make_pass(self, make):
        return make()

    def walk(self, batches):
        for batch in batches:
            self.told.append(batch[0])
            yield batch

    def pass_ends(self):
        self.told.append("ends")


def test_the_loader_of_training_data_is_counted_and_stays_what_it_is():
    """Each pass; its class is given back."""
    own, loop = DeepSpeedDataLoader(loader()), Loop()
    timed = loaders.TimedOwnLoader(own, loop)
    assert iter(own) is own
    assert list(own) == [(0,), (1,), (2,)]
    assert loop.told == ["begins", "begins", 0, 1, 2, "ends"]
    assert isinstance(own, DeepSpeedDataLoader)
    timed.restore()
    assert type(own) is DeepSpeedDataLoader
    assert loaders.is_own(own)
    assert len(loaders.source_of(own)) == BATCHES


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_resume_in_a_pass_that_was_begun_before_says_it_again(is_ahead):
    """Behind that pass there is nothing to say."""
    walk = SimpleNamespace(is_resumed=True, is_ahead=is_ahead)
    handle = SimpleNamespace(_walk=walk, _source=None)
    assert not Attached.takes_over(handle, SimpleNamespace(num_workers=1))
    assert noted() == ({"deepspeed begun before"} if is_ahead else set())


@pytest.mark.parametrize("takes_over", [True, False])
def test_a_pass_that_was_begun_before_is_gone_on_with_or_begun_anew(takes_over):
    """The latter behind a resume, which needs another one."""
    repeating = RepeatingLoader(DeepSpeedDataLoader(loader()))
    loop = Loop(takes_over=takes_over)
    loaders.TimedOwnLoader(repeating.loader, loop)
    assert [next(repeating)[0] for _ in range(4)] == [0, 1, 2, 0]
    begun = ["taken over"] if takes_over else ["taken over", "begins"]
    assert loop.told == [*begun, 0, 1, 2, "ends", "begins", 0]
    assert repeating.loader.passes == (2 if takes_over else 3)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_samples_of_the_engines_own_loader_are_noted_by_batches(drop_last):
    """As a `DataLoader` puts them together, also the last ones, which may be fewer."""
    tap = SampleTap(range(10), 4, drop_last=drop_last)
    batches = list(DataLoader(range(10), 4, sampler=tap, drop_last=drop_last))
    assert list(tap.drawn) == [print_of_indices(batch.tolist()) for batch in batches]
    assert (len(batches), len(tap)) == (2 if drop_last else 3, 10)
