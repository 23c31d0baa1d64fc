"""`adapters.megatron.attach` in one process, on what it knows of Megatron: names, and the order of its calls."""

from __future__ import annotations

import collections
import copy
import pickle
import types

import pytest
import torch

from resilience_sdk import preemption
from resilience_sdk.adapters import megatron
from resilience_sdk.adapters._base import StepBeat
from resilience_sdk.adapters.megatron import attached, saving, surroundings
from resilience_sdk.adapters.megatron.exits import meaning_of
from resilience_sdk.adapters.megatron.step import Span
from resilience_sdk.errors import CheckpointError, ConfigError


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


@pytest.fixture(autouse=True)
def detached():
    """No test leaves its loop attached."""
    yield
    if attached._current is not None:
        attached._current.detach()


def forward_backward(config, micro_batches=2, forward=lambda: None):
    """Call the timers as Megatron's schedule does."""
    timers = config.timers
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=False)
    for _ in range(micro_batches):
        if timers is None:
            forward()
            continue
        timers("forward-compute", log_level=2).start()
        timers("batch-generator", log_level=2).start()
        timers("batch-generator").stop()
        forward()
        timers("forward-compute").stop()
        timers("backward-compute", log_level=2).start()
        timers("backward-compute").stop()
    if timers is not None:
        timers("all-grads-sync", log_level=1).start(barrier=False)
        timers("all-grads-sync").stop()
        timers("forward-backward").stop()


def counts(recording):
    return {name: len(samples) for name, samples in recording.harvest().items()}


# -- steps and sections


def test_what_cannot_be_attached_leaves_nothing_attached(config, optimizer):
    """A configuration that is frozen, for one: the next try must not hear that there is a loop already."""
    frozen = collections.namedtuple("Frozen", "timers")(config.timers)
    with pytest.raises(AttributeError):
        megatron.attach(frozen, optimizer)
    megatron.attach(config, optimizer)


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


def test_a_timed_step_of_a_watched_optimizer_is_one_step(recording, config, optimizer):
    """A loop that times its step with `optimizer`, as Megatron-LM does, is not counted twice."""
    handle = megatron.attach(config, optimizer)
    forward_backward(config)
    config.timers("optimizer", log_level=1).start(barrier=False)
    optimizer.step()
    config.timers("optimizer").stop()
    assert handle.step == 1
    assert counts(recording)["optim"] == recording.snapshot().beats == 1


def test_the_timer_alone_ends_a_step(recording, config):
    """Where the optimizer is not at hand."""
    handle = megatron.attach(config)
    forward_backward(config)
    config.timers("optimizer", log_level=1).start(barrier=False)
    config.timers("optimizer").stop()
    assert (handle.step, recording.snapshot().beats) == (1, 1)


def test_the_wait_for_a_batch_is_no_part_of_the_forward(recording, config, optimizer):
    """Megatron fetches it inside: a rank with slow storage would look slow in its model too."""
    megatron.attach(config, optimizer)
    stacks = []
    timers = config.timers
    timers("forward-compute", log_level=2).start()
    timers("batch-generator", log_level=2).start()
    stacks.append(recording.stack())
    timers("batch-generator").stop()
    stacks.append(recording.stack())
    timers("forward-compute").stop()
    assert stacks == [["step", "data"], ["step", "fwd"]]
    assert counts(recording) == {"fwd": 1, "data": 1}


def test_megatrons_own_timers_hear_all_they_did_before(config, optimizer):
    """Barriers, values and the rest of their methods."""
    plain = config.timers
    megatron.attach(config, optimizer)
    config.timers("save-checkpoint", log_level=0).start(barrier=True)
    config.timers("save-checkpoint").stop(barrier=True)
    config.timers("interval-time").start(barrier=True)
    assert plain.told == [
        ("save-checkpoint", "start", True),
        ("save-checkpoint", "stop", True),
        ("interval-time", "start", True),
    ]
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


def test_an_evaluation_is_no_step(recording, config, optimizer):
    """It has no gradients, and no optimizer would end it."""
    megatron.attach(config, optimizer)
    with torch.no_grad():
        forward_backward(config)
    assert recording.stack() == []
    assert counts(recording) == {}


def test_what_waits_between_two_steps_begins_none(recording, config, optimizer):
    """Parameters are gathered behind the optimizer."""
    megatron.attach(config, optimizer)
    optimizer.step()
    config.timers("params-all-gather", log_level=1).start()
    assert recording.stack() == []
    config.timers("params-all-gather").stop()


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

    def fail():
        raise LookupError("no such sample")

    with pytest.raises(LookupError):
        forward_backward(config, forward=handle.watch(fail))
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


