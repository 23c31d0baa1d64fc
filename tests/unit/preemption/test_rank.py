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


def ending_in(seconds, program):
    """Return that loop in a job which the scheduler ends so long after the imports, however long they take."""
    return program.replace("heard = []", f"heard = []; os.environ['SLURM_JOB_END_TIME'] = str(time.time() + {seconds})")


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "busy",
    [
        "time.sleep(60)",
        "threading.Event().wait(60)",
        "queue.Queue().get(timeout=60)",
        "hashlib.pbkdf2_hmac('sha256', b'x', b'y', 1 << 26)",
        "[sum(range(1000)) for _ in range(1 << 30)]",
    ],
)
@pytest.mark.parametrize("whom", ["os.kill(os.getpid(), 15)", "signal.pthread_kill(threading.get_ident(), 15)"])
def test_a_notice_is_on_the_page_at_once_whatever_the_main_thread_does(tmp_path, busy, whom):
    """A data wait, a long C call, an evaluation, before the first check; to the process or to any of its threads."""
    program = f"""
import hashlib, os, queue, signal, sys, threading, time
from resilience_sdk import lanes, preemption
from resilience_sdk.rank_page import layout
preemption.time_left()
words = lanes.recorder().page.words
def ask():
    {whom}
    end = time.monotonic() + 20
    while not words[layout.W_NOTICE] and time.monotonic() < end:
        time.sleep(0.001)
    print(words[layout.W_NOTICE], end - time.monotonic() > 18, flush=True)
    os._exit(0)
threading.Timer(0.2, ask).start()
{busy}
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "15 True\n", ended.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_with_an_event_loop_that_hears_signals_the_notice_comes_too(tmp_path, when):
    """The loop has the wakeup descriptor; our handler runs as soon as the main thread is back in Python."""
    program = f"""
import asyncio, os, signal, time
from resilience_sdk import lanes, preemption
from resilience_sdk.rank_page import layout
async def main():
    loop = asyncio.get_running_loop()
    if "{when}" == "after":
        preemption.time_left()
    loop.add_signal_handler(signal.SIGUSR2, print)
    preemption.time_left()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)
    print(lanes.recorder().page.words[layout.W_NOTICE])
asyncio.run(main())
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "15\n", ended.stderr


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


def test_before_the_first_check_a_signal_means_what_it_always_did(tmp_path):
    """A job that is starting up has nothing to save, and ends at once, also where the SDK watches it already."""
    program = """
import os, signal
from resilience_sdk import heartbeat, preemption
with heartbeat():
    os.kill(os.getpid(), signal.SIGTERM)
"""
    assert run(tmp_path, program).returncode == -15


def test_the_signal_of_a_teardown_ends_a_rank_that_another_notice_had_reached_before(tmp_path):
    """A request came first; then the launcher ends what is left of a failed attempt, and an event loop's descriptor
    hears of the signal, so that only the interpreter's handler can act."""
    program = """
import os, signal, socket, time
from resilience_sdk import lanes, preemption
near, far = socket.socketpair()
near.setblocking(False)
signal.set_wakeup_fd(near.fileno())
preemption.check()
preemption.request("x")
(lanes.recorder().page.path.parent / "ending-0.json").write_text('{"reason": "rank failed"}')
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print("survived")
"""
    ended = run(tmp_path, program)
    assert (ended.returncode, ended.stdout) == (-15, ""), ended.stderr


@pytest.mark.slow
def test_a_long_save_has_all_the_time_that_the_scheduler_leaves(tmp_path):
    """A save takes longer than `preempt_time`, so the job stops earlier, and keeps what it has won by that."""
    program = LOOP.format(ask="from resilience_sdk.preemption import rank; rank.begin(lambda: 100.0)")
    program = program.replace("assert preemption.time_left() is None", "")
    program = program.replace("50 < preemption.time_left() <= 60", "preemption.time_left() > 1.2")
    ended = run(tmp_path, ending_in(8, program), RESILIENCE_PREEMPT_TIME="1")
    assert (ended.returncode, ended.stdout) == (75, "[] True\n"), ended.stderr


