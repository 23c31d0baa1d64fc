"""A training with Accelerate that goes on with another number of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.release)])
def test_the_rest_of_the_epoch_is_the_same(tmp_path: Path, before: int, after: int) -> None:
    """Each sample is used once, whoever draws the order; that the steps are others is said."""
    require("accelerate")

    def run(ranks: int, fault: str = "") -> str:
        options = ("--nproc-per-node", str(ranks), "--max-restarts", "0")
        env = {"RESILIENCE_FAULT": fault} if fault else {}
        with job(tmp_path, *options, "accelerate_ranks.py", str(tmp_path / f"by-{ranks}"), env=env) as started:
            assert (started.finish() == 0) == (not fault), started.screen
            return started.screen

    run(before, f"kill:rank=0,step={2 * after}")
    screen = run(after)
    assert "this resume does not repeat the steps of" in screen, screen
    resumed_at = int(re.search(r"step-0*(\d+): step", screen)[1])
    before_it = [sample for step, sample in samples(tmp_path, before) if step < resumed_at]
    behind_it = [sample for _, sample in samples(tmp_path, after)]
    assert before_it
    assert sorted(before_it + behind_it) == list(range(32))


def samples(folder: Path, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the samples that so many ranks have had, with their steps."""
    for path in folder.glob(f"by-{ranks}.*"):
        for line in path.read_text().splitlines():
            step, *found = map(int, line.split())
            yield from ((step, sample) for sample in found)
