"""Kernel times: what is left out, what travels, and windows of the real profiler."""

from __future__ import annotations

import math
import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.straggler.kernels import (
    KernelSampler,
    KernelTime,
    KernelWindow,
    durations_of,
    is_communication,
    publish,
    read,
    sample_by_default,
    sampled_device,
    sampling_interval,
    summarize,
)

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)
DURATIONS = st.dictionaries(NAMES, st.lists(st.integers(0, 10**9), max_size=9), max_size=6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", True),
        ("void nvshmemi_transfer_rma<long>", True),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >", False),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", False),
        ("Memcpy HtoD (Pinned -> Device)", False),
    ],
)
def test_kernels_that_communicate_are_known_by_name(name, expected):
    """NCCL's in all spellings; none of the usual others."""
    assert is_communication(name) is expected


def test_a_window_has_the_median_and_the_total_of_each_kernel():
    """In seconds, the longest total first, without communication and what never ran."""
    durations = {"gemm": [2e6, 4e6, 3e6], "add": [1e6, 2e6], "ncclDevKernel": [9e9], "none": []}
    assert summarize(durations, 4) == KernelWindow(
        4, (KernelTime("gemm", 3, 0.003, 0.009), KernelTime("add", 2, 0.0015, 0.003))
    )


def test_a_window_is_bounded():
    """Of very many kernels the heaviest are kept, and long names are cut."""
    window = summarize({f"{number:05}" + "n" * 400: [number + 1.0] for number in range(1000)}, 1)
    assert len(window.kernels) == 256
    assert min(kernel.total_s for kernel in window.kernels) == pytest.approx(745e-9)
    assert max(len(kernel.name) for kernel in window.kernels) == 200


def test_long_names_that_begin_alike_stay_different():
    """Templates differ at their ends. All ranks shorten a name alike, or its scores would compare nothing."""
    template = "void at::native::vectorized_elementwise_kernel<4, " + "at::native::BinaryFunctor, " * 10
    durations = {f"{template}{functor}>": [1e3 * took] for took, functor in enumerate(("Add", "Gelu"), 1)}
    first, again = summarize(durations, 1), summarize(durations, 2)
    assert len({kernel.name for kernel in first.kernels}) == 2
    assert first.kernels == again.kernels


@given(durations=DURATIONS, window=st.integers(1, 100))
def test_a_window_survives_the_file(durations, window, tmp_path_factory):
    """What is published is what is read."""
    path = tmp_path_factory.getbasetemp() / "window.kernels.json"
    sent = summarize(durations, window)
    publish(path, sent)
    assert read(path) == sent


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"window": true, "kernels": []}',
        '{"window": 1, "kernels": 3}',
        '{"window": 1}',
        '{"window": 1, "kernels": [["gemm", 1, 0.5, 0.5]]}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_none_is_no_window(tmp_path, text):
    """Whatever stands in it."""
    path = tmp_path / "a0-r0-1.kernels.json"
    path.write_text(text)
    path.chmod(0o600)
    assert read(path) is None


def test_a_file_that_others_can_write_is_not_read(tmp_path):
    """Nor a link, nor a pipe, nor one that is missing."""
    path = tmp_path / "w.kernels.json"
    assert read(path) is None
    publish(path, KernelWindow(1, ()))
    assert read(path) == KernelWindow(1, ())
    path.chmod(0o622)
    assert read(path) is None
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read(link) is None
    os.mkfifo(tmp_path / "pipe")
    assert read(tmp_path / "pipe") is None


def work():
    x = torch.randn(32, 32)
    for _ in range(3):
        x = torch.mm(x, x)
    return x.relu()


def test_the_profilers_events_are_read():
    """Real events of the CPU: each operator that ran, as often as it ran, with its time; user annotations are none."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("mine"):
        work()
    found = durations_of(profile.events(), "CPU")
    assert len(found["aten::mm"]) == 3
    assert all(0 < took < 1e9 for took in found["aten::mm"])
    assert "mine" not in found
    assert durations_of(profile.events(), "CUDA") == {}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a0-r0-1.kernels.json"


def sampler(path, every_s=0.001):
    made = KernelSampler(every_s, path, device="CPU")
    while made._profile is None:  # until the first window is due
        work()
        made.step_ends()
    return made


def test_one_step_is_sampled_when_it_is_time(path):
    """A window holds the kernels of the step between two calls, and is read on another thread."""
    made = sampler(path)
    work()
    made.step_ends()
    made.join(30)
    window = read(path)
    counts = {kernel.name: kernel.count for kernel in window.kernels}
    assert counts["aten::mm"] == 3
    assert window.window == 1
    assert not torch._C._autograd._profiler_enabled()


def test_a_profiler_of_the_users_has_precedence(path):
    """While one runs, no window is begun."""
    made = KernelSampler(1e-9, path, device="CPU")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(5):
            work()
            made.step_ends()
    made.join(30)
    assert read(path) is None
    assert len(durations_of(profile.events(), "CPU")["aten::mm"]) == 15


def test_a_window_that_is_open_can_be_ended(path):
    """As `detach` does in the middle of a step."""
    made = sampler(path)
    made.stop()
    made.join(30)
    made.stop()
    assert read(path).window == 1


@pytest.fixture
def by_default():
    yield sample_by_default
    sample_by_default(None)


@pytest.mark.parametrize(
    ("setting", "asked", "proposed", "expected"),
    [
        (None, None, None, None),
        (None, None, 30.0, 30.0),
        (60.0, None, 30.0, 60.0),
        (60.0, 5.0, 30.0, 5.0),
        (0.0, None, 30.0, None),
        (0.0, 5.0, None, 5.0),
    ],
)
def test_the_code_says_how_often_then_the_setting_then_the_adapter(by_default, setting, asked, proposed, expected):
    """A setting of 0 switches off what an adapter proposes."""
    by_default(setting)
    assert sampling_interval(asked, proposed) == expected


def test_no_kernels_of_a_cpu_are_sampled():
    """Nor of a model without parameters."""
    assert sampled_device(torch.nn.Linear(1, 1)) is None
    assert sampled_device(torch.nn.ReLU()) is None


def next_window(made):
    while made._profile is None:
        work()
        made.step_ends()
    made.step_ends()
    made.join(30)


def test_what_windows_cost_is_said_and_kept_small(path, capfd):
    """Of the second, as the first sets the profiler up; the next one comes when the cost is below 1 % of the time."""
    made = KernelSampler(1e-3, path, device="CPU", says_cost=True)
    next_window(made)
    assert "GPU kernels are timed" not in capfd.readouterr().err
    next_window(made)
    [share] = re.findall(
        r"GPU kernels are timed in one step every .* \((.*) % of the training\)", capfd.readouterr().err
    )
    assert 0 < float(share) <= 1.01


def test_a_profiler_that_cannot_be_started_costs_the_kernels_alone(path, capfd):
    """As where another tool has the counters of the device: one line, and nothing is raised into the training."""
    made = KernelSampler(1e-9, path, device="NoSuchDevice")
    for _ in range(3):
        made.step_ends()
    assert capfd.readouterr().err.count("the times of GPU kernels are not known") == 1
    assert made._due_at == math.inf
