"""The monitor's part in finding slow ranks: real pages in, events, incidents, lines, files and a stop out."""

from __future__ import annotations

import json
import math
import os
import random
import re
import time

import attrs
import pytest

from resilience_sdk.core.journal import Journal, read_journal
from resilience_sdk.core.settings import Settings
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.monitor.notices import Notices
from resilience_sdk.monitor.ranks import RankTable
from resilience_sdk.monitor.straggler_response import LASTING_S, Below
from resilience_sdk.monitor.stragglers import OWN, PEERS, StepTimeWatch, StragglerWatch, progress_pause_s
from resilience_sdk.recorder.page_directory import page_stem
from resilience_sdk.recorder.page_layout import FLAG_TRAINS
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.recorder.recorder import Recorder
from resilience_sdk.straggler.published import read_report, read_standing
from resilience_sdk.straggler.reports import Report
from resilience_sdk.straggler.verdicts import SlowVerdict
from resilience_sdk.straggler.window_messages import decode
from resilience_sdk.straggler.workload import role_file
from resilience_sdk.system.hostinfo import process_start_ticks

RANKS = 4
MS = 1_000_000


def complete_step(recorder, took_ns):
    """Have a heartbeat of that length be complete."""
    beat = recorder.beat("step")
    beat.sample(took_ns)
    beat.lane.note_beat()


class Heard(Notices):
    """The requests of one monitor after the other, in order."""

    def __init__(self, run_dir):
        super().__init__(run_dir, 0.0)
        self.heard = []

    def ask(self, asked):
        self.heard.append(asked)
        super().ask(asked)


class Node:
    """A page directory with four ranks, all of them this very process, and the watch over them."""

    def __init__(self, folder, settings, *, run_dir=None, node=None):
        self.pages = folder / "pages"
        self.run_dir = run_dir or folder / "run"
        self.pages.mkdir(mode=0o700, parents=True)
        (self.run_dir / "journal").mkdir(parents=True, exist_ok=True)
        self.notices = Heard(self.run_dir)
        self.asked = self.notices.heard
        self.now = 1000.0
        self.settings = settings
        self.announcement = {} if node is None else {"node": node, "nodes": 2, "node_name": f"host#{node}"}
        self.first_rank = RANKS * (node or 0)
        self.random = random.Random(1)
        self.recorders = [self.make_rank(self.first_rank + rank) for rank in range(RANKS)]
        self.table = RankTable(self.pages)
        assert len(self.table.scan()) == RANKS
        self.start_monitor()

    def make_rank(self, rank):
        pid = os.getpid()
        page = RankPage.create(
            self.pages / f"{page_stem(0, rank, pid)}.page",
            pid=pid,
            start_ticks=process_start_ticks(pid),
            rank=rank,
            local_rank=rank % RANKS,
            world_size=8,
            attempt=0,
            created_ns=int(self.now * 1e9),
            facts={},
        )
        return Recorder(page)

    def start_monitor(self):
        """Begin anew, as a monitor does that takes over."""
        self.store = IncidentStore(self.run_dir)
        self.journal = Journal(self.run_dir / "journal", writer="monitor", host="here", boot_id="b", job="j")
        self.watch = StragglerWatch(
            self.pages,
            self.run_dir,
            self.settings,
            self.journal,
            self.store,
            self.notices,
            "here",
            job="j",
            began=None,
        )
        self.watch.begin(0, self.announcement)

    def train(self, steps, slow=None, seconds=0.0, forward_ms=10):
        """Have all ranks pass so many steps, rank `slow` slower in its backward; the monitor looks every 4 steps."""
        for step in range(steps):
            for rank, recorder in enumerate(self.recorders, self.first_rank):
                extra = int(seconds * 1e9) if rank == slow else 0
                for name, kind, ms in (
                    ("fwd", "compute", forward_ms),
                    ("bwd", "compute", 20),
                    ("comm_wait", "comm", 30),
                ):
                    jitter = self.random.lognormvariate(0, 0.01)
                    late = extra if name == "bwd" else 0
                    if name == "comm_wait" and slow is not None and rank != slow:
                        late = int(seconds * 1e9)  # the others wait for it
                    recorder.block(name, kind, None).sample(int(ms * MS * jitter) + late)
                complete_step(recorder, 150 * MS)
            self.now += 0.15
            if step % 4 == 3:
                self.look()

    def look(self):
        """One round of the monitor."""
        self.watch.look([(watched, watched.reader.passes()) for watched in self.table.all()], self.now)

    def degraded(self):
        return [e for e in read_journal(self.run_dir / "journal").events if e["event"] == "degraded"]

    def told(self, **facts):
        events = [e for e in read_journal(self.run_dir / "journal").events if e["event"] == "straggler"]
        return [e for e in events if all(e.get(name) == value for name, value in facts.items())]


