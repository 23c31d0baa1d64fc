"""Resumes of loops as documentation writes them are exact, said or refused: a part each day, all before a release."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_frameworks import require

from tests.exact import plan, results
from tests.exact.compare import EXACT
from tests.exact.running import Runner

pytestmark = pytest.mark.slow
NEEDED = {
    "Trainer": "transformers",
    "Lightning": "lightning.pytorch",
    "Accelerate": "accelerate",
    "DeepSpeed": "deepspeed",
    "Megatron": "megatron.core",
}


def expect_as_kept(cells, runner):
    """Run those that have a kept result, which pages promise: each has to come to it."""
    kept, wrong = results.read()["cells"], []
    cells = [cell for cell in cells if cell.key in kept]
    if not cells:
        pytest.skip("none is kept: python -m tests.exact --missing --write")
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(runner.run, cells):
            lost = result.alone is not None and result.alone.result == EXACT != result.verdict.result
            if lost or result.verdict.result != kept[result.cell.key]["result"]:
                wrong.append(result)
    assert wrong == []


@pytest.mark.parametrize("way", plan.WAYS)
def test_each_loop_at_one_moment(tmp_path, way):
    """Chosen once and for all, so that each moment and fault is among them."""
    require("torchdata")
    require(NEEDED.get(way, "torch"))
    expect_as_kept([cell for cell in plan.daily() if cell.loop.way == way], Runner(tmp_path))


@pytest.mark.release
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("way", plan.WAYS)
def test_all_cells(tmp_path, way):
    """And none is exact without the SDK and not with it."""
    require("torchdata")
    require(NEEDED.get(way, "torch"))
    expect_as_kept([cell for cell in plan.cells() if cell.loop.way == way], Runner(tmp_path, alone=True))
