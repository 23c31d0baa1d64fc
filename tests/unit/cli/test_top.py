"""`resilience top` without a terminal, and what it takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from told_run import ToldRun

from resilience_sdk.cli import main as command
from resilience_sdk.cli import top


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run directory of a job that has come to nothing."""
    monkeypatch.setenv("RESILIENCE_PAGE_DIR", str(tmp_path))
    told = ToldRun.make(tmp_path)
    told.begin()
    return str(told.run_dir.path)


def test_a_pipe_gets_one_look_as_plain_text(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And the exit code is 0."""
    assert command.main(["top", run]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert "no job holds it" in out
    assert "attempt 0 begins with 2 ranks" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_json_has_the_same(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys are those of the docs, all of them."""
    assert command.main(["top", run, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["attempt"], told["world_size"], told["rows"]) == ("lost", 0, 2, [])
    page = (Path(__file__).parents[3] / "docs" / "top.md").read_text()
    assert [key for key in told if f"`{key}`" not in page] == []
    from views import row

    assert [key for key in row(0).__attrs_attrs__ if f"`{key.name}`" not in page] == []


def test_without_rich_a_terminal_gets_one_look_and_the_cure(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is refused."""
    monkeypatch.setattr(top, "_has_terminal", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert command.main(["top", run]) == 0
    out, err = capsys.readouterr()
    assert "no job holds it" in out
    assert "pip install 'resilience-sdk[top]'" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--once"], ["--json"]])
def test_one_look_needs_a_run_directory(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused in one line: who pipes it waits for an answer."""
    assert command.main(["top", str(tmp_path / "none"), *words]) == 2
    assert capsys.readouterr().err.startswith(f"resilience: there is no run directory {tmp_path / 'none'}")


def test_a_directory_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal too: no run will come there."""
    monkeypatch.setattr(top, "_has_terminal", lambda: True)
    (tmp_path / "thesis.tex").touch()
    assert command.main(["top", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--interval", "0"], ["--interval", "nan"], ["--interval", "x"], ["--sort", "name"]])
def test_mistakes_are_named(run: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with exit code 2."""
    assert command.main(["top", run, *words]) == 2
    assert words[0] in capsys.readouterr().err
