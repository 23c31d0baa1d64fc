"""Generators that only an object of the training holds: a killed loop draws what an undisturbed one does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow
release = pytest.mark.release

_FRAMEWORKS = {"lightning": "lightning", "trainer": "transformers", "accelerate": "accelerate"}


def steps_of(folder: Path, *args: str, ranks: int = 1, kill_at: int | None = None) -> tuple[list[str], str]:
    """Return what the steps of each rank have told, the newest of each, and the screen."""
    folder.mkdir()
    env = {} if kill_at is None else {"KILL_AT": str(kill_at)}
    launcher = ("--nproc-per-node", str(ranks), "--max-restarts", "1")
    with job(folder, *launcher, "drawing_loops.py", *args, env=env) as run:
        assert run.finish() == 0, run.screen
        screen = run.screen
    assert (folder / "told" / "killed").exists() == (kill_at is not None)
    found = []
    for rank in range(ranks):
        lines = map(json.loads, (folder / "told" / f"steps-{rank}").read_text().splitlines())
        found += [f"{rank}: {line}" for line in {line["step"]: line for line in lines}.values()]
    return sorted(found), screen


def check(folder: Path, way: str, *things: str, ranks: int = 1, kill_at: int = 6) -> str:
    """Compare a killed loop with an undisturbed one; return what the killed one has said."""
    if way in _FRAMEWORKS:
        require(_FRAMEWORKS[way])
    straight, _ = steps_of(folder / "straight", way, *things, ranks=ranks)
    killed, screen = steps_of(folder / "killed", way, *things, ranks=ranks, kill_at=kill_at)
    assert "resumed from" in screen, screen
    different = [one for one in killed if one not in straight]
    assert not different, screen
    assert len(killed) == len(straight)
    return screen


@pytest.mark.parametrize(
    "way", ["attach", *(pytest.param(way, marks=release) for way in ("run", "lightning", "trainer", "accelerate"))]
)
def test_generators_that_a_model_holds(tmp_path: Path, way: str) -> None:
    """Of torch, Python and NumPy, of a callback and a trainer, too."""
    check(tmp_path, way, *(["stateful"] if way == "attach" else []))


@release
def test_generators_of_the_data_in_a_trainers_workers(tmp_path: Path) -> None:
    """The batches of the epoch are read again there."""
    screen = check(tmp_path, "trainer", "workers", "augmented", "collate")
    assert "its workers draw random numbers" in screen, screen


@pytest.mark.parametrize("kill_at", [pytest.param(at, marks=release) for at in (1, 10, 12)] + [6])
@pytest.mark.parametrize(
    "things",
    [
        pytest.param(["augmented", "collate"], marks=release),
        pytest.param(["process"], marks=release),
        ["workers", "augmented", "process"],
    ],
)
def test_what_reading_a_batch_draws_with_accelerate(tmp_path: Path, things: list[str], kill_at: int) -> None:
    """It reads a batch ahead: that one is read with the generators of then. In workers all are read again."""
    screen = check(tmp_path, "accelerate", "each", *things, kill_at=kill_at)
    assert "does not repeat random numbers" not in screen, screen


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=release), 2])
def test_the_order_of_an_evaluation_that_shuffles(tmp_path: Path, ranks: int) -> None:
    """Each pass has another order: a seed and the number of the pass, or a generator."""
    check(tmp_path, "accelerate", "evaluates", "own", ranks=ranks, kill_at=7)


@release
def test_attributes_that_a_trainer_changes_are_said(tmp_path: Path) -> None:
    """A buffer and a counter of its class, at the first save and at the resume; a plain one has none to be said."""
    require("transformers")
    _, screen = steps_of(tmp_path / "own", "trainer", "buffers", kill_at=6)
    for words in ("the attribute buffer of Own", "the place in the iterator Own.other"):
        assert f"a resume will not repeat {words}" in screen, screen
        assert f"this resume does not repeat {words}" in screen, screen
    _, screen = steps_of(tmp_path / "plain", "trainer", kill_at=6)
    assert "of Own" not in screen, screen
    assert "Own." not in screen, screen


@pytest.mark.parametrize(
    "way", ["attach", *(pytest.param(way, marks=release) for way in ("run", "lightning", "trainer", "accelerate"))]
)
def test_what_a_module_holds_beside_its_state_is_said(tmp_path: Path, way: str) -> None:
    """A number that each step changes, at the start and at the resume; nothing of a loop that changes none."""
    if way in _FRAMEWORKS:
        require(_FRAMEWORKS[way])
    _, screen = steps_of(tmp_path / "beside", way, "beside", kill_at=6)
    for words in ("a resume will not repeat", "this resume does not repeat"):
        assert re.search(rf"{words} \S*tau of the module ", screen), screen
    _, screen = steps_of(tmp_path / "plain", way, kill_at=6)
    assert " of the module " not in screen, screen
