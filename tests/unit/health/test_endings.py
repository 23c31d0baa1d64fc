"""What is left of a probe that hung or crashed."""

import subprocess
import sys

import pytest

from resilience_sdk.health.endings import crashed, hung, stuck_in
from resilience_sdk.health.findings import Status
from resilience_sdk.health.probes import GPU

_CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007f1 (most recent call first):
  File "/x/pynvml.py", line 4053 in nvmlDeviceGetTotalEccErrors
  File "/x/resilience_sdk/health/gpu/memory.py", line 70 in total

Thread 0x00007f2 (most recent call first):
  File "/x/pynvml.py", line 4612 in nvmlDeviceGetCurrPcieLinkGeneration
"""


_ONE_THREAD = """Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/x/pynvml.py", line 3435 in nvmlDeviceGetName
  File "/x/resilience_sdk/health/gpu/probe.py", line 97 in _identity
"""


def _dump(program):
    """Return what faulthandler writes of a program that it finds stuck."""
    code = f"import faulthandler; faulthandler.dump_traceback_later(0.3, exit=True)\n{program}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stderr


def test_a_crash_is_placed_where_it_happened():
    """Of all threads only the one that crashed is named."""
    assert stuck_in(_CRASH) == ["pynvml.py:4053 nvmlDeviceGetTotalEccErrors"]
    assert stuck_in(_ONE_THREAD) == ["pynvml.py:3435 nvmlDeviceGetName"]


def test_threads_that_wait_for_others_are_not_what_hangs(tmp_path):
    """A real dump: the main thread waits in join, another reads what never comes."""
    program = tmp_path / "reads.py"
    program.write_text(
        "import os, threading\n"
        "def read_the_mount():\n    os.read(os.pipe()[0], 1)\n"
        "thread = threading.Thread(target=read_the_mount)\nthread.start()\nthread.join()\n"
    )
    (place,) = stuck_in(_dump(f"import runpy; runpy.run_path({str(program)!r})"))
    assert place.startswith("reads.py:3 read_the_mount")


@pytest.mark.parametrize(
    ("returncode", "stderr", "expected"),
    [
        (-11, _CRASH, "was killed by SIGSEGV in pynvml.py:4053 nvmlDeviceGetTotalEccErrors"),
        (-9, "", "was killed by SIGKILL"),
        (3, "first\nlast words\n", "left with 3: last words"),
        (None, "", "its process does not go"),
        (-200, "", "was killed by signal 200"),
    ],
)
def test_a_crash_says_how_it_ended(returncode, stderr, expected):
    """Signal or exit code, the place or the last words."""
    finding = crashed(GPU, returncode, stderr)
    assert expected in finding.evidence
    assert finding.status is Status.FAILED
    assert finding.cure == GPU.cure


def test_a_hang_says_how_long_and_where():
    """The deadline, the call and the state of its process."""
    finding = hung(GPU, 2.5, _CRASH, "D state in nvidia_ioctl")
    assert finding.evidence == (
        "no answer within 2.5 s, stuck in pynvml.py:4053 nvmlDeviceGetTotalEccErrors (D state in nvidia_ioctl)"
    )
    assert finding.stops
    assert hung(GPU, 2.5, "", "").evidence == "no answer within 2.5 s"
