"""Events as log lines."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import pytest
from told_run import ToldRun

from resilience_sdk.core.journal import Event
from resilience_sdk.telemetry.sinks.console import Console


@pytest.mark.parametrize("form", ["text", "json"])
def test_every_event_is_a_line(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For people or as JSON; what a journal holds cannot steer a terminal."""
    run = ToldRun.make(tmp_path)
    run.begin()
    run.fail_and_recover()
    run.tell(Event.PROGRESS, steps=7, ranks=[0], own_ms=[81.25])
    run.tell(Event.DEGRADED, what="x", why="\x1b[2Jred\nherring")
    sink = Console(run.place(), form)
    sink.open()
    items = deque(item for line in run.lines() for item in sink.digest(line))
    count = len(items)
    sink.send(items)
    said = capsys.readouterr().err
    assert "\x1b[2J" not in said
    assert ("81.25" in said) == (form == "json")  # a row of a curve is for programs
    if form == "json":
        lines = [json.loads(line) for line in said.splitlines()]
        assert len(lines) == count
        assert [line["level"] for line in lines if line["event"] == "incident"] == ["error"]
        assert lines[0]["timestamp"].endswith("+00:00")
    else:
        assert "link_down" in said
        assert "incident" in said
