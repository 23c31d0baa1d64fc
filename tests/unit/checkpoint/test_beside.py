"""What a module holds beside its state_dict: said where a training changes it, and not where a program sets it."""

import collections
import copy
import pickle
import statistics
import time

import numpy
import pytest
import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.beside import GRAD, MODE, _saved_of, beside_state, changed, parts_of
from resilience_sdk.core import resume_limits


class Mean:
    """A helper of the program's own."""

    def __init__(self):
        self.mean, self.unit = numpy.zeros(2), "m"


class Model(nn.Module):
    """Holds a thing of each kind; `work` changes one in each forward."""

    def __init__(self, work=lambda _: None):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.drop = nn.Dropout(0.0)
        self.tau, self.count, self.name, self.none = 1.0, 0, "a", None
        self.center, self.seen = torch.zeros(2), torch.zeros(0)
        self.helper, self.replay, self.sums = Mean(), collections.deque([0], 3), collections.defaultdict(list)
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.work = [work]
        self.last = 0.0

    def forward(self, x):
        self.work[0](self)
        found = self.head(self.drop(self.norm(self.body(x))))
        self.last = found.detach().mean().item()  # for whoever logs it: nothing here reads it
        return found


@pytest.fixture
def said(monkeypatch):
    """What is noted, in words."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    return lambda: [limit.words() for limit in resume_limits.limits()]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: setattr(m, "tau", 0.5), "tau"),
        (lambda m: setattr(m, "count", 1), "count"),
        (lambda m: setattr(m, "name", "b"), "name"),
        (lambda m: setattr(m, "center", m.center + 1), "center"),
        (lambda m: m.center.data.add_(1), "center"),
        (lambda m: m.cache.add_(1), "cache"),
        (lambda m: m.helper.mean.__iadd__(1), "helper.mean"),
        (lambda m: m.replay.append(1), "replay"),
        (lambda m: m.sums["loss"].append(0.5), "sums"),
        (lambda m: setattr(m.drop, "p", 0.1), "drop.p"),
        (lambda m: m.body.requires_grad_(False), GRAD),
        (lambda m: m.norm.eval(), MODE),
    ],
)
def test_what_is_in_no_state_dict_is_seen_to_change(change, name):
    """Each kind, and that alone."""
    model = Model()
    before = beside_state(model)
    change(model)
    assert list(changed(before, beside_state(model))) == [name]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.saved.add_(1),  # it is in the state_dict
        lambda m: m.body.weight.data.add_(1),
        lambda m: m(torch.rand(4, 2)),
        lambda m: m.eval(),
        lambda m: setattr(m, "none", 3),  # made by what changes it: as caches are
        lambda m: setattr(m, "seen", torch.rand(4)),
        lambda m: setattr(m, "center", m(torch.rand(4, 2))),  # an activation
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: setattr(m, "optimizer", torch.optim.SGD(m.parameters(), 1.0)),
    ],
)
def test_what_is_saved_or_made_anew_is_none_of_it(change):
    """Nor is the mode of the whole model."""
    model = Model()
    before = beside_state(model)
    change(model)
    assert changed(before, beside_state(model)) == {}


def train(path, work=None, *, steps=6, every=2, setup=None, each=None, values=None):
    """Train as a program does that was started anew."""
    model = Model(work or (lambda _: None))
    checkpointer = Checkpointer({"model": model}, run_dir=path, every=every)
    begin = checkpointer.resume()
    if setup is not None:
        setup(model, begin, checkpointer.values)
    for step in range(begin, begin + steps):
        if each is not None:
            each(model, step)
        model(torch.rand(4, 2)).mean().backward()
        if values is not None:
            checkpointer.values.update(values(model))
        checkpointer.maybe_save(step + 1)
    return model


def average(model):
    model.center = model.center * 0.9 + torch.rand(2)


def run_mean(model):
    model.helper.mean += numpy.random.rand(2)


def unfreeze(model, step, is_exact=True):
    if step == 3 if is_exact else step >= 3:
        model.body.requires_grad_(True)


def unfreeze_more(model, step):
    """Unfreeze one part after the other, each behind a save."""
    if step in (4, 6):
        (model.body.weight if step == 4 else model.body.bias).requires_grad_(True)


def frozen(model, *_):
    model.body.requires_grad_(False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"work": lambda m: setattr(m, "tau", m.tau * 0.9)}, "tau of the module model"),
        ({"work": average}, "center of the module model"),
        ({"work": run_mean}, "helper.mean of the module model"),
        ({"work": lambda m: m.replay.append(m.count)}, "replay of the module model"),
        ({"setup": frozen, "each": unfreeze}, "requires_grad of 2 parameters of model (body.weight, body.bias)"),
        ({"setup": frozen, "each": unfreeze_more, "steps": 9}, "requires_grad of 2 parameters of model (body.weight, "),
        ({"each": lambda m, step: m.norm.eval() if step == 3 else None}, "the mode of norm in model"),
    ],
)
def test_what_is_lost_is_said_at_the_start_and_at_the_resume(tmp_path, said, options, words):
    """With the cure."""
    train(tmp_path, **options)
    [line] = said()
    assert line.startswith(f"a resume will not repeat {words}")
    resume_limits._noted.limits.clear()
    train(tmp_path, **options)
    [line] = said()
    assert words in line


def test_one_save_is_enough_for_the_resume_to_say_it(tmp_path, said):
    """It looks once more behind the first step."""
    options = {"setup": frozen, "each": unfreeze}
    train(tmp_path, steps=5, every=5, **options)
    assert said() == []
    train(tmp_path, steps=1, every=5, **options)
    [line] = said()
    assert "requires_grad of 2 parameters" in line


def toggle(model, step):
    """Freeze a part in the second half of each step, as loops with two models do."""
    model.body.requires_grad_(True)
    model.work[0] = frozen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"setup": frozen},  # at each start, as it was
        {"each": lambda m, step: setattr(m, "tau", 1 / (step + 1))},  # by the step
        {"each": toggle},
        {"each": lambda m, step: m.train(step % 2 == 0)},
        {"setup": lambda m, *_: m.eval()},
    ],
)
def test_what_the_program_sets_again_is_not_said(tmp_path, said, options):
    """Neither at the start nor at the resume."""
    for _ in range(3):
        train(tmp_path, **options)
    assert said() == []


def test_what_the_program_restores_itself_is_not_said_at_the_resume(tmp_path, said):
    """By the step, or from the values, which are looked at before it is said at the start."""

    def restore(model, _, values):
        model.tau = values.get("tau", model.tau)

    options = {"work": lambda m: setattr(m, "tau", m.tau * 0.9), "setup": restore, "values": lambda m: {"tau": m.tau}}
    train(tmp_path / "values", **options)
    train(tmp_path / "values", **options)
    assert said() == []
    by_step = {"setup": frozen, "each": lambda m, step: unfreeze(m, step, is_exact=False)}
    train(tmp_path / "step", **by_step)
    resume_limits._noted.limits.clear()
    train(tmp_path / "step", **by_step)
    assert said() == []


class Bank(nn.Module):
    """A memory that the first forward makes, and each one writes; and a table that is made once, or grows."""

    def __init__(self, work=None):
        super().__init__()
        self.layer, self.at = nn.Linear(2, 1), 0
        self.register_buffer("bank", torch.zeros(3, 0), persistent=False)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if not self.bank.numel():
            self.bank = torch.rand(3, 2)
            self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.bank[self.at % 3] = x[0]
        return self.layer(x)


def test_a_buffer_that_the_first_call_makes_is_seen_to_change(tmp_path, said, monkeypatch):
    """A table that is made once is no state."""
    monkeypatch.setitem(globals(), "Model", Bank)
    train(tmp_path)
    [line] = said()
    assert line.startswith("a resume will not repeat bank of the module model:")
    resume_limits._noted.limits.clear()
    train(tmp_path)
    assert "bank of the module model" in said()[0]


def test_parts_and_parameters_are_those_that_torch_names():
    """In its order, each once, also where one is in two places."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": Model(), "c": nn.ModuleList([shared])})
    model["a"].register_module("none", None)
    model["b"].extra = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).requires_grad_(False)
    assert parts_of(model) == list(model.named_modules())
    known: set[int] = set()
    assert _saved_of(parts_of(model), known) == "".join("01"[one.requires_grad] for one in model.parameters())
    assert {id(one) for one in model.parameters()} <= known
    assert id(model["b"].saved) in known
    assert id(model["b"].cache) not in known


