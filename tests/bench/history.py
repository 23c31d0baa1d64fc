"""The history of many runs: suspect nodes of a simulated cluster's year, how fast it is indexed, how fast it answers.

Journals are written by the journal itself, taken in by the indexer, and asked as the commands ask.
"""

from __future__ import annotations

import contextlib
import glob
import io
import math
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import attrs

from resilience_sdk.cli.main import main as command
from resilience_sdk.core.journal import Event
from resilience_sdk.history.exclusion import DATABASE
from resilience_sdk.history.indexer import Index
from resilience_sdk.history.questions import History
from resilience_sdk.history.recurrence import recurrences
from resilience_sdk.history.suspects import SUSPECT_FOR_S
from resilience_sdk.incidents import Evidence, IncidentStore
from tests.bench import cluster_year
from tests.bench.cluster_year import DAY_S, ClusterYear
from tests.bench.figures import Context, Figure
from tests.bench.processes import ROOT
from tests.told_fleet import ToldFleetRun

PRECISION, RECALL = 0.95, 0.85
EVENTS_PER_S = 20_000.0
ANSWER_S = 0.2
_WINDOWS = 13  # of 28 days, in which the fleet is asked
_BACK_S = (SUSPECT_FOR_S, 90 * DAY_S)
_NODES, _RANKS = 16, 8  # of a run of the bulk
_ATTEMPTS = 8
_PYTHONS = ("3.11.7", "3.12.1")
_SYLLABLES = ("ba", "co", "du", "fi", "ga", "ho", "ju", "ke")


def measure(context: Context) -> list[Figure]:
    """Measure both; without much of an environment, which the journal looks through for secrets at each line."""
    with mock.patch.dict(os.environ, {"PATH": os.environ.get("PATH", os.defpath)}, clear=True):
        return [*_suspects(context), *_index(context)]


@attrs.define
class _Score:
    """Suspects against the truth, over one or several questions."""

    right: int = 0
    wrong: int = 0
    there: int = 0

    def add(self, suspects: set[str], lemons: set[str]) -> None:
        self.right += len(suspects & lemons)
        self.wrong += len(suspects - lemons)
        self.there += len(lemons)

    @property
    def precision(self) -> float:
        return self.right / (self.right + self.wrong) if self.right + self.wrong else math.nan

    @property
    def recall(self) -> float:
        return self.right / self.there


def _suspects(context: Context) -> list[Figure]:
    nodes, seeds = (128, 1) if context.quick else (512, 3)
    years = [_year(context.scratch / f"year{seed}", seed, nodes) for seed in range(seeds)]
    lemons = round(cluster_year.LEMONS * nodes)
    told = "/".join(f"{times:g}" for times in cluster_year.TIMES)
    facts = (
        f"{nodes} nodes, {lemons} of them fail {told} times as often; {_middle(y.jobs for y in years)} jobs, "
        f"{_middle(y.failures for y in years)} failures, {_middle(100 * y.of_lemons for y in years)} % of lemons, "
        f"{_middle(y.events for y in years)} events"
    )
    precision, recall = (None, None) if context.quick else (PRECISION, RECALL)  # one of four lemons is a quarter
    figures = [
        Figure("suspects of a year, precision", "ours", "", tuple(y.whole.precision for y in years), least=precision,
               note=facts),
        Figure("suspects of a year, recall", "ours", "", tuple(y.whole.recall for y in years), least=recall),
    ]  # fmt: skip
    for back_s in _BACK_S:
        for times in (None, *cluster_year.TIMES):
            scores = [year.windows[back_s, times] for year in years]
            name = f"asked each 28 days, --since {back_s / DAY_S:.0f}d"
            if times is None:
                note = f"{sum(one.right + one.wrong for one in scores)} named, {sum(one.wrong for one in scores)} wrong"
                samples = tuple(score.precision for score in scores)
                figures.append(Figure(f"{name}: precision", "ours", "", samples, note=note))
            else:
                samples = tuple(score.recall for score in scores)
                figures.append(Figure(f"{name}: recall of {times:g} times as often", "ours", "", samples))
    figures.append(
        Figure("the year's starts and ends: indexed", "ours", "1/s", tuple(year.events / year.took_s for year in years))
    )
    answers = {name: tuple(year.answers[name] for year in years) for name in years[0].answers}
    return figures + [
        Figure(f"the year's starts and ends: {name}", "ours", "s", samples) for name, samples in answers.items()
    ]


@attrs.frozen
class _Year:
    jobs: int
    failures: int
    of_lemons: float
    events: int
    took_s: float
    whole: _Score
    windows: dict[tuple[float, float | None], _Score]
    """By how far back was asked, and how many times as often the nodes fail; None: all."""
    answers: dict[str, float]


