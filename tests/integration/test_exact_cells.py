"""Resumes of loops as documentation writes them are exact, said or refused: a part each day, all before a release."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_frameworks import require

from tests.exact import plan, results
from tests.exact.compare import EXACT, REFUSED, SAID
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
    """Run these; each has to come to what is kept, which pages promise; what was not kept yet must not be silent."""
    kept, wrong = results.read()["cells"], []
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(runner.run, cells):
            due = kept[result.cell.key]["result"] if result.cell.key in kept else None
            lost = result.alone is not None and result.alone.result == EXACT != result.verdict.result
            if lost or result.verdict.result not in ((due,) if due else (EXACT, SAID, REFUSED)):
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
