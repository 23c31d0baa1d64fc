"""`adapters.megatron.attach` in one process, on what it knows of Megatron: names, and the order of its calls."""

from __future__ import annotations

import collections
import contextlib
import copy
import pickle
import types

import pytest
import torch

from resilience_sdk.adapters import megatron
from resilience_sdk.adapters._base import StepBeat
from resilience_sdk.adapters.megatron import attached, checkpoints
from resilience_sdk.adapters.megatron.attached import meaning_of
from resilience_sdk.adapters.megatron.step import SharedSection
from resilience_sdk.errors import CheckpointError, ConfigError

from .plain_loop import counts


class Timer:
    """A timer as Megatron's, which notes what it is told."""

    def __init__(self, name, told):
        self.name, self.told = name, told

    def start(self, barrier=False):
        self.told.append((self.name, "start", barrier))

    def stop(self, barrier=False):
        self.told.append((self.name, "stop", barrier))

    def elapsed(self, reset=True, barrier=False):
        return 1.5


class Timers:
    """Timers as Megatron's."""

    def __init__(self):
        self.told = []

    def __call__(self, name, log_level=None):
        return Timer(name, self.told)

    def log(self, names):
        return names


class Optimizer:
    """An optimizer as Megatron's, whose step tells whether it was made."""

    def step(self):
        return True, 1.0, None


@pytest.fixture
def config():
    return types.SimpleNamespace(timers=Timers())


@pytest.fixture
def optimizer():
    return Optimizer()


@contextlib.contextmanager
def timed(config, name):
    """Time something as Megatron does: not where there are no timers, and what raises leaves its timer on."""
    if config.timers is not None:
        config.timers(name, log_level=1).start(barrier=False)
    yield  # no `finally`, on purpose
    if config.timers is not None:
        config.timers(name).stop()


def forward_backward(config, micro_batches=2, forward=lambda: None):
    """Call the timers as Megatron's schedule does."""
    with timed(config, "forward-backward"):
        for _ in range(micro_batches):
            with timed(config, "forward-compute"):
                with timed(config, "batch-generator"):
                    pass
                forward()
            with timed(config, "backward-compute"):
                pass
        with timed(config, "all-grads-sync"):
            pass


# -- steps and sections


def test_a_loop_has_beats_and_sections_by_its_timers(recording, config, optimizer):
    """A beat per step, a forward, a backward and a batch per micro-batch."""
    handle = megatron.attach(config, optimizer, first_step=40)
    for _ in range(3):
        forward_backward(config)
        assert recording.stack() == ["step"]
        assert optimizer.step() == (True, 1.0, None)
        assert recording.stack() == []
    assert handle.step == 43
    assert (recording.lane().step, recording.lane().step_is_global) == (42, True)
    assert counts(recording) == {"step": 3, "fwd": 6, "bwd": 6, "data": 6, "optim": 3, "comm_wait": 3}


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_step_that_is_timed_is_one_step(recording, config, optimizer, is_watched):
    """A loop that times its step with `optimizer`, as Megatron-LM does, is not counted twice, and needs no more."""
    handle = megatron.attach(config, optimizer if is_watched else None)
    forward_backward(config)
    with timed(config, "optimizer"):
        optimizer.step()
    assert handle.step == counts(recording)["optim"] == recording.snapshot().beats == 1


def test_the_wait_for_a_batch_is_no_part_of_the_forward(recording, config, optimizer):
    """Megatron fetches it inside: a rank with slow storage would look slow in its model too."""
    megatron.attach(config, optimizer)
    with timed(config, "forward-compute"):
        with timed(config, "batch-generator"):
            assert recording.stack() == ["step", "data"]
        assert recording.stack() == ["step", "fwd"]
    assert counts(recording) == {"fwd": 1, "data": 1}


def test_megatrons_own_timers_hear_all_they_did_before(config, optimizer):
    """Barriers, values and the rest of their methods."""
    plain = config.timers
    megatron.attach(config, optimizer)
    for name in ("save-checkpoint", "interval-time"):
        config.timers(name, log_level=0).start(barrier=True)
        config.timers(name).stop(barrier=True)
        assert plain.told[-2:] == [(name, "start", True), (name, "stop", True)]
    assert config.timers("save-checkpoint").elapsed() == 1.5
    assert config.timers.log(["a"]) == ["a"]


