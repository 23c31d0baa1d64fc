"""Signals that ask a rank to leave: whatever its main thread does, and whoever else hears them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rank_programs import LOOP, run


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
from resilience_sdk import preemption
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder import page_layout as layout
preemption.time_left()
words = lookup.recorder().page.words
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
from resilience_sdk import preemption
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder import page_layout as layout
async def main():
    loop = asyncio.get_running_loop()
    if "{when}" == "after":
        preemption.time_left()
    loop.add_signal_handler(signal.SIGUSR2, print)
    preemption.time_left()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)
    print(lookup.recorder().page.words[layout.W_NOTICE])
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


def test_a_rank_that_ends_with_persistent_workers_prints_no_error(tmp_path):
    """Python terminates them, which torch has end cleanly; so they do where they hear their rank only."""
    program = """
from torch.utils.data import DataLoader
from resilience_sdk import preemption
preemption.time_left()
loader = DataLoader(range(8), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
print(len(list(loader)))
"""
    ended = run(tmp_path, program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "8\n", "")


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
from resilience_sdk import preemption
from resilience_sdk.recorder import lookup
near, far = socket.socketpair()
near.setblocking(False)
signal.set_wakeup_fd(near.fileno())
preemption.check()
preemption.request("x")
(lookup.recorder().page.path.parent / "ending-0.json").write_text('{"reason": "rank failed"}')
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print("survived")
"""
    ended = run(tmp_path, program)
    assert (ended.returncode, ended.stdout) == (-15, ""), ended.stderr


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


def test_a_real_time_signal_may_ask_to_leave(tmp_path):
    """Such signals have no name of their own in Python."""
    ask = "os.kill(os.getpid(), signal.SIGRTMIN + 5)"
    ended = run(tmp_path, LOOP.format(ask=ask), RESILIENCE_PREEMPT_SIGNALS="SIGRTMIN+5")
    assert (ended.returncode, ended.stdout) == (75, "[] True\n"), ended.stderr
