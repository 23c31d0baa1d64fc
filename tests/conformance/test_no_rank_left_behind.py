"""Whoever is killed, no rank and nothing that a rank started outlives the launcher."""

import os
import signal
import subprocess
import time

import psutil
import pytest
from launches import SCRIPTS, command, light_server

RANKS = 2
# Launcher's child is the server; each rank has a program and a forked worker.
FAMILY = 1 + RANKS * 3


@pytest.fixture
def family(tmp_path, request):
    """A running job: its launcher and every descendant, all of them gone again afterwards."""
    log = open(tmp_path / "log", "wb")  # noqa: SIM115 - closed below
    launcher = subprocess.Popen(
        [*command(request.param, tmp_path), "--max-restarts=0", f"--nproc-per-node={RANKS}", "family.py"],
        cwd=SCRIPTS,
        env={
            **os.environ,
            **light_server(tmp_path),
            "PROBE_OUT": str(tmp_path),
            "RESILIENCE_DISABLE": "1",
        },
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    descendants = []
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.up"))) == RANKS, 60.0)
        descendants = psutil.Process(launcher.pid).children(recursive=True)
        yield launcher, descendants
    finally:
        for process in descendants:
            if process.is_running():
                process.kill()
        launcher.kill()
        launcher.wait()
        log.close()


def wait_until(condition, timeout_s):
    """Poll until `condition` holds; the processes asked about are not our children."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def gone(processes):
    """Whether none of them runs; a dead one that nobody has waited for counts as gone."""
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            continue
    return True


@pytest.mark.parametrize("family", ["forkserver", "exec"], indirect=True)
def test_a_killed_launcher_takes_all_ranks_along(family):
    """SIGKILL of the launcher, which cannot clean up: a moment later nothing of the job runs."""
    launcher, descendants = family
    assert len(descendants) == FAMILY
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: gone(descendants), 20.0)


@pytest.mark.parametrize("family", ["forkserver"], indirect=True)
def test_a_killed_server_is_a_failed_attempt_and_leaves_nothing(family):
    """SIGKILL of the fork server ends the ranks, and the launcher sees them fail and kills the rest."""
    launcher, descendants = family
    (server,) = psutil.Process(launcher.pid).children()
    server.kill()
    wait_until(lambda: gone(descendants), 20.0)
    assert launcher.wait(60.0) == 1