@pytest.fixture
def node(tmp_path):
    """A job of one node."""
    return Node(tmp_path, Settings())


def test_a_verdict_becomes_an_event_then_an_incident_and_is_over(node, capsys):
    """Found, lasting, over: one incident after ten seconds, closed; what stands is published."""
    node.train(24, slow=2, seconds=0.02)
    (found,) = node.told()
    assert (found["what"], found["kind"], found["ranks"], found["section"]) == ("found", "transient", [2], "bwd")
    assert node.store.all() == []
    assert [v.ranks for v in read_standing(node.run_dir).verdicts] == [(2,)]
    node.train(32, slow=2, seconds=0.02)
    assert [event["what"] for event in node.told()] == ["found", "still"]
    assert node.store.all() == []  # 48 steps, but only 8 s
    node.train(24, slow=2, seconds=0.02)
    (incident,) = node.store.all()
    assert incident.detection_latency_s >= LASTING_S
    assert (incident.kind, incident.attempt, incident.action) == ("slow", 0, "none")
    assert [(c.rank, c.node, c.section, c.step) for c in incident.culprits] == [(2, "here", "bwd", 1)]
    assert incident.recovered_at is None
    assert "SLOW: rank 2 (node here): section bwd" in capsys.readouterr().err
    node.train(64)
    assert [event["what"] for event in node.told()] == ["found", "still", "over"]
    (incident,) = node.store.all()
    assert incident.recovered_at is not None
    assert incident.recovery_s is not None
    assert read_standing(node.run_dir).verdicts == ()
    assert node.asked == [None]


def test_a_mistake_in_telling_what_steps_take_costs_nothing_else(node, capsys):
    """It is journalled and said once; the watch over hangs goes on, and no later round fails."""
    watch = StepTimeWatch(node.journal)
    for _ in range(3):
        watch.look([(None, [])], 1.0)
    (event,) = (e for e in read_journal(node.run_dir / "journal").events if e["event"] == "degraded")
    assert event["what"] == "step time"
    assert capsys.readouterr().err.count("what steps take is not told any more") == 1


def test_a_monitor_that_takes_over_does_not_write_the_incident_again(node):
    """It finds the same rank slow, and the incident that stands; it closes it in the end."""
    node.train(80, slow=2, seconds=0.02)
    node.start_monitor()
    node.train(80, slow=2, seconds=0.02)
    assert len(node.told(what="still")) == 2
    assert [i.recovered_at for i in node.store.all()] == [None]
    node.train(64)
    assert [i.recovered_at is None for i in node.store.all()] == [False]


def test_a_regression_of_all_has_no_culprits(node):
    """And asks nobody to stop."""
    node.settings = Settings(stop_if_detected=True)
    node.start_monitor()
    node.train(160)
    node.train(160, forward_ms=20)
    (incident,) = node.store.all()
    assert (incident.kind, incident.culprits, incident.cause) == ("slow", (), "unknown")
    assert "all ranks together" in incident.evidence[0].text
    assert node.asked == [None]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_regression_of_all_is_found_among_steps_of_any_length(node, is_told):
    """If the ranks tell how much work their steps have, each in its page; lengths vary fourfold."""
    chance = random.Random(8)
    for step in range(320):
        length = chance.lognormvariate(0.0, 0.4)
        for recorder in node.recorders:
            if is_told:
                recorder.amounts("calls").add(100.0 * length)
        node.train(1, forward_ms=(50 if step < 200 else 60) * length)
        if step % 4 == 3:
            node.look()
    assert {(found["kind"], found["section"]) for found in node.told(what="found")} == (
        {("global", "fwd")} if is_told else set()
    )


