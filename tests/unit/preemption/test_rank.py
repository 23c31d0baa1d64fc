"""`preemption.check()` and its companions in a process of their own: signals, forked children, switched off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from metadata_services import Gce, serving

PROJECT = Path(__file__).parent.parent.parent.parent


def run(folder, program, **env):
    """Run a program and return what it printed and how it ended."""
    pages = folder / "pages"
    pages.mkdir(mode=0o700)
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT), "RESILIENCE_PAGE_DIR": str(pages)}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=own | {"RESILIENCE_RUN_DIR": str(folder / "run")} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


LOOP = """
import os, signal, time
from resilience_sdk import preemption
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
assert not preemption.check()
assert preemption.time_left() is None
{ask}
end = time.monotonic() + 30
while not preemption.check():
    time.sleep(0.001)
    assert time.monotonic() < end
print(heard, 50 < preemption.time_left() <= 60)
preemption.exit()
"""


@pytest.mark.parametrize(
    ("ask", "heard"),
    [("os.kill(os.getpid(), signal.SIGTERM)", "[15]"), ("preemption.request('maintenance')", "[]")],
)
def test_a_notice_ends_the_loop_of_a_single_process_with_75(tmp_path, ask, heard):
    """The signal and the request count alike; the script's own handler is called too, and the time left is known."""
    ended = run(tmp_path, LOOP.format(ask=ask))
    assert (ended.returncode, ended.stdout) == (75, f"{heard} True\n"), ended.stderr


def test_a_signal_is_published_while_the_main_thread_is_in_c(tmp_path):
    """The interpreter's handler comes when the C call returns; the notice is out before that."""
    program = """
import hashlib, os, signal, threading, time
from resilience_sdk import preemption
preemption.check()
works, seen = True, []
def ask():
    os.kill(os.getpid(), signal.SIGTERM)
    while preemption.time_left() is None:
        time.sleep(0.001)
    seen.append(works)
asks = threading.Thread(target=ask)
asks.start()
hashlib.pbkdf2_hmac("sha256", b"x", b"y", 3_000_000)
works = False
asks.join()
print(seen)
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "[True]\n", ended.stderr


def test_children_of_fork_can_be_terminated_and_tell_their_parent_nothing(tmp_path):
    """`Process.terminate()` and `Pool.terminate()` end children, and are no notice for the rank."""
    program = """
import multiprocessing, time
from resilience_sdk import preemption
preemption.check()
context = multiprocessing.get_context("fork")
process = context.Process(target=time.sleep, args=(60,))
process.start()
process.terminate()
process.join(20)
pool = context.Pool(2)
pool.apply_async(time.sleep, (60,))
pool.terminate()
pool.join()
end = time.monotonic() + 0.5
while time.monotonic() < end:
    assert not preemption.check()
    time.sleep(0.01)
print(process.exitcode, preemption.time_left())
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "-15 None\n", ended.stderr


def test_an_event_loop_keeps_its_wakeup_descriptor(tmp_path):
    """asyncio's signal handlers work beside ours, whichever came first."""
    program = """
import asyncio, os, signal
from resilience_sdk import preemption
async def main():
    came = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, came.set)
    assert not preemption.check()
    os.kill(os.getpid(), signal.SIGUSR2)
    await asyncio.wait_for(came.wait(), 20)
preemption.check()
asyncio.run(main())
print("came")
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "came\n", ended.stderr


def test_switched_off_it_answers_no_and_installs_nothing(tmp_path):
    """With RESILIENCE_DISABLE the signal does what it always did."""
    program = """
import os, signal
from resilience_sdk import preemption
assert not preemption.check() and not preemption.check()
preemption.request("nobody hears it")
assert preemption.time_left() is None and not preemption.check()
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert run(tmp_path, program, RESILIENCE_DISABLE="1").returncode == -15


def test_a_notice_of_the_cloud_stops_the_job_with_the_time_that_the_cloud_gives(tmp_path):
    """The monitor asks the metadata service; no signal comes, and 30 s are left instead of the 60 s of the setting."""
    program = LOOP.format(ask="").replace("50 < preemption.time_left() <= 60", "20 < preemption.time_left() <= 30")
    with serving(Gce()) as gce:
        gce.documents["preempted"] = "TRUE"
        program = program.replace("assert preemption.time_left() is None\n", "")
        ended = run(tmp_path, program, RESILIENCE_CLOUD_NOTICES="gcp", RESILIENCE_CLOUD_ENDPOINT=gce.url)
    assert (ended.returncode, ended.stdout) == (75, "[] True\n"), ended.stderr
