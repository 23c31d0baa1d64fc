"""The engine under heartbeats and sections: what the monitor reads of blocks, however they are used."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from recording import Recording

from resilience_sdk import heartbeat
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder import page_layout as at
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
    """Recursion is one pass, the outermost call: in a sum, the time of the inner ones would count again."""

    def recurse(depth: int) -> None:
        with section("tree"):
            time.sleep(0.002)
            if depth:
                recurse(depth - 1)
            else:
                assert recording.stack() == ["tree"]

    recurse(2)
    assert recording.stack() == []
    (took_ns,) = recording.harvest()["tree"]
    assert took_ns >= 6_000_000


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
    assert sum(map(len, recording.harvest().values())) == len(set(names))


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
    """An epoch is open while its steps come and go, and the page tells when the last one came."""
    with section("epoch"):
        for _ in range(3):
            began = time.monotonic_ns()
            with heartbeat(), section("fwd"):
                assert recording.stack() == ["epoch", "step", "fwd"]
                assert recording.lane().beat_ns < began
            assert recording.stack() == ["epoch"]
            assert began < recording.lane().beat_ns < time.monotonic_ns()
    heartbeat.beat()
    assert began < recording.lane().beat_ns < time.monotonic_ns()


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


def test_names_that_vary_cost_no_memory(recording):
    """A number in the name of a section or a heartbeat: what is kept has an end."""
    for number in range(10_000):
        with heartbeat(f"epoch-{number}"), section(f"save-{number}"):
            pass
    assert len(lookup.BLOCKS) <= 1024
    assert len(lookup.BEATS) <= 1024
    assert len(recording.recorder.owner.blocks) <= at.NAME_SLOTS
    assert len(recording.recorder.owner.beats) <= at.NAME_SLOTS
    assert recording.stack() == []
    assert recording.recorder.lost.startswith("section 'epoch-32': a page holds 64 names")


def test_the_first_heartbeat_counts_also_where_sections_have_taken_all_names(recording):
    """It has a row that nobody reads, but the job is seen to have begun."""
    for number in range(at.NAME_SLOTS):
        with section(f"name-{number}"):
            pass
    with heartbeat():
        pass
    assert recording.snapshot().first_beat_ns is not None


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


def test_where_nothing_is_recorded_every_call_is_a_no_op(recording):
    """After `disable`, blocks, decorators and verbs do nothing; what is open closes as usual."""
    opened = section("open")
    opened.__enter__()
    before = bytes(recording.page.bytes)
    lookup.disable()
    with heartbeat() as inner, heartbeat(step=3), section("fwd", timeout=3.0):
        heartbeat.beat()
        heartbeat.done()
    with heartbeat.paused("why"):
        pass
    assert inner is lookup.NO_BLOCK
    assert heartbeat()(test_depth_has_no_limit) is test_depth_has_no_limit
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

    @rule(microseconds=st.integers(0, 400))
    def pause(self, microseconds: int) -> None:
        with heartbeat.paused("a"), heartbeat.paused("b"):
            time.sleep(microseconds / 1e6)

    @rule(name=st.sampled_from(NAMES), ends=st.booleans(), more_ns=st.integers(-(10**9), 10**9))
    def pass_by_hooks(self, name: str, ends: bool, more_ns: int) -> None:
        hooked = lookup.find_own_beat(name) if name == "step" else lookup.find_own_block(name, "compute")
        if not hooked.begin(time.monotonic_ns()):
            assert name in self.open
        elif ends:
            hooked.end(time.monotonic_ns(), -more_ns)
            self.left[name] += 1
        else:
            hooked.drop(time.monotonic_ns())

    def _close(self, error: Exception | None) -> None:
        name = self.open.pop()
        block(name).__exit__(type(error) if error else None, error, None)
        if name not in self.open:
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
