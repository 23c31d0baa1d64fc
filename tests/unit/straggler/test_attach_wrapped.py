"""Sections by hooks on a model in a wrapper: DDP, torch.compile, and what is said where a wrapper hides things."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from resilience_sdk import straggler
from resilience_sdk.straggler.passes import CompiledCall


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of one rank."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def said(capfd):
    """What the SDK says, as a function."""
    return lambda: [line for line in capfd.readouterr().err.splitlines() if line.startswith("resilience: ")]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def make_model():
    torch.manual_seed(0)
    return Model()


def train_step(model):
    model(torch.randn(4, 8)).sum().backward()


def counts(recording):
    return {name: len(samples) for name, samples in recording.harvest().items()}


class LateReduction:
    """Has a communication hook of DDP: buckets are reduced as soon as this process has `comm_wait` open, not before."""

    def __init__(self, recording):
        self.recording = recording
        self.open: list[list[str]] = []  # the sections in which each bucket was waited for

    def hook(self, _state, bucket):
        future = torch.futures.Future()
        threading.Thread(target=self._reduce, args=(future, bucket)).start()
        return future

    def _reduce(self, future, bucket):
        until = time.monotonic() + 20
        while True:
            stack = [section.name for section in self.recording.snapshot().main_lane.stack]
            if "comm_wait" in stack or time.monotonic() > until:
                break
            time.sleep(0.001)
        self.open.append(stack)
        future.set_result(bucket.buffer())


@pytest.mark.parametrize("attached_to", ["ddp", "inner"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_our_callback_runs_before_the_one_in_which_ddp_waits(recording, group, options, attached_to):
    """The order in which torch runs its callbacks is what `bwd` rests on: the wait is not in it, but in comm_wait."""
    model = make_model()
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    late = LateReduction(recording)
    if not options.get("static_graph"):
        ddp.register_comm_hook(None, late.hook)
    handle = straggler.attach(ddp if attached_to == "ddp" else model)
    for _ in range(2):  # the first one makes the buffers
        train_step(ddp)
    handle.detach()
    took = recording.harvest()
    assert [len(took[name]) for name in ("fwd", "bwd", "comm_wait")] == [2, 2, 2]
    if not options.get("static_graph"):
        assert late.open == [["comm_wait"]] * 2


def test_without_synchronisation_nothing_is_waited_for(recording, group):
    """no_sync: the micro-batches before the last have no collective."""
    ddp = nn.parallel.DistributedDataParallel(make_model())
    late = LateReduction(recording)
    ddp.register_comm_hook(None, late.hook)
    handle = straggler.attach(ddp)
    with ddp.no_sync():
        train_step(ddp)
    assert (counts(recording)["comm_wait"], late.open) == (1, [])
    train_step(ddp)
    handle.detach()
    assert (counts(recording)["comm_wait"], late.open) == (1, [["comm_wait"]])


def compiled_outside(model):
    return torch.compile(model, backend="eager", fullgraph=True), None


def compiled_in_place(model):
    model.compile(backend="eager", fullgraph=True)
    return model, None


def compiled_after_attach(model):
    return model, lambda: model.compile(backend="eager", fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("build", [compiled_outside, compiled_in_place, compiled_after_attach])
def test_a_compiled_model_stays_compiled_as_it_was(recording, build):
    """No graph more than without us, no break (it would be an error), no recompilation in later steps."""
    import torch._dynamo.utils

    def work(*, is_attached):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, later = build(make_model())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        handle = straggler.attach(model, optimizer) if is_attached else None
        if later is not None:
            later()
        for _ in range(5):
            train_step(model)
            optimizer.step()
        if handle is not None:
            handle.detach()
            assert not isinstance(model._compiled_call_impl, CompiledCall)
        return dict(torch._dynamo.utils.counters["stats"])

    alone, watched = work(is_attached=False), work(is_attached=True)
    assert watched == alone
    assert alone["unique_graphs"] == 1
    missed = 1 if build is compiled_after_attach else 0  # its first optimizer step finds out
    found = counts(recording)
    assert found["fwd"] == found["bwd"] == 5 - missed


@pytest.mark.slow
def test_a_model_that_is_compiled_in_place_can_be_freed(recording):
    """Neither the handle nor the hooks on every optimizer hold it, and they stop when it is gone."""
    model = make_model()
    model.compile(backend="eager")
    kept = straggler.attach(model)
    train_step(model)
    gone = weakref.ref(model)
    torch._dynamo.reset()
    del model
    gc.collect()
    assert gone() is None
    recording.harvest()
    torch.optim.SGD(nn.Linear(1, 1).parameters()).step()
    assert counts(recording) == {}
    kept.detach()


@pytest.mark.slow
def test_attached_inside_a_compiled_model_it_says_so(recording, said):
    """The graph stays whole, fwd and bwd are not timed, and one line says what to attach instead."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = straggler.attach(model, optimizer)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(5):
        train_step(compiled)
        optimizer.step()
    handle.detach()
    assert set(counts(recording)) == {"optim"}
    (line,) = said()
    assert "attach the object that the loop calls" in line