def test_the_stop_is_asked_for_once_with_incident_and_node(tmp_path):
    """When it lasts, not before."""
    node = Node(tmp_path, Settings(stop_if_detected=True))
    node.train(32, slow=1, seconds=0.02)
    assert node.asked == [None]
    node.train(60, slow=1, seconds=0.02)
    (asked,) = node.asked[1:]
    (incident,) = node.store.all()
    assert (asked.source, asked.incident, asked.node) == ("straggler", incident.id, "here")
    assert incident.action == "exclude_node"


def test_a_threshold_of_the_user_is_the_only_reason_to_stop(tmp_path, capsys):
    """A verdict that lasts is none; a score below it is, once, with the incident of the verdict and the node."""
    node = Node(tmp_path, Settings(report_interval=3, stop_below_relative=0.7))
    node.train(100, slow=1, seconds=0.003)  # 23 ms for 20 ms: 0.91 over both sections
    assert node.asked == [None]
    (incident,) = node.store.all()
    assert incident.action == "none"
    node.train(60, slow=1, seconds=0.02)  # 50 ms for 30 ms: (10 * 1.0 + 40 * 0.5) / 50 = 0.6
    (asked,) = node.asked[1:]
    assert (asked.source, asked.incident, asked.node) == ("straggler", incident.id, "here")
    assert asked.reason.startswith(
        "rank 1 (node here): score 0.6 over all its sections against the fastest rank is below"
    )
    assert "(stop_below_relative), slow in section bwd" in asked.reason
    assert node.store.get(incident.id).action == "exclude_node"
    assert capsys.readouterr().err.count("all ranks save and stop, so that the job goes on without node here") == 1


def test_the_section_told_is_the_one_that_loses_the_time():
    """Not a short one, whose score is lower by noise; without a verdict it is the lowest score."""
    report = Report(
        nodes={0: "here", 1: "here"},
        section_relative={"fwd": {0: 1.0, 1: 0.6}, "zero_grad": {0: 1.0, 1: 0.5}},
        overall_relative={0: 1.0, 1: 0.6},
    )
    slow = SlowVerdict("persistent", "fwd", "compute", "", (1,), ("here",), whole_node=False, since_step=1, last_step=9)
    texts = [
        Below.of(attrs.evolve(report, verdicts=verdicts), relative=0.7, individual=0.7).text
        for verdicts in ((), (slow,))
    ]
    assert [text.rpartition(", ")[2] for text in texts] == ["lowest in section zero_grad", "slow in section fwd"]


def test_a_score_without_a_verdict_has_an_incident_of_its_own(tmp_path):
    """It comes with the report, which need not wait for ten seconds of slowness."""
    node = Node(tmp_path, Settings(report_interval=3, stop_below_relative=0.7))
    node.train(48, slow=2, seconds=0.03)
    (asked,) = node.asked[1:]
    (incident,) = node.store.all()
    assert (incident.id, incident.kind, incident.cause, incident.action) == (
        asked.incident, "slow", "straggler_persistent", "exclude_node",
    )  # fmt: skip
    assert [(one.rank, one.node, one.section) for one in incident.culprits] == [(2, "here", "bwd")]


def test_where_all_are_below_their_own_best_no_node_is_left_out(tmp_path):
    """The user's threshold stops the job all the same, and it is said that nobody is to blame."""
    node = Node(tmp_path, Settings(report_interval=3, stop_below_individual=0.7, scores_to_print=0))
    node.train(60)
    assert node.asked == [None]
    node.train(60, forward_ms=60)
    (asked,) = node.asked[1:]
    assert (asked.node, "(stop_below_individual)" in asked.reason) == (None, True)
    (incident,) = node.store.all()
    assert (incident.culprits, incident.action) == ((), "stop")


