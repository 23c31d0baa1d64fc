"""Which processes are the job's own."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.health.own_processes import below, first_of_job, own_processes

RANK = {"RANK": "0", "WORLD_SIZE": "2"}
# A shell (10) has a launcher (20) with a wrapper script (30) of a rank (31), another rank (40) with a worker (41), and
# beside it somebody else's program (50).
PARENTS = {1: 0, 10: 1, 20: 10, 30: 20, 31: 30, 40: 20, 41: 40, 50: 10}


@pytest.mark.parametrize(("pid", "first"), [(31, 20), (40, 20), (50, 50), (41, 41)])
def test_a_job_begins_with_who_started_its_ranks(pid, first):
    """A wrapper is not yet the launcher; who is no rank has only what it started itself."""
    assert first_of_job(pid, PARENTS, {30, 31, 40}.__contains__) == first


def test_a_rank_whose_launcher_is_gone_stands_alone():
    """The others of init are not of its job."""
    assert first_of_job(7, {7: 1}, lambda _: True) == 7
    assert first_of_job(7, {}, lambda _: True) == 7  # without a process table


def test_all_that_was_started_is_of_the_job():
    """At any depth, and nobody beside it."""
    assert below(20, PARENTS) == {20, 30, 31, 40, 41}
    assert below(99, PARENTS) == {99}


@given(st.dictionaries(st.integers(1, 12), st.integers(0, 12)))
def test_a_table_that_was_read_while_it_changed_is_no_endless_loop(parents):
    """A number may have been used again in between, so that a process seems to be its own ancestor."""
    assert 5 in below(5, parents)
    assert first_of_job(5, parents, lambda _: True) > 0


def test_ranks_of_one_launcher_are_of_one_job_and_other_programs_are_not():
    """With real processes: this one is the launcher, and of the two that it started one asks."""
    sleep = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(sleep, stdin=subprocess.PIPE, env={**os.environ, **RANK}) as rank,
        subprocess.Popen(sleep, stdin=subprocess.PIPE) as other,
    ):
        try:
            assert {os.getpid(), rank.pid, other.pid} <= set(own_processes(rank.pid, RANK))
            assert own_processes(other.pid, {}) == (other.pid,)
            assert rank.pid not in own_processes(other.pid, {})
        finally:
            for process in (rank, other):
                process.communicate(b"\n")
