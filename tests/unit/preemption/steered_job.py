"""A job of real ranks, monitors and relays that is steered: interleaved at will, with deaths at any moment."""

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
from actors import Hands, StepwiseControl, pause
from steered_nodes import Node, Rank

from resilience_sdk.core.journal import Journal
from resilience_sdk.monitor import stop
from resilience_sdk.monitor import stop as monitor
from resilience_sdk.preemption import agreement, listener, signals
from resilience_sdk.preemption.agreement import ALONE_S, PATIENCE_S
from resilience_sdk.recorder import page_layout


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
        for module in (monitor, stop, stop, listener, signals):
            self.patched.setattr(module, "time", self.hands.module)
        self.patched.setattr(monitor, "ControlWords", StepwiseControl)
        for name in ("make_link", "read_link"):
            self.patched.setattr(agreement, name, self._stepwise(getattr(agreement, name)))
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
        which=st.integers(0, 2),
        number=st.sampled_from([int(signal.SIGTERM), page_layout.NOTICE_REQUEST, page_layout.NOTICE_END]),
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
            deadline = rank.page.words[page_layout.W_DEADLINE_NS]
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
    while agreement.FileCell(job.nodes[0].pages, 0).decision(1) is None:
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
    while not job.ranks[1].page.words[page_layout.W_DEADLINE_NS]:
        job.all_go_on(1, 12, 25)
    return job