def test_a_section_of_microseconds_stops_nobody(tmp_path):
    """However low its own score is: it weighs what it takes."""
    node = Node(tmp_path, Settings(report_interval=3, stop_below_relative=0.7))
    for _ in range(25):
        for rank, recorder in enumerate(node.recorders):
            for _ in range(4):
                recorder.block("zero_grad", "compute", None).sample(8 * MS if rank == 1 else MS)
        node.train(4)
    report = read_report(node.run_dir)
    assert report.section_relative["zero_grad"][1] < 0.2
    assert report.overall_relative[1] > 0.7
    assert node.asked == [None]


def set_while_it_runs(node, text):
    path = node.run_dir / "stragglers" / "settings.json"
    path.write_text(text)
    path.chmod(0o600)


def test_a_stop_that_is_wished_for_later_is_for_who_is_slow_already(node):
    """The verdict stands since long; nothing about it changes any more."""
    node.train(100, slow=2, seconds=0.02)
    assert node.asked == [None]
    set_while_it_runs(node, '{"stop_if_detected": true}')
    node.train(20, slow=2, seconds=0.02)
    (asked,) = node.asked[1:]
    assert (asked.incident, asked.node) == (node.store.all()[0].id, "here")


def test_switching_the_comparison_off_ends_what_stands(node):
    """The event, the incident, the file; and on again it begins anew."""
    node.train(100, slow=2, seconds=0.02)
    set_while_it_runs(node, '{"straggler_detection": false}')
    node.train(16, slow=2, seconds=0.02)
    assert [event["what"] for event in node.told() if event["what"] != "settings"] == ["found", "still", "over"]
    assert [incident.recovered_at is None for incident in node.store.all()] == [False]
    standing = read_standing(node.run_dir)
    assert (standing.enabled, standing.verdicts, standing.job) == (False, (), "j")
    (node.run_dir / "stragglers" / "settings.json").unlink()
    node.train(100, slow=2, seconds=0.02)
    assert [incident.recovered_at is None for incident in node.store.all()] == [False, True]


def test_what_an_earlier_start_published_is_withdrawn(node):
    """A requeued job has the same key and begins with attempt 0 again: its first seconds know nobody that is slow."""
    node.train(40, slow=2, seconds=0.02)
    assert [v.ranks for v in read_standing(node.run_dir).verdicts] == [(2,)]
    node.start_monitor()
    assert read_standing(node.run_dir) is None
    node.train(40, slow=2, seconds=0.02)
    assert [v.ranks for v in read_standing(node.run_dir).verdicts] == [(2,)]


def test_a_role_that_is_said_while_steps_are_compared_already_counts(node):
    """Ranks 2 and 3 say it late; then 3 is slow among the two."""
    node.train(40)
    for watched in node.table.all():
        if watched.rank >= 2:
            role_file(watched.stem).write_text("decoder")
    node.train(40, slow=3, seconds=0.02)
    assert {(tuple(found["ranks"]), found["role"]) for found in node.told(what="found")} == {((3,), "decoder")}


def test_a_slow_rank_of_a_section_that_is_gone_is_slow_no_more(node):
    """Another phase of the program has begun: the incident is closed."""
    node.train(100, slow=2, seconds=0.02)
    for step in range(200):
        for recorder in node.recorders:
            recorder.block("fwd", "compute", None).sample(10 * MS)
            complete_step(recorder, 150 * MS)
        node.now += 0.15
        if step % 4 == 3:
            node.look()
    assert read_standing(node.run_dir).verdicts == ()
    assert [incident.recovered_at is None for incident in node.store.all()] == [False]


def test_reports_come_at_their_interval_and_settings_change_in_between(tmp_path, capsys):
    """The printed form, the event, the file; a new threshold holds from the next report on, without a restart."""
    node = Node(tmp_path, Settings(report_interval=5, scores_to_print=1))
    node.train(40, slow=0, seconds=0.02)
    report = read_report(node.run_dir)
    assert [(s.rank, s.section) for s in report.stragglers if s.rule == "section_relative"] == [(0, "bwd")]
    shown = capsys.readouterr().err
    assert "Section bwd relative performance:" in shown
    assert "Rank=0 Node=here Score=0.5" in shown
    assert "Straggler report processing time: 0.0" in shown
    (node.run_dir / "stragglers" / "settings.json").write_text('{"relative_threshold": 0.1, "scores_to_print": 0}')
    (node.run_dir / "stragglers" / "settings.json").chmod(0o600)
    node.train(40)
    assert "settings changed" in capsys.readouterr().err
    assert not [s for s in read_report(node.run_dir).stragglers if s.rule == "section_relative"]
    assert node.told(what="settings")[0]["settings"]["relative_threshold"] == 0.1
    reports = node.told(what="report")
    assert reports[0]["ranks"] == RANKS
    assert "section_relative_perf/bwd/min" in reports[0]["scores"]


