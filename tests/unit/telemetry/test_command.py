"""`python -m resilience_sdk.telemetry` as a person runs it."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from receiver import receiving
from told_run import ToldRun

from resilience_sdk.core.journal import Event, read_journal
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.settings import Settings
from resilience_sdk.system.hostinfo import host_name, process_start_ticks
from resilience_sdk.telemetry.__main__ import main, wait_for_run
from resilience_sdk.telemetry.exporter import ExporterTask

TRAINING = ("resilience_run_time_seconds_total", 'state="training"')


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    program = [sys.executable, "-m", "resilience_sdk.telemetry", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([__file__], "is a file"),
        ([".", "--otlp-endpoint", "collector"], "otlp_endpoint"),
        ([".", "--prometheus-address", "0.0.0.0:9464"], "prometheus_token"),
    ],
)
def test_bad_usage_says_what_is_wrong(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And ends with 2, before anything is started."""
    assert main(options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_what_there_is_is_delivered_where_no_job_runs(tmp_path: Path) -> None:
    """It ends by itself, once; without a sink it says how to name one."""
    run = ToldRun.make(tmp_path)
    run.begin()
    done = command(str(run.run_dir.path), "--prometheus-textfile", str(tmp_path / "textfiles"))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "textfiles").iterdir())) == 1
    done = command(str(run.run_dir.path))
    assert done.returncode == 0
    assert "docs/telemetry.md" in done.stderr


@pytest.mark.parametrize(("said", "up"), [("over\n", "0.0"), ("", "1.0")])
def test_a_job_has_ended_when_its_launcher_says_so(tmp_path: Path, said: str, up: str) -> None:
    """One that was killed says nothing: what was told last stays, and somebody is told that nobody is heard of."""
    run, textfiles = ToldRun.make(tmp_path), tmp_path / "textfiles"
    launcher = subprocess.Popen(["sleep", "600"])
    settings = Settings(prometheus_textfile=str(textfiles))
    task = ExporterTask(run.run_dir.path, "job", settings, None, launcher.pid, process_start_ticks(launcher.pid))
    exporter = subprocess.Popen(
        [sys.executable, "-m", "resilience_sdk.telemetry", "--from-launcher"], stdin=subprocess.PIPE, text=True
    )
    assert exporter.stdin is not None
    exporter.stdin.write(task.to_json() + "\n" + said)
    exporter.stdin.flush()
    if not said:
        launcher.kill()
        launcher.wait()
    assert exporter.wait(60) == 0
    exporter.stdin.close()
    launcher.kill()
    launcher.wait()
    (file,) = textfiles.iterdir()
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("resilience_run_up")]
    assert line.rpartition(" ")[2] == up


def told_of_a_killed_job(folder: Path, *, days_ago: float) -> ToldRun:
    """Return a run on this host whose only job trained, and told nothing any more."""
    run = ToldRun.make(folder)
    run.journals["here launcher"] = run.journal(host=host_name())
    run.begin()
    for rank in (0, 1):
        run.tell(Event.FIRST_BEAT, rank=rank)
    for file in run.run_dir.journal.iterdir():
        events = [json.loads(line) for line in file.read_text().splitlines()]
        then = [{**event, "t": event["t"] - 86400 * days_ago, "boot_id": "before"} for event in events]
        file.write_text("".join(json.dumps(event) + "\n" for event in then))
    return run


def value(textfiles: Path, name: str, label: str = "") -> float:
    """Return what the only file says of a metric with that label."""
    (file,) = textfiles.glob("*.prom")
    (line,) = [line for line in file.read_text().splitlines() if line.startswith(name + "{") and label in line]
    return float(line.rpartition(" ")[2])


