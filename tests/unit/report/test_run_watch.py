"""A run that is looked at again and again: what it publishes is taken in as it grows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from told_run import ToldRun

from resilience_sdk.cli.status import collect
from resilience_sdk.cluster.membership import HANGS
from resilience_sdk.core import job_config
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.journal import Event, read_journal
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.settings import Settings
from resilience_sdk.dashboard.runs import RunReader
from resilience_sdk.hang.activity import Activity, Kind
from resilience_sdk.hang.timers import Due
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.monitor.node_summary import NodeSummary, RankSummary, encode
from resilience_sdk.recorder.page_directory import job_page_directory, page_stem
from resilience_sdk.recorder.page_reader import PageReader
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.recorder.recorder import Recorder
from resilience_sdk.report import ranks_here, run_state
from resilience_sdk.report.live_view import LiveView
from resilience_sdk.report.page import render_sections
from resilience_sdk.report.read import read_run
from resilience_sdk.report.run_state import goodput_of, state_of
from resilience_sdk.report.run_view import look_at
from resilience_sdk.report.run_watch import RunWatch
from resilience_sdk.straggler.published import StandingVerdicts, write_report, write_standing
from resilience_sdk.straggler.reports import Report
from resilience_sdk.straggler.verdicts import SlowVerdict
from resilience_sdk.system.hostinfo import process_start_ticks

GONE = 2**22 + 1  # beyond the largest process id


@attrs.define
class Looked:
    """A run with pages of this host; rank 0 is this process."""

    told: ToldRun
    pages: Path
    watch: RunWatch
    recorders: list[Recorder] = attrs.field(factory=list)

    def page(self, rank: int = 0, *, pid: int = 0, **facts: object) -> RankPage:
        """Make the page of a rank."""
        pid = pid or os.getpid()
        identity = {"rank": rank, "local_rank": rank, "world_size": 2, "attempt": 0, "created_ns": time.monotonic_ns()}
        ticks = process_start_ticks(pid) or 1
        path = self.pages / f"{page_stem(0, rank, pid)}.page"
        return RankPage.create(path, pid=pid, start_ticks=ticks, facts={"host": "here"}, **(identity | facts))

    def until(self, happened: Callable[[LiveView], bool]) -> LiveView:
        """Look until the journal was read again, and return that view."""
        until_s = time.monotonic() + 20.0
        while not happened(view := self.watch.look()):
            assert time.monotonic() < until_s
        return view

    def row(self, rank: int, view: LiveView):
        """The row of a rank."""
        return next(row for row in view.rows if row.rank == rank)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Looked]:
    """A run that its launcher has begun, with a page directory."""
    told = ToldRun.make(tmp_path)
    base = tmp_path / "pages"
    base.mkdir(mode=0o700)
    env = {"RESILIENCE_PAGE_DIR": str(base)}
    pages = job_page_directory("job-1", env)
    settings = Settings(heartbeat_timeout=45.0).to_json() | {"of_a_newer_version": 1}
    config = JobConfig("job-1", str(told.run_dir.path), True, settings, "report", "t.py", os.getpid(), 1, 1, 1, 1, 1)
    job_config.write(pages, config)
    watch = RunWatch(told.run_dir, env, settling_s=0.0)
    yield Looked(told, pages, watch)
    watch.close()


def test_what_grows_is_taken_in_as_if_it_were_read_at_once(run: Looked) -> None:
    """State and account after many looks are those of one reading of the whole journal."""
    told = run.told
    for step in (told.begin, told.fail_and_recover, lambda: told.fail_and_recover(2, 1)):
        step()
        run.watch.look()
    told.tell(Event.CKPT_COMMIT, step=7, attempt=2)
    view = run.watch.look()
    events = read_journal(told.run_dir.journal).events
    state, account = state_of(events), goodput_of(events)
    assert (view.attempt, view.attempts, view.checkpoint_step) == (state.attempt, state.attempts, 7) == (2, 3, 7)
    assert view.wall_s == pytest.approx(account.wall_s)
    assert view.incidents == 2
    assert [name for _, name, _ in view.last_incidents] == ["0001-hang", "0002-hang"]
    assert view.events[-1][2] == "checkpoint after 7 steps is whole"


def test_what_was_told_a_moment_ago_waits_for_its_cause(run: Looked) -> None:
    """Another process may have told what came before it, and its file was read first; once it is over all counts."""
    run.watch = RunWatch(run.told.run_dir, {"RESILIENCE_PAGE_DIR": str(run.pages.parents[1])}, settling_s=3600.0)
    lease = Lease.acquire(run.told.run_dir, "job-1")
    assert run.watch.look().state == "running"
    run.told.begin()
    assert (run.watch.look().attempt, run.watch.look().state) == (None, "running")
    lease.release()
    assert (run.watch.look().attempt, run.watch.look().state) == (0, "lost")
    run.watch.close()


def test_a_rank_here_is_read_from_its_page(run: Looked) -> None:
    """Its step, what it has open, and the deadline that its monitor uses: here one that somebody set."""
    run.told.begin()
    recorder = Recorder(run.page())
    for _ in range(3):
        with recorder.block("step", "heartbeat", None), recorder.block("fwd", "compute", None):
            pass
    with recorder.block("step", "heartbeat", None), recorder.block("fwd", "compute", None):
        view = run.watch.look()
        row = run.row(0, view)
        assert (view.state, row.seen, row.activity, row.step, row.sections) == ("running", "page", "runs", 3, ("fwd",))
        assert row.deadline_s == pytest.approx(45.0, abs=1.0)
        assert row.rule == "heartbeat_timeout 45"
    assert view.unseen == 1


def test_time_without_a_step_is_not_productive(run: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stands for as long as the rank that came on last, unless somebody has paused the deadlines."""
    monkeypatch.setattr(run_state, "_LEAST_STANDING_S", 0.0)
    monkeypatch.setattr(run_state, "_USUAL_STEPS", 0.0)
    run.told.begin()
    recorders = [Recorder(run.page(0)), Recorder(run.page(1))]
    for rank, recorder in enumerate(recorders):
        run.told.tell(Event.FIRST_BEAT, rank=rank, writer=f"rank{rank}")
        with recorder.block("step", "heartbeat", None):
            pass
    before = run.until(lambda view: view.standing_s > 0.0)
    after = run.until(lambda view: view.standing_s > before.standing_s)
    assert after.buckets.get("productive", 0.0) == pytest.approx(before.buckets.get("productive", 0.0), abs=0.05)
    assert after.goodput is not None
    assert after.goodput == pytest.approx(after.buckets.get("productive", 0.0) / after.wall_s)
    assert sum(after.buckets.values()) == pytest.approx(after.wall_s, abs=0.05)
    assert after.buckets["standing"] == pytest.approx(after.standing_s, abs=0.001)
    with recorders[1].block("step", "heartbeat", None):
        pass
    view = run.watch.look()
    assert view.standing_s == run.row(1, view).age_s
    assert view.standing_s < (run.row(0, view).age_s or 0.0)
    monkeypatch.setattr(run_state, "_LEAST_STANDING_S", 3600.0)
    assert run.watch.look().standing_s == 0.0
    monkeypatch.setattr(run_state, "_LEAST_STANDING_S", 0.0)
    recorders[0].pause("a long evaluation")
    assert run.watch.look().standing_s == 0.0


