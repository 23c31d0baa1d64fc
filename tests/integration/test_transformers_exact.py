"""A Trainer that is killed or asked to leave repeats all of an undisturbed one: samples, numbers, records, weights."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def framework():
    """Transformers is here, or these tests are skipped."""
    require("transformers", "transformers accelerate")


@attrs.frozen
class Told:
    """What one training has told, over all of its attempts and starts."""

    code: int
    screen: str
    records: list[dict[str, Any]]

    def of(self, kind):
        """Return the records of a kind by their step: what was done twice is there as it was done last."""
        return {record["step"]: record for record in self.records if record["kind"] == kind}

    @property
    def end(self):
        """What the training has ended with."""
        return [record for record in self.records if record["kind"] == "end"][-1]


def told(folder, rank=0, code=0, screen=""):
    """Return what a rank has told there."""
    lines = (folder / "told" / f"exact-{rank}").read_text().splitlines()
    return Told(code, screen, [json.loads(line) for line in lines])


def train(folder, *args, ranks=1, code=0, restarts=3, **options):
    """Train under the launcher; `options` are arguments of the training."""
    folder.mkdir(exist_ok=True)
    words = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    script = ("transformers_exact.py", *map(str, args), *words)
    launcher = ("--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
    with job(folder, *launcher, *script, framework="transformers") as run:
        assert run.finish() == code, run.screen
        return told(folder, code=code, screen=run.screen)


def differences(straight, other):
    """Return what a disturbed training has done otherwise, in words, the first step first."""
    found = []
    for kind in ("step", "evaluation"):
        wanted = straight.of(kind)
        if {*wanted} != {*other.of(kind)}:
            found.append(f"{kind}s {sorted({*wanted} ^ {*other.of(kind)})}")
        # Also what was done and then lost, and each time that it was done.
        for record in (one for one in other.records if one["kind"] == kind):
            names = [name for name, value in record.items() if value != wanted.get(record["step"], {}).get(name)]
            found += [f"{kind} {record['step']}: {name}" for name in names]
    return found + [f"end: {name}" for name, value in straight.end.items() if other.end[name] != value]


EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 2}


@pytest.mark.release
def test_an_evaluation_that_was_never_timed_is_made_by_what_resumes(tmp_path):
    """Nobody knows whether it fits. It is made before the first step, with the generators of the save.

    The loss that is logged next is of the steps before the stop, too, and two callbacks of one class have their states.
    """
    options = {"save_strategy": "no", "logging_steps": 5}
    left = train(tmp_path / "cut", "--leave-at", 2, "--evaluate-at-stop", code=75, **options)
    at = max(left.of("step"))
    assert f"the evaluation of step {at} is made by what resumes" in left.screen
    assert not left.of("evaluation")
    straight = train(tmp_path / "straight", "--evaluate-at", at, **options)
    resumed = train(tmp_path / "cut", **options)
    assert [*resumed.of("evaluation")] == [at]
    assert differences(straight, resumed) == []


@pytest.mark.release
def test_an_evaluation_that_fits_is_made_before_the_save(tmp_path):
    """With all that hangs on it: best marks, the patience of an early stop, a checkpoint that only the stop made."""
    options = EVERY_STEP | {"save_steps": 3, "load_best_model_at_end": True, "save_total_limit": 1}
    straight = train(tmp_path / "straight", "--patience", 5, **options)
    left = train(tmp_path / "cut", "--patience", 5, "--leave-at", 4, code=75, **options)
    assert max(left.of("step")) in left.of("evaluation")
    resumed = train(tmp_path / "cut", "--patience", 5, **options)
    assert differences(straight, resumed) == []


@pytest.mark.release
@pytest.mark.parametrize("draws", [True, False])
def test_a_stream_without_length_goes_on_in_its_second_pass(tmp_path, draws):
    """Where it was, with the records of that pass; each sample with the random numbers that it was read with."""
    args = ("--stream", 18, *["--draws"] * draws)
    straight = train(tmp_path / "straight", *args, max_steps=14)
    killed = train(tmp_path / "killed", *args, "--kill-at", 8, max_steps=14)
    assert "step 6 is next" in killed.screen
    assert differences(straight, killed) == []


@pytest.mark.release
@pytest.mark.parametrize(
    "options",
    [
        {"dataloader_num_workers": 0, "save_steps": 1},
        {"gradient_accumulation_steps": 2, "save_steps": 2},
        {"dataloader_num_workers": 2},
        {"accelerator_config": {"use_seedable_sampler": False}},
    ],
    ids=str,
)
def test_a_dataset_that_draws_random_numbers(tmp_path, options):
    """The batch that was read ahead of the save is read again with the generators of then."""
    straight = train(tmp_path / "straight", "--draws", **options)
    killed = train(tmp_path / "killed", "--draws", "--kill-at", 9, **options)
    assert "is next" in killed.screen
    assert differences(straight, killed) == []


@pytest.mark.release
def test_two_ranks_and_a_stream(tmp_path):
    """Rank 0 reads for both."""
    args = ("--stream", 40, "--draws")
    train(tmp_path / "straight", *args, ranks=2, max_steps=14)
    train(tmp_path / "killed", *args, "--kill-at", 9, ranks=2, max_steps=14)
    for rank in range(2):
        assert differences(told(tmp_path / "straight", rank), told(tmp_path / "killed", rank)) == []


@pytest.mark.release
@pytest.mark.parametrize("save_strategy", ["steps", "epoch"])
def test_killed_in_the_evaluation_of_an_epoch(tmp_path, save_strategy):
    """The save of the epoch's last step was made before it: all that belongs to the epoch's end is made again."""
    options = {"save_steps": 5, "save_strategy": save_strategy, "eval_strategy": "epoch", "logging_strategy": "epoch"}
    options |= {"max_steps": 15}
    straight = train(tmp_path / "straight", **options)
    killed = train(tmp_path / "killed", "--kill-in-evaluation", 10, **options)
    assert f"step {10 if save_strategy == 'steps' else 5} is next" in killed.screen
    assert differences(straight, killed) == []


@pytest.mark.release
def test_an_early_stop_stays_one(tmp_path):
    """What is started again behind it makes no step, though it could make more."""
    options = EVERY_STEP | {"save_steps": 1, "load_best_model_at_end": True, "learning_rate": 1.0, "max_steps": 20}
    straight = train(tmp_path / "straight", "--patience", 2, **options)
    assert straight.end["step"] < 20
    killed = train(tmp_path / "killed", "--patience", 2, "--kill-at", straight.end["step"] - 1, **options)
    assert differences(straight, killed) == []
    (tmp_path / "killed" / "run" / "finished").unlink()
    again = train(tmp_path / "killed", "--patience", 2, **options)
    assert differences(straight, again) == []


def numbers(records):
    """Return the numbers of all samples that were trained."""
    steps = [record["seen"] for record in records if record["kind"] == "step"]
    return [number for seen in steps for batch, _ in seen for number in batch]


@pytest.mark.release
def test_another_accumulation_is_said_and_no_sample_comes_twice(tmp_path):
    """With the cure; the place in the epoch is found by its samples."""
    options = {"num_train_epochs": 2, "max_steps": -1, "save_steps": 4}
    killed = train(tmp_path / "run", "--kill-at", 5, code=1, restarts=0, **options)
    resumed = train(tmp_path / "run", gradient_accumulation_steps=2, **options)
    [line] = [one for one in resumed.screen.splitlines() if "does not repeat the samples of each step" in one]
    assert "1 rank x batch 4 x accumulation 2 in place of 1 rank x batch 4 x accumulation 1" in line
    seen = [*numbers(killed.records[:4]), *numbers(resumed.records[len(killed.records) :])]
    assert sorted(seen) == sorted([*range(20)] * 2)


@pytest.mark.release
def test_fewer_ranks_are_said_and_no_sample_comes_twice(tmp_path):
    """The number of steps changes, and with it the schedule."""
    options = {"num_train_epochs": 3, "max_steps": -1, "save_steps": 5}
    args = ("--samples", 24)
    killed = train(tmp_path / "run", *args, "--kill-at", 6, ranks=2, code=1, restarts=0, **options)
    other = told(tmp_path / "run", rank=1)
    resumed = train(tmp_path / "run", *args, **options)
    assert "1 rank x batch 4 x accumulation 1 in place of 2 ranks x batch 4 x accumulation 1" in resumed.screen
    assert "gradient_accumulation_steps=2" in resumed.screen
    seen = [*numbers(killed.records[:5]), *numbers(other.records[:5])]
    seen += numbers(resumed.records[len(killed.records) :])
    assert sorted(seen) == sorted([*range(24)] * 3)


def test_more_ranks_go_on_though_some_have_nothing_to_compare(tmp_path):
    """Ranks that were not there at the save have their part in each collective of the resume."""
    options = {"num_train_epochs": 2, "max_steps": -1, "save_steps": 3}
    args = ("--samples", 24)
    killed = train(tmp_path / "run", *args, "--kill-at", 4, code=1, restarts=0, **options)
    resumed = train(tmp_path / "run", *args, ranks=2, **options)
    assert "2 ranks x batch 4 x accumulation 1 in place of 1 rank x batch 4 x accumulation 1" in resumed.screen
    seen = [*numbers(killed.records[:3]), *numbers(resumed.records[len(killed.records) :])]
    seen += numbers(told(tmp_path / "run", rank=1).records)
    assert {*seen} == {*range(24)}
