"""Who coordinates a stop, alike for all ranks of a job."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core import environ
from resilience_sdk.core.journal import Event, Journal, read_journal
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import Settings
from resilience_sdk.rank.preemption import Coordination, StopTeller, has_no_peers, signal_grace_s, signal_numbers
from resilience_sdk.recorder import page_layout
from resilience_sdk.recorder.page_directory import page_stem
from resilience_sdk.recorder.page_writer import RankPage

PROJECT = Path(__file__).parent.parent.parent.parent
NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("found", [True, False])
def test_on_one_node_the_first_rank_that_knows_decides_for_all(tmp_path, found):
    """One sees the monitor, another one could not start it: both do the same. The next attempt decides anew."""
    assert Coordination(tmp_path, 0, {}, lambda: found).by_monitor() is found
    assert Coordination(tmp_path, 0, {}, lambda: not found).by_monitor() is found
    assert Coordination(tmp_path, 1, {}, lambda: not found).by_monitor() is not found


def test_a_monitor_that_is_about_to_come_is_not_waited_for_in_a_check(tmp_path):
    """As long as nobody knows, the answer is just that; without a monitor in time the ranks do it themselves."""
    now, found = [100.0], [None]
    ranks = [Coordination(tmp_path, 0, {}, lambda: found[0], clock=lambda: now[0]) for _ in range(2)]
    assert [rank.by_monitor() for rank in ranks] == [None, None]
    assert not list(tmp_path.iterdir())
    now[0] += 11
    assert ranks[0].by_monitor() is False
    found[0] = True
    assert ranks[1].by_monitor() is False
    assert Coordination(tmp_path, 1, {}, lambda: found[0]).by_monitor() is True


@pytest.mark.parametrize(
    ("heard", "asks", "said"),
    [
        ("SIGTERM", False, "the job is asked to leave by SIGTERM: all ranks stop after 1 step"),
        (None, True, "the job is asked to leave by resilience preempt of ann@head: all ranks stop after 1 step"),
        (None, False, "the job is asked to leave: all ranks stop after 1 step"),
    ],
)
def test_what_is_said_at_a_stop_is_of_this_attempt(tmp_path, capfd, heard, asks, said):
    """Who asked stands in the journal; without it, the signal that the rank has heard. Earlier notices are no news."""
    run_dir = RunDirectory.create(tmp_path / "run")

    def ask(attempt, by):
        monitor = Journal(run_dir.journal, writer="monitor", host="h", boot_id="", job="job", attempt=attempt)
        monitor.emit(Event.PREEMPT_NOTICE, source="preempt", kind="file", by=by)
        monitor.close()

    ask(0, "earlier@head")
    tell = StopTeller(run_dir.journal, 0, {}, lambda: True)
    ask(7, "elsewhere@head")
    if asks:
        ask(0, "ann@head")
    tell(1, heard)
    assert capfd.readouterr().err == f"resilience: {said}\n"


@pytest.mark.parametrize(("env", "speaks"), [({environ.INTERNAL_JOB: "job"}, True), ({}, False)])
def test_at_a_stop_one_speaks(tmp_path, capfd, env, speaks):
    """Our launcher where there is one, else the rank that speaks for all."""
    StopTeller(tmp_path, 0, env, lambda: speaks)(1, "SIGTERM")
    assert capfd.readouterr().err == ""


@given(turns=st.lists(st.integers(0, 2), max_size=60), alone=st.integers(0, 40))
def test_ranks_that_learn_at_different_checks_begin_at_the_same_one(turns, alone):
    """Whatever the order of their checks, nobody has passed the first check of the agreement when it learns of it."""
    with tempfile.TemporaryDirectory() as folder:
        known = [None]
        ranks = [Coordination(Path(folder), 0, {}, lambda: known[0]) for _ in range(3)]
        pages = [create_page(Path(folder), number) for number in range(3)]
        counts, firsts = [0] * 3, [None] * 3
        for turn, number in enumerate([*turns, 0, 1, 2]):
            known[0] = False if turn >= min(alone, len(turns)) else None
            counts[number] += 1
            pages[number].words[page_layout.W_CHECKS] = counts[number]
            if firsts[number] is None and ranks[number].by_monitor() is False:
                firsts[number] = ranks[number].first_check(counts[number])
                assert firsts[number] >= counts[number]
        assert len(set(firsts)) == 1, firsts


def create_page(folder, number):
    """Return the page of a rank of this process."""
    return RankPage.create(
        folder / f"{page_stem(0, number, os.getpid())}.page",
        pid=os.getpid(),
        start_ticks=1,
        rank=number,
        local_rank=number,
        world_size=3,
        attempt=0,
        created_ns=1,
        facts={},
    )


WITHOUT_PAGE = """
from resilience_sdk import preemption
preemption.check()
preemption.request("leave")
while not preemption.check():
    pass
"""


@pytest.mark.parametrize("of", ["this job", "another job"])
def test_without_a_page_the_stop_is_in_the_journal_of_the_run(tmp_path, of):
    """Whoever waits for the job tells by it that training is not complete; another job's directory is left alone."""
    run_dir = RunDirectory.create(tmp_path / "run")
    Lease.acquire(run_dir, "mine" if of == "this job" else "another")
    env = {environ.RUN_DIR: str(run_dir.path), environ.INTERNAL_JOB: "mine", environ.INTERNAL_PAGES: ""}
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    subprocess.run([sys.executable, "-c", WITHOUT_PAGE], env=own | env, check=True, timeout=60)
    told = [event["job"] for event in read_journal(run_dir.journal).events if event["event"] == "stop_agreed"]
    assert told == (["mine"] if of == "this job" else [])


def test_on_several_nodes_it_depends_on_the_launcher_alone(tmp_path):
    """Ours carries what monitors tell one another; under others ranks with and without a monitor do the same."""
    for found in (True, False, None):
        assert Coordination(tmp_path, 0, NODES, lambda found=found: found).by_monitor() is False
        ours = NODES | {environ.INTERNAL_JOB: "j"}
        assert Coordination(tmp_path, 0, ours, lambda found=found: found).by_monitor() is True
    assert not list(tmp_path.iterdir())


def test_where_the_word_cannot_be_written_monitors_coordinate(tmp_path):
    """Nothing is raised into the training."""
    assert Coordination(tmp_path / "gone", 0, {}, lambda: False).by_monitor() is True


def test_only_torchruns_own_signals_have_30_seconds():
    """Our launcher has `preempt_time`, whatever it sets for scripts that look for torchrun's variables."""
    assert signal_grace_s({"TORCHELASTIC_RUN_ID": "x"}) == 30
    assert signal_grace_s({"TORCHELASTIC_RUN_ID": "x", environ.INTERNAL_JOB: "j"}) > 1e9
    assert signal_grace_s({}) > 1e9


def test_all_signals_of_the_settings_are_taken():
    """Those of real time, too."""
    numbers = signal_numbers(Settings(preempt_signals="TERM,SIGRTMIN+5"))
    assert len(numbers) == 2
    assert numbers[0] == 15


def test_a_process_is_alone_only_if_nothing_shows_others():
    """A provisional identity is a guess, so its size tells nothing."""
    assert has_no_peers(1, False, {"RANK": "0", "WORLD_SIZE": "1"})
    assert not has_no_peers(2, False, {"RANK": "0", "WORLD_SIZE": "2"})
    assert has_no_peers(1, True, {})
    assert not has_no_peers(1, True, {"RANK": "0"})
