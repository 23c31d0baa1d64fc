"""Settings on a command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from resilience_sdk.errors import ConfigError
from resilience_sdk.settings import Settings
from resilience_sdk.settings.fields import FIELDS
from resilience_sdk.settings.options import (
    add_setting_options,
    config_option,
    plain_switches,
    settings_arguments,
    settings_from_options,
)


def _parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-restarts", "--max_restarts", type=int, default=0)  # torchrun has it too
    add_setting_options(parser)
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser.parse_args([*words, "train.py", "--max-restarts", "of-the-script"])


def test_only_given_options_count() -> None:
    """A default is not a choice."""
    assert settings_arguments(_parse()) == {}
    assert settings_from_options(_parse(), env={}) == Settings()


def test_every_field_is_an_option() -> None:
    """With dashes and with underscores; switches take no value, so the script is never swallowed."""
    for name, field in FIELDS.items():
        for option in (f"--{name.replace('_', '-')}", f"--{name}"):
            words = [option] if isinstance(field.default, bool) else [option, "7"]
            namespace = _parse(*words)
            assert list(settings_arguments(namespace)) == [name]
            assert namespace.script == "train.py"
    assert settings_arguments(_parse("--no-stop-if-detected")) == {"stop_if_detected": False}


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        ("--stop-if-detected true train.py --stop-if-detected no", "--stop-if-detected train.py --stop-if-detected no"),
        ("--stop_if_detected=Off train.py", "--no-stop-if-detected train.py"),
        ("--run-dir D --stop-if-detected 0 train.py x", "--run-dir D --no-stop-if-detected train.py x"),
        ("--run-dir=D --stop-if-detected train.py x", "--run-dir=D --stop-if-detected train.py x"),
        ("--stop-if-detected --group-readable on -- true", "--stop-if-detected --group-readable -- true"),
        ("--no-stop-if-detected true", "--no-stop-if-detected true"),
        ("train.py --stop-if-detected=no", "train.py --stop-if-detected=no"),
        ("--run-dir", "--run-dir"),
        ("--stop-if-detected", "--stop-if-detected"),
    ],
)
def test_a_switch_may_have_its_value(words: str, plain: str) -> None:
    """As `--name=off` or `--name off`; words of the script are left as they are."""
    assert plain_switches(words.split(), lambda option: option == "--run-dir") == plain.split()


def test_a_switch_with_another_value_is_refused() -> None:
    """Only behind `=`: a word behind it is the script."""
    with pytest.raises(ConfigError, match="--stop-if-detected: expected true or false, not 'maybe'"):
        plain_switches(["--stop-if-detected=maybe"], lambda _: False)


def test_options_over_environment_over_file(tmp_path: Path) -> None:
    """The whole chain from one command line."""
    file = tmp_path / "c.yaml"
    file.write_text("max_restarts: 1\nhang_cap: 5\n")
    namespace = _parse("--config", str(file), "--max-restarts=4", "--section-timeouts", "a:10,b:null")
    assert config_option(namespace) == str(file)
    settings = settings_from_options(namespace, env={"RESILIENCE_MAX_RESTARTS": "2"})
    assert (settings.max_restarts, settings.hang_cap, settings.section_timeouts) == (4, 5, {"a": 10})


def test_options_of_nvidias_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both of their spellings are read; ours wins; the file is the weakest."""
    file = tmp_path / "ft.yaml"
    file.write_text("fault_tolerance: {rank_heartbeat_timeout: 1, rank_out_of_section_timeout: 2}")
    namespace = _parse(
        "--fault-tol-cfg-path", str(file), "--ft-param-rank_heartbeat_timeout", "30",
        "--ft-initial-rank-heartbeat-timeout=40", "--initial-heartbeat-timeout", "50",
    )  # fmt: skip
    settings = settings_from_options(namespace, env={})
    assert settings.heartbeat_timeout == 30
    assert settings.initial_heartbeat_timeout == 50
    assert settings.out_of_section_timeout == 2
    assert "--ft-param-rank_heartbeat_timeout=30 became heartbeat_timeout=30" in capsys.readouterr().err


def test_a_bad_option_names_itself() -> None:
    """The option is named as it was written."""
    with pytest.raises(ConfigError, match=r"--hang-cap.*'soon'"):
        settings_from_options(_parse("--hang-cap", "soon"), env={})
    with pytest.raises(ConfigError, match=r"--ft-param-rank_heartbeat_timeout.*'soon'"):
        settings_arguments(_parse("--ft-param-rank_heartbeat_timeout", "soon"))


def test_help_shows_docs_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """The text of a field is its help."""
    with pytest.raises(SystemExit):
        _parse("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "--heartbeat-timeout SECONDS" in said
    assert "Default: learned; 600 before that." in said
    assert "ft-param" not in said


def test_torchruns_own_parser_takes_them() -> None:
    """Options that torchrun has too are replaced, and its script arguments stay the script's."""
    run = pytest.importorskip("torch.distributed.run")
    parser = run.get_args_parser()
    add_setting_options(parser)
    namespace = parser.parse_args(["--nproc-per-node", "2", "--max_restarts", "7", "x.py", "--hang-cap", "3"])
    assert settings_arguments(namespace) == {"max_restarts": "7"}
    assert namespace.training_script_args == ["--hang-cap", "3"]
