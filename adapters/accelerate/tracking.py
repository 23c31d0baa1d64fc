"""A tracker of Accelerate that ours is: what `accelerator.log` gets goes to the journal, our scores to the others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from resilience_sdk import straggler
from resilience_sdk.adapters._base import Late, framework
from resilience_sdk.core.events import Event
from resilience_sdk.rank import Session
from resilience_sdk.straggler.callbacks import PREFIX

PERIOD_S = 1.0
"""Between two journal lines at least; what is logged more often is left out of the journal."""


def tracker() -> Any:
    """Return a tracker for `Accelerator(log_with=[tracker(), "tensorboard"])`; raises MissingExtraError.

    What `accelerator.log(values, step=...)` is given goes into the journal of the run, as `metrics` lines beside its
    events, at most one a second. Whenever there is a new straggler report, its scores go to the other trackers with
    that call. It works from `attach` on; before, and with the SDK switched off, it does nothing. Rank 0 alone.
    """
    return ResilienceTracker()


def connect(accelerator: Any, session: Session) -> None:
    """Let the trackers of ours that an accelerator has write into this session."""
    for one in getattr(accelerator, "log_with", None) or ():
        if isinstance(one, ResilienceTracker):
            one.connect(accelerator, session)


class ResilienceTracker(Late):
    """What our tracker does; a `GeneralTracker` as soon as one is made."""

    name = "resilience"
    requires_logging_directory = False
    main_process_only = True

    @classmethod
    def framework_bases(cls) -> tuple[type, ...]:
        """Return `GeneralTracker`; raises MissingExtraError without Accelerate."""
        return (framework("accelerate.tracking", "accelerate").GeneralTracker,)

    def __init__(self) -> None:
        super().__init__()
        self._accelerator: Any = None
        self._session: Session | None = None
        self._config: Mapping[str, Any] | None = None
        self._next_s = 0.0
        self._report: Any = None

    @property
    def tracker(self) -> Session | None:
        """The session that it writes into."""
        return self._session

    def connect(self, accelerator: Any, session: Session) -> None:
        """Write into this session from now on."""
        self._accelerator, self._session = accelerator, session
        self._report = straggler.report()
        if self._config is not None:
            self.store_init_configuration(dict(self._config))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Journal the configuration of the run."""
        self._config = values
        if self._session is not None:
            self._session.journal.emit(Event.METRICS, what="config", values=plain(values))

    def log(self, values: dict[str, Any], step: int | None = None, **_options: Any) -> None:
        """Journal values, and hand new scores to the other trackers."""
        session = self._session
        now = time.monotonic()
        if session is None or now < self._next_s:
            return
        self._next_s = now + PERIOD_S
        session.journal.emit(Event.METRICS, step=step, what="log", values=plain(values))
        report = straggler.report()
        if report is None or report is self._report:
            return
        self._report = report
        scores = {f"{PREFIX}{name}": value for name, value in report.summary().items()}
        for other in self._accelerator.trackers:
            if other is not self and scores:
                other.log(scores, step=step)

    def finish(self) -> None:
        """End with the training."""
        self._session = self._accelerator = None


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of these values is a number or a text, under names that are texts. Pure."""
    return {str(name): value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
