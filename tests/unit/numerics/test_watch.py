"""`check()` in one process: what it says, writes and raises, and when."""

import math
import threading
from pathlib import Path

import pytest
import torch

from resilience_sdk import numerics
from resilience_sdk.core.journal import Event
from resilience_sdk.errors import ConfigError, NumericsError
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.numerics import watch as watching
from resilience_sdk.numerics.anomaly import Trouble
from resilience_sdk.numerics.recording import AttemptPlace, record

NAN = math.nan


class Journal:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def emit(self, event, **facts):
        self.told.append((event, facts))


@pytest.fixture
def journal():
    return Journal()


class Rank:
    """Rank 1 of two, whose steps are the numbers of its calls."""

    skip_batches = 1
    policy = "warn"

    def __init__(self, run_dir, journal, restarts, is_global, number=1):
        self.run_dir, self.journal, self.restarts, self.is_global = run_dir, journal, restarts, is_global
        self.number = number
        self.steps = iter(range(1000))

    def rank(self):
        return self.number

    def place(self):
        return AttemptPlace("job", 0, 2)

    def step(self):
        return next(self.steps), self.is_global

    def store(self):
        return IncidentStore(self.run_dir, explain=str)

    def page(self):
        return {}


@pytest.fixture
def watch(tmp_path, journal):
    """A rank of two (1, unless another is named) whose steps are the numbers of its calls."""

    def make(*, restarts=True, is_global=True, run_dir=tmp_path, number=1):
        return watching.NumericsWatch(Rank(run_dir, journal, restarts, is_global, number))

    return make


def incidents(path: Path):
    for thread in threading.enumerate():
        if thread.name == "resilience-numerics":
            thread.join(10)
    return IncidentStore(path).all()


def test_a_bad_value_is_told_in_the_next_call_and_written_once(watch, tmp_path, journal, capfd):
    """One incident for one episode, with rank, step and value; the calls return what was wrong."""
    watched = watch()
    answers = [watched.check(loss, 1.0, "warn") for loss in [1.0, 1.0, NAN, NAN, 1.0]]
    assert [answer and answer.text for answer in answers] == [
        None,
        None,
        None,
        "loss is nan at step 2 on rank 1",
        "loss is nan at step 3 on rank 1",
    ]
    (incident,) = incidents(tmp_path)
    assert (incident.kind, incident.category, incident.cause, incident.action) == (
        "numerics",
        "numerics",
        "nan_loss",
        "none",
    )
    assert [(culprit.rank, culprit.step) for culprit in incident.culprits] == [(1, 2)]
    assert [event for event, _ in journal.told] == [Event.NUMERICS, Event.INCIDENT]
    assert capfd.readouterr().err.count("NUMERICS: loss is nan at step 2 on rank 1") == 1


def test_after_sixteen_good_steps_it_is_over_and_the_next_one_is_new(watch, tmp_path, journal):
    """Two episodes are two incidents; the end of the first is journalled."""
    watched = watch()
    for loss in [NAN, *[1.0] * 20, NAN, 1.0]:
        watched.check(loss, None, "warn")
    assert len(incidents(tmp_path)) == 2
    assert [facts["found"] for event, facts in journal.told if event is Event.NUMERICS] == ["nan", "good", "nan"]


@pytest.mark.parametrize(("policy", "action"), [("raise", "restart"), ("rollback", "rollback")])
def test_who_asks_for_it_gets_an_exception_with_the_incident_written(watch, tmp_path, journal, policy, action):
    """`raise` and `rollback` leave; the journal has what a resume needs, and the report is on the disk by then."""
    watched = watch()
    watched.check(1.0, math.inf, policy)
    with pytest.raises(NumericsError, match="grad_norm is inf at step 0 on rank 1"):
        watched.check(1.0, 1.0, policy)
    (incident,) = IncidentStore(tmp_path).all()
    assert (incident.cause, incident.action, incident.culprits) == ("nan_grad_anomaly", action, ())
    told = next(facts for event, facts in journal.told if event is Event.NUMERICS)
    assert (told["step"], told["action"], told["skip_batches"]) == (0, action, int(policy == "rollback"))


@pytest.mark.parametrize("lacks", [{"restarts": False}, {"is_global": False}])
def test_a_rollback_that_cannot_be_is_a_warning(watch, journal, lacks):
    """Where nobody starts the ranks again, or steps have no numbers, training goes on, and it is said."""
    watched = watch(**lacks)
    assert [bool(watched.check(loss, None, "rollback")) for loss in [NAN, 1.0, 1.0]] == [False, True, False]
    assert [facts["what"] for event, facts in journal.told if event is Event.DEGRADED] == ["numerics"]


def test_a_run_directory_that_cannot_be_written_costs_the_incident_only(watch, tmp_path, journal):
    """The value is still told and returned, the failure said and journalled."""
    (tmp_path / "file").write_text("")
    watched = watch(run_dir=tmp_path / "file")
    watched.check(NAN, None, "warn")
    assert watched.check(1.0, None, "warn").found == "nan"
    watched.close(wait=True)
    assert [event for event, _ in journal.told] == [Event.NUMERICS, Event.DEGRADED]


