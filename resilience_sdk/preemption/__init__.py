"""Preemption: who asks a job to leave, and how all its ranks stop at one step.

In come signals (`signals`), requests, clouds (`cloud`) and schedulers (`context`); out comes one check at which all
ranks leave. `agreement` decides that, with its words in the page directory; `reduce` does where no monitor coordinates;
`listener` is `check()` on the thread that trains; `reasons` says who asked. How it went, tells `postmortem/`.
"""

from resilience_sdk.preemption.listener import check, exit, request, time_left

__all__ = ["check", "exit", "request", "time_left"]
