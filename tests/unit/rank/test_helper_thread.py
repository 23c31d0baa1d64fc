"""What the helper thread of a rank answers."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from resilience_sdk.hang.evidence import frames_of, parse_faulthandler, parse_flight_record
from resilience_sdk.rank.helper_thread import HelperThread, merge_records, thread_stacks

RECORD = Path(__file__).parent.parent / "hang" / "data" / "flight-late-0.json"


def test_the_records_of_two_kinds_of_device_become_one():
    """A job with NCCL for tensors and gloo for objects has two recorders; the analysis reads both."""
    gloo = json.loads(RECORD.read_text())
    nccl = json.loads(RECORD.read_text())
    nccl["pg_status"]["0"]["last_enqueued_collective"] = "9"
    both = parse_flight_record(json.dumps(merge_records(gloo, nccl)))
    assert both is not None
    assert {name: position.enqueued for name, position in both.positions().items()} == {"0": 4, "0 (nccl)": 9}


def test_the_stack_of_any_thread_can_be_found_by_the_kernels_number():
    """Two threads of one name, in different places: each number leads to the stack of its own."""
    reached, may_end = threading.Barrier(3), threading.Event()

    def wait_here():
        reached.wait(60)
        may_end.wait(60)

    def wait_there():
        reached.wait(60)
        may_end.wait(60)

    threads = [threading.Thread(target=place, name="train [1]") for place in (wait_here, wait_there)]
    for thread in threads:
        thread.start()
    reached.wait(60)
    stacks = []
    asked = threading.Thread(target=lambda: stacks.append(thread_stacks()))  # leaves out the one that asks
    asked.start()
    asked.join()
    may_end.set()
    told = parse_faulthandler(stacks[0])
    for thread, place in zip(threads, ("wait_here", "wait_there"), strict=True):
        assert any(frame.endswith(f" {place}") for frame in frames_of(told, thread.native_id or 0))
    assert frames_of(told, 2**22 + 1) == ()


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
