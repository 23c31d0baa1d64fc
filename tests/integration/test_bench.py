"""The measurements run, and their JSON says where and what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_import_is_measured_and_brings_nothing_heavy() -> None:
    """Whatever the time on a busy machine: torch, numpy, pynvml and structlog stay out of `import resilience_sdk`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", "--json", "--only", "imports"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    document = json.loads(done.stdout)
    assert document["failures"] == {}
    assert {"cpu", "cores", "load", "python", "torch"} <= set(document["machine"])
    ours = [figure for figure in document["figures"] if figure["system"] == "ours"]
    assert [figure["name"] for figure in ours] == ["import", "import with heartbeat, straggler"]
    for figure in ours:
        assert figure["note"].startswith("brings no torch")
        assert 0 < figure["min"] <= figure["median"] <= figure["p95"] <= figure["max"]
