"""Versions, read from files and never imported; signals that are free; timeouts that go off in the right order."""

import platform
import runpy
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from resilience_sdk.core.settings import Settings
from resilience_sdk.health import software
from resilience_sdk.health.findings import Status
from resilience_sdk.health.software import BLOCKED, IGNORED, NOT_PYTHONS, dispositions, signals

VERSION_PY = """from typing import Optional
__all__ = ['__version__', 'cuda']
__version__ = '2.5.1+cu124'
debug = False
cuda: Optional[str] = '12.4'
hip: Optional[str] = None
print("never run")
"""


def test_versions_are_read_without_running_a_module(capsys):
    """torch's version.py is generated, and holds nothing else; that torch is not imported is a test of the doctor."""
    found = software.assigned_constants(VERSION_PY)
    assert (found["__version__"], found["cuda"], found["hip"]) == ("2.5.1+cu124", "12.4", None)
    assert capsys.readouterr().out == ""
    said = runpy.run_path(str(Path(find_spec("torch").origin).with_name("version.py")))
    found = software.installed_torch()
    assert (found["__version__"], found["cuda"]) == (said["__version__"], said["cuda"])
    assert software.python().value == platform.python_version()


@pytest.mark.parametrize(
    ("built", "status", "words"),
    [
        ({"__version__": "2.7.0", "cuda": "12.4"}, Status.OK, "built for CUDA 12.4"),
        ({"__version__": "2.13.0+cpu", "cuda": None}, Status.OK, "built for CPU"),
        ({"__version__": "2.10.0a0", "hip": "6.2"}, Status.OK, "built for ROCm 6.2"),
        ({"__version__": "2.3.1", "cuda": "12.1"}, Status.FAILED, "2.3.1"),
        (None, Status.FAILED, "not installed"),
    ],
)
def test_torch_must_be_there_and_new_enough(built, status, words):
    """Versions are compared as numbers: 2.10 is newer than 2.7."""
    found = software.torch_finding(built)
    assert (found.status, found.must, bool(found.cure)) == (status, True, status is Status.FAILED)
    assert words in found.evidence


def test_nccl_and_frameworks_are_told_where_they_are_installed(monkeypatch):
    """NCCL is a package or inside torch, and without a GPU it does not matter."""
    monkeypatch.setattr(software, "version_of", {"nvidia-nccl-cu12": "2.21.5", "accelerate": "1.2.0"}.get)
    (packaged,), found = software.nccl(True), software.packages()
    assert packaged.data == {"same": {"nccl": "2.21.5"}}
    assert found.data["same"]["accelerate"] == "1.2.0"
    assert "lightning" not in found.data["same"]
    monkeypatch.setattr(software, "version_of", {}.get)
    (inside,) = software.nccl(True)
    assert inside.status is Status.UNAVAILABLE
    assert list(software.nccl(False)) == []


@pytest.mark.parametrize(
    ("found", "settings", "word"),
    [
        ({}, {}, ""),
        ({"SIGTERM": "lightning.handler"}, {}, ""),  # a handler in Python is chained, so it is no conflict
        ({"SIGTERM": BLOCKED}, {}, "blocked"),
        ({"SIGTERM": IGNORED}, {}, "nohup"),
        ({"SIGTERM": NOT_PYTHONS}, {}, "outside Python"),
        ({"SIGUSR2": "submitit.core.handler"}, {"dump_signal": "SIGUSR2"}, "submitit.core"),
        ({}, {"dump_signal": "SIGUSR1"}, "NCCL"),
    ],
)
def test_a_signal_that_will_not_do_what_it_is_for(found, settings, word):
    """Its cure is another signal, or another start."""
    (finding,) = signals(Settings(**settings), found)
    assert (finding.status is Status.DEGRADED) is bool(finding.cure) is bool(word)
    assert word in finding.evidence


