"""Durations between events of a device that runs behind its host."""

from __future__ import annotations

import asyncio

import attrs
import pytest
import torch
from torch import nn

from resilience_sdk import straggler
from resilience_sdk.errors import ConfigError
from resilience_sdk.straggler import gpu_sections, section
from resilience_sdk.straggler.autograd import Engine
from resilience_sdk.straggler.gpu_events import GpuClock, gpu_clock
from resilience_sdk.straggler.hooks import Guard
from resilience_sdk.straggler.kernels import KernelSampler
from resilience_sdk.straggler.passes import Passes, Timer
from resilience_sdk.straggler.waits import Waited


@attrs.define
class Device:
    """A stream that comes to its events when it is told to; times in milliseconds."""

    now_ms: float = 0.0
    done_ms: float = -1.0
    made: int = 0
    capturing: bool = False

    def event(self):
        self.made += 1
        return DeviceEvent(self)


@attrs.define(eq=False)
class DeviceEvent:
    """As torch.cuda.Event: unrecorded it is complete, and elapsed_time of one that is not reached is an error."""

    device: Device
    at_ms: float | None = None

    def record(self):
        self.at_ms = self.device.now_ms

    def query(self):
        return self.at_ms is None or self.at_ms <= self.device.done_ms

    def elapsed_time(self, end):
        assert self.query()
        assert end.query()
        return end.at_ms - self.at_ms


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def clock(device):
    return GpuClock(device.event, lambda: device.capturing)


def span(device, clock, took_ms, done, **options):
    begin = clock.mark()
    device.now_ms += took_ms
    clock.measure(begin, clock.mark(), done, **options)


def test_a_duration_comes_when_the_device_has_come_to_its_end(device, clock):
    """Not before, in order, each once."""
    found = []
    for took in (5, 7, 9):
        span(device, clock, took, found.append)
    clock.harvest()
    assert found == []
    device.done_ms = 12
    clock.harvest()
    assert found == [5_000_000, 7_000_000]
    device.done_ms = 100
    clock.harvest()
    clock.harvest()
    assert found == [5_000_000, 7_000_000, 9_000_000]


def test_events_are_used_again(device, clock):
    """A device that keeps up needs two."""
    found = []
    for _ in range(1000):
        span(device, clock, 1, found.append)
        device.done_ms = device.now_ms
        clock.harvest()
    assert len(found) == 1000
    assert device.made == 2


def test_a_device_that_is_far_behind_costs_samples_and_no_memory(device, clock):
    """The pool has an end; what does not fit is lost and counted, and what was there still comes."""
    found = []
    for _ in range(10_000):
        span(device, clock, 1, found.append)
    assert device.made == 8192
    assert clock.lost == 2 * (10_000 - 4096)
    device.done_ms = device.now_ms
    clock.harvest()
    assert len(found) == 4096
    span(device, clock, 1, found.append)
    assert device.made == 8192


def test_nothing_is_recorded_into_a_graph(device, clock):
    """While one is captured there are no marks, and a half-marked span gives its event back."""
    found = []
    begin = clock.mark()
    device.capturing = True
    clock.measure(begin, clock.mark(), found.append)
    device.capturing = False
    span(device, clock, 1, found.append)
    device.done_ms = device.now_ms
    clock.harvest()
    assert found == [1_000_000]
    assert device.made == 2


def test_waits_are_taken_out_of_work_and_put_into_waiting(device, clock):
    """Stretches between events of their own."""
    found = []
    begin = clock.mark()
    device.now_ms += 2
    hole = (clock.mark(), None)
    device.now_ms += 30
    hole = (hole[0], clock.mark())
    device.now_ms += 4
    clock.measure(begin, clock.mark(), found.append, holes=[hole])
    device.done_ms = device.now_ms
    clock.harvest()
    assert found == [6_000_000]
    earlier = (clock.mark(), None)
    device.now_ms += 10
    earlier = (earlier[0], clock.mark())
    span(device, clock, 5, found.append, holes=[earlier], add_holes=True)
    device.done_ms = device.now_ms
    clock.harvest()
    assert found[1] == 15_000_000


