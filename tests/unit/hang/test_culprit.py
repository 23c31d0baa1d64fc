"""Culprit, not victim."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.hang.culprit import find_culprits
from resilience_sdk.hang.evidence import Collective, FlightRecord, GroupRecord
from resilience_sdk.hang.timers import RankState

INSIDE = ("/venv/torch/distributed/distributed_c10d.py:1 all_reduce", "/app/train.py:9 step")
OUTSIDE = ("/app/data.py:3 load", "/app/train.py:5 step")


def record(enqueued, completed, op="all_reduce", size=8, started=None, name="0", members=None):
    """One rank's record of one group that stands (or not) in its last collective."""
    entries = {n: Collective(n, op, ((size,),), (), ("Float",), n <= completed) for n in range(1, enqueued + 1)}
    world = "default_pg" if name == "0" else "other"
    return FlightRecord("2.10", {name: GroupRecord(name, world, enqueued, completed, started, members, entries)})


def ranks(make, count, **facts):
    """So many ranks in the same step and section."""
    return [make.rank(r, make.beat(40), make.section("fwd", 39), world_size=count, **facts) for r in range(count)]


def find(states, stacks=None, flight=None, on_cuda=False):
    """Climb the ladder."""
    return find_culprits(states, stacks or {}, flight or {}, on_cuda)


def named(finding):
    """Return what a verdict says in short."""
    return finding.culprits, finding.category, finding.cause


# -- rung 1


def test_a_dead_rank(make):
    """Survivors are victims; the exit status, not the hang, has the cause."""
    states = ranks(make, 3)
    states[1] = attrs.evolve(states[1], alive=False)
    finding = find(states)
    assert named(finding) == ((1,), "unknown", "unknown")
    assert finding.victims == (0, 2)
    assert finding.conclusive


def test_a_stopped_rank(make):
    """State T names the rank and the cause, with step, section and node in the sentence."""
    states = ranks(make, 3)
    states[2] = attrs.evolve(states[2], process_state="T", node="n7")
    finding = find(states, {0: INSIDE, 1: INSIDE, 2: OUTSIDE})
    assert named(finding) == ((2,), "hang", "hang_rank_stopped")
    assert finding.confidence > 0.9
    text = finding.evidence[0].text
    assert "rank 2 (n7) at step 10 of this attempt in section fwd, at /app/data.py:3 load" in text


@pytest.mark.parametrize(("section", "cause"), [("fwd", "filesystem_stall"), ("checkpoint", "checkpoint_stall")])
def test_a_rank_stuck_in_the_kernel(make, section, cause):
    """State D is storage; in a checkpoint, the checkpoint."""
    states = [make.rank(0, make.beat(40)), make.rank(1, make.section(section, 40), process_state="D")]
    assert named(find(states)) == ((1,), "storage", cause)


def test_a_rank_that_is_ahead_only_writes_a_file(make):
    """State D for a moment, in a later step than the one that hangs."""
    states = [make.rank(0, make.beat(0.1), beats=30, process_state="D"), make.rank(1, make.beat(40))]
    assert named(find(states, {1: OUTSIDE}))[0] == (1,)


def test_all_ranks_stuck_in_the_kernel(make):
    """The file system is to blame, no rank is."""
    assert named(find(ranks(make, 2, process_state="D"))) == ((), "storage", "filesystem_stall")


@pytest.mark.parametrize("left", [{"done": True}, {"exit_state": "clean", "alive": False}])
def test_a_rank_that_left_the_loop_early(make, left):
    """Uneven inputs: the others began a step that this one will not."""
    states = [make.rank(0, make.beat(40)), make.rank(1, **left)]
    finding = find(states, {0: INSIDE})
    assert named(finding) == ((1,), "user", "user_uneven_inputs")
    assert finding.victims == (0,)
    assert "rank 1 left the loop after 10 steps, rank 0 began step 10" in finding.evidence[0].text


