"""A job of real ranks, monitors and relays that is steered: interleaved at will, with deaths at any moment."""

import functools
import json
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.distributed import PrefixStore, TCPStore

sys.path.insert(0, str(Path(__file__).parent))
from actors import Actor, Hands, StepwiseControl, StepwiseWords, pause

from resilience_sdk.journal import Journal
from resilience_sdk.launcher.board import Board
from resilience_sdk.launcher.exchange import Exchange
from resilience_sdk.monitor import hindrances, stop_nodes
from resilience_sdk.monitor import preemption as monitor
from resilience_sdk.monitor.notices import Notices
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.preemption import cell, listener, signals
from resilience_sdk.preemption import rank as rank_side
from resilience_sdk.preemption.protocol import ALONE_S, PATIENCE_S, Decision
from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.rank_page import PageReader, RankPage, layout, page_stem

GRACE_S = 60.0
LOOK_S = 1.0  # of waiting, as far as one look of a rank counts


class Rank:
    """One rank: its page, its own `check()`, and how far it is."""

    def __init__(self, number, world_size, pages, journal, bound_s):
        stem = pages / page_stem(0, number, 100 + number)
        self.page = RankPage.create(
            stem.with_name(stem.name + ".page"),
            pid=100 + number,
            start_ticks=1,
            rank=number,
            local_rank=number,
            world_size=world_size,
            attempt=0,
            created_ns=1,
            facts={},
        )
        words = StepwiseWords(self.page.words)
        self.handlers = Handlers(words, pages, 0, (signal.SIGTERM,))
        side = rank_side.Side(words, pages, journal, 0, (signal.SIGTERM,), GRACE_S, -1)
        self.check, ask = rank_side._make_check()
        self.listener = listener.Listener(side, self.handlers, ask)
        ask(self.listener)
        reader = PageReader(self.page.path)
        self.watched = WatchedRank(stem, reader, reader.snapshot(), None)
        self.watched.died_ns = None
        self.number, self.bound_s = number, bound_s
        self.actor = None
        self.completed = 0
        self.waited_s, self.looked_at = 0.0, None
        self.stopped_at = None
        self.checks_at_all = self.lives = True

    def step(self, now):
        """Do one access of the check that it is in, or begin the next one."""
        if self.actor is None:
            self.actor = Actor(self.check)
        self.actor.step()
        if self.actor.waits:
            # A rank that stood still meanwhile, with its whole node perhaps, has not waited all that time.
            self.waited_s += min(now - (self.looked_at or now), LOOK_S)
            self.looked_at = now
            assert self.waited_s <= self.bound_s + LOOK_S, "a rank waits beyond the bound"
        if self.actor.is_done:
            self.waited_s, self.looked_at = 0.0, None
            self.completed += 1
            if self.actor.result:
                self.stopped_at = self.completed
            self.actor = None

    def die(self):
        """End the process, as far as others can see."""
        if self.actor is not None:
            self.actor.die()
        self.actor = None
        self.lives = False
        self.watched.died_ns = 1


