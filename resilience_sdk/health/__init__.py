"""What the node, its devices and its surroundings can do right now: probes, their findings, and the preflight.

    from resilience_sdk import health

A *probe* looks at one part of the world in a process of its own, because a driver or a mount may hang for ever;
what it saw are *findings*, each with its evidence and its cure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilience_sdk.health.checkup import preflight
    from resilience_sdk.health.findings import Finding, Status
    from resilience_sdk.health.report import HealthReport
    from resilience_sdk.health.software.comparing import compare

# Looked up at the first use: the processes of the probes need none of it.
_PUBLIC = {
    "Finding": "findings",
    "HealthReport": "report",
    "Status": "findings",
    "compare": "software.comparing",
    "preflight": "checkup",
}

__all__ = ["Finding", "HealthReport", "Status", "compare", "preflight"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
