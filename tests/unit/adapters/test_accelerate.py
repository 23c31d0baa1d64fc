"""The handle of an attached accelerator, with the real Accelerate: what it refuses, saves, meets and leaves behind."""

from __future__ import annotations

import types
from contextlib import contextmanager

import pytest
import torch
from adapter_frameworks import require
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from resilience_sdk import straggler
from resilience_sdk.adapters import _saving
from resilience_sdk.adapters.accelerate import attached, tracker
from resilience_sdk.adapters.accelerate.attached import connect, find_prepared, plain
from resilience_sdk.adapters.accelerate.position import Position
from resilience_sdk.core import resume_limits
from resilience_sdk.core.journal import Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import load_settings
from resilience_sdk.errors import ConfigError
from resilience_sdk.straggler.reports import Report


@pytest.fixture
def accelerator():
    """A real one on a CPU, which has prepared a small training."""
    require("accelerate")
    from accelerate import Accelerator

    made = Accelerator(cpu=True)
    net = nn.Linear(1, 1)
    made.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
    )
    yield made
    made.free_memory()
    made.state._reset_state()
    made.gradient_state._reset_state()


def attach(accelerator, session=None, **options):
    found = find_prepared(accelerator, env={})
    return attached.Attached(accelerator, found, session, **{"saves": False, "resumes": False, **options})


@pytest.mark.parametrize("step", ["_numbers_of_batches", "connect", "listening"])
def test_an_attach_that_fails_half_way_leaves_nothing(accelerator, recording, monkeypatch, step):
    """Accelerator, optimizer, model and loader are as they were, and it may be repeated."""
    found = find_prepared(accelerator, env={})
    session = types.SimpleNamespace(may_resume=False, journal=None, settings=SETTINGS)
    own, kind = dict(vars(accelerator)), type(found.loader)
    with monkeypatch.context() as patch:
        patch.setattr(attached, step, types.SimpleNamespace(begin=lambda _: 1 / 0) if step == "listening" else zero)
        if step == "_numbers_of_batches":
            patch.setattr(type(accelerator), "num_processes", 2)
        with pytest.raises(ZeroDivisionError):
            attach(accelerator, session)
    assert vars(accelerator) == own
    assert type(found.loader) is kind
    hooks = (found.model._forward_pre_hooks, found.model._forward_hooks)
    hooks += (found.optimizer._optimizer_step_pre_hooks, found.optimizer._optimizer_step_post_hooks)
    assert [dict(each) for each in hooks] == [{}] * 4
    attach(accelerator, session).detach()


SETTINGS = load_settings(arguments={"checkpoint_every": 50, "resume_check": "off"}, env={}, strict_env=False)


def zero(*_):
    return 1 / 0


# -- what is saved


@pytest.fixture
def handle(accelerator, tmp_path, recording):
    """An attach in a new run directory that has no name, and saves every 50 steps; it has not ended."""
    run_dir = RunDirectory.create(tmp_path / "run")
    session = types.SimpleNamespace(
        may_resume=False,
        run_dir=run_dir,
        settings=SETTINGS,
        journal=Journal(run_dir.journal, writer="rank0", host="h", boot_id="b", job="j", attempt=0),
    )
    handle = attach(accelerator, session, saves=True, resumes=True)
    handle.saved = lambda: sorted(int(path.name.split("-")[1]) for path in run_dir.checkpoints.glob("step-*"))
    yield handle
    handle.detach()


def test_a_first_pass_whose_end_is_the_first_question_is_saved(handle):
    """Nothing was resumed, and inside of a joined pass nothing is asked."""
    with handle.apart():
        handle.step = 137
    handle.meet(137)
    assert handle.saved() == [137]


@pytest.mark.parametrize(
    ("own", "other", "saved"), [(7, 7, [7]), (0, 0, []), (0, 7, []), (7, 5, [])], ids=["all", "none", "one", "apart"]
)
def test_the_end_is_saved_where_all_ranks_have_come_to_it(handle, monkeypatch, capsys, own, other, saved):
    """One that has loaded an older state alone is elsewhere: what would be saved then is said, and not taken for it."""
    ended = []
    ranks = types.SimpleNamespace(rank=0, gather=lambda mine: [mine, other])
    monkeypatch.setattr(_saving, "find_ranks", lambda: ranks)
    monkeypatch.setattr(_saving, "finish", lambda *_, is_complete: ended.append(is_complete))
    handle.step = own
    handle.finish()
    assert (handle.saved(), ended) == (saved, [own == other])
    assert ("NOT SAVED" in capsys.readouterr().err) is (own != other)


# -- ranks with different numbers of batches


