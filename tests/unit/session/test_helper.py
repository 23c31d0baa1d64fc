"""What the helper thread of a rank answers."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from resilience_sdk.hang.flight import parse_flight_record
from resilience_sdk.session.helper import HelperThread, merge_records

RECORD = Path(__file__).parent.parent / "hang" / "data" / "flight-late-0.json"


def test_the_records_of_two_kinds_of_device_become_one():
    """A job with NCCL for tensors and gloo for objects has two recorders; the analysis reads both."""
    gloo = json.loads(RECORD.read_text())
    nccl = json.loads(RECORD.read_text())
    nccl["pg_status"]["0"]["last_enqueued_collective"] = "9"
    both = parse_flight_record(json.dumps(merge_records(gloo, nccl)))
    assert both is not None
    assert {name: position.enqueued for name, position in both.positions().items()} == {"0": 4, "0 (nccl)": 9}


def test_the_end_of_the_process_waits_for_the_round_that_is_on(tmp_path):
    """A thread inside a call of torch must be out of it before the interpreter goes down, but not at any price."""
    began, may_end = threading.Event(), threading.Event()

    def periodic() -> None:
        began.set()
        may_end.wait(60)

    helper = HelperThread(tmp_path / "rank", periodic=periodic)
    helper.start()
    assert began.wait(60)
    asked = time.monotonic()
    helper.close(patience_s=0.05)
    assert 0.05 <= time.monotonic() - asked < 30
    may_end.set()
    helper.close(patience_s=60)
    assert not helper._thread.is_alive()