def test_a_loop_without_timers_is_timed_as_well(recording, optimizer):
    """Megatron asks for them where there are some, so now there are."""
    config = types.SimpleNamespace(timers=None)
    handle = megatron.attach(config, optimizer)
    forward_backward(config)
    optimizer.step()
    assert counts(recording)["fwd"] == 2
    handle.detach()
    assert config.timers is None


def test_an_evaluation_is_no_step_nor_is_what_waits_between_two(recording, config, optimizer):
    """The former has no gradients, and no optimizer would end it; parameters are gathered behind the optimizer."""
    megatron.attach(config, optimizer)
    with torch.no_grad():
        forward_backward(config)
    assert recording.stack() == []
    assert counts(recording) == {}
    optimizer.step()
    with timed(config, "params-all-gather"):
        assert recording.stack() == []


def test_a_watched_forward_step_is_a_section_without_timers(recording, config, optimizer):
    """And where the timers are, it is not counted twice."""
    handle = megatron.attach(config, optimizer)
    forward_step = handle.watch(lambda: None)
    forward_backward(types.SimpleNamespace(timers=None), forward=forward_step)
    forward_backward(config, forward=forward_step)
    assert counts(recording)["fwd"] == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_the_configuration_has_megatrons_own_timers(config, optimizer, copied):
    """Megatron copies configurations for parts of a model, and sends them to processes that save."""
    plain = config.timers
    megatron.attach(config, optimizer)
    assert type(copied(config).timers) is type(plain)
    assert type(config.timers) is not type(plain)


# -- when it goes wrong


def test_a_forward_that_raises_leaves_nothing_open(recording, config, optimizer):
    """Its exception passes, the step does not count, and the next one is whole."""
    handle = megatron.attach(config, optimizer)
    with pytest.raises(ZeroDivisionError):
        forward_backward(config, forward=handle.watch(lambda: 1 / 0))
    assert recording.stack() == []
    forward_backward(config)
    optimizer.step()
    found = counts(recording)
    assert (found["step"], found["fwd"], handle.step) == (1, 2, 1)


def test_a_step_that_raises_leaves_nothing_open(recording, config, optimizer):
    """It is no step."""
    optimizer.step = lambda: 1 / 0
    handle = megatron.attach(config, optimizer)
    forward_backward(config)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert (recording.stack(), handle.step) == ([], 0)


@pytest.mark.parametrize("timer", ["forward-compute", "optimizer"])
def test_what_an_exception_left_open_is_closed_by_the_next_step(recording, config, optimizer, timer):
    """Also where the loop catches it and goes on."""
    handle = megatron.attach(config, optimizer)
    config.timers(timer, log_level=2).start()
    forward_backward(config)
    optimizer.step()
    assert recording.stack() == []
    assert (counts(recording)["fwd"], handle.step) == (2, 1)


def test_a_hook_that_fails_is_said_and_the_loop_still_counts(recording, config, optimizer, capsys):
    """What a loop ends by goes on being right."""

    class Broken(StepBeat):
        def begin(self, step=None):
            raise OSError("no space")

    handle = megatron.attach(config, optimizer)
    handle.step_under_way.beat = Broken()
    for _ in range(2):
        forward_backward(config)
        optimizer.step()
    assert handle.step == 2
    assert capsys.readouterr().err.count("a hook failed") == 1


def test_steps_that_never_end_are_said(config, capsys):
    """Nobody tells where the optimizer steps."""
    megatron.attach(config)
    for _ in range(5):
        forward_backward(config)
    assert capsys.readouterr().err.count("no step of an optimizer was seen") == 1


# -- the stop, the end, and wrong use


