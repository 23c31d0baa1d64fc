"""A launcher that is asked to leave while it has no ranks: heard at once in every phase, and told as it was."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from harness import job
from two_launchers import two_launchers

from resilience_sdk.launcher.agent import free_port

TWO = ("--nproc-per-node", "2")
HEARD_S = 5.0


def ask(run, number=signal.SIGTERM):
    """Send the signal to the launcher; return the time of that."""
    run.process.send_signal(number)
    return time.monotonic()


def check_left(run, asked, *, code=75, by="SIGTERM"):
    """Check what is promised of a launcher that was asked before its ranks started."""
    assert run.finish() == code, run.screen
    assert time.monotonic() - asked < HEARD_S * (1 + os.getloadavg()[0]), run.screen
    assert f"{by} to the launcher before its ranks started; nothing is lost (exit code 75)" in run.screen or code != 75
    assert run.outcome()["exit_code"] == code
    assert "before its ranks started; nothing is lost" in run.outcome()["reason"]
    assert not run.events("rank_start")
    assert not run.incidents()
    assert not run.left_behind()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_from_its_first_line_on(tmp_path, name):
    """It is loading, or its fork server is: 75 (130 where a person asks), an outcome, and the words that say so."""
    with job(tmp_path, *TWO, "preempted.py") as run:
        run.wait(lambda: "run directory" in run.screen, "the first line")
        asked = ask(run, getattr(signal, name))
        check_left(run, asked, code=130 if name == "SIGINT" else 75, by=name)


@pytest.mark.slow
def test_while_it_waits_for_another_node(tmp_path):
    """No other node comes."""
    place = f"127.0.0.1:{free_port()}"
    with job(
        tmp_path, *TWO, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", place, "preempted.py"
    ) as run:
        run.wait(lambda: "waiting for the other nodes" in run.screen, "the line")
        check_left(run, ask(run))


@pytest.mark.slow
def test_while_it_waits_to_start_the_ranks_again(tmp_path):
    """A rank failed for a disk, which is waited for with pauses: the job leaves with 75, and says after what."""
    full = "raise OSError(28, 'No space left on device', '/dev/full')"
    script = tmp_path / "full.py"
    script.write_text(full)
    with job(tmp_path, str(script)) as run:
        run.wait(lambda: "starting the ranks again" in run.screen, "the line")
        asked = ask(run)
        assert run.finish() == 75, run.screen
        assert time.monotonic() - asked < HEARD_S * (1 + os.getloadavg()[0]), run.screen
        assert "before its ranks started again after a fault; the SDK saved nothing" in run.outcome()["reason"]


@pytest.mark.slow
def test_while_it_ends_a_rank_that_does_not_want_to(tmp_path):
    """The attempt has failed, so what is left of it has no long grace any more."""
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "told = Path(os.environ['TOLD'])\n"
        "def hear(*_): (told / 'heard').touch()\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, hear)\n"
        "    (told / 'listens').touch()\n"
        "    while True: time.sleep(1)\n"
        "while not (told / 'listens').exists(): time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    with job(tmp_path, *TWO, "--term-grace", "120", str(script)) as run:
        run.wait(lambda: bool(run.told("heard")), "the end of the attempt")
        asked = ask(run)
        assert run.finish() == 75, run.screen
        assert time.monotonic() - asked < HEARD_S * (1 + os.getloadavg()[0]), run.screen
        assert "SIGTERM: the ranks that are left of this attempt have 3 s to end" in run.screen


@pytest.mark.slow
def test_a_supervisor_and_the_launcher_below_it(tmp_path):
    """The supervisor passes it on from its first line; a launcher that is only loading leaves at once, too."""
    command = (
        *(sys.executable, "-m", "resilience_sdk", "supervise", "--run-dir", str(tmp_path / "run"), "--"),
        *(sys.executable, "-m", "resilience_sdk", "run", *TWO),
    )
    with job(tmp_path, "preempted.py", command=command) as run:
        run.wait(lambda: "supervise: run directory" in run.screen, "the line")
        asked = ask(run)
        assert run.finish() == 75, run.screen
        assert time.monotonic() - asked < HEARD_S * (1 + os.getloadavg()[0]), run.screen
        assert not run.events("rank_start")
        assert not run.left_behind()


@pytest.mark.slow
def test_while_it_waits_for_the_end_of_another_node(tmp_path):
    """Its own ranks have finished: that is what it says, and not that none had started."""
    script = tmp_path / "uneven.py"
    script.write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "go = Path(os.environ['TOLD']) / 'go'\n"
        "while os.environ['RANK'] == '1' and not go.exists(): time.sleep(0.05)\n"
    )
    with two_launchers(tmp_path, str(script)) as nodes:
        nodes[0].wait(lambda: bool(nodes[0].events("rank_exit")), "the end of rank 0")
        time.sleep(1.0)  # its launcher has come from there to where it waits
        for node in nodes:
            ask(node)
        codes = sorted(node.finish() for node in nodes)
        screens = "".join(node.screen for node in nodes)
        assert codes == [75, 75], screens
        assert "when the ranks of this node had finished, and those of another were not known to have" in screens
        assert "before its ranks started" not in screens
