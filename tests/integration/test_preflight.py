"""`resilience run --preflight`: the node is looked at before any rank exists."""

import os
import signal
import time
from pathlib import Path

import pytest
from launcher_runs import launch

# In one write, as no `print` is under -u.
SCRIPT = "import os, sys; sys.stdout.write(f'rank {os.environ[\"RANK\"]} runs\\n')"
LONGEST_S = 220  # with the start of torch on a busy machine


@pytest.fixture
def script(tmp_path):
    """Return a script that tells that it ran."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.slow
def test_a_job_starts_on_a_sound_node(tmp_path, script):
    """After its processor has computed; what is not as it should be is told."""
    run = launch(tmp_path, "--preflight", "--nproc-per-node", "2", script)
    assert run.finish(LONGEST_S) == 0, run.err
    assert "rank 1 runs" in run.out
    assert not run.events("degraded"), run.events("degraded")


@pytest.mark.slow
def test_a_job_does_not_start_where_it_cannot(tmp_path, script):
    """No rank is started, and everybody is told why: person, journal, outcome, exit code."""
    run = launch(tmp_path, "--preflight", script, env={"NCCL_SOCKET_IFNAME": "=nosuch0"})
    assert run.finish(LONGEST_S) == 77
    assert "runs" not in run.out
    assert "preflight: FAILED: network: chosen interface" in run.err
    assert "unset NCCL_SOCKET_IFNAME" in run.err
    outcome = run.outcome()
    assert (outcome["verdict"], outcome["attempts"]) == ("stop", 0)
    assert "=nosuch0" in outcome["what"]
    assert "--preflight" in outcome["resume"]
    assert [event["verdict"] for event in run.events("decision")] == ["stop"]
    told = {event["check"]: event for event in run.events("health")}
    assert told["chosen_interface"]["ok"] is False
    assert "unset NCCL_SOCKET_IFNAME" in told["chosen_interface"]["cure"]
    assert run.left_pages() == []


@pytest.mark.slow
def test_a_job_may_be_called_off_meanwhile(tmp_path, script):
    """The signal is obeyed at once, and nothing of the preflight is left."""
    run = launch(tmp_path, "--preflight", script, env={"PREFLIGHT_TEST_MARK": str(tmp_path)})
    until = time.monotonic() + LONGEST_S
    while not (run.run_dir / "journal").is_dir() or not run.events("run_start"):
        assert time.monotonic() < until
        time.sleep(0.01)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish(LONGEST_S) == 75, run.err
    assert "runs" not in run.out
    while left := [pid for pid in os.listdir("/proc") if pid.isdecimal() and _is_marked(pid, str(tmp_path))]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def _is_marked(pid, mark):
    try:
        return f"PREFLIGHT_TEST_MARK={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
