"""What a rank left of its exceptions, its own and those of its threads."""

import json

import pytest

from resilience_sdk.monitor.pending_exceptions import read_exception

OWN, OF_THREAD = {"type": "ValueError"}, {"type": "KeyError", "thread": "prefetch"}


@pytest.mark.parametrize(
    ("exit_code", "found"),
    [(1, OF_THREAD), (9, OF_THREAD), (0, None), (-9, None), (137, None), (75, None), (None, None)],
)
def test_the_exception_of_a_thread_counts_where_the_rank_ended_by_a_code_of_its_own(tmp_path, exit_code, found):
    """A clean end, a signal, a stop that was asked for, an end nobody saw: there the thread is not the reason."""
    (tmp_path / "a.thread.json").write_text(json.dumps(OF_THREAD))
    assert read_exception(tmp_path / "a", exit_code) == found


def test_the_ranks_own_exception_comes_first(tmp_path):
    """What ended the main thread ended the rank, whatever its threads raised before."""
    (tmp_path / "a.thread.json").write_text(json.dumps(OF_THREAD))
    (tmp_path / "a.error.json").write_text(json.dumps(OWN))
    assert read_exception(tmp_path / "a", 1) == OWN


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_file_that_is_none_counts_as_missing(tmp_path, text):
    """Cut short, or something else."""
    (tmp_path / "a.error.json").write_text(text)
    assert read_exception(tmp_path / "a", 1) is None
