"""What the deadlines are learned from."""

from __future__ import annotations

import time
from types import SimpleNamespace

from resilience_sdk.core.settings import Settings
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.recorder import lookup
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
