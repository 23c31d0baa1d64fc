"""A save that the end of the time to leave has cut: found where it is known, told with its place, and cured."""

from __future__ import annotations

import time

import attrs
import pytest

from resilience_sdk.postmortem.cut_saves import find_cut
from resilience_sdk.postmortem.facts import AttemptFacts, EndedBy, RankExit, RankTrace
from resilience_sdk.postmortem.preemption import account

SAVES = """Current thread 0x00007f00 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/serialization.py", line 950 in save
  File "/home/me/train.py", line 31 in keep
  File "/home/me/train.py", line 60 in <module>
"""
COMPUTES = """Current thread 0x00007f00 (most recent call first):
  File "/home/me/train.py", line 8 in forward
  File "/v/lib/python3.11/site-packages/torch/utils/checkpoint.py", line 496 in checkpoint
  File "/home/me/train.py", line 60 in <module>
"""
EVALUATES = """Current thread 0x00007f00 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125 in forward
  File "/home/me/train.py", line 12 in evaluate
  File "/home/me/train.py", line 14 in save_model_and_evaluate
  File "/v/lib/python3.11/site-packages/transformers/trainer.py", line 14 in _maybe_log_save_evaluate
  File "/home/me/train.py", line 60 in <module>
"""
SAVES_BEHIND = """Thread 0x00007f01 [keeper] [77] (most recent call first):
  File "/home/me/slow.py", line 5 in write
  File "/v/lib/python3.11/site-packages/torch/serialization.py", line 950 in save
  File "/home/me/train.py", line 31 in keep
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f00 [MainThread] [76] (most recent call first):
  File "/home/me/train.py", line 12 in forward
  File "/home/me/train.py", line 60 in <module>
"""
WAITS = """Current thread 0x00007f00 (most recent call first):
  File "/home/me/train.py", line 12 in upload
  File "/home/me/train.py", line 60 in <module>
"""


@attrs.frozen
class Told:
    """The events of an attempt."""

    told: list[dict[str, object]]

    def events(self) -> list[dict[str, object]]:
        """Return them."""
        return self.told


def facts(*exits: RankExit, stacks: str | None = None, stopped: bool = True) -> AttemptFacts:
    """Two ranks that stopped 8 s ago after step 30, of which these ended."""
    now = time.time()
    told = [{"event": "preempt_notice", "t": now - 8.1, "source": "SIGTERM", "rank": None, "time_left_s": 8.0}]
    if stopped:
        told += [{"event": "stop_agreed", "t": now - 8.0, "rank": rank, "step": 30} for rank in (0, 1)]
    traces = {end.rank: RankTrace(end.rank, end.pid, None, None, None, stacks) for end in exits}
    return AttemptFacts(0, "n0", exits, traces, EndedBy.PREEMPTION, journal=Told(told))  # type: ignore[arg-type]


def ended(rank: int, code: int, *, by_us: bool = True) -> RankExit:
    """A rank that ended now."""
    return RankExit(rank, rank, 100 + rank, code, rank, time.monotonic_ns(), by_us)


def test_a_save_of_the_scripts_own_that_was_cut_comes_first_with_its_line_and_its_cure():
    """In the reason, and as the first evidence of the incident; what the script saved is not said to be kept."""
    found = facts(ended(1, 75, by_us=False), ended(0, -9), stacks=SAVES)
    cut = find_cut(found)
    story = account(found.events, {}, node="n0", saved=None, saved_here=False, died={}, cut=cut)
    assert str(cut) == (
        "rank 0 was ended while saving (in torch.save at train.py:31 keep()), 8.0 s after all ranks had stopped: "
        "the 8 s to leave were over"
    )
    assert story.reason().startswith(f"{cut}; what was being written is not whole")
    assert "all ranks stopped after 30 steps" in story.reason()
    assert story.reason().endswith("to do: raise preempt_time (--preempt-time) to well above 8 s")
    assert "what the script saved itself is kept" not in story.reason()
    incident = story.incident(0, 1.0, {0: -9, 1: 75})
    assert incident.evidence[0].text.startswith(str(cut))


@pytest.mark.parametrize(
    ("exits", "stacks", "stopped", "words"),
    [
        ((ended(0, -9),), WAITS, True, "rank 0 was ended before leaving by itself (in train.py:12 upload())"),
        ((ended(0, -9), ended(1, -9)), None, True, "ranks 0-1 were ended before leaving by themselves"),
        ((ended(0, -9),), SAVES, False, "rank 0 was ended while saving"),  # a handler of the script's own
        ((ended(0, -9),), WAITS, False, None),
        ((ended(0, -9),), COMPUTES, False, None),  # activations are kept, not a state
        ((ended(0, -9),), EVALUATES, False, None),  # what it is in says more than the name of who called that
        ((ended(0, -9),), SAVES_BEHIND, False, "rank 0 was ended while saving (in torch.save at train.py:31 keep())"),
        ((ended(0, 75, by_us=False), ended(1, 0, by_us=False)), None, True, None),
        ((ended(0, 1, by_us=False),), None, True, None),
    ],
)
def test_only_who_had_stopped_or_saves_was_cut(exits, stacks, stopped, words):
    """Who left by itself was not, nor who failed; without a stack nobody claims that it saved."""
    cut = find_cut(facts(*exits, stacks=stacks, stopped=stopped))
    assert (cut is None) if words is None else str(cut).startswith(words)


def test_a_stack_of_a_stall_before_the_request_does_not_show_the_end():
    """A save that had stalled for a while went on long ago; where the rank is now nobody knows."""
    before = facts(ended(0, -9), stacks=SAVES, stopped=False)
    old_ns = time.monotonic_ns() - int(60e9)
    traces = {0: attrs.evolve(before.traces[0], stacks_ns=old_ns)}
    assert find_cut(attrs.evolve(before, traces=traces)) is None
    traces = {0: attrs.evolve(before.traces[0], stacks_ns=old_ns + int(57e9))}
    assert find_cut(attrs.evolve(before, traces=traces)) is not None


def test_who_else_ended_it_is_not_said_to_have_kept_to_our_time():
    """Under torchrun nobody here knows how long there was."""
    cut = find_cut(facts(ended(0, -9, by_us=False)))
    assert cut is not None
    assert "to leave were over" not in str(cut)
    assert "torchrun does after 30 s" in cut.cure


def test_a_rank_that_the_signal_ended_at_once_names_its_file_and_no_time():
    """Nothing there handles the signal, so more time cures nothing; what was seen before it was sent is its end."""
    found = facts(ended(0, -15), ended(1, -15), stacks=SAVES, stopped=False)
    sent = {"event": "signal_sent", "t": time.time(), "rank": None, "signal": "SIGTERM", "unheard": [0, 1]}
    found.journal.told.append(sent | {"writing": {"0": "/ckpt/step-20.pt", "x": "/a", "1": 7}})
    cut = find_cut(found)
    story = account(found.events, {}, node="n0", saved=None, saved_here=False, died={}, cut=cut)
    assert str(cut) == (
        "ranks 0-1 were ended while saving step-20.pt (in torch.save at train.py:31 keep()) by SIGTERM, which nothing "
        "there handles"
    )
    assert cut.lost.startswith("/ckpt/step-20.pt is not whole")
    assert (
        story.advice
        == "call preemption.check() once per step on every rank, or train by run.steps(), which saves and stops"
    )
