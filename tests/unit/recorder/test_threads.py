"""Blocks in many threads, in coroutines that interleave, and in a forked child."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from resilience_sdk import heartbeat
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.straggler import section


def test_threads_have_lanes_of_their_own(recording):
    """Four threads nest the same sections at once; each sees its own stack, and every duration is there."""
    rounds, start = 50, threading.Barrier(3)

    def work(seed: int) -> None:
        order = random.Random(seed)
        start.wait()
        for _ in range(rounds):
            names = order.sample(["a", "b", "c"], 3)
            for name in names:
                section(name).__enter__()
            assert recording.stack() == names
            for name in reversed(names):
                section(name).__exit__(None, None, None)

    with heartbeat(), ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work, seed) for seed in range(3)]:
            done.result()
        assert recording.stack() == ["step"]
    snapshot = recording.snapshot()
    assert len(snapshot.lanes) == 4
    assert all(lane.stack == () for lane in snapshot.lanes)
    assert (snapshot.beats, snapshot.odd_exits, snapshot.lost) == (1, 0, 0)
    counts = sum(
        recording.page.words[at.ring_at(ring) + at.R_COUNT] for ring in range(recording.page.words[at.W_RINGS])
    )
    assert counts == 3 * rounds * 3 + 1


def test_one_block_handed_to_many_threads(recording):
    """A block object that several threads enter at once keeps them apart."""
    shared, start = section("shared"), threading.Barrier(2)
    with shared:
        pass
    shared = section("shared")

    def work() -> None:
        start.wait()
        for _ in range(200):
            with shared:
                assert recording.stack() == ["shared"]

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work) for _ in range(2)]:
            done.result()
    assert recording.stack() == []
    assert recording.snapshot().odd_exits == 0


def test_more_threads_than_lanes(recording):
    """Threads beyond the page's lanes are counted and disturb nobody."""
    inside, leave = threading.Barrier(at.LANE_SLOTS + 3), threading.Event()

    def work() -> None:
        with section("work"):
            inside.wait()
            leave.wait(20)

    threads = [threading.Thread(target=work) for _ in range(at.LANE_SLOTS + 2)]
    with heartbeat():
        for thread in threads:
            thread.start()
        inside.wait()
        lanes_seen = recording.snapshot().lanes
        leave.set()
        for thread in threads:
            thread.join()
        assert recording.stack() == ["step"]
    assert [[s.name for s in lane.stack] for lane in lanes_seen] == [["step"], *[["work"]] * (at.LANE_SLOTS - 1)]
    assert recording.snapshot().lost == 3


def test_the_first_thread_that_beats_is_the_one_that_is_watched(recording):
    """A loop in another thread than the one that imported us is the main lane."""

    def train() -> int:
        with section("setup"):
            pass
        for _ in range(3):
            with heartbeat(), section("fwd"):
                pass
        return threading.get_native_id()

    with ThreadPoolExecutor(1) as trainer:
        ident = trainer.submit(train).result()
    assert recording.snapshot().main_lane.thread_id == ident
    assert recording.snapshot().beats == 3


def test_coroutines_that_interleave(recording):
    """Blocks of two tasks are timed right in whichever order they end."""

    async def first(entered: asyncio.Event, leave: asyncio.Event) -> None:
        with section("first"):
            entered.set()
            await leave.wait()

    async def main() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(first(entered, leave))
        await entered.wait()
        with section("second"):
            assert recording.stack() == ["first", "second"]
            leave.set()
            await task
            assert recording.stack() == ["second"]

    asyncio.run(main())
    assert recording.stack() == []
    assert recording.snapshot().odd_exits == 0
    assert recording.harvest().keys() == {"first", "second"}


def test_coroutines_that_share_a_name_leave_no_false_durations(recording):
    """Where two tasks have one name open at once, nobody can tell whose end is whose: counted, not sampled."""

    async def hold(entered: asyncio.Event, leave: asyncio.Event) -> None:
        with section("shared"):
            entered.set()
            await leave.wait()

    async def main() -> None:
        one, two = (asyncio.Event(), asyncio.Event()), (asyncio.Event(), asyncio.Event())
        tasks = [asyncio.create_task(hold(*one)), asyncio.create_task(hold(*two))]
        await one[0].wait()
        await two[0].wait()
        assert recording.stack() == ["shared"]
        for (_, leave), task in zip((one, two), tasks, strict=True):
            leave.set()
            await task

    asyncio.run(main())
    assert recording.stack() == []
    assert recording.snapshot().odd_exits == 2
    assert recording.harvest() == {}
    with section("shared"):
        pass
    assert len(recording.harvest()["shared"]) == 1


def test_many_coroutines_leave_a_clean_stack(recording):
    """Whatever way tasks interleave, in the end nothing is open and all is recorded or counted."""

    async def task(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(20):
            with section(f"s{order.randrange(3)}"):
                await asyncio.sleep(0)
                with section(f"s{order.randrange(3)}"):
                    await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(task(seed) for seed in range(5)))

    asyncio.run(main())
    assert recording.stack() == []
    for name in ("s0", "s1", "s2"):
        with section(name):
            assert recording.stack() == [name]


FORKING = """
import os, sys, warnings
from pathlib import Path
from resilience_sdk import heartbeat
from resilience_sdk.straggler import section
from resilience_sdk.rank import current

warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tried here
for _ in range(3):
    with heartbeat():
        pass
page = current().page.path
held = section("held")
with heartbeat(), section("around"):
    before = page.read_bytes()
    pid = os.fork()
    if not pid:
        for _ in range(100):
            with heartbeat(), section("child"), held:
                heartbeat.beat()
        with heartbeat.paused("child"):
            pass
        heartbeat.done()
    else:
        _, status = os.waitpid(pid, 0)
        after = page.read_bytes()
        same = (status, not list(page.parent.glob(f"*{pid}*")), after == before)
if not pid:
    os._exit(0)
print(*same)
with heartbeat():
    pass
print(current().page.words[11] == 0)
"""


def test_a_forked_child_writes_nothing(tmp_path):
    """A child that a rank forks changes neither its page nor the job's directory, and runs as if unwatched."""
    (tmp_path / "pages").mkdir()
    env = {"RESILIENCE_PAGE_DIR": str(tmp_path / "pages"), "RESILIENCE_RUN_DIR": str(tmp_path / "run"), "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("0 True True\nTrue\n", "")
