"""What the deadlines are learned from."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

from resilience_sdk.core.settings import Settings
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.page_layout import FLAG_KEEPS_TIMEOUTS
from resilience_sdk.straggler import section


def test_time_on_the_gpu_has_no_deadline(recording, tmp_path):
    """Nobody waits in it: a section is learned from its wall time alone."""
    with section("fwd"):
        pass
    block = lookup.find_own_block("fwd", "compute")
    for _ in range(3):
        recording.recorder.on_device(block).sample(10**9)
        with section("fwd"):
            pass
    learner = Learner(tmp_path / "timeouts.json", Settings(), "train.py")
    learner.begin_attempt(1, 1)
    rank = SimpleNamespace(reader=recording.reader, snapshot=recording.snapshot(), stem=recording.page.path)
    learner.look(rank, time.monotonic_ns())
    learner.save()
    learned = (tmp_path / "timeouts.json").read_text()
    assert "section:fwd" in learned
    assert "gpu" not in learned
    (job,) = learner.book.to_json()["jobs"]
    assert max(job["entries"]["section:fwd"]["window"]) < 1.0


def test_a_program_that_wants_no_timeouts_calculated_teaches_none(recording, tmp_path):
    """`calculate_timeouts=False`: the defaults hold, also over what a job before has learned, and the file says so."""
    path = tmp_path / "timeouts.json"
    rank = SimpleNamespace(reader=recording.reader, stem=recording.page.path, snapshot=None)
    for keeps in (False, True):
        recording.page.set_flag(FLAG_KEEPS_TIMEOUTS, keeps)
        for _ in range(3):
            with section("fwd"):
                pass
        learner = Learner(path, Settings(timeout_floor=1), "train.py")
        learner.begin_attempt(1, 1)
        rank.snapshot = recording.snapshot()
        assert learner.look(rank, time.monotonic_ns())  # others want to know of it all the same
        learner.save()
        (job,) = json.loads(path.read_text())["jobs"]
        assert (job["learns"], "section:fwd" in job["entries"]) == (not keeps, not keeps)
    assert learner.book.step_limit().seconds == 600
    assert learner.book.startup_limit().seconds == 3600
