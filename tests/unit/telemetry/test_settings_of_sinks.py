"""Every sink is named by a setting; its secrets do not leave the process that needs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from told_run import ToldRun

from resilience_sdk.core.journal import Event
from resilience_sdk.core.redaction import redact_argv
from resilience_sdk.core.settings import Settings, load_settings, settings_from_json
from resilience_sdk.core.settings.fields import SINK_FIELDS
from resilience_sdk.errors import ConfigError
from resilience_sdk.telemetry.exporter import ExporterTask, task_from_json
from resilience_sdk.telemetry.sinks import find_unknown, named_sinks, wanted_sinks

GIVEN = {
    "prometheus_address": "9464",
    "prometheus_textfile": "/var/lib/node_exporter",
    "otlp_endpoint": "http://localhost:4318",
    "webhook_url": "https://hooks.example.org/T0/s3cret",
    "tensorboard_dir": "tb",
    "wandb_project": "resilience",
    "mlflow_uri": "http://localhost:5000",
    "db": "history.db",
    "sinks": "tensorboard=curves",
    "event_log": "json",
}


@pytest.mark.parametrize("name", [*SINK_FIELDS, "event_log"])
def test_a_setting_asks_for_one_sink(tmp_path: Path, name: str) -> None:
    """The launcher starts an exporter for it, and the exporter makes that sink; neither needs its library for that."""
    settings = Settings(**{name: GIVEN[name]})
    assert settings.asks_for_telemetry
    place, failed = ToldRun.make(tmp_path).place(), []
    made = [*wanted_sinks(settings, place), *named_sinks(settings, place, lambda *what: failed.append(what))]
    assert (len(made), failed) == (1, [])


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("tensor-bord=x", "there is no sink 'tensor-bord'; there are console, history,"),
        ("no.such.module:Log=x", "No module named 'no'"),
        ("json:dumps=x", "expected a class below resilience_sdk.telemetry.sinks.base.Sink"),
        ("webhook=x", "missing 1 required positional argument"),
    ],
)
def test_a_sink_that_is_not_to_be_had_is_left_out(tmp_path: Path, named: str, why: str) -> None:
    """It is told with what would be right, and the others are made."""
    failed: dict[str, Exception] = {}
    settings = Settings(sinks=f"{named},tensorboard=curves")
    made = named_sinks(settings, ToldRun.make(tmp_path).place(), failed.__setitem__)
    assert [sink.name for sink in made] == ["tensorboard"]
    assert why in str(failed[named.partition("=")[0]])


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("tensor-bord=x", "there is no sink 'tensor-bord'; there are console, history,"),
        ("no.such.module:Log=x", "there is no module 'no.such.module'"),
        ("json:dumps=x", None),  # what is in it is not known before it is imported, where the sinks are
        ("tensorboard=x", None),
    ],
)
def test_a_name_that_nobody_has_is_known_without_an_import(named: str, why: str | None) -> None:
    """So that a launcher can refuse it before the job begins."""
    told = find_unknown(Settings(sinks=named))
    assert (why is None and told == []) or (why is not None and why in told[0])


@pytest.mark.parametrize("bad", ["log", "=x", "log=", {"log": 3}, 3])
def test_sinks_without_an_address(bad: object) -> None:
    """The error shows how they are written."""
    with pytest.raises(ConfigError, match=r"sinks.*incident-log=/var/log/incidents"):
        Settings(sinks=bad)


def test_nobody_is_told_anything_by_default(tmp_path: Path) -> None:
    """No port, no outbound connection, no process."""
    assert not Settings().asks_for_telemetry
    assert wanted_sinks(Settings(), ToldRun.make(tmp_path).place()) == []


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (9464, ("127.0.0.1", 9464)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:9464", ("::1", 9464)),
        (["127.0.0.1", 1], ("127.0.0.1", 1)),
        (["::1", 1], ("::1", 1)),
        ("none", None),
    ],
)
def test_addresses_to_listen_at(given: object, address: object) -> None:
    """A port alone is this host's own."""
    assert Settings(prometheus_address=given).prometheus_address == address


@pytest.mark.parametrize("bad", ["x", "70000", "::1:9464", "host:", "http://host:1", "a b:1", True, -1])
def test_bad_addresses(bad: object) -> None:
    """The error says what was expected."""
    with pytest.raises(ConfigError, match="prometheus_address"):
        Settings(prometheus_address=bad)


def test_other_hosts_are_not_served_without_a_decision() -> None:
    """A token, or the word that none is wanted."""
    with pytest.raises(ConfigError, match="prometheus_token"):
        Settings(prometheus_address="0.0.0.0:9464")
    for token in ("s3cret", "none"):
        assert Settings(prometheus_address="0.0.0.0:9464", prometheus_token=token).prometheus_token == token


@pytest.mark.parametrize("bad", ["incident,oops", 3, [None]])
def test_unknown_events(bad: object) -> None:
    """A typo is an error, not silence."""
    with pytest.raises(ConfigError, match="webhook_events"):
        Settings(webhook_events=bad)


def test_the_address_of_a_webhook_is_a_secret(tmp_path: Path) -> None:
    """It stands neither in the journal nor in the command that resumes a run; nor does the token."""
    settings = Settings(**GIVEN, prometheus_token="s3cret")
    run = ToldRun.make(tmp_path)
    run.tell(Event.RUN_START, settings=settings.to_json())
    text = run.journal().path.read_text()
    assert "s3cret" not in text
    assert "9464" in text
    words = ["--webhook-url", "https://x/s3cret", "--webhook_url=https://x/s3cret", "--prometheus-token", "s3cret"]
    assert "s3cret" not in " ".join(redact_argv(words))


@pytest.mark.parametrize(
    ("name", "wrong"), [("webhook_url", "hooks.example.org/s3cret"), ("prometheus_token", "s3 cret")]
)
def test_a_secret_that_is_wrong_is_not_shown_either(name: str, wrong: str) -> None:
    """Messages end up in logs."""
    with pytest.raises(ConfigError, match=name) as caught:
        Settings(**{name: wrong})
    assert wrong not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_settings(env={f"RESILIENCE_{name.upper()}": wrong}, strict_env=True)
    assert wrong not in str(caught.value)


def test_an_exporter_gets_all_settings(tmp_path: Path) -> None:
    """Through a pipe, which nobody else reads."""
    task = ExporterTask(tmp_path, "job", Settings(**GIVEN), tmp_path / "pages", 1, 2)
    assert task_from_json(task.to_json()) == task
    assert settings_from_json(json.loads(task.to_json())["settings"]) == task.settings


@pytest.mark.parametrize("bad", ["", "{}", "[]", '{"run_dir": 3}'])
def test_another_text_is_no_task(bad: str) -> None:
    """The error says so."""
    with pytest.raises(ValueError, match=r"ExporterTask|Expecting"):
        task_from_json(bad)
