"""What only a GPU does: a kernel that does not end, its memory used up, an address that it may not touch."""

import pytest
import torch
from harness import job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_each_fault_of_a_device_is_named_and_the_next_attempt_has_a_whole_one(tmp_path):
    """A hang with the line that waits for it, memory, an index; then 40 steps on the same device, exit 0."""
    # The host is done with its step before the device is: it waits between two of them, where the end of a loop looks
    # the same and one rank has 300 s.
    options = ("--nproc-per-node", "1", "--max-restarts", "5", "--out-of-section-timeout", "20")
    with job(tmp_path, *options, "gpu_faults.py", "stuck", "memory", "index") as run:
        assert run.finish() == 0, run.screen
        stuck, memory, index = run.incidents()
    assert stuck["cause"].startswith("hang_rank_"), stuck
    assert [each["rank"] for each in stuck["culprits"]] == [0]
    assert "gpu_faults.py" in str(stuck), stuck
    assert memory["cause"] == "cuda_oom", memory
    assert index["cause"] == "cuda_illegal_memory_access", index
