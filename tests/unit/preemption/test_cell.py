"""The decision of a round: written once, whoever comes first."""

import threading

from resilience_sdk.preemption.cell import decide, last_round, read_decision
from resilience_sdk.preemption.protocol import Decision


def test_the_first_decision_stands_and_everybody_learns_it(tmp_path):
    """Eight threads write at once, half of them the one, half the other: all are told the same."""
    told = []
    together = threading.Barrier(8)

    def write(wanted):
        together.wait()
        told.append(decide(tmp_path, 0, 3, wanted))

    threads = [threading.Thread(target=write, args=(list(Decision)[n % 2],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 8
    assert set(told) == {read_decision(tmp_path, 0, 3)}


def test_rounds_are_told_apart_by_attempt_and_number(tmp_path):
    """A monitor that takes over goes on behind the last round that was decided in its attempt."""
    decide(tmp_path, 1, 7, Decision.VOID)
    (tmp_path / "a1-r0-5.page").touch()
    assert read_decision(tmp_path, 1, 6) is None
    assert read_decision(tmp_path, 0, 7) is None
    assert (last_round(tmp_path, 1), last_round(tmp_path, 0)) == (7, 0)
