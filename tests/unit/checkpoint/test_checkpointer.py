from __future__ import annotations

import contextlib
import os
import resource

import pytest
import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.newest import newest_checkpoint
from resilience_sdk.core.journal import Event, Journal, read_journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import CheckpointError, ConfigError, RunDirectoryError


def make_journal(tmp_path, attempt):
    (tmp_path / "journal").mkdir(parents=True, exist_ok=True)
    return Journal(tmp_path / "journal", writer="rank0", host="h", boot_id="b", job="j", attempt=attempt)


def make(tmp_path, *, every=2, keep=2, values=None, attempt=0, in_background=False):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = Checkpointer(
        {"model": model, "optimizer": optimizer},
        run_dir=tmp_path,
        every=every,
        keep=keep,
        journal=make_journal(tmp_path, attempt),
        in_background=in_background,
    )
    checkpointer.values.update(values or {})
    return model, optimizer, checkpointer


def train(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.rand(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def events(tmp_path, name):
    return [event for event in read_journal(tmp_path / "journal").events if event["event"] == name]


def fail_after_resume(tmp_path, attempt):
    """Resume as `attempt`, and journal that it crashed: what a launcher or a monitor writes."""
    _, _, checkpointer = make(tmp_path, attempt=attempt)
    step = checkpointer.resume()
    make_journal(tmp_path, attempt).emit(Event.INCIDENT, kind="crash", id=f"{attempt:04d}-crash", category="numerics")
    return step


def steps_on_disk(tmp_path):
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step-"))


@contextlib.contextmanager
def largest_file(size):
    """Make the system refuse to let any file grow above `size` bytes: a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_reader_changes_nothing(tmp_path):
    """It takes the newest checkpoint beside what another one is writing, tells nobody, and cannot save."""
    _, _, writer = make(tmp_path, in_background=True)
    writer.save(3)
    in_flight = tmp_path / "checkpoints" / ".tmp-step-00000004-abcd"
    in_flight.mkdir()
    journal = [path.read_bytes() for path in sorted((tmp_path / "journal").iterdir())]
    before = sorted(tmp_path.rglob("*"))
    reader = Checkpointer({"model": nn.Linear(8, 8)}, run_dir=tmp_path, read_only=True)
    assert reader.resume() == 3
    for save in (reader.save, reader.maybe_save):
        with pytest.raises(ConfigError, match="read_only=True"):
            save(4)
    assert sorted(tmp_path.rglob("*")) == before
    assert [path.read_bytes() for path in sorted((tmp_path / "journal").iterdir())] == journal


def test_where_the_sdk_is_off_and_no_directory_is_named_nothing_is_saved(monkeypatch, tmp_path, capsys):
    """Each call does nothing, which is said; a directory that is named is used all the same."""
    for name in [name for name in os.environ if name.startswith(("RESILIENCE_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirectoryError, match="is missing"):
        Checkpointer({"model": torch.nn.Linear(1, 1)})
    monkeypatch.setenv("RESILIENCE_DISABLE", "1")
    off = Checkpointer({"model": torch.nn.Linear(1, 1)}, every=1)
    off.begins_at(0)
    assert (off.find(), off.resume(), off.maybe_save(1), off.save(2), off.save(3, last=True)) == (
        None,
        0,
        False,
        False,
        False,
    )
    assert (off.save_patiently(4).unsaved, off.holds(4), off.wait(), off.last_good, off.expected_save_s) == (
        None,
        False,
        True,
        None,
        0.0,
    )
    off.raise_unsaved()
    off.restore_rng()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.count("Checkpointer: NOTHING IS SAVED or resumed") == 1
    assert Checkpointer({"model": torch.nn.Linear(1, 1)}, run_dir=tmp_path / "a").save(1)


def test_what_is_due_before_the_first_question_is_saved_where_the_begin_was_told(tmp_path):
    """As where many steps are counted at once; told or not, nothing else changes, and a resume knows it better."""
    _, _, untold = make(tmp_path / "untold", every=50)
    assert not untold.maybe_save(137)
    _, _, told = make(tmp_path / "told", every=50)
    told.begins_at(0)
    assert told.maybe_save(137)
    _, _, resumed = make(tmp_path / "told", every=50)
    assert resumed.resume() == 137
    resumed.begins_at(0)
    assert [resumed.maybe_save(step) for step in (138, 149, 150)] == [False, False, True]


def test_a_reader_makes_no_directory(tmp_path):
    """A path that is wrong is an error, not an empty run that starts over."""
    with pytest.raises(RunDirectoryError, match="there is no run directory"):
        Checkpointer({"model": nn.Linear(8, 8)}, run_dir=tmp_path / "typo", read_only=True)
    assert not list(tmp_path.iterdir())


def test_where_the_lease_cannot_be_written_it_is_said_and_the_run_goes_on(tmp_path, capsys):
    """A full disk at the start: what is there is resumed, and what cannot be guarded is told once."""
    _, _, checkpointer = make(tmp_path)
    with largest_file(0):
        assert checkpointer.resume() == 0
    assert capsys.readouterr().err.count("nothing keeps another process from writing checkpoints there") == 1
    assert checkpointer.save(1)


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path):
    """After a resume, the next losses are those of the training that was never interrupted."""
    model, optimizer, checkpointer = make(tmp_path)
    assert checkpointer.resume() == 0
    losses = []
    for step in range(6):
        losses.append(train(model, optimizer))
        checkpointer.maybe_save(step + 1)
        if step == 3:
            checkpointer.values["best"] = float("inf")
            assert checkpointer.save(step + 1)
            break
    losses += [train(model, optimizer) for _ in range(4)]
    model, optimizer, checkpointer = make(tmp_path)
    assert checkpointer.resume() == 4
    assert checkpointer.last_good.step == 4
    assert checkpointer.values == {"best": float("inf")}
    assert [train(model, optimizer) for _ in range(4)] == losses[4:]
    assert events(tmp_path, "resume")[0]["step"] == 4


def test_only_the_last_ones_stay(tmp_path):
    """`keep` good checkpoints stay and are journalled with bytes and seconds."""
    _, _, checkpointer = make(tmp_path, every=1, keep=3)
    for step in range(6):
        checkpointer.maybe_save(step + 1)
    assert steps_on_disk(tmp_path) == ["step-00000004", "step-00000005", "step-00000006"]
    commits = events(tmp_path, "ckpt_commit")
    assert [event["step"] for event in commits] == [1, 2, 3, 4, 5, 6]
    assert all(event["bytes"] > 1000 and event["seconds"] > 0 for event in commits)
    assert len(events(tmp_path, "ckpt_begin")) == 6


def test_the_same_step_is_written_once(tmp_path):
    """A second save of a step is a no-op, unless values changed."""
    _, _, checkpointer = make(tmp_path)
    assert checkpointer.save(2)
    assert checkpointer.save(2)
    assert len(events(tmp_path, "ckpt_commit")) == 1
    checkpointer.values["accuracy"] = torch.tensor(0.5)
    assert checkpointer.save(2)
    _, _, again = make(tmp_path)
    assert again.resume() == 2
    assert again.values == {"accuracy": 0.5}


def test_a_full_disk_is_reported_and_survived(tmp_path, capsys):
    """A save that the system refuses leaves the last good one, no debris, one line and one journal entry."""
    _, _, checkpointer = make(tmp_path)
    assert checkpointer.save(2)
    with largest_file(900):
        assert not checkpointer.save(4)
    assert [path.name for path in (tmp_path / "checkpoints").glob("[.s]*") if path.name != ".gitignore"] == [
        "step-00000002"
    ]
    assert checkpointer.last_good.step == 2
    assert "checkpoint at step 4 failed: File too large" in capsys.readouterr().err
    failure = events(tmp_path, "ckpt_fail")[0]
    assert failure["step"] == 4
    assert "File too large" in failure["error"]
    assert checkpointer.save(6)


def test_a_state_that_fails_is_reported_and_survived(tmp_path, capsys):
    """An exception out of the user's own state_dict() does not end the training."""

    class Moody:
        calls = 0

        def state_dict(self):
            self.calls += 1
            if self.calls > 2:
                raise RuntimeError("not now")
            return {}

        def load_state_dict(self, saved):
            pass

    checkpointer = Checkpointer({"moody": Moody()}, run_dir=tmp_path, every=1)
    assert checkpointer.resume() == 0
    assert not checkpointer.save(1)
    assert "RuntimeError: not now" in capsys.readouterr().err
    assert steps_on_disk(tmp_path) == []


def test_values_that_are_not_plain_fail_the_save_by_name(tmp_path, capsys):
    """An object in values is named; the training goes on."""
    _, _, checkpointer = make(tmp_path, values={"model": object()})
    assert not checkpointer.save(1)
    assert "values['model']" in capsys.readouterr().err


def test_a_damaged_newest_is_skipped_and_said(tmp_path, capsys):
    """Resume takes the one before and says why, on the console and in the journal."""
    _, _, checkpointer = make(tmp_path)
    checkpointer.save(2)
    checkpointer.save(4)
    with (tmp_path / "checkpoints/step-00000004/state.pt").open("r+b") as file:
        file.truncate(100)
    _, _, again = make(tmp_path)
    assert again.resume() == 2
    assert "skipped checkpoint step-00000004: state.pt has 100 bytes" in capsys.readouterr().err
    assert events(tmp_path, "ckpt_skip")[0]["step"] == 4
    assert again.save(4)
    assert make(tmp_path)[2].resume() == 4


def test_where_all_are_damaged_nothing_starts_over_unasked(tmp_path):
    """Several checkpoints that cannot be loaded are a fault of the storage: resume raises and names the cure."""
    _, _, checkpointer = make(tmp_path)
    for step in (2, 4):
        checkpointer.save(step)
        with (tmp_path / f"checkpoints/step-{step:08d}/state.pt").open("r+b") as file:
            file.truncate(100)
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints in .* are damaged .*step-00000004.*--fresh"):
        make(tmp_path)[2].resume()
    assert steps_on_disk(tmp_path) == ["step-00000002", "step-00000004"]


def test_an_only_checkpoint_that_is_damaged_is_passed_over_aloud(tmp_path, capsys):
    """Nothing is lost but the time before it, so a job that starts by itself goes on; it is said."""
    _, _, checkpointer = make(tmp_path)
    checkpointer.save(2)
    (tmp_path / "checkpoints/step-00000002/state.pt").unlink()
    assert make(tmp_path)[2].resume() == 0
    assert "training starts over: there is no other checkpoint" in capsys.readouterr().err


def test_a_refused_checkpoint_is_no_reason_to_start_over(tmp_path):
    """When nothing but an untrusted checkpoint is there, resume raises with the cure instead of returning 0."""
    _, _, checkpointer = make(tmp_path)
    checkpointer.save(2)
    (tmp_path / "checkpoints/step-00000002/state.pt").chmod(0o666)
    with pytest.raises(CheckpointError, match="chmod -R go-w"):
        make(tmp_path)[2].resume()


def test_a_changed_model_raises_with_the_cure(tmp_path):
    """A checkpoint that does not fit is an error, never a silent fresh start."""
    _, _, checkpointer = make(tmp_path)
    checkpointer.save(2)
    with pytest.raises(CheckpointError, match="start over in another run directory"):
        Checkpointer({"model": nn.Linear(2, 2), "optimizer": nn.Linear(1, 1)}, run_dir=tmp_path).resume()


def test_what_cannot_be_loaded_later_is_found_at_the_start(tmp_path):
    """An unsavable state raises at resume, before any work is done."""

    class Odd:
        def state_dict(self):
            return {"callback": print}

        def load_state_dict(self, saved):
            pass

    with pytest.raises(CheckpointError, match=r"odd\['callback'\]"):
        Checkpointer({"odd": Odd()}, run_dir=tmp_path).resume()


def test_several_ranks_without_a_group_are_refused(tmp_path, monkeypatch):
    """Two ranks that cannot agree must not both write: the message says what to call."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        make(tmp_path)[2].resume()


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_bad_step_is_refused(tmp_path, step):
    """`step` is a count of completed steps."""
    with pytest.raises(ConfigError, match="completed steps"):
        make(tmp_path)[2].save(step)


def test_files_are_private(tmp_path):
    """Checkpoints are readable and writable by their owner alone."""
    make(tmp_path)[2].save(1)
    directory = tmp_path / "checkpoints/step-00000001"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


def test_loader_and_generator_state_go_with_the_rank(tmp_path):
    """Objects that belong to a rank are written to its own file and restored from it, known early or late."""

    class Loader:
        position = 0

        def __iter__(self):
            return iter(())

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, saved):
            self.position = saved["position"]

    data, late, generator = Loader(), Loader(), torch.Generator().manual_seed(3)
    data.position, late.position = 5, 7
    checkpointer = Checkpointer({"data": data, "generator": generator}, run_dir=tmp_path)
    checkpointer.add_data("late", late)
    checkpointer.save(1)
    expected = torch.rand(2, generator=generator).tolist()
    data, late, generator = Loader(), Loader(), torch.Generator()
    checkpointer = Checkpointer({"data": data, "generator": generator}, run_dir=tmp_path)
    assert checkpointer.resume() == 1
    checkpointer.add_data("late", late)
    assert (data.position, late.position) == (5, 7)
    assert torch.rand(2, generator=generator).tolist() == expected


def test_a_checkpoint_after_which_the_run_fails_twice_is_passed_over(tmp_path, capsys):
    """The third resume takes the one before it, says so, journals it once, and a new save of the step is clean."""
    _, _, checkpointer = make(tmp_path)
    checkpointer.save(2)
    checkpointer.save(4)
    assert [fail_after_resume(tmp_path, attempt) for attempt in (1, 2)] == [4, 4]
    assert "quarantine" not in capsys.readouterr().err
    _, _, third = make(tmp_path, attempt=3)
    assert third.resume() == 2
    assert "checkpoint step-00000004 is in quarantine: the run failed soon after" in capsys.readouterr().err
    assert make(tmp_path, attempt=4)[2].resume() == 2
    (event,) = events(tmp_path, "ckpt_quarantine")
    assert (event["checkpoint"], event["step"]) == ("step-00000004", 4)
    assert "2 times (last: 0002-crash)" in event["why"]
    assert third.save(4)
    assert make(tmp_path, attempt=5)[2].resume() == 4


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_whose_weights_became_nan_keeps_what_it_had_before(tmp_path, capsys, in_background):
    """Saves go on, and are said to be bad once; they push out no good one, do not pile up, and are passed over."""
    model, _, checkpointer = make(tmp_path, in_background=in_background)
    checkpointer.save(1)
    checkpointer.save(2)
    with torch.no_grad():
        model.weight[3, 3] = float("nan")
    for step in range(3, 9):
        assert checkpointer.save(step)
    assert steps_on_disk(tmp_path) == [f"step-{step:08d}" for step in (1, 2, 7, 8)]
    err = capsys.readouterr().err
    assert newest_checkpoint(RunDirectory.open(tmp_path)) == 2  # which is what the end of a job tells
    assert err.count("is bad: it holds NaN in model.weight of rank 0") == 1
    assert [event.get("why_bad") is None for event in events(tmp_path, "ckpt_commit")] == [True] * 2 + [False] * 6
    model, _, resumed = make(tmp_path, attempt=1)
    assert resumed.resume() == 2
    assert model.weight.isfinite().all()
    assert "step-00000008 is in quarantine: it holds NaN in model.weight of rank 0" in capsys.readouterr().err
    for step in (3, 4):  # saved again, and sound: what was bad under that name is forgotten
        assert resumed.save(step)
    assert make(tmp_path, attempt=2)[2].resume() == 4


def test_where_all_hold_a_nan_the_newest_is_resumed(tmp_path, capsys):
    """It may belong there: a program whose weights are so from the start is not kept from going on."""
    model, _, checkpointer = make(tmp_path)
    with torch.no_grad():
        model.bias[0] = float("nan")
    checkpointer.save(1)
    checkpointer.save(2)
    assert newest_checkpoint(RunDirectory.open(tmp_path)) == 2
    assert make(tmp_path, attempt=1)[2].resume() == 2
    assert "is resumed again, though it holds NaN in model.bias of rank 0" in capsys.readouterr().err


def test_the_only_checkpoint_is_resumed_whatever_happened_after_it(tmp_path, capsys):
    """To start from nothing would be worse than to fail once more; it is said."""
    make(tmp_path)[2].save(4)
    assert [fail_after_resume(tmp_path, attempt) for attempt in (1, 2, 3)] == [4, 4, 4]
    assert "is resumed again, though the run failed soon" in capsys.readouterr().err


def test_auto_takes_the_failures_of_the_journal(tmp_path):
    """With failures in the journal, the interval of `auto` becomes shorter."""
    _, _, first = make(tmp_path, every="auto")
    first.resume()
    before = first._policy.interval_s
    for attempt in range(4):
        make_journal(tmp_path, attempt).emit(Event.INCIDENT, kind="crash", id=f"{attempt}")
    _, _, second = make(tmp_path, every="auto", attempt=5)
    second.resume()
    assert second._policy.interval_s == pytest.approx(before / 5**0.5, rel=0.01)