@pytest.fixture
def as_it_was():
    """Put back what a test does to the signals of this very process."""
    names = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in names}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_real_process_that_ignores_blocks_and_handles(as_it_was):
    """As `nohup` and some launchers leave their children; of Python's own handlers only those of somebody are told."""
    # These tests may run under `nohup` themselves, or in the background of a shell, where SIGINT is ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = dispositions()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGUSR2, lambda *_: None)
    found = dispositions()
    assert __name__ in found["SIGUSR2"]
    assert "SIGINT" not in found
    assert found == {**before, "SIGTERM": BLOCKED, "SIGHUP": IGNORED, "SIGUSR2": found["SIGUSR2"]}


NOW = 1_000_000.0
IN_2_HOURS, IN_5_MINUTES = ({"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": str(NOW + left)} for left in (7200, 300))
WATCHDOG = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


@pytest.mark.parametrize(
    ("settings", "env", "wrong"),
    [
        # The defaults are in order anywhere: alone, under torchrun and under Slurm.
        ({}, {}, []),
        ({}, {"TORCHELASTIC_RUN_ID": "x"}, []),
        ({}, IN_2_HOURS, []),
        # Torch gives NCCL ten minutes, and names nobody.
        ({"heartbeat_timeout": 599}, {}, []),
        ({"heartbeat_timeout": 600}, {}, ["heartbeat_timeout"]),
        ({"section_timeouts": {"eval": 3600, "fwd": 60}}, {}, ["section_timeouts eval"]),
        # NCCL's watchdog may abort first where somebody set it so.
        ({"heartbeat_timeout": 300}, {WATCHDOG: "60"}, [WATCHDOG]),
        ({"heartbeat_timeout": 300}, {WATCHDOG: "60", "TORCH_NCCL_ENABLE_MONITORING": "0"}, []),
        ({"heartbeat_timeout": 300}, {WATCHDOG: "900"}, []),
        ({"heartbeat_timeout": 300}, {WATCHDOG: "soon"}, []),
        # 4.096 us * 2^22 * 7 are two minutes, with 25 it is a quarter of an hour.
        ({}, {"NCCL_IB_TIMEOUT": "22"}, []),
        ({}, {"NCCL_IB_TIMEOUT": "25"}, ["NCCL_IB_TIMEOUT"]),
        ({}, {"NCCL_IB_RETRY_CNT": "200"}, ["NCCL_IB_TIMEOUT"]),
        # The job must outlast its deadlines, else the scheduler's end is taken for their cause.
        ({"heartbeat_timeout": 200}, IN_5_MINUTES, []),
        (
            {"heartbeat_timeout": 400, "preempt_time": 500},
            IN_5_MINUTES,
            ["heartbeat_timeout", "preempt_time"],
        ),
        # Slurm kills thirty seconds after it has asked.
        ({"term_grace": 60}, {"SLURM_JOB_ID": "1"}, ["term_grace"]),
        ({"term_grace": 60}, {}, []),
        # torchrun gives thirty seconds; under our own launcher it is ours to give.
        ({"preempt_time": 120}, {"TORCHELASTIC_RUN_ID": "x"}, ["preempt_time"]),
        ({"preempt_time": 120}, {"TORCHELASTIC_RUN_ID": "x", "RESILIENCE_INTERNAL_JOB": "j"}, []),
    ],
)
def test_timeouts_in_the_wrong_order_are_told(settings, env, wrong):
    """Each with its cure, and nothing else."""
    found = software.order(Settings(**settings), env, has_gpus=True, now_unix=NOW)
    assert all(bool(finding.cure) is finding.is_bad for finding in found)
    assert [finding.subject for finding in found if finding.is_bad] == wrong


def test_gloo_waits_for_half_an_hour():
    """So the same deadline is in time without GPUs."""
    found = software.order(Settings(heartbeat_timeout=600), {}, has_gpus=False, now_unix=NOW)
    assert [finding.status for finding in found] == [Status.OK]
