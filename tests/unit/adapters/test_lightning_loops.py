"""Where a fit goes on, and what of it is saved: the parts that need no fit."""

import os
import random
from types import SimpleNamespace

import pytest
import torch
from adapter_frameworks import require
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from resilience_sdk.adapters.lightning import epoch_starts, loops
from resilience_sdk.adapters.lightning.fit import Fit
from resilience_sdk.adapters.lightning.loaders import Draws, LoaderWatch, say_limits, set_draws
from resilience_sdk.adapters.lightning.saves import LostFiles, written_since
from resilience_sdk.core import resume_limits


def counts(processed, completed):
    return {"ready": processed, "started": processed, "processed": processed, "completed": completed}


def saved_loops(*, completed=7, processed=7, is_last=False, epochs=2):
    """What a checkpoint of Lightning says of its loops."""
    progress = {"total": counts(processed, completed), "current": counts(processed, completed)}
    epoch = {"total": counts(epochs, epochs), "current": counts(epochs, epochs)}
    for each in epoch.values():
        each["started"] = each["ready"] = epochs + (completed < processed)
    return {"epoch_loop.batch_progress": {**progress, "is_last_batch": is_last}, "epoch_progress": epoch}


@pytest.mark.parametrize(
    ("completed", "is_last", "moment"),
    [
        (6, False, loops.OWES_EVALUATION),
        (6, True, loops.EPOCH),
        (7, True, loops.EPOCH),
        (7, False, loops.CUT),
    ],
)
def test_a_checkpoint_of_an_earlier_version_says_by_its_counts_where_it_was_made(completed, is_last, moment):
    """Within the hooks of a batch, from where all that follows is owed; or at the end of a training."""
    saved = saved_loops(completed=completed, is_last=is_last)
    found = loops._earlier(saved, [{"place": 1}])
    assert found == {"moment": moment, "data": {"earlier": [{"place": 1}]}}
    progress = saved["epoch_loop.batch_progress"]
    assert progress["total"] == progress["current"] == counts(7, 7)
    assert saved["epoch_progress"]["total"]["completed"] == (3 if completed == 6 and is_last else 2)


def test_an_epoch_that_a_training_ended_within_is_open_again():
    """Where it goes on with more steps, the rest of the epoch comes first."""
    saved = saved_loops(epochs=3)
    loops._take_back_epoch(saved)
    assert saved["epoch_progress"]["total"] == {**counts(3, 3), "processed": 2, "completed": 2}


@pytest.mark.filterwarnings("ignore")
def test_what_a_version_lacks_is_named():
    """And it is no error."""
    assert "fit_loop.setup_data" in loops.missing_seams(SimpleNamespace(strategy=None))
    require("lightning.pytorch", "lightning")
    import lightning.pytorch as pl

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert loops.missing_seams(trainer) == []


def test_files_since_a_moment_that_nobody_knows_of(tmp_path):
    """A directory that is not there has none."""
    for name, time_s in (("old", 100), ("new", 300), ("known", 300)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time_s, time_s))
    assert written_since(tmp_path, {str(tmp_path / "known")}, 200.0) == [str(tmp_path / "new")]
    assert written_since(tmp_path / "none", (), 0.0) == []


def test_a_file_of_the_lost_part_is_written_over_once(tmp_path):
    """What has its name afterwards is a file like any other; so is one that the callback knows."""

    class Best:
        """As `ModelCheckpoint`."""

        dirpath, best_k_models, best_model_path, last_model_path = tmp_path, {str(tmp_path / "a")}, "", ""

        def file_exists(self, path, trainer):
            return os.path.exists(path)

    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    best = Best()
    strategy = SimpleNamespace(broadcast=lambda value: value)
    trainer = SimpleNamespace(checkpoint_callbacks=[best, object()], is_global_zero=True, strategy=strategy)
    lost = LostFiles(trainer, 0.0)
    assert best.file_exists(str(tmp_path / "a"), trainer)
    assert not best.file_exists(str(tmp_path / "b"), trainer)
    assert best.file_exists(str(tmp_path / "b"), trainer)
    lost.detach()
    assert "file_exists" not in vars(best)


# -- data


def test_generators_go_back_to_where_they_were():
    """Of the process and of a loader."""
    numpy = pytest.importorskip("numpy")
    own = {"sampler": torch.Generator().manual_seed(3)}

    def draw():
        return (
            random.random(),
            torch.rand(()).item(),
            numpy.random.rand(),
            torch.rand((), generator=own["sampler"]).item(),
        )

    saved = Draws(own).saved()
    first = draw()
    assert draw() != first
    set_draws(own, saved)
    assert draw() == first
    set_draws(own, None)


class Shuffled:
    """Each pass in another order, and a draw for each batch, as an augmentation makes it."""

    def __iter__(self):
        for index in torch.randperm(6).tolist():
            yield index, torch.rand(()).item()


class Unsized(IterableDataset):
    """The same, for a loader of torch's."""

    def __iter__(self):
        return iter(Shuffled())


