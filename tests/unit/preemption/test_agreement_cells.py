"""Write-once words: whoever comes first makes them, and with several nodes only a wish of them."""

import json
import os
import threading

import pytest

from resilience_sdk.preemption.agreement import FileCell, Proposal, StopDecision, wish_path, word_path


def test_the_first_decision_stands_and_everybody_learns_it(tmp_path):
    """Eight threads ask at once, half of them for the one, half for the other: all are told the same."""
    told = []
    together = threading.Barrier(8)

    def write(wanted):
        together.wait()
        told.append(FileCell(tmp_path, 0).decide(3, wanted))

    threads = [threading.Thread(target=write, args=(list(StopDecision)[n % 2],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 8
    assert set(told) == {FileCell(tmp_path, 0).decision(3)}


def test_words_are_told_apart_by_attempt_round_and_kind(tmp_path):
    """A proposal is no decision, and neither is one of another attempt."""
    FileCell(tmp_path, 1).decide(7, StopDecision.VOID)
    FileCell(tmp_path, 1).propose(Proposal(6, 40))
    FileCell(tmp_path, 1).propose(Proposal(6, 50))
    assert FileCell(tmp_path, 1).proposal(6) == Proposal(6, 40)
    assert FileCell(tmp_path, 1).decision(6) is None
    assert FileCell(tmp_path, 1).proposal(7) is None
    assert FileCell(tmp_path, 0).decision(7) is None


@pytest.fixture
def shared(tmp_path):
    """The words of an attempt of two nodes."""
    (tmp_path / "attempt-0.json").write_text(json.dumps({"attempt": 0, "nodes": 2}))
    return FileCell(tmp_path, 0)


def test_with_several_nodes_nobody_decides_here(tmp_path, shared):
    """What is asked for is a wish until the launcher says what stands."""
    assert shared.shared
    assert shared.decide(1, StopDecision.VOID) is None
    assert shared.decide(1, StopDecision.COMMIT) is None
    assert os.readlink(wish_path(tmp_path, 0, "stop-1")) == "void"
    os.symlink("commit", word_path(tmp_path, 0, "stop-1"))
    assert shared.decide(1, StopDecision.VOID) is StopDecision.COMMIT


def test_a_node_that_decides_alone_does_so_once_and_not_against_what_is_known(shared, tmp_path):
    """All its ranks go the same way."""
    assert shared.decide_alone(1)
    assert not shared.decide_alone(1)
    assert shared.decision(1) is StopDecision.ALONE
    os.symlink("commit", word_path(tmp_path, 0, "stop-2"))
    assert not shared.decide_alone(2)
    assert shared.decision(2) is StopDecision.COMMIT
