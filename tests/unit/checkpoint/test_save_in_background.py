from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer, save
from resilience_sdk.checkpoint.background import Background, await_close, await_parts, leave_part, own_process
from resilience_sdk.checkpoint.capture import Staging
from resilience_sdk.core.journal import Event, Journal, read_journal
from resilience_sdk.rank import checkpoints
from resilience_sdk.system import hostinfo

ROOT = Path(__file__).parents[3]


class Held(Journal):
    """A journal whose commits wait for a word: so a save in the background takes as long as a test wants."""

    def __init__(self, directory):
        super().__init__(directory, writer="rank0", host="h", boot_id="b", job="j")
        self.go = threading.Event()

    def emit(self, event, **fields):
        if event is Event.CKPT_COMMIT:
            assert self.go.wait(30)
        super().emit(event, **fields)


class Hands:
    """A clock that stands still."""

    now_ns = 0

    def monotonic_ns(self):
        return self.now_ns

    def wall_s(self):
        return 0.0


def make(tmp_path, weight, journal=None):
    return Checkpointer({"weight": weight}, run_dir=tmp_path, every=1, in_background=True, journal=journal)


@pytest.fixture
def journal(tmp_path):
    (tmp_path / "journal").mkdir()
    held = Held(tmp_path / "journal")
    yield held
    held.go.set()


def test_what_is_saved_is_the_state_at_the_save(tmp_path, journal):
    """The training changes its tensors while they are written, and the checkpoint has them as they were."""
    weight = torch.arange(100_000.0)
    checkpointer = make(tmp_path, weight, journal)
    assert checkpointer.maybe_save(1)
    weight.zero_()
    assert not checkpointer.wait(0.0)
    assert checkpointer.last_good is None
    assert checkpointer.expected_save_s == 0.0
    journal.go.set()
    assert checkpointer.wait(30)
    assert checkpointer.expected_save_s > 0.0
    assert checkpointer.last_good.step == 1
    again = make(tmp_path, weight)
    assert again.resume() == 1
    assert torch.equal(weight, torch.arange(100_000.0))
    (commit,) = [event for event in read_journal(tmp_path / "journal").events if event["event"] == "ckpt_commit"]
    assert 0 < commit["stall_s"] < commit["seconds"]
    assert again.expected_save_s == commit["seconds"]  # before its own first one


def test_a_save_that_is_due_too_soon_is_left_out_and_said(tmp_path, journal, capsys):
    """While one is written, no other begins and nobody waits; the next one that is due is made."""
    checkpointer = make(tmp_path, torch.zeros(3), journal)
    assert checkpointer.maybe_save(1)
    assert not checkpointer.maybe_save(2)
    assert "still being written" in capsys.readouterr().err
    journal.go.set()
    assert checkpointer.wait(30)
    assert checkpointer.maybe_save(3)
    assert checkpointer.wait(30)
    assert checkpointer.last_good.step == 3


def test_a_newest_save_that_was_left_out_is_said_at_the_end_and_fails_no_job(tmp_path, journal, capsys, monkeypatch):
    """It was not tried, and nothing is wrong with the storage; one that failed is another thing."""
    unsaved = []
    monkeypatch.setattr(save, "_savers", weakref.WeakSet())  # those of other tests are none of this one's
    monkeypatch.setattr(checkpoints, "end_unsaved", lambda lost, advice, *, at_exit: unsaved.append(lost))
    checkpointer = make(tmp_path, torch.zeros(3), journal)
    assert checkpointer.maybe_save(1)
    assert not checkpointer.maybe_save(4)
    journal.go.set()
    save.end_process()
    assert "steps 1 to 3 (3 steps) are in no checkpoint: the newest save was left out" in capsys.readouterr().err
    assert not unsaved
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("")
    assert not checkpointer.save(5)
    save.end_process()
    assert len(unsaved) == 1


