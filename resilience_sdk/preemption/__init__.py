"""Preemption: who asks a job to leave, and how all its ranks stop at one step.

In come signals (`signals`), requests, clouds (`cloud`) and schedulers (`context`); out comes one check at which all
ranks leave. `agreement` decides that where monitors coordinate, `reduce` where ranks agree by themselves; what either
comes to is written once, into a cell of `agreement`. `listener` is `check()` on the thread that trains; `reasons` says
who asked. How it went, tells `postmortem/`.
"""

from resilience_sdk.preemption.listener import check, exit, request, time_left

__all__ = ["check", "exit", "request", "time_left"]
