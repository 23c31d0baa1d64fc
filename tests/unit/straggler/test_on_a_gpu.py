"""What needs a CUDA device: real events and the real profiler."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from resilience_sdk import straggler
from resilience_sdk.straggler import section
from resilience_sdk.straggler.kernels import SUFFIX, KernelSampler, read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
    found = {(name, kind): samples for name, kind, _, _, samples, *_ in recording.reader.passes()}
    assert len(found["mine", "gpu"]) == 1
    for name in ("fwd", "bwd", "optim"):
        assert len(found[name, "gpu"]) == 20
        assert all(took > 0 for took in found[name, "gpu"])
    assert sum(found["bwd", "gpu"]) > sum(found["fwd", "gpu"])
    assert len(found["comm_wait", "gpu_comm"]) == 20
    assert ("comm_wait", "gpu") not in found


def test_a_forked_child_does_not_touch_the_device(recording, capfd):
    """As a DataLoader's worker whose dataset has a section: CUDA refuses forked children, and nobody asks it."""
    torch.zeros(1, device="cuda")
    with section("parent", gpu=True):
        pass
    child = os.fork()
    if child == 0:
        try:
            recording.recorder.orphan()
            with section("child", gpu=True):
                pass
            os._exit(0)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "not measured" not in capfd.readouterr().err


def test_the_kernels_of_a_step_on_a_gpu(recording):
    """A sampled window names the kernels of the step, and none that communicates."""
    path = recording.page.path.with_suffix(SUFFIX)
    sampler = KernelSampler(0.001, path)
    data = torch.randn(512, 512, device="cuda")
    while (window := read(path)) is None:
        data = (data @ data).relu() / 512
        sampler.step_ends()
        sampler.join(30)
    assert all(kernel.median_s > 0 for kernel in window.kernels)
    assert any("gemm" in kernel.name.lower() for kernel in window.kernels)
