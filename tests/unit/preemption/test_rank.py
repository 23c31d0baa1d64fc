"""`preemption.check()` and its companions in a process of their own: who decides, with and without page and monitor."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rank_programs import LOOP, NO_PLACE, run


@pytest.mark.parametrize(
    ("ask", "heard"),
    [("os.kill(os.getpid(), signal.SIGTERM)", "[15]"), ("preemption.request('maintenance')", "[]")],
)
def test_a_notice_ends_the_loop_of_a_single_process_with_75(tmp_path, ask, heard):
    """The signal and the request count alike; the script's own handler is called too, and the time left is known."""
    ended = run(tmp_path, LOOP.format(ask=ask))
    assert (ended.returncode, ended.stdout) == (75, f"{heard} True\n"), ended.stderr


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


@pytest.mark.parametrize(
    ("ask", "heard"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", "[15]"),
        ("preemption.request('maintenance')", "[]"),
        pytest.param("open(os.environ['RESILIENCE_RUN_DIR'] + '/preempt', 'w')", "[]", marks=pytest.mark.slow),
    ],
)
def test_without_a_page_one_rank_decides_at_once(tmp_path, ask, heard):
    """Where no page can be had nothing is recorded, but signals, requests and the file are still heard."""
    (tmp_path / "run").mkdir()
    ended = run(tmp_path, LOOP.format(ask=ask), **NO_PLACE)
    assert (ended.returncode, ended.stdout) == (75, f"{heard} True\n"), ended.stderr
    assert "no directory can hold the rank pages" in ended.stderr


@pytest.mark.slow
def test_without_a_page_a_child_is_ended_by_its_signal_and_an_ignored_one_ends_the_rank(tmp_path):
    """A thread of its own watches over the grace, as where there is a page."""
    program = """
import multiprocessing, os, signal, time
from resilience_sdk import preemption
preemption.check()
process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
process.start()
process.terminate()
process.join(20)
assert not preemption.check() and process.exitcode == -15
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
    ended = run(tmp_path, program, RESILIENCE_PREEMPT_TIME="1", **NO_PLACE)
    assert ended.returncode == -15, ended.stderr
    assert "no stop was agreed within 1 s" in ended.stderr


def test_where_no_monitor_can_be_started_one_rank_decides_by_itself(tmp_path):
    """The interpreter that the monitor needs is not there; said once, and the job still stops when it is asked to."""
    program = "import sys\nsys.executable = '/nowhere/python'\n" + LOOP.format(ask="os.kill(os.getpid(), 15)")
    ended = run(tmp_path, program)
    assert (ended.returncode, ended.stdout) == (75, "[15] True\n"), ended.stderr
    assert ended.stderr.count("no monitor can be started") == 1


def test_no_check_is_lost_while_another_thread_starts_to_listen(tmp_path):
    """All ranks count alike, however the start of one rank's threads falls."""
    program = """
import threading
from resilience_sdk import preemption
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder import page_layout as layout
inside, go = threading.Event(), threading.Event()
start = lookup.starter()
def slow():
    recorder = start()
    inside.set()
    assert go.wait(20)
    return recorder
lookup.set_starter(slow)
other = threading.Thread(target=preemption.time_left)
other.start()
assert inside.wait(20)
threading.Timer(0.2, go.set).start()
preemption.check()  # meets the start of the other thread
other.join()
preemption.check()
lookup.set_starter(start)
print(lookup.recorder().page.words[layout.W_CHECKS])
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "2\n", ended.stderr


def test_the_first_check_waits_for_no_monitor_and_handles_signals_at_once(tmp_path):
    """One that never comes up costs nothing; until it is known who coordinates, a notice is kept."""
    program = """
import os, signal, time
from resilience_sdk import preemption
from resilience_sdk.core import environ
from resilience_sdk.system.file_lock import file_lock
from resilience_sdk.monitor.spawn import SPAWN_LOCK, is_alive
from resilience_sdk.recorder.page_directory import job_page_directory
from resilience_sdk.rank.identity import fallback_job_key
env = environ.environment()
pages = job_page_directory(environ.job_key(env, fallback_job_key(env)), env)
began = time.monotonic()
with file_lock(pages / SPAWN_LOCK):  # as if another rank were starting the monitor, and never came to it
    assert not preemption.check()
    print(time.monotonic() - began < 5, end=" ")
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(100):
        assert not preemption.check()
    assert not is_alive(pages)
