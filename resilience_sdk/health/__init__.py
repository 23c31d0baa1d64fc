"""Health: what a node, its devices and what it reaches can do right now.

    from resilience_sdk import health

A *probe* looks at one part of the world in a process of its own (`probe_main`), because a driver or a mount may hang
for ever; what it saw are *findings*, each with its evidence and its cure. `probes` and `probes.json` are the table of
all of them, `runner` starts them and waits no longer than their deadlines, `checkup` decides which a job needs, `watch`
what is looked at while it runs, `pairwise` and `pairwise_verdict` which node of several is to be left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilience_sdk.health.checkup import preflight
    from resilience_sdk.health.findings import Finding, HealthReport, Status, compare

__all__ = ["Finding", "HealthReport", "Status", "compare", "preflight"]


def __getattr__(name: str) -> Any:
    # Looked up at the first use: the processes of the probes need none of it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{'checkup' if name == 'preflight' else 'findings'}")
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
