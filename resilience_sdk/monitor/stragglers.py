"""The monitor's part in finding slow ranks: collect the durations of this node, and judge those of all nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk import console
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.notices import Asked
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.monitor.recovery import first_step
from resilience_sdk.monitor.straggler_kernels import KernelNews
from resilience_sdk.monitor.straggler_nodes import StragglerNodes
from resilience_sdk.monitor.straggler_response import StragglerResponse
from resilience_sdk.rank_page import Passes
from resilience_sdk.settings import Settings
from resilience_sdk.straggler.aggregate import Aggregate
from resilience_sdk.straggler.collector import Collector
from resilience_sdk.straggler.control import ControlFile
from resilience_sdk.straggler.kernels import KernelWindow
from resilience_sdk.straggler.pieces import NodePieces
from resilience_sdk.straggler.published import Seen, seen
from resilience_sdk.straggler.roles import read_role, role_file
from resilience_sdk.straggler.told import WORK

_CONTROL_S = 1.0


class StragglerWatch:
    """Collects, judges and reports. The monitor's only thread; adds nothing to that of the training."""

    def __init__(
        self,
        pages: Path,
        run_dir: Path,
        settings: Settings,
        journal: Journal,
        store: IncidentStore,
        ask_stop: Callable[[Asked | None], None],
        host: str,
        *,
        job: str,
        began: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read and write in `pages` and `run_dir`; `ask_stop` has all ranks stop at one step.

        `job` is its key; `began`: Unix seconds since when it runs; incidents before that are of another one. `clock`
        is steady, in seconds.
        """
        self._clock = clock
        self._pages = pages
        self._settings = settings
        self._host = host
        self._control = ControlFile(run_dir, settings)
        self._response = StragglerResponse(run_dir, journal, store, ask_stop, job=job, began=began or 0.0)
        self._looked_at = float("-inf")
        self._prepare(0, {})

    def begin(self, attempt: int, announcement: Mapping[str, Any]) -> None:
        """Begin an attempt; `announcement` is our launcher's, empty where nobody has made one."""
        self._prepare(attempt, announcement)
        if self._nodes.gathers:
            self._response.withdraw()

    def _prepare(self, attempt: int, announcement: Mapping[str, Any]) -> None:
        self._nodes = StragglerNodes(self._pages, attempt, announcement, self._host, self._clock)
        self._attempt = attempt
        self._start()

    def _start(self) -> None:
        self._collector = Collector(self._nodes.count)
        self._aggregate: Aggregate | None = None
        self._reported_at = self._clock()
        self._roles: dict[Path, tuple[Seen | None, str]] = {}
        self._kernels = KernelNews()
        self._has_failed = False

    def look(self, completed: Sequence[tuple[WatchedRank, Sequence[Passes]]]) -> None:
        """Take what each rank of this node has completed since the last look, and judge what can be judged.

        Never raises: a mistake here must not cost the job its watch over hangs. It is said, and the attempt goes on
        without.
        """
        if self._has_failed:
            return
        try:
            self._look(completed)
        except Exception as error:  # noqa: BLE001 - see above
            self._has_failed = True
            self._response.note_failure(error)

    def _look(self, completed: Sequence[tuple[WatchedRank, Sequence[Passes]]]) -> None:
        now = self._clock()
        if now - self._looked_at >= _CONTROL_S:
            self._looked_at = now
            self._look_at_control()
        living = [watched for watched, _ in completed if watched.alive]
        if not self._control.now.straggler_detection or not living:
            return
        self._collector.present({watched.rank: watched.stem for watched in living})
        for watched, passes in completed:
            for new in sorted(passes, key=lambda new: new.kind != WORK):  # it belongs to passes of the same look
                self._collector.add(watched.rank, new.name, new.kind, new.lane, new.start, new.samples_ns)
        pieces = self._collector.take(_first_step(living), now)
        told = self._nodes.read()
        if self._nodes.gathers:
            if pieces:
                told.append(self._nodes.message(pieces, self._roles_of(living), {}))
            self._judge(told, living, now)
        elif self._nodes.is_due(pieces):
            self._nodes.tell(self._roles_of(living), self._kernels_of(living))

    def _judge(self, told: Sequence[NodePieces], living: Sequence[WatchedRank], now: float) -> None:
        control = self._control.now
        aggregate = self._aggregate
        if aggregate is None:
            if not told:
                return
            aggregate = self._aggregate = Aggregate(
                self._nodes.count,
                relative_threshold=control.relative_threshold,
                individual_threshold=control.individual_threshold,
            )
            self._response.begin(self._attempt)
        for node in told:
            aggregate.add(node)
        changes, verdicts = aggregate.judge(now), aggregate.verdicts
        if changes or verdicts:
            self._response.tell(changes, verdicts, stop=control.stop_if_detected)
        if now - self._reported_at >= control.report_interval:
            self._reported_at = now
            aggregate.add(self._nodes.message((), {}, self._kernels_of(living)))
            report = aggregate.report()
            if report is not None:
                self._response.report(report, control.scores_to_print)

    def _look_at_control(self) -> None:
        was_on = self._control.now.straggler_detection
        said = self._control.look()
        if said is None:
            return
        control = self._control.now
        if self._nodes.gathers:
            console.say(said)
            self._response.note_control(said, control)
        if was_on and not control.straggler_detection:
            if self._aggregate is not None:
                self._response.tell(self._aggregate.end(), (), stop=False)
            if self._nodes.gathers:
                self._response.switched_off()
            self._start()
        elif self._aggregate is not None:
            self._aggregate.set_thresholds(relative=control.relative_threshold, individual=control.individual_threshold)

    def _kernels_of(self, living: Sequence[WatchedRank]) -> dict[int, KernelWindow]:
        return self._kernels.of((watched.rank, watched.stem) for watched in living)

    def _roles_of(self, living: Sequence[WatchedRank]) -> dict[int, str]:
        for watched in living:
            said = seen(role_file(watched.stem))
            known = self._roles.get(watched.stem)
            if known is None or known[0] != said:
                self._roles[watched.stem] = said, read_role(watched.stem) or self._settings.straggler_role or ""
        return {watched.rank: self._roles[watched.stem][1] for watched in living}


def _first_step(living: Sequence[WatchedRank]) -> int:
    page = living[0].snapshot
    return first_step(page) if page.step_is_global else 0
