"""Timed sections, guarded by learned deadlines and compared across ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from resilience_sdk.straggler.sections import iterate, section

if TYPE_CHECKING:
    from resilience_sdk.straggler.attaching import attach
    from resilience_sdk.straggler.listening import on_verdict, report
    from resilience_sdk.straggler.plots import log_to
    from resilience_sdk.straggler.roles import set_role
    from resilience_sdk.straggler.telling import work

__all__ = ["attach", "iterate", "log_to", "on_verdict", "report", "section", "set_role", "work"]

# name -> module: what a loop of sections alone does not need to load
_LATE = {
    "attach": "attaching",
    "log_to": "plots",
    "on_verdict": "listening",
    "report": "listening",
    "set_role": "roles",
    "work": "telling",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    globals()[name] = value
    return value
