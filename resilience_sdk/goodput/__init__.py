"""Goodput: where the time of a run went, why its steps are slow, and what a checkpoint interval costs. Pure.

In come the journal's events (`ledger`, `step_time`) or a job's size and rates (`plan`); out go seconds by bucket,
shares of a step with one sentence about them, and expected shares of useful time. `ledger` decides what each second
was, `buckets` says what that means, `summary` makes ratios of it; `slowness` decides which sentence the evidence
carries. `telemetry` tells the same as metrics, `cli` prints it.
"""