class Uneven:
    """A training on the first of two ranks, which may have other numbers of batches; `gather` is what both tell."""

    def __init__(self, accelerator, monkeypatch, recording):
        self.accelerator, self.recording, self.waiting = accelerator, recording, []
        self.gather = lambda mine: [mine, 3]
        monkeypatch.setattr(type(accelerator), "num_processes", 2)
        monkeypatch.setattr(type(accelerator), "join_uneven_inputs", self.join)
        monkeypatch.setattr(attached, "find_ranks", lambda: self)
        self.found = find_prepared(accelerator, env={})
        self.handle = attach(accelerator)

    @contextmanager
    def join(self, *_args, **_options):
        yield
        self.waiting.append(self.recording.snapshot())

    def forward(self):
        self.found.model(torch.ones(1)).sum().backward()

    def take_step(self):
        self.forward()
        self.found.optimizer.step()


@pytest.fixture
def uneven(accelerator, monkeypatch, recording):
    made = Uneven(accelerator, monkeypatch, recording)
    yield made
    made.handle.detach()


@pytest.mark.parametrize("left_over", [0, 1])
def test_the_wait_for_the_other_ranks_is_long_and_has_an_end(uneven, left_over):
    """In a pause nobody would find that one hangs; nor is it a step's, when micro-batches are left that make none."""
    with uneven.accelerator.join_uneven_inputs("model"):
        uneven.take_step()
        for _ in range(left_over):
            uneven.forward()
    [snapshot] = uneven.waiting
    [waiting] = snapshot.main_lane.stack
    assert (waiting.name, waiting.kind, waiting.timeout_s) == ("join_wait", "comm", 7200.0)
    assert snapshot.paused is None
    assert not uneven.recording.snapshot().main_lane.stack
    assert uneven.handle.step == 3  # of the rank that took most


def test_an_exception_meets_nobody(uneven, asked):
    """The other ranks may be elsewhere."""
    uneven.gather = lambda _: pytest.fail("it meets the others")
    with pytest.raises(ZeroDivisionError), uneven.accelerator.join_uneven_inputs("model"):
        raise ZeroDivisionError
    uneven.take_step()
    assert asked.checks == [1]


@pytest.mark.parametrize(("batches", "is_said"), [([2], False), ([2, 3], True)])
def test_a_pass_that_will_not_end_is_said(uneven, capsys, batches, is_said):
    """Unless the ranks are joined in it; an unknown number says nothing."""
    assert uneven.handle._batches == [2, 3]
    uneven.handle._batches = batches
    with uneven.accelerator.join_uneven_inputs("model"):
        uneven.handle.walk(iter([]))
    assert not capsys.readouterr().err
    uneven.handle.walk(iter([]))
    assert ("different numbers of batches ([2, 3])" in capsys.readouterr().err) is is_said


# -- wrong use


class Fake:
    """What the adapter looks for in an accelerator."""

    project_configuration = state = save_state = load_state = None

    def __init__(self, models=(), optimizers=(), loaders=(), kind="NO"):
        self._models, self._optimizers, self._dataloaders = list(models), list(optimizers), list(loaders)
        self.distributed_type = kind


def model(weight):
    return types.SimpleNamespace(parameters=lambda: iter([weight]))


def optimizer(weight):
    return types.SimpleNamespace(param_groups=[{"params": [weight]}])


FIRST, SECOND = object(), object()
ONE = Fake([model(FIRST)], [optimizer(FIRST)], [[1]])
OLD = Fake()
del OLD._dataloaders


@pytest.mark.parametrize(
    ("accelerator", "options", "cure"),
    [
        (3, {}, r"attach\(int\): expected the accelerate.Accelerator"),
        (Fake(), {}, "no model with an optimizer yet; call attach behind"),
        (OLD, {}, r"has no Accelerator._dataloaders; pip install|expected the accelerate.Accelerator"),
        (Fake(kind="DEEPSPEED"), {}, "DEEPSPEED is not covered.*adapters.deepspeed.attach"),
        (Fake(kind="MEGATRON_LM"), {}, "MEGATRON_LM is not covered.*heartbeat"),
        (Fake(kind="XLA"), {}, "XLA is not covered.*heartbeat"),
        (ONE, {"env": {"ACCELERATE_USE_FSDP": "true"}}, r"FSDP is asked for .* NO is in effect"),
        (Fake([model(FIRST)], [optimizer(FIRST), optimizer(SECOND)]), {}, "2 optimizers; name the one"),
        (ONE, {"loader": [1, 2]}, "has returned"),
    ],
)
def test_what_cannot_be_watched_is_refused(accelerator, options, cure):
    """It names what it was given, and the cure."""
    with pytest.raises(ConfigError, match=cure):
        find_prepared(accelerator, **{"env": {}, **options})


