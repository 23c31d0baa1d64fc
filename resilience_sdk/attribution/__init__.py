"""From facts to causes: what an exit, an exception, an order of deaths or a log means.

`diagnose(source)` gives the verdict on a log, an exception or a run directory. All but `diagnosis` is pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilience_sdk.attribution.diagnosis import diagnose
    from resilience_sdk.attribution.verdict import Quote, Suspect, Verdict

# Looked up at the first use: the monitor and the launcher need the rules, not the reading of logs.
_PUBLIC = {"Quote": "verdict", "Suspect": "verdict", "Verdict": "verdict", "diagnose": "diagnosis"}

__all__ = ["Quote", "Suspect", "Verdict", "diagnose"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
