"""From a measured value to a status, and to text. Pure."""

from __future__ import annotations

from typing import Any

from resilience_sdk.health.findings import Finding, Status

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def low(value: float, *, degraded: float, failed: float = float("-inf")) -> Status:
    """Return the status of a value of which there can be too little; the limits themselves are good."""
    return Status.FAILED if value < failed else Status.DEGRADED if value < degraded else Status.OK


def high(value: float, *, degraded: float, failed: float = float("inf")) -> Status:
    """Return the status of a value of which there can be too much; the limits themselves are good."""
    return Status.FAILED if value > failed else Status.DEGRADED if value > degraded else Status.OK


def size(count: float) -> str:
    """Return bytes as a person reads them: `64 MiB`, `1.5 GiB`."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} bytes"


def judged(*, status: Status, cure: str, **fields: Any) -> Finding:
    """Return a finding that keeps its cure only where something is wrong."""
    return Finding(status=status, cure="" if status is Status.OK else cure, **fields)
