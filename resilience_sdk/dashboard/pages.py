"""The pages of the dashboard: the list of runs, the report of one, and the few words where there is neither.

Each page is made of parts, which feeds send again when they change. Texts of jobs meet HTML in templates that escape
everything, and in `report`, which does so too. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import attrs
import jinja2

from resilience_sdk._version import __version__
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.words import when
from resilience_sdk.dashboard.feeds import digest
from resilience_sdk.dashboard.runs import RunBook, RunSummary, RunTable, mark_of, shown
from resilience_sdk.incidents.record import KINDS
from resilience_sdk.report.facts import RunFacts
from resilience_sdk.report.page import allowed, render_page, render_sections
from resilience_sdk.report.read import read_run

_HERE = Path(__file__).parent
_LIST_WITHIN_S = 0.1
_FEED_WITHIN_S = 2.0  # nobody waits for it
_LONGEST_NUMBER = 1e15
_MOST_KNOWN = 16
_PATIENCE_S = 5.0
_FRESH_S = 0.9  # a little less than a feed waits
_LONGER_FRESH = 10.0  # times as long as the reading took: of a long journal not every look is worth it
LIVE_SCRIPT = (_HERE / "static" / "live.js").read_text(encoding="utf-8")

# Order, sign and words of each state: a sign beside the colour, which not everybody sees.
STATES: Mapping[str, tuple[int, str, str]] = {
    "stalled": (0, "!", "stands still"),
    "running": (1, "\u25b6", "running"),
    "lost": (2, "?", "lost"),
    "ended": (3, "\u25a0", "ended"),
    "finished": (4, "\u2713", "finished"),
    "empty": (5, "\u25cb", "empty"),
    "gone": (6, "\u2013", "not here"),
    "unreadable": (7, "\xd7", "unreadable"),
    "unread": (8, "\u2026", "not read yet"),
}
_EXPLAINED = {
    "stalled": "a job runs in it, and nothing has progressed for a while",
    "lost": "no job holds it and none told how it ended: killed with its launcher, or under a foreign one",
    "empty": "nothing has run in it yet",
    "unread": "comes in a moment",
}


def environment() -> jinja2.Environment:
    """Return the templates: everything that is put into them is escaped, and a name that is not there is an error."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"iso": iso, "when": when, "number": number, "percent": percent, "value": value}
    made.globals |= {"version": __version__, "kinds": KINDS}
    for name in made.list_templates():
        made.get_template(name)  # compiled before somebody waits for it
    return made


def iso(unix_s: float | None) -> str:
    """Return a Unix time as `datetime` attributes have it; nothing where it is none."""
    try:
        return "" if unix_s is None else datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return ""


def number(value: float | None) -> str:
    """Return a whole number with its thousands apart; a dash for none, and for what is too large to be one."""
    return "\u2013" if value is None or abs(value) > _LONGEST_NUMBER else f"{value:,}".replace(",", "\u202f")


def value(number: float | None) -> str:
    """Return what a column is sorted by; nothing for what is not known."""
    return "" if number is None or abs(number) > _LONGEST_NUMBER else str(number)


def percent(share: float | None) -> str:
    """Return a share as a person reads it; not all of it only where nothing is missing."""
    if share is None:
        return "\u2013"
    return f"{min(99, round(100 * share)) if share < 1 else 100} %"


@attrs.frozen
class Page:
    """A page, and the parts that it is made of."""

    html: str
    parts: Mapping[str, str]
    sources: Mapping[str, str] = attrs.field(factory=dict)
    """What its content policy allows beside files of this server."""