def test_an_explicit_save_waits_for_the_one_in_the_background(tmp_path, journal):
    """After `save`, its step is on disk, and so is the one before."""
    weight = torch.zeros(3)
    checkpointer = make(tmp_path, weight, journal)
    assert checkpointer.maybe_save(1)
    threading.Timer(0.05, journal.go.set).start()
    weight.fill_(2.0)
    assert checkpointer.save(2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000001", "step-00000002"]
    weight.zero_()
    assert make(tmp_path, weight).resume() == 2
    assert weight.tolist() == [2.0, 2.0, 2.0]


def test_the_last_save_waits_for_the_one_in_the_background_while_there_is_time(tmp_path, journal, monkeypatch, capsys):
    """It is skipped where the one before does not end in the time that is left, and made where it does."""
    checkpointer = make(tmp_path, torch.zeros(3), journal)
    assert checkpointer.maybe_save(1)
    monkeypatch.setattr(checkpoints.preemption, "time_left", lambda: 0.05)
    assert not checkpoints.save_at_stop(checkpointer, 2, None)
    assert not (tmp_path / "checkpoints/step-00000002").exists()
    monkeypatch.setattr(checkpoints.preemption, "time_left", lambda: 30.0)
    threading.Timer(0.05, journal.go.set).start()
    assert checkpoints.save_at_stop(checkpointer, 2, None)
    assert checkpointer.last_good.step == 2


def test_a_save_that_would_leave_no_time_for_the_last_one_is_left_out(tmp_path, journal, capsys):
    """Between the notice and the stop, a periodic save needs time for two; an explicit one is made all the same."""
    journal.go.set()
    checkpointer = make(tmp_path, torch.zeros(3), journal)
    left_s = [0.0]
    checkpointer.time_left = lambda: left_s[0]
    assert checkpointer.maybe_save(1)  # the first: it is not known how long it takes
    assert checkpointer.wait(30)
    assert not checkpointer.maybe_save(2)
    assert "no save at step 2: 0.0 s are left" in capsys.readouterr().err
    assert checkpointer.save(2)
    left_s[0] = 100.0
    assert checkpointer.maybe_save(3)
    (skip,) = [event for event in read_journal(tmp_path / "journal").events if event["event"] == "ckpt_skip"]
    assert (skip["step"], skip["time_left_s"]) == (2, 0.0)


def test_a_save_that_stays_left_out_is_said_once_and_rarely_asked_for(tmp_path, journal, capsys):
    """A second before the end a save is due for a thousand steps; what has passed is told anew if it comes again."""
    clock, left_s, asked = Hands(), [None], []
    checkpointer = Checkpointer({"w": torch.zeros(3)}, run_dir=tmp_path, every="10s", journal=journal, clock=clock)
    checkpointer.time_left = lambda: asked.append(0) or left_s[0]
    journal.go.set()

    def skips():
        events = read_journal(tmp_path / "journal").events
        return [event["step"] for event in events if event["event"] == "ckpt_skip"]

    def train(first, last):
        saved = []
        for step in range(first, last):
            clock.now_ns += 1_000_000_000
            saved += [step] if checkpointer.maybe_save(step) else []
        return saved

    assert train(0, 15) == [10]
    asked.clear()
    checkpointer._policy.measured(0.0, 1.0)  # seconds of another disk
    left_s[0] = 1.0
    assert train(15, 1012) == []
    (skipped,) = skips()
    assert capsys.readouterr().err.count("no save at step") == 1
    assert len(asked) < 50
    left_s[0] = None
    (saved,) = train(1012, 1012 + 140)[:1]
    assert saved > skipped
    checkpointer._policy.measured(0.0, 1.0)
    left_s[0] = 1.0
    train(1152, 1200)
    assert len(skips()) == 2


def test_a_save_without_a_thread_to_be_had_is_reported_and_survived(tmp_path, journal, monkeypatch):
    """The process may be at the limit of its threads: the next save may find one."""
    journal.go.set()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    checkpointer = make(tmp_path, torch.zeros(3), journal)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not checkpointer.maybe_save(1)
    (failure,) = [event for event in read_journal(tmp_path / "journal").events if event["event"] == "ckpt_fail"]
    assert "can't start new thread" in failure["error"]
    assert list((tmp_path / "checkpoints").glob("*step*")) == []
    assert checkpointer.maybe_save(2)
    assert checkpointer.wait(30)
    assert checkpointer.last_good.step == 2


def test_whatever_ends_the_thread_ends_the_save():
    """What torch raises there is no Exception; nobody may wait for its save for ever."""

    class Torn(BaseException):
        pass

    def work(written):
        raise Torn("the rest is missing")

    save = Background(1, work)
    assert save.wait(30)
    assert save.wait_written(0)
    assert save.outcome == {"error": "Torn: the rest is missing", "number": None}


ENDING = """
import os, sys, torch
from resilience_sdk.recorder import lookup
from resilience_sdk.system import hostinfo
from resilience_sdk.checkpoint import Checkpointer

lookup.disable()
assert Checkpointer({"weight": torch.ones(1)}, run_dir=f"{sys.argv[1]}/first").save(0)  # loads what each would load
for name in ("end", "leave", "fail"):
    if os.fork() == 0:
        break
    os.wait()
else:
    sys.exit()
state = {"weight": torch.ones(3_000_000)}
assert Checkpointer(state, run_dir=f"{sys.argv[1]}/{name}", every=1, in_background=True).maybe_save(1)
if name == "leave":
    sys.exit(75)
assert name == "end"
"""


@pytest.mark.slow
def test_the_end_of_the_process_waits_for_the_commit(tmp_path):
    """A script that ends, leaves or fails while a checkpoint is being written leaves a whole one."""
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-W", "ignore", "-c", ENDING, str(tmp_path)]
    done = subprocess.run(command, env=env, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("AssertionError") == 1
    for name in ("end", "leave", "fail"):
        weight = torch.zeros(3_000_000)
        assert make(tmp_path / name, weight).resume() == 1
        assert weight[-1] == 1


def test_copies_share_nothing_and_keep_what_belongs_to_them():
    """Tied tensors stay tied, containers keep their types and a module's metadata, buffers are used again."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weight = torch.ones(4)
    state = {"model": model.state_dict(), "tied": [weight, weight], "rest": (1, "a", bytearray(b"x"), None)}
    staging = Staging()
    first = staging.copy(state)
    assert first["tied"][0] is first["tied"][1]
    assert first["rest"] == (1, "a", bytearray(b"x"), None)
    assert first["model"]._metadata == state["model"]._metadata
    weight.zero_()
    model[0].weight.data.zero_()
    assert first["tied"][0].tolist() == [1.0] * 4
    assert first["model"]["0.weight"].abs().sum() > 0
    second = staging.copy(state)
    assert second["tied"][0].data_ptr() == first["tied"][0].data_ptr()
    assert second["tied"][0].tolist() == [0.0] * 4


def test_tied_weights_are_copied_once():
    """A module's state has an object per name; what is one tensor in the model is one in the copy and in the file."""
    model = nn.ModuleDict({"in": nn.Linear(4, 4, bias=False), "out": nn.Linear(4, 4, bias=False)})
    model["out"].weight = model["in"].weight
    state = {"model": model.state_dict(), "views": [model["in"].weight.detach()[:2], model["in"].weight.detach().t()]}
    copied = Staging().copy(state)
    first, second = copied["model"].values()
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, model["in"].weight)
    for copy, view in zip(copied["views"], state["views"], strict=True):  # the same memory, but seen otherwise
        assert torch.equal(copy, view)
        assert copy.data_ptr() != first.data_ptr()


def test_rank_0_waits_for_the_parts_of_all(tmp_path):
    """Parts appear whole; their files are gone afterwards, since they are no part of a checkpoint."""
    own = {"error": None, "files": []}
    other = {"error": None, "files": [["rank-00001.json", 1, 2]]}
    threading.Timer(0.05, leave_part, (tmp_path, 1, other)).start()
    assert await_parts(tmp_path, own, 2, patience_s=30) == [own, other]
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_rank_ends_the_wait_and_silence_does_too(tmp_path):
    """Nobody waits for the rest of what cannot become a checkpoint; a rank that says nothing is named."""
    leave_part(tmp_path, 2, {"error": "disk full"})
    parts = await_parts(tmp_path, {"error": None}, 3, patience_s=30)
    assert [part["error"] for part in parts] == [None, None, "disk full"]
    parts = await_parts(tmp_path, {"error": None}, 2, patience_s=0.0)
    assert "has not written its part" in parts[1]["error"]


class Second:
    """Rank 1 of two, which is told by rank 0 that a whole checkpoint of this step is there."""

    rank, size, group = 1, 2, None

    def broadcast(self, _message):
        order = {"is_there": True, "is_left_out": False, "name": None, "error": None}
        return {**order, "values": "{}", "token": "", "last_good": 2, "next_question": 3, "number": None}


def test_a_rank_that_hears_of_a_failure_after_a_newer_save_takes_the_newer_one(tmp_path):
    """As rank 0, which waits for the one before: else one of them alone would save again, and wait for the other."""
    saver = make(tmp_path, torch.zeros(1))._saver
    over = threading.Event()

    def work(_written):
        over.wait(30)
        return {"error": "disk full", "number": 28}

    behind = saver._background = Background(1, work)
    assert saver.save(2, Second(), in_background=False)
    over.set()
    assert behind.wait(30)
    assert saver.unsaved is None
    assert saver.last_good.step == 2


def test_other_ranks_see_the_commit_and_the_failure(tmp_path):
    """The unfinished directory is gone, and either the checkpoint is there or it is not."""
    unfinished, target = tmp_path / ".tmp", tmp_path / "step"
    assert await_close(unfinished, target)["error"]
    target.mkdir()
    (target / "manifest.json").write_text(json.dumps({}))
    assert await_close(unfinished, target) == {"error": None}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_nobody_waits_for_a_rank_that_has_ended(tmp_path):
    """Its part counts if it is there; without one it is named at once, and so is a rank 0 that cannot commit."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as peer:
        *place, _, _ = own_process()
        dead = [*place, peer.pid, hostinfo.process_start_ticks(peer.pid)]
        assert await_parts(tmp_path, {"error": None}, 2, 0.7, [own_process(), dead])[1]["error"].endswith("within 1 s")
    own = {"error": None}
    parts = await_parts(tmp_path, own, 2, processes=[own_process(), dead])
    assert parts == [own, {"error": "has ended before it had written its part"}]
    assert await_close(tmp_path, tmp_path / "step", processes=[dead, own_process()])["error"]
    leave_part(tmp_path, 1, {"error": None, "files": []})
    assert await_parts(tmp_path, own, 2, processes=[own_process(), dead])[1] == {"error": None, "files": []}
    # Of a process on another host nothing is known: it has its time.
    elsewhere = ["another boot", *dead[1:]]
    assert "within" in await_parts(tmp_path, own, 2, 0.0, processes=[own_process(), elsewhere])[1]["error"]


def test_a_copy_of_what_a_framework_gives_shares_nothing_with_it():
    """Tensors by memory that is used again for the next save, all else by a deep copy; what is tied stays tied."""
    weight = torch.ones(3)
    state = {"model": OrderedDict(a=weight, b=weight), "loops": [{"step": 1}], "step": torch.tensor(7)}
    staging = Staging()
    first = staging.copy_all(state)
    assert first["model"]["a"] is first["model"]["b"] is not weight
    assert (type(first["model"]), first["step"].item()) == (OrderedDict, 7)
    weight.add_(1.0)
    state["loops"][0]["step"] = 2
    assert (first["model"]["a"].tolist(), first["loops"]) == ([1.0] * 3, [{"step": 1}])
    again = staging.copy_all(state)
    assert again["model"]["a"].data_ptr() == first["model"]["a"].data_ptr()
    assert again["model"]["a"].tolist() == [2.0] * 3
