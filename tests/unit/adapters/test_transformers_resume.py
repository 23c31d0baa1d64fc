"""What a resume of a Trainer goes by: generators, its place in the data, states of callbacks, the time that is left."""

import collections
import json
import random
import types

import numpy as np
import pytest
import torch
from adapter_frameworks import require
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.adapters.transformers import kept
from resilience_sdk.adapters.transformers.changes import say_changes, say_plain
from resilience_sdk.adapters.transformers.evaluations import has_time
from resilience_sdk.adapters.transformers.kept import CallbackState, Shape, batches_after, put_back, states_of
from resilience_sdk.adapters.transformers.place import Generators, LoaderPlace, decoded, encoded, why_again
from resilience_sdk.adapters.transformers.resuming import Resumption
from resilience_sdk.core import resume_limits

# -- generators


class Sampler:
    """Has a generator of its own, and so has its data."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)
        self.dataset = types.SimpleNamespace(noise=np.random.default_rng(1), order=random.Random(2), label="x")


def drawn(sampler):
    return [
        random.random(),
        float(np.random.rand()),
        float(torch.rand(1)),
        float(torch.rand(1, generator=sampler.generator)),
        float(sampler.dataset.noise.random()),
        sampler.dataset.order.random(),
    ]


def test_generators_are_set_to_what_they_were():
    """Those of the process and of the data, also by way of a file."""
    sampler = Sampler()
    found = Generators(sampler)
    assert {*found.own} == {"generator", "dataset.noise", "dataset.order"}
    states = found.capture()
    first = drawn(sampler)
    for again in (states, decoded(json.loads(json.dumps(encoded(states))))):
        found.restore(again)
        assert drawn(sampler) == first


def test_a_generator_that_is_gone_is_left_out():
    """The rest is set."""
    sampler = Sampler()
    states = Generators(sampler).capture()
    first = random.random()
    Generators().restore(states)
    assert random.random() == first


# -- the place


def test_reading_that_draws_is_noticed():
    """The first batch of a pass may draw the order."""

    def batches(draws):
        torch.rand(1)
        for number in range(4):
            if draws:
                np.random.rand()
            yield number

    for draws in (False, True):
        place = LoaderPlace([], 0)
        place.epoch_begins()
        source, method = batches(draws), place.counted(lambda found, count: [next(found) for _ in range(count)])
        assert method(source, 2) == [0, 1]
        assert method(source, 2) == [2, 3]
        assert (place.epoch, place.batches, place.draws) == (0, 4, draws)
        assert place.at_begin is not None
        with pytest.raises(StopIteration):
            next(place._own)
        assert place.is_at_end
        place.epoch_begins()
        assert (place.epoch, place.batches, place.at_begin) == (1, 0, None)


def test_a_pass_of_which_nothing_is_left_is_not_taken_for_the_next_one():
    """At a save of an epoch's last step: the next pass keeps its fingerprint, so that its steps are compared."""
    require("accelerate")
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    loader = prepare_data_loader(DataLoader(range(6), 2), torch.device("cpu"), num_processes=1, process_index=0)
    place, told, checks = LoaderPlace(loader, 0), [], []
    place.prints.is_checked, place.prints.told = True, checks.append

    def take(epoch, number, batch):
        place.prints.note(batch)
        told.append((epoch, number, place.prints.newest_order is not None))

    place.told, place.left_out, place.batches = take, 3, 3
    method = place.counted(lambda found, count: [next(found) for _ in range(count)])
    place.resume_with(lambda: iter(()), {})
    place.epoch_begins()
    with pytest.raises(StopIteration):
        method(iter(loader), 1)
    place.epoch_begins()
    method(iter(loader), 3)
    assert told == [(1, 0, True), (1, 1, True), (1, 2, True)]
    assert checks == []
    assert place.prints.facts


@given(
    batches=st.integers(0, 1000),
    before=st.tuples(st.integers(1, 8), st.integers(1, 16), st.integers(1, 4)),
    now=st.tuples(st.integers(1, 8), st.integers(1, 16), st.integers(1, 4)),
)
def test_another_shape_goes_on_at_a_whole_step(batches, before, now):
    """No sample is left out, and fewer than a step are trained twice."""
    one, other = Shape(*before, None), Shape(*now, None)
    at, twice = batches_after(batches, one, other)
    assert at % other.accumulation == 0
    assert at * other.ranks * other.batch + twice == batches * one.ranks * one.batch
    assert 0 <= twice < other.step_samples


def arguments(**other):
    return types.SimpleNamespace(**{"seed": 1, "data_seed": None, **other})


