"""`straggler.attach` on four gloo ranks, one of which is 200 ms slow in its backward: who is named, and who is not."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODES = ("ddp", "compiled", "fsdp2", "accumulated", "buffers")
RANKS, SLOW, STEPS = 4, 2, 6
SLOW_S = 0.2
OTHERS = [rank for rank in range(RANKS) if rank != SLOW]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The sections of each rank in each mode: mode -> rank -> name -> seconds of each pass."""
    root = tmp_path_factory.mktemp("attached")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_SIZE", "RESIL"))}
    env["PYTHONPATH"] = str(HERE.parents[1])
    program = [sys.executable, str(HERE / "attached_ranks.py"), str(root), *MODES]
    done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def medians(ranks, name, *, of=slice(None)):
    """Return the median of each rank over the passes `of` that section; the first step makes the buffers."""
    return [statistics.median(sections[name][of][1:]) for sections in ranks]


def check_named(bwd, comm_wait):
    """The slow rank alone has a long `bwd`, and it has the shortest wait."""
    assert SLOW_S <= bwd[SLOW] < SLOW_S + 0.15
    assert max(bwd[rank] for rank in OTHERS) < SLOW_S / 2
    assert min(comm_wait[rank] for rank in OTHERS) > comm_wait[SLOW] + SLOW_S / 2


@pytest.mark.parametrize("mode", MODES[:3])
def test_the_slow_rank_is_told_from_those_that_wait_for_it(found, mode):
    """The wall time of the backward is the same on all ranks; `bwd` and `comm_wait` are not."""
    ranks = found[mode]
    assert all(len(sections[name]) == STEPS for sections in ranks for name in ("fwd", "bwd", "comm_wait", "optim"))
    bwd, comm_wait = medians(ranks, "bwd"), medians(ranks, "comm_wait")
    check_named(bwd, comm_wait)
    wall = [local + wait for local, wait in zip(bwd, comm_wait, strict=True)]
    assert min(wall) > SLOW_S
    assert max(wall) < min(wall) + SLOW_S / 2
    assert max(medians(ranks, "fwd")) < SLOW_S / 2


def test_under_gradient_accumulation_too(found):
    """There the wall time of the backward is even shorter on the slow rank: the others wait for both its delays."""
    ranks = found["accumulated"]
    first, last = slice(0, None, 2), slice(1, None, 2)
    assert max(medians(ranks, "comm_wait", of=first)) < SLOW_S / 4
    without = medians(ranks, "bwd", of=first)
    assert without[SLOW] >= SLOW_S
    assert max(without[rank] for rank in OTHERS) < SLOW_S / 2
    bwd, comm_wait = medians(ranks, "bwd", of=last), medians(ranks, "comm_wait", of=last)
    check_named(bwd, comm_wait)
    assert bwd[SLOW] + comm_wait[SLOW] < min(bwd[rank] + comm_wait[rank] for rank in OTHERS)


def test_who_waits_for_the_buffers_of_a_late_rank_is_not_slow(found):
    """DDP broadcasts them in the forward, where all others wait for rank 0: that is no forward of theirs."""
    ranks = found["buffers"]
    assert max(medians(ranks, "fwd")) < SLOW_S / 4
    assert min(medians(ranks, "comm_wait")[1:]) > SLOW_S / 2
