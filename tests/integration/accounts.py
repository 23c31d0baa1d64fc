"""The account of a run that is over, as `resilience goodput --json` prints it, held against clocks of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PROJECT

from resilience_sdk.core.journal import read_journal


def account_of(run_dir: Path) -> dict[str, float]:
    """Return the seconds of each bucket; fails if some second of the run is in none, or in two.

    The time from the first word of the run to its end, which is when a launcher says that it is finished, else its last
    word, is by the journal's wall clocks. The account does not use them: it adds up pieces of the monotonic ones.
    """
    command = [sys.executable, "-m", "resilience_sdk", "goodput", str(run_dir), "--json"]
    printed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert printed.returncode == 0, printed.stderr
    told = json.loads(printed.stdout)
    assert not told["running"]
    assert not told["problems"]
    # Steps that were done again are null where nobody counted them.
    buckets: dict[str, float] = {name: seconds or 0.0 for name, seconds in told["buckets"].items()}
    assert min(buckets.values()) >= 0
    events = read_journal(run_dir / "journal").events
    ends = [event for event in events if event["event"] == "decision" and event.get("verdict") == "finished"]
    passed_s = float((ends or events[-1:])[0]["t"]) - float(events[0]["t"])
    assert sum(buckets.values()) == pytest.approx(passed_s, rel=0.001)
    assert sum(buckets.values()) == pytest.approx(told["wall_s"], rel=0.001)
    for attempt in told["attempts"]:
        seconds = sum(spent or 0.0 for spent in attempt["buckets"].values())
        assert seconds == pytest.approx(attempt["ended_at"] - attempt["began_at"], rel=0.001, abs=0.001)
    return buckets
