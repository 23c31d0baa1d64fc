"""Telemetry of real runs: real receivers, exporters that are killed, sinks that are dead."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import needed
import otlp
import pytest
from harness import PROJECT, Job, job
from prometheus_server import RULES, free_port, prometheus_program, scraping
from receiver import Received, receiving

from resilience_sdk.core.journal import Event, Journal, read_journal
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.run_directory import RunDirectory

PATIENCE_S = 150.0  # more than an exporter has, which is at low priority
_EVENTS = ",".join(event.value for event in Event)


def exporter_pid(run: Job) -> int:
    """Return the pid of the exporter that the launcher keeps."""
    found = [pid for pid, command in run.processes().items() if "--from-launcher" in command]
    assert len(found) <= 1, "there is more than one exporter"
    return found[0] if found else 0


def export(run_dir: Path, *options: str, **env: str) -> subprocess.Popen[str]:
    """Start an exporter by hand."""
    own = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-m", "resilience_sdk.telemetry", str(run_dir), *options],
        env=own | {"PYTHONPATH": str(PROJECT)} | env,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prometheus_and_a_collector_see_a_run_whose_rank_and_exporter_are_killed(tmp_path: Path) -> None:
    """Ranks stepping, a restart with its cause; neither counters nor spans start over with the exporter."""
    prometheus_program("prometheus")
    needed.library("prometheus_client", "prometheus")
    otlp.required()
    port, until = free_port(), tmp_path / "until"
    with (
        receiving() as collector,
        job(
            tmp_path,
            *("--prometheus-address", str(port), "--prometheus-token", "s3cret", "--otlp-endpoint", collector.url),
            *("--telemetry-interval", "1", "--nproc-per-node", "2"),
            "training.py",
            "--until",
            str(until),
        ) as run,
        scraping(tmp_path, f"127.0.0.1:{port}", "s3cret") as prometheus,
    ):
        prometheus.wait_for("resilience_rank_step", lambda values: len(values) == 2 and min(values) > 3)
        assert max(prometheus.values("resilience_rank_heartbeat_age_seconds")) < 30
        assert prometheus.values("resilience_restarts_total") == [0]
        (victim,) = run.told("rank-0-1")
        os.kill(int(victim.read_text()), signal.SIGKILL)
        run.wait_event("recovered")
        prometheus.wait_for("resilience_restarts_total", lambda values: values == [1])
        prometheus.wait_for('resilience_incidents_total{kind="crash"}', lambda values: values == [1])
        prometheus.wait_for("resilience_recovery_duration_seconds_count", lambda values: values == [1])
        prometheus.wait_for('resilience_run_time_seconds_total{state="recovering"} > 0', len)
        trained = prometheus.values('resilience_run_time_seconds_total{state="training"}')[0]
        prometheus.wait_for(f'resilience_run_time_seconds_total{{state="training"}} > {trained}', len)
        assert 0 < prometheus.values("resilience_run_ettr_ratio")[0] < 1
        prometheus.wait_for('ALERTS{alertname="ResilienceIncident",alertstate="firing"}', len)
        lines = prometheus.values("resilience_journal_lines_total")[0]
        first = exporter_pid(run)
        os.kill(first, signal.SIGTERM)  # as a scheduler sends it to everybody long before the end
        later = time.time()
        prometheus.wait_for(f"timestamp(resilience_run_up == 1) > {later + 1}", len)
        assert exporter_pid(run) == first
        os.kill(first, signal.SIGKILL)
        run.wait(lambda: exporter_pid(run) not in (0, first), "another exporter")
        later = time.time()
        prometheus.wait_for(f"timestamp(resilience_restarts_total) > {later}", len)
        assert prometheus.values("resilience_restarts_total") == [1]
        assert prometheus.values("resilience_journal_lines_total")[0] >= lines
        assert prometheus.values("resets(resilience_journal_lines_total[5m])") == [0]
        assert set(prometheus.values("resets(resilience_run_time_seconds_total[5m])")) == {0}
        assert prometheus.values('resilience_process_memory_bytes{process="monitor"}')[0] < 64 << 20
        check = subprocess.run(
            [prometheus_program("promtool"), "check", "metrics"], input=scrape(port), capture_output=True
        )
        assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")
        until.touch()
        assert run.finish() == 0, run.screen
        assert not run.left_behind()  # the exporter goes once the end was fetched
        prometheus.wait_for("resilience_run_up", lambda values: not values)
        assert prometheus.values("last_over_time(resilience_run_up[10m])") == [0]
        vanished = next(rule for rule in prometheus.rules() if rule["name"] == "ResilienceNodeVanished")
        assert prometheus.values(vanished["query"]) == []
    _check_collector(collector.taken)


def _check_collector(taken: list[Received]) -> None:
    """The collector has one trace with all of it, and the metrics of the end."""
    spans = {span.span_id: span for span in otlp.spans_of(taken)}  # by id: two exporters may have sent one of them
    by_name = {name: [span for span in spans.values() if span.name == f"resilience.{name}"] for name in _SPANS}
    assert {name: len(found) for name, found in by_name.items()} == _SPANS
    assert len({span.trace_id for span in spans.values()}) == 1
    assert spans[by_name["recovery"][0].parent_span_id].name == "resilience.incident"
    assert spans[spans[by_name["incident"][0].parent_span_id].parent_span_id].name == "resilience.run"
    last = otlp.metrics_of([request for request in taken if request.path == "/v1/metrics"][-1])
    assert last["resilience.restarts"].sum.data_points[0].as_double == 1
    assert last["resilience.run.up"].gauge.data_points[0].as_double == 0


_SPANS = {"run": 1, "attempt": 2, "incident": 1, "recovery": 1}


def scrape(port: int) -> bytes:
    """Return what is served."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer s3cret"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read()


