"""Loops on DeepSpeed that are killed or preempted at awkward moments end with the same bits as without the SDK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow
STEPS, PER_EPOCH = 12, 3


@pytest.fixture(autouse=True)
def _deepspeed() -> None:
    require("deepspeed", "--no-build-isolation deepspeed==0.19.8")


def run(folder: Path, *words: object, ranks: int = 2, fault: str = "", code: int | None = 0) -> Any:
    """Run the loop, and return the job when it has ended, with that code; None: with an error."""
    folder.mkdir(exist_ok=True)
    env = {"RESILIENCE_FAULT": fault} if fault else {}
    command = ("--nproc-per-node", str(ranks), "deepspeed_exact.py", str(folder / "out"), *map(str, words))
    if fault and not (folder / "out.done").exists():  # it would strike what is trained without the SDK
        (folder / "control").mkdir()
        with job(folder / "control", *command, "--control") as control:
            assert control.finish() == 0, control.screen
    with job(folder, *command, env=env) as started:
        ended = started.finish()
        assert ended == code if code is not None else ended not in (0, 75), started.screen
        return started


def lines(folder: Path, name: str, rank: int) -> dict[str, dict[str, Any]]:
    """Return what the newest try of each part of the training has left."""
    told = (line.partition(" ") for line in (folder / f"{name}.{rank}").read_text().splitlines())
    return {key: json.loads(facts) for key, _, facts in told}


def check_exact(folder: Path, *, ranks: int = 2) -> None:
    """Compare what was trained with and without the SDK."""
    for rank in range(ranks):
        alone, cut = lines(folder, "out", rank), lines(folder, "out.sdk", rank)
        assert set(cut) == set(alone)
        other = {
            key: [name for name, value in facts.items() if value != cut[key][name]]
            for key, facts in alone.items()
            if facts != cut[key]
        }
        assert other == {}, f"rank {rank}"


def test_killed_between_an_epochs_last_step_and_what_follows_it(tmp_path: Path) -> None:
    """Samples, dropout, augmentation, rates, buffers of each rank, objects in `state`; what is behind it is run."""
    done = run(tmp_path, "--killed-behind", 1)
    check_exact(tmp_path)
    tries = [line.split()[0] for line in (tmp_path / "out.sdk.0").read_text().splitlines()]
    assert (tries.count("5.1"), tries.count("behind-1")) == (1, 1), "it went on behind the last step"
    assert "reading its first" not in done.screen
    assert "a resume will not repeat" not in done.screen
    assert "this resume does not repeat" not in done.screen


@pytest.mark.release
@pytest.mark.parametrize("loader", ["random", "own", "repeated", "own-repeated"])
def test_each_loader_goes_on_at_its_place(tmp_path: Path, loader: str) -> None:
    """Also that of `training_data=`, and in a `RepeatingLoader` that has begun its pass before `attach`."""
    run(tmp_path, "--loader", loader, "--every", 2, fault="kill:rank=1,step=5")
    check_exact(tmp_path)
    again = ("--loader", loader, "--every", 2, "--stage", 3, "--slow-from", 5)
    run(tmp_path / "again", *again, fault="preempt:rank=0,step=5", code=75)
    run(tmp_path / "again", *again)
    check_exact(tmp_path / "again")


@pytest.mark.release
def test_a_save_between_two_micro_batches_is_said_and_begins_its_step_anew(tmp_path: Path) -> None:
    """The samples are the same; what dropout draws is not."""
    done = run(tmp_path, "--saves-in-window", 4)
    assert "gradients that were added up since the last step" in done.screen
    for rank in range(2):
        alone, cut = lines(tmp_path, "out", rank), lines(tmp_path, "out.sdk", rank)
        assert set(cut) == set(alone)
        samples = [{key: facts["samples"] for key, facts in one.items() if key[0] != "b"} for one in (alone, cut)]
        assert samples[0] == samples[1]


@pytest.mark.release
def test_what_is_other_at_a_resume_is_said(tmp_path: Path) -> None:
    """Accumulation, and a loop whose loader nobody knows; another number of ranks ZeRO refuses before a step."""
    run(tmp_path, "--every", 2, "--slow-from", 4, fault="preempt:rank=0,step=4", code=75)
    done = run(tmp_path, "--every", 2, "--accumulate", 1, "--batch", 4, "--untold")
    found = {event["limit"] for event in done.events("resume_limit", at_resume=True)}
    assert found == {"deepspeed accumulation", "deepspeed counted", "deepspeed loader"}
    folder = tmp_path / "other"
    first = run(folder, "--every", 2, "--slow-from", 4, fault="preempt:rank=0,step=4", code=75)
    assert first.events("resume_limit") == []
    before = (folder / "out.sdk.0").read_text()
    again = run(folder, "--every", 2, ranks=1, code=None)
    assert "was saved by 2 ranks, and is resumed by 1 rank" in again.screen
    assert (folder / "out.sdk.0").read_text() == before