def wait_until(happened: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does."""
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until, f"no {what}"
        time.sleep(0.05)


def test_what_is_delivered_later_is_no_training(tmp_path: Path) -> None:
    """The job was killed days ago: nobody has trained since."""
    run = told_of_a_killed_job(tmp_path, days_ago=3)
    done = command(str(run.run_dir.path), "--prometheus-textfile", str(tmp_path / "textfiles"))
    assert done.returncode == 0, done.stderr
    assert value(tmp_path / "textfiles", *TRAINING) < 60
    assert value(tmp_path / "textfiles", "resilience_run_up") == 0


def test_the_time_before_a_job_that_is_waited_for_is_no_training(tmp_path: Path) -> None:
    """It holds the directory before it tells of itself on this node, where an earlier one was killed days ago."""
    run, textfiles = told_of_a_killed_job(tmp_path, days_ago=3), tmp_path / "textfiles"
    told = ["--telemetry-interval", "0.05", "--prometheus-textfile", str(textfiles)]
    exporter = subprocess.Popen(
        [sys.executable, "-m", "resilience_sdk.telemetry", str(run.run_dir.path), "--wait", *told],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert exporter.stderr is not None
    assert "waiting for one" in exporter.stderr.readline()
    lease = Lease.acquire(run.run_dir, "job")
    try:
        wait_until(lambda: len(list(textfiles.glob("*.prom"))) == 1, "file of the exporter")
        assert value(textfiles, "resilience_run_up") == 1
        assert value(textfiles, *TRAINING) < 60
        run.begin()
        wait_until(lambda: value(textfiles, "resilience_run_time_seconds_total", "waiting") > 86400, "new job")
        assert value(textfiles, *TRAINING) < 60
    finally:
        lease.release()
        exporter.terminate()
        exporter.communicate()


_DEAF_WANDB = """
import threading

class Settings:
    def __init__(self, **_): pass

class Run:
    def define_metric(self, *_, **__): pass
    def log(self, _): pass
    def finish(self): threading.Event().wait()

def init(**_): return Run()
"""
_SHORT_STAY = """
import os, sys
from resilience_sdk.telemetry import exporter
from resilience_sdk.telemetry.__main__ import main
exporter._STAY_S = 1.0
os._exit(main(sys.argv[1:]))
"""


def test_a_library_that_does_not_let_go_keeps_nobody(tmp_path: Path) -> None:
    """W&B's waits for hours for a network that is gone; all there is was handed over to it."""
    (tmp_path / "wandb.py").write_text(_DEAF_WANDB)
    run = ToldRun.make(tmp_path)
    run.begin()
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", _SHORT_STAY, str(run.run_dir.path), "--wandb-project", "p"],
        env={**os.environ, "PYTHONPATH": paths},
        timeout=60,
    )
    assert done.returncode == 0


@pytest.mark.slow
def test_a_sink_that_is_left_behind_is_told_though_it_had_recovered(tmp_path: Path) -> None:
    """Else the journal's last word on it would be that it works."""
    run = ToldRun.make(tmp_path)
    run.journals["here launcher"] = run.journal(host=host_name())
    statuses = [500, 200]
    with receiving(lambda _: statuses.pop(0) if statuses else 500) as receiver:
        settings = Settings(webhook_url=receiver.url, webhook_events=("run_start",))
        task = ExporterTask(run.run_dir.path, "job", settings, None, os.getpid(), process_start_ticks(os.getpid()))
        exporter = subprocess.Popen(
            [sys.executable, "-m", "resilience_sdk.telemetry", "--from-launcher"], stdin=subprocess.PIPE, text=True
        )
        assert exporter.stdin is not None
        exporter.stdin.write(task.to_json() + "\n")
        exporter.stdin.flush()
        run.begin()
        receiver.wait_for(len)
        wait_until(lambda: _told_of_webhook(run) == ["degraded", "health"], "recovery")
        run.begin()
        receiver.wait_for_all(lambda all_: len(all_) > 2)
        exporter.stdin.write("over\n")
        exporter.stdin.close()
        assert exporter.wait(60) == 1
    assert _told_of_webhook(run) == ["degraded", "health", "degraded"]


def _told_of_webhook(run: ToldRun) -> list[str]:
    return [
        str(event["event"]) for event in read_journal(run.run_dir.journal).events if event.get("what") == "sink webhook"
    ]


class _Looked(threading.Event):
    """Nobody wants the end, and how often that was asked is counted: between two looks."""

    def __init__(self) -> None:
        super().__init__()
        self.often = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.often.release()
        return super().wait(0.01)


@pytest.mark.parametrize("there_is", ["nothing", "a directory", "a script", "a run that did not begin"])
def test_a_run_that_begins_later_is_waited_for(tmp_path: Path, there_is: str) -> None:
    """Whoever starts both does not have to know which one is faster."""
    if there_is == "a run that did not begin":
        ToldRun.make(tmp_path)
    elif there_is != "nothing":
        (tmp_path / "run").mkdir()
    if there_is == "a script":
        (tmp_path / "run" / "train.py").touch()
    looked = _Looked()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        found = threads.submit(wait_for_run, tmp_path / "run", looked, for_a_job=False)
        assert looked.often.acquire(timeout=20)
        assert not found.done()
        run = ToldRun.make(tmp_path)
        run.begin()
        assert found.result(20) == run.run_dir


def test_a_job_is_waited_for_where_others_have_ended_if_that_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a requeued one's beginning; without the option what is left of the others is delivered."""
    run = ToldRun.make(tmp_path)
    run.begin()
    assert wait_for_run(run.run_dir.path, threading.Event(), for_a_job=False) == run.run_dir
    stop = threading.Event()
    stop.set()
    assert wait_for_run(run.run_dir.path, stop, for_a_job=True) is None
    assert len(capsys.readouterr().err.splitlines()) == 1
    lease = Lease.acquire(run.run_dir, "job")
    assert wait_for_run(run.run_dir.path, stop, for_a_job=True) == run.run_dir
    lease.release()


def test_a_disk_that_takes_no_position_is_said_in_one_line(tmp_path: Path) -> None:
    """The launcher starts it again and again: each stack would stand on the job's screen."""
    run = ToldRun.make(tmp_path)
    (run.run_dir.path / "telemetry").touch()
    done = command(str(run.run_dir.path), "--event-log", "text")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "nothing can be exported" in done.stderr