class AtOnce(Sampler):
    """Draws an order when it is asked for an iterator, from a generator of its own and that of the process."""

    def __init__(self):
        self.own = random.Random(2)

    def __iter__(self):
        order = torch.randperm(6).tolist()
        self.own.shuffle(order)
        return iter(order)

    def __len__(self):
        return 6


def torchdatas():
    """A loader that goes back by itself."""
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return kind(range(6), batch_size=None, sampler=AtOnce())


def torchdatas_of_torchs_samplers():
    """One that goes back by itself, with samplers of torch's that draw their order with the first batch."""
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return kind(
        range(6), batch_sampler=BatchSampler(RandomSampler(range(6)), 1, False), collate_fn=lambda found: found[0]
    )


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize(
    "make",
    [Shuffled, lambda: DataLoader(Unsized(), batch_size=None), torchdatas, torchdatas_of_torchs_samplers],
)
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("batches", [1, 3, 5])
def test_a_pass_goes_on_behind_the_batches_that_were_trained_on(make, ahead, batches):
    """With the generators of this process as they were for the next one, fetched ahead or not."""
    torch.manual_seed(batches)
    loader = make()
    kind = type(loader)
    watch = LoaderWatch(loader, lambda: bool(ahead))
    iterator = iter(loader)
    for _ in range(batches + ahead):
        last = next(iterator)
        torch.rand(3)  # what the model draws
    place = watch.capture(ahead)
    state = torch.get_rng_state()
    rest = ([last] if ahead else []) + list(iterator)
    torch.manual_seed(99)  # another process
    other = make()
    again = LoaderWatch(other, lambda: bool(ahead))
    again.place = place
    resumed = iter(other)
    found = [next(resumed)] if ahead else []
    torch.set_rng_state(state)
    assert found + list(resumed) == rest
    watch.restore()
    assert type(loader) is kind


def test_a_held_loader_gives_nothing_and_draws_nothing():
    """Until all is back that its order is drawn from."""
    loader = Shuffled()
    watch = LoaderWatch(loader, lambda: False)
    watch.is_held = True
    before = torch.get_rng_state()
    assert list(loader) == []
    assert torch.equal(torch.get_rng_state(), before)
    watch.is_held = False
    assert len(list(loader)) == 6


# -- what is said


@pytest.fixture
def noted(monkeypatch):
    """Return the keys of the limits of a resume that this test has noted."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    return lambda: [limit.key for limit in resume_limits.limits()]


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize(
    ("torchdatas", "options", "limits"),
    [
        (False, {}, []),  # read again, by workers that are seeded as they were
        (False, {"persistent_workers": True}, ["augmentation in workers"]),
        (False, {"in_order": False}, ["order of workers"]),
        (True, {}, ["augmentation in workers"]),
        (True, {"num_workers": 0}, []),
    ],
)
def test_workers_that_would_draw_other_numbers_are_said(torchdatas, options, limits, noted):
    """Their samples are the same."""
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader if torchdatas else DataLoader
    say_limits(kind(list(range(4)), **{"num_workers": 1, **options}))
    assert noted() == limits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saves", [True, False])
def test_an_averaging_that_begins_its_schedule_anew_is_said(saves, noted):
    """Of Lightning's own callback and what is made from it; where nothing is saved nothing is resumed."""
    require("lightning.pytorch", "lightning")
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    class Own(StochasticWeightAveraging):
        """A user's."""

    trainer = SimpleNamespace(callbacks=[Own(swa_lrs=0.1)], lightning_module=object())
    Fit._say_limits(SimpleNamespace(trainer=trainer, _checkpointer=object() if saves else None))
    assert noted() == (["swa"] if saves else [])


def test_an_accumulation_that_goes_by_the_epoch_is_that_of_the_resumed_epoch():
    """Lightning's scheduler sets it where an epoch begins, and is not called for the rest of one."""
    require("lightning.pytorch", "lightning")
    from lightning.pytorch import callbacks

    scheduler = callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})
    trainer = SimpleNamespace(callbacks=[callbacks.Timer(), scheduler], current_epoch=1, accumulate_grad_batches=1)
    epoch_starts.go_on(trainer)
    assert trainer.accumulate_grad_batches == 2


def test_hooks_of_the_users_that_lightning_leaves_out_in_mid_epoch_are_known():
    """Whether a class has one, or a callback was given one; those of Lightning are not the user's."""
    require("lightning.pytorch", "lightning")
    from lightning import pytorch as pl

    class Weighted(pl.LightningModule):
        def on_train_epoch_start(self):
            self.weight = self.current_epoch

    class Below(Weighted):
        pass

    given = pl.callbacks.LambdaCallback(on_train_epoch_start=lambda *_: None)
    library = [pl.LightningModule(), pl.callbacks.Timer(), pl.callbacks.GradientAccumulationScheduler({1: 2})]
    assert epoch_starts.own_hooks([Below(), *library, given, Weighted()]) == ["Below", "LambdaCallback", "Weighted"]
    assert epoch_starts.own_hooks(library) == []
