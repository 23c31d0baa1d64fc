"""Settings on a command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from resilience_sdk.core.settings import Settings
from resilience_sdk.core.settings.fields import FIELDS
from resilience_sdk.core.settings.options import (
    add_setting_options,
    add_short_help,
    config_option,
    first_sentence,
    plain_switches,
    settings_arguments,
    settings_from_options,
)
from resilience_sdk.errors import ConfigError


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tool", description="Does things.")
    parser.add_argument("--often", "--oft_en", metavar="N", help="How often; never more than that. Default: 3.")
    parser.add_argument("-s", "--seldom", action="store_true", help="Seldom used.")
    add_short_help(
        parser, {"usual": ("--often", "--of-another-version"), "help": ("--help", "--help-all")}, usage="X", more="End."
    )
    return parser


def _printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        _parser().parse_args(words)
    said = capsys.readouterr()
    assert (left.value.code, said.err) == (0, "")
    return said.out


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_shows_what_was_chosen(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One spelling each, the first sentence and the default; an option that is not there is passed over."""
    said = _printed(capsys, word)
    assert said.startswith("usage: tool X\n")
    assert "--often N" in said
    assert "How often. Default: 3." in said
    assert "seldom" not in said
    assert "oft_en" not in said
    assert said.endswith("End.\n")


def test_help_all_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    """As argparse prints it."""
    said = _printed(capsys, "--help-all")
    for words in ("--oft_en", "--seldom", "never more than that", "--help-all"):
        assert words in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ""),
        ("One. Two. Default: 3.", "One. Default: 3."),
        ("What it does: this; and more. Default: none.", "What it does: this. Default: none."),
        ("Logs (e.g. /var/log). More", "Logs"),
        ("look at it, as `x` does", "look at it, as `x` does"),
        ("Version 2.4 of it", "Version 2.4 of it"),
    ],
)
def test_a_help_text_in_short(text: str, told: str) -> None:
    """What is left is a sentence; a point in a number or a path ends none."""
    assert first_sentence(text) == told
