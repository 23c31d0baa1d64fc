"""MLflow: a run of its own per node, in the experiment `resilience` of a tracking server, database or directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilience_sdk.core import environ
from resilience_sdk.telemetry.metrics import NAMESPACE
from resilience_sdk.telemetry.sinks.base import Point, ReportPage, TelemetryOrigin, Tracker, load


class MLflow(Tracker):
    """Logs points to a run whose id is remembered, so that a restarted exporter goes on with it."""

    name = "mlflow"
    most_points = 1000

    def __init__(self, place: TelemetryOrigin, uri: str) -> None:
        """Log to the tracking server (or what else MLflow takes) at `uri`."""
        super().__init__(place)
        self._uri = uri
        self._client: Any = None

    def open(self) -> None:
        """Find the experiment, and begin the run or go on with it."""
        environ.environment().setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # of MLflow's use, to its makers
        self._client = load("mlflow", extra="mlflow").MlflowClient(tracking_uri=self._uri)
        if "run" not in self.memory:
            experiment = self._client.get_experiment_by_name(NAMESPACE)
            number = self._client.create_experiment(NAMESPACE) if experiment is None else experiment.experiment_id
            name = f"{self.place.run}@{self.place.host}"
            self.memory["run"] = self._client.create_run(number, run_name=name).info.run_id

    def draw(self, some: Sequence[Point]) -> None:
        """Log in one request."""
        entities = load("mlflow.entities", extra="mlflow")
        metrics = [entities.Metric(point.name, point.value, round(point.at * 1000), point.step) for point in some]
        self._client.log_batch(self.memory["run"], metrics=metrics)

    def attach(self, page: ReportPage) -> None:
        """Keep the page among the artifacts of the run, where MLflow shows it."""
        self._client.log_artifact(self.memory["run"], str(page.path), artifact_path=NAMESPACE)

    def close(self) -> None:
        """Say that the run is over, unless the job goes on and only the connection is bad."""
        if self._client is not None and not self.place.live.up:
            self._client.set_terminated(self.memory["run"])
        self._client = None