@pytest.mark.parametrize(
    ("now", "args", "key", "words"),
    [
        (Shape(2, 4, 1, 24), arguments(), None, ""),
        (Shape(2, 4, 1, 32), arguments(), "length", "have 32 samples, and had 24"),
        (Shape(2, 4, 1, 24), arguments(seed=2), "seed", "and were [1, None]"),
        (Shape(1, 4, 1, 24), arguments(), "ranks", "a step has 4 samples in place of 8"),
        (Shape(1, 4, 1, 24), arguments(), "ranks", "gradient_accumulation_steps=2"),
        (Shape(2, 4, 2, 24), arguments(), "ranks", "8 samples of epoch 3 are trained twice"),
        (Shape(2, 2, 2, 24), arguments(), "batch", "with other dropout"),
        (Shape(1, 8, 1, 24), arguments(group_by_length=True), "ranks", "the order of group_by_length depends on that"),
    ],
)
def test_what_is_other_than_at_the_save_is_said(now, args, key, words, monkeypatch):
    """With what it means for the samples and the schedule, and the cure; what is as it was is not."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    say_changes(Shape(2, 4, 1, 24), now, {"epoch": 3, "batches": 3, "seeds": [1, None]}, args)
    assert [limit.key for limit in resume_limits.limits()] == ([key] if key else [])
    assert all(words in limit.words(at_resume=True) for limit in resume_limits.limits())


def test_what_was_kept_is_read_again_and_what_is_damaged_is_not(tmp_path):
    """A file of another format is none."""
    kept.write(tmp_path, 1, {"batches": 3, "shape": {"ranks": 2, "batch": 4, "accumulation": 1, "length": None}})
    found = kept.read(tmp_path, 1)
    assert found["batches"] == 3
    assert kept.shape_of(found["shape"]) == Shape(2, 4, 1, None)
    assert kept.shape_of({"ranks": 2}) is None
    assert kept.read(tmp_path, 0) is None
    kept.file_of(tmp_path, 0).write_text("{")
    assert kept.read(tmp_path, 0) is None


# -- callbacks


class Counts:
    """A callback whose second argument changes."""

    def __init__(self, name, last=0):
        self.name, self.last, self.sums = name, last, []

    def state(self):
        return {"args": {"name": self.name, "last": self.last}, "attributes": {"sums": self.sums}}


def test_two_callbacks_of_one_class_have_their_own_states():
    """An argument that a callback changes is part of its state; one that the user has changed is not."""
    before = [Counts("a"), Counts("b")]
    made_with = {id(one): kept.args_of(one) for one in before}
    for number, one in enumerate(before):
        one.last, one.sums = 7 + number, [number]
    saved = json.loads(json.dumps(kept.take_states(before, made_with)))
    after = [Counts("a"), Counts("c")]
    assert put_back(after, states_of({"callbacks": saved}, None)) == []
    assert [(one.name, one.last, one.sums) for one in after] == [("a", 7, [0]), ("c", 8, [1])]


def test_a_trainers_own_list_has_the_newest_states_last():
    """It begins with those of the start, and each save adds one for each callback."""
    lists = [{"args": {}, "attributes": {"sums": [number]}} for number in range(6)]
    after = [Counts("a"), Counts("b")]
    trainers_own = {"Counts": lists, "TrainerControl": {"args": {"should_training_stop": True}, "attributes": {}}}
    assert put_back(after, states_of(None, trainers_own)) == []
    assert [one.sums for one in after] == [[4], [5]]


def test_what_cannot_be_put_back_is_said():
    """Another number of callbacks, or an argument that is no attribute."""
    states = [CallbackState("Counts", {}, {"sums": [1]}), CallbackState("Gone", {}, {})]
    after = [Counts("a"), Counts("b")]
    assert put_back(after, states) == [
        "Counts: the checkpoint has 1, the trainer 2",
        "Gone: the checkpoint has 1, the trainer 0",
    ]
    assert after[0].sums == []
    [said] = put_back([Counts("a")], [CallbackState("Counts", {"other": 3}, {"sums": [1]}, ("other",))])
    assert "no attribute 'other'" in said


@pytest.mark.parametrize(
    ("chosen", "restores", "asked", "sums", "limits"),
    [
        (True, True, False, [1], []),
        (True, False, False, [], []),  # the user has said so
        (False, True, False, [], ["callbacks"]),
        (False, True, True, ["trainer"], []),
    ],
)
def test_who_gives_callbacks_their_states_back(chosen, restores, asked, sums, limits, monkeypatch):
    """The SDK for a checkpoint of its choice, unless the user opts out; the trainer, if it is asked, for another."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())

    class Own(Counts, type("ExportableState", (), {})):
        """One whose state a trainer saves."""

    own = Own("a")
    trainer = types.SimpleNamespace(
        callback_handler=types.SimpleNamespace(callbacks=[own]),
        args=types.SimpleNamespace(restore_callback_states_from_checkpoint=asked),
        state=types.SimpleNamespace(stateful_callbacks={"Own": {"args": {"name": "a"}, "attributes": {"sums": [1]}}}),
    )
    resumption = Resumption(trainer, None, is_chosen=chosen, restores_callbacks=restores, ignored_keys=None)
    resumption._load_callbacks(lambda: own.sums.append("trainer") if asked else None)
    assert own.sums == sums
    assert [limit.key for limit in resume_limits.limits()] == limits


