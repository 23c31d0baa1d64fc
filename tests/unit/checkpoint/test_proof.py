"""A resume compares the state with the digests of its save, and records what differs; nothing else follows from it."""

from __future__ import annotations

import json
import zlib

import pytest
import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer, by_rank
from resilience_sdk.checkpoint.capture import capture_part, with_own
from resilience_sdk.checkpoint.digests import UNKNOWN, of_rank
from resilience_sdk.checkpoint.manifest import _canonical
from resilience_sdk.checkpoint.proof import StateProof, state_check
from resilience_sdk.checkpoint.ranks import Alone
from resilience_sdk.checkpoint.state import StateMap
from resilience_sdk.core import console, environ
from resilience_sdk.core.journal import Journal, read_journal
from resilience_sdk.core.resume_proof import ResumeCheck, proof_of


class Average:
    """A state of the user's own, with a load of the user's own."""

    def __init__(self, *, forgets: bool = False, ticks: bool = False) -> None:
        self.numbers, self.forgets, self.ticks = [0.0, 0.0], forgets, ticks

    def state_dict(self):
        if self.ticks:
            self.numbers[0] += 1.0
        return {"numbers": list(self.numbers)}

    def load_state_dict(self, state):
        self.numbers = [0.0, 0.0] if self.forgets else list(state["numbers"])


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """As a new process."""
    monkeypatch.setattr(console, "_said", set())


def make(tmp_path, average, **more):
    """Return what one process would make, and its checkpointer."""
    (tmp_path / "journal").mkdir(exist_ok=True)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=50)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average, **more}
    journal = Journal(tmp_path / "journal", writer="rank0", host="h", boot_id="b", job="j", rank=0)
    return model, optimizer, scheduler, Checkpointer(state, run_dir=tmp_path, journal=journal)


def save(tmp_path, average, **more):
    model, optimizer, scheduler, checkpointer = make(tmp_path, average, **more)
    checkpointer.resume()
    for _ in range(3):
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    average.numbers = [1.0, 2.0]
    checkpointer.values["best"] = 0.5
    assert checkpointer.save(3)


def resume(tmp_path, average, **more):
    """Return what a program reads of a resume."""
    _, _, _, checkpointer = make(tmp_path, average, **more)
    assert checkpointer.resume() == 3
    return proof_of(read_journal(tmp_path / "journal").events)


def test_a_resume_that_restores_everything_is_exact(tmp_path, capsys):
    """Model, optimizer and its options, scheduler, the user's own, generators and values; without a line."""
    torch.manual_seed(5)
    save(tmp_path, Average(), shuffle=torch.Generator().manual_seed(7))
    torch.manual_seed(6)
    capsys.readouterr()
    found = resume(tmp_path, Average(), shuffle=torch.Generator())
    assert (found["result"], found["step"], found["checkpoint"]) == ("exact", 3, "step-00000003")
    assert found["text"] == "resume exact: 10 of 10 parts of the state equal"
    assert "exact" not in capsys.readouterr().err


def test_what_a_load_leaves_out_is_named(tmp_path, capsys):
    """And said, with where to look; the training goes on."""
    save(tmp_path, Average())
    found = resume(tmp_path, Average(forgets=True))
    assert (found["result"], found["component"]) == ("resume_not_exact", "the state of average")
    assert "resume_not_exact: the state of average is not as it was saved; what gives" in capsys.readouterr().err


def test_a_state_that_is_another_each_time_it_is_asked_is_no_finding(tmp_path):
    """It holds a clock or a counter of its own: nobody can tell what it should be."""
    save(tmp_path, Average(ticks=True))
    assert resume(tmp_path, Average(ticks=True))["result"] == "exact"


def change_manifest(tmp_path, change):
    path = tmp_path / "checkpoints" / "step-00000003" / "manifest.json"
    body = json.loads(path.read_text())["manifest"]
    change(body)
    path.write_text(json.dumps({"crc32": zlib.crc32(_canonical(body)), "manifest": body}))


