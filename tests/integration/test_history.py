"""One memory for all runs: the same answers from SQLite and a real PostgreSQL, whoever is killed while indexing."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needed
import pytest
from harness import job
from postgres_server import new_database, postgres
from told_fleet import ToldFleetRun

from resilience_sdk.cli.main import main
from resilience_sdk.core.journal import Event
from resilience_sdk.errors import ConfigError
from resilience_sdk.history import indexer, schema
from resilience_sdk.history.indexer import Index
from resilience_sdk.history.questions import History
from resilience_sdk.history.schema import Tables, open_engine
from resilience_sdk.incidents import Evidence

pytestmark = pytest.mark.slow
sqlalchemy = needed.library("sqlalchemy", "history")
_names = itertools.count()
HOUR = 3600.0


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A PostgreSQL for all tests of this module."""
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.release)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The name of an empty database, as `--db` takes it."""
    if request.param == "sqlite":
        return str(tmp_path / "history.db")
    url = request.getfixturevalue("server")
    return new_database(url, f"history_{os.getpid()}_{next(_names)}")


def index(database: str, *dirs: Path) -> int:
    """Index once; return the number of new events."""
    one = Index(database)
    try:
        return one.add(dirs).events
    finally:
        one.close()


def content(database: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of every table, but for the numbers that are given to runs."""
    engine, tables = open_engine(database), Tables()
    try:
        with engine.connect() as connection:
            paths = {row.id: (row.path, row.generation) for row in connection.execute(sqlalchemy.select(tables.runs))}
            found: dict[str, list[tuple[Any, ...]]] = {"runs": sorted(paths.values())}
            for table in tables.derived():
                rows = connection.execute(sqlalchemy.select(table)).all()
                found[table.name] = sorted(((paths[row[0]], *row[1:]) for row in rows), key=str)
            return found
    finally:
        engine.dispose()


def events_in(database: str) -> int:
    """Return how many events the index counts."""
    history = History(database)
    try:
        return int(history.totals()["events"])
    finally:
        history.close()


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return what a command prints with `--json`."""
    assert main([*words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def three_runs(folder: Path, at: float) -> list[ToldFleetRun]:
    """Nodes A, B and C in three runs; B fails in two of them, a program of somebody's fails on A."""
    first = ToldFleetRun.make(folder / "first", ["A", "B"], at=at)
    first.start(python="3.11.7", settings={"max_restarts": 3})
    first.at += HOUR
    first.fail("B", "gpu_fell_off_bus", "hardware", action="exclude_node")
    first.at += HOUR
    first.end()
    second = ToldFleetRun.make(folder / "second", ["A", "C"], at=at + 3 * HOUR)
    second.start(python="3.11.7", settings={"max_restarts": 3})
    second.at += HOUR
    said = Evidence("exception", "ValueError: bad shape (3, 4) in /home/me/v17/model.py")
    second.fail("A", "user_code_error", "user", action="stop", evidence=[said])
    second.end()
    third = ToldFleetRun.make(folder / "third", ["B", "C"], at=at + 6 * HOUR)
    third.start(python="3.12.1", settings={"max_restarts": 5})
    third.at += HOUR
    third.fail("B", "rank_killed_sigkill", "process")
    third.at += HOUR
    third.end()
    return [first, second, third]


