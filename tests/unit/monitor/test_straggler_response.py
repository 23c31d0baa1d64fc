"""What follows a verdict: which incident is whose, and for which verdicts a job is stopped."""

from __future__ import annotations

import attrs
import pytest

from resilience_sdk.core.journal import Journal, read_journal
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.incidents.record import render_markdown
from resilience_sdk.monitor.machine_load import LoadReading, LoadWatch
from resilience_sdk.monitor.straggler_response import StragglerResponse
from resilience_sdk.straggler.published import note_logging, note_no_logging, read_report, read_standing
from resilience_sdk.straggler.reports import Medians, ReportMaker
from resilience_sdk.straggler.verdicts import Change, SlowVerdict
from resilience_sdk.straggler.windowing import RankPlace

SLOW = SlowVerdict(
    "persistent", "fwd", "compute", "", (2,), ("n0",), False, 1, 200, 1.5, 0.02, 0.2, confidence=0.8, windows=20
)
ON_GPU = attrs.evolve(SLOW, section_kind="gpu", ratio=2.5)


def report_on(*slow, step=0):
    """Return a report in which these ranks of four are slow in `fwd` by their scores."""
    medians = {rank: 2.0 if rank in slow else 1.0 for rank in range(4)}
    maker = ReportMaker({rank: RankPlace("n0") for rank in range(4)})
    return maker.make(Medians({"fwd": medians}), first_step=step, last_step=step + 7)


class Case:
    """A response in a run directory of its own, and what it has asked for."""

    def __init__(self, tmp_path):
        self.run_dir = tmp_path
        self.now = 0.0
        self.store = IncidentStore(tmp_path)
        self.start()

    def start(self):
        """Begin as a monitor does, that takes over perhaps."""
        journal = Journal(self.run_dir / "journal", writer="monitor", host="here", boot_id="b", job="j")
        self.asked = []
        self.response = StragglerResponse(self.run_dir, journal, self.store, job="j", began=0.0)

    def tell(self, *verdicts, changes=(), stop=False):
        request = self.response.tell(changes, verdicts, self.now, stop=stop)
        self.asked += [] if request is None else [request]


@pytest.fixture
def case(tmp_path):
    (tmp_path / "journal").mkdir()
    return Case(tmp_path)


def test_wall_time_and_time_on_the_gpu_have_an_incident_each(case):
    """The end of one leaves the other open; a monitor that takes over finds each again."""
    case.tell(SLOW, ON_GPU)
    assert [incident.recovered_at for incident in case.store.all()] == [None, None]
    case.start()
    case.tell(ON_GPU, SLOW)
    assert len(case.store.all()) == 2
    case.tell(ON_GPU, changes=[Change("over", SLOW)])
    wall, gpu = case.store.all()
    assert (wall.recovered_at is None, gpu.recovered_at is None) == (False, True)
    assert "on the GPU" in gpu.evidence[0].text


def test_two_roles_have_an_incident_each(case):
    """Their verdicts read alike; the incident of the first is not taken for that of the second."""
    case.tell(SLOW, attrs.evolve(SLOW, role="stage-1"))
    assert len(case.store.all()) == 2


@pytest.mark.parametrize(
    ("change", "stops"),
    [
        ({}, True),
        ({"waits_least": True}, True),
        ({"waits_least": False}, False),
        ({"confidence": 0.59}, False),
        ({"confidence": 0.6}, True),
        ({"kind": "global", "ranks": ()}, False),
        ({"kind": "transient"}, False),
    ],
)
def test_a_job_is_stopped_for_what_is_sure_and_nothing_contradicts(case, change, stops):
    """Without a rank for which the others do not wait, they would be no faster."""
    case.tell(attrs.evolve(SLOW, **change), stop=True)
    assert bool(case.asked) is stops
    assert [incident.action for incident in case.store.all()] == (
        [] if change.get("kind") == "transient" else ["exclude_node" if stops else "none"]
    )


