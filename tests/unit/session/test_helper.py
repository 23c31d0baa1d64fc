"""What the helper thread of a rank answers."""

from __future__ import annotations

import json
from pathlib import Path

from resilience_sdk.hang.flight import parse_flight_record
from resilience_sdk.session.helper import merge_records

RECORD = Path(__file__).parent.parent / "hang" / "data" / "flight-late-0.json"


def test_the_records_of_two_kinds_of_device_become_one():
    """A job with NCCL for tensors and gloo for objects has two recorders; the analysis reads both."""
    gloo = json.loads(RECORD.read_text())
    nccl = json.loads(RECORD.read_text())
    nccl["pg_status"]["0"]["last_enqueued_collective"] = "9"
    both = parse_flight_record(json.dumps(merge_records(gloo, nccl)))
    assert both is not None
    assert {name: position.enqueued for name, position in both.positions().items()} == {"0": 4, "0 (nccl)": 9}
