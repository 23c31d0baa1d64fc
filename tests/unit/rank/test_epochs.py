"""`Run.epochs`: what stands beside the steps of an epoch is done once, wherever a training was cut short."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loaders import SAMPLES, Augmented, Stateful
from torch.utils.data import DataLoader, RandomSampler

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.failure import Unsaved
from resilience_sdk.checkpoint.last_save import End
from resilience_sdk.core import environ
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.rank.degraded import NoCheckpointer
from resilience_sdk.rank.run import Run

EPOCHS = 3
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # hundreds of saves, none of which has to reach a disk
TICKS = EPOCHS * (SAMPLES + 3)  # each step, and before, behind and at the end of them


class Unsized:
    """A loader of which nobody knows how long it is, and that draws at its end."""

    def __iter__(self):
        yield from (torch.randperm(SAMPLES) + torch.rand(SAMPLES)).tolist()
        torch.rand(())


def with_a_generator():
    generator = torch.Generator().manual_seed(9)
    sampler = RandomSampler(Augmented(), generator=generator)
    return DataLoader(Augmented(), sampler=sampler, generator=generator)


LOADERS = {
    "shuffled": lambda: DataLoader(Augmented(), shuffle=True),
    "generator": with_a_generator,
    "stateful": Stateful,
    "unsized": Unsized,
    "list": lambda: [torch.tensor(float(value)) for value in range(SAMPLES)],
}


class KilledError(Exception):
    """Ends an attempt."""


def a_run(run_dir, state, every=2):
    run = Run(None, None)
    run.session = SimpleNamespace(
        recorder=None,
        may_resume=True,
        run_dir=SimpleNamespace(is_finished=lambda: False),
        identity=SimpleNamespace(rank=0),
        settings=SimpleNamespace(),
    )
    run.checkpointer = Checkpointer(state, run_dir=run_dir, every=every)
    run.checkpointer.position = run._walk
    return run


def train(run_dir, make_loader, killed_at=None, max_steps=None):
    """Train, and return what must not depend on how often it was begun."""
    torch.manual_seed(4)
    ticks = iter(range(10**6))

    def tick():
        if next(ticks) == killed_at:
            raise KilledError

    weight, rate = torch.zeros(1), torch.ones(1)
    run = a_run(run_dir, {"weight": weight, "rate": rate})
    loader = make_loader()
    run._resume()  # as `with` does
    torch.rand(3)  # a program that draws before its loop must not shift anything
    for epoch in run.epochs(EPOCHS, max_steps=max_steps):
        assert epoch == run.epoch
        tick()
        torch.rand(2)  # done again where the resume is within the epoch: it may draw, and must change nothing
        for step, batch in run.steps(loader):
            tick()
            weight += (step + float(batch) + torch.rand(())) * rate
        tick()
        rate *= 0.5  # a scheduler
        weight += torch.rand(())  # an evaluation draws
        run.values["sum"] = run.values.get("sum", 0.0) + weight.item()
        tick()
    return weight.item(), rate.item(), dict(run.values), run.step, run.epoch


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=10, deadline=None)
@given(
    kills=st.lists(st.integers(0, TICKS - 1), min_size=1, max_size=3),
    max_steps=st.sampled_from([None, SAMPLES, SAMPLES + 1, 2 * SAMPLES - 1, 2 * SAMPLES]),
)
@example([SAMPLES + 1], None)  # behind the last step of an epoch
@example([SAMPLES + 2], None)  # behind all of its body
@example([SAMPLES + 3], None)  # at the start of the next one
@example([SAMPLES + 2, 0], None)
@example([SAMPLES + 1], SAMPLES)  # behind the last step of all
@example([SAMPLES + 5], SAMPLES + 1)  # the same, within an epoch
def test_wherever_it_is_cut_short_it_ends_the_same(name, kills, max_steps):
    """Weights, a scheduler's rate, values and generators end as those of a training that nothing cut short."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as undisturbed, tempfile.TemporaryDirectory(dir=MEMORY) as run_dir:
        for kill in kills:
            try:
                train(run_dir, LOADERS[name], kill, max_steps)
            except KilledError:
                continue
            break  # it was over before
        ended = train(run_dir, LOADERS[name], max_steps=max_steps)
        assert ended == train(undisturbed, LOADERS[name], max_steps=max_steps)


