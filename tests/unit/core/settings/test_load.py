"""Where settings come from, and what a mistake in each place does."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience_sdk.core.settings import Settings, load_settings, override_settings
from resilience_sdk.core.settings.load import read_file
from resilience_sdk.errors import ConfigError


def _file(tmp_path: Path, text: str, name: str = "config.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_precedence(tmp_path: Path) -> None:
    """Argument over environment over file over default, each source remembered."""
    file = _file(tmp_path, "max_restarts: 1\nsafety_factor: 2\nhang_cap: 10min\n")
    env = {"RESILIENCE_MAX_RESTARTS": "5", "RESILIENCE_SAFETY_FACTOR": "6"}
    settings = load_settings(arguments={"max_restarts": 9}, config_file=file, env=env, strict_env=True)
    assert (settings.max_restarts, settings.safety_factor, settings.hang_cap) == (9, 6, 600)
    assert settings.timeout_floor == Settings().timeout_floor
    assert settings.explicit == {"max_restarts", "safety_factor", "hang_cap"}
    assert settings.sources == {
        "max_restarts": "argument",
        "safety_factor": "RESILIENCE_SAFETY_FACTOR",
        "hang_cap": file,
    }


def test_toml_file(tmp_path: Path) -> None:
    """TOML says the same as YAML; dashes are as good as underscores."""
    file = _file(tmp_path, 'heartbeat-timeout = "2min"\n[section_timeouts]\neval = 600\n', "c.toml")
    settings = load_settings(config_file=file, env={}, strict_env=True)
    assert settings.heartbeat_timeout == 120
    assert settings.section_timeouts == {"eval": 600}


def test_config_variable_names_a_file(tmp_path: Path) -> None:
    """RESILIENCE_CONFIG is read when no file is given as argument."""
    env = {"RESILIENCE_CONFIG": _file(tmp_path, "max_restarts: 8")}
    assert load_settings(env=env, strict_env=True).max_restarts == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heartbeat_timout: 3", "heartbeat_timout.* 3; did you mean heartbeat_timeout"),
        ("heartbeat_timeout: soon", "heartbeat_timeout: expected .*'soon'"),
        ("- a\n- b", "expected `name: value`"),
        ("a: [", "not valid YAML"),
        ("max_restarts: 1\nmax-restarts: 2", "given twice"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_mistake_in_a_file_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    """The error names the file, the key, the value and what was probably meant; nothing is executed."""
    file = _file(tmp_path, text)
    for strict in (True, False):
        with pytest.raises(ConfigError, match=message) as caught:
            load_settings(config_file=file, env={}, strict_env=strict)
        assert file in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_unreadable_file(tmp_path: Path, content: bytes | None) -> None:
    """A file that is missing, or no text, is named."""
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_settings(config_file=str(path), env={}, strict_env=False)


def test_an_empty_file_is_no_settings(tmp_path: Path) -> None:
    """A template with everything commented out is fine."""
    assert load_settings(config_file=_file(tmp_path, "# nothing\n"), env={}, strict_env=True) == Settings()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"RESILIENCE_HEARTBEAT_TIMOUT": "3"},
            "RESILIENCE_HEARTBEAT_TIMOUT='3'.*mean RESILIENCE_HEARTBEAT_TIMEOUT",
        ),
        (
            {"RESILIENCE_ON_HANG": "restrat"},
            "RESILIENCE_ON_HANG: expected one of restart, report, kill, not 'restrat'",
        ),
        ({"RESILIENCE_CONFIG": "/nowhere/c.yaml"}, "/nowhere/c.yaml"),
        ({"RESILIENCE_DUMP_SIGNAL": "SIGTERM"}, "SIGTERM is both"),
    ],
)
def test_a_mistake_in_the_environment(env: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line an error; in an implicit start one warning, and the default holds."""
    with pytest.raises(ConfigError, match=message):
        load_settings(env=env, strict_env=True)
    for _ in range(2):
        settings = load_settings(env={**env, "RESILIENCE_MAX_RESTARTS": "1"}, strict_env=False)
        assert settings.on_hang is None
        assert settings.dump_signal == Settings().dump_signal
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "default holds" in said[0]


def test_good_variables_survive_a_bad_one() -> None:
    """One typo does not throw the other settings away."""
    env = {"RESILIENCE_ON_HANG": "x", "RESILIENCE_MAX_RESTARTS": "1"}
    assert load_settings(env=env, strict_env=False).max_restarts == 1


def test_only_rank_0_warns(capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand ranks share one environment; one of them speaks."""
    load_settings(env={"RESILIENCE_ON_HANG": "x", "RANK": "3", "WORLD_SIZE": "8"}, strict_env=False)
    assert capsys.readouterr().err == ""


def test_known_variables_that_are_no_settings() -> None:
    """Internal variables, switches and empty values are not settings."""
    env = {
        "RESILIENCE_INTERNAL_WHATEVER": "1",
        "RESILIENCE_DISABLE": "0",
        "RESILIENCE_FAULT": "hang",
        "RESILIENCE_MAX_RESTARTS": "",
        "OTHER": "x",
    }
    assert load_settings(env=env, strict_env=True) == Settings()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_restart": 1}, "max_restart'; did you mean max_restarts"),
        ({"max_restarts": "x"}, "--max-restarts"),
    ],
)
def test_a_mistake_in_an_argument_always_raises(arguments: dict[str, object], message: str, strict: bool) -> None:
    """Code and command lines are read by their writer."""
    with pytest.raises(ConfigError, match=message):
        load_settings(arguments=arguments, env={}, strict_env=strict)


def test_override() -> None:
    """Arguments of `start_run` go over what the launcher handed down, which stays where they say nothing."""
    base = load_settings(arguments={"max_restarts": 7}, env={}, strict_env=True)
    settings = override_settings(base, {"heartbeat_timeout": "5s"})
    assert (settings.max_restarts, settings.heartbeat_timeout) == (7, 5)
    assert settings.explicit == {"max_restarts", "heartbeat_timeout"}
    with pytest.raises(ConfigError, match="did you mean heartbeat_timeout"):
        override_settings(base, {"heartbeat_timeot": 3})


def test_a_few_aliases_and_merges_are_what_yaml_has_them_for(tmp_path: Path) -> None:
    """People share a table between jobs."""
    path = tmp_path / "a.yaml"
    path.write_text("base: &base {timeout_floor: 3}\nmine:\n  <<: *base\n  hang_cap: 5\nagain: [*base, *base]\n")
    assert read_file(path)["mine"] == {"timeout_floor": 3, "hang_cap": 5}


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    """Kubernetes mounts configurations as links."""
    (tmp_path / "a.yaml").write_text("hang_cap: 5\n")
    (tmp_path / "b.yaml").symlink_to(tmp_path / "a.yaml")
    assert read_file(tmp_path / "b.yaml") == {"hang_cap": 5}


@pytest.mark.parametrize(
    "text", ["a: !!int ''", "a: !!timestamp never", "a: 2001-99-99", "? {a: 1}\n: b", "a: !!float x"]
)
def test_whatever_a_tag_makes_python_raise_is_one_error(tmp_path: Path, text: str) -> None:
    """PyYAML lets IndexError, AttributeError and others through."""
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_file(tmp_path / "a.yaml")
