"""A rank that leaks: who, how much a step and how long that can go on, on every page; and what it had when it died."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from harness import job

from resilience_sdk.core.words import MIB

pytestmark = pytest.mark.slow


def asked(run, command, *options):
    """Return what a command of the SDK prints of the run, on a wide screen."""
    words = (sys.executable, "-m", "resilience_sdk", command, str(run.run_dir), *options)
    env = {**os.environ, "COLUMNS": "120", "RESILIENCE_PAGE_DIR": str(run.pages)}
    return subprocess.run(words, env=env, check=True, capture_output=True, text=True, timeout=120).stdout


def test_a_leak_is_named_with_its_rate_and_the_incident_has_the_last_of_it(tmp_path):
    """Of two ranks at equal steps one keeps its batches; of the other the peak is reported, and no growth."""
    with job(tmp_path, "--nproc-per-node", "2", "--max-restarts", "0", "--report", "leaking.py") as run:
        run.wait(lambda: any("host_growth" in rank for e in run.events("memory") for rank in e["ranks"]), "growth")
        run.wait(lambda: "~ memory rank 1 grows" in asked(run, "top", "--once"), "the word of it")
        (tmp_path / "told" / "seen").touch()
        assert run.finish() == 1, run.screen
        status = json.loads(asked(run, "status", "--json"))
        healthy, leaking = status["memory"]
        assert healthy["host_growth"] is None
        assert healthy["host_peak"] >= healthy["host"] > 20 * MIB
        assert leaking["host_growth"] == pytest.approx(2 * MIB, rel=0.3)
        assert leaking["host_peak"] > healthy["host_peak"] + 20 * MIB
        [words] = status["memory_grows"]
        assert words.startswith("rank 1 grows ")
        assert " MiB a step: full in about " in words
        assert words in asked(run, "status")
        [crash] = run.incidents()
        assert crash["cause"] == "host_oom_alloc", run.screen
        [told] = [one["text"] for one in crash["evidence"] if one["source"] == "memory"]
        assert told.startswith("rank 1 had ")
        assert "rank 1 grows" in told
        assert words in (run.run_dir / "report.html").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_leak_on_the_device_is_named(tmp_path):
    """By what torch's allocator has handed out there; of the host nothing grows."""
    with job(tmp_path, "--nproc-per-node", "1", "--max-restarts", "0", "leaking.py", "device") as run:
        run.wait(lambda: any("device_growth" in rank for e in run.events("memory") for rank in e["ranks"]), "growth")
        (tmp_path / "told" / "seen").touch()
        run.finish()
        [leaking] = json.loads(asked(run, "status", "--json"))["memory"]
        assert leaking["device_growth"] == pytest.approx(2 * MIB, rel=0.3)
        assert leaking["device_total"] > leaking["device_peak"] >= leaking["device"]
        assert leaking["host_growth"] is None