def test_a_report_is_one_line_where_nobody_is_slow(tmp_path, capsys):
    """The scores are to be had with a command; with none to print there is no line either."""
    node = Node(tmp_path, Settings(report_interval=5))
    node.train(40)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "straggler report" in line)
    assert re.fullmatch(
        r"resilience: straggler report: none of 4 ranks was slow in steps \d+ to \d+ "
        rf"\(the scores: resilience straggler {node.run_dir}\)",
        line,
    )
    assert len(node.told(what="report")) == 1
    (node.run_dir / "stragglers" / "settings.json").write_text('{"scores_to_print": 0}')
    (node.run_dir / "stragglers" / "settings.json").chmod(0o600)
    capsys.readouterr()
    node.train(40)
    assert len(node.told(what="report")) == 2
    assert "straggler report" not in capsys.readouterr().err


def test_a_bad_setting_is_one_line_and_changes_nothing(node, capsys):
    """Not even a number that no float can hold ends the comparison."""
    node.train(8)
    (node.run_dir / "stragglers").mkdir(mode=0o700, exist_ok=True)
    set_while_it_runs(node, f'{{"relative_threshold": {10**400}}}')
    node.train(40, slow=2, seconds=0.02)
    assert capsys.readouterr().err.count("straggler settings stay as they are") == 1
    assert [found["ranks"] for found in node.told(what="found")] == [[2]]


def test_a_full_disk_costs_what_is_written_and_nothing_else(node, capsys):
    """One line; verdicts go on, and so does the monitor."""
    (node.run_dir / "stragglers").write_text("not a directory")
    (node.run_dir / "incidents").write_text("not a directory")
    node.train(64, slow=2, seconds=0.02)
    assert [event["what"] for event in node.told()] == ["found", "still"]
    assert capsys.readouterr().err.count("cannot publish") == 1


def test_a_mistake_of_ours_ends_the_comparison_and_nothing_else(node, capsys, monkeypatch):
    """One line, the details in the journal; the round of the monitor goes on."""
    monkeypatch.setattr("resilience_sdk.straggler.detector.Aggregate.judge", lambda *_: 1 / 0)
    node.train(64, slow=2, seconds=0.02)
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1
    (event,) = [e for e in read_journal(node.run_dir / "journal").events if e["event"] == "degraded"]
    assert "Traceback" in event["why"]


def test_a_loop_of_microseconds_is_not_judged(node):
    """Its times are noise."""
    for _ in range(80):
        for recorder in node.recorders:
            recorder.block("bwd", "compute", None).sample(4000 if recorder is node.recorders[2] else 1000)
            complete_step(recorder, 9000)
        node.now += 0.15
        node.look()
    assert node.told() == []


@pytest.mark.parametrize("apart_s", [0.0, 5 * 3600.0, -5 * 3600.0])
def test_of_two_nodes_one_tells_and_the_other_judges(tmp_path, apart_s):
    """The slow rank is on the second; it writes its message, and the first finds it, however far apart clocks are."""
    nodes = [Node(tmp_path / str(n), Settings(), run_dir=tmp_path / "run", node=n) for n in range(2)]
    nodes[1].now += apart_s
    nodes[1].start_monitor()
    sizes = []
    for _ in range(16):
        for node in nodes:
            node.train(4, slow=6, seconds=0.02)
        text = (nodes[1].pages / OWN).read_text() if (nodes[1].pages / OWN).exists() else None
        if text is not None:
            sizes.append(len(text))
            assert decode(text).node == 1
            words = {"attempt": 0, "gathers": True, "nodes": {"1": text}}
            (nodes[0].pages / f".{PEERS}").write_text(json.dumps(words))
            (nodes[0].pages / f".{PEERS}").replace(nodes[0].pages / PEERS)
    assert not (nodes[0].pages / OWN).exists()  # nobody would read it
    found = nodes[0].told(what="found")
    assert [(event["ranks"], event["nodes"], event["section"]) for event in found] == [([6], ["host#1"], "bwd")]
    assert max(sizes) < 8000