while not preemption.check():
    time.sleep(0.001)
    assert time.monotonic() < began + 30
print("stopped")
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "True stopped\n", ended.stderr


def test_the_first_rank_says_at_the_stop_who_has_asked(tmp_path):
    """Before it saves and leaves: the monitor tells it when it is gone. Its journal has what it had heard."""
    program = """
import os, signal, time
from resilience_sdk import preemption
from resilience_sdk.core.journal import read_journal
from resilience_sdk.rank import current
from resilience_sdk.rank import preemption as stopping
assert not preemption.check()
os.kill(os.getpid(), signal.SIGTERM)
began = time.monotonic()
while not preemption.check(49):
    time.sleep(0.001)
    assert time.monotonic() < began + 30
(stop,) = [event for event in read_journal(current().run_dir.journal).events if event["event"] == "stop_agreed"]
print(stop["step"], stop["heard"])
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "50 SIGTERM\n", ended.stderr  # step 49 is made, as the first one is step 0
    assert ended.stderr.count("the job is asked to leave by SIGTERM to rank 0 on ") == 1
    assert ended.stderr.count(": all ranks stop after 50 steps") == 1


def test_a_monitor_that_was_asked_is_heard_where_ranks_agree_by_themselves(tmp_path):
    """It hears the cloud, and tells the ranks their time; it journals that itself, so they do not."""
    program = """
import time
from resilience_sdk import preemption
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder import page_layout as layout
from resilience_sdk.rank import preemption as stopping
stopping.Coordination.by_monitor = lambda self: False
began = time.monotonic()
for _ in range(100):
    assert not preemption.check()
lookup.recorder().page.words[layout.W_DEADLINE_NS] = time.monotonic_ns() + 40_000_000_000
while not preemption.check():
    time.sleep(0.001)
    assert time.monotonic() < began + 30
print(30 < preemption.time_left() <= 40)
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "True\n", ended.stderr
    (told,) = (tmp_path / "run" / "journal").glob("*rank0-*.jsonl")  # the monitor of this node has one of its own
    assert [json.loads(line)["event"] for line in told.read_text().splitlines()] == ["rank_start", "stop_agreed"]


def test_a_request_works_without_a_run_directory_too(tmp_path):
    """What is asked for in this process stops it; and it is said that nothing is saved."""
    program = """
import resilience_sdk
from resilience_sdk import preemption
with resilience_sdk.start_run(state={"values": {}}) as run:
    for step, _ in run.steps(range(10_000_000)):
        if step == 5:
            preemption.request("maintenance")
"""
    ended = run(tmp_path, program, RESILIENCE_RUN_DIR="/proc/none/run")
    assert ended.returncode == 75, ended.stderr
    start, saves, *rest = ended.stderr.splitlines()
    assert "cannot use /proc/none/run as run directory" in start
    assert "NOTHING IS SAVED" in saves
    assert not rest


def test_a_request_that_asks_nobody_says_so(tmp_path):
    """Switched off: one line, however often."""
    program = "from resilience_sdk import preemption; preemption.request('a'); preemption.request('b')"
    ended = run(tmp_path, program, RESILIENCE_DISABLE="1")
    assert ended.returncode == 0
    assert ended.stderr.count("preemption.request('a') asks nobody") == ended.stderr.count("asks nobody") == 1


def test_a_stop_at_the_last_save_is_told_by_the_steps_that_are_complete(tmp_path):
    """That a scheduler's end is known asks nobody; a signal does, and the ranks stop after the steps that were made."""
    program = """
import os, signal, time
from resilience_sdk import preemption
from resilience_sdk.rank import checkpoints
os.environ["SLURM_JOB_END_TIME"] = str(time.time() + 3600)
assert not preemption.check() and preemption.time_left() > 3000 and not checkpoints.is_asked()
os.kill(os.getpid(), signal.SIGTERM)
assert checkpoints.is_asked()
end = time.monotonic() + 30
while not checkpoints.asks_stop(40) and time.monotonic() < end:
    time.sleep(0.01)
"""
    ended = run(tmp_path, program)
    assert ended.returncode == 0, ended.stderr
    lines = [line for path in (tmp_path / "run" / "journal").glob("*.jsonl") for line in path.read_text().splitlines()]
    [agreed] = [event for event in map(json.loads, lines) if event["event"] == "stop_agreed"]
    assert agreed["step"] == 40
