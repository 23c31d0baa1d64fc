"""Sections find out by themselves whether they hold collectives: a process group of one rank, as torch has it."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from resilience_sdk import heartbeat
from resilience_sdk.recorder import blocks
from resilience_sdk.recorder.lookup import find_own_block
from resilience_sdk.straggler import section

FIRST = 32  # passes that look


@pytest.fixture(autouse=True)
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduce():
    """Take part in one collective."""
    dist.all_reduce(torch.ones(1))


def passes(name, count, holds=lambda number: True, kind="compute"):
    """Pass a section so often, with a collective in those passes that hold one."""
    for number in range(count):
        with section(name, kind=kind):
            if holds(number):
                reduce()


def joint(recording):
    """Return which of the sections that were passed since the last call are known to hold collectives."""
    return {new.name for new in recording.reader.passes() if new.is_joint}


def test_a_section_around_a_collective_is_known_before_anybody_is_compared(recording):
    """Whatever its name; a section beside it is not, and neither is the step as a whole, which names nobody anyway."""
    for _ in range(16):
        with heartbeat():
            with section("fwd"):
                pass
            passes("sync", 1)
    assert joint(recording) == {"sync"}


def test_a_section_around_another_one_holds_what_that_holds(recording):
    """One around the whole step does."""
    for _ in range(8):
        with section("everything"):
            passes("bwd", 1)
    assert joint(recording) == {"everything", "bwd"}


def test_collectives_of_single_passes_are_not_the_sections(recording):
    """DDP agrees on its buckets in the second forward, and other threads have collectives of their own."""
    passes("fwd", 100, holds=lambda number: number in (1, 7))
    recording.recorder.ask()
    passes("fwd", 1, holds=lambda number: False)
    assert joint(recording) == set()


def test_one_in_eight_micro_batches_that_synchronises_is_enough(recording):
    """The others wait in that one for all delays of a slow rank."""
    passes("bwd", FIRST, holds=lambda number: number % 8 == 7)
    assert joint(recording) == {"bwd"}


def test_a_section_that_begins_to_synchronise_late_is_found_by_a_pass_now_and_then(recording):
    """After its first passes it takes the fast path, but for one pass each time that it is asked."""
    passes("bwd", FIRST, holds=lambda number: False)
    block = find_own_block("bwd", "compute")
    assert block.owner == threading.get_ident()
    passes("bwd", 100)
    assert joint(recording) == set()  # nobody has asked
    for _ in range(3):
        recording.recorder.ask()
        assert block.owner != threading.get_ident()
        passes("bwd", 2)
    assert joint(recording) == {"bwd"}
    assert block.owner == threading.get_ident()
    recording.recorder.ask()
    assert block.owner == threading.get_ident()  # it is known


def test_being_asked_in_the_midst_of_a_pass_costs_no_pass(recording):
    """The helper thread asks whenever it likes."""
    passes("fwd", FIRST, holds=lambda number: False)
    recording.reader.passes()
    with section("fwd"):
        recording.recorder.ask()
    passes("fwd", 3, holds=lambda number: False)
    (new,) = recording.reader.passes()
    assert len(new.samples_ns) == 4
    assert recording.stack() == []


def test_what_hooks_begin_and_end_is_their_own_work(recording):
    """The backward that `straggler.attach` times begins collectives too, but ends before it waits for them."""
    block = find_own_block("bwd", "compute")
    for now in range(1, 20):
        block.begin(2 * now)
        reduce()
        block.end(2 * now + 1)
    assert joint(recording) == set()


def test_sections_of_a_kind_that_names_nobody_do_not_look(recording):
    """They take the fast path from the first pass on."""
    passes("wait", 1, kind="comm")
    assert find_own_block("wait", "comm").owner == threading.get_ident()
    assert joint(recording) == set()


def test_without_a_group_nothing_is_known(recording):
    """Nor with one whose back end does not count: torch raises, and the section goes on."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    try:
        assert blocks.begun() is None
        for _ in range(FIRST + 1):
            with section("fwd"):
                pass
        assert find_own_block("fwd", "compute").owner == threading.get_ident()
        assert joint(recording) == set()
    finally:
        assert group is not None
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