def test_a_job_is_stopped_as_soon_as_the_contradiction_is_gone(case):
    """The verdict stands all the time."""
    case.tell(attrs.evolve(SLOW, waits_least=False), stop=True)
    assert not case.asked
    case.tell(SLOW, stop=True)
    (asked,) = case.asked
    assert (asked.node, asked.incident) == ("n0", case.store.all()[0].id)


def printed(case, capsys, report, scores=5):
    """Return the lines that a report prints."""
    case.response.report(report, scores)
    return [line.removeprefix("resilience: ") for line in capsys.readouterr().err.splitlines()]


def test_the_scores_are_printed_once_for_each_who_is_slow(case, capsys):
    """Then a few lines a report while nobody is new, in full again when somebody is; all reports are journalled."""
    first = printed(case, capsys, report_on(2))
    assert "Section fwd relative performance:" in first
    again = printed(case, capsys, report_on(2, step=8))
    assert again[0].startswith("straggler report: nobody new in steps 8 to 15 (the scores: resilience straggler ")
    assert again[1] == "Below 0.7 in section relative performance: rank 2 (n0) in fwd 0.50"
    assert len(again) == 3
    assert "Section fwd relative performance:" in printed(case, capsys, report_on(2, 3))
    assert len(printed(case, capsys, report_on(2))) == 3, "rank 3 has gone, nobody has come"
    assert len(printed(case, capsys, report_on(2, 3))) == 3, "and comes again"
    assert printed(case, capsys, report_on())[0].startswith("straggler report: none of 4 ranks was slow")
    assert "Section fwd relative performance:" in printed(case, capsys, report_on(2))
    case.response.begin(1)
    assert "Section fwd relative performance:" in printed(case, capsys, report_on(2))
    events = [event for event in read_journal(case.run_dir / "journal").events if event.get("what") == "report"]
    assert [len(event["stragglers"]) for event in events] == [1, 1, 2, 1, 2, 0, 1, 1]


def test_what_a_rank_logs_is_not_printed_too(case, capsys):
    """As long as it does, and in no other attempt or job; it is journalled and published all the same."""
    note_logging(case.run_dir, "j", 1)
    assert printed(case, capsys, report_on(1)), "of another attempt"
    case.response.begin(1)
    assert printed(case, capsys, report_on(1)) == []
    assert read_report(case.run_dir).stragglers[0].rank == 1
    note_logging(case.run_dir, "another job", 1)
    assert printed(case, capsys, report_on(1))
    note_logging(case.run_dir, "j", 1)
    note_no_logging(case.run_dir)
    assert printed(case, capsys, report_on(1))


def test_with_no_scores_to_print_only_who_is_slow_is_told(case, capsys):
    """`scores_to_print` 0: the same lines each time, and silence where nobody is."""
    for _ in range(2):
        assert printed(case, capsys, report_on(1), scores=0)[0].startswith("Below 0.7 in section relative")
    assert printed(case, capsys, report_on(), scores=0) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ["rank 2 (node n0) in section fwd: look at who else uses the processors", "to leave n0 out"]),
        ({"section": "data"}, ["rank 2 (node n0) in section data: look at the storage"]),
        ({"section_kind": "gpu"}, ["in section fwd on the GPU: look at the GPU there"]),
        ({"ranks": (2, 3), "nodes": ("n0", "n1")}, ["ranks 2, 3 (nodes n0, n1)", "to leave the node out"]),
        ({"kind": "global", "ranks": (), "nodes": ()}, ["all ranks together in section fwd: look at what all ranks"]),
        ({"kind": "global", "ranks": (), "section_kind": "comm"}, ["look at the network"]),
    ],
)
def test_a_slow_rank_has_something_to_be_done(case, change, words):
    """Where to look, and how to go on without its node; `report.md` does not say beside it that there is nothing."""
    case.tell(attrs.evolve(SLOW, **change))
    (incident,) = case.store.all()
    for word in words:
        assert word in incident.advice
    assert ("--stop-if-detected" in incident.advice) is (change.get("kind") != "global")
    following = render_markdown(incident).partition("## What to do next")[2]
    assert incident.advice in following
    assert "Nothing" not in following


