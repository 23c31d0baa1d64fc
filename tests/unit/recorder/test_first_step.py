"""What the page tells of the time before the first completed step: in that nobody is compared."""

from __future__ import annotations

import pytest
from recording import Recording

from resilience_sdk import heartbeat
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.straggler import section


def before(recording: Recording) -> dict[tuple[str, str], int | None]:
    """Return name and kind -> how many passes came before the first step was complete; None: that is still awaited."""
    return {(new.name, new.kind): new.before for new in recording.reader.passes()}


def fetch(often: int) -> None:
    """Pass the section `data`."""
    for _ in range(often):
        with section("data", kind="io"):
            pass


def test_passes_before_the_end_of_the_first_step_are_told(recording):
    """Batches that are read again, and those of the first step; of what begins later there are none."""
    recording.recorder.user_beats()
    fetch(40)
    assert before(recording) == {("data", "io"): None}
    with heartbeat():
        fetch(1)
    with heartbeat(), section("fwd"):
        fetch(1)
    assert before(recording) == {("data", "io"): 41, ("step", "heartbeat"): 1, ("fwd", "compute"): 0}


def test_time_on_the_device_comes_late_and_has_as_many_passes(recording):
    """What the device has done of the first step is known after its end."""
    with heartbeat(), section("fwd"):
        device = recording.recorder.on_device(recording.recorder.block("fwd", "compute", None))
    with section("fwd"):
        device.sample(5)
        device.sample(5)
    assert before(recording)["fwd", "gpu"] == 1


@pytest.mark.parametrize("by", ["a heartbeat", "pulses"])
def test_steps_of_optimizers_that_load_their_state_are_no_steps_of_the_loop(recording, by):
    """One pulse alone is none, and all of them are none where the script then beats."""
    recording.page.words[at.W_BEAT_SOURCE] = at.BEATS_OPTIMIZER
    for _ in range(3 if by == "a heartbeat" else 1):
        recording.recorder.pulse(None)
    fetch(40)
    if by == "a heartbeat":
        with heartbeat():
            fetch(1)
        assert before(recording)["data", "io"] == 41
    else:
        assert before(recording)["data", "io"] is None
        recording.recorder.pulse(None)
        fetch(1)
        assert before(recording)["data", "io"] == 40


def test_a_script_that_makes_no_steps_is_compared_at_once(recording):
    """Nobody knows of a step that is to come, unless there is an optimizer."""
    fetch(3)
    assert before(recording) == {("data", "io"): 0}
    recording.page.set_flag(at.FLAG_TRAINS)
    fetch(3)
    assert before(recording) == {("data", "io"): None}


def test_a_section_of_the_users_in_that_of_the_same_name_counts_once(recording):
    """`Run.steps(straggler.iterate(loader))`, or a dataset with a section `data`: each batch is one pass of it."""
    with section("data", kind="io"):
        fetch(2)
    assert [len(new.samples_ns) for new in recording.reader.passes()] == [1]
