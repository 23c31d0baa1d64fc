"""The clean end of a training, as the ranks tell it to one another."""

import types

import pytest

from resilience_sdk.core import environ
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.rank import all_ranks


class Session:
    """What of a session the end needs: where the flag is set, and a journal."""

    def __init__(self, path):
        self.run_dir = RunDirectory.create(path)
        self.journal = types.SimpleNamespace(emit=lambda *_args, **_facts: None)


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path / "run")


@pytest.fixture
def told(monkeypatch):
    """What this rank, the first of two, tells the other one, which has come to a clean end."""
    told = []

    def gather(message):
        told.append(message)
        return [message, "clean"]

    monkeypatch.setattr(all_ranks, "has_peers", lambda: True)
    monkeypatch.setattr(all_ranks, "group_is_ready", lambda: True)
    monkeypatch.setattr(all_ranks, "find_ranks", lambda: types.SimpleNamespace(rank=0, gather=gather))
    return told


def test_where_all_ranks_end_the_flag_is_set(session, told):
    """By the first."""
    assert all_ranks.finish(session, 6)
    assert session.run_dir.is_finished()
    assert told == ["clean"]


def test_a_rank_that_is_not_complete_says_so(session, told):
    """The others wait for its word, and there is no flag."""
    assert not all_ranks.finish(session, 6, is_complete=False)
    assert not session.run_dir.is_finished()
    assert told == ["not clean"]


def test_a_rank_that_is_not_recorded_says_so(told):
    """It cannot tell whether its job has a flag."""
    assert not all_ranks.finish(None, 6)
    assert told == ["not clean"]


def test_our_launcher_asks_nobody(session, told, monkeypatch):
    """It sees every exit code."""
    monkeypatch.setenv(environ.INTERNAL_JOB, "job")
    assert not all_ranks.finish(session, 6)
    assert told == []


def test_a_flag_of_this_process_is_taken_back(session, tmp_path, monkeypatch):
    """With the file that was asked for, where the process trains on; one of another process stays."""
    flag = tmp_path / "flag"
    monkeypatch.setenv(environ.FINISHED_FLAG_FILE, str(flag))
    assert all_ranks.finish(session, 6)
    assert flag.exists()
    all_ranks.reopen(session)
    assert not flag.exists()
    assert not session.run_dir.is_finished()
    session.run_dir.mark_finished()
    all_ranks.reopen(session)
    assert session.run_dir.is_finished()
