"""Messages of libraries, launchers and shells, as they stand in logs: each log is told by what came first in it."""

from pathlib import Path

import pytest

from resilience_sdk.attribution import diagnose

# A file for each: `CAUSE.what-it-is.txt`.
LOGS = {path.name.split(".")[1]: path for path in sorted((Path(__file__).parent / "messages").glob("*.txt"))}


@pytest.mark.parametrize("name", LOGS)
def test_each_message_is_told_by_its_cause(name):
    """The cause, and with it what is done: a teardown, a wrapper or a consequence is none."""
    assert diagnose(LOGS[name].read_text()).cause == LOGS[name].name.split(".")[0]


def test_a_late_rank_is_named_and_the_watchdogs_of_the_others_are_its_victims():
    """By the time that it says that something took."""
    log = LOGS["a-rank-took-longer-than-the-others-would-wait"].read_text()
    assert [culprit.rank for culprit in diagnose(log).culprits] == [2]
    assert diagnose(log.replace("1843.2 s", "18.4 s")).cause == "nccl_watchdog_timeout"


def test_who_is_not_in_the_barrier_is_named_by_the_stacks():
    """One of four computes: three wait for it."""
    frames = {rank: ("torch/distributed/distributed_c10d.py", 4818, "barrier") for rank in (0, 1, 3)}
    frames[2] = ("/home/user/data.py", 12, "tokenize")
    log = "".join(
        f"[rank{rank}]: Timeout (0:05:00)!\n"
        f"[rank{rank}]: Thread 0x00007f00000{rank}00 (most recent call first):\n"
        f'[rank{rank}]:   File "{file}", line {line} in {name}\n'
        f'[rank{rank}]:   File "/home/user/train.py", line 40 in <module>\n'
        for rank, (file, line, name) in frames.items()
    )
    found = diagnose(log)
    assert (found.cause, [culprit.rank for culprit in found.culprits]) == ("hang_rank_late", [2])
    assert "data.py:12 tokenize" in found.evidence[0].text


@pytest.mark.parametrize("printed", ["STRAGGLER: rank 3 is slow", "straggler detected: rank 3", "slow node found: 7"])
def test_no_word_that_a_program_prints_excludes_a_node(printed):
    """Neither where the run goes on, nor where it ends for something else."""
    for end in (
        "",
        "training finished\n",
        'Traceback (most recent call last):\n  File "t.py", line 1, in f\nKeyError: 1\n',
    ):
        assert diagnose(f"step 1\n{printed}\nstep 2\n{end}").action != "exclude_node"


def test_a_rank_that_dies_of_a_signal_is_no_teardown_of_another_ones_watchdog():
    """Its peers time out, and the launcher tells how it ended."""
    watchdog = (
        "[rank0]:[E101 00:30:09.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout"
    )
    log = f"{watchdog}\n[rank1]: Fatal Python error: Segmentation fault\n"
    found = diagnose(log)
    assert (found.cause, [culprit.rank for culprit in found.culprits]) == ("rank_segfault", [1])
