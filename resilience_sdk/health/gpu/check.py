"""The form of one question to one GPU: reading it may hang, judging what was read is pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from resilience_sdk.health.findings import Finding
from resilience_sdk.health.probes import Context


@attrs.frozen
class Device:
    """One GPU as NVML sees it."""

    subject: str  # GPU 3
    handle: Any = None
    mig: str = ""  # the instance that is the job's, where the GPU is divided


@attrs.frozen
class Check:
    """One question.

    `read(nvml, device, context)` asks the driver, raises NVMLError and may hang; `judge(subject, what was read)`
    is a pure function.
    """

    name: str
    read: Callable[[Any, Device, Context], Any]
    judge: Callable[[str, Any], Iterable[Finding]]