def test_a_request_in_vain_keeps_no_time_for_a_last_save(tmp_path):
    """A loop that checks no more cannot stop: it goes on, and periodic saves go on, too."""
    program = """
import os, pathlib, time
from resilience_sdk import preemption
preemption.check()
preemption.request("maintenance")
end = time.monotonic() + 40
known = []
while (left := preemption.time_left()) is not None:
    known.append(left)
    time.sleep(0.01)
    assert time.monotonic() < end
print(0 < max(known) <= 1, min(known))
journal = pathlib.Path(os.environ["RESILIENCE_RUN_DIR"]) / "journal"
while not any("no stop was agreed in time" in path.read_text() for path in journal.iterdir()):
    time.sleep(0.01)
    assert time.monotonic() < end
"""
    ended = run(tmp_path, program, RESILIENCE_PREEMPT_TIME="1")
    assert (ended.returncode, ended.stdout) == (0, "True 0.0\n"), ended.stderr


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


NO_PLACE = {"RESILIENCE_PAGE_DIR": "/dev/null/nowhere"}


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


@pytest.mark.slow
@pytest.mark.parametrize("place", [{}, NO_PLACE], ids=["page", "no page"])
def test_the_end_that_the_scheduler_told_is_a_notice(tmp_path, place):
    """`preempt_time` before it the job stops, without any signal; not before, and with what is left until then."""
    program = LOOP.format(ask="").replace("assert preemption.time_left() is None", "began = preemption.time_left()")
    program = program.replace("50 < preemption.time_left() <= 60", "began, preemption.time_left()")
    ended = run(tmp_path, ending_in(9, program), RESILIENCE_PREEMPT_TIME="4", **place)
    assert ended.returncode == 75, ended.stderr
    heard, began, left = ended.stdout.split()
    assert heard == "[]"
    assert 6 < float(began) <= 9
    assert 0 < float(left) <= 4


@pytest.mark.parametrize("first", ["preemption.request('x')", "preemption.time_left()"])
def test_handlers_are_installed_by_the_main_thread_when_another_one_was_first(tmp_path, first):
    """The next check does it; only the main thread may."""
    program = f"""
import os, signal, threading, time
from resilience_sdk import preemption
early = threading.Thread(target=lambda: {first})
early.start()
early.join()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
preemption.check()
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
os.kill(os.getpid(), signal.SIGTERM)
while not preemption.check():
    time.sleep(0.001)
preemption.exit()
"""
    assert run(tmp_path, program).returncode == 75


