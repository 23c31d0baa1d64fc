"""Each example is short, is quick, and keeps every promise that `resilience rehearse` can hold against it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from adapter_frameworks import require

from tests.rehearsals import EXAMPLES, REHEARSED, rehearse

WITHOUT_GPU = {"megatron_train.py": "megatron_on_cpu.py"}
EVERY_DAY = "full_run.py"  # the others are rehearsed by the lane `release`
LONGEST_S = 100.0  # of one job that takes 5 to 15 s where nothing else runs


def test_every_example_is_short_and_rehearsed() -> None:
    """At most 80 lines, its first ones say how it is started, and none is forgotten below."""
    files = sorted(EXAMPLES.glob("*.py"))
    assert {path.name for path in files} == {*REHEARSED, *WITHOUT_GPU}
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 80, path.name
        assert f"examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or ""), path.name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [name if name == EVERY_DAY else pytest.param(name, marks=pytest.mark.release) for name in REHEARSED],
)
def test_an_example_keeps_its_promises(name: str, tmp_path: Path) -> None:
    """Undisturbed, and under the faults that tell most of it: none is broken, none skipped without its known reason."""
    example = REHEARSED[name]
    if example.needs is not None:
        require(*example.needs)
    done = rehearse(tmp_path, *example.telling, script=EXAMPLES / name)
    assert done.surprises(example.skips) == [], done.screen
    assert (done.code, done.left) == (0, [])
    [undisturbed] = [one for one in done.document["faults"] if one["fault"] == "none"]
    assert undisturbed["seconds"] < LONGEST_S