def test_a_look_at_a_thousand_modules_costs_some_milliseconds():
    """Of this thread, in the best of some tries: it is made at saves and at the first call behind one."""
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), Model()) for _ in range(90)))
    spent = []
    for _ in range(20):
        began = time.thread_time()
        beside_state(model)
        spent.append(time.thread_time() - began)
    count = len(list(model.modules()))
    print(f"{count} modules: {min(spent) * 1e3:.1f} ms, median {statistics.median(spent) * 1e3:.1f} ms")
    assert count > 1_000
    assert min(spent) < 0.05


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_encoder_layer_of_torchs_stays_on_its_fast_path(tmp_path, is_alone):
    """It gives other bits where a hook is on it or on a part of it: in an evaluation before the first step."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = layer if is_alone else nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.ModuleList([layer])[0]))
    batch = torch.rand(2, 5, 16)
    model.eval()
    with torch.no_grad():
        before = model(batch)
        Checkpointer({"model": model}, run_dir=tmp_path).resume()
        after = model(batch)
    assert not any(one._forward_pre_hooks for one in layer.modules())
    assert torch.equal(before, after)


def test_what_is_a_buffer_is_told_to_be_a_persistent_one(tmp_path, said):
    """Not to be made a buffer, which it is."""
    train(tmp_path, lambda m: m.cache.add_(1))
    [line] = said()
    assert "; register these buffers with persistent=True, or keep it in the values" in line


def test_a_copy_of_the_module_is_made_as_ever(tmp_path, said):
    """Between the resume and the first call."""
    model = Model()
    model.work = [len]
    checkpointer = Checkpointer({"model": model}, run_dir=tmp_path, every=1)
    checkpointer.resume()
    copied, loaded = copy.deepcopy(model.body), pickle.loads(pickle.dumps(model.body))
    for one in (copied, loaded, torch.compile(model.body, backend="eager", fullgraph=True)):
        assert torch.equal(one(torch.ones(1, 2)), model.body(torch.ones(1, 2)))
