"""The engine under heartbeats and sections: what the monitor reads of blocks, however they are used."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from recording import Recording

from resilience_sdk import heartbeat, lanes
from resilience_sdk.rank_page import layout as at
from resilience_sdk.straggler import section

NAMES = ("step", "fwd", "bwd", "eval")


def block(name: str):
    """The heartbeat or section of that name."""
    return heartbeat() if name == "step" else section(name)


def test_open_blocks_are_on_the_page_outermost_first(recording):
    """The monitor sees what is open, with kinds and entry times, and nothing once all is closed."""
    before = time.monotonic_ns()
    with heartbeat(), section("fwd"), section("load", kind="io"):
        stack = recording.lane().stack
    assert [(s.name, s.kind) for s in stack] == [("step", "heartbeat"), ("fwd", "compute"), ("load", "io")]
    entered = [s.entered_ns for s in stack]
    assert entered == sorted(entered)
    assert before <= entered[0] <= entered[-1] <= time.monotonic_ns()
    assert recording.stack() == []


def test_durations_are_recorded_per_name(recording):
    """Each completed block leaves its duration."""
    for _ in range(3):
        with section("sleep"):
            time.sleep(0.01)
    (samples,) = recording.harvest().values()
    assert len(samples) == 3
    assert all(10_000_000 <= sample < 5_000_000_000 for sample in samples)


def test_an_occurrence_counts_the_completed_ones(recording):
    """A block knows how often its name was completed before."""
    for count in range(3):
        with section("fwd"):
            (opened,) = recording.lane().stack
            assert opened.occurrences == count


def test_an_exception_closes_every_level(recording):
    """An exception through nested blocks closes all of them, with a duration each, and goes on."""
    with pytest.raises(ZeroDivisionError), heartbeat(), section("fwd"), section("inner"):
        _ = 1 // 0
    assert recording.stack() == []
    assert {name: len(samples) for name, samples in recording.harvest().items()} == {"step": 1, "fwd": 1, "inner": 1}
    with heartbeat():
        assert recording.stack() == ["step"]


def test_a_section_may_be_entered_again_within_itself(recording):
    """Recursion leaves one duration per call, the outer the longest; the page shows the outermost."""

    def recurse(depth: int) -> None:
        with section("tree"):
            time.sleep(0.002)
            if depth:
                recurse(depth - 1)
            else:
                assert recording.stack() == ["tree"]

    recurse(2)
    assert recording.stack() == []
    samples = recording.harvest()["tree"]
    assert samples == sorted(samples)
    assert len(samples) == 3


def test_a_heartbeat_within_itself_is_one_step(recording):
    """Only the outermost level of a heartbeat counts."""
    for _ in range(2):
        with heartbeat(), section("fwd"), heartbeat():
            assert recording.stack() == ["step", "fwd"]
    assert recording.snapshot().beats == 2
    with heartbeat():
        pass
    assert recording.snapshot().beats == 3


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b", "a"), ("a", "b", "a", "a", "b")])
def test_pausing_within_a_block_that_is_open_twice_ends(recording, names):
    """A pause moves the start of every open block, also of one that is open on several levels."""
    for name in names:
        section(name).__enter__()
    before = recording.lane().stack
    with heartbeat.paused("lunch"):
        time.sleep(0.01)
    after = recording.lane().stack
    assert [s.name for s in after] == list(dict.fromkeys(names))
    shifts = [b.entered_ns - a.entered_ns for a, b in zip(before, after, strict=True)]
    assert all(shift >= 10_000_000 for shift in shifts)
    for name in reversed(names):
        section(name).__exit__(None, None, None)
    assert recording.stack() == []
    assert sum(map(len, recording.harvest().values())) == len(names)


def test_what_an_exception_left_open_is_closed_with_the_block_around_it(recording):
    """An exception between two bytecodes can cost a block its exit: the one that it passes through closes it."""
    with pytest.raises(ZeroDivisionError), heartbeat():
        section("fwd").__enter__()
        section("inner").__enter__()
        _ = 1 // 0
    assert recording.stack() == []
    snapshot = recording.snapshot()
    assert (snapshot.beats, snapshot.odd_exits) == (1, 2)
    assert recording.harvest().keys() == {"step"}
    with heartbeat(), section("fwd"), section("inner"):
        assert recording.stack() == ["step", "fwd", "inner"]
    assert recording.snapshot().odd_exits == 2


def test_what_a_swallowed_exception_left_open_is_not_shown_and_begins_anew(recording):
    """A block that a completed heartbeat left open is not taken for open, and is usable in the next step."""
    with heartbeat():
        section("fwd").__enter__()
    assert recording.stack() == []
    with heartbeat(), section("fwd"):
        assert recording.stack() == ["step", "fwd"]
    assert recording.stack() == []
    assert len(recording.harvest()["fwd"]) == 1
    assert recording.snapshot().odd_exits == 1


def test_a_section_around_the_heartbeats_stays_open(recording):
    """An epoch is open while its steps come and go."""
    with section("epoch"):
        for _ in range(3):
            with heartbeat(), section("fwd"):
                assert recording.stack() == ["epoch", "step", "fwd"]
            assert recording.stack() == ["epoch"]


def test_depth_has_no_limit(recording):
    """However deep blocks nest, all are shown and timed."""
    names = [f"level-{number}" for number in range(40)]
    for name in names:
        section(name).__enter__()
    assert recording.stack() == names
    for name in reversed(names):
        section(name).__exit__(None, None, None)
    assert recording.stack() == []
    assert recording.harvest().keys() == set(names)
    assert recording.snapshot().lost == 0


def test_more_names_than_the_page_holds(recording):
    """A name that finds no place works and is counted as lost; the others are recorded as ever."""
    for number in range(at.NAME_SLOTS + 10):
        with section(f"name-{number}"):
            pass
    assert recording.harvest().keys() == {f"name-{number}" for number in range(at.NAME_SLOTS)}
    assert recording.snapshot().lost == 10
    with section("name-0"), section(f"name-{at.NAME_SLOTS + 1}"), section("name-1"):
        assert recording.stack() == ["name-0", "name-1"]


def test_more_rings_than_the_page_holds(recording):
    """Where every thread uses every name, rings run out: what finds none works, is not shown, and is counted."""
    names = [f"name-{number}" for number in range(at.NAME_SLOTS)]

    def use_all() -> list[list[str]]:
        shown = []
        for name in names:
            with section(name):
                shown.append(recording.stack())
        return shown

    assert use_all() == [[name] for name in names]
    with ThreadPoolExecutor(1) as other:
        shown = other.submit(use_all).result()
    left = at.RING_SLOTS - at.NAME_SLOTS
    assert shown == [[name] for name in names[:left]] + [[]] * (at.NAME_SLOTS - left)
    assert recording.snapshot().lost == at.NAME_SLOTS - left


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
from resilience_sdk.session import current

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


def test_where_nothing_is_recorded_every_call_is_a_no_op(recording):
    """After `disable`, blocks, decorators and verbs do nothing; what is open closes as usual."""
    opened = section("open")
    opened.__enter__()
    before = bytes(recording.page.bytes)
    lanes.disable()
    with heartbeat() as inner, heartbeat(step=3), section("fwd", timeout=3.0):
        heartbeat.beat()
        heartbeat.done()
    with heartbeat.paused("why"):
        pass
    assert inner is lanes.NO_BLOCK
    assert heartbeat()(test_coroutines_that_interleave) is test_coroutines_that_interleave
    assert bytes(recording.page.bytes) == before
    opened.__exit__(None, None, None)
    assert recording.stack() == []


class _StoppedError(Exception):
    """Raised through some levels."""


_DEEPEST = 32


class NestedBlocks(RuleBasedStateMachine):
    """Blocks entered, left and unwound in any order that nesting allows; the page says what a list says."""

    @initialize()
    def begin(self) -> None:
        self.folder = _folder()
        self.recording = Recording(self.folder).__enter__()
        self.open: list[str] = []
        self.left = dict.fromkeys(NAMES, 0)

    @rule(name=st.sampled_from(NAMES))
    @precondition(lambda self: len(self.open) < _DEEPEST)
    def enter(self, name: str) -> None:
        block(name).__enter__()
        self.open.append(name)

    @rule()
    @precondition(lambda self: self.open)
    def leave(self) -> None:
        self._close(None)

    @rule(levels=st.integers(1, 4))
    @precondition(lambda self: self.open)
    def unwind(self, levels: int) -> None:
        for _ in range(min(levels, len(self.open))):
            self._close(_StoppedError())

    @rule()
    def pause(self) -> None:
        with heartbeat.paused("a"), heartbeat.paused("b"):
            pass

    def _close(self, error: Exception | None) -> None:
        name = self.open.pop()
        block(name).__exit__(type(error) if error else None, error, None)
        if name != "step" or "step" not in self.open:
            self.left[name] += 1

    @invariant()
    def page_shows_the_model(self) -> None:
        if not hasattr(self, "open"):
            return
        lane = self.recording.snapshot().lanes[0]
        assert [s.name for s in lane.stack] == list(dict.fromkeys(self.open))
        entered = [s.entered_ns for s in lane.stack]
        assert entered == sorted(entered)
        assert lane.beats == self.left["step"]
        assert self.recording.snapshot().odd_exits == 0
        for opened in lane.stack:
            assert opened.occurrences == self.left[opened.name]

    def teardown(self) -> None:
        if hasattr(self, "open"):
            while self.open:
                self._close(None)
            self.page_shows_the_model()
            self.recording.__exit__()
            self.folder.rmdir()


def _folder():
    import tempfile
    from pathlib import Path

    return Path(tempfile.mkdtemp())


NestedBlocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNestedBlocks = NestedBlocks.TestCase


def test_heartbeats_after_done_take_the_deadlines_up_again(recording):
    """A second phase of the loop is watched like the first: by blocks, with and without steps, and by pulses."""
    for phase in range(3):
        for step in range(3):
            with heartbeat(step=step) if phase == 2 else heartbeat():
                assert not recording.snapshot().done, (phase, step)
        heartbeat.done()
        assert recording.snapshot().done
    heartbeat.beat()
    assert not recording.snapshot().done
    heartbeat.done()
    with heartbeat():
        heartbeat.done()  # inside the last step of a phase
    assert recording.snapshot().done
    with heartbeat():
        assert not recording.snapshot().done


def test_the_fast_path_comes_back_after_done(recording):
    """Only the first heartbeat of the next phase looks whether the deadlines have ended."""
    with heartbeat() as beat:
        pass
    assert beat.owner == threading.get_ident()
    heartbeat.done()
    assert beat.owner == 0
    with heartbeat():
        pass
    assert beat.owner == threading.get_ident()
