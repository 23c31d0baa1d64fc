"""What is left of a probe that hung, crashed or never began; and of processes that cannot be killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest

from resilience_sdk.health import runner
from resilience_sdk.health.findings import OWN_FAULT, Status, told_faults
from resilience_sdk.health.probe_main import _findings
from resilience_sdk.health.probes import GPU, HOST, KERNEL, STORAGE, Context
from resilience_sdk.health.runner import crashed, hung, never_began, run_probes, stuck_in

_CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007f1 (most recent call first):
  File "/x/pynvml.py", line 4053 in nvmlDeviceGetTotalEccErrors
  File "/x/resilience_sdk/health/gpu_checks.py", line 70 in total

Thread 0x00007f2 (most recent call first):
  File "/x/pynvml.py", line 4612 in nvmlDeviceGetCurrPcieLinkGeneration
"""


_ONE_THREAD = """Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/x/pynvml.py", line 3435 in nvmlDeviceGetName
  File "/x/resilience_sdk/health/gpu.py", line 97 in _identity
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
    ("returncode", "words"),
    [(-9, "was killed by SIGKILL"), (None, "its process does not go"), (-200, "was killed by signal 200")],
)
def test_a_crash_says_how_it_ended(returncode, words):
    """Others, with their place or last words, are planted in the integration tests, and so are hangs."""
    finding = crashed(GPU, returncode, "")
    assert words in finding.evidence
    assert (finding.status, finding.cure) == (Status.FAILED, GPU.cure)


@pytest.mark.parametrize(
    ("stderr", "cure"),
    [
        ("Traceback ...\nModuleNotFoundError: No module named 'attrs'\n", "install it again with pip"),
        ("ImportError: cannot import name 'main'", "install it again with pip"),
        ("python: can't open file '/opt/begin.py': [Errno 2] No such file", "install it again with pip"),
        ("TypeError: Context.__init__() got an unexpected keyword argument", "report this line"),
        ("", "report this line"),
    ],
)
def test_who_never_began_to_look_blames_no_hardware(stderr, cure):
    """It is a fault of ours, told as such; it stops no job, and its cure is not that of what was not looked at."""
    finding = never_began(GPU, 1, stderr)
    assert (finding.check, finding.status, finding.stops) == ("probe", Status.UNAVAILABLE, False)
    assert finding.data == {OWN_FAULT: True}
    assert finding.evidence == f"the probe could not begin: {stderr.splitlines()[-1] if stderr else 'it left with 1'}"
    assert cure in finding.cure
    assert "reboot" not in finding.cure


def test_what_the_system_does_to_a_process_that_starts_is_no_fault_of_ours():
    """Nor one of the GPU: a kill for memory, a file system that does not give Python's files."""
    killed = never_began(GPU, -9, "")
    assert (killed.evidence, killed.stops) == ("its process could not be started: it was killed by SIGKILL", False)
    unreadable = never_began(GPU, 1, "OSError: [Errno 116] Stale file handle: '/nfs/site-packages/attr'")
    assert unreadable.status is Status.DEGRADED
    assert "file system" in unreadable.cure
    assert "reboot" not in killed.cure + unreadable.cure
    assert told_faults([killed, unreadable]) == []
    late = hung(GPU, 15.0, "", " (D state)", has_begun=False)
    assert late.stops
    assert late.evidence == "no answer within 15 s (D state), and it had not begun to look"
    assert "GPU" not in late.cure


def test_one_fault_of_ours_is_told_once():
    """With all probes that it concerns."""
    stderr = "ModuleNotFoundError: No module named 'attrs'"
    (line,) = told_faults([never_began(probe, 1, stderr) for probe in (GPU, HOST, KERNEL)])
    assert line.startswith("a fault of the SDK, not of this node, kept gpu, host and kernel from being looked at: ")


def children():
    """Return the processes that this one has started."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture
def unkillable(monkeypatch):
    """What the runner kills stops instead, and stays; as a process does that waits for a dead mount."""
    monkeypatch.setattr(runner.programs, "kill", lambda process, _: process.send_signal(signal.SIGSTOP))
    monkeypatch.setattr(runner, "_KILL_GRACE_S", 0.02)
    yield
    monkeypatch.undo()
    for look in runner._left:
        look.process.kill()
        look.process.wait()


def test_a_process_that_cannot_be_killed_is_not_followed_by_another(tmp_path, unkillable):
    """However often it is looked: each look would leave one more; other probes are started as ever."""
    pipe = tmp_path / "pipe"  # opening it waits for a writer
    os.mkfifo(pipe)
    hanging = attrs.evolve(STORAGE, only=str(pipe), deadline_s=0.1)
    before = children()
    (first,) = run_probes([hanging], Context())
    (stuck,) = children() - before
    (again,) = run_probes([hanging], Context())
    assert children() - before == {stuck}
    assert (again.check, again.subject, again.status) == (first.check, first.subject, Status.FAILED)
    assert f"process {stuck}" in again.evidence
    file = tmp_path / "file"
    file.write_text("data")
    assert run_probes([attrs.evolve(STORAGE, only=str(file))], Context())[0].status is Status.OK
    os.kill(int(stuck), signal.SIGKILL)
    runner._left[0].process.wait(20)
    (after,) = run_probes([hanging], Context())
    assert "no answer within" in after.evidence


def test_a_probe_of_somebody_elses_that_fails_is_no_fault_of_ours():
    """Who wrote it is to mend it; nobody is asked to report a line."""
    context = {"deadline_s": 1.0, "only": "node"}
    (foreign,) = _findings({"name": "seats", "function": "json:no_such_probe", "context": context})
    (own,) = _findings({"name": "gpu", "function": "resilience_sdk.health.gpu:no_such_probe", "context": context})
    assert foreign.cure == "mend the probe: json is no part of resilience_sdk"
    assert foreign.status is Status.UNAVAILABLE
    assert (told_faults([foreign]), len(told_faults([own]))) == ([], 1)


def test_a_probe_that_has_no_processor_has_seen_nothing():
    """On a machine that others keep busy a probe comes late whatever it looks at: a job's nodes are not ill for it."""
    late = hung(KERNEL, 15.0, "", " (R state)", waited_s=9.0)
    assert (late.check, late.status, late.stops) == ("probe", Status.UNAVAILABLE, False)
    assert "waited 9 s for a processor" in late.evidence
    assert hung(KERNEL, 15.0, "", " (R state)", waited_s=2.0).check == "answers"


def test_the_kernel_tells_who_waits_for_a_processor():
    """Three busy loops on one processor, of which one is given little."""
    one = {min(os.sched_getaffinity(0))}
    loops = [subprocess.Popen([sys.executable, "-c", f"import os; os.nice({n}); [0 for _ in iter(int, 1)]"],
                              preexec_fn=lambda: os.sched_setaffinity(0, one)) for n in (0, 0, 19)]  # fmt: skip
    try:
        until = time.monotonic() + 60
        while runner._waited_s(loops[-1].pid) < 1.0 and time.monotonic() < until:
            time.sleep(0.05)
        assert runner._waited_s(loops[-1].pid) >= 1.0
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