def test_only_epochs_that_are_not_complete_are_yielded(tmp_path):
    """An epoch whose body was left is begun again where its steps were, and a finished training has none."""
    seen = []
    run = a_run(tmp_path, {"weight": torch.zeros(1)}, every=1)
    with pytest.raises(KilledError):
        for epoch in run.epochs(3):
            seen.append((epoch, [step for step, _ in run.steps("ab")]))
            if epoch == 1:
                raise KilledError
    again = a_run(tmp_path, {"weight": torch.zeros(1)})
    seen += [(epoch, [step for step, _ in again.steps("ab")]) for epoch in again.epochs(3)]
    assert seen == [(0, [0, 1]), (1, [2, 3]), (1, []), (2, [4, 5])]
    assert list(a_run(tmp_path, {"weight": torch.zeros(1)}).epochs(3)) == []


def test_max_steps_ends_with_the_body_it_is_reached_in(tmp_path):
    """What stands behind the steps is done once more, and no epoch follows; with more steps that epoch goes on."""
    run = a_run(tmp_path, {"weight": torch.zeros(1)})
    assert [[s for s, _ in run.steps("abc")] for _ in run.epochs(9, max_steps=4)] == [[0, 1, 2], [3]]
    assert list(a_run(tmp_path, {"weight": torch.zeros(1)}).epochs(9, max_steps=4)) == []
    more = a_run(tmp_path, {"weight": torch.zeros(1)})
    assert [[s for s, _ in more.steps("abc")] for _ in more.epochs(9, max_steps=7)] == [[4, 5], [6]]


def test_an_epoch_that_max_steps_ends_exactly_is_complete(tmp_path):
    """With more steps the next one follows, and what stood behind its steps is not done again."""
    for loader in ("abc", Stateful(), DataLoader(range(3))):
        run_dir = tmp_path / type(loader).__name__
        size = len(list(loader))
        seen = []
        for most in (size, 2 * size):
            run = a_run(run_dir, {"weight": torch.zeros(1)})
            seen += [(epoch, len(list(run.steps(loader)))) for epoch in run.epochs(9, max_steps=most)]
        # Of a loader without a length nobody knows that it has ended: its epoch is taken up once more.
        assert [(epoch, count) for epoch, count in seen if count] == [(0, size), (1, size)]
        assert hasattr(loader, "__len__") == (len(seen) == 2)


def test_a_loop_that_is_left_by_break_is_saved_at_the_end_of_the_run(tmp_path, monkeypatch):
    """Early stopping: the evaluation that led to it, and what it left, are in the newest checkpoint, and done once."""
    for leave in (None, SystemExit(0)):
        run_dir = tmp_path / type(leave).__name__
        with contextlib.suppress(SystemExit), a_run(run_dir, {"weight": torch.zeros(1)}) as run:
            monkeypatch.setattr(run, "_end", lambda: None)
            for epoch in run.epochs(9):
                steps = list(run.steps("ab"))
                run.values["best"] = epoch
                if epoch == 1 and leave is not None:
                    raise leave
                if epoch == 1:
                    break
        assert len(steps) == 2
        found = a_run(run_dir, {"weight": torch.zeros(1)})
        assert list(zip(found.epochs(9), range(1), strict=False)) == [(2, 0)]
        assert (found.step, found.values) == (4, {"best": 1})


def test_without_its_process_group_what_followed_the_last_step_is_not_saved(tmp_path, monkeypatch, capsys):
    """A training that was over does not fail for it: that is said, and the checkpoint of its last step is there."""
    run = a_run(tmp_path, {"weight": torch.zeros(1)})
    with run:
        monkeypatch.setattr(run, "_end", lambda: None)
        for _ in run.epochs(9):
            list(run.steps("ab"))
            break
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
            monkeypatch.setenv(name, value)
    assert "the process group is gone" in capsys.readouterr().err
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    assert a_run(tmp_path, {"weight": torch.zeros(1)}).checkpointer.resume() == 2


def test_deadlines_hold_in_the_save_behind_a_body(recording):
    """It waits for all ranks; what stands before it may take any time."""
    seen = []

    class Watched(NoCheckpointer):
        def save(self, step, *, anew=False):
            seen.append((step, anew, recording.snapshot().done))
            return True

    run = Run(None, None)
    run.session = SimpleNamespace(recorder=recording.recorder, may_resume=False)
    run.checkpointer = Watched()
    for _ in run.epochs(2):
        list(run.steps("ab"))
        assert recording.snapshot().done
    assert seen == [(2, False, False), (2, True, False), (4, False, False), (4, True, False)]
    assert recording.snapshot().done


def test_a_step_that_was_cut_short_is_in_no_checkpoint(tmp_path, monkeypatch):
    """Where the program catches what ended its loop, the weights may be those of a step that does not count."""
    weight = torch.zeros(1)
    with a_run(tmp_path, {"weight": weight}, every=2) as run:
        monkeypatch.setattr(run, "_end", lambda: None)
        with contextlib.suppress(KilledError):
            for _ in run.epochs(9):
                for step, _ in run.steps("abc"):
                    weight += 1
                    if step == 4:
                        raise KilledError
    found = torch.zeros(1)
    assert (a_run(tmp_path, {"weight": found}).checkpointer.resume(), found.item()) == (4, 4.0)


