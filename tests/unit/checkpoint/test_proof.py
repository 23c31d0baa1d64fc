"""A resume compares the state with the digests of its save, and records what differs; nothing else follows from it."""

from __future__ import annotations

import json
import zlib

import pytest
import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.manifest import _canonical
from resilience_sdk.checkpoint.proof import state_check
from resilience_sdk.core import console, environ
from resilience_sdk.core.journal import Journal, read_journal
from resilience_sdk.core.resume_proof import proof_of


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
    assert state_check([good, good], 4).text.endswith("what each rank has of its own: not compared, 4 ranks saved it")
    assert state_check([good, {**good, "error": "OSError: no"}], 2).result == "not_compared"