def test_where_the_job_stops_by_itself_it_is_told_where_to_look_only(case):
    """What to do about the node is the action of the incident."""
    case.tell(SLOW, stop=True)
    (incident,) = case.store.all()
    assert (incident.action, "--stop-if-detected" in incident.advice) == ("exclude_node", False)


ALL = attrs.evolve(SLOW, kind="global", ranks=(), nodes=())


class Machine:
    """Two processors that a job has for itself, and from some moment on shares; the clock too."""

    def __init__(self, case):
        self.own_s = self.others_s = 0.0
        self.case = case
        case.response.begin(0, LoadWatch(self, case.now, alone=True))

    def read(self, now_s):
        return LoadReading(now_s, 2, self.own_s, self.own_s + self.others_s, 0.0, 0.5 * now_s)

    def go_on(self, seconds, others):
        self.case.now += seconds
        self.own_s += seconds * 2 * (1.0 - others)
        self.others_s += seconds * 2 * others

    def events(self):
        events = read_journal(self.case.run_dir / "journal").events
        return [(e["event"], e.get("what")) for e in events if e["event"] in ("straggler", "incident")]


def test_all_ranks_slower_because_others_use_the_machine_is_no_incident(case, capsys):
    """One line and one event with the load, where it stands too; one line when it is over."""
    machine = Machine(case)
    machine.go_on(60.0, 0.0)
    case.tell(ALL, changes=[Change("found", ALL)])
    machine.go_on(6.0, 0.5)
    case.tell(ALL)
    case.tell(ALL)
    assert machine.events() == [("straggler", "found"), ("straggler", "load")]
    assert case.store.all() == []
    (line,) = capsys.readouterr().err.splitlines()
    load = "the machine's load, not the training: other programs use 50 % of the 2 processors (0 % before)"
    assert line.startswith("resilience: SLOW: all ranks together: section fwd is 50 % slower than before")
    assert load in line
    (standing,) = read_standing(case.run_dir).verdicts
    assert load in standing.text()
    case.tell(changes=[Change("over", attrs.evolve(ALL, until_step=200))])
    assert "no longer slow: all ranks together" in capsys.readouterr().err
    assert read_standing(case.run_dir).verdicts == ()
    assert case.store.all() == []


def test_all_ranks_slower_on_a_quiet_machine_is_an_incident_with_the_load_beside_it(case, capsys):
    """A regression of the training: said after some seconds, in which the load is looked at."""
    machine = Machine(case)
    machine.go_on(60.0, 0.0)
    case.tell(ALL, changes=[Change("found", ALL)])
    assert case.store.all() == []
    machine.go_on(6.0, 0.0)
    case.tell(ALL)
    (incident,) = case.store.all()
    assert incident.culprits == ()
    load = "other programs use 0 % of the 2 processors (0 % before)"
    assert load in next(evidence.text for evidence in incident.evidence if evidence.source == "load")
    assert load in capsys.readouterr().err


def test_a_regression_that_outlasts_the_load_becomes_an_incident(case):
    """What the machine had to do with it is over, and it is still there."""
    machine = Machine(case)
    machine.go_on(60.0, 0.0)
    case.tell(ALL, changes=[Change("found", ALL)])
    machine.go_on(6.0, 0.5)
    case.tell(ALL)
    assert case.store.all() == []
    machine.go_on(60.0, 0.0)
    case.tell(ALL)
    (incident,) = case.store.all()
    assert incident.culprits == ()
    case.tell(changes=[Change("over", ALL)])
    assert case.store.all()[0].recovered_at is not None


def test_a_slow_rank_is_named_whatever_the_load(case):
    """Only what all ranks have in common is the machine's."""
    machine = Machine(case)
    case.tell(SLOW)
    (incident,) = case.store.all()
    assert [culprit.rank for culprit in incident.culprits] == [2]
    assert machine.events()[-1][0] == "incident"