def test_the_stop_is_asked_with_the_number_of_the_step(config, optimizer, asked):
    """Once per step, after it."""
    asked.add(12)
    handle = megatron.attach(config, optimizer, first_step=10)
    answers = []
    for _ in range(2):
        optimizer.step()
        answers.append(handle.should_stop())
    assert (asked.checks, answers) == ([11, 12], [False, True])
    handle.detach()
    assert handle.should_stop() is False


def test_detached_everything_is_as_it_was(recording, config, optimizer):
    """In the middle of a step, and twice."""
    plain = config.timers
    with megatron.attach(config, optimizer) as handle:
        config.timers("forward-compute", log_level=2).start()
    handle.detach()
    assert config.timers is plain
    assert vars(optimizer) == {}
    assert recording.stack() == []
    assert recording.snapshot().done


CONFIG = types.SimpleNamespace(timers=None)


@pytest.mark.parametrize(
    ("args", "first_step", "cure"),
    [
        ((object(),), None, "field `timers`"),
        ((CONFIG, torch.nn.Linear(1, 1)), None, "get_megatron_optimizer"),
        *(((CONFIG,), first_step, "first_step") for first_step in (-1, 1.0, True, "3")),
    ],
)
def test_what_cannot_be_watched_is_an_error(args, first_step, cure):
    """It names what was given, and what to give."""
    with pytest.raises(ConfigError, match=cure):
        megatron.attach(*args, first_step=first_step)


def test_attaching_twice_is_an_error(config, optimizer):
    """Until the first is detached; where the first has failed, as on a frozen configuration, nothing is attached."""
    frozen = collections.namedtuple("Frozen", "timers")(config.timers)
    with pytest.raises(AttributeError):
        megatron.attach(frozen, optimizer)
    handle = megatron.attach(config, optimizer)
    with pytest.raises(ConfigError, match=r"call detach\(\)"):
        megatron.attach(config, optimizer)
    handle.detach()
    megatron.attach(config, optimizer)


# -- the parts


def test_nested_begins_are_one_pass(recording):
    """The outermost pair counts; an end without a begin does nothing."""
    span = SharedSection("fwd")
    for change, depth in ((span.end, 0), (span.begin, 1), (span.begin, 2), (span.end, 1), (span.end, 0), (span.end, 0)):
        change()
        assert span.depth == depth
    assert counts(recording) == {"fwd": 1}


def test_a_stage_is_a_role(monkeypatch):
    """Where there are several; tensor parallelism is told what it hides."""
    roles = []
    monkeypatch.setattr(attached, "set_role", roles.append)
    for stages in (4, 1):
        state = types.SimpleNamespace(
            model_parallel_is_initialized=lambda: True,
            get_pipeline_model_parallel_world_size=lambda stages=stages: stages,
            get_pipeline_model_parallel_rank=lambda: 2,
            get_tensor_model_parallel_world_size=lambda: 1,
        )
        monkeypatch.setitem(attached.sys.modules, "megatron.core.parallel_state", state)
        attached.declare()
    assert roles == ["stage-2"]


@pytest.mark.parametrize(
    ("code", "says"),
    [(16, "on other nodes"), (17, "failed its validation"), *((code, None) for code in (0, 1, 75, None, "16", [16]))],
)
def test_the_codes_of_the_rerun_machine_have_a_meaning(code, says):
    """With the device that it suspects. Other codes are not Megatron's."""
    found = meaning_of(code, "node n7, GPU 3")
    assert (found is None) is (says is None)
    assert says is None or (says in str(found) and "n7, GPU 3" in str(found))


def test_no_rank_begins_a_save_that_another_one_cannot(tmp_path, monkeypatch):
    """It is collective, so the others would wait in it."""
    ranks = types.SimpleNamespace(rank=0, size=2, gather=lambda mine: [mine, ["no space", None]])
    monkeypatch.setattr(checkpoints, "find_ranks", lambda: ranks)
    monkeypatch.setattr(checkpoints, "_framework", lambda: pytest.fail("it saves"))
    saver = megatron.checkpointer(lambda _is_loading: {}, lambda _state: None, run_dir=tmp_path)
    with pytest.raises(CheckpointError, match="rank 1: no space"):
        saver._write(tmp_path)
