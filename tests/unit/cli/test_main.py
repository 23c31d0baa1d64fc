"""The command itself: what it knows, what it refuses, and what it does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from resilience_sdk._version import __version__
from resilience_sdk.cli.main import COMMANDS, main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stauts"], "did you mean status?"),
        (["frobnicate"], "the commands are run"),
        (["train.py"], "resilience run train.py"),
        (["--vers"], "unknown option"),
        (["help", "whi"], "did you mean why?"),
    ],
)
def test_unknown_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error, with the nearest command, and 2."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for it is output; without a command it is an error."""
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in listed
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"run", "supervise", "slurm", "demo"}))
def test_commands_have_help_and_refuse_what_they_do_not_know(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """0 for help; 2 and one line for a mistake, with the option that was probably meant."""
    for words in ([name, "--help"], ["help", name]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
    assert f"resilience {name}" in capsys.readouterr().out
    misspelt, option = ("--prot", "--port") if name == "dashboard" else ("--jsn", "--json")
    for words, hint in (([name, misspelt], f"did you mean {option}?"), ([name, "--bad-luck=7"], f"{name} --help")):
        assert main(words) == 2
        said = capsys.readouterr()
        assert (said.out, len(said.err.splitlines())) == ("", 1)
        assert f"unknown option {words[1].partition('=')[0]}" in said.err
        assert hint in said.err


def test_what_argparse_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A value that is missing, a word too many: without the usage above it."""
    for words, message in ((["why", "--incident"], "expected one argument"), (["status", "a", "b"], "unrecognized")):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        assert message in said
        assert f"resilience {words[0]} --help" in said


def test_reading_commands_need_no_torch() -> None:
    """`python -m resilience_sdk status` works where training does not, and quickly."""
    code = (
        "import sys, resilience_sdk.cli.main as m; assert m.main(['status', '/nowhere']) == 2;"
        "bad = {'torch', 'numpy', 'yaml', 'structlog'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "resilience: there is no run directory /nowhere; check the path\n"