def test_a_section_has_its_gpu_time_beside_its_wall_time(recording, device, clock):
    """The same name, of kind `gpu`; never open, and given when it is known."""
    timer = Timer("fwd", "compute")
    timer.find(clock)
    timer.begin(clock)
    assert recording.stack() == ["fwd"]
    device.now_ms += 40
    timer.end(clock, Waited())
    timer.begin(clock)
    timer.drop(clock)
    device.done_ms = device.now_ms
    clock.harvest()
    found = {(name, kind): samples for name, kind, _, samples in recording.reader.harvest()}
    assert found["fwd", "gpu"] == [40_000_000]
    assert len(found["fwd", "compute"]) == 1
    assert found["fwd", "compute"][0] < 40_000_000
    assert recording.stack() == []
    assert device.made == 3  # two on their way, and one for the pass that was dropped


def test_the_passes_of_a_model_are_timed_on_the_device(recording, device, clock):
    """A whole step: work without the waits in it, and the waits together with the one at the end."""
    passes = Passes("", lambda: clock, Engine(), Guard(pytest.fail))
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
        passes.forward_ends(output)
        output.sum().backward()
        passes.step_begins()
        device.now_ms += 1
        passes.step_ends()
    device.done_ms = device.now_ms
    with torch.no_grad():
        passes.forward_begins()  # not timed, so it takes nothing either
    assert recording.reader.harvest()
    passes.forward_begins()
    found = {name: samples for name, kind, _, samples in recording.reader.harvest() if kind == "gpu"}
    milliseconds = {name: [sample / 1e6 for sample in samples] for name, samples in found.items()}
    assert milliseconds == {"fwd": [3, 3], "bwd": [7, 7], "comm_wait": [150, 150], "optim": [1, 1]}
    passes.close()


@pytest.fixture
def in_use(monkeypatch, clock):
    """This thread's sections find a GPU in use."""
    monkeypatch.setattr(gpu_sections._clocks, "clock", clock, raising=False)


def rows(recording):
    return {(name, kind): len(samples) for name, kind, _, samples in recording.reader.harvest()}


def test_a_section_of_the_users_has_gpu_time_where_that_is_asked_for(recording, device, in_use):
    """Late, and also when decorated or entered within itself; what ends in an exception has none."""

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
    found = {(name, kind): samples for name, kind, _, samples in recording.reader.harvest()}
    assert found["fwd", "gpu"] == [4_000_000, 7_000_000]
    assert found["bwd", "gpu"] == [2_000_000]
    assert len(found["fwd", "compute"]) == 3
    assert recording.stack() == []


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_sections_of_a_model_on_a_gpu(recording):
    """Wall and GPU time of each section, without a synchronisation in between."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    handle = straggler.attach(model, optimizer)
    data = torch.randn(4096, 2048, device="cuda")
    for _ in range(20):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    model(data).square().mean().backward()
    handle.detach()
    for _ in range(2):
        with section("mine", gpu=True):
            data @ data.T
        torch.cuda.synchronize()
    found = {(name, kind): samples for name, kind, _, samples in recording.reader.harvest()}
    assert len(found["mine", "gpu"]) == 1
    for name in ("fwd", "bwd", "optim"):
        assert len(found[name, "gpu"]) == 20
        assert all(took > 0 for took in found[name, "gpu"])
    assert sum(found["bwd", "gpu"]) > sum(found["fwd", "gpu"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_of_a_step_on_a_gpu(recording):
    """A sampled window names the kernels of the step, and none that communicates."""
    windows = []
    sampler = KernelSampler(0.001, windows.append)
    data = torch.randn(512, 512, device="cuda")
    while not windows:
        data = (data @ data).relu() / 512
        sampler.step_ends()
        sampler.join(30)
    assert all(kernel.median_s > 0 for kernel in windows[0].kernels)
    assert any("gemm" in kernel.name.lower() for kernel in windows[0].kernels)
