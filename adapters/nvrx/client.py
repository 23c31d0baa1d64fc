"""NVRx's `RankMonitorClient`: its heartbeats and sections are those of the SDK, its timeouts deadlines of the monitor.

Three blocks of the rank's page hold what NVRx watches: the interval since the last heartbeat (`step`), the time until
the first one, and the time in which no section is open. A timeout that is configured or was calculated is the deadline
of its block, taken literally; where there is none the SDK's own hold, which are learned.

Nothing here waits for another process, except that `calculate_and_set_*` asks all ranks, as there. What fails is said
once, and training goes on: RankMonitorClientError is for wrong use alone.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import attrs

from resilience_sdk.adapters.nvrx.timeouts import (
    FaultToleranceConfig,
    HeartbeatTimeouts,
    Longest,
    SectionTimeouts,
    heartbeat_timeouts,
    read_sections,
    section_timeouts,
)
from resilience_sdk.checkpoint.ranks import find_ranks, group_is_ready
from resilience_sdk.core import environ
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.settings import nvrx
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.postmortem.facts import EXCLUDE_NODE, STOP
from resilience_sdk.rank.lifecycle import current
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.blocks import Pulse
from resilience_sdk.recorder.page_layout import FLAG_NVRX_WORDS
from resilience_sdk.straggler.sections import section

__all__ = [
    "FaultToleranceConfig",
    "HeartbeatTimeouts",
    "RankMonitorClient",
    "RankMonitorClientError",
    "SectionTimeouts",
    "WorkloadAction",
    "WorkloadControlRequest",
]

FIRST = "first heartbeat"
BETWEEN = "between sections"
_STATE = "current_timeouts"
_BOUNDLESS_S = 365 * 86400.0  # a year: numbers without end are no JSON
_NO_DATA = "Not enough data to compute timeouts."


class RankMonitorClientError(Exception):
    """The client was used in a way that it cannot serve."""


class WorkloadAction(Enum):
    """What the launcher is to do when the ranks have ended by a failure."""

    Continue = 0
    """Restart them as usual."""
    ExcludeThisNode = 1
    """Go on without the node of this rank; the job leaves with 76 where it cannot."""
    ShutdownWorkload = 2
    """End the job with 77: nobody starts it again."""


ENDINGS = {WorkloadAction.ExcludeThisNode.name: EXCLUDE_NODE, WorkloadAction.ShutdownWorkload.name: STOP}
"""By name of an action what the launcher is asked for."""


@attrs.define
class WorkloadControlRequest:
    """An action, and why it is asked for."""

    action: WorkloadAction
    description: str = "<not set>"


class RankMonitorClient:
    """A rank's client of its node's monitor. Any thread may call it; a forked child's calls do nothing."""

    def __init__(self) -> None:
        self.is_initialized = False
        self.cfg: FaultToleranceConfig | None = None
        self.hb_timeouts: HeartbeatTimeouts | None = None
        self.section_timeouts: SectionTimeouts | None = None
        self.logger = logging.getLogger("RankMonitorClient")
        self._loaded: tuple[HeartbeatTimeouts | None, SectionTimeouts | None] = (None, None)
        self._longest = Longest(time.monotonic())
        self._given: Collection[str] = ()
        self._first: Pulse | None = None
        self._pulse: Pulse | None = None
        self._open: dict[str, _Opened] = {}
        self._lock = threading.RLock()

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Begin: the first heartbeat is expected from now on. The first occurrence of everything is warm-up here.

        Raises RankMonitorClientError where it has begun already.
        """
        del num_warmup_iters
        if self.is_initialized:
            raise RankMonitorClientError("RankMonitorClient is already initialized")
        self.cfg, self._given = _configuration()
        self.hb_timeouts = HeartbeatTimeouts(
            self.cfg.initial_rank_heartbeat_timeout, self.cfg.rank_heartbeat_timeout, were_calculated=False
        )
        self.section_timeouts = SectionTimeouts(
            dict(self.cfg.rank_section_timeouts), self.cfg.rank_out_of_section_timeout
        )
        self._longest = Longest(time.monotonic())
        self._take_loaded()
        self.is_initialized = True
        with self._lock:
            recorder = lookup.recorder()
            if recorder is not None:
                recorder.begin()
                recorder.page.set_flag(FLAG_NVRX_WORDS)
                if self._initial_timeout() is not None:  # else it is start-up, as of any script
                    self._first = Pulse(recorder.lane(), FIRST)
                    self._first.begin(time.monotonic_ns())
            self._publish()
            self._watch_between()

    def shutdown_workload_monitoring(self) -> None:
        """End: no deadline holds for this rank any more. Does nothing where nothing has begun."""
        if not self.is_initialized:
            return
        self.is_initialized = False
        with self._lock:
            self._leave_first()
            for opened in self._open.values():
                opened.close()
            self._open.clear()
            heartbeat.done()

    def send_heartbeat(self) -> None:
        """Tell that the rank comes on. Raises RankMonitorClientError before `init_workload_monitoring`."""
        self._require_initialized()
        with self._lock:
            self._longest.beat(time.monotonic())
            heartbeat.beat()
            self._leave_first()
            recorder = lookup.recorder()
            if recorder is not None and (pulse := recorder.lane().pulse) is not self._pulse:
                self._pulse = pulse
                self._publish_heartbeats()

    def start_section(self, section: str) -> None:
        """Enter a section, which may nest in others or overlap with them.

        Raises RankMonitorClientError where it is open already or has no name, and before `init_workload_monitoring`.
        """
        self._require_initialized()
        if not isinstance(section, str) or not section:
            raise RankMonitorClientError(f"a section has a name, which is text: not {section!r}")
        with self._lock:
            try:
                self._longest.open(section, time.monotonic())
            except ValueError as error:
                raise RankMonitorClientError(str(error)) from None
            self._leave_between()
            timeout = self._timeout_of(section)
            is_elsewhere = self._pulse is not None and self._pulse.lane.ident != threading.get_ident()
            if is_elsewhere and timeout is not None and timeout < _BOUNDLESS_S:
                say_once(
                    "nvrx threads",
                    f"section {section} begins in another thread than heartbeats come from: it is timed, and its "
                    "timeout is not watched; send heartbeats from the thread of the sections",
                )
            self._open[section] = _Opened(section, "compute", timeout)

    def end_section(self, section: str) -> None:
        """Leave a section, in whichever thread it began.

        Raises RankMonitorClientError where it is not open, and before `init_workload_monitoring`.
        """
        self._require_initialized()
        with self._lock:
            try:
                self._longest.close(section, time.monotonic())
            except ValueError as error:
                raise RankMonitorClientError(str(error)) from None
            self._open.pop(section).close()
            self._watch_between()

    def end_all_sections(self) -> None:
        """Leave all sections that are open."""
        self._require_initialized()
        with self._lock:
            for name in list(self._longest.opened):
                self.end_section(name)

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Set the timeouts of heartbeats to what all ranks have measured, times the safety factor. All ranks call it.

        Returns False where a rank has no two heartbeats yet and `skip_if_not_ready`; else that is a
        RankMonitorClientError.
        """
        self._require_initialized()
        assert self.cfg is not None
        assert self.hb_timeouts is not None
        self._ask_all()
        with self._lock:
            new = heartbeat_timeouts(self._longest, self.cfg.safety_factor, self.hb_timeouts)
            if new is not None:
                self.hb_timeouts = new
                self._publish()
        return self._was_ready(new, skip_if_not_ready)

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Set the timeouts of these sections (None: all that are configured or were used), and outside of them.

        As `calculate_and_set_hb_timeouts`; of each of them all ranks together need one that was closed.
        """
        self._require_initialized()
        assert self.cfg is not None
        assert self.section_timeouts is not None
        with self._lock:
            self._longest.note_out_of_section(time.monotonic())
        self._ask_all()
        with self._lock:
            new = section_timeouts(
                self._longest,
                self.cfg.safety_factor,
                self.section_timeouts,
                selected=selected_sections,
                with_out_of_section=calc_out_of_section,
            )
            if new is not None:
                self.section_timeouts = new
                self._publish()
                self._watch_between()
        return self._was_ready(new, skip_if_not_ready)

    def state_dict(self) -> dict[str, Any]:
        """Return the timeouts that were calculated, as JSON values; the same on all ranks."""
        state: dict[str, Any] = {}
        hb, of_sections = self.hb_timeouts or self._loaded[0], self.section_timeouts or self._loaded[1]
        if hb is not None and hb.are_valid and hb.were_calculated:
            state["heartbeat"] = dataclasses.asdict(hb)
        if of_sections is not None and (of_sections.calculated_sections or of_sections.is_out_of_section_calculated):
            state["section"] = {
                **dataclasses.asdict(of_sections),
                "calculated_sections": sorted(of_sections.calculated_sections),
            }
        return {_STATE: state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take calculated timeouts, which count before configured ones; before `init_workload_monitoring` or after."""
        told = state.get(_STATE, {})
        self._loaded = (
            HeartbeatTimeouts(**told["heartbeat"]) if "heartbeat" in told else self._loaded[0],
            SectionTimeouts(**told["section"]) if "section" in told else self._loaded[1],
        )
        if self.is_initialized:
            with self._lock:
                self._take_loaded()
                self._publish()
                self._watch_between()

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Have the launcher leave this node out, or start nothing again, when an attempt fails after this."""
        if req.action is WorkloadAction.Continue:
            return
        lookup.recorder()  # the first use begins to record
        session = current()
        if session is None or not session.ask_launcher(ENDINGS[req.action.name], req.description):
            say(f"{req.action.name} is asked for, and nobody hears of it: that takes `resilience run`")

    def _require_initialized(self) -> None:
        if not self.is_initialized:
            raise RankMonitorClientError("RankMonitorClient is not initialized")

    def _was_ready(self, new: object, skip_if_not_ready: bool) -> bool:
        if new is None and not skip_if_not_ready:
            raise RankMonitorClientError(_NO_DATA)
        return new is not None

    def _ask_all(self) -> None:
        if not group_is_ready():
            say_once("nvrx alone", "timeouts are calculated of this rank's times alone: there is no process group")
            return
        told = find_ranks().gather(self._longest.to_json())
        with self._lock:
            self._longest.take_longer(told)

    def _take_loaded(self) -> None:
        self.hb_timeouts = self._loaded[0] or self.hb_timeouts
        self.section_timeouts = self._loaded[1] or self.section_timeouts

    # -- what the monitor reads

    def _publish(self) -> None:
        """Have the timeouts hold from now on, for what is open too."""
        self._publish_heartbeats()
        for name in {*self._longest.sections, *self._open} - {BETWEEN}:
            section(name, timeout=self._timeout_of(name))

    def _publish_heartbeats(self) -> None:
        for pulse, timeout in ((self._first, self._initial_timeout()), (self._pulse, self._subsequent_timeout())):
            if pulse is not None:
                pulse.lane.recorder.retime(pulse, timeout)

    def _initial_timeout(self) -> float | None:
        """Return the timeout until the first heartbeat, where somebody set it: the default is no deadline here."""
        hb = self.hb_timeouts
        if hb is None or not (hb.were_calculated or "initial_rank_heartbeat_timeout" in self._given):
            return None
        return self._deadline(hb.initial, bool(hb.were_calculated))

    def _subsequent_timeout(self) -> float | None:
        hb = self.hb_timeouts
        if hb is None or not (hb.were_calculated or "rank_heartbeat_timeout" in self._given):
            return None
        return self._deadline(hb.subsequent, bool(hb.were_calculated))

    def _deadline(self, timeout: float | None, is_calculated: bool) -> float | None:
        """Return the deadline of a timeout: a calculated one is not below what NVRx would see at its next look."""
        if timeout is None or not is_calculated or self.cfg is None:
            return timeout
        return max(timeout, self.cfg.workload_check_interval)

    def _timeout_of(self, name: str) -> float | None:
        """Return the deadline of a section; None: it is learned, and heartbeats put it off."""
        of_sections = self.section_timeouts
        timeout = None if of_sections is None else of_sections.section.get(name)
        if of_sections is not None and timeout is not None:
            return self._deadline(timeout, name in of_sections.calculated_sections)
        # A first pass would have the timeout of the first heartbeat, which is none of a section in NVRx. Nor is it
        # learned: that of the heartbeats around it holds, which may come for hours inside of one pass.
        is_guarded = self._first is not None or (self._pulse is not None and self._subsequent_timeout() is not None)
        return _BOUNDLESS_S if is_guarded and self._longest.sections.get(name) is None else None

    def _leave_first(self) -> None:
        first, self._first = self._first, None
        if first is not None and first.lane.ident:  # else this is a forked child, and the page its parent's
            first.stop()

    def _leave_between(self) -> None:
        opened = self._open.pop(BETWEEN, None)
        if opened is not None:
            opened.close()

    def _watch_between(self) -> None:
        """Have the time without a section run, where it has a timeout."""
        of_sections = self.section_timeouts
        assert of_sections is not None
        timeout = self._deadline(of_sections.out_of_section, of_sections.is_out_of_section_calculated)
        if timeout is not None and not self._longest.opened:
            if BETWEEN in self._open:
                section(BETWEEN, kind="idle", timeout=timeout)  # publishes another timeout
            else:
                self._open[BETWEEN] = _Opened(BETWEEN, "idle", timeout)


class _Opened:
    """A section that is open, which any thread may close: a block is of the thread that has entered it."""

    def __init__(self, name: str, kind: str, timeout: float | None) -> None:
        """Enter it."""
        self._block = section(name, kind=kind, timeout=timeout).__enter__()
        self._own = lookup.find_own_block(name, kind)

    def close(self) -> None:
        """Leave it."""
        if self._own is None or self._own.lane.ident == threading.get_ident():
            self._block.__exit__(None, None, None)
        else:
            self._own.end(time.monotonic_ns())


def _configuration() -> tuple[FaultToleranceConfig, Collection[str]]:
    """Return the configuration of this job, and the keys that somebody has given.

    What the settings say counts, since an option of ours wins over one of NVRx; they know no section without a timeout.
    """
    values: dict[str, Any] = {}
    try:
        values = dict(json.loads(environ.environment().get(environ.INTERNAL_NVRX) or "{}"))
        FaultToleranceConfig.from_kwargs(**values)
    except (ValueError, TypeError) as error:
        say_once("nvrx configuration", f"the configuration of NVRx cannot be read, the settings count: {error}")
        values = {}
    lookup.recorder()  # the first use begins to record
    session = current()
    settings = None if session is None else session.settings
    for name in _OF_SETTINGS:
        if settings is not None and nvrx.TRANSLATED[name] in settings.explicit:
            given = getattr(settings, nvrx.TRANSLATED[name])
            values[name] = {**read_sections(values.get(name)), **given} if name == _SECTIONS else given
    return FaultToleranceConfig.from_kwargs(**values), {name for name in values if values[name] is not None}


_SECTIONS = "rank_section_timeouts"
_OF_SETTINGS = (
    *("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", _SECTIONS, "rank_out_of_section_timeout"),
    "safety_factor",
)
