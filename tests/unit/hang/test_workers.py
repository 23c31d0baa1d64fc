"""Threads that a rank may be waiting for when it stands in a lock, by their stacks and what they wait in."""

from __future__ import annotations

from pathlib import Path

import pytest

import resilience_sdk
from resilience_sdk.hang.waits import On, Wait
from resilience_sdk.hang.workers import counts, may_be_waited_for, waits_for_thread, waits_for_worker

OURS = str(Path(resilience_sdk.__file__).parent)
LIB = "/usr/lib/python3.11"
SITE = "/usr/lib/python3.11/site-packages"
START = (
    f"{LIB}/threading.py:982 run",
    f"{LIB}/threading.py:1045 _bootstrap_inner",
    f"{LIB}/threading.py:1002 _bootstrap",
)
MAIN = (f"{LIB}/threading.py:327 wait", f"{LIB}/threading.py:629 wait", "/home/me/train.py:40 <module>")
POOL = (f"{LIB}/concurrent/futures/thread.py:58 run", f"{LIB}/concurrent/futures/thread.py:83 _worker", *START)
WORKERS = {
    "the program's": ("/home/me/rollout.py:9 fetch",),
    "a library's": (f"{LIB}/ssl.py:1166 read", f"{SITE}/urllib3/response.py:5 read", f"{SITE}/hub/client.py:3 get"),
    "a timer": (f"{LIB}/threading.py:331 wait", f"{LIB}/threading.py:629 wait", f"{LIB}/threading.py:1376 run"),
    "a loop of asyncio": (f"{LIB}/selectors.py:468 select", f"{LIB}/asyncio/base_events.py:1871 _run_once"),
    "a checkpoint of torch": (f"{SITE}/torch/distributed/checkpoint/_async_thread_executor.py:9 save",),
    "in a directory with a library's name": ("/home/me/wandb/pull.py:9 pull",),
    "the program's that torch reads for": (f"{SITE}/torch/serialization.py:9 load", "/home/me/pull.py:9 pull"),
}
HOUSEKEEPERS = {
    "torch's": (f"{LIB}/multiprocessing/queues.py:113 get", f"{SITE}/torch/utils/data/_utils/pin_memory.py:31 do"),
    "ours": (f"{LIB}/selectors.py:415 select", f"{OURS}/rank/helper_thread.py:110 _serve"),
    "ours that writes": (f"{OURS}/checkpoint/save.py:64 _run",),
    "a server": (f"{LIB}/selectors.py:415 select", f"{LIB}/socketserver.py:233 serve_forever"),
    "a server of the program's": (f"{LIB}/socket.py:294 accept", "/home/me/serve.py:4 serve"),
    "a library's server": (f"{LIB}/asyncio/base_events.py:1871 _run_once", f"{SITE}/uvicorn/server.py:60 run"),
    "a logger's queue": (f"{LIB}/queue.py:171 get", f"{LIB}/logging/handlers.py:1507 dequeue"),
    "a bar": (f"{LIB}/threading.py:331 wait", f"{SITE}/tqdm/_monitor.py:60 run"),
    "a tracker": (f"{LIB}/socket.py:706 readinto", f"{SITE}/wandb/sdk/lib/sock_client.py:50 read"),
    "nothing": (),
}


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize("start", [START, POOL], ids=["thread", "pool"])
def test_who_works_for_the_program_may_be_waited_for(name, start):
    """However it was started."""
    assert may_be_waited_for((*WORKERS[name], *start), MAIN)


@pytest.mark.parametrize("name", HOUSEKEEPERS)
def test_who_keeps_house_is_not_waited_for(name):
    """A lock beside only those is a lock."""
    frames = HOUSEKEEPERS[name]
    assert not may_be_waited_for((*frames, *START) if frames else (), MAIN)


def test_a_housekeeper_is_waited_for_by_its_own_library():
    """A tracker's end waits for its thread, our save for the one before it."""
    finish = (f"{LIB}/threading.py:327 wait", f"{SITE}/wandb/sdk/wandb_run.py:9 finish", *MAIN[2:])
    assert may_be_waited_for((*HOUSEKEEPERS["a tracker"], *START), finish)
    assert not may_be_waited_for((*HOUSEKEEPERS["a bar"], *START), finish)
    save = (f"{LIB}/threading.py:327 wait", f"{OURS}/checkpoint/save.py:78 wait", *MAIN[2:])
    assert may_be_waited_for((*HOUSEKEEPERS["ours that writes"], *START), save)
    assert not may_be_waited_for((*HOUSEKEEPERS["ours"], *START), save)


LOOP = (f"{LIB}/selectors.py:468 select", f"{LIB}/asyncio/base_events.py:1871 _run_once")


@pytest.mark.parametrize(
    ("wait", "frames", "expected"),
    [
        (Wait(On.SOCKET), (), True),
        (Wait(On.PIPE), (), True),
        (Wait(On.CHILD), (), True),
        (Wait(On.FILE), (), True),
        (Wait(On.ACCEPT), (), False),
        (Wait(On.LOCK), (), False),
        (Wait(On.MUTEX), (), False),
        (Wait(On.OTHER), (), False),
        (Wait(On.LOCK, end_ns=600), (), True),
        (Wait(On.SLEEP, end_ns=600), (), True),
        (Wait(On.LOCK, end_ns=601), (), False),
        (Wait(On.SLEEP, end_ns=601), (), False),
        (Wait(On.POLL), LOOP, True),
        (Wait(On.POLL, polls_one=True), LOOP, False),
        (Wait(On.POLL, 600, polls_one=True), LOOP, True),
        (Wait(On.POLL, 601, polls_one=True), LOOP, False),
        (Wait(On.POLL, 601, polls_one=True), (), True),
    ],
)
def test_what_a_thread_is_in_decides(wait, frames, expected):
    """Something outside, or a time that is not too far; a lock and an idle loop promise nothing."""
    assert counts(wait, frames, horizon_ns=600) is expected


def test_waits_for_a_worker_that_the_stack_names():
    """A join, a future, a queue; not a bare Event."""
    assert waits_for_worker((f"{LIB}/threading.py:1139 _wait_for_tstate_lock", f"{LIB}/threading.py:1119 join"))
    assert waits_for_worker((f"{LIB}/threading.py:327 wait", f"{LIB}/concurrent/futures/_base.py:451 result"))
    assert not waits_for_worker(MAIN)


def test_waits_that_only_a_thread_of_the_process_ends():
    """A join and a queue; a future may be another process's, and so may a queue of multiprocessing."""
    assert waits_for_thread((f"{LIB}/threading.py:1139 _wait_for_tstate_lock", f"{LIB}/threading.py:1119 join"))
    assert waits_for_thread((f"{LIB}/threading.py:327 wait", f"{LIB}/queue.py:171 get", "/home/me/train.py:9 main"))
    assert not waits_for_thread((f"{LIB}/threading.py:327 wait", f"{LIB}/concurrent/futures/_base.py:451 result"))
    assert not waits_for_thread((f"{LIB}/multiprocessing/queues.py:103 get", "/home/me/train.py:9 main"))