def test_a_node_that_fails_in_two_of_three_runs_is_suspect(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With both reasons; no victim and no node of a user's error is; the list is what Slurm takes."""
    runs = three_runs(tmp_path / "runs", time.time() - 24 * HOUR)
    assert main(["history", "index", str(tmp_path / "runs"), "--db", database]) == 0
    capsys.readouterr()
    told = asked(capsys, "nodes", "--db", database)
    assert told["suspects"] == ["B"]
    (suspect,) = (node for node in told["nodes"] if node["suspect"])
    assert [failure["cause"] for failure in suspect["failures"]] == ["gpu_fell_off_bus", "rank_killed_sigkill"]
    assert suspect["runs"] == 2
    assert {node["name"]: len(node["failures"]) for node in told["nodes"]} == {"A": 0, "B": 2, "C": 0}
    assert {node["name"]: node["of_users"] for node in told["nodes"]} == {"A": 1, "B": 0, "C": 0}
    assert main(["nodes", "--db", database, "--exclude-list"]) == 0
    assert capsys.readouterr().out == "B\n"
    assert main(["nodes", "--db", database]) == 0
    text = capsys.readouterr().out
    assert "SUSPECT B: 2 independent failures in 2 runs: gpu_fell_off_bus, rank_killed_sigkill" in text
    assert str(runs[2].path) in text
    assert main(["nodes", "--db", database, "--since", "1h"]) == 0
    assert "no suspect among 0 nodes in the last 1h" in capsys.readouterr().out


def test_real_jobs_that_fail_on_one_node_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One right after the other: B fails in two of three runs, and a program ends with an error on A."""
    for name, node, way in (("one", "B", "segfault"), ("two", "A", "raise"), ("three", "B", "segfault")):
        folder = tmp_path / name
        folder.mkdir()
        words = ("--max-restarts", "0", "--nproc-per-node", "2", "dying.py", way)
        with job(folder, *words, env={"SLURMD_NODENAME": node}) as run:
            assert run.finish() != 0
            assert len(run.incidents()) == 1, run.screen
    database = str(tmp_path / "history.db")
    index(database, *(tmp_path / name / "run" for name in ("one", "two", "three")))
    told = asked(capsys, "nodes", "--db", database)
    assert told["suspects"] == ["B"]
    counts = {node["name"]: (len(node["failures"]), node["of_users"], node["runs"]) for node in told["nodes"]}
    assert counts == {"A": (0, 1, 1), "B": (2, 0, 2)}


def test_history_tells_what_recurs_and_what_changed_before(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By signature, in which numbers and folders do not count; users' errors apart."""
    said = [Evidence("exception", f"KeyError: 'x{n}' in /data/run{n}/a.py") for n in (1, 2)]
    for name, python, error in (("r1", "3.11", None), ("r2", "3.12", said[0]), ("r3", "3.12", said[1])):
        run = ToldFleetRun.make(tmp_path / "runs" / name, ["A"], at=1_000_000.0 + 1000 * int(name[1]))
        run.start(python=python, versions={"torch": "2.13.0"})
        run.at += 100
        if error is not None:
            run.fail("A", "user_code_error", "user", action="stop", evidence=[error])
        run.end()
    index(database, tmp_path / "runs")
    told = asked(capsys, "history", "--db", database)
    (cause,) = told["causes"]
    assert cause["signature"] == "user_code_error: KeyError: 'xN' in a.py"
    assert (cause["count"], cause["runs"], cause["blame"]) == (2, 2, "user")
    assert cause["changed"] == [{"what": "python", "before": "3.11", "after": "3.12"}]
    everything = told["mttf"][-1]
    assert (everything["failures"], everything["worked_s"]) == (2, pytest.approx(300))
    assert everything["mttf_s"] == pytest.approx(150)
    assert everything["low_s"] < everything["mttf_s"] < everything["high_s"]
    (of_cause,) = told["mttf_by_cause"]
    assert (of_cause["cause"], of_cause["category"], of_cause["failures"]) == ("user_code_error", "user", 2)
    for key in ("mttf_s", "low_s", "high_s"):
        assert of_cause[key] == everything[key] == cause[key]
    assert main(["history", "--db", database]) == 0
    text = capsys.readouterr().out
    assert "mean time to failure, by cause, over the work of all jobs:" in text
    assert "user_code_error: 2.5 min (41.5 s to 20.6 min; 2 failures in 5.0 min)" in text
    history = History(database)
    again = history.recurrence(cause["signature"], str(tmp_path / "runs" / "r3"), cause["last_at"])
    history.close()
    assert again is not None
    assert (again["times"], again["runs"], again["of_runs"]) == (2, 2, 3)
    assert again["first_run"].endswith("r2")


def test_what_changed_is_against_the_job_before_not_against_another_node(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nodes tell of one start within moments, and the last of them says nothing new."""
    for number, python in ((1, "3.11"), (2, "3.12")):
        run = ToldFleetRun.make(tmp_path / f"runs/r{number}", ["A", "B"], at=1_000_000.0 + 1000 * number)
        run.start(python=python)
        run.at += 0.3
        run.tell("B", Event.RUN_START, argv=["--nproc-per-node=8", run.script], python=python)
        run.at += 100
        if number == 2:
            run.fail("A", "user_code_error", "user", action="stop")
        run.end()
    index(database, tmp_path / "runs")
    (cause,) = asked(capsys, "history", "--db", database)["causes"]
    assert cause["changed"] == [{"what": "python", "before": "3.11", "after": "3.12"}]


def test_nodes_have_the_names_of_their_scheduler(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the ranks have told of themselves by the names of their hosts, and so has the health watch."""
    for number in (1, 2, 3):
        run = ToldFleetRun.make(tmp_path / f"runs/r{number}", ["hostA", "hostB"], at=time.time() - 48 * HOUR * number)
        run.aliases = {"hostA": "node1", "hostB": "node2"}
        run.start()
        for host in run.nodes:
            run.tell(host, Event.RANK_START, rank=0, local_rank=0, world_size=16)
        run.at += HOUR
        run.tell("hostB", Event.HEALTH, ok=False, check="ecc", status="warning", what="GPU 0", evidence="3 errors")
        run.at += HOUR
        run.fail("hostB", "gpu_fell_off_bus", "hardware", action="exclude_node")
        for host in run.nodes:
            run.tell(host, Event.RANK_START, rank=0, local_rank=0, world_size=16)
        run.at += HOUR
        run.end()
    run = ToldFleetRun.make(tmp_path / "runs/now", ["hostA"], at=time.time() - 480 * HOUR)
    run.aliases = {"hostA": "node1"}
    run.start()
    run.at += 479 * HOUR
    run.tell("hostA", Event.HEALTH, ok=False, check="ecc", status="warning", what="GPU 0", evidence="3 errors")
    run.close()
    index(database, tmp_path / "runs")
    told = asked(capsys, "nodes", "--db", database)
    assert told["suspects"] == ["node2"]
    assert {node["name"]: round(node["worked_s"] / HOUR) for node in told["nodes"]} == {"node1": 488, "node2": 9}
    (warning,) = told["warnings"]
    assert (warning["node"], warning["right"], warning["seen"]) == ("node1", 3, 3)
    history = History(database)
    assert {failure.of_nodes for failure in history.failures()} == {2}
    history.close()


def test_why_tells_that_it_is_not_the_first_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is an index beside the runs; a run alone has nothing to add."""
    runs = tmp_path / "resilience-runs"
    for number in (1, 2):
        run = ToldFleetRun.make(runs / f"r{number}", ["A"], at=1_000_000.0 + 1000 * number)
        run.start()
        run.report("A", "gpu_fell_off_bus", "hardware")
        run.end()
    assert main(["why", str(runs / "r2")]) == 0
    assert "time in" not in capsys.readouterr().out
    index(str(runs / "history.db"), runs)
    assert main(["why", str(runs / "r2")]) == 0
    assert "2nd time in 2 of 2 runs, first " in capsys.readouterr().out
    assert main(["why", str(runs / "r1")]) == 0
    assert "time in" not in capsys.readouterr().out


def test_indexing_is_incremental_and_may_be_repeated(database: str, tmp_path: Path) -> None:
    """Lines that are torn are counted once, a line that is being written waits for its end."""
    run = ToldFleetRun.make(tmp_path / "runs" / "one", ["A", "B"])
    run.start()
    assert index(database, tmp_path / "runs") == 4
    assert index(database, tmp_path / "runs") == 0
    run.fail("B", "gpu_fell_off_bus", "hardware")
    before = content(database)
    assert index(database, run.path) == 5
    assert content(database) != before
    journal = sorted((run.path / "journal").iterdir())[0]
    with open(journal, "ab") as file:
        file.write(b'{"torn": \n{"event": "health", "t": 1000')
    assert index(database, run.path) == 0
    with open(journal, "ab") as file:
        file.write(b"001.0}\n")
    assert index(database, run.path) == 1
    assert [row[-1] for row in content(database)["files"]] == [1, 0]
    fresh = str(tmp_path / "fresh.db")
    index(fresh, tmp_path / "runs")
    assert content(fresh) == content(database)


def test_steps_of_any_size_take_every_line_once(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that end in a file, between two files of a run and between two runs."""
    a_year(tmp_path / "runs", 3)
    lines = sum(len(file.read_bytes().splitlines()) for file in (tmp_path / "runs").glob("*/journal/*.jsonl"))
    index(str(tmp_path / "whole.db"), tmp_path / "runs")
    for size in (1, 3000, 5000, 9000, 20_000):
        monkeypatch.setattr(indexer, "_CHUNK_BYTES", size)
        shutil.copytree(tmp_path / "runs", tmp_path / "known" / str(size))
        assert index(database, tmp_path / "known" / str(size)) == lines
        assert index(database, tmp_path / "known" / str(size)) == 0
    found, whole = content(database), content(str(tmp_path / "whole.db"))
    assert {name: len(rows) for name, rows in found.items()} == {name: 5 * len(rows) for name, rows in whole.items()}


def test_a_file_that_cannot_be_read_costs_no_line_of_the_others(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told as a problem; what comes before it is taken, and what comes after it is taken by the next pass."""
    a_year(tmp_path / "runs", 2)
    lines = sum(len(file.read_bytes().splitlines()) for file in (tmp_path / "runs").glob("*/journal/*.jsonl"))
    bad = sorted((tmp_path / "runs" / "run0" / "journal").iterdir())[1]
    take_file = indexer.Index._take_file

    def torn_away(self: Index, connection: Any, run: int, path: Path, *rest: Any) -> bool:
        if path == bad:
            raise OSError(5, "Input/output error")
        return take_file(self, connection, run, path, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(indexer.Index, "_take_file", torn_away)
        one = Index(database)
        done = one.add([tmp_path / "runs"])
        one.close()
    assert done.problems == (f"{bad.parents[1]}: Input/output error",)
    assert 0 < done.events < lines
    assert done.events + index(database, tmp_path / "runs") == lines == events_in(database)


def test_a_name_that_is_used_again_is_another_run(database: str, tmp_path: Path) -> None:
    """What the first one has told stays; a file that was cut is read anew."""
    for number in (1, 2):
        run = ToldFleetRun.make(tmp_path / "runs" / "exp", ["A"], at=1_000_000.0 * number)
        run.start()
        run.fail("A", "gpu_fell_off_bus", "hardware")
        run.end()
        index(database, tmp_path / "runs")
        shutil.rmtree(tmp_path / "runs")
    found = content(database)
    assert [generation for _, generation in found["runs"]] == [0, 1]
    assert len(found["failures"]) == 2
    run = ToldFleetRun.make(tmp_path / "runs" / "exp", ["A"], at=3_000_000.0)
    run.start()
    run.close()
    index(database, tmp_path / "runs")
    (file,) = (run.path / "journal").iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0])
    assert index(database, tmp_path / "runs") == 1
    assert len(content(database)["attempts"]) == 4


def test_every_run_is_listed_with_its_newest_incident(database: str, tmp_path: Path) -> None:
    """By its newest use, those that told something last first; what two nodes have told of one incident counts once."""
    for number, (name, failures) in enumerate((("old", 2), ("quiet", 0), ("new", 1))):
        run = ToldFleetRun.make(tmp_path / "runs" / name, ["A", "B"], at=1_000_000.0 + 10 * HOUR * number)
        run.start()
        for cause in ("link_down", "gpu_fell_off_bus")[:failures]:
            run.at += HOUR
            run.fail("B", cause, "hardware")
        run.tell("B", Event.INCIDENT, id="0001-crash", kind="crash", summary="as B has it") if failures else None
        run.end()
    index(database, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "old")
    again = ToldFleetRun.make(tmp_path / "runs" / "old", ["A"], at=2_000_000.0)
    again.start()
    again.end()
    index(database, tmp_path / "runs")
    history = History(database)
    try:
        found = history.runs()
    finally:
        history.close()
    assert [(Path(run.path).name, run.incident, run.incidents) for run in found] == [
        ("old", None, 0), ("new", "0001-crash", 1), ("quiet", None, 0),
    ]  # fmt: skip
    assert found[0].first_at == 2_000_000.0
    assert found[1].kind == "crash"
    assert found[1].incident_at == 1_000_000.0 + 21 * HOUR


def test_clocks_that_jump_and_jobs_that_never_end_work_no_negative_time(database: str, tmp_path: Path) -> None:
    """A job without an end counts up to the next one there, or to the last word of its run."""
    run = ToldFleetRun.make(tmp_path / "runs" / "one", ["A"])
    run.start()
    run.at += 100
    run.start()  # the launcher before was killed
    run.at += 50
    run.tell("A", Event.HEALTH, ok=True)
    run.at -= 10_000  # somebody sets the clock
    run.end()
    index(database, tmp_path / "runs")
    history = History(database)
    (node,) = history.nodes()
    history.close()
    assert node.worked_s == pytest.approx(100)


def test_an_index_of_another_version_is_made_again(database: str, tmp_path: Path) -> None:
    """From the runs that it knows; a database of somebody else's is refused."""
    three_runs(tmp_path / "runs", 1_000_000.0)
    index(database, tmp_path / "runs")
    before, engine = content(database), open_engine(database)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("ALTER TABLE failures ADD COLUMN old INTEGER"))
    engine.dispose()
    set_version(database, 0)
    assert main(["history", "--db", database]) == 2  # what it has is not understood
    other = ToldFleetRun.make(tmp_path / "other", ["D"])
    other.start()
    index(database, other.path)
    after = content(database)
    assert {path for path, _ in after["runs"]} == {path for path, _ in before["runs"]} | {str(other.path)}
    assert after["failures"] == before["failures"]
    engine = open_engine(database)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("DROP TABLE index_version"))
    engine.dispose()
    assert main(["history", "index", str(other.path), "--db", database]) == 2


def set_version(database: str, version: int) -> None:
    """Have an index be of another version of its schema."""
    engine = open_engine(database)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(f"UPDATE index_version SET version = {version}"))
    engine.dispose()


