"""What the processes of one job on one node agree on, and when it is another job's."""

from __future__ import annotations

import os

import attrs
import pytest

from resilience_sdk.core import job_config
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.preemption.agreement import FileCell, Proposal, StopDecision, make_link, wish_path
from resilience_sdk.preemption.context import coordinator_word
from resilience_sdk.system import hostinfo

LIVING = (os.getpid(), hostinfo.process_start_ticks(os.getpid()))
GONE = (os.getpid(), 1)


def proposal(run_dir: str = "/a", **changes: object) -> JobConfig:
    """A rank of a job of a foreign launcher that is still there; the rank itself is gone."""
    config = JobConfig(
        job="key",
        run_dir=run_dir,
        run_named=True,
        settings={},
        on_hang="report",
        script="train.py",
        launcher_pid=None,
        launcher_ticks=None,
        creator_pid=GONE[0],
        creator_ticks=GONE[1],
        parent_pid=LIVING[0],
        parent_ticks=LIVING[1],
    )
    return attrs.evolve(config, **changes)


def test_the_first_rank_decides_for_the_others(tmp_path):
    """While the rank that decided lives, the others take over what it said, whatever they would say."""
    first = proposal("/a", creator_pid=LIVING[0], creator_ticks=LIVING[1])
    assert job_config.agree(tmp_path, first) is first
    assert job_config.agree(tmp_path, proposal("/b")) == first
    assert job_config.read(tmp_path) == first


def test_a_restart_by_the_same_launcher_keeps_the_run_directory(tmp_path):
    """A later attempt, whose own choice would be a new directory, goes on in the one of the attempt before."""
    first = proposal("/runs/train-1", run_named=False)
    job_config.agree(tmp_path, first)
    assert job_config.agree(tmp_path, proposal("/runs/train-2", run_named=False)) == first


def test_another_directory_by_name_is_another_job(tmp_path):
    """A launcher that starts a second job after the first names its directory, and that is meant."""
    job_config.agree(tmp_path, proposal("/a"))
    second = proposal("/b")
    assert job_config.agree(tmp_path, second) is second


def test_what_another_launcher_or_job_left_is_replaced(tmp_path):
    """The same page directory after a requeue, or by chance, holds nothing for the new job."""
    job_config.agree(tmp_path, proposal("/a"))
    for other in (proposal(parent_pid=1, parent_ticks=2), proposal(job="other")):
        assert job_config.agree(tmp_path, other) is other


def test_our_launchers_word_ends_with_it(tmp_path):
    """What our launcher settled holds for its ranks while it lives."""
    settled = proposal("/a", launcher_pid=LIVING[0], launcher_ticks=LIVING[1])
    job_config.agree(tmp_path, settled)
    assert job_config.agree(tmp_path, proposal("/b")) == settled
    assert job_config.agree(tmp_path, proposal("/b"), lambda _: True) == settled  # it numbers its attempts
    dead = proposal("/a", launcher_pid=GONE[0], launcher_ticks=GONE[1])
    (tmp_path / job_config.FILE).unlink()
    job_config.agree(tmp_path, dead)
    later = proposal("/b")
    assert job_config.agree(tmp_path, later) is later


@pytest.mark.parametrize("parent", [(0, 0), (1, 2)], ids=["no launcher", "a launcher"])
def test_the_decision_of_a_job_that_was_killed_does_not_stop_the_next_one(tmp_path, parent):
    """A requeued job has the key and the attempt of the one before, whose monitor could not clean up any more."""
    before = proposal(parent_pid=parent[0], parent_ticks=parent[1])
    job_config.agree(tmp_path, before)
    FileCell(tmp_path, 0).propose(Proposal(1, 40))
    FileCell(tmp_path, 0).decide(1, StopDecision.COMMIT)
    for left in (wish_path(tmp_path, 0, "stop-1"), coordinator_word(tmp_path, 0)):
        make_link(left, "x")
    (tmp_path / "other").touch()
    after = proposal(parent_pid=0, parent_ticks=0, creator_pid=LIVING[0], creator_ticks=LIVING[1])
    assert job_config.agree(tmp_path, after) is after
    assert FileCell(tmp_path, 0).proposal(1) is None
    assert FileCell(tmp_path, 0).decision(1) is None
    assert not any(path.is_symlink() for path in tmp_path.iterdir())
    assert (tmp_path / "other").exists()
    FileCell(tmp_path, 0).decide(1, StopDecision.COMMIT)
    assert job_config.agree(tmp_path, before) == after  # a rank of the same job takes nothing away
    assert FileCell(tmp_path, 0).decision(1) is StopDecision.COMMIT


def test_a_start_after_the_end_of_the_one_before_finds_nothing_of_it(tmp_path):
    """`mp.spawn` again, from the same parent: the same run directory and settings, no old stop, no old verdict."""
    first = proposal("/runs/train-1", run_named=False)
    job_config.agree(tmp_path, first)
    FileCell(tmp_path, 0).decide(1, StopDecision.COMMIT)
    for said in ("verdict-0.json", "ending-0.json", "attempt-0.json"):
        (tmp_path / said).write_text("{}")
    asked = []
    second = proposal("/runs/train-2", run_named=False, creator_pid=LIVING[0], creator_ticks=LIVING[1])
    agreed = job_config.agree(tmp_path, second, lambda began_ns: asked.append(began_ns) or True)
    assert asked == [first.began_ns]
    assert (agreed.run_dir, agreed.creator_pid, agreed.began_ns) == ("/runs/train-1", LIVING[0], second.began_ns)
    assert job_config.read(tmp_path) == agreed != first
    assert {path.name for path in tmp_path.iterdir()} == {job_config.FILE, "config.lock"}
    assert job_config.agree(tmp_path, proposal(), lambda _: False) == agreed


def test_a_torn_file_is_no_agreement(tmp_path):
    """What cannot be read does not stop the job."""
    (tmp_path / job_config.FILE).write_text('{"job": "key", ')
    fresh = proposal()
    assert job_config.agree(tmp_path, fresh) is fresh


def test_without_start_times_a_pid_that_exists_has_to_do(tmp_path, monkeypatch):
    """Where no process has a start time, what a living rank settled still holds for the others."""
    monkeypatch.setattr(hostinfo, "stat_fields", lambda _pid: [])
    first = proposal("/a", creator_pid=os.getpid(), creator_ticks=0)
    job_config.agree(tmp_path, first)
    assert job_config.agree(tmp_path, proposal("/b", creator_ticks=0)) == first


def test_a_new_agreement_is_a_new_version(tmp_path):
    """The monitor reads the file again only when this changes, so it must, however soon and alike the next one is."""
    assert job_config.version(tmp_path) is None
    seen = set()
    for _ in range(20):
        job_config.agree(tmp_path, proposal("/a"))
        seen.add(job_config.version(tmp_path))
        job_config.agree(tmp_path, proposal("/b"))
        seen.add(job_config.version(tmp_path))
    assert len(seen) == 40
