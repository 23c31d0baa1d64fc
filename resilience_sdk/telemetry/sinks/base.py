"""The base of a sink: a translator of events, and the one place that talks to what it is named after.

An experiment tracker is one that gets the metrics as curves over the training's steps.
"""

from __future__ import annotations

import abc
import importlib
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.errors import MissingExtraError
from resilience_sdk.system.hostinfo import boot_id
from resilience_sdk.telemetry.metrics import NAMESPACE, NEWEST, Durations, Sample, clean_text, clean_time
from resilience_sdk.telemetry.tail import Line, Live
from resilience_sdk.telemetry.tally import GoodputMetrics, Tally


def load(module: str, *, extra: str) -> Any:
    """Import `module`; raise MissingExtraError with the cure where it, or something that it needs, is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        cure = f"pip install 'resilience-sdk[{extra}]'"
        raise MissingExtraError(f"{module} cannot be imported ({error}): {cure}") from error


_MOST_CHARACTERS = 200
# By then an event was read. Time is told up to there: what it went into is certain, and does not change when another
# exporter tells it.
_READ_WITHIN_S = 5.0


@attrs.frozen
class TelemetryOrigin:
    """Whose telemetry it is."""

    run_dir: Path
    host: str
    live: Live
    state_dir: Path
    """Where this host's sinks may keep what they have to remember."""
    interval_s: float
    """How often what is pushed, written or looked up is refreshed."""

    @property
    def run(self) -> str:
        """The name that people know the run by: that of its directory."""
        return clean_text(self.run_dir.name, _MOST_CHARACTERS)


class Sink(abc.ABC):
    """One receiver. Its methods are called on its own thread: `open`, then `digest`, `send`, `refresh`, then `close`.

    `open`, `send` and `refresh` talk to the outside. They may raise anything: then the sink is closed, opened after a
    pause, and asked again, with the items that are left. They must not wait without a limit.
    """

    name: str
    is_fetched = False
    """Whether others come for what it tells: one that cannot be opened at the end of the job has nothing to deliver."""

    def __init__(self, place: TelemetryOrigin) -> None:
        """Remember the place; nothing is imported, opened or asked here."""
        self.place = place
        self.memory: dict[str, Any] = {}
        """What the sink wants to find again after a restart of the exporter; JSON values."""

    def open(self) -> None:  # noqa: B027 - not every sink has something to open
        """Import the library, connect, bind. Raises MissingExtraError where the library is not installed."""

    @abc.abstractmethod
    def digest(self, line: Line) -> Sequence[Any]:
        """Take one line into account; return what is to be sent because of it. Must not talk to anybody.

        Called for every line of the journal from its first one, whether its items were sent before or not.
        """

    def note_torn(self, lines: int) -> None:  # noqa: B027
        """Take into account that so many lines could not be read."""

    def note_end(self) -> None:  # noqa: B027
        """Wait for nothing that only matters while the job runs. Any thread."""

    def finish(self) -> Sequence[Any]:
        """Return what is to be sent because the job is over; `digest` may follow all the same."""
        return ()

    def send(self, items: deque[Any]) -> None:
        """Hand items over, and remove each from the left once it survives the end of this process."""
        items.clear()

    def refresh(self) -> None:  # noqa: B027
        """Tell what is true now, as opposed to what happened."""

    def stay_until_fetched(self) -> None:  # noqa: B027
        """Wait, once all was delivered, until those who come for it have it; with a limit, and raising nothing."""

    def close(self) -> None:  # noqa: B027
        """Let go of everything."""