def test_an_index_that_is_made_again_loses_no_run(database: str, tmp_path: Path) -> None:
    """Though whoever opens it first is killed, and the next one is the exporter of one node of another run."""
    three_runs(tmp_path / "runs", 1_000_000.0)
    index(database, tmp_path / "runs")
    before = content(database)
    set_version(database, 0)
    Index(database).close()  # killed before it has read a line
    other = ToldFleetRun.make(tmp_path / "other", ["A", "D"])
    other.start()
    of_node = Index(database)
    of_node.add([other.path], host_prefix="D-")
    of_node.close()
    after = content(database)
    assert after["failures"] == before["failures"]
    assert [row for row in after["files"] if row[0][0] != str(other.path)] == before["files"]
    assert [row[1][0] for row in after["files"] if row[0][0] == str(other.path)] == ["D"]


def test_an_index_of_a_newer_version_is_left_alone(database: str, tmp_path: Path) -> None:
    """It would be made again and again by the two."""
    three_runs(tmp_path / "runs", 1_000_000.0)
    index(database, tmp_path / "runs")
    before = content(database)
    set_version(database, 99)
    for words in (["history", "index", str(tmp_path / "runs")], ["history"], ["nodes"]):
        assert main([*words, "--db", database]) == 2
    assert content(database) == before


