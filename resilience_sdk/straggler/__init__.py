"""Stragglers: timed sections, guarded by learned deadlines and compared across ranks.

In come durations of sections, by `with` (`sections`) or by hooks on a model (`attachment`, `model_hooks`, `passes`),
on the wall clock, on the device (`gpu`) and of single kernels (`kernels`); out come verdicts, reports and callbacks.
Each node collects windows (`windowing`, `window_messages`), one puts those of all together. `detector`
decides who is slow in a window, by the `section_history` of each rank, or that all are (`regression`, with the amounts
of `workload`); `verdicts` how long that lasts. `reports` has the scores; `published` is what of it stands in the run
directory, for the `callbacks` of a rank. The monitor runs this, torch-free, and decides what follows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from resilience_sdk.straggler.sections import iterate, section

if TYPE_CHECKING:
    from resilience_sdk.straggler.attachment import attach
    from resilience_sdk.straggler.callbacks import log_to, on_verdict, report
    from resilience_sdk.straggler.workload import set_role, work

__all__ = ["attach", "iterate", "log_to", "on_verdict", "report", "section", "set_role", "work"]

# name -> module: what a loop of sections alone does not need to load
_LATE = {
    "attach": "attachment",
    "log_to": "callbacks",
    "on_verdict": "callbacks",
    "report": "callbacks",
    "set_role": "workload",
    "work": "workload",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    globals()[name] = value
    return value