def test_the_model_is_the_one_that_is_trained():
    """Not the first one, which may be a teacher; the loader is the first. Several optimizers are named."""
    teacher, student, other = model(FIRST), model(SECOND), optimizer(FIRST)
    found = find_prepared(Fake([teacher, student], [optimizer(SECOND)], ["train", "eval"], "FSDP"), env={})
    assert (found.model, found.loader) == (student, "train")
    both = Fake([teacher, student], [optimizer(SECOND), other], kind="FSDP")
    assert find_prepared(both, optimizer=other, env={"ACCELERATE_USE_FSDP": "true"}).model is teacher


# -- what is journalled


def test_numbers_and_texts_are_journalled():
    """A tensor would have to wait for its device, a picture has no place in a journal."""
    assert plain({"loss": 0.5, "step": 1, "run": "a", "image": object()}) == {"loss": 0.5, "step": 1, "run": "a"}


class Heard:
    """A tracker of somebody else's, a journal, and whatever else keeps what it is told."""

    def __init__(self):
        self.told = []

    def log(self, values, step=None):
        self.told.append((values, step))

    def emit(self, event, **facts):
        self.told.append((event.value, facts))


@pytest.fixture
def tracking():
    """A tracker of ours, connected as `attach` connects it; `tracking.other`, `tracking.journal`."""
    require("accelerate")
    found = tracker()
    found.other, found.journal = Heard(), Heard()
    session = types.SimpleNamespace(journal=found.journal)
    connect(types.SimpleNamespace(log_with=["tensorboard", found], trackers=(found, found.other)), session)
    return found


def test_a_new_report_goes_to_the_other_trackers(tracking, monkeypatch):
    """Once, with the step of the call that brought it, and not to our own."""
    report = Report(nodes={0: "a", 1: "a"}, section_relative={"fwd": {0: 1.0, 1: 0.5}})
    monkeypatch.setattr(straggler, "report", lambda: report)
    monkeypatch.setattr("resilience_sdk.adapters.accelerate.attached.PERIOD_S", 0.0)
    for step in (7, 8):
        tracking.log({"loss": 0.5}, step=step)
    [(scores, step)] = tracking.other.told
    assert step == 7
    assert min(scores.values()) == 0.5
    assert all(name.startswith("stragglers/") for name in scores)
    assert len(tracking.journal.told) == 2


def test_it_journals_once_a_second_at_most_and_while_it_is_connected(tracking):
    """Whatever a loop logs at each step; with the SDK switched off it is never connected."""
    for step in range(100):
        tracking.log({"loss": 0.5}, step=step)
    tracking.finish()
    tracking._next_s = 0.0
    tracking.log({"loss": 0.5})
    assert tracking.journal.told == [("metrics", {"step": 0, "what": "log", "values": {"loss": 0.5}})]
    alone = tracker()
    alone.store_init_configuration({"lr": 0.1})
    alone.log({"loss": 0.5})
    assert alone.tracker is None


@pytest.fixture
def noted(monkeypatch):
    """Return the keys of the limits of a resume that this test has noted."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    return lambda: [limit.key for limit in resume_limits.limits()]


class Rows(IterableDataset):
    """A stream."""

    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("draws", "data", "is_said"), [(True, Rows(), True), (False, Rows(), False), (True, range(4), False)]
)
def test_what_reading_a_batch_of_a_stream_draws_here_is_said(draws, data, is_said, noted):
    """Those of the batch that was read ahead of a save were drawn then. By indices it is read with those again."""
    position = Position(DataLoader(data), 1)
    read = (number + (torch.rand(()).item() if draws else 0) for number in range(4))
    assert len(list(position.walk(read))) == position.total == 4
    assert noted() == (["accelerate draws"] if is_said else [])


@pytest.mark.parametrize(
    ("ranks", "samples", "batch", "limits"),
    [
        (2, 24, 4, []),
        (1, 24, 4, ["accelerate batch"]),
        (2, 24, 2, ["accelerate batch"]),
        (2, 32, 4, ["accelerate length"]),
    ],
)
def test_what_is_other_than_at_the_save_is_said(ranks, samples, batch, limits, noted):
    """A schedule by the step is another one then, and the rest of the epoch has other samples."""
    saved = Position(DataLoader(range(24), batch_size=4), 2)
    saved.samples = 8
    Position(DataLoader(range(samples), batch_size=batch), ranks).resume(saved.state())
    assert noted() == limits
    words = "".join(limit.words() for limit in resume_limits.limits())
    assert ("2 ranks with 1 rank" in words) is (ranks != 2)
    assert ("a batch of 8 samples with one of 4:" in words) is (batch != 4)


def test_another_accumulation_is_said(handle, noted):
    """A step has other samples then. What an older version has saved does not say."""
    for saved in ({}, {"accumulation": 1}):
        handle._go_on_in_data(saved)
    assert noted() == []
    handle._go_on_in_data({"accumulation": 4})
    assert noted() == ["accelerate accumulation"]
