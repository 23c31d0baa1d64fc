"""Configuration of NVIDIA's extension: translated, or named; never silently dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience_sdk.core.settings import Settings, load_settings
from resilience_sdk.core.settings.nvrx import translate
from resilience_sdk.errors import ConfigError

NESTED = """
trainer: {devices: 8}
model:
  callbacks:
    - name: x
      fault_tolerance:
        initial_rank_heartbeat_timeout: 600
        rank_heartbeat_timeout: null
        rank_section_timeouts: {setup: 60, step: null}
        rank_out_of_section_timeout: 120.5
        safety_factor: 4
        log_level: DEBUG
        rank_termination_signal: SIGKILL
"""


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ft.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("option", ["config_file", "nvrx_file"])
def test_a_section_at_any_depth(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is found, each key becomes ours, and a line per key says what."""
    settings = load_settings(**{option: _file(tmp_path, NESTED)}, env={}, strict_env=True)
    assert settings.initial_heartbeat_timeout == 600
    assert settings.heartbeat_timeout is None
    assert settings.section_timeouts == {"setup": 60}
    assert settings.out_of_section_timeout == 120.5
    assert settings.safety_factor == 4
    said = capsys.readouterr().err
    assert "initial_rank_heartbeat_timeout=600 became initial_heartbeat_timeout=600" in said
    assert "rank_heartbeat_timeout=null became heartbeat_timeout=learned" in said
    assert "learned: step" in said
    assert "log_level=DEBUG has no counterpart" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fault_tolerance: {rank_heartbeat_timout: 3}",
            "rank_heartbeat_timout.*did you mean rank_heartbeat_timeout",
        ),
        ("fault_tolerance: {rank_heartbeat_timeout: soon}", "rank_heartbeat_timeout: expected"),
        ("fault_tolerance: 3", "expected `name: value`"),
        ("a: {fault_tolerance: {}}\nb: {fault_tolerance: {}}", "2 `fault_tolerance:` sections"),
        ("fault_tolerance: {safety_factor: 0.5}", "safety_factor: expected a number from 1"),
    ],
)
def test_mistakes_are_errors(tmp_path: Path, text: str, message: str) -> None:
    """A typo must not disable a protection."""
    file = _file(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(config_file=file, env={}, strict_env=False)
    assert file in str(caught.value)


def test_a_file_without_the_section(tmp_path: Path) -> None:
    """`--fault-tol-cfg-path` with the wrong file is said."""
    with pytest.raises(ConfigError, match="no `fault_tolerance:` section"):
        load_settings(nvrx_file=_file(tmp_path, "a: 1"), env={}, strict_env=True)


def test_keys_of_frameworks_beside_those_of_the_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NeMo and NeMo RL publish files with keys of their own in the section; each is said, and none is an error."""
    text = """
exp_manager:
  fault_tolerance:
    rank_heartbeat_timeout: 600
    restart_policy: any-failed
    calculate_timeouts: true
    max_rank_restarts: 2
    max_subsequent_job_failures: 1
    additional_ft_launcher_args: ""
    simulated_fault: null
"""
    assert load_settings(nvrx_file=_file(tmp_path, text), env={}, strict_env=True).heartbeat_timeout == 600
    said = capsys.readouterr().err
    for line in (
        "restart_policy=any-failed has no counterpart",
        "max_rank_restarts=2 has no counterpart: restarts are",
    ):
        assert line in said


def test_our_keys_beside_the_section_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file may hold both; keys of other programs are named, a misspelt one of ours is an error."""
    text = "fault_tolerance: {rank_heartbeat_timeout: 5}\nheartbeat_timeout: 7\non_hang: report\n"
    text += "trainer: {gpus: 1}\n"
    settings = load_settings(config_file=_file(tmp_path, text), env={}, strict_env=True)
    assert (settings.heartbeat_timeout, settings.on_hang) == (7, "report")
    assert "not read: trainer" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="did you mean on_hang"):
        load_settings(config_file=_file(tmp_path, text + "on_hangs: kill\n"), env={}, strict_env=True)


def test_an_empty_section_is_fine(tmp_path: Path) -> None:
    """Only defaults, as there."""
    assert load_settings(config_file=_file(tmp_path, "fault_tolerance:\n"), env={}, strict_env=True) == Settings()


def test_a_note_keeps_no_password() -> None:
    """What is said of an address is said on a screen that others may see."""
    [note] = translate({"attribution_endpoint": "http://me:hunter2hunter2@host/x"}, source="x").notes
    assert "hunter2" not in note
    assert "attribution_endpoint" in note


def test_a_note_per_key() -> None:
    """Keys and notes are one to one."""
    section = {"rank_heartbeat_timeout": 10, "max_no_progress_cycles": 3}
    assert len(translate(section, source="x").notes) == 2