def test_checks_outside_the_main_thread_are_answered_and_say_that_signals_are_not_heard(tmp_path):
    """One line with the cure; a request still stops the job."""
    program = """
import threading, time
from resilience_sdk import preemption
def train():
    preemption.check()
    preemption.request("x")
    while not preemption.check():
        time.sleep(0.001)
    print("stopped")
training = threading.Thread(target=train)
training.start()
training.join(30)
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "stopped\n", ended.stderr
    assert ended.stderr.count("call preemption.time_left() once in the main thread") == 1


def test_no_check_is_lost_while_another_thread_starts_to_listen(tmp_path):
    """All ranks count alike, however the start of one rank's threads falls."""
    program = """
import threading
from resilience_sdk import lanes, preemption
from resilience_sdk.rank_page import layout
inside, go = threading.Event(), threading.Event()
start = lanes.starter()
def slow():
    recorder = start()
    inside.set()
    assert go.wait(20)
    return recorder
lanes.set_starter(slow)
other = threading.Thread(target=preemption.time_left)
other.start()
assert inside.wait(20)
threading.Timer(0.2, go.set).start()
preemption.check()  # meets the start of the other thread
other.join()
preemption.check()
lanes.set_starter(start)
print(lanes.recorder().page.words[layout.W_CHECKS])
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "2\n", ended.stderr


def test_a_real_time_signal_may_ask_to_leave(tmp_path):
    """Such signals have no name of their own in Python."""
    ask = "os.kill(os.getpid(), signal.SIGRTMIN + 5)"
    ended = run(tmp_path, LOOP.format(ask=ask), RESILIENCE_PREEMPT_SIGNALS="SIGRTMIN+5")
    assert (ended.returncode, ended.stdout) == (75, "[] True\n"), ended.stderr


@pytest.mark.slow
def test_under_torchrun_a_signal_leaves_no_more_than_its_30_seconds(tmp_path):
    """It kills its ranks then, whatever `preempt_time` says; a request has the time of the setting."""
    for number, (ask, most) in enumerate({"os.kill(os.getpid(), 15)": 30, "preemption.request('x')": 60}.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        program = LOOP.format(ask=ask).replace("50 < preemption.time_left() <= 60", "preemption.time_left()")
        ended = run(folder, program, TORCHELASTIC_RUN_ID="here")
        assert most - 10 < float(ended.stdout.split()[-1]) <= most, ended.stderr


def test_the_first_check_waits_for_no_monitor_and_handles_signals_at_once(tmp_path):
    """One that never comes up costs nothing; until it is known who coordinates, a notice is kept."""
    program = """
import os, signal, time
from resilience_sdk import preemption
from resilience_sdk import environ
from resilience_sdk.file_lock import file_lock
from resilience_sdk.monitor.spawn import SPAWN_LOCK, is_alive
from resilience_sdk.rank_page import job_page_directory
from resilience_sdk.session.identity import fallback_job_key
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
from resilience_sdk.journal import read_journal
from resilience_sdk.session import current, stopping
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
    assert ended.stdout == "49 SIGTERM\n", ended.stderr
    assert ended.stderr.count("the job is asked to leave by SIGTERM to rank 0 on ") == 1
    assert ended.stderr.count(": all ranks stop after 49 steps") == 1


def test_a_monitor_that_was_asked_is_heard_where_ranks_agree_by_themselves(tmp_path):
    """It hears the cloud, and tells the ranks their time; it has journalled that, so they do not."""
    program = """
import time
from resilience_sdk import lanes, preemption
from resilience_sdk.journal import read_journal
from resilience_sdk.rank_page import layout
from resilience_sdk.session import current, stopping
stopping.Coordination.by_monitor = lambda self: False
began = time.monotonic()
for _ in range(100):
    assert not preemption.check()
lanes.recorder().page.words[layout.W_DEADLINE_NS] = time.monotonic_ns() + 40_000_000_000
while not preemption.check():
    time.sleep(0.001)
    assert time.monotonic() < began + 20
events = [event["event"] for event in read_journal(current().run_dir.journal).events]
print(30 < preemption.time_left() <= 40, "stop_agreed" in events, "preempt_notice" in events)
"""
    ended = run(tmp_path, program)
    assert ended.stdout == "True True False\n", ended.stderr


def test_a_notice_of_the_cloud_stops_the_job_with_the_time_that_the_cloud_gives(tmp_path):
    """The monitor asks the metadata service; no signal comes, and 30 s are left instead of the 60 s of the setting."""
    program = LOOP.format(ask="").replace("50 < preemption.time_left() <= 60", "20 < preemption.time_left() <= 30")
    with serving(Gce()) as gce:
        gce.documents["preempted"] = "TRUE"
        program = program.replace("assert preemption.time_left() is None\n", "")
        ended = run(tmp_path, program, RESILIENCE_CLOUD_NOTICES="gcp", RESILIENCE_CLOUD_ENDPOINT=gce.url)
    assert (ended.returncode, ended.stdout) == (75, "[] True\n"), ended.stderr


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
