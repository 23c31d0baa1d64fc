"""The agreement on a stop as it is: real ranks and monitors, interleaved at will, that die at any moment."""

import functools
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parent))
from actors import Actor, Hands, StepwiseControl, StepwiseWords, pause

from resilience_sdk.journal import Journal
from resilience_sdk.monitor import preemption as monitor
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.preemption import cell, signals
from resilience_sdk.preemption import rank as rank_side
from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.rank_page import PageReader, RankPage, layout, page_stem

PATIENCE_S = 0.5  # what `check()` promises
GRACE_S = 60.0


class Rank:
    """One rank: its page, its own `check()`, and how far it is."""

    def __init__(self, number, world_size, pages, journal):
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
        ask(rank_side.Listener(side, self.handlers))
        reader = PageReader(self.page.path)
        self.watched = WatchedRank(stem, reader, reader.snapshot(), None)
        self.watched.died_ns = None
        self.number = number
        self.actor = None
        self.completed = 0
        self.stopped_at = None
        self.checks_at_all = self.lives = True

    def step(self, now):
        """Do one access of the check that it is in, or begin the next one."""
        if self.actor is None:
            self.actor = Actor(self.check)
        self.actor.step()
        if self.actor.waits:
            assert now - self.actor.waits_since <= PATIENCE_S, "a rank waits beyond the bound"
        if self.actor.is_done:
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


class Job(RuleBasedStateMachine):
    """A node's ranks between collectives, with monitors that come and go."""

    @initialize(
        ranks=st.integers(2, 3),
        apart=st.integers(1, 3),
        silent=st.sampled_from([9, 9, 9, 9, 0, 1]),
        last=st.integers(0, 40),
    )
    def start(self, ranks, apart, silent, last=0):
        """`apart`: a collective after so many checks; `silent`: a rank that never checks, where there is one.

        `last`: when, in the rounds after the last rule, the monitor is replaced once more.
        """
        self.last = last
        self.patched = pytest.MonkeyPatch()
        self.hands = Hands()
        for module in (monitor, rank_side, signals):
            self.patched.setattr(module, "time", self.hands.module)
        self.patched.setattr(monitor, "ControlWords", StepwiseControl)
        for name in ("decide", "read_decision"):
            self.patched.setattr(cell, name, self._stepwise(getattr(cell, name)))
        self.folder = tempfile.TemporaryDirectory()
        self.run_dir = Path(self.folder.name)
        self.pages = self.run_dir / "pages"
        self.pages.mkdir(mode=0o700)
        (self.run_dir / "journal").mkdir()
        self.journal = Journal(self.run_dir / "journal", writer="test", host="here", boot_id="b", job="j")
        self.ranks = [Rank(number, ranks, self.pages, self.journal) for number in range(ranks)]
        if silent < ranks:
            self.ranks[silent].checks_at_all = False
        self.apart = apart
        self.asked = self.crashed = False
        self.looking = None
        self.deadlines = {}
        self.replace_coordinator()

    @staticmethod
    def _stepwise(function):
        def stepwise(*args):
            pause()
            return function(*args)

        return stepwise

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

    @rule(steps=st.integers(1, 30))
    def coordinator_goes_on(self, steps):
        """The monitor does a few accesses of its looks."""
        for _ in range(steps):
            if self.coordinator is None:
                return
            if self.looking is None:
                watched = [rank.watched for rank in self.ranks]
                coordinator, size, crashed = self.coordinator, len(self.ranks), self.crashed
                self.looking = Actor(functools.partial(coordinator.look, 0, watched, size, crashed))
            self.looking.step()
            if self.looking.is_done:
                self.looking = None

    @rule(rounds=st.integers(1, 3), steps=st.integers(3, 9), reads=st.integers(5, 25))
    def all_go_on(self, rounds, steps, reads):
        """Everybody does a few accesses, in turn."""
        for _ in range(rounds):
            for which in range(len(self.ranks)):
                self.rank_goes_on(which, steps)
            self.coordinator_goes_on(reads)

    @rule(which=st.integers(0, 2), number=st.sampled_from([int(signal.SIGTERM), layout.NOTICE_REQUEST]))
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
        """The clock moves, nobody else does."""
        self.hands.now += seconds

    @rule(which=st.integers(0, 2), luck=st.integers(0, 5))
    def rank_dies(self, which, luck):
        """A rank is killed wherever it stands; seldom, or nothing else would be seen."""
        rank = self.ranks[which % len(self.ranks)]
        if luck == 0 and rank.lives:
            rank.die()
            self.crashed = True

    @precondition(lambda self: any(rank.lives and rank.stopped_at is not None for rank in self.ranks))
    @rule(code_is_known=st.booleans())
    def stopped_rank_leaves(self, code_is_known):
        """A rank that has stopped ends with 75 before the others; not every kernel tells the monitor the code."""
        rank = next(rank for rank in self.ranks if rank.lives and rank.stopped_at is not None)
        rank.die()
        self.crashed = self.crashed or not code_is_known

    @rule(is_replaced=st.booleans())
    def coordinator_dies(self, is_replaced=False):
        """The monitor is killed in the middle of whatever it does."""
        if self.looking is not None:
            self.looking.die()
        self.looking = self.coordinator = None
        if is_replaced:
            self.replace_coordinator()

    @precondition(lambda self: self.coordinator is None)
    @rule()
    def replace_coordinator(self):
        """Another monitor takes over, with nothing but the files."""
        self.coordinator = monitor.StopCoordinator(
            self.pages, self.run_dir, self.journal, grace_s=GRACE_S, began=500.0, cloud=lambda: None
        )

    @invariant()
    def all_stop_at_one_check_that_nobody_passes(self):
        """Whoever stopped did so at one check, and no rank has gone on from it."""
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
            assert deadline == before, "a deadline was moved"
            self.deadlines[rank.number] = deadline

    def teardown(self):
        """From here on no rank dies, and one monitor: if all ranks live, check and were asked, all stop soon."""
        if not hasattr(self, "ranks"):
            return
        try:
            alive = all(rank.lives and rank.checks_at_all for rank in self.ranks)
            if alive and self.asked and not self.crashed:
                self._end_fairly()
        finally:
            self.coordinator_dies()
            for rank in self.ranks:
                rank.die()
                rank.watched.close()
            self.patched.undo()
            self.folder.cleanup()

    def _end_fairly(self):
        if self.coordinator is None:
            self.replace_coordinator()
        for round_ in range(600):
            self.hands.now += 0.02
            if round_ == self.last:
                self.coordinator_dies(is_replaced=True)
            for which in range(len(self.ranks)):
                self.rank_goes_on(which, 1 + 2 * which if round_ < 100 else 12)
            self.coordinator_goes_on(12 if round_ < 100 else 60)
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
    while cell.last_round(job.pages, 0) == 0:
        job.all_go_on(1, 1, 12)
    while job.ranks[0].stopped_at is None:
        job.rank_goes_on(0, 1)
        if job.ranks[1].completed < job.ranks[0].completed:
            job.rank_goes_on(1, 1)
    assert job.ranks[1].stopped_at is None
    return job