def _year(folder: Path, seed: int, nodes: int) -> _Year:
    """Tell a year, take it in each 28 days and ask then; ask of the whole year at its end."""
    folder.mkdir(parents=True)
    began_s = time.time() - _WINDOWS * SUSPECT_FOR_S
    year = ClusterYear(folder, seed, nodes, began_s)
    database = str(folder.with_suffix(".db"))
    windows = {(back_s, times): _Score() for back_s in _BACK_S for times in (None, *cluster_year.TIMES)}
    lemons, events, took_s = set(year.lemons), 0, 0.0
    for _ in range(_WINDOWS):
        told = year.advance(SUSPECT_FOR_S / DAY_S)
        began = time.monotonic()
        events += _take_in(database, told)
        took_s += time.monotonic() - began
        for back_s in _BACK_S:
            suspects = _named(database, year.at - back_s)
            windows[back_s, None].add(suspects, lemons)
            for times in cluster_year.TIMES:
                those = {node for node in lemons if year.lemons[node] == times}
                windows[back_s, times].add(suspects & those, those)
    whole = _Score()
    whole.add(_named(database, began_s), lemons)
    year.close()
    answers = {name: _timed(ask) for name, ask in _questions(database, folder, since="365d").items()}
    shutil.rmtree(folder)  # some tens of thousands of files
    return _Year(
        year.jobs, year.failures, year.of_lemons / year.failures, events, took_s, whole, windows, answers
    )  # fmt: skip


def _take_in(database: str, folders: Sequence[Path]) -> int:
    index = Index(database)
    try:
        return index.add(folders).events
    finally:
        index.close()


def _events_in(database: str) -> int:
    history = History(database)
    try:
        return history.totals()["events"]
    finally:
        history.close()


def _named(database: str, since: float) -> set[str]:
    history = History(database, since=since)
    try:
        return {record.name for record in history.nodes() if record.suspect}
    finally:
        history.close()


def _index(context: Context) -> list[Figure]:
    sizes = (10_000, 100_000) if context.quick else (10_000, 100_000, 1_000_000)
    folder = context.scratch / "bulk"
    made = _bulk(folder, sizes[-1])
    figures = []
    with _engines(context.scratch) as engines:
        for engine, new_database in engines.items():
            for size in sizes:
                figures += _of_size(engine, new_database, made, size, context)
    return figures


def _of_size(
    engine: str, new_database: Callable[[], str], made: dict[Path, int], size: int, context: Context
) -> list[Figure]:
    folders: list[Path] = []
    while (events := sum(made[folder] for folder in folders)) < size:
        folders.append(list(made)[len(folders)])
    rates, again_s, cpu_s = [], [], 0.0
    for _ in range(context.repeats(3, 1)):
        database = new_database()
        began_s = time.process_time()
        took_s = _timed(lambda database=database: _take_in(database, folders))
        cpu_s = time.process_time() - began_s
        assert _events_in(database) == events
        rates.append(events / took_s)
        again_s.append(_timed(lambda database=database: _take_in(database, folders)))
    where = f"{engine}, {events} events"
    note = f"{len(folders)} runs, {cpu_s:.1f} s of CPU"
    figures = [
        Figure(f"indexed, {where}", "ours", "1/s", tuple(rates), least=EVENTS_PER_S, note=note),
        Figure(f"looked for what is new, {where}", "ours", "s", tuple(again_s)),
    ]
    for name, ask in _questions(database, folders[-1], since="28d").items():
        cpu_s = time.process_time()
        samples = tuple(_timed(ask) for _ in range(context.repeats(7, 2)))
        cpu_s = (time.process_time() - cpu_s) / len(samples)
        note = f"{cpu_s:.3f} s of CPU" + (" beside the server's" if engine != "SQLite" else "")
        figures.append(Figure(f"{name}, {where}", "ours", "s", samples, target=ANSWER_S, note=note))
    return figures


def _questions(database: str, run_dir: Path, since: str) -> dict[str, Callable[[], object]]:
    """Return the questions, as the commands ask them; `why` alone does more than ask."""
    asked = ("--db", database)
    incidents = IncidentStore(run_dir).all()[-1:]

    def again() -> object:
        with mock.patch.dict(os.environ, {DATABASE: database}):
            return recurrences(run_dir, incidents)

    questions: dict[str, Callable[[], object]] = {
        "history": lambda: _silent("history", *asked),
        "nodes": lambda: _silent("nodes", "--since", since, *asked),
        "nodes --exclude-list": lambda: _silent("nodes", "--exclude-list", "--since", since, *asked),
    }
    return {**questions, "what why asks": again} if incidents else questions


