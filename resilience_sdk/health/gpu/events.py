"""Xid events that the driver reports while somebody listens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.gpu import nvml as codes
from resilience_sdk.health.gpu.rules import found

_XID = 0x8  # nvmlEventTypeXidCriticalError
_TOGETHER_S = 0.5  # a GPU that fails reports several Xids
_STORM = 64  # events after which the end of the time ends it; fewer are all taken
_WAITS = frozenset({"gpu_row_remap_pending"})  # the GPU can be used until its next reset
_LOOK_S = 5.0  # one wait in the driver; short enough that a lost timeout costs little


def listen(nvml: Any, gpus: Sequence[int], seconds: float) -> Iterator[Finding]:
    """Yield one finding for each Xid event of these GPUs until `seconds` have passed, or one that there was none.

    The first event leaves time for those that come with it and no more, so that it is told soon. Blocks in the driver,
    which costs no processor time. Raises NVMLError.
    """
    events = nvml.nvmlEventSetCreate()
    heard = []
    for index in gpus:
        try:
            nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(index), _XID, events)
        except Exception as error:
            if codes.code_of(error) is None:
                raise
            continue  # what ails this GPU its own checks tell
        heard.append(index)
    if not heard:
        yield found("xid", "", Status.UNAVAILABLE, evidence="no GPU of this node reports events")
        return
    seen, ends = 0, time.monotonic() + seconds
    while True:
        left = ends - time.monotonic()
        try:
            event = nvml.nvmlEventSetWait(events, int(1000 * max(0.0, min(left, _LOOK_S))))
        except Exception as error:
            if codes.code_of(error) != codes.TIMEOUT:
                raise
            if left <= _LOOK_S:
                break
            continue
        if event.eventType == _XID:
            seen += 1
            ends = min(ends, time.monotonic() + _TOGETHER_S)
            yield judge_xid(f"GPU {nvml.nvmlDeviceGetIndex(event.device)}", event.eventData)
        if left <= 0 and seen >= _STORM:
            break
    if not seen:
        yield found("xid", "", Status.OK, value=0, evidence=f"none within {seconds:g} s")


def judge_xid(subject: str, number: int) -> Finding:
    """Judge one Xid by the SDK's table of causes: the hardware's own fail the GPU, those of programs do not."""
    # Late: it reads the whole table of causes, and an Xid is rare.
    from resilience_sdk.attribution.signatures import xid_causes
    from resilience_sdk.attribution.taxonomy import lookup

    cause = xid_causes().get(number)
    if cause is None:
        return found("xid", subject, Status.DEGRADED, value=number, evidence=f"Xid {number}")
    entry = lookup(cause)
    hardware = entry.action == "exclude_node" and cause not in _WAITS
    status = Status.FAILED if hardware else Status.DEGRADED
    evidence = f"Xid {number}: {entry.meaning}"
    return found("xid", subject, status, value=number, evidence=evidence, data={"cause": cause})
