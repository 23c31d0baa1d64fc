"""The settings class: defaults, canonical values and the JSON round trip."""

from __future__ import annotations

import json
import subprocess
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.settings import Settings, settings_from_json
from resilience_sdk.core.settings.fields import FIELDS, default_of
from resilience_sdk.errors import ConfigError

_seconds = st.floats(min_value=0.001, max_value=1e7, allow_nan=False)
_printed = st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=("Z", "C"))  # a blank is no path
_learned = st.none() | _seconds
SETTINGS = st.builds(
    Settings,
    run_dir=st.none() | st.text(_printed, min_size=1, max_size=20),
    on_hang=st.sampled_from([None, "restart", "report", "kill"]),
    initial_heartbeat_timeout=_learned,
    heartbeat_timeout=_learned,
    timeout_floor=_seconds,
    section_timeouts=st.dictionaries(st.text("abc_/", min_size=1), _seconds, max_size=3),
    safety_factor=st.floats(1, 100),
    dump_signal=st.sampled_from(["SIGUSR2", "SIGRTMAX-5", "SIGRTMAX-3"]),
    max_restarts=st.integers(0, 1000),
    stop_if_detected=st.booleans(),
    preempt_signals=st.lists(st.sampled_from(["SIGTERM", "SIGUSR1", "SIGRTMIN+4"]), max_size=3),
    checkpoint_every=st.sampled_from(["auto", 1, 500, "10min"]),
    sources=st.dictionaries(st.sampled_from(sorted(FIELDS)), st.text(max_size=10), max_size=3),
)


@given(SETTINGS)
def test_settings_survive_json(settings: Settings) -> None:
    """What the launcher writes for its ranks is what they read, with what was explicit."""
    again = settings_from_json(json.loads(json.dumps(settings.to_json())))
    assert again == settings
    assert again.explicit == settings.explicit


def test_nothing_is_explicit_by_default() -> None:
    """Defaults are nobody's choice; values given in code are."""
    assert Settings().explicit == frozenset()
    assert Settings(heartbeat_timeout=3).explicit == {"heartbeat_timeout"}


def test_defaults_pass_their_own_readers() -> None:
    """Every default is already in the form that reading gives."""
    for name, field in FIELDS.items():
        assert getattr(Settings(), name) == default_of(field)


def test_defaults_of_the_contract() -> None:
    """The defaults that documents and users rely on."""
    s = Settings()
    assert (s.timeout_floor, s.safety_factor, s.hang_cap) == (30, 5, 3600)
    assert (s.max_restarts, s.max_job_retries, s.report_interval, s.scores_to_print) == (3, 2, 300, 5)
    assert (s.relative_threshold, s.individual_threshold, s.stop_if_detected) == (0.7, 0.7, False)
    assert (s.preempt_signals, s.preempt_time) == (("SIGTERM",), 60)
    assert (s.checkpoint_every, s.checkpoint_keep) == ("auto", 2)
    assert s.heartbeat_timeout is s.initial_heartbeat_timeout is s.out_of_section_timeout is s.on_hang is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heartbeat_timeout", "soon"),
        ("on_hang", "explode"),
        ("safety_factor", 0.5),
        ("relative_threshold", 70),
        ("checkpoint_keep", 1),
        ("run_dir", ""),
        ("dump_signal", "SIGKILL"),
    ],
)
def test_a_bad_value_names_its_field(name: str, value: object) -> None:
    """The error says which setting, and what was given."""
    with pytest.raises(ConfigError, match=name) as caught:
        Settings(**{name: value})
    assert repr(value) in str(caught.value)


def test_one_signal_cannot_mean_two_things() -> None:
    """Dumping stacks on the preemption signal would lose the preemption."""
    with pytest.raises(ConfigError, match="SIGUSR1"):
        Settings(dump_signal="SIGUSR1", preempt_signals="SIGUSR1")


@pytest.mark.parametrize("bad", [{"heartbeat_timout": 3}, {"heartbeat_timeout": "x"}, [], {"sources": 3}])
def test_foreign_json_is_refused(bad: object) -> None:
    """A typo in a handed-down file is found, not dropped."""
    with pytest.raises(ConfigError):
        settings_from_json(bad)  # type: ignore[arg-type]


def test_every_field_is_documented() -> None:
    """In a sentence, which is its row on the page of settings."""
    for field in FIELDS.values():
        assert field.metadata["doc"].endswith(".")


def test_settings_are_light() -> None:
    """Loading them needs neither YAML, torch nor difflib: the monitor imports them."""
    code = (
        "import sys\nfrom resilience_sdk.core.settings import load_settings\n"
        "load_settings(env={}, strict_env=True)\n"
        "bad = {'yaml', 'torch', 'tomllib', 'difflib', 'structlog', 'argparse'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_fields_are_read_only() -> None:
    """Settings are a value."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Settings().max_restarts = 4  # type: ignore[misc]
