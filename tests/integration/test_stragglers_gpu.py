"""Ranks that share a GPU: the slow one is named there as on processors."""

import pytest
import torch
from straggler_runs import enough, found_events, least_of, named, training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_slow_backward_on_a_shared_device_is_named_within_20_steps(tmp_path):
    """200 ms in the backward of one of two processes on one device."""
    with training(tmp_path, "--device", "cuda", fault="slow:rank=1,section=bwd,seconds=0.2", ranks=2) as run:
        run.wait(lambda: bool(named(run, least=least_of(0.2))), "a verdict")
        enough(run)
    found = found_events(run, least=least_of(0.2))
    assert found[0]["step"] <= 20
    assert {(tuple(event["ranks"]), event["section"]) for event in found} == {((1,), "bwd")}
