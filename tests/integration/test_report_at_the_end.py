"""The page that a job leaves behind: written as it ends, named on the screen, attached by the trackers."""

from __future__ import annotations

import json

import needed
import pytest
from harness import job

pytestmark = pytest.mark.slow
accumulators = needed.library("tensorboard.backend.event_processing.event_accumulator", "tensorboard")
needed.library("wandb", "wandb")
mlflow = needed.library("mlflow", "mlflow")


def test_each_job_leaves_its_page_and_the_trackers_have_it(tmp_path):
    """A crash and the end are in it; W&B shows the page, MLflow keeps it, TensorBoard says where it is."""
    database = f"sqlite:///{tmp_path}/mlflow.db"
    sinks = ("--wandb-project", "pages", "--tensorboard-dir", str(tmp_path / "tb"), "--mlflow-uri", database)
    env = {"RESILIENCE_FAULT": "kill:rank=1,step=3,attempt=0", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    options = ("--nproc-per-node", "2", "--report", *sinks)
    with job(tmp_path, *options, "training.py", "--steps", "8", env=env) as run:
        assert run.finish() == 0, run.screen
        page = run.run_dir / "report.html"
        assert run.screen.splitlines()[-1] == f"resilience: page: {page}"
        text = page.read_text()
        (crash,) = run.incidents()
        assert crash["id"] in text
        assert "is running" not in text
        (written,) = run.events("report")
        assert written["path"] == str(page)
        assert not run.left_behind(60), run.screen  # what the trackers still had to do is done
        assert not run.events("degraded"), run.events("degraded")
    client = mlflow.MlflowClient(tracking_uri=database)
    (experiment,) = [one for one in client.search_experiments() if one.name == "resilience"]
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert [one.path for one in client.list_artifacts(tracked.info.run_id, "resilience")] == ["resilience/report.html"]
    assert list((run.run_dir / "wandb").glob("offline-run-*/files/media/html/resilience/report_*.html"))
    (events,) = {path.parent for path in (tmp_path / "tb").rglob("events.*")}
    texts = accumulators.EventAccumulator(str(events))
    texts.Reload()
    assert str(page) in str(texts.Tensors("resilience/report")[0].tensor_proto.string_val)


def test_a_page_that_cannot_be_written_is_said_and_nothing_else_changes(tmp_path):
    """A directory stands in its place: one line, an event, and the job's own exit code."""
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    with job(tmp_path, "--nproc-per-node", "1", "--report", "training.py", "--steps", "3") as run:
        assert run.finish() == 0, run.screen
        assert "no report was written" in run.screen
        assert [event["what"] for event in run.events("degraded")] == ["report"]
    assert json.loads((run.run_dir / "outcome.json").read_text())["verdict"] == "finished"
