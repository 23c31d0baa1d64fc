"""Time on the GPU beside the wall time of sections, those of a model and those of the user's, on a device of tests."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch
from torch import nn

from resilience_sdk.errors import ConfigError
from resilience_sdk.recorder.page_layout import DEVICE_KINDS
from resilience_sdk.straggler import section, sections
from resilience_sdk.straggler.gpu import gpu_clock
from resilience_sdk.straggler.model_hooks import Guard, Waited
from resilience_sdk.straggler.passes import Engine, ModelPasses, SectionTimer
from resilience_sdk.straggler.windowing import COMPARED, WAITING


@pytest.fixture
def in_use(monkeypatch, clock):
    """This thread's sections find a GPU in use."""
    monkeypatch.setattr(sections, "_clocks", sections._Clocks())
    sections._clocks.clock, sections._clocks.pid = clock, os.getpid()


class OnDevice:
    """The device of a model, whose clock is known."""

    def __init__(self, clock):
        self.find_clock = lambda: clock


def rows(recording):
    return {(name, kind): len(samples) for name, kind, _, _, samples, *_ in recording.reader.passes()}


@pytest.mark.parametrize(
    ("kind", "on_device"), [("compute", "gpu"), ("io", "gpu"), ("comm", "gpu_comm"), ("idle", None)]
)
def test_waiting_on_the_device_is_waiting(recording, device, in_use, kind, on_device):
    """The fastest rank does it longest, so ranks are not compared in it; being idle has no time there."""
    for _ in range(2):
        with section("mine", kind=kind, gpu=True):
            device.now_ms += 2
        device.done_ms = device.now_ms
    found = {found for name, found, *_ in recording.reader.passes() if found != kind}
    assert found == ({on_device} if on_device else set())
    assert set(DEVICE_KINDS.values()) <= set(COMPARED + WAITING)
    assert (on_device in WAITING) == (kind == "comm")
    assert device.made <= 4


def test_a_section_has_its_gpu_time_beside_its_wall_time(recording, device, clock):
    """The same name, of kind `gpu`; never open, and given when it is known."""
    timer = SectionTimer("fwd", "compute")
    timer.find(clock)
    timer.begin()
    assert recording.stack() == ["fwd"]
    device.now_ms += 60_000  # longer than any pause of this process
    timer.end(Waited())
    timer.begin()
    timer.drop()
    device.done_ms = device.now_ms
    clock.harvest()
    found = {(name, kind): samples for name, kind, _, _, samples, *_ in recording.reader.passes()}
    assert found["fwd", "gpu"] == [60_000_000_000]
    assert len(found["fwd", "compute"]) == 1
    assert found["fwd", "compute"][0] < 60_000_000_000
    assert recording.stack() == []
    assert device.made == 3  # two on their way, and one for the pass that was dropped


def test_the_passes_of_a_model_are_timed_on_the_device(recording, device, clock):
    """A whole step: work without the waits in it, and the waits together with the one at the end."""
    passes = ModelPasses("", OnDevice(clock), Engine(), Guard(pytest.fail))
    weight = torch.ones(3, requires_grad=True)

    def wait(milliseconds):
        passes.waits.begin()
        device.now_ms += milliseconds
        passes.waits.end()

    def backward_of_the_weight(_gradient):
        device.now_ms += 7
        wait(100)

    weight.register_hook(backward_of_the_weight)
    for _ in range(2):
        passes.forward_begins()
        device.now_ms += 3
        wait(50)
        output = weight * 2
        passes.forward_gives(output)
        passes.forward_ends()
        output.sum().backward()
        passes.step_begins(passes)
        device.now_ms += 1
        passes.step_ends(passes)
    device.done_ms = device.now_ms
    with torch.no_grad():
        passes.forward_begins()  # not timed, so it takes nothing either
    assert recording.reader.passes()
    passes.forward_begins()
    found = {
        (name, kind): samples for name, kind, _, _, samples, *_ in recording.reader.passes() if kind.startswith("gpu")
    }
    milliseconds = {key: [sample / 1e6 for sample in samples] for key, samples in found.items()}
    assert milliseconds == {
        ("fwd", "gpu"): [3, 3],
        ("bwd", "gpu"): [7, 7],
        ("comm_wait", "gpu_comm"): [150, 150],
        ("optim", "gpu"): [1, 1],
    }
    passes.close()


def test_a_section_of_the_users_has_gpu_time_where_that_is_asked_for(recording, device, in_use):
    """Late, and also when decorated; what is entered within itself counts once, what ends in an exception not."""

    @section("bwd", gpu=True)
    def backward():
        device.now_ms += 2

    with section("fwd", gpu=True):
        assert recording.stack() == ["fwd"]
        device.now_ms += 3
        with section("fwd", gpu=True):
            device.now_ms += 4
    backward()
    with pytest.raises(OSError, match="x"), section("fwd", gpu=True):
        raise OSError("x")
    device.done_ms = device.now_ms
    with section("last", gpu=True):
        pass
    found = {(name, kind): samples for name, kind, _, _, samples, *_ in recording.reader.passes()}
    assert found["fwd", "gpu"] == [7_000_000]
    assert found["bwd", "gpu"] == [2_000_000]
    assert len(found["fwd", "compute"]) == 2
    assert recording.stack() == []


@pytest.mark.parametrize("works_for", [0, 1])
def test_a_device_that_fails_ends_the_gpu_time_and_not_the_section(recording, device, in_use, works_for, capsys):
    """At either end: the body runs, the section closes and counts, and one line says what is not measured any more."""
    device.works_for = works_for
    ran = []
    for _ in range(3):
        with section("aug", gpu=True):
            ran.append(recording.stack())
    assert ran == [["aug"]] * 3
    assert recording.stack() == []
    assert rows(recording) == {("aug", "compute"): 3}
    assert capsys.readouterr().err.count("unspecified launch failure") == 1


def test_a_forked_child_leaves_the_device_alone(recording, device, in_use):
    """It inherits a clock whose events it must not touch, and here a section that is open: it leaves that one too."""
    outer = section("outer", gpu=True)
    outer.__enter__()
    child = os.fork()
    if child == 0:
        try:
            recording.recorder.orphan()
            device.works_for = 0
            with section("inner", gpu=True):
                pass
            outer.__exit__(None, None, None)
            os._exit(0 if device.works_for == 0 else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    outer.__exit__(None, None, None)
    assert rows(recording) == {("outer", "compute"): 1}


def test_without_a_gpu_in_use_it_is_the_plain_section(recording):
    """Here there is none; kinds, timeouts and their errors are the same."""
    with section("fwd", gpu=True, kind="io", timeout=3.0):
        (opened,) = recording.lane().stack
    assert (opened.name, opened.kind, opened.timeout_s) == ("fwd", "io", 3.0)
    assert rows(recording) == {("fwd", "io"): 1}
    with pytest.raises(ConfigError, match="kind is one of"):
        section("fwd", gpu=True, kind="gpu")
    with pytest.raises(ConfigError, match="takes a string"):
        section(5, gpu=True)


def test_coroutines_are_timed_on_the_host_only(recording, device, in_use):
    """They share a stream, so nobody knows whose work is between two events."""

    @section("fetch", gpu=True)
    async def fetch():
        await asyncio.sleep(0)

    asyncio.run(fetch())
    assert device.made == 0
    assert rows(recording) == {("fetch", "compute"): 1}


def test_a_model_on_the_cpu_has_no_gpu_clock():
    """Nor one without parameters."""
    assert gpu_clock(nn.Linear(1, 1)) is None
    assert gpu_clock(nn.ReLU()) is None
