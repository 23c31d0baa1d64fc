"""Whether the signals that the SDK works with are free."""

import signal

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.software.signals import Dispositions, dispositions, signals
from resilience_sdk.settings import Settings


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


@pytest.fixture
def as_it_was():
    """Put back what a test does to the signals of this very process."""
    names = (signal.SIGHUP, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in names}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_real_process_that_ignores_and_blocks(as_it_was):
    """As `nohup` and some launchers leave their children."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under `nohup` themselves
    before = dispositions()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    found = dispositions()
    assert (found.blocked - before.blocked, found.ignored - before.ignored) == ({"SIGTERM"}, {"SIGHUP"})
    assert found.handlers == before.handlers


def test_a_real_handler_is_told_by_its_name(as_it_was):
    """Of Python's own ones only those of somebody."""
    signal.signal(signal.SIGUSR2, lambda *_: None)
    found = dispositions()
    assert __name__ in found.handlers["SIGUSR2"]
    assert "SIGINT" not in found.handlers
