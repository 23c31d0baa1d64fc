"""The start of a session may fail, and things around it change: the training never sees any of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilience_sdk.errors import ConfigError
from resilience_sdk.rank.exceptions import is_user_file
from resilience_sdk.rank.run import start_run

NO_THREADS = """
import os, threading
from pathlib import Path
from resilience_sdk import heartbeat

def start(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = start
for _ in range(2):
    with heartbeat():
        print("step")
print(list(Path(os.environ["RESILIENCE_PAGE_DIR"]).rglob("*.page")))
"""

LATE_GROUP = """
import sys, types
from resilience_sdk import heartbeat
from resilience_sdk.rank import current

with heartbeat():
    pass
group = types.SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 1, get_world_size=lambda: 2)
sys.modules["torch.distributed"] = group
with heartbeat():
    pass
print(current().identity.rank)
"""
SLOW_LISTENER = """
import os, threading
from resilience_sdk import heartbeat, straggler
from resilience_sdk.rank import current
from resilience_sdk.straggler.published import StandingVerdicts, write_standing
from resilience_sdk.straggler.verdicts import Change, SlowVerdict

entered = threading.Event()

@straggler.on_verdict
def slow(change):
    entered.set()
    threading.Event().wait()

with heartbeat():
    pass
session = current()
verdict = SlowVerdict("transient", "fwd", "compute", "", (1,), ("a",), False, 0, 8)
standing = StandingVerdicts(session.attempt, 0.0, changes=(Change("found", verdict, 1),))
for _ in range(60):  # a monitor that begins with this attempt withdraws what it finds
    write_standing(session.run_dir.path, standing)
    if entered.wait(0.5):
        break
assert entered.is_set()
answered = threading.Event()
session._helper._signalled = lambda numbers: answered.set()  # where a signal's byte goes
os.write(session._helper.descriptor, bytes([15]))
print(answered.wait(30))
"""
LOST = """
import json, os, time
from pathlib import Path
from resilience_sdk import heartbeat, straggler

for number in range(2000):
    with heartbeat(), straggler.section(f"save-{number}"):
        pass
journal = Path(os.environ["RESILIENCE_RUN_DIR"]) / "journal"
end = time.monotonic() + 30
while not any("save-" in file.read_text() for file in journal.rglob("*.jsonl")) and time.monotonic() < end:
    time.sleep(0.05)
print(any("save-" in file.read_text() for file in journal.rglob("*.jsonl")))
"""
HELPER = """
import os, subprocess, sys
from pathlib import Path
from resilience_sdk import heartbeat
from resilience_sdk.rank import ensure_started

step = "from resilience_sdk import heartbeat\\nwith heartbeat():\\n    pass"
if sys.argv[1] == "trains":
    with heartbeat():
        pass
else:
    ensure_started()
subprocess.run([sys.executable, "-c", step], check=True)
print(len(list(Path(os.environ["RESILIENCE_PAGE_DIR"]).rglob("*.page"))))
"""


def run_script(folder: Path, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a rank of its own, with everything that it writes under `folder`."""
    (folder / "pages").mkdir()
    places = {"RESILIENCE_PAGE_DIR": str(folder / "pages"), "RESILIENCE_RUN_DIR": str(folder / "run")}
    return subprocess.run(
        [sys.executable, "-c", script, *args],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", **places, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_start_that_fails_is_said_and_leaves_no_page(tmp_path):
    """Without a thread to be had the training runs unwatched, and no page stands there that never moves."""
    done = run_script(tmp_path, NO_THREADS)
    assert (done.returncode, done.stdout) == (0, "step\nstep\n[]\n")
    assert "not watched" in done.stderr
    assert "can't start new thread" in done.stderr


def test_a_listener_that_hangs_leaves_signals_and_requests_to_the_helper_thread(tmp_path):
    """A post to a chat that never ends: a signal is seen at once all the same, and the process ends."""
    done = run_script(tmp_path, SLOW_LISTENER)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_names_that_find_no_place_are_said(tmp_path):
    """One line and one event, with the first name and the cure."""
    done = run_script(tmp_path, LOST)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "neither timed nor guarded" in line]
    assert "section 'save-63'" in line
    assert "what varies" in line


def test_a_bad_fault_is_ignored_when_the_rank_is_known_late(tmp_path):
    """A mistake in RESILIENCE_FAULT is one line, also where the process group comes after the first steps."""
    done = run_script(tmp_path, LATE_GROUP, RESILIENCE_FAULT="nonsense:rank=1")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.count("RESILIENCE_FAULT") == 1


@pytest.mark.parametrize(
    ("name", "is_users"), [("resilience_sdk/core/lease.py", False), ("resilience_sdk_demo/train.py", True)]
)
def test_a_neighbour_of_the_sdk_is_the_users(name, is_users):
    """A frame is the SDK's by its folder, not by the beginning of a name."""
    assert is_user_file(str(Path(__file__).resolve().parents[3] / name)) is is_users


def test_what_a_rank_starts_does_not_pass_for_the_rank(tmp_path):
    """An evaluation that a rank runs as a program has the rank's environment; its steps are not the rank's."""
    done = run_script(tmp_path, HELPER, "trains", RANK="0", WORLD_SIZE="1", RESILIENCE_JOB_ID="job")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "rank 0 is process" in done.stderr


def test_a_wrapper_leaves_the_rank_to_what_it_starts(tmp_path):
    """A process that records nothing may be there only to start the one that trains."""
    done = run_script(tmp_path, HELPER, "wraps", RANK="0", WORLD_SIZE="1", RESILIENCE_JOB_ID="job")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_a_script_that_ends_before_its_monitor_leaves_no_pages(tmp_path):
    """Nobody else would remove them; here the start of a monitor fails, so that there is none."""
    script = """
import os
from resilience_sdk.monitor import spawn
def refuse(pages):
    raise OSError("no monitor today")
spawn.ensure_monitor = refuse
from resilience_sdk import heartbeat
with heartbeat():
    pass
"""
    done = run_script(tmp_path, script)
    assert done.returncode == 0
    assert [path for path in (tmp_path / "pages").rglob("*") if path.is_file()] == []


def test_a_run_directory_that_the_code_names_and_that_cannot_be_used_is_an_error(tmp_path):
    """Before the first step, with path and cure: who asks for saves there must not train without them."""
    done = run_script(tmp_path, "import resilience_sdk; resilience_sdk.start_run('/proc/none/run', state={})")
    assert done.returncode == 1
    assert "RunDirectoryError: cannot use /proc/none/run as run directory" in done.stderr
    assert not list((tmp_path / "pages").rglob("*.page"))


def test_an_option_of_the_loop_is_not_one_of_the_run():
    """The message says where it belongs."""
    with pytest.raises(ConfigError, match=r"on_preempt is an option of the loop: run.steps\(on_preempt=...\)"):
        start_run(on_preempt="return")