class Node:
    """One node: its page directory, its monitor and what the monitor does at this moment, and its relay."""

    def __init__(self, job, number, nodes):
        self.job, self.number = job, number
        self.pages = job.run_dir / f"pages-{number}"
        self.pages.mkdir(mode=0o700)
        self.place = {"node": number, "nodes": nodes, "node_name": f"host#{number}"}
        (self.pages / "attempt-0.json").write_text(json.dumps({"attempt": 0, **self.place}))
        self.ranks = []
        self.crashed = self.is_cut = False
        self.coordinator = self.looking = None
        keys = {other: f"stop/{other}" for other in range(nodes)}
        own, peers = stop_nodes.OWN, stop_nodes.PEERS
        self.exchange = Exchange(self.pages, own, peers, attempt=0, keys=keys, node=number)
        self.board = Board(self.pages, 0, "words")

    def replace_coordinator(self):
        """Another monitor takes over, with nothing but the files."""
        notices = Notices(self.job.run_dir, 500.0, lambda: None)
        self.coordinator = monitor.StopCoordinator(self.pages, self.job.journal, notices, grace_s=GRACE_S, host="host")
        self.coordinator.begin(0, self.place)

    def coordinator_dies(self):
        """The monitor is killed in the middle of whatever it does."""
        if self.looking is not None:
            self.looking.die()
        self.looking = self.coordinator = None

    def coordinator_goes_on(self, steps):
        """The monitor does a few accesses of its looks."""
        for _ in range(steps):
            if self.coordinator is None:
                return
            if self.looking is None:
                watched = [rank.watched for rank in self.ranks]
                look, size, crashed = self.coordinator.look, len(self.job.ranks), self.crashed
                self.looking = Actor(functools.partial(look, watched, size, crashed))
            self.looking.step()
            if self.looking.is_done:
                self.looking = None

    def relay_goes_on(self):
        """The launcher carries what there is."""
        if not self.is_cut and len(self.job.nodes) > 1:
            for part in (self.exchange, self.board):
                part.publish(self.job.store)
            for part in (self.exchange, self.board):
                part.fetch(self.job.store)

    @property
    def is_alone(self):
        """Whether it went on without knowing what the others do."""
        return any(os.readlink(path) == Decision.ALONE for path in self.pages.glob("word-*-stop-*"))