def test_every_page_and_screen_has_the_same_goodput_of_a_run_that_stands(
    run: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top`, the page of the run, `goodput`, `status` and the list of runs: standing time is not productive."""
    monkeypatch.setenv("RESILIENCE_PAGE_DIR", str(run.pages.parents[1]))
    monkeypatch.setattr(run_state, "_LEAST_STANDING_S", 0.2)
    lease = Lease.acquire(run.told.run_dir, "job-1")
    run.told.begin()
    recorders = [Recorder(run.page(rank)) for rank in (0, 1)]
    for rank, recorder in enumerate(recorders):
        with recorder.block("step", "heartbeat", None):
            pass
        run.told.tell(Event.FIRST_BEAT, rank=rank, writer=f"rank{rank}")
    view = run.until(lambda view: view.standing_s > 1.0)
    facts, account = read_run(run.told.run_dir), look_at(run.told.run_dir).account()
    row = RunReader(run.told.run_dir.path).look(run_state.live_ranks(run.told.run_dir))
    assert view.goodput is not None
    assert view.goodput < 0.5
    for goodput in (
        facts.goodput["goodput"],
        account.goodput,
        row.goodput,
        collect(run.told.run_dir)["goodput"]["goodput"],
    ):
        assert goodput == pytest.approx(view.goodput, abs=0.02)
    assert facts.goodput["buckets"]["standing"] > view.standing_s - 0.1
    assert facts.segments[-1].bucket == "standing"
    assert sum(facts.goodput["buckets"].values()) == pytest.approx(facts.goodput["wall_s"])
    assert "standing for " in facts.headline.what
    assert "standing" in render_sections(facts)["time"]
    lease.release()


def test_a_run_is_as_fast_as_it_was_while_it_did_not_stand(run: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps per second are those of the last half minute, without the time in which no step was completed."""
    monkeypatch.setattr(run_state, "_LEAST_STANDING_S", 0.3)
    lease = Lease.acquire(run.told.run_dir, "job-1")
    run.told.begin()
    for rank in (0, 1):
        run.told.tell(Event.FIRST_BEAT, rank=rank)
    recorder = Recorder(run.page(0))

    def train(seconds: float) -> float | None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            with recorder.block("step", "heartbeat", None):
                time.sleep(0.02)
            view = run.watch.look()
        return view.steps_per_s

    train(0.5)
    before = train(1.5)
    stands = run.until(lambda view: view.standing_s > 3.0)
    after = train(0.3)
    assert before is not None
    assert stands.steps_per_s is not None
    assert stands.steps_per_s > 0.5 * before  # with the stop both are less than that
    assert after is not None
    assert after > 0.5 * before
    lease.release()


def test_where_no_rank_is_seen_the_notice_tells_that_a_run_stands(run: Looked) -> None:
    """Whoever looks from another machine has the journal alone."""
    lease = Lease.acquire(run.told.run_dir, "job-1")
    run.told.begin()
    for rank in (0, 1):
        run.told.tell(Event.FIRST_BEAT, rank=rank)
    run.told.tell(Event.STALL, since=time.time(), for_s=0.0, ranks=[], waiting=[], text="no progress")
    told = run.until(lambda view: view.standing_s >= 0.2).standing_s
    # It counts from the last word on, which was told a moment after what it says.
    assert read_run(run.told.run_dir).goodput["buckets"]["standing"] > told - 0.1
    lease.release()


def test_the_limit_of_a_rank_that_stands_is_the_monitors(run: Looked) -> None:
    """What is read anew meanwhile does not move it, its notice does; who only waits has none."""
    config = job_config.read(run.pages)
    assert config is not None
    job_config.write(run.pages, attrs.evolve(config, settings=Settings().to_json()))
    run.told.begin()
    recorder, other = Recorder(run.page(0)), Recorder(run.page(1))

    def learn(step_s: float) -> None:
        """The monitor keeps what it has learned."""
        run.told.run_dir.timeouts.unlink(missing_ok=True)
        learner = Learner(run.told.run_dir.timeouts, Settings(), "t.py", "job-1")
        learner.begin_attempt(2, 2)
        learner.book.add("step", "heartbeat", [step_s] * 200, False)
        learner.save()

    with recorder.block("step", "heartbeat", None), other.block("step", "heartbeat", None):
        pass
    with recorder.block("step", "heartbeat", None), other.block("step", "heartbeat", None):
        learn(100.0)
        limit_s = run.row(0, run.watch.look()).deadline_s
        assert limit_s == pytest.approx(500.0, abs=1.0)
        learn(20.0)
        assert run.row(0, run.watch.look()).deadline_s == limit_s
        named = [{"rank": 0, "activity": "stuck", "detail": "nothing moves"}]
        rule = "stuck_after 60 s"
        run.told.tell(Event.STALL, since=1.0, ranks=named, waiting=[1], verdict_in_s=50.0, rule=rule, text="stands")
        row = run.row(0, run.until(lambda view: view.stall is not None))
        assert row.deadline_s == pytest.approx((row.age_s or 0.0) + 50.0, abs=1.0)
        assert row.rule == rule
    run.told.tell(Event.STALL_END, why="went on")
    run.until(lambda view: view.stall is None)
    with recorder.block("step", "heartbeat", None):
        assert run.row(0, run.watch.look()).deadline_s == pytest.approx(100.0, abs=1.0)


def test_a_rank_that_died_says_how(run: Looked) -> None:
    """Its page is still there; its launcher has told."""
    run.told.begin()
    run.page()
    run.page(1, pid=GONE)
    run.told.tell(Event.RANK_START, rank=1, writer="rank1")
    run.told.tell(Event.RANK_EXIT, rank=1, signal="SIGKILL", exit_code=None)
    row = run.row(1, run.watch.look())
    assert (row.activity, row.detail, row.trouble) == ("gone", "ended by SIGKILL", 0)


def test_ranks_elsewhere_are_what_their_node_told(run: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own deadline and activity, and how old that is; the journal tells of those that nobody told of."""
    monkeypatch.setattr(ranks_here, "_AWAKE", 1e9)
    run.told.tell(Event.RUN_START)
    run.told.tell(Event.ATTEMPT_START, ranks=[0], world_size=3)
    run.told.tell(Event.RANK_START, rank=2, writer="rank2")
    announced = {"attempt": 0, "ranks": [0], "world_size": 3, "node": 0, "nodes": 3, "node_name": "a"}
    (run.pages / "attempt-0.json").write_text(json.dumps(announced))
    mine = Recorder(run.page(world_size=3))
    for _ in range(2):
        with mine.block("step", "heartbeat", None):
            pass
    other = run.page(1, pid=GONE, world_size=3)
    recorder = Recorder(other)
    with recorder.block("step", "heartbeat", None):
        pass
    reader = PageReader(other.path)
    snapshot = reader.snapshot()
    reader.close()
    other.path.unlink()
    assert snapshot is not None
    now_ns = time.monotonic_ns()
    stuck = Activity(Kind.STUCK, 20.0, detail="nothing moves")
    told = RankSummary(1, process_state="S", snapshot=snapshot, activity=stuck, due=Due(40.0, "stuck_after 60 s"))
    heard = {0: now_ns - 1_000_000_000}
    summary = NodeSummary(0, 1, "b", now_ns + 20_000_000_000, (told,), heard=heard)
    (run.pages / HANGS.peers).write_text(json.dumps({"attempt": 0, "nodes": {"1": encode(summary)}}))
    view = run.watch.look()
    row = run.row(1, view)
    assert (row.seen, row.node, row.activity, row.rule) == ("node", "b", "stuck", "stuck_after 60 s")
    assert row.seen_s == pytest.approx(1.0, abs=0.9)
    assert row.age_s == pytest.approx(20.0, abs=1.0)
    assert row.deadline_s == pytest.approx(60.0, abs=1.0)
    late = [
        attrs.evolve(summary, node=n, name=f"n{n}", wants=n == 9, ranks=(attrs.evolve(told, rank=n),))
        for n in range(3, 10)
    ]
    texts = {str(one.node): encode(one) for one in late}
    (run.pages / HANGS.peers).write_text(json.dumps({"attempt": 0, "nodes": texts}))
    monkeypatch.setattr(ranks_here, "_DECODING_S", 0.0)
    seen = [{row.rank for row in run.watch.look().rows if row.seen == "node"} for _ in range(8)]
    assert seen[0] == {1, 9}  # who waits for somebody comes first
    assert seen[-1] == {1, *range(3, 10)}
    assert run.row(2, view).seen == "journal"
    assert view.nodes == 3


def test_the_monitors_notice_says_who_is_waited_for(run: Looked) -> None:
    """And when it is called a hang: the monitor has watched for longer than who looks on."""
    run.told.begin()
    run.told.tell(Event.RANK_START, rank=1, writer="rank1")
    named = [{"rank": 1, "activity": "stuck", "detail": "nothing moves"}, {"rank": "x"}, 3]
    run.told.tell(Event.STALL, since=1.0, ranks=named, waiting=[0], verdict_in_s=50.0, text="no progress for 10 s")
    view = run.watch.look()
    assert view.stall is None  # nobody runs
    run.page()
    view = run.watch.look()
    row = run.row(1, view)
    assert (row.activity, row.detail, row.trouble) == ("stuck", "nothing moves", 0)
    assert view.stall is not None


def test_scores_and_verdicts_are_of_this_attempt(run: Looked) -> None:
    """A report from before it says nothing of it."""
    run.page()
    run.told.run_dir.path.chmod(0o700)
    write_report(run.told.run_dir.path, Report(nodes={0: "a"}, overall_relative={0: 0.8}))
    report = run.told.run_dir.path / "stragglers" / "report.json"
    os.utime(report, (1.0, 1.0))
    run.told.begin()
    assert run.row(0, run.watch.look()).score is None
    write_report(run.told.run_dir.path, Report(nodes={0: "a"}, overall_relative={0: 0.7}))
    verdict = SlowVerdict("persistent", "fwd", "compute", "", (0,), ("a",), False, 1, 9)
    write_standing(run.told.run_dir.path, StandingVerdicts(0, 1.0, verdicts=(verdict,), job="job-1"))
    view = run.watch.look()
    row = run.row(0, view)
    assert (row.score, row.is_slow, row.trouble) == (0.7, True, 2)
    assert view.stragglers[0].startswith("rank 0 (node a): section fwd")


def test_what_cannot_be_read_is_told(run: Looked) -> None:
    """And a run that nobody has begun is empty, not an error."""
    assert run.watch.look().state == "empty"
    run.told.begin()
    run.told.run_dir.outcome.write_text("torn {")
    (run.told.run_dir.journal / "x-y-1.jsonl").write_text("torn\n")
    with (run.told.run_dir.journal / "x-z-1.jsonl").open("w") as file:
        file.write('{"t": 1.0, "event": "resu')
        file.flush()
        for _ in range(3):
            view = run.watch.look()
            assert view.state == "lost"
            assert "torn journal lines skipped: 2" in view.problems
            assert len(view.problems) == 2
        file.write('me", "step": 3}\n')
    assert "torn journal lines skipped: 1" in run.watch.look().problems
    assert "resumed after 3 steps" in [text for _, _, text in run.watch.look().events]
