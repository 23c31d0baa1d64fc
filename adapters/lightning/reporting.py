"""The straggler reports of the core in the log of the job, in the form of NVIDIA's callback."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import attrs

from resilience_sdk import straggler
from resilience_sdk.console import say_once
from resilience_sdk.session import Session
from resilience_sdk.straggler.control import Control, values_of
from resilience_sdk.straggler.published import note_logging, note_no_logging, read_settings, write_settings
from resilience_sdk.straggler.reports import Report, Straggler

_PERIOD_S = 1.0


@attrs.frozen
class Wanted:
    """What of a report is wanted."""

    relative: bool
    individual: bool
    scores_to_print: int
    logs_scores: bool
    """Also to the loggers of the trainer."""


class ReportLog:
    """Logs each new report of this run; of the thread that trains."""

    def __init__(self, wanted: Wanted, log: logging.Logger) -> None:
        self._wanted = wanted
        self._log = log
        self._next_s = 0.0
        self._last: Report | None = straggler.report()
        self._session: Session | None = None

    def begin(self, session: Session) -> None:
        """Log the reports in the place of the job's monitor, so that nobody reads them twice. On rank 0."""
        if session.identity.rank == 0:
            self._session = session
            with suppress(OSError):
                note_logging(session.run_dir.path, session.config.job, session.attempt)

    def end(self) -> None:
        """Leave them to the monitor again. May be repeated."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(OSError):
                note_no_logging(session.run_dir.path)

    def look(self, trainer: Any) -> None:
        """Log what is new; costs a reading of the clock, and a stat of a file every second."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _PERIOD_S
        report = straggler.report()
        if report is None or report is self._last:
            return
        self._last = report
        report = without(report, relative=self._wanted.relative, individual=self._wanted.individual)
        if not trainer.is_global_zero:
            return
        for level, text in lines_of(report, self._wanted.scores_to_print):
            self._log.log(level, text)
        if self._wanted.logs_scores:
            # Not by the module's `log`: that hands on what is logged in every 50th step, and forgets the others.
            for logger in trainer.loggers:
                logger.log_metrics(report.summary(), step=trainer.global_step)


def without(report: Report, *, relative: bool, individual: bool) -> Report:
    """Return what is wanted of a report. Pure."""
    left_out: dict[str, Any] = {}
    if not relative:
        left_out |= {"gpu_relative": {}, "section_relative": {}}
    if not individual:
        left_out |= {"gpu_individual": {}, "section_individual": {}}
    kinds = [kind for kind, is_wanted in (("relative", relative), ("individual", individual)) if is_wanted]
    below = tuple(one for one in report.stragglers if one.rule.rpartition("_")[2] in kinds)
    return attrs.evolve(report, stragglers=below, **left_out)


def lines_of(report: Report, scores_to_print: int) -> list[tuple[int, str]]:
    """Return what is logged of a report, each with its level. Pure."""
    lines = []
    for kind, what in (("relative", "have worse relative performance"), ("individual", "performance dropped")):
        for unit, shown in (("gpu", "GPUs"), ("section", "sections")):
            if found := [one for one in report.stragglers if one.rule == f"{unit}_{kind}"]:
                text = f"STRAGGLER DETECTION WARNING: Some {shown} {what}. Affected ranks: {_named(found)}"
                lines.append((logging.WARNING, text))
    if text := report.text(scores_to_print):
        lines.append((logging.WARNING, f"\n{text}"))
    return lines


def _named(found: Iterable[Straggler]) -> str:
    ids = dict.fromkeys(f"StragglerId(rank={one.rank}, node='{one.node}')" for one in found)
    return "{" + ", ".join(ids) + "}"


def apply_options(session: Session, options: Mapping[str, Any]) -> None:
    """Let the options of the callback count in a job whose monitor was started with others. On rank 0."""
    standing = Control.of(session.settings)
    changed = {name: value for name, value in options.items() if getattr(standing, name) != value}
    if not changed or session.identity.rank != 0:
        return
    path = session.run_dir.path
    try:
        text = read_settings(path)
        known = {} if text is None else values_of(text, "settings.json")
        if {**known, **changed} != known:
            write_settings(path, json.dumps({**known, **changed}, indent=1) + "\n")
    except Exception as error:  # noqa: BLE001 - reports as the job was started are better than no training
        say_once("straggler options", f"straggler reports are as the job was started: {error}")
