"""Telemetry: what the journal and the rank pages say, told to Prometheus, OpenTelemetry, webhooks and trackers.

In come a journal that grows and live pages (`tail`); out go metrics, spans and events. `metrics` is the table of every
metric, `tally` is a pure function of events, `exporter` is the process, which keeps each sink going
whatever its server does. A sink is one file under `sinks/`.
"""
