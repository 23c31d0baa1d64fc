"""Weights & Biases: a run of its own per node, online or (`WANDB_MODE=offline`) in files below the run directory."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any

from resilience_sdk.core import environ
from resilience_sdk.telemetry.metrics import NAMESPACE
from resilience_sdk.telemetry.sinks.base import Point, ReportPage, TelemetryOrigin, Tracker, load

_STEP, _TIME = f"{NAMESPACE}/step", f"{NAMESPACE}/time"
_LOGIN_S = 30


class WeightsAndBiases(Tracker):
    """Logs points to a run whose id is remembered, so that a restarted exporter goes on with it.

    The user's own run is in another process and is not touched. What is on its way to W&B's service when this process
    is killed may be lost.
    """

    name = "wandb"

    def __init__(self, place: TelemetryOrigin, project: str) -> None:
        """Log into `project`."""
        super().__init__(place)
        self._project = project
        self._run: Any = None

    def open(self) -> None:
        """Begin the run, or go on with it; raises where nobody is logged in."""
        environ.environment().setdefault("WANDB_ERROR_REPORTING", "false")  # of W&B's own crashes, to a third party
        wandb = load("wandb", extra="wandb")
        self.memory.setdefault("id", secrets.token_hex(4))
        self._run = wandb.init(
            project=self._project,
            dir=str(self.place.run_dir),
            id=self.memory["id"],
            name=f"{self.place.run}@{self.place.host}",
            job_type="resilience",
            resume="allow",
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_disable_stats=True,
                save_code=False,
                disable_git=True,
                init_timeout=_LOGIN_S,
            ),
        )
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric(f"{NAMESPACE}/*", step_metric=_STEP)

    def draw(self, some: Sequence[Point]) -> None:
        """Log one row per event."""
        for (step, at), row in itertools.groupby(some, key=lambda point: (point.step, point.at)):
            self._run.log({**{point.name: point.value for point in row}, _STEP: step, _TIME: at})

    def attach(self, page: ReportPage) -> None:
        """Show the page in a panel of its own."""
        html = load("wandb", extra="wandb").Html(str(page.path), inject=False)
        self._run.log({f"{NAMESPACE}/report": html, _STEP: page.step, _TIME: page.at})

    def close(self) -> None:
        """End the run: waits for what is on its way."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