class Job(RuleBasedStateMachine):
    """The ranks of one or two nodes between collectives, with monitors that come and go, and relays that go."""

    node_count = 1
    server = None

    @initialize(
        ranks=st.integers(2, 3),
        apart=st.integers(1, 3),
        silent=st.sampled_from([9, 9, 9, 9, 0, 1]),
        last=st.integers(0, 40),
    )
    def start(self, ranks, apart, silent, last=0):
        """`apart`: a collective after so many checks; `silent`: a rank that never checks, where there is one.

        `last`: when, in the rounds after the last rule, the monitors are replaced once more.
        """
        self.last = last
        self.patched = pytest.MonkeyPatch()
        self.hands = Hands()
        for module in (monitor, hindrances, stop_nodes, listener, signals):
            self.patched.setattr(module, "time", self.hands.module)
        self.patched.setattr(monitor, "ControlWords", StepwiseControl)
        for name in ("make_link", "read_link"):
            self.patched.setattr(cell, name, self._stepwise(getattr(cell, name)))
        self.folder = tempfile.TemporaryDirectory()
        self.run_dir = Path(self.folder.name)
        (self.run_dir / "journal").mkdir()
        self.journal = Journal(self.run_dir / "journal", writer="test", host="here", boot_id="b", job="j")
        if self.node_count > 1:
            Job.server = Job.server or TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            self.store = PrefixStore(uuid.uuid4().hex, Job.server)
        self.nodes = [Node(self, number, self.node_count) for number in range(self.node_count)]
        bound_s = PATIENCE_S if self.node_count == 1 else ALONE_S
        self.ranks = []
        for number in range(ranks):
            node = self.nodes[number % self.node_count]
            node.ranks.append(Rank(number, ranks, node.pages, self.journal, bound_s))
            self.ranks.append(node.ranks[-1])
        if silent < ranks:
            self.ranks[silent].checks_at_all = False
        self.apart = apart
        self.asked = False
        self.deadlines = {}
        for node in self.nodes:
            node.replace_coordinator()

    @staticmethod
    def _stepwise(function):
        def stepwise(*args):
            pause()
            return function(*args)

        return stepwise

    @property
    def crashed(self):
        """Whether a rank has died, as far as monitors know."""
        return any(node.crashed for node in self.nodes)

    def may_go_on(self, rank):
        """Tell whether a rank is in a check, or past the last collective so that it can begin one."""
        if not (rank.lives and rank.checks_at_all) or rank.stopped_at is not None:
            return False
        since = rank.completed // self.apart * self.apart
        return rank.actor is not None or all(
            other.completed >= since for other in self.ranks if other.checks_at_all and other is not rank
        )

    @rule(which=st.integers(0, 2), steps=st.integers(1, 12))
    def rank_goes_on(self, which, steps):
        """A rank does a few accesses of its checks."""
        rank = self.ranks[which % len(self.ranks)]
        for _ in range(steps):
            if self.may_go_on(rank):
                rank.step(self.hands.now)

    @rule(which=st.integers(0, 1), steps=st.integers(1, 30))
    def coordinator_goes_on(self, which, steps):
        """A monitor does a few accesses of its looks."""
        self.nodes[which % len(self.nodes)].coordinator_goes_on(steps)

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(which=st.integers(0, 1))
    def relay_goes_on(self, which):
        """A launcher carries what there is."""
        self.nodes[which].relay_goes_on()

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(which=st.integers(0, 1), luck=st.integers(0, 9))
    def relay_dies(self, which, luck):
        """A launcher loses the store for good; seldom."""
        self.nodes[which].is_cut |= luck == 0

    @rule(rounds=st.integers(1, 3), steps=st.integers(3, 9), reads=st.integers(5, 25))
    def all_go_on(self, rounds, steps, reads):
        """Everybody does a few accesses, in turn."""
        for _ in range(rounds):
            for which in range(len(self.ranks)):
                self.rank_goes_on(which, steps)
            for node in self.nodes:
                node.relay_goes_on()
                node.coordinator_goes_on(reads)

    @rule(
        which=st.integers(0, 2), number=st.sampled_from([int(signal.SIGTERM), layout.NOTICE_REQUEST, layout.NOTICE_END])
    )
    def notice(self, which, number):
        """A rank is asked to leave, once more or for the first time."""
        rank = self.ranks[which % len(self.ranks)]
        if rank.lives:
            rank.handlers.note(number)
            self.asked = True

    @rule()
    def notice_by_file(self):
        """Somebody touches RUN_DIR/preempt."""
        path = self.run_dir / "preempt"
        path.touch()
        os.utime(path, (self.hands.now, self.hands.now))
        self.asked = True

    @rule(seconds=st.sampled_from([0.01, 0.3, 0.6, 1.5, 6.0]))
    def time_passes(self, seconds):
        """The clock moves, nobody else does but relays: their turns are short beside it."""
        for node in self.nodes:
            node.relay_goes_on()
        self.hands.now += seconds

    @rule(which=st.integers(0, 2), luck=st.integers(0, 5))
    def rank_dies(self, which, luck):
        """A rank is killed wherever it stands; seldom, or nothing else would be seen."""
        rank = self.ranks[which % len(self.ranks)]
        if luck == 0 and rank.lives:
            rank.die()
            self.node_of(rank).crashed = True

    def node_of(self, rank):
        """Return the node of a rank."""
        return self.nodes[rank.number % len(self.nodes)]

    @precondition(lambda self: any(rank.lives and rank.stopped_at is not None for rank in self.ranks))
    @rule(code_is_known=st.booleans())
    def stopped_rank_leaves(self, code_is_known):
        """A rank that has stopped ends with 75 before the others; not every kernel tells the monitor the code."""
        rank = next(rank for rank in self.ranks if rank.lives and rank.stopped_at is not None)
        rank.die()
        self.node_of(rank).crashed |= not code_is_known

    @rule(which=st.integers(0, 1), is_replaced=st.booleans())
    def coordinator_dies(self, which, is_replaced):
        """A monitor is killed in the middle of whatever it does."""
        node = self.nodes[which % len(self.nodes)]
        node.coordinator_dies()
        if is_replaced:
            node.replace_coordinator()

    @precondition(lambda self: any(node.coordinator is None for node in self.nodes))
    @rule()
    def replace_coordinators(self):
        """Others take over."""
        for node in self.nodes:
            if node.coordinator is None:
                node.replace_coordinator()

    @invariant()
    def all_stop_at_one_check_that_nobody_passes(self):
        """Whoever stopped did so at one check, and no rank has gone on from it, but with a node that was cut off."""
        if any(node.is_alone for node in self.nodes):
            assert any(node.is_cut for node in self.nodes)
            return
        stops = {rank.stopped_at for rank in self.ranks if rank.stopped_at is not None}
        assert len(stops) <= 1, f"stopped apart, at the checks {stops}"
        for rank in self.ranks:
            if stops and rank.stopped_at is None:
                assert rank.completed < min(stops), f"rank {rank.number} passed the check {stops}"

    @invariant()
    def nobody_stops_unasked_or_without_all(self):
        """A rank stops only if somebody asked, and only if all ranks call `check()`."""
        if any(rank.stopped_at is not None for rank in self.ranks):
            assert self.asked
            assert all(rank.checks_at_all for rank in self.ranks)

    @invariant()
    def deadlines_are_never_put_off(self):
        """The time to leave counts from the first notice, whoever coordinates."""
        for rank in self.ranks:
            deadline = rank.page.words[layout.W_DEADLINE_NS]
            before = self.deadlines.setdefault(rank.number, deadline) or deadline
            assert deadline <= before, "a deadline was put off"
            self.deadlines[rank.number] = deadline

    def teardown(self):
        """From here on no rank dies, and one monitor: if all ranks live, check and were asked, all stop soon."""
        if not hasattr(self, "ranks"):
            return
        try:
            alive = all(rank.lives and rank.checks_at_all for rank in self.ranks)
            if alive and self.asked and not self.crashed and not any(node.is_cut for node in self.nodes):
                self._end_fairly()
        finally:
            for node in self.nodes:
                node.coordinator_dies()
            for rank in self.ranks:
                rank.die()
                rank.watched.close()
            self.patched.undo()
            self.folder.cleanup()

    def _end_fairly(self):
        self.replace_coordinators()
        for round_ in range(600 * len(self.nodes)):
            self.hands.now += 0.02
            for node in self.nodes:
                if round_ == self.last:
                    node.coordinator_dies()
                    node.replace_coordinator()
            for which in range(len(self.ranks)):
                self.rank_goes_on(which, 1 + 2 * which if round_ < 100 else 12)
            for node in self.nodes:
                node.relay_goes_on()
                node.coordinator_goes_on(12 if round_ < 100 else 60)
            self.all_stop_at_one_check_that_nobody_passes()
            if all(rank.stopped_at is not None for rank in self.ranks):
                return
        raise AssertionError(f"no stop: {[(rank.completed, rank.stopped_at) for rank in self.ranks]}")


def agreed_job(request):
    """Return a job of two ranks whose stop is decided, and which the first rank has obeyed, but not the second."""
    job = Job()
    job.start(ranks=2, apart=1, silent=9)
    request.addfinalizer(job.teardown)
    job.notice(0, int(signal.SIGTERM))
    while cell.Words(job.nodes[0].pages, 0).decision(1) is None:
        job.all_go_on(1, 1, 12)
    while job.ranks[0].stopped_at is None:
        job.rank_goes_on(0, 1)
        if job.ranks[1].completed < job.ranks[0].completed:
            job.rank_goes_on(1, 1)
    assert job.ranks[1].stopped_at is None
    return job


class TwoNodes(Job):
    """The same with a rank or two on each of two nodes, whose relays share a real store."""

    node_count = 2


def two_nodes_asked(request):
    """Return a job of a rank on each of two nodes, of which the first was asked and the second has heard of it."""
    job = TwoNodes()
    job.start(ranks=2, apart=1, silent=9)
    request.addfinalizer(job.teardown)
    job.all_go_on(3, 12, 25)
    job.notice(0, int(signal.SIGTERM))
    while not job.ranks[1].page.words[layout.W_DEADLINE_NS]:
        job.all_go_on(1, 12, 25)
    return job