# -- time


@pytest.mark.parametrize(
    ("last_s", "left_s", "answer"),
    [
        (None, None, True),  # nobody ends it
        (None, 1000.0, False),  # how long it takes is not known
        (10.0, 20.0, True),
        (10.0, 14.0, False),  # it may take a little longer than the last one, and the save comes behind it
    ],
)
def test_whether_an_evaluation_fits(last_s, left_s, answer):
    """Before the save."""
    assert has_time(last_s, 2.0, left_s) is answer


def test_an_average_of_weights_that_a_callback_holds_is_seen_to_change():
    """It is a module; the model that the trainer saves, and a teacher that stays as it is, are none of that."""

    class Holds:
        def __init__(self, module):
            self.module = module

    model = torch.nn.Linear(2, 2)
    average, teacher = torch.optim.swa_utils.AveragedModel(model), torch.nn.Linear(2, 2)
    callbacks = [Holds(average), Holds(model), Holds(teacher), Holds([model.weight])]
    before = kept.fingerprints(callbacks, model)
    with torch.no_grad():
        model.weight.add_(1)
    average.update_parameters(model)
    assert kept.changed_plain(callbacks, before, model) == ["Holds.module"]


def test_why_batches_are_read_again():
    """Workers are named where there are some."""
    data = torch.utils.data.TensorDataset(torch.zeros(4))
    here, workers = torch.utils.data.DataLoader(data), torch.utils.data.DataLoader(data, num_workers=1)
    assert why_again(here) == "reading them draws random numbers"
    assert why_again(workers) == "its workers draw random numbers"


def test_a_module_that_is_changed_by_way_of_its_data_is_seen_to_change():
    """As averages of weights are: that leaves the version of a tensor as it was."""
    callback = types.SimpleNamespace(model=torch.nn.Linear(2, 2), center=torch.zeros(2))
    before = kept.fingerprints([callback])
    for one in (*callback.model.parameters(), callback.center):
        one.data.mul_(0.5).add_(1)
    assert kept.changed_plain([callback], before) == ["SimpleNamespace.model", "SimpleNamespace.center"]


def test_all_attributes_that_change_are_said(monkeypatch):
    """Of a trainer of the user's own, also a counter and lists in a dict; of a callback."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    own = types.SimpleNamespace(step=0, metrics=collections.defaultdict(list), same=1)
    before = kept.fingerprints([own])
    own.step += 1
    own.metrics["loss"].append(0.5)
    changed = kept.changed_plain([own], before)
    assert changed == ["SimpleNamespace.step", "SimpleNamespace.metrics"]
    say_plain([*changed, "Note.seen"], "SimpleNamespace")
    first, second = resume_limits.limits()
    assert first.thing == "the attributes step, metrics of SimpleNamespace"
    assert second.thing == "the state of callback Note"
    assert "its attribute seen, and no checkpoint has that" in second.means


class Answers(dict):
    """Has each attribute that it is asked for, as some configurations do."""

    def __getattr__(self, name):
        return Answers()


class Raises(list):
    """Cannot be read."""

    def __iter__(self):
        raise RuntimeError("not now")


@pytest.mark.parametrize("cyclic", [True, False])
def test_attributes_of_any_kind_are_looked_at_without_harm(cyclic):
    """Each epoch and save looks at those of the user's own classes: nothing of theirs may end the training."""
    node = {"children": []}
    node["children"].append(node if cyclic else {"children": [[[[1]]]]})
    callback = types.SimpleNamespace(a=node, b=Answers(x=1), c=Raises([1]), d={1, 2}, e=[*range(10**6)])
    before = kept.fingerprints([callback])
    callback.e.append(1)
    assert kept.changed_plain([callback], before) == ["SimpleNamespace.e"]