@pytest.mark.parametrize("saved", [None, 7, {"shared": 3, "ranks": []}])
def test_a_checkpoint_without_digests_is_resumed_without_a_line(tmp_path, capsys, saved):
    """One of an earlier version has none, and one that somebody has changed may have anything."""
    save(tmp_path, Average())
    change_manifest(tmp_path, lambda body: body.pop("digests") if saved is None else body.update(digests=saved))
    found = resume(tmp_path, Average())
    assert (found["result"], found["checks"][0]["result"]) in (("not_compared", "not_compared"), ("exact", "exact"))
    assert "compared" not in capsys.readouterr().err


def test_it_can_be_switched_off(tmp_path, monkeypatch):
    """Then a save takes no digests, and a resume compares nothing."""
    monkeypatch.setenv("RESILIENCE_RESUME_CHECK", "off")
    assert environ.environment()["RESILIENCE_RESUME_CHECK"] == "off"
    save(tmp_path, Average())
    assert "digests" not in (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").read_text()
    assert resume(tmp_path, Average(forgets=True))["checks"] == []


def test_the_answers_of_all_ranks_come_to_one():
    """The first rank with a difference is named; other ranks than at the save leave their own parts out."""
    good = {"differs": [], "compared": 4, "error": None, "has_any": True}
    bad = {**good, "differs": ["the generator of NumPy", "the state of x"]}
    check = state_check([good, bad, bad], 3)
    assert check.text == "the generator of NumPy is not as it was saved on rank 1, and 1 more"
    assert (check.rank, check.component) == (1, "the generator of NumPy")
    weights = {**good, "differs": ["the state of model 0"]}
    assert state_check([good, weights], 2).cure.startswith("parameters that differ by rank are saved of rank 0 alone")
    assert state_check([weights, weights], 2).cure.startswith("what gives this state has to take it back")
    assert state_check([good, good], 4).text.endswith("what each rank has of its own: not compared, 4 ranks saved it")
    assert state_check([good, {**good, "error": "OSError: no"}], 2).result == "not_compared"


class OneOfTwo(Alone):
    """The second of two ranks."""

    rank, size = 1, 2


def test_each_rank_compares_what_is_for_all_and_of_it_what_it_has_otherwise():
    """What cannot be looked at on this rank is not compared, and with other ranks than at the save rank 0's alone."""
    saved = {
        "shared": {"the state of model": "a", "the state of mean": "b", "the state of log": "c"},
        "ranks": [{}, {"the state of mean": "mine", "the state of log": UNKNOWN}],
    }
    proof = StateProof(saved, 2, OneOfTwo())
    live = {"the state of model": "a", "the state of mean": "mine", "the state of log": "anything"}
    assert proof.compare(lambda: (live, {}))["compared"] == 2
    assert proof.compare(lambda: (live, {}))["differs"] == []
    live |= {"the state of model": "other", "the state of mean": "b"}
    assert proof.compare(lambda: (live, {}))["differs"] == ["the state of model", "the state of mean"]
    assert StateProof(saved, 3, OneOfTwo()).compare(lambda: (live, {}))["compared"] == 0


def test_a_rank_has_digests_of_what_it_has_otherwise_than_rank_0():
    """Batch-norm statistics are those of a rank's own batches; what gives no state here has none."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = StateMap({"model": model, "mean": Average()})
    first = by_rank.digests(state)
    shared, _ = of_rank({"rng": {}}, {}, state.capture_shared(), None)
    model(torch.rand(4, 2))
    part = with_own(state, capture_part(state, None, 1, ""), by_rank.digests(state), first)
    now, _ = of_rank({"rng": {}}, {}, state.capture_shared(), None)
    assert part.spread_digests == {"the state of model": now["the state of model"]}
    assert now["the state of model"] != shared["the state of model"]
    assert with_own(state, part, first, first) is part


class Framework:
    """A framework that writes its own files, and may restore badly."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self) -> None:
        self.model(torch.rand(8, 4)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def write(self, directory) -> None:
        torch.save([item.state_dict() for item in self.objects().values()], directory / "theirs.pt")

    def load(self, directory, but=()) -> None:
        for number, (name, item) in enumerate(self.objects().items()):
            if name not in but:
                item.load_state_dict(torch.load(directory / "theirs.pt")[number])


@pytest.mark.parametrize(
    ("but", "component"),
    [
        ((), None),
        (("model",), "the state of model"),
        (("optimizer",), "the options of optimizer (learning rate and others)"),
        (("scheduler",), "the state of scheduler"),
    ],
)
def test_what_a_framework_saves_by_itself_is_compared_when_it_has_restored(tmp_path, but, component):
    """By its live objects, none of which is in the state."""
    (tmp_path / "journal").mkdir()
    journal = Journal(tmp_path / "journal", writer="rank0", host="h", boot_id="b", job="j", rank=0)
    for is_resumed in (False, True):
        theirs = Framework()
        checkpointer = Checkpointer({}, run_dir=tmp_path, journal=journal, writer=theirs.write)
        checkpointer.also_compare(theirs.objects)
        assert bool(checkpointer.resume()) is is_resumed
        if is_resumed:
            theirs.load(checkpointer.last_good.path, but)
        checkpointer.compare()
        theirs.train()
        theirs.train()
        checkpointer.save(2)
    found = proof_of(read_journal(tmp_path / "journal").events)
    assert [check["component"] for check in found["checks"]] == [None, component]
    assert found["component"] == component
    if component is None:
        assert found["checks"][1]["text"] == "4 of 4 parts of the state equal"


def test_what_an_attempt_before_has_found_is_not_of_this_resume():
    """A framework that resumes by itself leaves no event of it: each attempt is another resume."""
    found = ResumeCheck("steps", "resume_not_exact", "step 5: other samples", "samples", 5)
    equal = ResumeCheck("steps", "exact", "3 of 3 repeated steps equal")
    events = [
        {"event": check.event.value, "job": job, "attempt": attempt, "step": check.step, **check.facts()}
        for job, attempt, check in (("a", 1, found), ("a", 2, equal), ("b", 2, found), ("b", 2, equal))
    ]
    assert [proof_of(events[:until])["result"] for until in (1, 2, 3, 4)] == [
        *("resume_not_exact", "exact", "resume_not_exact", "resume_not_exact"),
    ]


def of_attempt(attempt, event, **facts):
    return {"event": event, "job": "a", "attempt": attempt, **facts}


def said(attempt, key, at_resume=True):
    facts = {"limit": key, "thing": f"the {key}", "means": "m", "cure": "c", "at_resume": at_resume}
    return of_attempt(attempt, "resume_limit", **facts)


def test_what_a_resume_has_said_that_it_does_not_repeat_is_not_exact():
    """Of that resume, not of the start, nor of one before. Repeated steps know it by themselves, and their losses."""
    state = ResumeCheck("state", "exact", "4 of 4 parts of the state equal")
    steps = ResumeCheck("steps", "exact", "3 of 3 repeated steps equal, their losses, too")
    equal, repeated = (of_attempt(2, check.event.value, **check.facts()) for check in (state, steps))
    resume = of_attempt(2, "resume", step=3, checkpoint="step-00000003")
    for events in ([said(2, "order", at_resume=False), resume, equal], [said(1, "order"), resume, equal],
                   [said(2, "order"), resume, equal, repeated]):  # fmt: skip
        assert proof_of(events)["result"] == "exact"
    for events in (
        [said(2, "order"), said(2, "tau"), resume, equal],
        [resume, equal, said(2, "order"), said(2, "tau")],
    ):
        found = proof_of(events)
        assert (found["result"], found["text"]) == (
            "not_proven",
            "resume not proven exact: 4 of 4 parts of the state equal; this resume does not repeat the order; the tau",
        )


def test_generators_are_compared_again_before_the_first_batch(tmp_path, capsys, monkeypatch):
    """One that cannot be set is named, once."""
    save(tmp_path, Average())
    _, _, _, checkpointer = make(tmp_path, Average())
    checkpointer.resume()
    torch.rand(1)
    checkpointer.restore_rng()
    events = read_journal(tmp_path / "journal").events
    assert [event for event in events if event["event"] == "resume_not_exact"] == []
    monkeypatch.setattr(torch, "set_rng_state", lambda _: None)
    torch.rand(1)
    checkpointer.restore_rng()
    checkpointer.restore_rng()
    assert proof_of(read_journal(tmp_path / "journal").events)["component"] == "the generator of torch"
    assert capsys.readouterr().err.count("the generator of torch cannot be set as it was saved") == 1