class ListPage:
    """The list of runs."""

    def __init__(self, book: RunBook, templates: jinja2.Environment) -> None:
        """Show the runs of `book`."""
        self._book = book
        self._templates = templates
        self._row = templates.get_template("row.html")
        self._rows: dict[str, tuple[RunSummary, str]] = {}

    def page(self) -> Page:
        """Return the whole page."""
        table = self._book.table(_LIST_WITHIN_S)
        parts = self._parts(table)
        rows = [parts[f"run-{row.id}"] for row in table.rows]
        html = self._templates.get_template("list.html").render(
            parts=parts, rows=rows, seen=seen(parts), is_empty=not rows, source=shown(self._book.source.told)
        )
        return Page(html, parts)

    def parts(self) -> Mapping[str, str]:
        """Return the parts of now, for a feed."""
        return self._parts(self._book.table(_FEED_WITHIN_S))

    def _parts(self, table: RunTable) -> dict[str, str]:
        parts = {f"run-{row.id}": self._html_of(row) for row in table.rows}
        if len(self._rows) > 2 * len(parts):  # runs that are gone
            self._rows = {row.id: self._rows[row.id] for row in table.rows if row.id in self._rows}
        counts = {word: sum(row.state == word for row in table.rows) for word in STATES}
        return {
            **parts,
            "order": " ".join(parts),
            "counts": self._templates.get_template("counts.html").render(
                counts=counts, states=STATES, all=len(table.rows), hidden=table.hidden
            ),
            "problems": self._templates.get_template("problems.html").render(problems=table.problems),
        }

    def _html_of(self, row: RunSummary) -> str:
        known = self._rows.get(row.id)
        # What changes all the time and is not shown must not make a new row.
        key = attrs.evolve(row, goodput=None if row.goodput is None else round(row.goodput, 2))
        if known is not None and known[0] == key:
            return known[1]
        place, sign, words = STATES[row.state]
        html = self._row.render(run=row, place=place, sign=sign, words=words, meaning=_EXPLAINED.get(row.state))
        self._rows[row.id] = (key, html)
        return html


def seen(parts: Mapping[str, str]) -> str:
    """Return what a page shows, so that it need not show it again when a feed begins."""
    return " ".join(f"{name}:{digest(text)}" for name, text in parts.items())


class RunPages:
    """The live reports of the runs: each is read once for all who look at it."""

    def __init__(self, book: RunBook) -> None:
        """Show the runs of `book`."""
        self._book = book
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _KnownRun] = OrderedDict()

    def is_known(self, identity: str) -> bool:
        """Tell whether there is such a run."""
        return self._path_of(identity) is not None

    def page(self, identity: str, *, live: bool = True) -> Page | None:
        """Return the report of a run, None where there is no such run."""
        known = self._known_run(identity)
        if known is None:
            return None
        facts, parts = known.read()
        if not live:
            return Page(render_page(facts), parts, allowed())
        html = render_page(facts, live=True, script=LIVE_SCRIPT)
        # Beside its own parts, a page that lives has to know what it shows.
        html = html.replace("</head>", f'<meta name="seen" content="{seen(parts)}">\n</head>', 1)
        return Page(html, parts, allowed(LIVE_SCRIPT))

    def parts(self, identity: str) -> Mapping[str, str]:
        """Return the parts of a report, for a feed."""
        known = self._known_run(identity)
        return {} if known is None else known.read()[1]

    def _path_of(self, identity: str) -> Path | None:
        path = self._book.path_of(identity)
        return path if path is not None and path.is_dir() else None

    def _known_run(self, identity: str) -> _KnownRun | None:
        path = self._path_of(identity)
        if path is None:
            return None
        with self._lock:
            known = self._known.get(identity)
            if known is None or known.path != path:
                known = self._known[identity] = _KnownRun(path)
            self._known.move_to_end(identity)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
            return known


class _KnownRun:
    """What was last read of a run; several threads may ask, one reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._facts: RunFacts | None = None
        self._parts: Mapping[str, str] = {}
        self._mark: object = None
        self._read_s = float("-inf")
        self._took_s = 0.0

    def read(self) -> tuple[RunFacts, Mapping[str, str]]:
        """Return the facts and the sections of now; of a moment ago, where it was read then or has not changed.

        Raises TimeoutError where somebody else reads it for the first time, and does not come to an end.
        """
        if not self._lock.acquire(timeout=_PATIENCE_S):
            if self._facts is None:
                raise TimeoutError("it is still being read: its journal is long, or its file system hangs")
            return self._facts, self._parts
        try:
            return self._read(time.monotonic())
        finally:
            self._lock.release()

    def _read(self, now_s: float) -> tuple[RunFacts, Mapping[str, str]]:
        if self._facts is not None and now_s - self._read_s < max(_FRESH_S, _LONGER_FRESH * self._took_s):
            return self._facts, self._parts
        mark = mark_of(self.path)
        if self._facts is None or mark is None or mark != self._mark:
            facts = read_run(RunDirectory(self.path))
            self._parts, self._facts = render_sections(facts), facts
        self._mark = mark
        self._read_s = time.monotonic()
        self._took_s = self._read_s - now_s
        return self._facts, self._parts