def test_what_an_exception_left_open_is_closed_by_the_next_step(recording, config, optimizer):
    """Also where the loop catches it and goes on."""
    megatron.attach(config, optimizer)
    config.timers("forward-compute", log_level=2).start()
    forward_backward(config)
    optimizer.step()
    assert recording.stack() == []
    assert counts(recording)["fwd"] == 2


def test_a_hook_that_fails_is_said_and_the_loop_still_counts(recording, config, optimizer, capsys):
    """What a loop ends by goes on being right."""

    class Broken(StepBeat):
        __slots__ = ()

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


# -- the stop, and the end


def test_the_stop_is_asked_with_the_number_of_the_step(config, optimizer, monkeypatch):
    """Once per step, after it."""
    asked = []
    monkeypatch.setattr(preemption, "check", lambda step: asked.append(step) or step == 12)
    handle = megatron.attach(config, optimizer, first_step=10)
    answers = []
    for _ in range(2):
        optimizer.step()
        answers.append(handle.should_stop())
    assert (asked, answers) == ([11, 12], [False, True])
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


def test_switched_off_only_the_steps_are_counted(config, optimizer, monkeypatch):
    """A loop that ends by them ends."""
    monkeypatch.setenv("RESILIENCE_DISABLE", "1")
    plain = config.timers
    handle = megatron.attach(config, optimizer, first_step=2)
    optimizer.step()
    assert (handle.step, config.timers is plain) == (3, True)


# -- wrong use


@pytest.mark.parametrize(
    ("args", "cure"),
    [
        ((object(),), "field `timers`"),
        ((types.SimpleNamespace(timers=None), torch.nn.Linear(1, 1)), "get_megatron_optimizer"),
    ],
)
def test_what_cannot_be_watched_is_an_error(args, cure):
    """It names what was given, and what to give."""
    with pytest.raises(ConfigError, match=cure):
        megatron.attach(*args)


@pytest.mark.parametrize("first_step", [-1, 1.0, True, "3"])
def test_a_wrong_first_step_is_an_error(config, first_step):
    """It is a number of steps."""
    with pytest.raises(ConfigError, match="first_step"):
        megatron.attach(config, first_step=first_step)


def test_attaching_twice_is_an_error(config, optimizer):
    """Until the first is detached."""
    handle = megatron.attach(config, optimizer)
    with pytest.raises(ConfigError, match=r"call detach\(\)"):
        megatron.attach(config, optimizer)
    handle.detach()
    megatron.attach(config, optimizer)


# -- the parts


def test_nested_begins_are_one_pass(recording):
    """The outermost pair counts; an end without a begin does nothing."""
    span = Span("fwd")
    span.end()
    span.begin()
    span.begin()
    span.end()
    assert span.depth == 1
    span.end()
    span.end()
    assert (span.depth, counts(recording)) == (0, {"fwd": 1})


def test_a_stage_is_a_role(monkeypatch):
    """Where there are several; tensor parallelism is told what it hides."""
    roles = []
    monkeypatch.setattr(surroundings, "set_role", roles.append)
    state = types.SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_pipeline_model_parallel_world_size=lambda: 4,
        get_pipeline_model_parallel_rank=lambda: 2,
        get_tensor_model_parallel_world_size=lambda: 1,
    )
    monkeypatch.setitem(surroundings.sys.modules, "megatron.core.parallel_state", state)
    surroundings.declare()
    state.get_pipeline_model_parallel_world_size = lambda: 1
    surroundings.declare()
    assert roles == ["stage-2"]


@pytest.mark.parametrize(("code", "says"), [(16, "on other nodes"), (17, "failed its validation")])
def test_the_codes_of_the_rerun_machine_have_a_meaning(code, says):
    """With the device that it suspects."""
    assert says in str(meaning_of(code, "node n7, GPU 3"))
    assert "n7, GPU 3" in str(meaning_of(code, "node n7, GPU 3"))


@pytest.mark.parametrize("code", [0, 1, 75, None, "16"])
def test_other_codes_have_none(code):
    """They are not Megatron's."""
    assert meaning_of(code) is None


def test_no_rank_begins_a_save_that_another_one_cannot(tmp_path, monkeypatch):
    """It is collective, so the others would wait in it."""
    ranks = types.SimpleNamespace(rank=0, size=2, gather=lambda mine: [mine, "no space"])
    monkeypatch.setattr(saving, "find_ranks", lambda: ranks)
    monkeypatch.setattr(saving, "_framework", lambda: pytest.fail("it saves"))
    saver = megatron.checkpointer(lambda _is_loading: {}, lambda _state: None, run_dir=tmp_path)
    with pytest.raises(CheckpointError, match="rank 1: no space"):
        saver._write(tmp_path)
