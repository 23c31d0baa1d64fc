"""Telemetry: what the journal and the rank pages say, told to Prometheus, OpenTelemetry, webhooks and trackers.

One process per node and run, `python -m resilience_sdk.telemetry`, follows the journal; each sink has a thread and a
position of its own in it (`worker`). `tally` and `spans` are pure functions of the events; `sinks` translate.
"""