def test_of_two_nodes_the_one_that_judges_says_that_nobody_does(tmp_path):
    """The file is one for all nodes."""
    nodes = [Node(tmp_path / str(n), Settings(), run_dir=tmp_path / "run", node=n) for n in range(2)]
    nodes[0].train(40, slow=2, seconds=0.02)
    nodes[1].start_monitor()
    before = read_standing(nodes[0].run_dir)
    assert before.verdicts, "what is published is another node's"
    set_while_it_runs(nodes[0], '{"straggler_detection": false}')
    nodes[1].train(16)
    assert read_standing(nodes[0].run_dir) == before
    nodes[0].train(16)
    assert read_standing(nodes[0].run_dir).enabled is False


def test_a_rank_without_a_completed_step_is_not_compared_and_that_is_said(node, capfd):
    """Its optimizers step where torch does not tell of it, and it calls no heartbeat: in ten minutes a line says so."""
    node.recorders[0].page.set_flag(FLAG_TRAINS)
    node.recorders[0].block("fwd", "compute", None).sample(10 * MS)
    node.look()
    assert not node.degraded()
    node.now += 601
    for _ in range(2):
        node.recorders[0].block("fwd", "compute", None).sample(10 * MS)
        for watched in node.table.all():
            watched.refresh()
        node.look()
    (event,) = node.degraded()
    assert event["what"] == "stragglers"
    assert event["why"].startswith("rank 0 has completed no step in 601 s")
    assert capfd.readouterr().err.count("call heartbeat() in the loop") == 1


def test_progress_is_told_often_at_first_and_seldom_later(node):
    """A second, then a sixtieth of the attempt's age: a run of 20 s has a curve, one of a day some hundred points."""
    times = StepTimeWatch(node.journal)
    for _ in range(3000):
        node.now += 0.2
        for recorder in node.recorders:
            recorder.block("fwd", "compute", None).sample(50 * MS)
            with recorder.beat("step"):
                pass
        for watched in node.table.all():
            watched.refresh()
        times.look([(watched, watched.reader.passes()) for watched in node.table.all()], node.now)
    told = [event for event in read_journal(node.run_dir / "journal").events if event["event"] == "progress"]
    assert 60 < len(told) < 60 + 60 * math.log(600 / 60) + 10
    assert [(one["ranks"], set(one["own_ms"])) for one in told[1:]] == [([0, 1, 2, 3], {50.0})] * (len(told) - 1)
    assert progress_pause_s(86_400) == 300
    pace = [progress_pause_s(age) for age in range(0, 20_000, 100)]
    assert pace == sorted(pace)


def test_progress_tells_the_step_of_now_and_what_was_done_by_those_that_are_gone(node):
    """A script may count from 0 in each epoch, and the pages of an attempt may go before anybody looks again."""
    times = StepTimeWatch(node.journal)

    def beat_at(recorder, step):
        beat = recorder.beat("step")
        assert beat.begin(time.monotonic_ns(), step)
        beat.end(time.monotonic_ns())

    def look(steps):
        node.now += 2.0
        for recorder in node.recorders:
            for step in steps:
                beat_at(recorder, step)
        for watched in node.table.all():
            watched.refresh()
        times.look([(watched, watched.reader.passes()) for watched in node.table.all()], node.now)

    look([7])
    look([8, 9])
    look([0])
    for recorder in node.recorders:
        beat_at(recorder, 1)
    passes = [(watched, watched.reader.passes()) for watched in node.table.all()]
    for watched, _ in passes:
        watched.refresh()
    times.look(passes, node.now)  # too soon to tell
    times.look([], node.now)
    told = [event for event in read_journal(node.run_dir / "journal").events if event["event"] == "progress"]
    assert [(event["step"], event["steps"]) for event in told] == [(9, 2), (0, 1), (1, 1)]
