"""All interleavings of a small job that is asked to leave: ranks, their store buffers, monitors, and relays.

Each rank and each monitor does one access at a time to what others see; whatever a rank stores goes through a
first-in-first-out buffer; a step ends only when all ranks are in it, as with a collective. Monitors forget everything
whenever they like, as one that is replaced. With several nodes a word is asked for by a wish, becomes what it is in the
store, and reaches each node at some time later; so do the counts of its ranks. All monitors coordinate at once, and
look and act in one access: what one saw long ago is what stood on the page while a buffer held the rest.
The moves of ranks and monitors are those of `preemption.protocol`.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from resilience_sdk.preemption.agreement import (
    CoordinatorMove,
    Proposal,
    RankMove,
    RankView,
    StopDecision,
    coordinator_move,
    next_proposal,
    rank_move,
)

READ, DECIDE, STEP, STOPPED, DONE, FAILED = range(6)
LOOK, ACT, SHOW = range(3)
NONE, COMMIT, VOID, ALONE = range(4)  # numbers, because an enum's hash is slow
DECISIONS = (None, StopDecision.COMMIT, StopDecision.VOID, StopDecision.ALONE)
NOTHING = (0, -1)


class Job(NamedTuple):
    """What is explored: ranks by node, checks of a rank, rounds, and what may go wrong."""

    nodes: tuple[int, ...]
    checks: int
    rounds: int = 1
    monitors_die: bool = False
    relays_die: int = 0
    """Of so many nodes, the last ones."""
    naive: str = ""
    """A simpler protocol: `no decision` (ranks stop at N) or `no timeout` (ranks wait for ever)."""

    @property
    def home(self) -> tuple[int, ...]:
        """The node of each rank."""
        return tuple(node for node, ranks in enumerate(self.nodes) for _ in range(ranks))


class Rank(NamedTuple):
    """A rank: it is about to read, at the proposed check, in a step, or gone."""

    place: int = READ
    count: int = 1
    acknowledged: int = 0
    round: int = 0  # that it decides
    buffer: tuple[tuple[int, int], ...] = ((0, 1),)  # stores that nobody sees yet: (0 count, 1 acknowledged; value)


class Node(NamedTuple):
    """A node: its monitor, what it knows of words and of other ranks, and its relay."""

    place: int = LOOK
    at: int = 0  # the rank that is looked at or shown
    seen: tuple[int, int] = NOTHING  # of the ranks so far: the highest count, and the round that all have acknowledged
    plans: int = 0  # how many are known here
    stops: tuple[int, ...] = ()
    plan_wishes: tuple[int, ...] = ()
    stop_wishes: tuple[int, ...] = ()
    heard: tuple[tuple[int, int], ...] = ()  # by rank; of its own it looks at the pages
    monitor: bool = True
    relay: bool = True


class State(NamedTuple):
    """Everything. Words of the store and of nodes are by round, from 1; the first entry is never used."""

    ranks: tuple[Rank, ...]
    pages: tuple[tuple[int, int], ...]  # count, acknowledged
    shown: tuple[int, ...]  # the round in each rank's control word
    plans: tuple[int, ...]
    stops: tuple[int, ...]
    nodes: tuple[Node, ...]


class Result(NamedTuple):
    """What was found."""

    states: int
    stuck: list[State]  # whence no good end can be reached
    split: list[State]  # ranks have stopped at different checks, or one goes on where another has stopped
    stopped: int  # ends in which all have stopped at one check


def explore(job: Job) -> Result:
    """Visit every state that can be reached."""
    none, world = (NONE,) * (job.rounds + 1), len(job.home)
    node = Node(stops=none, plan_wishes=none, stop_wishes=none, heard=((0, 0),) * world)
    start = State((Rank(),) * world, ((0, 0),) * world, (0,) * world, none, none, (node,) * len(job.nodes))
    before: dict[State, list[State]] = {start: []}
    todo, good, split, stopped = [start], [], [], 0
    while todo:
        state = todo.pop()
        places = {rank.place for rank in state.ranks}
        if places <= {STOPPED, DONE, FAILED}:
            good.append(state)
            stopped += places == {STOPPED}
        if is_split(state):
            split.append(state)
        for after in map(functools.partial(settled, job), moves(job, state)):
            if after in before:
                before[after].append(state)
            else:
                before[after] = [state]
                todo.append(after)
    may_end = set(good)
    while good:  # backwards: whence a good end can be reached
        for earlier in before[good.pop()]:
            if earlier not in may_end:
                may_end.add(earlier)
                good.append(earlier)
    return Result(len(before), [state for state in before if state not in may_end], split, stopped)


def settled(job: Job, state: State) -> State:
    """Return the state without what nobody looks at any more once the last round is decided."""
    if not is_over(job, state):
        return state
    world, none = len(job.home), (NONE,) * (job.rounds + 1)
    idle = {"place": LOOK, "at": 0, "seen": NOTHING, "plans": job.rounds, "heard": ((0, 0),) * world}
    return state._replace(
        ranks=tuple(rank._replace(buffer=()) for rank in state.ranks),
        pages=((0, 0),) * world,
        shown=(0,) * world if VOID in (state.stops[-1], state.nodes[0].stops[-1]) else state.shown,
        nodes=tuple(node._replace(**idle, plan_wishes=none, stop_wishes=none) for node in state.nodes),
    )


def is_over(job: Job, state: State) -> bool:
    """Tell whether the last round is decided."""
    return bool((state.stops if len(job.nodes) > 1 else state.nodes[0].stops)[job.rounds])


def is_split(state: State) -> bool:
    """Tell whether ranks have stopped apart, other than by a node that was cut off and said so."""
    stops = {rank.count for rank in state.ranks if rank.place == STOPPED}
    past = {rank.count for rank in state.ranks if rank.place in (STEP, DONE, FAILED)}
    went_on = bool(stops) and any(count >= min(stops) for count in past)
    is_alone = any(ALONE in node.stops for node in state.nodes)
    return len(stops) > 1 or (went_on and not is_alone)


def moves(job: Job, state: State) -> Iterator[State]:
    """Yield the states that follow by one access of one rank, store buffer, monitor or relay."""
    for me in range(len(state.ranks)):
        yield from moves_of_rank(job, state, me)
    for me in range(len(state.nodes)):
        yield from moves_of_monitor(job, state, me)
        if len(state.nodes) > 1 and state.nodes[me].relay:
            yield from moves_of_relay(job, state, me)


def moves_of_rank(job: Job, state: State, me: int) -> Iterator[State]:
    rank, home = state.ranks[me], job.home[me]
    if rank.buffer and not is_over(job, state):
        (word, value), *rest = rank.buffer
        page = (value, state.pages[me][1]) if word == 0 else (state.pages[me][0], value)
        flushed = put(state.ranks, me, rank._replace(buffer=tuple(rest)))
        yield state._replace(ranks=flushed, pages=put(state.pages, me, page))

    def then(**changes: object) -> State:
        return state._replace(ranks=put(state.ranks, me, rank._replace(**changes)))

    if rank.place == READ:
        round_ = state.shown[me]
        move = rank_answer(rank.count, round_, state.plans[round_], rank.acknowledged)
        if move is RankMove.GO_ON:
            yield then(place=STEP)
        else:
            acknowledged = {"acknowledged": round_, "buffer": (*rank.buffer, (1, round_))}
            is_here = move is RankMove.DECIDE
            place = STEP if not is_here else STOPPED if job.naive == "no decision" else DECIDE
            yield then(place=place, round=round_ if place == DECIDE else 0, **acknowledged)
    elif rank.place == DECIDE:
        decision = state.nodes[home].stops[rank.round]
        if decision:
            yield then(place=STOPPED if decision == COMMIT else STEP, round=0)
        elif job.naive != "no timeout":
            yield ask(state, home, rank.round, VOID)
            if len(job.nodes) > 1 and not state.nodes[home].relay:
                node = state.nodes[home]
                yield with_node(state, home, node._replace(stops=put(node.stops, rank.round, ALONE)))
    elif rank.place == STEP:
        others = [other for other in state.ranks if other is not rank]
        if any(other.place in (STOPPED, FAILED) and other.count <= rank.count for other in others):
            yield then(place=FAILED)  # its peer has left
        elif all(o.count > rank.count or (o.count == rank.count and o.place in (STEP, DONE)) for o in others):
            count = rank.count + 1
            if count > job.checks:
                yield then(place=DONE)
            else:
                yield then(place=READ, count=count, buffer=(*rank.buffer, (0, count)))


def moves_of_monitor(job: Job, state: State, me: int) -> Iterator[State]:
    node, own = state.nodes[me], [rank for rank, home in enumerate(job.home) if home == me]
    if not node.monitor or is_over(job, state):
        return

    def go(**changes: object) -> State:
        return with_node(state, me, node._replace(**changes))

    if job.monitors_die:
        yield go(monitor=False, place=LOOK, at=0, seen=NOTHING)
    if (node.place, node.at) != (LOOK, 0):
        yield go(place=LOOK, at=0, seen=NOTHING)  # another one takes over
    if len(job.nodes) > 1:
        yield act(job, state, me, functools.reduce(both, (state.pages[rank] for rank in own), NOTHING))
        if node.plans:
            for rank in own:
                yield state._replace(shown=put(state.shown, rank, node.plans))
        return
    is_last = node.at + 1 == len(own)
    if node.place == LOOK:
        seen = both(node.seen, state.pages[own[node.at]])
        yield go(place=ACT if is_last else LOOK, at=0 if is_last else node.at + 1, seen=seen)
    elif node.place == ACT:
        yield act(job, go(place=SHOW, seen=NOTHING), me, node.seen)
    elif node.place == SHOW:
        # The newest proposal that stands here, and on to the next look.
        after = go(place=LOOK if is_last else SHOW, at=0 if is_last else node.at + 1)
        yield after._replace(shown=put(state.shown, own[node.at], node.plans)) if node.plans else after


def act(job: Job, state: State, me: int, seen: tuple[int, int]) -> State:
    """Propose or decide as `coordinator_move` says, having `seen` the ranks of this node."""
    node = state.nodes[me]
    for rank, home in enumerate(job.home):
        if home != me:
            if not node.heard[rank][0]:
                return state  # a node that nothing was heard of
            seen = both(seen, node.heard[rank])
    move = coordinator_answer(node.plans, state.plans[node.plans], node.stops[node.plans], *seen)
    if move is CoordinatorMove.PROPOSE and node.plans < job.rounds:
        made = next_proposal(node.plans, [seen[0]], 1 << node.plans)
        assert made is not None
        return propose(state, me, made)
    if move is CoordinatorMove.COMMIT or move is CoordinatorMove.VOID:
        return ask(state, me, node.plans, COMMIT if move is CoordinatorMove.COMMIT else VOID)
    return state


@functools.cache
def rank_answer(count: int, round_: int, at: int, acknowledged: int) -> RankMove:
    """Return what a rank does; round 0: nothing is proposed."""
    return rank_move(count, Proposal(round_, at), acknowledged) if round_ else RankMove.GO_ON


@functools.cache
def coordinator_answer(round_: int, at: int, decision: int, count: int, acknowledged: int) -> CoordinatorMove:
    """Return what a monitor does about ranks of which the first has that count, and all have acknowledged that."""
    proposal = Proposal(round_, at) if round_ else None
    return coordinator_move(proposal, DECISIONS[decision], [RankView(count, acknowledged)])


def both(seen: tuple[int, int], view: tuple[int, int]) -> tuple[int, int]:
    """Return what matters of two views: none acknowledges unless all do."""
    return max(seen[0], view[0]), view[1] if seen in (NOTHING, (seen[0], view[1])) else -2


def propose(state: State, me: int, made: Proposal) -> State:
    """Ask for a proposal: on one node it stands at once."""
    node = state.nodes[me]
    if len(state.nodes) == 1:
        plans = put(state.plans, made.round, state.plans[made.round] or made.at)
        return with_node(state._replace(plans=plans), me, node._replace(plans=made.round))
    if state.plans[made.round]:
        return state  # it stands, and will be known here
    wishes = put(node.plan_wishes, made.round, node.plan_wishes[made.round] or made.at)
    return with_node(state, me, node._replace(plan_wishes=wishes))


def ask(state: State, me: int, round_: int, wanted: int) -> State:
    """Ask for a decision: on one node it stands at once."""
    node = state.nodes[me]
    if len(state.nodes) == 1:
        stops = put(node.stops, round_, node.stops[round_] or wanted)
        return with_node(state, me, node._replace(stops=stops))
    if state.stops[round_]:
        return state
    wishes = put(node.stop_wishes, round_, node.stop_wishes[round_] or wanted)
    return with_node(state, me, node._replace(stop_wishes=wishes))


def moves_of_relay(job: Job, state: State, me: int) -> Iterator[State]:
    """Carry a wish to the store, a word from there, or counts from another node: in any order, at any time."""
    node = state.nodes[me]
    if me >= len(job.nodes) - job.relays_die:
        yield with_node(state, me, node._replace(relay=False))
    for round_ in range(1, job.rounds + 1):
        if node.plan_wishes[round_] and not state.plans[round_]:
            yield granted(state._replace(plans=put(state.plans, round_, node.plan_wishes[round_])), round_)
        if node.stop_wishes[round_] and not state.stops[round_]:
            yield granted(state._replace(stops=put(state.stops, round_, node.stop_wishes[round_])), round_)
        word, known = state.stops[round_], node.stops[round_]
        if word and not known:
            yield with_node(state, me, node._replace(stops=put(node.stops, round_, word)))
        if state.plans[round_] and node.plans == round_ - 1:
            yield with_node(state, me, node._replace(plans=round_))
    for other, sender in enumerate(state.nodes):
        told = tuple(state.pages[rank] if home == other else node.heard[rank] for rank, home in enumerate(job.home))
        if other != me and sender.relay and sender.monitor and told != node.heard and not is_over(job, state):
            yield with_node(state, me, node._replace(heard=told))


def granted(state: State, round_: int) -> State:
    """Return the state without wishes for words that stand."""
    nodes = state.nodes
    if state.plans[round_]:
        nodes = tuple(node._replace(plan_wishes=put(node.plan_wishes, round_, NONE)) for node in nodes)
    if state.stops[round_]:
        nodes = tuple(node._replace(stop_wishes=put(node.stop_wishes, round_, NONE)) for node in nodes)
    return state._replace(nodes=nodes)


def with_node(state: State, me: int, node: Node) -> State:
    """Return the state with that node changed."""
    return state._replace(nodes=put(state.nodes, me, node))


def put(values: tuple, at: int, value: object) -> tuple:
    """Return the tuple with one value changed."""
    return (*values[:at], value, *values[at + 1 :])
