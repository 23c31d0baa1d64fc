"""What all adapters are made of: patches, a heartbeat that hooks begin and end, late frameworks."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from resilience_sdk import heartbeat
from resilience_sdk.adapters._base import EvaluationBeat, Patches, StepBeat, StepLoss, errors_kept, framework
from resilience_sdk.adapters.lightning import fit
from resilience_sdk.adapters.lightning.fit import Fit
from resilience_sdk.adapters.transformers.training import TrainerPatches
from resilience_sdk.errors import ConfigError, MissingExtraError
from resilience_sdk.numerics import watch as numerics

ROOT = Path(__file__).parents[3]
ADAPTERS = ["pytorch", "deepspeed", *sorted(path.parent.name for path in (ROOT / "adapters").glob("*/__init__.py"))]
FRAMEWORKS = ("torch", "numpy", "deepspeed", "lightning", "pytorch_lightning", "accelerate", "transformers", "megatron")


class Owner:
    """An object of a framework."""

    def save(self):
        return "own"


# -- what is put on, and taken off


@pytest.mark.parametrize("copied", [lambda each: each, lambda each: pickle.loads(pickle.dumps(each))])
def test_what_was_there_before_is_given_back(copied):
    """Also what stood on the object itself, and in a copy in another process; what others have put around it stays."""
    owner, patches = Owner(), Patches()
    owner.load = "loads"
    for name in ("save", "load", "save", "evaluate"):
        patches.replace(owner, name, f"our {name}")
    owner, patches = copied((owner, patches))
    owner.evaluate = "around ours"
    for _ in range(2):
        patches.detach()
        assert vars(owner) == {"load": "loads", "evaluate": "around ours"}


def test_patches_around_others_that_go_first_do_not_bring_them_back():
    """As with two callbacks on one method, of which the inner one ends first; also where it is put on again."""
    owner, inner, outer = Owner(), Patches(), Patches()

    def first():
        return "first"

    def second():
        return "second"

    for _ in range(2):
        inner.replace(owner, "save", first)
        outer.replace(owner, "save", second)
        inner.detach()
        assert owner.save is second
        outer.detach()
        assert owner.save() == "own"
    inner.replace(owner, "save", first)
    outer.replace(owner, "save", second)
    outer.detach()
    assert owner.save is first
    inner.detach()
    assert vars(owner) == {}


def test_an_error_is_kept_until_the_block_ends():
    """All ranks may meet behind it."""
    owner, reached = Owner(), []
    owner.save = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError), errors_kept(owner, "save"):
        owner.save()
        reached.append(1)
    assert reached == [1]


def test_a_trainer_that_cannot_be_watched_has_its_methods_again():
    """Here a model that cannot be timed."""
    methods = dict.fromkeys(("get_batch_samples", "evaluate", "prediction_step", "training_step"), 0)
    trainer = SimpleNamespace(model=None, model_wrapped="no model", optimizer=None, **methods)
    before = dict(vars(trainer))
    with pytest.raises(ConfigError):
        TrainerPatches(trainer, StepLoss())
    assert vars(trainer) == before


def test_a_fit_that_cannot_save_gives_the_profiler_back():
    """The callback has no fit yet, and could not end it."""

    class Session:
        """One without settings."""

    profiler, strategy = object(), SimpleNamespace()
    trainer = SimpleNamespace(profiler=profiler, fast_dev_run=False, strategy=strategy)
    with pytest.raises(AttributeError):
        Fit(trainer, frozenset({fit.SECTIONS, fit.CHECKPOINT}), Session(), resumes=False, log=None)
    assert trainer.profiler is profiler


# -- losses


class Noted:
    """The watch of the numbers of a rank: keeps what it is given."""

    def __init__(self):
        self.values = []
        self.scaled = []

    def note(self, step, loss, grad_norm, *, is_scaled=False):
        """Keep it."""
        self.values.append((step, loss, grad_norm))
        self.scaled += [step] if is_scaled else []


@pytest.fixture
def noted(monkeypatch):
    """What `numerics` is given."""
    watch = Noted()
    monkeypatch.setattr(numerics, "_watch", watch)
    return watch.values


def make_steps(losses, counts):
    for step, count in enumerate(counts):
        for _ in range(count):
            losses.add(torch.tensor(0.5))
        losses.end(step)


def test_the_loss_of_a_step_is_what_its_micro_batches_add_up_to(noted):
    """A dropped one is none, and a norm alone is one."""
    losses = StepLoss()
    losses.add(0.25)
    losses.add(torch.tensor([0.5]))
    losses.end(7)
    losses.add(9.0)
    losses.drop()
    losses.end(8)
    losses.end(9, grad_norm=1.5)
    assert noted == [(7, 0.75, None), (9, None, 1.5)]


def test_a_step_of_another_number_of_micro_batches_is_no_spike(noted):
    """The end of an epoch has fewer, a step behind one that a scaler left out has twice as many; then a new usual."""
    make_steps(StepLoss(), [4, 4, 1, 4, 8, 4, 2, 2, 2])
    assert [loss for _, loss, _ in noted] == [2.0] * 7 + [1.0] * 2
    assert numerics._watch.scaled == [2, 4, 6]


def test_what_is_no_loss_switches_this_off_and_says_so(noted, capsys):
    """Nothing reaches the training."""
    losses = StepLoss()
    losses.add(torch.zeros(2, device="meta"))
    losses.add(1.0)
    losses.end(0)
    assert noted == []
    assert "losses are not looked at, and training goes on" in capsys.readouterr().err


# -- a heartbeat of an evaluation


def test_a_batch_of_an_evaluation_is_progress_and_no_step(recording):
    """It leaves the number of the step; before the first step there is none, since that would end the start-up."""
    beat, batch = StepBeat(), EvaluationBeat()
    batch.begin()
    assert recording.stack() == []
    batch.end()
    beat.begin(40)
    beat.end()
    before = recording.snapshot()
    batch.begin()
    assert recording.stack() == ["eval_batch"]
    batch.end()
    now = recording.snapshot()
    assert (now.beats, now.step, now.step_is_global) == (1, 40, True)
    assert now.main_lane.beat_ns > before.main_lane.beat_ns


# -- a heartbeat


def test_a_step_is_one_beat_with_the_number_of_the_global_step(recording):
    """Open from its begin to its end, however often it is begun; it means the same in all attempts."""
    beat = StepBeat()
    for step in (40, 41):
        beat.begin(step)
        beat.begin(step)
        assert recording.stack() == ["step"]
        assert (recording.lane().step, recording.lane().step_is_global) == (step, True)
        beat.end()
    assert recording.stack() == []
    assert (recording.snapshot().beats, recording.lane().step) == (2, 41)


def test_a_step_that_is_left_does_not_count(recording):
    """It is closed, and the next one begins anew; an end without a begin is nothing, since hooks come in any order."""
    beat = StepBeat()
    beat.end()
    beat.begin()
    beat.drop()
    beat.drop()
    assert recording.stack() == []
    assert recording.snapshot().beats == 0
    beat.begin()
    beat.end()
    assert recording.snapshot().beats == 1


def test_it_keeps_away_from_a_heartbeat_of_the_script(recording):
    """The script's own begins and ends as the script says."""
    beat = StepBeat()
    with heartbeat(step=7):
        beat.begin(0)
        beat.end()
        assert recording.stack() == ["step"]
        assert recording.lane().step == 7
    assert recording.snapshot().beats == 1


def test_it_belongs_to_the_thread_that_trains(recording):
    """A training in a thread beats on that thread's lane."""
    seen = []

    def train():
        beat = StepBeat()
        beat.begin(3)
        seen.append(recording.stack())
        beat.end()
        seen.append(recording.stack())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [["step"], []]
    assert recording.snapshot().beats == 1


# -- frameworks


@pytest.mark.parametrize("name", ADAPTERS)
def test_importing_an_adapter_imports_no_framework(name):
    """It is imported when it is used: whoever only asks for help waits for nothing. Not even torch."""
    program = (
        f"import json, sys, resilience_sdk.adapters.{name}; "
        f"print(json.dumps([each for each in {FRAMEWORKS!r} if each in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_a_missing_framework_is_said_with_its_cure(tmp_path, monkeypatch):
    """The message is the command; one that lacks something itself speaks for itself, as to install it is no help."""
    assert framework("json", "json").__name__ == "json"
    with pytest.raises(MissingExtraError, match="pip install lightning-of-tomorrow"):
        framework("lightning_of_tomorrow.pytorch", "lightning-of-tomorrow")
    (tmp_path / "framework_with_a_hole.py").write_text("import what_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        framework("framework_with_a_hole", "framework-with-a-hole")