def test_tensor_parallelism_is_said_to_be_a_blind_spot(recording, group, said):
    """Its collectives run inside fwd and bwd: one line, and what can be told is timed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = make_model()
    mesh = init_device_mesh("cpu", (1,))
    model = parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    handle = straggler.attach(model)
    train_step(model)
    handle.detach()
    (line,) = said()
    assert "tensor parallelism" in line
    assert counts(recording)["bwd"] == 1


def test_a_blind_spot_is_said_once_per_job(recording, said, monkeypatch):
    """All ranks have the same model: a line of each would be a screen full."""
    model = type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2)
    monkeypatch.setenv("RANK", "1")
    straggler.attach(model).detach()
    assert said() == []
    monkeypatch.setenv("RANK", "0")
    straggler.attach(model).detach()
    (line,) = said()
    assert "FSDP1" in line


def test_fsdp_alone_is_none(recording, group, said):
    """Sharded data parallelism waits where it can be bracketed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=mesh)
    handle = straggler.attach(model)
    for _ in range(2):
        train_step(model)
    with torch.no_grad():
        model(torch.randn(4, 8))
    handle.detach()
    assert said() == []
    assert counts(recording) == {"fwd": 2, "bwd": 2, "comm_wait": 2}
    assert recording.stack() == []
    hooks = [hook for layer in model.modules() for hook in layer._forward_pre_hooks.values()]
    assert not [hook for hook in hooks if "resilience" in type(hook).__module__]


class Blocks(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(Model() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).repeat(1, 2)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, not ours
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_waits_are_bracketed_in_compiled_blocks_too(recording, group, is_compiled):
    """Blocks compiled one by one and sharded: no graph more, and what FSDP2 does before a block is a wait, not work."""
    import torch._dynamo.utils
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def work(*, is_attached):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = Blocks(3)
        mesh = init_device_mesh("cpu", (1,))
        for block in model.blocks:
            if is_compiled:
                block.compile(backend="eager", fullgraph=True)
            fully_shard(block, mesh=mesh)
            # Between our brackets, as a gathering of parameters that takes its time.
            block.register_forward_pre_hook(torch.compiler.disable(lambda _module, _args: time.sleep(0.05)))
        fully_shard(model, mesh=mesh)
        handle = straggler.attach(model) if is_attached else None
        losses = []
        for _ in range(3):
            began = time.monotonic_ns()
            losses.append(model(torch.ones(4, 8)).sum())
            losses[-1].backward()
            steps_ns.append(time.monotonic_ns() - began)
        if handle is not None:
            handle.detach()
        return [loss.item() for loss in losses], dict(torch._dynamo.utils.counters["stats"])

    steps_ns = []
    assert work(is_attached=True) == work(is_attached=False)
    found = recording.harvest()
    assert [len(found[name]) for name in ("fwd", "bwd", "comm_wait")] == [3, 3, 3]
    assert all(took <= step_ns - 0.15e9 for took, step_ns in zip(found["fwd"], steps_ns[:3], strict=True))
    assert min(found["comm_wait"]) > 0.15e9


def test_a_model_that_is_sharded_after_it_was_attached_is_said(recording, group, said):
    """Its waits cannot be told from its work then; nothing else changes, and in the right order nothing is said."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model()
    handle = straggler.attach(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model(torch.randn(2, 8)).sum().backward()
    [line] = said()
    assert "after it was attached" in line
    handle.detach()
    straggler.attach(model).detach()
    model(torch.randn(2, 8)).sum().backward()
    assert said() == []
