"""The command before it serves: what it refuses, each in one line with the cure."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from resilience_sdk.cli.main import main
from resilience_sdk.core import environ
from resilience_sdk.dashboard.access import token_of
from resilience_sdk.errors import ConfigError


@pytest.mark.parametrize("module", ["jinja2", "starlette", "uvicorn"])
def test_a_missing_extra_names_its_cure(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, whichever library is missing."""
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["dashboard"]) == 2
    said = capsys.readouterr().err
    assert "pip install 'resilience-sdk[dashboard]'" in said
    assert len(said.splitlines()) == 1


def test_a_port_that_is_taken_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the way out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["dashboard", str(tmp_path), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in said
    assert "--port 0" in said


@pytest.mark.parametrize(("text", "token"), [("none", None), ("t0ken", "t0ken")])
def test_a_token_is_what_the_variable_holds(text: str, token: str | None) -> None:
    """`none` is none."""
    assert token_of(text) == token


def test_without_the_variable_there_is_a_token_of_its_own() -> None:
    """Every user of a machine reaches its loopback address; a random text cannot be guessed, and no two are alike."""
    made = {token_of(text) for text in (None, "", None)}
    assert len(made) == 3
    assert all(token is not None and len(token) >= 32 and token_of(token) == token for token in made)


@pytest.mark.parametrize("text", ["two words", "\xe9", "x" * 257, "line\n"])
def test_a_token_that_no_request_could_bring_is_refused(text: str) -> None:
    """With the name of the variable."""
    with pytest.raises(ConfigError, match=environ.DASHBOARD_TOKEN):
        token_of(text)


def test_the_variable_is_a_known_one() -> None:
    """So that no command warns of it."""
    assert environ.DASHBOARD_TOKEN in environ.NON_FIELDS