def _silent(*words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert command(list(words)) == 0


def _timed(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


@contextlib.contextmanager
def _engines(scratch: Path) -> Iterator[dict[str, Callable[[], str]]]:
    """Yield what makes a new database, by engine; PostgreSQL where it is installed."""
    made = iter(range(1000))
    with contextlib.ExitStack() as stack:
        engines = {"SQLite": lambda: str(scratch / f"history{next(made)}.db")}
        if glob.glob("/usr/lib/postgresql/*/bin/postgres"):
            sys.path.insert(0, str(ROOT / "tests"))  # as the tests import one another
            from tests.integration.postgres_server import new_database, postgres

            url = stack.enter_context(postgres())
            engines["PostgreSQL"] = lambda: new_database(url, f"history{next(made)}")
        yield engines


def _bulk(folder: Path, events: int) -> dict[Path, int]:
    """Write runs of 128 ranks with all that launchers, monitors and ranks tell; return how many events each has."""
    draw = random.Random(0)
    made: dict[Path, int] = {}
    at = time.time() - SUSPECT_FOR_S + DAY_S
    step_s = (SUSPECT_FOR_S - 2 * DAY_S) * _NODES * _RANKS * 80 / events / _ATTEMPTS
    while sum(made.values()) < events:
        nodes = sorted(f"n{number:04}.cluster" for number in draw.sample(range(512), _NODES))
        run = ToldFleetRun.make(
            folder / f"run{len(made):04}", nodes, at=at, script=f"train{draw.randrange(20)}.py", ranks_per_node=_RANKS,
            aliases={node: node.partition(".")[0] for node in nodes},
        )  # fmt: skip
        run.start(python=draw.choice(_PYTHONS), versions={"torch": "2.13.0"}, settings={"max_restarts": 9})
        for _ in range(_ATTEMPTS):
            _attempt(run)
            _failure(run, draw)
        run.report(nodes[0], "gpu_fell_off_bus", "hardware")
        run.end()
        journal = folder / f"run{len(made):04}"
        made[journal] = sum(len(file.read_bytes().splitlines()) for file in (journal / "journal").iterdir())
        at += step_s
    return made


def _attempt(run: ToldFleetRun) -> None:
    """An hour of work: each rank saves twice, each monitor tells step times and checks of its node."""
    for number, host in enumerate(run.nodes):
        for local in range(_RANKS):
            rank = number * _RANKS + local
            told = {"writer": f"rank{rank}", "rank": rank}
            run.tell(host, Event.RANK_START, pid=1000 + rank, local_rank=local, world_size=_NODES * _RANKS, **told)
            for step in (1000, 2000):
                run.tell(host, Event.CKPT_BEGIN, step=step, **told)
                facts = {"bytes": 1 << 30, "seconds": 4.25, "stall_s": 0.5, "checkpoint": f"step-{step:08}"}
                run.tell(host, Event.CKPT_COMMIT, step=step, **facts, **told)
            run.tell(host, Event.FIRST_BEAT, writer="monitor", rank=rank, step=1)
        for minute in range(20):
            run.tell(host, Event.STEP_TIME, writer="monitor", steps=100 * minute, step_s=1.5, sections={"fwd": 0.5})
        for check in ("gpu_temperature", "disk_space", "memory", "clock", "network_link", "ecc_errors"):
            run.tell(host, Event.HEALTH, writer="monitor", check=check, ok=True, status="ok", value="as ever")
        for local in range(_RANKS):
            rank = number * _RANKS + local
            run.tell(host, Event.RANK_EXIT, rank=rank, local_rank=local, pid=1000 + rank, exit_code=0)


def _failure(run: ToldFleetRun, draw: random.Random) -> None:
    run.at += 3600.0
    node = draw.choice(list(run.nodes))
    if draw.random() < 0.6:
        run.fail(node, *draw.choice(cluster_year.CAUSES))
    else:
        said = Evidence("exception", f"KeyError: '{''.join(draw.choices(_SYLLABLES, k=3))}'")
        run.fail(node, "user_code_error", "user", action="stop", evidence=[said])
    for number in draw.sample(range(_NODES), 1):
        run.tell(
            run.nodes[number], Event.HEALTH, writer="monitor", check="ecc_errors", ok=False, status="warn",
            what="gpu 3", evidence="2 correctable errors in an hour",
        )  # fmt: skip


def _middle(values: Iterator[float]) -> str:
    return f"{statistics.median(values):.0f}"
