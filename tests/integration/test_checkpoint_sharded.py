import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
QUICK = ["fsdp-2", "fsdp-2-to-1", "fsdp-2-to-4", "behind-2", "behind-2-to-1"]
LONG = [
    ("fsdp-2", ["fsdp-2-to-2", "fsdp-2-to-plain"]),
    ("fsdp-1", ["fsdp-1-to-2"]),
    ("plain-1", ["plain-1-to-fsdp-2"]),
    ("ddp-2", ["ddp-2-to-fsdp-2"]),
    ("fsdp1-2", ["fsdp1-2-to-fsdp2-4"]),
    ("behind-ddp-2", ["behind-ddp-2-to-1"]),
]


def run(root, phases):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_SIZE", "RESIL"))}
    env["PYTHONPATH"] = str(HERE.parents[1])
    program = [sys.executable, str(HERE / "sharded_ranks.py"), str(root), *phases]
    done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(code == 0 for phase in found.values() for code in phase["codes"]), done.stderr
    return found


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run(tmp_path_factory.mktemp("sharded"), QUICK)


def check_resumed(first, resumed):
    """Every rank goes on at step 3 with the losses of the run that was not interrupted, bit for bit."""
    expected = first["ranks"][0]["losses"]
    for rank in first["ranks"]:
        assert rank["at 0"]
        assert rank["begun"]
        assert rank["committed"]
        assert rank["last good"] == 3
        assert rank["losses"] == expected
    for rank in resumed["ranks"]:
        assert rank["resumed"] == 3
        assert rank["losses"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("resumed", ["fsdp-2-to-1", "fsdp-2-to-4"])
def test_a_sharded_state_is_resumed_by_another_number_of_ranks(quick, resumed):
    """FSDP2 on two ranks goes on with one and with four: parameters, AdamW's moments and the schedule."""
    check_resumed(quick["fsdp-2"], quick[resumed])


def test_a_sharded_state_is_written_in_the_background(quick):
    """What is committed is the state at the save, though three more steps were made meanwhile."""
    check_resumed(quick["behind-2"], quick["behind-2-to-1"])


@pytest.mark.parametrize("phase", ["fsdp-2", "behind-2"])
def test_one_rank_that_cannot_write_its_part_means_no_commit(quick, phase):
    """All ranks learn of it, none waits for ever, and the last good one stays."""
    assert [rank["failed"] for rank in quick[phase]["ranks"]] == [[True, True, 3]] * 2


def test_a_sharded_optimizer_needs_its_module(quick):
    """At the resume, not at the first save hours later, it is said what is missing."""
    for rank in quick["fsdp-2"]["ranks"]:
        assert "put the module into state too" in rank["alone"]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    phases = [name for first, others in LONG for name in (first, *others)]
    return run(tmp_path_factory.mktemp("wrappings"), [*phases, "uncopied-2"])


@pytest.mark.slow
@pytest.mark.parametrize(("first", "others"), LONG, ids=[first for first, _ in LONG])
def test_states_move_between_ways_of_wrapping(everything, first, others):
    """Plain, DDP, FSDP and FSDP2 read one another's checkpoints, on other numbers of ranks too."""
    for other in others:
        check_resumed(everything[first], everything[other])
    if "fsdp-2-to-plain" in others:
        misfit = everything["fsdp-2-to-plain"]["ranks"][0]["misfit"]
        assert misfit.startswith("the checkpoint does not fit state['model']")
        assert "model.weight" in misfit


@pytest.mark.slow
def test_one_rank_that_cannot_copy_its_part_means_no_commit(everything):
    """In the background the copy is made while the training waits: nobody is left waiting, and the next save works."""
    for rank in everything["uncopied-2"]["ranks"]:
        assert rank["uncopied"] == [True, True, 3]
        assert rank["mended"] == [True, True, 8]