def test_who_finished_is_not_blamed_for_who_is_behind(make):
    """A rank that hangs in an earlier step does so on its own."""
    states = [make.rank(0, make.beat(40), beats=7), make.rank(1, done=True)]
    assert find(states).cause != "user_uneven_inputs"


# -- rung 2


def test_flight_record_of_a_late_rank(make):
    """Real records: rank 0 stands in all_reduce number 4, rank 1 entered 3."""
    flight = {r: make.flight("late", r) for r in (0, 1)}
    finding = find(ranks(make, 2), {0: INSIDE, 1: OUTSIDE}, flight)
    assert named(finding) == ((1,), "hang", "hang_rank_stuck")
    assert finding.victims == (0,)
    assert finding.confidence >= 0.9
    assert "has entered 3 collectives" in finding.evidence[0].text
    assert "rank 0 waits in number 4 (all_reduce [8] Float)" in finding.evidence[0].text


def test_flight_record_of_ddp(make):
    """Real records of a DDP backward."""
    assert find(ranks(make, 2), flight={r: make.flight("ddp", r) for r in (0, 1)}).culprits == (1,)


def test_a_late_rank_that_works(make):
    """Busy elsewhere, not standing still."""
    states = ranks(make, 2)
    states[1] = attrs.evolve(states[1], cpu_share=0.99)
    finding = find(states, flight={r: make.flight("late", r) for r in (0, 1)})
    assert named(finding) == ((1,), "hang", "hang_rank_late")


def test_mismatched_operations_of_two_ranks(make):
    """Real records of all_reduce against broadcast: two ranks have no majority, both are named."""
    finding = find(ranks(make, 2), flight={r: make.flight("mismatch_op", r) for r in (0, 1)})
    assert named(finding) == ((0, 1), "user", "user_collective_mismatch")
    assert finding.victims == ()
    assert "rank 1 calls broadcast [8] Float" in finding.evidence[0].text


@pytest.mark.parametrize("odd", [{"op": "broadcast"}, {"size": 16}])
def test_the_minority_is_the_culprit(make, odd):
    """Another operation, or another shape, at one sequence number."""
    flight = {0: record(5, 4), 1: record(5, 4, **odd), 2: record(5, 4)}
    finding = find(ranks(make, 3), flight=flight)
    assert named(finding) == ((1,), "user", "user_collective_mismatch")
    assert finding.victims == (0, 2)


def test_shapes_of_all_gather_may_differ(make):
    """Uneven gathers are legal."""
    flight = {0: record(5, 4, op="all_gather"), 1: record(5, 4, op="all_gather", size=9)}
    assert find(ranks(make, 2), flight=flight).cause == "network_partition"


def test_groups_in_different_orders(make):
    """Real records: each rank waits in a group that the other did not come to. The program is wrong."""
    finding = find(ranks(make, 2), flight={r: make.flight("groups", r) for r in (0, 1)})
    assert named(finding) == ((), "user", "user_deadlock")
    assert finding.victims == (0, 1)
    assert "second" in finding.evidence[0].text


def test_the_end_of_a_chain(make):
    """0 waits in the world for 1, which waits in its own group for 2, which is elsewhere."""
    pair = GroupRecord("5", "tp", 3, 2, None, None, {})
    behind = GroupRecord("5", "tp", 2, 2, None, None, {})
    world = record(8, 7).groups["0"]
    early = record(7, 7).groups["0"]
    flight = {
        0: FlightRecord("", {"0": world}),
        1: FlightRecord("", {"0": early, "5": pair}),
        2: FlightRecord("", {"0": early, "5": behind}),
    }
    assert find(ranks(make, 3), flight=flight).culprits == (2,)


def test_a_device_that_does_not_start_a_collective(make):
    """NCCL: all have enqueued it, one has not started it."""
    flight = {0: record(9, 5, started=6), 1: record(9, 5, started=5), 2: record(9, 5, started=6)}
    assert find(ranks(make, 3), flight=flight, on_cuda=True).culprits == (1,)


