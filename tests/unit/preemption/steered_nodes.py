"""Ranks and nodes of a job that is steered: each rank, coordinator and relay goes on when it is told to."""

import functools
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from actors import Actor, StepwiseWords

from resilience_sdk.cluster.bus import Board, Exchange
from resilience_sdk.cluster.membership import STOPS
from resilience_sdk.monitor import stop as monitor
from resilience_sdk.monitor.notices import Notices
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.preemption import listener
from resilience_sdk.preemption import listener as rank_side
from resilience_sdk.preemption.agreement import StopDecision
from resilience_sdk.preemption.context import PreemptionContext
from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.recorder.page_directory import page_stem
from resilience_sdk.recorder.page_reader import PageReader
from resilience_sdk.recorder.page_writer import RankPage

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
        side = PreemptionContext(words, pages, journal, 0, (signal.SIGTERM,), GRACE_S, -1)
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
        self.exchange = Exchange(self.pages, STOPS, attempt=0, keys=keys, node=number)
        self.board = Board(self.pages, 0, "words")

    def replace_coordinator(self):
        """Another monitor takes over, with nothing but the files."""
        notices = Notices(self.job.run_dir, 500.0)
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
        return any(os.readlink(path) == StopDecision.ALONE for path in self.pages.glob("word-*-stop-*"))
