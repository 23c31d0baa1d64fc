"""How many steps are complete: the one place in which the number of a step becomes an amount."""

from __future__ import annotations

import contextlib

import pytest

from resilience_sdk import heartbeat
from resilience_sdk.recorder import lookup


def counted(recording):
    """What the page says, which the rank itself says as well."""
    steps = recording.snapshot().completed_steps
    assert lookup.recorder().owner.completed_steps() == steps
    return steps


def test_a_step_counts_when_it_is_over(recording):
    """Not within it."""
    assert counted(recording) is None
    for step in range(3):
        with heartbeat(step=step):
            assert counted(recording) == step
            assert lookup.recorder().owner.completed_steps(at_end_of=step) == step + 1
        assert counted(recording) == step + 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_step_that_an_exception_ended_is_none(recording, error):
    """Until the next one; a step that was left by `exit()` counts, as does one that was left by `break`."""
    with heartbeat(step=10):
        pass
    with contextlib.suppress(error), heartbeat(step=11):
        raise error
    assert recording.snapshot().completed_steps == 11
    with heartbeat(step=11):
        pass
    assert recording.snapshot().completed_steps == 12
    with contextlib.suppress(SystemExit), heartbeat(step=12):
        raise SystemExit(75)
    assert recording.snapshot().completed_steps == 13


def test_a_step_that_a_generator_holds_open_at_the_end_of_the_process_is_none(recording):
    """An exception in the loop's body reaches the generator only when that is collected."""

    def steps():
        for step in range(5):
            with heartbeat(step=step):
                yield step

    walk = steps()
    for _ in range(3):
        next(walk)
    lookup.recorder().owner.note_end_by_exception()
    walk.close()
    assert recording.snapshot().completed_steps == 2


def test_steps_without_numbers_are_counted_by_nobody(recording):
    """They count those of this attempt alone."""
    with heartbeat():
        pass
    assert recording.snapshot().completed_steps is None
