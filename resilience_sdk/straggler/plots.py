"""`log_to()`: minimum, median and maximum of the scores over time, in the logger that the user has.

Thread-safety, as the loggers' sources have it: TensorBoard's writer puts events into a queue that its own thread
empties. A run of W&B sends each call to its service in one message. With `commit=False` what is logged joins the row
that the training thread logs next, so its step counter is not moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilience_sdk.errors import ConfigError, MissingExtraError
from resilience_sdk.straggler.listening import _listening
from resilience_sdk.straggler.reports import Report

PREFIX = "stragglers/"
_WANDB_STEP = f"{PREFIX}step"


def log_to(logger: Any) -> None:
    """Log the scores of every report to `logger`: a TensorBoard `SummaryWriter`, or a run of W&B. Call it on one rank.

    `"wandb"` means the active run. Scalars are called `stragglers/section_relative_perf/fwd/min` and so on, over the
    last step of the report. Logged on the thread that calls the listeners. Raises ConfigError for anything else,
    or where no run of W&B is active, and MissingExtraError where W&B is not installed.
    """
    _listening.add_plot(plot_to(logger))


def plot_to(logger: Any) -> Callable[[Report], None]:
    """Return what logs a report; raises as `log_to`."""
    if logger == "wandb":
        logger = _active_wandb_run()
    if callable(getattr(logger, "add_scalar", None)):
        return lambda report: _to_tensorboard(logger, report)
    if callable(getattr(logger, "log", None)) and callable(getattr(logger, "define_metric", None)):
        logger.define_metric(_WANDB_STEP, hidden=True)
        logger.define_metric(f"{PREFIX}*", step_metric=_WANDB_STEP)
        return lambda report: _to_wandb(logger, report)
    raise ConfigError(
        f"log_to({logger!r}): expected a TensorBoard SummaryWriter, a W&B run (what wandb.init() returned), or 'wandb'"
    )


def _to_tensorboard(writer: Any, report: Report) -> None:
    for name, value in report.summary().items():
        writer.add_scalar(f"{PREFIX}{name}", value, report.last_step)


def _to_wandb(run: Any, report: Report) -> None:
    values = {f"{PREFIX}{name}": value for name, value in report.summary().items()}
    run.log({**values, _WANDB_STEP: report.last_step or 0}, commit=False)


def _active_wandb_run() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError("log_to('wandb') needs W&B: pip install wandb") from error
    if wandb.run is None:
        raise ConfigError("log_to('wandb'): no run is active; call wandb.init() first, or pass the run")
    return wandb.run