def test_an_epoch_counts_although_some_of_its_batches_were_left_out(tmp_path):
    """A body may take a part of the batches by `break`, or none; the next epoch is another one."""
    run = a_run(tmp_path, {"weight": torch.zeros(1)})
    seen = []
    for epoch in run.epochs(3):
        for _, batch in run.steps("abc") if epoch != 1 else ():
            if batch == "c":
                break
            seen.append((epoch, batch))
    assert seen == [(0, "a"), (0, "b"), (2, "a"), (2, "b")]


def test_a_checkpoint_of_either_loop_is_resumed_by_the_other(tmp_path):
    """An epoch whose batches are all read is over to a loop that has nothing behind them."""
    state = {"weight": torch.zeros(1)}
    run = a_run(tmp_path, state, every=2)
    with pytest.raises(KilledError):
        for _ in run.epochs(3):
            list(run.steps(DataLoader(range(4))))
            raise KilledError
    plain = a_run(tmp_path, state)
    assert [step for step, _ in plain.steps(DataLoader(range(4)), epochs=2)] == [4, 5, 6, 7]
    back = a_run(tmp_path, state)
    assert [(epoch, len(list(back.steps(DataLoader(range(4)))))) for epoch in back.epochs(4)] == [(2, 4), (3, 4)]


def test_what_does_not_belong_together_is_refused():
    """Each misuse is told with its cure."""
    with Run(None, None) as run:
        for _ in run.epochs(1):
            for options, cure in (
                ({"epochs": 2}, r"steps\(epochs=2\) inside of run.epochs"),
                ({"max_steps": 5}, r"run.epochs\(.., max_steps=5\)"),
                ({"on_preempt": "return"}, r"run.epochs\(.., on_preempt='return'\)"),
            ):
                with pytest.raises(ConfigError, match=cure):
                    run.steps("ab", **options)
            list(run.steps("ab"))
            with pytest.raises(ConfigError, match="a second time in epoch 0"):
                run.steps("ab")
            with pytest.raises(ConfigError, match=r"run.epochs\(2\) a second time"):
                run.epochs(2)
        with pytest.raises(ConfigError, match="outside of the loop"):
            run.steps("ab")
    with Run(None, None) as run:
        list(run.steps("ab"))
        with pytest.raises(ConfigError, match=r"after run\.steps"):
            run.epochs(2)
        for wrong in (-1, 1.5, "9", True):
            with pytest.raises(ConfigError, match="whole number"):
                run.epochs(wrong)


def test_a_run_that_records_nothing_has_its_epochs_all_the_same():
    """Where the SDK is switched off, it is the plain loop."""
    with Run(None, {"model": object()}) as run:
        assert [(epoch, list(run.steps("ab"))) for epoch in run.epochs(2)] == [
            (0, [(0, "a"), (1, "b")]),
            (1, [(2, "a"), (3, "b")]),
        ]


def test_a_stop_that_is_heard_behind_a_loop_that_was_left_by_break_is_followed(tmp_path):
    """The last save waits at the end of the block then, and all ranks leave to be requeued."""
    run = a_run(tmp_path, {"weight": torch.zeros(1)})
    run.checkpointer.save_patiently = lambda step, **_: End(Unsaved(step, "full", 28), 9.0, is_cut=True)
    with pytest.raises(Preempted), run:
        for _ in run.epochs(EPOCHS):
            for _ in run.steps([1, 2]):
                pass
            break
    assert run.preempted


def test_a_save_in_the_background_that_fails_behind_the_last_step_is_made_again(tmp_path, monkeypatch):
    """Its end is awaited: ranks would hear of it one after the other, and what follows is collective."""
    monkeypatch.setenv(environ.INTERNAL_JOB, "job")  # whose launcher sets the flag
    run = a_run(tmp_path, {})
    failed = threading.Event()

    def stager(_directory):
        def finish():
            failed.wait(0.2)
            raise OSError(28, "full")

        return finish

    def writer(directory):
        (directory / "part").write_text("all")

    run.checkpointer = Checkpointer({}, run_dir=tmp_path, every=1, writer=writer, stager=stager, in_background=True)
    with run:
        for step, _ in run.steps([1, 2, 3]):
            if step == 1:
                break
    assert run.checkpointer.unsaved is None
    assert run.checkpointer.last_good.step == 1