@attrs.define
class Metrics:
    """The samples of the journal and of the moment, for sinks that tell metrics. One thread at a time."""

    place: TelemetryOrigin
    tally: Tally = attrs.field(factory=Tally)
    goodput: GoodputMetrics = attrs.field(factory=GoodputMetrics)
    boot_id: str = attrs.field(factory=boot_id)

    def apply(self, event: Mapping[str, Any]) -> list[Sample]:
        """Take one event; return what it has changed."""
        self.goodput.ledger.apply(event)
        return self.tally.apply(event)

    def now(self) -> list[Sample]:
        """Return the values that change without an event."""
        live, ledger = self.place.live, self.goodput.ledger
        now = None
        if live.is_told_of(ledger.newest_at):
            now = ledger.when(time.time(), time.monotonic_ns(), self.boot_id) - _READ_WITHIN_S
        return [*live.samples(), *self.goodput.samples(now)]

    def all(self) -> list[Sample]:
        """Return every value there is now, family by family."""
        return sorted([*self.tally.samples(), *self.now()], key=lambda sample: sample.family.name)


_NOT_DRAWN = frozenset(
    {"run.info", "journal.lines", "journal.torn_lines", "journal.last_timestamp", "telemetry.timestamp"}
) | frozenset(NEWEST.values())
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_./ -]")  # what all of the trackers take


@attrs.frozen
class Point:
    """One value of one curve."""

    name: str
    value: float
    step: int
    at: float
    """Unix seconds."""


def curve_name(sample: Sample) -> str:
    """Return what the curve of a sample is called: `resilience/incidents/hang/network/link_down`."""
    return "/".join(_NOT_IN_A_NAME.sub("_", part) for part in (NAMESPACE, sample.family.name, *sample.labels))


def points(samples: Iterable[Sample], *, step: int, at: float) -> Iterator[Point]:
    """Yield a point for each sample; of durations the newest."""
    for sample in samples:
        if sample.family.name not in _NOT_DRAWN:
            value = sample.value.last_s if isinstance(sample.value, Durations) else sample.value
            yield Point(curve_name(sample), value, step, at)


@attrs.frozen
class ReportPage:
    """The page of `resilience report` that was written at the end of a job, and the step and Unix time of that."""

    path: Path
    step: int
    at: float


class Tracker(Sink):
    """A sink of points: what an event has changed, at its step and time, and every interval what the ranks do."""

    most_points = sys.maxsize
    """That it takes at once."""

    def __init__(self, place: TelemetryOrigin) -> None:
        """Begin with no curves."""
        super().__init__(place)
        self._metrics = Metrics(place)
        self._tried: ReportPage | None = None

    @abc.abstractmethod
    def draw(self, some: Sequence[Point]) -> None:
        """Hand over points, at most `most_points`."""

    @abc.abstractmethod
    def attach(self, page: ReportPage) -> None:
        """Show a page beside the curves, or say where it is."""

    def digest(self, line: Line) -> Sequence[Point | ReportPage]:
        """Return the points of what has changed, and the report that was written."""
        changed = self._metrics.apply(line.event)
        step, at = self._metrics.tally.step, clean_time(float(line.event["t"]))
        found: tuple[Point | ReportPage, ...] = tuple(points(changed, step=step, at=at))
        if line.event.get("event") == Event.REPORT.value:
            found = (*found, ReportPage(self.place.run_dir / "report.html", step, at))
        return found

    def send(self, items: deque[Point | ReportPage]) -> None:
        """Draw and attach.

        A page is tried twice: where an artifact store refuses it, the curves behind it must not wait for ever.
        """
        while items:
            if isinstance(page := items[0], ReportPage):
                is_done = page is self._tried
                self._tried = page
                try:
                    if page.path.is_file():
                        self.attach(page)
                    is_done = True
                finally:
                    if is_done:
                        items.popleft()
                continue
            some = list(islice(takewhile(lambda item: isinstance(item, Point), items), self.most_points))
            self.draw([item for item in some if isinstance(item, Point)])
            for _ in some:
                items.popleft()

    def refresh(self) -> None:
        """Draw what the ranks are doing."""
        self.send(deque(self.live_points()))

    def live_points(self) -> list[Point]:
        """Return the points of this moment, at the step of the rank that is furthest."""
        samples = self._metrics.now()
        steps = [int(sample.value) for sample in samples if sample.family.name == "rank.step"]  # type: ignore[arg-type]
        return list(points(samples, step=max(steps, default=self._metrics.tally.step), at=time.time()))