def test_a_rank_that_does_not_answer(make):
    """With the interpreter lock held nobody writes the record; the others wait."""
    flight = {0: record(5, 4), 1: None, 2: record(5, 4)}
    finding = find(ranks(make, 3), flight=flight)
    assert finding.culprits == (1,)
    assert finding.confidence < 0.9


def test_the_only_other_rank_does_not_answer(make):
    """With two ranks there is one record, and who wrote it waits: it is not the one that did not come."""
    finding = find(ranks(make, 2), {0: INSIDE, 1: OUTSIDE}, {0: record(5, 4), 1: None})
    assert finding.culprits == (1,)
    assert finding.victims == (0,)


def test_a_link_cut_at_the_end_of_a_collective(make):
    """One rank had all data of number 5 and is in number 6; the other waits in 5 for what was sent and lost."""
    finding = find(ranks(make, 2), {0: INSIDE, 1: INSIDE}, {0: record(6, 5), 1: record(5, 4)})
    assert named(finding) == ((), "network", "network_partition")
    assert finding.victims == (0, 1)


def test_unseen_ranks_forbid_a_verdict_on_the_network(make):
    """All that are known wait; who is not known may be missing."""
    states = [attrs.evolve(s, snapshot=attrs.evolve(s.snapshot, world_size=8)) for s in ranks(make, 2)]
    finding = find(states, {0: INSIDE, 1: INSIDE}, {0: record(5, 4), 1: record(5, 4)})
    assert named(finding) == ((), "unknown", "unknown")
    assert not finding.conclusive


# -- rungs 3 to 5


def test_an_earlier_step(make):
    """Without flight records the step tells; the stack agrees and adds to the confidence."""
    states = [make.rank(0, make.beat(40)), make.rank(1, idle=40)]
    alone = find(states)
    assert named(alone) == ((1,), "hang", "hang_rank_stuck")
    both = find(states, {0: INSIDE, 1: OUTSIDE})
    assert both.confidence > alone.confidence
    assert [e.source for e in both.evidence] == ["page", "stack"]


def test_hints_are_capped_on_cuda(make):
    """Python runs ahead of the device there."""
    states = [make.rank(0, make.beat(40)), make.rank(1, idle=40)]
    assert find(states, {0: INSIDE, 1: OUTSIDE}, on_cuda=True).confidence == 0.5


def test_check_ordinals(make):
    """Same step, fewer calls of preemption.check()."""
    states = [make.rank(0, idle=40, checks=11), make.rank(1, idle=40, checks=10)]
    assert find(states).culprits == (1,)


def test_outside_a_collective(make):
    """Same step: who is not in a collective keeps the others waiting."""
    finding = find(ranks(make, 3), {0: INSIDE, 1: OUTSIDE, 2: INSIDE})
    assert finding.culprits == (1,)
    assert "ranks 0, 2 wait in a collective" in finding.evidence[0].text


def test_outside_a_collective_of_another_library(make):
    """Stacks show no collective of torch, but the user calls one section communication."""
    states = [make.rank(0, make.beat(40), make.section("mpi", kind="comm")), make.rank(1, make.beat(40))]
    finding = find(states, {0: OUTSIDE, 1: OUTSIDE})
    assert finding.culprits == (1,)
    assert "rank 0 waits in a section of kind comm" in finding.evidence[0].text


def test_stacks_of_different_roles_are_not_compared(make):
    """Pipeline stages run different code."""
    states = [attrs.evolve(s, role=str(s.rank)) for s in ranks(make, 2)]
    assert find(states, {0: INSIDE, 1: OUTSIDE}).culprits == ()


def test_all_stacks_in_different_collectives(make):
    """Everybody waits, in different lines of the program."""
    other = (INSIDE[0], "/app/train.py:30 evaluate")
    finding = find(ranks(make, 2), {0: INSIDE, 1: other})
    assert named(finding) == ((), "user", "user_deadlock")
    assert finding.confidence <= 0.5


