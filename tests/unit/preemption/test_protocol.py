"""The agreement on a stop: explored over all interleavings, and its parts as functions."""

import pytest

from resilience_sdk.preemption.protocol import (
    TEARDOWN,
    CoordinatorMove,
    Decision,
    Proposal,
    RankMove,
    RankView,
    coordinator_move,
    first_lead,
    next_proposal,
    pack,
    rank_move,
    unpack,
)

# A rank: (place, count, acknowledged, control word read, buffered stores). Places:
PUBLISH, READ, ACT, DECIDE, OBEY, STEP, STOPPED, DONE = range(8)
# The coordinator: (place, rank looked at, views read, round, at, lead).
LOOK, CELL, SHOW, COMMIT_NOW, VOID_NOW, IDLE, DEAD = range(7)
MOST_ROUNDS = 1


def explore(ranks, checks, *, timeouts, deaths, naive=False):
    """Visit every reachable state; return (states, those without a way to a good end, those with ranks stopped apart).

    Each store goes through a first-in-first-out buffer of its rank; a step ends only when all ranks are in it, as
    with a collective. `naive`: ranks stop at N without a decision.
    """
    start = (
        tuple((PUBLISH, 1, 0, (0, 0), ()) for _ in range(ranks)),
        tuple((0, 0) for _ in range(ranks)),  # memory: count, acknowledged
        tuple((0, 0) for _ in range(ranks)),  # memory: proposals shown
        (None,) * (MOST_ROUNDS + 1),  # decisions by round
        (LOOK, 0, (), 0, 0, 1),
    )
    before, todo, good, split = {start: []}, [start], [], []
    while todo:
        state = todo.pop()
        places = {rank[0] for rank in state[0]}
        if places in ({STOPPED}, {DONE}):
            good.append(state)
        if len({rank[1] for rank in state[0] if rank[0] == STOPPED}) > 1:
            split.append(state)
        for after in moves(state, checks, timeouts, deaths, naive):
            if after not in before:
                before[after] = []
                todo.append(after)
            before[after].append(state)
    states, may_end = list(before), set(good)
    while good:  # backwards: whence a good end can be reached
        for earlier in before[good.pop()]:
            if earlier not in may_end:
                may_end.add(earlier)
                good.append(earlier)
    return states, [state for state in states if state not in may_end], split


