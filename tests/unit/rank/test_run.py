from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from resilience_sdk.errors import ConfigError, ResilienceError
from resilience_sdk.rank import run as runs
from resilience_sdk.rank.run import Run, current_run


def test_a_run_that_records_nothing_still_yields_its_steps():
    """Where the SDK is switched off, the loop is the plain loop: all epochs, numbered steps, no files."""
    with Run(None, {"model": object()}) as run:
        assert list(run.steps("abc", epochs=2)) == list(enumerate("abcabc"))
        assert (run.step, run.epoch, run.attempt, run.preempted) == (6, 2, 0, False)
        run.values["best"] = 1
        assert run.checkpointer.save(6) is False
        assert run.checkpointer.last_good is None


def test_max_steps_ends_the_loop_over_all_calls():
    """`max_steps` counts steps from the very first, wherever they were done."""
    with Run(None, None) as run:
        assert [step for step, _ in run.steps("abc", epochs=9, max_steps=4)] == [0, 1, 2, 3]
        assert list(run.steps("abc", max_steps=4)) == []


def test_each_call_takes_the_next_epochs():
    """A loop over epochs of one's own gets one epoch per call."""
    with Run(None, None) as run:
        epochs = [[(run.epoch, step) for step, _ in run.steps("ab")] for _ in range(3)]
    assert epochs == [[(0, 0), (0, 1)], [(1, 2), (1, 3)], [(2, 4), (2, 5)]]


def test_each_loop_of_a_run_is_guarded(recording):
    """The end of one `steps()` ends the deadlines, the next one takes them up again."""
    run = Run(None, None)
    run.session = SimpleNamespace(recorder=recording.recorder, may_resume=False)
    for _ in range(2):
        assert [recording.snapshot().done for _ in run.steps("ab")] == [False, False]
        assert recording.snapshot().done
    assert list(run.steps("ab", max_steps=4)) == []  # nothing is left to do
    assert recording.snapshot().done


def test_a_run_that_saves_nothing_asks_no_other_rank(recording, monkeypatch):
    """It may be that of one rank alone, and has nothing that all would have to be in."""
    monkeypatch.setattr(runs, "group_is_ready", lambda: True)
    monkeypatch.setattr(runs, "session_on_all_ranks", lambda _: pytest.fail("it waits for the others"))
    run = Run(None, None)
    run.session = SimpleNamespace(recorder=recording.recorder, may_resume=False)
    assert [step for step, _ in run.steps("ab")] == [0, 1]


def test_calls_whose_epochs_are_complete_yield_nothing_after_a_resume():
    """Resumed in its second epoch, a loop of one's own passes over the first call and goes on in the second."""
    with Run(None, None) as run:
        run._walk.restore({"epoch": 1, "batches": 1, "rng": None}, 1, 1)
        run.step = 3
        assert [list(run.steps("ab")) for _ in range(3)] == [[], [(3, "b")], [(4, "a"), (5, "b")]]


def test_a_loop_that_is_left_early_is_closed():
    """After `break` the open step ends at once; after an exception it ends with the run, which lets it through."""
    closed = []

    class Loader:
        def __iter__(self):
            try:
                yield from range(10)
            finally:
                closed.append(True)

    with Run(None, None) as run:
        for step, _ in run.steps(Loader()):
            if step == 2:
                break
        gc.collect()
        assert closed
        assert run.step == 2
    closed.clear()
    with pytest.raises(ValueError, match="mine"), Run(None, None) as run:
        for _ in run.steps(Loader()):
            raise ValueError("mine")


def test_the_current_run_is_known_inside_its_block_only():
    """`current_run()` gives the innermost run, and says what to do outside of one."""
    with pytest.raises(ResilienceError, match="start_run"):
        current_run()
    with Run(None, None) as outer:
        with Run(None, None) as inner:
            assert current_run() is inner
        assert current_run() is outer
    with pytest.raises(ResilienceError):
        current_run()


def test_a_run_is_entered_once():
    """A second `with` on the same run is an error that says what to do."""
    run = Run(None, None)
    with run:
        pass
    with pytest.raises(ResilienceError, match="once"), run:
        pass


@pytest.mark.parametrize(
    "options", [{"epochs": -1}, {"epochs": 1.5}, {"max_steps": "9"}, {"on_preempt": "stop"}, {"epochs": None}]
)
def test_bad_arguments_are_named(options):
    """A wrong argument raises at the call, not at the first batch."""
    with Run(None, None) as run, pytest.raises(ConfigError, match=next(iter(options))):
        run.steps([], **options)
