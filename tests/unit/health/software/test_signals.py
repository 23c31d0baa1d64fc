"""Whether the signals that the SDK works with are free."""

import os
import signal
import subprocess
import sys

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.software.signals import Dispositions, signals
from resilience_sdk.settings import Settings

LOOK = (
    "from resilience_sdk.health.software.signals import dispositions as d; f = d();"
    "print(sorted(f.blocked), sorted(f.ignored), sorted(f.handlers))"
)


def test_free_signals_are_in_order():
    """As in a shell."""
    (found,) = signals(Settings(), Dispositions())
    assert found.status is Status.OK


@pytest.mark.parametrize(
    ("found", "settings", "word"),
    [
        (Dispositions(blocked=frozenset({"SIGTERM"})), {}, "blocked"),
        (Dispositions(ignored=frozenset({"SIGTERM"})), {}, "nohup"),
        (Dispositions(handlers={"SIGTERM": ""}), {}, "outside Python"),
        (Dispositions(handlers={"SIGUSR2": "submitit.core.handler"}), {"dump_signal": "SIGUSR2"}, "submitit.core"),
        (Dispositions(), {"dump_signal": "SIGUSR1"}, "NCCL"),
    ],
)
def test_a_signal_that_will_not_do_what_it_is_for(found, settings, word):
    """Its cure is another signal, or another start."""
    (finding,) = signals(Settings(**settings), found)
    assert finding.status is Status.DEGRADED
    assert word in finding.evidence
    assert finding.cure


def test_a_handler_in_python_is_chained():
    """So it is no conflict."""
    (found,) = signals(Settings(), Dispositions(handlers={"SIGTERM": "lightning.handler"}))
    assert found.status is Status.OK


def test_a_real_process_that_ignores_and_blocks():
    """As `nohup` and some launchers leave their children."""

    def leave():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    done = subprocess.run(
        [sys.executable, "-c", LOOK], preexec_fn=leave, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    blocked, ignored, handlers = done.stdout.strip().split("] [")
    assert "SIGTERM" in blocked
    assert "SIGHUP" in ignored
    assert "SIGTERM" not in handlers


def test_a_real_handler_is_told_by_its_name():
    """Of Python's own ones only those of somebody."""
    code = f"import signal; signal.signal(signal.SIGUSR2, lambda *_: None); {LOOK}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "SIGUSR2" in done.stdout
    assert "SIGINT" not in done.stdout
    assert os.getpid()
