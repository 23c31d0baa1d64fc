"""Preemption: who asks a job to leave, and how all its ranks stop at one step.

if preemption.check():      # True on every rank at the same step
    save()
    preemption.exit()       # leaves with 75
"""

from resilience_sdk.preemption.rank import check, exit, request, time_left

__all__ = ["check", "exit", "request", "time_left"]
