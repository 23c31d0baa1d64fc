"""Fits of Lightning that are killed, or asked to leave, and go on: all is as in a fit that was never disturbed.

Samples, augmentations, losses, learning rates, metrics of epochs, records of the logger, validations, the files of
`ModelCheckpoint`, weights and generators are compared bit for bit, with a fit without the SDK.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow
SCRIPT = "lightning_exact.py"
DAILY = ("distributed", "plain", "stream", "often")
OTHERS = ("unsized", "steps", "shuffled", "generator", "workers", "own", "two", "accumulated", "reloaded", "short")


def read(path):
    """Return what was told, by its key; what was done twice counts as it was the last time."""
    return {json.dumps(key): facts for key, facts in map(json.loads, path.read_text().splitlines())}


def references(folder, loops, package="lightning.pytorch"):
    """Run these without the SDK, and return what they told."""
    with job(folder, SCRIPT, "undisturbed", *loops, command=(sys.executable,), env={"LIGHTNING": package}) as run:
        assert run.finish() == 0, run.screen
    return {loop: read(folder / "told" / loop) for loop in loops}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the loops of each day come to."""
    require("lightning.pytorch", "lightning")
    require("torchdata")
    return references(told_in(tmp_path_factory.mktemp("undisturbed")), DAILY)


@pytest.fixture(scope="module")
def more_undisturbed(tmp_path_factory):
    """What the others come to."""
    require("lightning.pytorch", "lightning")
    require("torchdata")
    return references(told_in(tmp_path_factory.mktemp("undisturbed")), OTHERS)


def told_in(folder):
    (folder / "told").mkdir()
    return folder


def start(folder, loop, code, every, **env):
    """Fit a loop in a process of its own, which ends with `code`; return its screen."""
    env = {"EVERY": str(every), **{name: str(value) for name, value in env.items()}}
    with job(folder, SCRIPT, loop, command=(sys.executable,), env=env) as run:
        assert run.finish() == code, run.screen
        return run.screen


def expect_equal(folder, loop, reference):
    """Compare all that was told."""
    found = read(folder / "told" / loop)
    assert [key for key in reference if key not in found] == []
    assert [key for key in found if key not in reference] == []
    assert {key: facts for key, facts in found.items() if facts != reference[key]} == {}


def steps_of(folder, loop):
    """Return how many steps have come to their end."""
    keys = [json.loads(key) for key in read(folder / "told" / loop)]
    return max(key[1] for key in keys if key[0] == "batch end")


@pytest.mark.parametrize(
    ("loop", "every", "kill"),
    [("distributed", 5, 18), ("plain", 12, 14), pytest.param("stream", 5, 8, marks=pytest.mark.release)],
)
def test_a_killed_fit_goes_on_as_if_nothing_had_been(tmp_path, undisturbed, loop, every, kill):
    """With the order of its epoch; at the end of an epoch; where a batch was fetched ahead."""
    told_in(tmp_path)
    start(tmp_path, loop, -9, every, KILL_AT=kill)
    start(tmp_path, loop, 0, every)
    expect_equal(tmp_path, loop, undisturbed[loop])


def test_a_fit_that_is_asked_to_leave_owes_the_validation_for_which_no_time_is_left(tmp_path, undisturbed):
    """It is made first at the resume; what the module and later callbacks do behind the last batch is in the save."""
    told_in(tmp_path)
    start(tmp_path, "often", 75, 1000, STOP_AT=4, VALIDATION_S=3, RESILIENCE_PREEMPT_TIME=2.5)
    stopped = steps_of(tmp_path, "often")
    last = [json.loads(line)[0] for line in (tmp_path / "told" / "often").read_text().splitlines()][-2:]
    assert ["batch end", stopped] in last, last  # a record may follow it, and no validation
    start(tmp_path, "often", 0, 1000)
    expect_equal(tmp_path, "often", undisturbed["often"])


@pytest.mark.release
@pytest.mark.parametrize(
    ("loop", "every", "kills"),
    [
        ("distributed", 12, (14,)),
        ("reloaded", 4, (21,)),
        ("reloaded", 6, (18,)),
        ("plain", 5, (8,)),
        ("plain", 4, (5, 6, 13)),
        ("stream", 12, (14,)),
        ("unsized", 5, (8,)),
        ("unsized", 12, (14,)),
        ("steps", 5, (8,)),
        ("steps", 12, (14,)),
        ("shuffled", 5, (18,)),
        ("shuffled", 12, (14,)),
        ("generator", 5, (18,)),
        ("generator", 12, (14,)),
        ("workers", 5, (18,)),
        ("own", 5, (18,)),
        ("two", 5, (8,)),
        ("two", 12, (14,)),
        ("accumulated", 2, (5,)),
        ("accumulated", 3, (5,)),
        ("often", 5, (8,)),
        ("short", 5, (8,)),
    ],
)
def test_killed_fits_of_all_kinds_go_on(tmp_path, undisturbed, more_undisturbed, loop, every, kills):
    """Once and several times in a row, in the middle of an epoch and at its end."""
    told_in(tmp_path)
    for kill in kills:
        start(tmp_path, loop, -9, every, KILL_AT=kill)
    start(tmp_path, loop, 0, every)
    expect_equal(tmp_path, loop, {**undisturbed, **more_undisturbed}[loop])


@pytest.mark.release
@pytest.mark.parametrize(
    ("loop", "stop", "slow"),
    [
        ("distributed", 3, {}),
        ("plain", 8, {}),
        ("steps", 9, {}),
        ("stream", 7, {}),
        ("short", 5, {}),
        ("short", 5, {"EPOCH_END_S": 3, "RESILIENCE_PREEMPT_TIME": 2.5}),
        ("short", 5, {"VALIDATION_S": 3, "RESILIENCE_PREEMPT_TIME": 2.5}),
    ],
)
def test_fits_that_are_asked_to_leave_go_on(tmp_path, undisturbed, more_undisturbed, loop, stop, slow):
    """Between batches and behind an epoch; before the end of an epoch or a validation that would take too long."""
    told_in(tmp_path)
    start(tmp_path, loop, 75, 1000, STOP_AT=stop, **slow)
    start(tmp_path, loop, 0, 1000)
    expect_equal(tmp_path, loop, {**undisturbed, **more_undisturbed}[loop])


@pytest.mark.release
def test_the_other_package_is_as_exact(tmp_path):
    """`pytorch_lightning` is a copy with classes of its own."""
    require("pytorch_lightning")
    require("torchdata")
    package = "pytorch_lightning"
    reference = references(told_in(tmp_path), ("distributed",), package)["distributed"]
    folder = tmp_path / "disturbed"
    folder.mkdir()
    told_in(folder)
    start(folder, "distributed", -9, 12, KILL_AT=14, LIGHTNING=package)
    start(folder, "distributed", 0, 12, LIGHTNING=package)
    expect_equal(folder, "distributed", reference)
