"""Experiment trackers, written by their own libraries and read back from what these wrote."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import needed
import pytest
from told_run import ToldRun

from resilience_sdk.core.journal import Event
from resilience_sdk.telemetry.sinks.base import Point, ReportPage, Tracker
from resilience_sdk.telemetry.sinks.mlflow import MLflow
from resilience_sdk.telemetry.sinks.tensorboard import TensorBoard


@pytest.fixture
def run(tmp_path: Path) -> ToldRun:
    """A run with two saves and a hang."""
    made = ToldRun.make(tmp_path)
    made.begin()
    for step in (50, 100):
        made.tell(Event.CKPT_COMMIT, writer="rank0", step=step, seconds=step / 100, stall_s=0.5, bytes=1000)
    made.fail_and_recover()
    return made


def serve(sink: Tracker, run: ToldRun) -> None:
    """Send what was told of a run, and what is true now, and close."""
    sink.open()
    sink.send(deque(item for line in run.lines() for item in sink.digest(line)))
    sink.refresh()
    sink.place.live.up = False
    sink.close()


def test_tensorboard_draws_what_was_told(run: ToldRun, tmp_path: Path) -> None:
    """Over the training's steps, at the times of the events; with neither torch nor TensorFlow."""
    accumulators = needed.library("tensorboard.backend.event_processing.event_accumulator", "tensorboard")
    serve(TensorBoard(run.place(), str(tmp_path / "tb")), run)
    curves = accumulators.EventAccumulator(str(tmp_path / "tb/run/here"))
    curves.Reload()
    drawn = {
        tag: [(event.step, round(float(event.tensor_proto.float_val[0]), 3)) for event in curves.Tensors(tag)]
        for tag in curves.Tags()["tensors"]
    }
    assert drawn["resilience/checkpoint.duration"] == [(50, 0.5), (100, 1.0)]
    assert drawn["resilience/checkpoints/committed"] == [(50, 1), (100, 2)]
    assert drawn["resilience/incidents/hang/network/link_down"] == [(40, 1)]
    assert drawn["resilience/run.up"] == [(40, 1)]
    commits = [line.event["t"] for line in run.lines() if line.event["event"] == "ckpt_commit"]
    assert [event.wall_time for event in curves.Tensors("resilience/checkpoint.last_step")] == pytest.approx(commits)


@pytest.mark.slow
def test_mlflow_has_the_metrics_in_a_run_that_a_restart_goes_on_with(
    run: ToldRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run for the node, found again by the id that the sink remembers; ended with the job."""
    mlflow = needed.library("mlflow", "mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path / 'mlruns'}"
    first = MLflow(run.place(), uri)
    serve(first, run)
    second = MLflow(run.place(), uri)
    second.memory = dict(first.memory)
    serve(second, run)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("resilience").experiment_id])
    assert (found.info.run_name, found.info.status) == ("run@here", "FINISHED")
    history = client.get_metric_history(found.info.run_id, "resilience/checkpoint.duration")
    assert {(metric.step, metric.value) for metric in history} == {(50, 0.5), (100, 1.0)}


class Refusing(Tracker):
    """A tracker that takes curves and no files, as one without rights to its artifact store."""

    name = "refusing"

    def open(self) -> None:
        """Begin."""
        self.drawn: list[Point] = []

    def draw(self, some: Sequence[Point]) -> None:
        """Take them."""
        self.drawn += some

    def attach(self, page: ReportPage) -> None:
        """Refuse it."""
        raise PermissionError(page.path)

    def close(self) -> None:
        """End."""


def test_a_page_that_is_refused_does_not_hold_up_the_curves_behind_it(run: ToldRun) -> None:
    """It is tried twice, and told; the next job's curves come all the same."""
    (run.run_dir.path / "report.html").write_text("a page")
    run.tell(Event.REPORT)
    run.tell(Event.CKPT_COMMIT, writer="rank0", step=150, seconds=1.5, stall_s=0.5, bytes=1000)
    sink = Refusing(run.place())
    sink.open()
    items: deque[Point | ReportPage] = deque(item for line in run.lines() for item in sink.digest(line))
    failures = 0
    for _ in itertools.repeat(None, 5):
        try:
            sink.send(items)
        except PermissionError:
            failures += 1
    assert failures == 2
    assert not items
    assert [point.value for point in sink.drawn if point.name == "resilience/checkpoint.last_step"] == [50, 100, 150]