def test_the_alert_rules_are_valid_and_come_when_they_should() -> None:
    """By Prometheus' own tool."""
    for arguments in (("check", "rules", "--lint-fatal", RULES), ("test", "rules", RULES.with_name("alerts_test.yml"))):
        done = subprocess.run([prometheus_program("promtool"), *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_an_exporter_that_is_killed_at_any_moment_loses_no_line(tmp_path: Path) -> None:
    """Every line of the journal reaches the webhook, while it is written and the exporter killed again and again."""
    run_dir = RunDirectory.create(tmp_path / "run")
    lease = Lease.acquire(run_dir, "job")
    journal = Journal(run_dir.journal, writer="rank0", host=os.uname().nodename, boot_id="", job="job", rank=0)
    chance, written = random.Random(7), 0
    textfiles = tmp_path / "textfiles"
    with receiving() as receiver:
        sinks = ("--webhook-url", receiver.url, "--webhook-events", _EVENTS, "--prometheus-textfile", str(textfiles))
        for _ in range(6):
            before = len(receiver.taken)
            exporter = export(run_dir.path, *sinks, "--telemetry-interval", "0.05")
            for _ in range(25):
                journal.emit(Event.INCIDENT, number=written, kind="crash", category="process", cause="oom")
                written += 1
            least = before + chance.randrange(1, 25)
            receiver.wait_for(lambda taken, least=least: len(taken) >= least)
            exporter.kill()
            exporter.communicate()
        lease.release()
        last = export(run_dir.path, *sinks)
        assert last.wait(PATIENCE_S) == 0, last.communicate()
        last.communicate()
    posted = [json.loads(request.body) for request in receiver.taken]
    assert {item["event"]["number"] for item in posted} == set(range(written))
    assert len({item["id"] for item in posted}) == written
    first_times = list(dict.fromkeys(item["event"]["number"] for item in posted))
    assert first_times == sorted(first_times)
    (file,) = textfiles.glob("*.prom")
    counted = [line for line in file.read_text().splitlines() if line.startswith("resilience_incidents_total")]
    assert [line.rpartition(" ")[2] for line in counted] == [f"{written}.0"]


@pytest.mark.slow
def test_two_launchers_on_one_host_tell_everything_once(tmp_path: Path) -> None:
    """One of their exporters serves the host; the other takes over when that one is gone."""
    run_dir = RunDirectory.create(tmp_path / "run")
    lease = Lease.acquire(run_dir, "job")
    journal = Journal(run_dir.journal, writer="rank0", host=os.uname().nodename, boot_id="", job="job", rank=0)
    sinks = ("--webhook-events", _EVENTS, "--webhook-url")
    with receiving() as receiver:
        journal.emit(Event.DEGRADED, number=0)
        first = export(run_dir.path, *sinks, receiver.url)
        receiver.wait_for(lambda taken: len(taken) == 1)
        second = export(run_dir.path, *sinks, receiver.url)
        while "another exporter serves this run" not in second.stderr.readline():  # it waits from there on
            assert second.poll() is None
        for number in range(1, 20):
            journal.emit(Event.DEGRADED, number=number)
        receiver.wait_for(lambda taken: len(taken) == 20)
        assert second.poll() is None
        first.terminate()
        first.communicate()
        journal.emit(Event.DEGRADED, number=20)
        receiver.wait_for(lambda taken: len(taken) == 21)
        second.terminate()
        second.communicate()
    lease.release()
    assert [json.loads(request.body)["event"]["number"] for request in receiver.taken] == list(range(21))


@contextlib.contextmanager
def _deaf() -> Iterator[str]:
    """Accept connections and never answer."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_dead_and_deaf_sinks_delay_nobody_and_lose_nothing(tmp_path: Path) -> None:
    """The run ends as without them, each is journalled once, and what they missed is delivered afterwards."""
    dead = f"http://127.0.0.1:{free_port()}"
    with _deaf() as deaf:
        sinks = ("--webhook-url", deaf, "--webhook-events", _EVENTS, "--otlp-endpoint", dead)
        with job(tmp_path, *sinks, "--telemetry-interval", "0.2", "training.py", "--steps", "200") as run:
            assert run.finish() == 0, run.screen
            ended = time.time()
            finished = run.events("finished")[0]
            assert ended - finished["t"] < 10  # the moment that sinks are given, and a busy machine
            assert "could not take everything yet" in run.screen
            said = [line for line in run.screen.splitlines() if line and not line.startswith("resilience: ")]
            assert not said  # nor what its library says of each try
            assert not run.left_behind(60)  # it gives up by itself
            told = [event["what"] for event in run.events("degraded")]
            assert sorted(told) == ["sink otel", "sink webhook"]  # a deaf one fails by the end at the latest
    lines = read_journal(run.run_dir / "journal").events
    with receiving() as receiver:
        exporter = export(run.run_dir, "--webhook-url", receiver.url, "--webhook-events", _EVENTS)
        assert exporter.wait(PATIENCE_S) == 0, exporter.communicate()
        exporter.communicate()
    posted = {json.loads(request.body)["id"] for request in receiver.taken}
    assert len(posted) == len(lines)


@pytest.mark.slow
def test_a_run_of_wandb_is_read_back(tmp_path: Path) -> None:
    """Offline it sends nothing; its file holds the metrics of the run over its steps."""
    records = needed.library("wandb.proto.wandb_internal_pb2", "wandb")
    run_dir = RunDirectory.create(tmp_path / "run")
    journal = Journal(run_dir.journal, writer="rank0", host=os.uname().nodename, boot_id="", job="job", rank=0)
    for step in (50, 100):
        journal.emit(Event.CKPT_COMMIT, step=step, seconds=step / 100, stall_s=0.5, bytes=1000)
    exporter = export(run_dir.path, "--wandb-project", "health", WANDB_MODE="offline", WANDB_SILENT="true")
    assert exporter.wait(PATIENCE_S) == 0, exporter.communicate()
    exporter.communicate()
    (file,) = run_dir.path.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for data in _records_of(file.read_bytes()):
        record = records.Record.FromString(data)
        if record.HasField("history"):
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    saves = [
        (json.loads(row["resilience/step"]), json.loads(row["resilience/checkpoint.duration"]))
        for row in rows
        if "resilience/checkpoint.duration" in row
    ]
    assert saves == [(50, 0.5), (100, 1.0)]


def _records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B file: LevelDB's log format behind a header of 7 bytes."""
    at, block, whole = 7, 1 << 15, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block  # the rest of a block holds nothing
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""
