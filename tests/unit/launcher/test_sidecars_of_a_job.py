"""The launcher keeps an exporter and a watch running beside its ranks, and does not wait for them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience_sdk.core.journal import Event, Journal, read_journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import Settings
from resilience_sdk.launcher import sidecars
from resilience_sdk.launcher.sidecars import Beside
from resilience_sdk.system.hostinfo import process_is_gone


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    """A run directory."""
    return RunDirectory.create(tmp_path / "run")


def journal_of(run_dir: RunDirectory) -> Journal:
    """Return the launcher's journal."""
    return Journal(run_dir.journal, writer="launcher", host=os.uname().nodename, boot_id="", job="job")


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + 40
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(parent: int | None = None) -> set[int]:
    """Return the pids of a process's children, of this one's without an argument."""
    pid = os.getpid() if parent is None else parent
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_without_a_sink_there_is_no_exporter(run_dir: RunDirectory) -> None:
    """Nobody pays for what nobody asked for."""
    before = children()
    exporter = Beside(run_dir.path, "job", Settings(health_interval=0), None, journal_of(run_dir))
    exporter.keep_alive()
    exporter.close()
    assert children() == before


def test_a_library_that_is_missing_is_found_out_at_the_start(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the extra, an event, no exporter that could be waited for."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    before = children()
    exporter = Beside(run_dir.path, "job", Settings(wandb_project="w", health_interval=0), None, journal_of(run_dir))
    said = capsys.readouterr().err
    assert said.count("pip install 'resilience-sdk[wandb]'") == 1
    assert "wandb_project is set, and wandb is not installed" in said
    exporter.keep_alive()
    assert children() == before
    exporter.close()
    [event] = read_journal(run_dir.journal).events
    assert (event["event"], event["what"]) == ("degraded", "sink wandb_project")


def test_the_other_sinks_are_served_all_the_same(run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter is told of those alone that it can serve."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    textfiles = run_dir.path / "textfiles"
    settings = Settings(otlp_endpoint="http://localhost:9", prometheus_textfile=str(textfiles), health_interval=0)
    exporter = Beside(run_dir.path, "job", settings, None, journal_of(run_dir))
    exporter.keep_alive()
    wait_for(lambda: any(textfiles.glob("*.prom")))
    exporter.close()
    whats = [event.get("what") for event in read_journal(run_dir.journal).events if event["event"] == "degraded"]
    assert whats == ["sink otlp_endpoint"]


def test_nor_where_the_sdk_is_disabled(run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RESILIENCE_DISABLE` means this too."""
    monkeypatch.setenv("RESILIENCE_DISABLE", "1")
    before = children()
    exporter = Beside(run_dir.path, "job", Settings(event_log="json"), None, journal_of(run_dir))
    exporter.keep_alive()
    assert children() == before


@pytest.mark.slow
def test_an_exporter_that_dies_is_started_again_and_told_all(
    run_dir: RunDirectory, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said and journalled once; the end waits until what was written last is delivered."""
    monkeypatch.setattr(sidecars, "_FIRST_PAUSE_S", 0.01)
    journal = journal_of(run_dir)
    journal.emit(Event.RUN_START)
    before = children()
    exporter = Beside(run_dir.path, "job", Settings(event_log="json", health_interval=0), None, journal)
    said: list[str] = []

    def has_said(text: str) -> bool:
        said.append(capfd.readouterr().err)
        return text in "".join(said)

    exporter.keep_alive()
    wait_for(lambda: has_said("run_start"))
    wait_for(lambda: any((run_dir.path / "telemetry").rglob("console.json")))  # how far it was is written, too
    (first,) = children() - before
    exporter.keep_alive()
    assert children() - before == {first}  # one that runs is left alone
    os.kill(first, 9)
    wait_for(lambda: process_is_gone(first, None))
    second = 0
    while not second:
        exporter.keep_alive()
        second = next(iter(children() - before - {first}), 0)
        time.sleep(0.02)
    wait_for(lambda: has_said("degraded"))
    journal.emit(Event.FINISHED)
    exporter.close()
    wait_for(lambda: process_is_gone(second, None))
    text = "".join([*said, capfd.readouterr().err])
    events = [json.loads(line)["event"] for line in text.splitlines() if line.startswith("{")]
    assert events.count("run_start") == 1  # the second one went on where the first had been
    assert events[-1] == "finished"
    assert "the exporter ended with status -9" in text


def test_the_watch_over_the_nodes_health_starts_later_and_ends_with_the_job(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the ranks start; it writes into the run's journal and is gone when the launcher closes it."""
    before = children()
    late = Beside(run_dir.path, "job", Settings(), None, journal_of(run_dir))
    late.keep_alive()
    late.close()
    assert children() == before
    monkeypatch.setattr(sidecars, "_WATCH_AFTER_S", 0.0)
    running = Beside(run_dir.path, "job", Settings(), None, journal_of(run_dir))
    running.keep_alive()
    (watch,) = children() - before
    wait_for(lambda: bool(children(watch)))  # it looks
    assert "resilience_sdk.health.watch" in Path(f"/proc/{watch}/cmdline").read_text()
    running.close()
    wait_for(lambda: process_is_gone(watch, None))
