"""A proof that cannot be made, or said, ends no training; what is left of a step says whose it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from resilience_sdk.adapters._proof import proof_of
from resilience_sdk.rank.pass_print import PassPrint
from resilience_sdk.recorder import witness_ring
from resilience_sdk.recorder.witness_ring import WitnessRing


class Session:
    """What a proof asks of one; `breaks`: its journal raises."""

    settings = SimpleNamespace(resume_check="auto")
    identity = SimpleNamespace(rank=0, local_rank=0, world_size=1)
    run_dir = SimpleNamespace(journal="nowhere")

    def __init__(self, place, attempt=0):
        self.place, self.attempt, self.events, self.breaks = place, attempt, [], False
        self.journal = self

    def emit(self, event, **facts):
        self.events.append((event.value, facts))
        if self.breaks:
            raise OSError("no room")

    def make_witness_ring(self, facts):
        path = self.place / f"a{self.attempt}-r0-{77 + self.attempt}{witness_ring.SUFFIX}"
        return None if path.exists() else WitnessRing(path, rank=0, world_size=1, attempt=self.attempt, facts=facts)

    def find_witnesses(self):
        return witness_ring.find(self.place, self.place / "run", 0, self.attempt, "job")


def make(session, key="a"):
    return proof_of(session, PassPrint(), (), tuple, {}, length=lambda: 9, key=key)


def do(proof, first, last):
    for step in range(first, last):
        proof.note(step, 0, step, [step])
    proof.close()


@pytest.mark.parametrize("key", ["a", "b"])
def test_the_second_training_of_a_process_is_not_compared_with_the_first(tmp_path, key):
    """At the resume the first is complete, or not asked for: then its name differs."""
    before, now = Session(tmp_path), Session(tmp_path, 1)
    do(make(before), 0, 9)
    do(make(before, key), 0, 3)
    if key == "a":
        make(now, "a")
    do(make(now, key), 5, 9)
    [(event, facts)] = now.events
    assert (event, facts["result"]) == ("resume_check", "not_compared")
    assert facts["text"].startswith("these steps were those of another training before")


def test_the_same_training_is_compared(tmp_path):
    """As one that is the only one of its process."""
    do(make(Session(tmp_path)), 0, 9)
    now = Session(tmp_path, 1)
    do(make(now), 5, 9)
    [(_, facts)] = now.events
    assert (facts["result"], facts["text"].startswith("4 of 4 repeated steps equal in samples")) == ("exact", True)


def test_a_result_that_cannot_be_recorded_ends_no_training(tmp_path):
    """Neither where the comparison is over, nor where the loop is."""
    for last in (7, 12):
        place = tmp_path / str(last)
        place.mkdir()
        do(make(Session(place)), 0, 9)
        now = Session(place, 1)
        now.breaks = True
        do(make(now), 5, last)
        assert now.events[-1][0] == "degraded"