def moves(state, checks, timeouts, deaths, naive):
    """Yield the states that follow: one atomic action of one rank, of a store buffer, or of the coordinator."""
    ranks, memory, shown, cells, coordinator = state
    for me, (place, count, acknowledged, read, buffer) in enumerate(ranks):

        def then(rank, cells=cells, me=me):
            return (*ranks[:me], rank, *ranks[me + 1 :]), memory, shown, cells, coordinator

        if buffer:
            (word, value), *rest = buffer
            words = (value, memory[me][1]) if word == 0 else (memory[me][0], value)
            flushed = (*memory[:me], words, *memory[me + 1 :])
            rank = (place, count, acknowledged, read, tuple(rest))
            yield (*ranks[:me], rank, *ranks[me + 1 :]), flushed, shown, cells, coordinator
        if place == PUBLISH:
            yield then((READ, count, acknowledged, read, (*buffer, (0, count))))
        elif place == READ:
            yield then((ACT if shown[me][0] else STEP, count, acknowledged, shown[me], buffer))
        elif place == ACT:
            proposal = Proposal(*read)
            move = rank_move(count, proposal, acknowledged)
            if move is RankMove.GO_ON:
                yield then((STEP, count, acknowledged, (0, 0), buffer))
            else:
                after = DECIDE if move is RankMove.DECIDE else STEP
                if after == DECIDE and naive:
                    after = STOPPED
                kept = read if after == DECIDE else (0, 0)
                yield then((after, count, proposal.round, kept, (*buffer, (1, proposal.round))))
        elif place == DECIDE:
            decided = cells[read[0]]
            if decided is not None:
                yield then((STOPPED if decided is Decision.COMMIT else STEP, count, acknowledged, (0, 0), buffer))
            elif timeouts:
                void = (*cells[: read[0]], Decision.VOID, *cells[read[0] + 1 :])
                yield then((STEP, count, acknowledged, (0, 0), buffer), void)
        elif place == STEP and all(
            other[1] > count or (other[1] == count and other[0] in (STEP, DONE)) for other in ranks
        ):
            following = (PUBLISH, count + 1) if count < checks else (DONE, count)
            yield then((*following, acknowledged, (0, 0), buffer))
    place, at_rank, views, round_, at, lead = coordinator
    if place == DEAD:
        return

    def go(coordinator, shown=shown, cells=cells):
        return ranks, memory, shown, cells, coordinator

    if deaths:
        yield go((DEAD, 0, (), 0, 0, 0))
    if place == LOOK:
        views = (*views, memory[at_rank])
        whole = at_rank + 1 == len(ranks)
        yield go((CELL if whole else LOOK, 0 if whole else at_rank + 1, views, round_, at, lead))
    elif place == CELL:
        proposal = Proposal(round_, at) if round_ else None
        move = coordinator_move(proposal, cells[round_], [RankView(*view) for view in views])
        if move is CoordinatorMove.PROPOSE:
            lead = 2 * lead if round_ else lead
            made = next_proposal(round_, [view[0] for view in views], lead)
            over = round_ == MOST_ROUNDS
            yield go((IDLE, 0, (), 0, 0, 0) if over else (SHOW, 0, (), made.round, made.at, lead))
        else:
            after = {CoordinatorMove.WAIT: LOOK, CoordinatorMove.COMMIT: COMMIT_NOW, CoordinatorMove.VOID: VOID_NOW}
            yield go((after.get(move, IDLE), 0, (), round_, at, lead))
    elif place == SHOW:
        whole = at_rank + 1 == len(ranks)
        new = (*shown[:at_rank], (round_, at), *shown[at_rank + 1 :])
        yield go((LOOK if whole else SHOW, 0 if whole else at_rank + 1, (), round_, at, lead), new)
    elif place in (COMMIT_NOW, VOID_NOW):
        wanted = Decision.COMMIT if place == COMMIT_NOW else Decision.VOID
        if cells[round_] is None:
            cells = (*cells[:round_], wanted, *cells[round_ + 1 :])
        yield go((LOOK, 0, (), round_, at, lead), cells=cells)


@pytest.mark.parametrize("deaths", [False, True])
def test_no_interleaving_of_two_ranks_deadlocks_or_stops_apart(deaths):
    """Store buffers, timeouts and a coordinator that dies anywhere: all stop at one check, or none stops."""
    states, stuck, split = explore(2, 3, timeouts=True, deaths=deaths)
    assert not stuck
    assert not split
    assert any(all(rank[0] == STOPPED for rank in state[0]) for state in states)
    assert len(states) > 10_000


def test_the_exploration_finds_what_is_wrong_with_simpler_protocols():
    """A stop without a decision deadlocks, and so does waiting for a coordinator without ever giving up."""
    assert explore(2, 3, timeouts=True, deaths=False, naive=True)[1]
    assert explore(2, 3, timeouts=False, deaths=True)[1]


def test_control_words_hold_a_round_and_a_check():
    """Packed into one word and back; neither nothing nor a teardown is a proposal."""
    proposal = Proposal(round=65_534, at=(1 << 48) - 1)
    assert unpack(pack(proposal)) == proposal
    assert pack(proposal) < TEARDOWN
    assert unpack(0) is unpack(TEARDOWN) is None
    assert next_proposal(65_534, [1], 2) is None


def test_the_first_lead_grows_with_the_rate_of_checks():
    """Slow loops stop after two more checks; a loop of 1 ms gets the time that the coordinator may need."""
    assert first_lead(0.0) == 2
    assert first_lead(1000.0) == 202