def test_an_index_that_somebody_holds_is_not_waited_for_without_an_end(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An indexer that was stopped in the middle of a step holds the run; the next one says so."""
    run = ToldFleetRun.make(tmp_path / "run", ["A"])
    run.start()
    index(database, run.path)
    run.end()
    monkeypatch.setattr(schema, "_WAIT_S", 1.0)
    engine = open_engine(database)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE runs SET turn = turn"))
        with pytest.raises(ConfigError, match="lock"):
            index(database, run.path)
    engine.dispose()
    assert index(database, run.path) == 1


_INDEXER = """
import sys
from resilience_sdk.history import indexer
indexer._CHUNK_BYTES = int(sys.argv[1])
one = indexer.Index(sys.argv[2])
print("ready", flush=True)
one.add(sys.argv[3:])
"""


@pytest.fixture
def start_indexer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start an indexer that takes steps of so many bytes; all are gone afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(database: str, *dirs: Path, chunk: int = 2000) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", _INDEXER, str(chunk), database, *map(str, dirs)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def a_year(folder: Path, runs: int) -> None:
    """Runs that fail now and then."""
    draw = random.Random(0)
    for number in range(runs):
        run = ToldFleetRun.make(folder / f"run{number}", ["A", "B", "C"], at=1_000_000.0 + 1000 * number)
        run.start()
        for _ in range(30):
            run.at += 10
            run.fail(draw.choice("ABC"), "gpu_fell_off_bus", "hardware")
        run.end()


def test_an_indexer_that_is_killed_at_any_moment_goes_on(
    database: str, tmp_path: Path, start_indexer: Callable[..., subprocess.Popen[str]]
) -> None:
    """The next one takes what is left: every line once. Each start finds more to do, so most are killed at work."""
    draw, killed = random.Random(1), 0
    for _ in range(8):
        a_year(tmp_path / "runs", 4)
        process = start_indexer(database, tmp_path / "runs", chunk=draw.choice([2000, 20_000]))
        try:
            process.wait(draw.uniform(0.0, 0.2))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
    assert killed >= 2
    index(database, tmp_path / "runs")
    fresh = str(tmp_path / "fresh.db")
    index(fresh, tmp_path / "runs")
    assert content(database) == content(fresh)
    lines = sum(len(file.read_bytes().splitlines()) for file in (tmp_path / "runs").glob("*/journal/*.jsonl"))
    assert events_in(database) == events_in(fresh) == lines


def test_several_indexers_at_once_take_every_line_once(
    database: str, tmp_path: Path, start_indexer: Callable[..., subprocess.Popen[str]]
) -> None:
    """While the runs are still being written, and in whatever order each is given them."""
    a_year(tmp_path / "runs", 3)
    runs = [tmp_path / "runs" / f"run{number}" for number in range(3)]
    processes = [
        start_indexer(database, *order, chunk=chunk)
        for order, chunk in ((runs, 2000), (runs[::-1], 1 << 20), ([runs[1], runs[0], runs[2]], 1 << 20))
    ]
    a_year(tmp_path / "runs", 5)
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    index(database, tmp_path / "runs")
    fresh = str(tmp_path / "fresh.db")
    index(fresh, tmp_path / "runs")
    assert content(database) == content(fresh)
    assert events_in(database) == events_in(fresh)


def test_runs_are_taken_in_one_order(database: str, tmp_path: Path) -> None:
    """However they are given: indexers that hold several runs would else wait for one another for ever."""
    runs = [ToldFleetRun.make(tmp_path / name, ["A"]) for name in ("c", "a", "b")]
    for run in runs:
        run.start()
    index(database, *(run.path for run in runs))
    engine = open_engine(database)
    with engine.connect() as connection:
        taken = connection.execute(sqlalchemy.text("SELECT path FROM runs ORDER BY id")).scalars().all()
    engine.dispose()
    assert taken == [str(tmp_path / name) for name in "abc"]


@pytest.mark.parametrize("db", ["nosuch://x", "postgresql://nobody@127.0.0.1:1/none", "/proc/no/such/place.db"])
def test_a_database_that_is_none_is_refused_in_one_line(
    db: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names what does not work."""
    ToldFleetRun.make(tmp_path / "run", ["A"]).start()
    assert main(["history", "index", str(tmp_path / "run"), "--db", db]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("resilience: ")
    assert main(["nodes", "--db", db]) == 2