def test_a_monitor_that_takes_over_lets_a_stop_stand_that_was_agreed(request):
    """One rank has stopped, the monitor dies, the next one looks: the other rank stops at the same check."""
    job = agreed_job(request)
    job.coordinator_dies(is_replaced=True)
    job.coordinator_goes_on(60)
    job.rank_goes_on(1, 12)
    assert job.ranks[1].stopped_at == job.ranks[0].stopped_at


def test_a_rank_that_left_and_looks_like_a_failed_one_does_not_undo_the_stop(request):
    """Its exit code is unknown to the monitor, which must not call the stop a teardown."""
    job = agreed_job(request)
    job.stopped_rank_leaves(code_is_known=False)
    job.coordinator_goes_on(60)
    job.rank_goes_on(1, 12)
    assert job.ranks[1].stopped_at == job.ranks[0].stopped_at


@pytest.mark.parametrize("kind", ["older than the job", "a link"])
def test_a_file_that_nobody_put_there_for_this_job_asks_nobody(request, kind):
    """`RUN_DIR/preempt` of a job before, or a link to something of somebody else, is no notice."""
    job = Job()
    job.start(ranks=2, apart=1, silent=9)
    request.addfinalizer(job.teardown)
    path = job.run_dir / "preempt"
    if kind == "a link":
        path.symlink_to("/etc/hostname")
    else:
        path.touch()
        os.utime(path, (400, 400))
    job.all_go_on(10, 12, 25)
    assert not any(rank.page.words[layout.W_CONTROL] for rank in job.ranks)
    assert all(rank.completed > 5 for rank in job.ranks)


TestJob = Job.TestCase
TestJob.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
