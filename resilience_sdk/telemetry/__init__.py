"""Telemetry: what the journal and the rank pages say, told to Prometheus, OpenTelemetry, webhooks and trackers.

In come a journal that grows (`tail`) and live pages (`live`); out go metrics, spans and events. `metrics` is the table
of every metric, `tally`, `goodput` and `spans` are pure functions of events, `worker` keeps one sink going whatever its
server does, `exporter` is the process of them all. A sink is one file under `sinks/`.
"""
