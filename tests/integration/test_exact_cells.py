"""Cells of `tests.exact`, run anew: a resume is as good as the pages say by `results.json`, or better.

Some each day; in the lane of a release those that have seen the most together. `python -m tests.exact` runs all.
"""

from __future__ import annotations

import pytest
from adapter_frameworks import require

from tests.exact import compare, plan, results
from tests.exact.running import Runner

pytestmark = pytest.mark.slow
NEEDS = {
    "start_run": ("torchdata",),
    "attach": ("torchdata",),
    "Trainer": ("transformers",),
    "Lightning": ("lightning", "torchmetrics"),
    "Accelerate": ("accelerate",),
    "DeepSpeed": ("deepspeed", "--no-build-isolation deepspeed==0.19.8"),
    "Megatron": ("megatron.core", "megatron-core==0.16.1"),
}
"""The module of a way in, and what brings it where that has another name."""
WORSE = (compare.EXACT, compare.REFUSED, compare.SAID)
KEPT = results.read()["cells"]


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Run cells; those of one loop share what was not disturbed."""
    return Runner(tmp_path_factory.mktemp("cells"))


def check(runner: Runner, cell: plan.Cell) -> None:
    """Run a cell, and compare its result with the one that is kept."""
    module, *package = NEEDS[cell.loop.way]
    require(module, *package[:1])
    verdict = runner.run(cell).verdict
    kept = KEPT[cell.key]["result"]
    if cell.change != plan.SAME and kept == compare.EXACT and cell.fault == "preempt":
        kept = compare.SAID  # the stop may come where an epoch ends, as it was then, or within one
    assert verdict.result in WORSE[: WORSE.index(kept) + 1], verdict


@pytest.mark.parametrize("cell", plan.daily(), ids=lambda cell: cell.key.replace(" / ", "-"))
def test_each_day(runner: Runner, cell: plan.Cell) -> None:
    """Each way in, each moment and each fault, some with something changed."""
    check(runner, cell)


@pytest.mark.release
@pytest.mark.parametrize("cell", plan.of_release(KEPT), ids=lambda cell: cell.key.replace(" / ", "-"))
def test_before_a_release(runner: Runner, cell: plan.Cell) -> None:
    """The known cells that have seen the most together."""
    check(runner, cell)