def test_the_odd_one_in_cpu_time(make):
    """The last hint: one works while all others sleep."""
    states = [attrs.evolve(s, cpu_share=0.9 if s.rank == 2 else 0.0) for s in ranks(make, 3)]
    finding = find(states)
    assert named(finding) == ((2,), "hang", "hang_rank_late")
    assert finding.confidence < 0.5


def test_cannot_tell(make):
    """An allowed answer."""
    finding = find(ranks(make, 2))
    assert named(finding) == ((), "unknown", "unknown")
    assert (finding.confidence, finding.victims) == (0.0, (0, 1))


def test_the_only_rank(make):
    """Nobody else can be to blame."""
    finding = find([make.rank(0, make.beat(40), world_size=1)], {0: OUTSIDE})
    assert finding.culprits == (0,)


def test_nothing_at_all():
    """No ranks, no page: no failure."""
    assert find([]).culprits == ()
    assert find([RankState(rank=3)]).culprits == ()


# -- properties


@st.composite
def scenes(draw, make):
    size = draw(st.integers(2, 5))
    states, stacks, flight = [], {}, {}
    for rank in range(size):
        stack = (make.beat(40),) if draw(st.booleans()) else ()
        states.append(
            make.rank(
                rank,
                *stack,
                beats=draw(st.integers(1, 2)),
                world_size=size,
                checks=draw(st.integers(0, 1)),
                alive=draw(st.sampled_from([True, True, True, False])),
                process_state=draw(st.sampled_from("SSSRTD")),
                cpu_share=draw(st.none() | st.sampled_from([0.0, 0.9])),
                done=draw(st.sampled_from([False, False, True])),
            )
        )
        if draw(st.booleans()):
            stacks[rank] = draw(st.sampled_from([INSIDE, OUTSIDE]))
        if draw(st.booleans()):
            completed = draw(st.integers(0, 2))
            flight[rank] = draw(
                st.sampled_from(
                    [
                        None,
                        record(completed, completed),
                        record(completed + 1, completed),
                        record(completed + 1, completed, op="barrier"),
                        record(completed + 1, completed, name="9"),
                    ]
                )
            )
    return states, stacks, flight


def renamed(scene, names):
    """The same scene with other rank numbers."""
    states, stacks, flight = scene
    return (
        [attrs.evolve(s, rank=names[s.rank], snapshot=attrs.evolve(s.snapshot, rank=names[s.rank])) for s in states],
        {names[r]: frames for r, frames in stacks.items()},
        {names[r]: flown for r, flown in flight.items()},
    )


@given(data=st.data(), on_cuda=st.booleans())
@settings(max_examples=150)
def test_rank_numbers_do_not_matter(make, data, on_cuda):
    """Renumbered ranks give the renumbered verdict; culprits and victims never overlap."""
    scene = data.draw(scenes(make))
    names = data.draw(st.permutations(range(len(scene[0]))))
    one = find_culprits(*scene, on_cuda)
    other = find_culprits(*renamed(scene, names), on_cuda)
    assert {names[r] for r in one.culprits} == set(other.culprits)
    assert {names[r] for r in one.victims} == set(other.victims)
    assert (one.cause, one.confidence) == (other.cause, other.confidence)
    assert not set(one.culprits) & set(one.victims)
    assert 0 <= one.confidence <= 1


@given(
    size=st.integers(2, 8),
    completed=st.integers(0, 50),
    extra=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
@settings(max_examples=50)
def test_all_in_the_same_collective_is_the_network(make, size, completed, extra):
    """However many asynchronous ones they have enqueued behind it."""
    flight = {rank: record(completed + 1 + extra[rank], completed) for rank in range(size)}
    finding = find_culprits(ranks(make, size), {}, flight, False)
    assert (finding.culprits, finding.category, finding.cause) == ((), "network", "network_partition")
    assert finding.victims == tuple(range(size))