def test_the_last_step_is_judged_at_the_end(watch, tmp_path):
    """A process that ends has its last values looked at, without an exception whatever the policy."""
    watched = watch()
    watched.check(NAN, None, "raise")
    watched.close(wait=True)
    assert len(IncidentStore(tmp_path).all()) == 1


def test_a_usual_loss_of_an_adapter_leaves_nothing_to_judge(watch, tmp_path):
    """So a step has nothing to ask; a bad one waits for the next step, which names its own."""
    watched = watch()
    for step, loss in enumerate([1.0, 1.0, NAN]):
        assert not watched.is_waiting
        watched.note(step, loss, None)
    assert watched.is_waiting
    assert watched.judge().text == "loss is nan at step 2 on rank 1"
    assert not watched.is_waiting
    assert len(incidents(tmp_path)) == 1


@pytest.mark.parametrize("given", [(NAN, None), (None, NAN), (1.0, NAN), (NAN, 1.0), (1.0, math.inf)])
def test_a_bad_value_of_an_adapter_is_found_in_either_place(watch, given):
    """A loss, a norm, one beside a good one of the other."""
    watched = watch()
    watched.note(7, *given)
    found = watched.judge()
    assert (found.step, found.name) == (7, "loss" if given[0] is NAN else "grad_norm")


def test_a_forked_child_takes_no_losses(watch):
    """They would be told as those of its parent, whose hooks it has."""
    watched = watch()
    watched.note(0, 1.0, None)
    watched.disown()
    watched.note(1, NAN, None)
    assert not watched.is_waiting
    assert watched.judge() is None


def test_a_policy_that_there_is_not_is_refused(watch):
    """The error has the choices."""
    with pytest.raises(ConfigError, match="rollback"):
        watch().check(1.0, None, "panic")


def test_where_nothing_is_recorded_it_is_a_no_op(monkeypatch):
    """Switched off, or failed: no value is looked at."""
    monkeypatch.setattr(watching, "_watch", None)
    monkeypatch.setattr(watching.lookup, "recorder", lambda: None)
    assert numerics.check(loss=NAN, policy="raise") is None
    numerics.settle()


def test_ranks_share_one_incident_that_names_the_right_one(tmp_path):
    """The victim writes first; the culprit corrects it; what comes after adds nothing."""
    store, attempt = IncidentStore(tmp_path), AttemptPlace("job", 0, 2)

    def write(rank, step, name):
        trouble = Trouble(rank, step, name, "nan", NAN, is_global=True)
        return record(store, trouble, attempt, "none", 1.0e9, {})

    first = write(0, 40, "grad_norm")
    assert first.is_news
    assert first.incident.culprits == ()
    second = write(1, 40, "loss")
    assert second.is_news
    assert [culprit.rank for culprit in second.incident.culprits] == [1]
    assert write(0, 41, "loss") is None
    (incident,) = store.all()
    assert incident.cause == "nan_loss"
    assert [item.text.split()[0] for item in incident.evidence] == ["loss", "grad_norm"]


def test_rank_0_tells_its_loss_now_and_then(watch, journal, monkeypatch):
    """The newest one that was read, by the helper thread, at a pace that slows down; and the last one at the end."""
    clock = iter(range(0, 100_000, 1000))
    monkeypatch.setattr(watching.time, "monotonic", lambda: next(clock))
    watched = watch(number=0)
    watched.tell()
    for loss in (3.0, NAN, 1.0, 0.5):
        watched.check(loss, None, "warn")
        watched.tell()
        watched.tell()
    watched.close(wait=False)
    told = [facts for event, facts in journal.told if event is Event.LOSS]
    assert [(one["step"], one["loss"], one["grad_norm"]) for one in told] == [
        (0, 3.0, None), (1, "nan", None), (2, 1.0, None), (3, 0.5, None),
    ]  # fmt: skip


def test_other_ranks_tell_none_and_nothing_is_told_twice_in_a_second(watch, journal):
    """One curve is drawn, and the journal stays small however fast the steps are."""
    first, other = watch(number=0), watch(number=1)
    for _ in range(1000):
        for watched in (first, other):
            watched.check(1.0, 1.0, "warn")
            watched.tell()
    assert [event for event, _ in journal.told if event is Event.LOSS] == [Event.LOSS]


def test_a_loss_that_was_scaled_is_judged_and_compared_with_none(watch):
    """What was usual before decides how, and a resume has other steps before it; on a device it is read later."""
    one, heard = watch(is_global=True), []
    one.heard = lambda step, loss: heard.append((step, loss))
    one.note(0, 1.0, None)
    one.note(1, 1.0, None, is_scaled=True)
    one.note(2, torch.tensor(1.0), None, is_scaled=True)
    one.note(3, torch.tensor(1.0), None)
    one.judge()
    assert heard == [(0, 1.0), (3, 1.0)]
