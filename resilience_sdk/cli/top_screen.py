"""The screen of `resilience top`: a view as lines of styled pieces, no line wider than the terminal. Pure.

The same lines are drawn in colour and printed as plain text. Colours are those of the terminal's own palette that are
readable on light and on dark ground, and say nothing that a word or a sign beside them does not.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from resilience_sdk.core.console import printable
from resilience_sdk.core.words import ago, duration, size
from resilience_sdk.goodput.buckets import Bucket
from resilience_sdk.goodput.summary import AT_MOST
from resilience_sdk.incidents.record import count_words
from resilience_sdk.report.live_view import GONE, NODE, PAGE, LiveView, RankRow
from resilience_sdk.report.run_view import STATES

Piece = tuple[str, str]
"""Text and the style that it is drawn in (`bold red`, or empty)."""
Line = list[Piece]

LEAST_WIDTH = 40
_WIDE = 96  # from here on there is room for the memory of each rank
_MOST_EVENTS = 8
_LEAST_EVENTS = 3
_LEAST_ROWS = 4
_FEW_RANKS = 8
_BAR_CELLS = 20
_MOST_PARTS = 3
_FAULT, _DOUBT, _SLOW, _PALE, _STRONG, _HEAD = "bold red", "red", "magenta", "dim", "bold", "reverse"
_BY_TROUBLE = (_FAULT, _DOUBT, _SLOW, "", "", _PALE)
_MARKS = ("!", "?", "~", " ", " ", " ")
# By bucket: what fills the bar where the screen knows such characters, where it does not, and the style.
_FILL: Mapping[str, tuple[str, str, str]] = {
    Bucket.PRODUCTIVE.value: ("█", "#", "green"),
    Bucket.DATA.value: ("▓", "+", "cyan"),
    Bucket.EVALUATION.value: ("▓", "+", "cyan"),
    Bucket.CHECKPOINT.value: ("▓", "+", "magenta"),
    Bucket.OUTSIDE.value: ("▒", "-", "cyan"),
    Bucket.WAITING.value: ("▒", "x", "yellow"),
    Bucket.STARTUP.value: ("▒", "-", "magenta"),
    Bucket.RENDEZVOUS.value: ("▒", "-", "magenta"),
    Bucket.REPLAYED.value: ("▒", "x", "red"),
    Bucket.HANG.value: ("▒", "x", "red"),
    Bucket.STANDING.value: ("▒", "x", "red"),
    Bucket.RESTART.value: ("▒", "x", "red"),
    Bucket.PREEMPTED.value: ("░", ".", "dim"),
    Bucket.LAUNCHER.value: ("░", ".", "dim"),
    Bucket.IDLE.value: ("░", ".", "dim"),
}


@attrs.frozen
class Sheet:
    """What is drawn on: its size, and whether it knows more than ASCII. Without a height nothing is left out."""

    width: int = 80
    height: int | None = None
    is_unicode: bool = True
    keys: str = ""
    """The last line, of a screen that listens."""

    @property
    def cut(self) -> str:
        """What stands where something was cut off."""
        return "…" if self.is_unicode else "~"


def lines(view: LiveView, sheet: Sheet) -> list[Line]:
    """Return the whole screen, at most `sheet.height` lines of at most `sheet.width` cells."""
    sheet = attrs.evolve(sheet, width=max(LEAST_WIDTH, sheet.width))
    head = _head(view, sheet)
    table_head, columns = _columns(view, sheet)
    foot: list[Line] = [[(sheet.keys, _PALE)]] if sheet.keys else []
    standing = None if view.stall is None else view.stall.get("text")
    rows, events = list(view.rows), [event for event in view.events if event[2] != standing][-_MOST_EVENTS:]
    if sheet.height is not None:
        room = sheet.height - len(head) - len(foot) - 3  # the table's head, the line below it, a line between
        wanted = max(min(len(rows), _LEAST_ROWS), room - min(_LEAST_EVENTS, len(events)))
        rows = rows[: max(1, wanted)]
        events = events[-max(0, room - len(rows)) :] if room > len(rows) else []
    table = [table_head, *(_row(row, columns, sheet) for row in rows)] if view.ranks else []
    rest = _rest(view, len(rows))
    below: list[Line] = [[(rest, _PALE)]] if rest else []
    told = _events(view, events, sheet)
    between: list[Line] = [[]] if told and (table or head) else []
    body = [*head, *table, *below, *between, *told]
    if sheet.height is not None:
        body = body[: sheet.height - len(foot)]
        body += [[] for _ in range(sheet.height - len(foot) - len(body))]
    return [_fitted(line, sheet) for line in [*body, *foot]]


def plain(line: Line) -> str:
    """Return a line without its styles."""
    return "".join(text for text, _ in line).rstrip()


# -- the head


def _head(view: LiveView, sheet: Sheet) -> list[Line]:
    clock = time.strftime("%H:%M:%S", time.localtime(view.at))
    title = fit(view.run_dir, sheet.width - len(clock) - 2, sheet, keep_end=True)
    gap = " " * (sheet.width - cells(title) - len(clock))
    found: list[Line] = [[(title, _STRONG), (gap, ""), (clock, _PALE)], _state_line(view), _step_line(view)]
    if view.goodput is not None and view.wall_s > 0:
        found.append(_goodput_line(view, sheet))
    if view.stall is not None:
        told = f" (told {ago(view.stall.get('at'), view.at)})"
        found += _labelled("! stall", f"{view.stall.get('text')}{told}", _FAULT, sheet, most=2)
    for text in view.stragglers[: 2 if sheet.height is not None else None]:
        found += _labelled("~ slow", text, _SLOW, sheet, most=2 if len(view.stragglers) == 1 else 1)
    for text in view.memory_grows[: 1 if sheet.height is not None else None]:
        found += _labelled("~ memory", text, _SLOW, sheet, most=1)
    if hidden := len(view.stragglers) - 2 if sheet.height is not None else 0:
        found += _labelled("~ slow", f"and {hidden} more", _SLOW, sheet, most=1) if hidden > 0 else []
    shown = view.last_incidents[-1:] if sheet.height is not None else view.last_incidents
    for at, name, text in shown:
        found += _labelled("incident", f"{name}, {ago(at, view.at)}: {text}", "", sheet, most=_lines_of_few(view))
    found += [line for text in view.problems[:2] for line in _labelled("note", text, _PALE, sheet, most=1)]
    return [*(line for line in found if line), []]


def _lines_of_few(view: LiveView) -> int:
    """Return how many lines a text of the head may take: a table of few ranks leaves room for two."""
    return 2 if view.ranks <= _FEW_RANKS else 1


def _state_line(view: LiveView) -> Line:
    state = STATES.get(view.state, view.state).partition(":")[0]
    if not view.is_running and view.outcome and view.state != "finished":
        state = f"ended: {view.outcome}"
    parts = [state]
    if view.is_running and view.attempt is not None:
        parts.append(f"attempt {view.attempt}")
    if view.world_size is not None:
        on = f" on {view.nodes} node{'' if view.nodes == 1 else 's'}" if view.nodes else ""
        parts.append(f"{_number(view.world_size)} rank{'' if view.world_size == 1 else 's'}{on}")
    if view.is_running and view.started_at is not None:
        parts.append(f"for {duration(max(0.0, view.at - view.started_at))}")
    if view.incidents:
        parts.append(f"{view.incidents} incident{'' if view.incidents == 1 else 's'}")
    style = _STRONG if view.is_running or view.state == "finished" else _FAULT if view.state == "lost" else ""
    return [(parts[0], style), *((f"   {part}", "") for part in parts[1:])]


def _step_line(view: LiveView) -> Line:
    parts: list[Piece] = []
    if view.step is not None:
        of = " of this attempt" if view.step_is_global is False and view.attempts > 1 else ""
        parts += [("step ", ""), (_number(view.step), _STRONG), (of, "")]
    if view.standing_s > 0:
        parts += [("   ", ""), (f"standing for {duration(view.standing_s)}", _FAULT)]
    elif view.steps_per_s is not None:
        parts += [("   ", ""), (_speed(view.steps_per_s), "")]
    if view.checkpoint_at is not None:
        after = count_words(view.checkpoint_step) if view.checkpoint_step is not None else "an unknown step"
        parts += [("   ", ""), (f"checkpoint after {after}, {ago(view.checkpoint_at, view.at)}", "")]
    return parts[1:] if parts and parts[0][0] == "   " else parts


def _goodput_line(view: LiveView, sheet: Sheet) -> Line:
    assert view.goodput is not None
    whole_s = max(view.wall_s, sum(view.buckets.values()))
    shares = {name: seconds / whole_s for name, seconds in view.buckets.items() if seconds > 0}
    lost = sorted(((share, name) for name, share in shares.items() if name != Bucket.PRODUCTIVE.value), reverse=True)
    told = [f"{name} {share:.0%}" for share, name in lost[:_MOST_PARTS] if share >= 0.005]
    bar = [(_FILL[name][0 if sheet.is_unicode else 1] * count, _FILL[name][2]) for name, count in _parts(shares)]
    line = [
        (f"goodput {AT_MOST if view.at_most else ''}", ""),
        (f"{view.goodput:.1%}", _STRONG),
        (f" of {duration(view.wall_s)}  ", ""),
        *bar,
    ]
    room = sheet.width - sum(cells(text) for text, _ in line) - 2
    while told and len(", ".join(told)) > room:
        told.pop()
    return [*line, (f"  {', '.join(told)}" if told else "", "")]


def _parts(shares: Mapping[str, float]) -> list[tuple[str, int]]:
    """Return how many cells of the bar each bucket takes, in the order of the account; together all of them."""
    order = [name for name in _FILL if shares.get(name, 0.0) > 0]
    exact = {name: shares[name] * _BAR_CELLS for name in order}
    counts = {name: int(cells_) for name, cells_ in exact.items()}
    left = min(_BAR_CELLS, round(sum(exact.values()))) - sum(counts.values())
    for name in sorted(order, key=lambda name: counts[name] - exact[name])[: max(0, left)]:
        counts[name] += 1
    return [(name, counts[name]) for name in order if counts[name]]


def _labelled(label: str, text: str, style: str, sheet: Sheet, *, most: int) -> list[Line]:
    """Return a text behind its label; wrapped into `most` lines of a screen, or as many as it takes."""
    label = f"{label:<9}"
    wrapped = wrap(text, sheet.width - len(label), sheet, most if sheet.height is not None else None)
    return [[(label if number == 0 else " " * len(label), style), (part, "")] for number, part in enumerate(wrapped)]


# -- the table


@attrs.frozen
class TableColumn:
    """A column: its head, its width, and what stands in it."""

    name: str
    width: int
    text: Callable[[RankRow], str]
    is_number: bool = False
    keep_end: bool = False


def _columns(view: LiveView, sheet: Sheet) -> tuple[Line, list[TableColumn]]:
    rows = view.rows
    several = (view.nodes or 1) > 1 or len({row.node for row in rows if row.node}) > 1
    all_read = all(row.seen == PAGE for row in rows)
    columns = [
        TableColumn("", 1, lambda row: _MARKS[row.trouble]),
        TableColumn(
            "RANK", max(4, *(len(str(row.rank)) for row in rows), 0), lambda row: str(row.rank), is_number=True
        ),
    ]
    if several:
        longest = max((cells(row.node or "") for row in rows), default=0)
        columns.append(
            TableColumn("NODE", min(max(4, longest), 10 + max(0, sheet.width - 80) // 3), _node, keep_end=True)
        )
    steps = max([4, *(len(_step(row)) for row in rows)])
    columns.append(TableColumn("STEP", steps, _step, is_number=True))
    lags = max([3, *(len(_lag(row)) for row in rows)])
    columns.append(TableColumn("LAG", lags, _lag, is_number=True))
    columns.append(TableColumn(" BEAT / LIMIT", 13, _beat))
    columns.append(TableColumn("DOES", 8, lambda row: "slow" if row.trouble == 2 else row.activity))
    if any(row.score is not None for row in rows):
        columns.append(
            TableColumn("SCORE", 5, lambda row: "" if row.score is None else f"{row.score:.2f}", is_number=True)
        )
    if sheet.width >= _WIDE:
        if any(row.memory is not None for row in rows):
            columns.append(TableColumn("MEMORY", 8, lambda row: _amount(row.memory), is_number=True))
        if any(row.device_memory is not None for row in rows):
            columns.append(TableColumn("DEVICE", 8, lambda row: _amount(row.device_memory), is_number=True))
    if not all_read:
        columns.append(TableColumn("SEEN", 5, _seen))
    left = sheet.width - sum(column.width + 1 for column in columns)
    if left >= 4:
        columns.append(TableColumn("IN", left, lambda row: _where(row, left), keep_end=True))
    head = " ".join(_cell(column.name, column, sheet) for column in columns)
    return [(head + " " * (sheet.width - cells(head)), _HEAD)], columns


def _amount(count: int | None) -> str:
    return "" if count is None else size(count)


def _row(row: RankRow, columns: Sequence[TableColumn], sheet: Sheet) -> Line:
    text = " ".join(_cell(column.text(row), column, sheet) for column in columns)
    return [(text, _BY_TROUBLE[row.trouble])]


def _cell(text: str, column: TableColumn, sheet: Sheet) -> str:
    shown = fit(text, column.width, sheet, keep_end=column.keep_end and column.name != text)
    gap = " " * (column.width - cells(shown))
    return gap + shown if column.is_number else shown + gap


def _node(row: RankRow) -> str:
    return row.node or ""


def _step(row: RankRow) -> str:
    return "-" if row.step is None else str(row.step)


def _lag(row: RankRow) -> str:
    lag = row.shown_lag
    return "" if not lag else f"-{lag}"


def _beat(row: RankRow) -> str:
    age = "-" if row.age_s is None else _short(row.age_s)
    return f"{age:>5} / {'-' if row.deadline_s is None else _short(row.deadline_s):>5}"


def _seen(row: RankRow) -> str:
    if row.seen == PAGE:
        return "now"
    if row.seen_s is None:
        return "?"
    return f"{_short(row.seen_s)}{'' if row.seen == NODE else '*'}"


def _where(row: RankRow, width: int) -> str:
    if row.activity in (GONE, "left", "paused") and row.detail:
        return row.detail
    whole = " > ".join(row.sections)
    return whole if cells(whole) <= width else row.sections[-1]


def _rest(view: LiveView, shown: int) -> str:
    """Return what is not in the table, in one line."""
    parts = []
    hidden = view.ranks - shown
    if hidden > 0:
        does = ", ".join(f"{word} {_number(count)}" for word, count in list(view.activities.items())[:5])
        parts.append(f"{shown} of {_number(view.ranks)} ranks ({does})")
    if view.unseen and view.is_running:
        parts.append(f"of {_number(view.unseen)} ranks nothing is known")
    if any(row.seen not in (PAGE, NODE) for row in view.rows) and view.is_running:
        parts.append("* by the journal")
    return "; ".join(parts)


# -- the foot


def _events(view: LiveView, events: Iterable[tuple[float, str, str]], sheet: Sheet) -> list[Line]:
    found: list[Line] = []
    for at, _, text in events:
        clock = _clock(at, view.at)
        wrapped = wrap(text, sheet.width - len(clock) - 1, sheet, 1 if sheet.height is not None else None)
        for number, part in enumerate(wrapped):
            found.append([(f"{clock if number == 0 else ' ' * len(clock)} ", _PALE), (part, "")])
    return found


def _clock(at: float, now: float) -> str:
    """Return the time of day, or the day of what is older."""
    try:
        return time.strftime("%H:%M:%S" if abs(now - at) < 43200 else "%d %b %H", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "--:--:--"


# -- words and widths


def _number(value: int) -> str:
    return f"{value:,}"


def _speed(per_s: float) -> str:
    if 0 < per_s < 0.1:
        return f"{1 / per_s:.1f} s a step"
    return f"{per_s:.3g} steps/s" if per_s < 1000 else f"{per_s:.0f} steps/s"


def _short(seconds: float) -> str:
    """Return a duration in at most five characters."""
    if not seconds < 360_000_000:
        return "long"
    for least, unit, length in ((360_000, "d", 86400), (36_000, "h", 3600), (1000, "m", 60)):
        if seconds >= least:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"


_SPACES = str.maketrans("\n\t", "  ")


def cells(text: str) -> int:
    """Return how many columns of a terminal a text takes that `safe` has returned."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def safe(text: str, sheet: Sheet) -> str:
    """Return job text as one line without what steers a terminal or has a width of its own mind."""
    flat = printable(text).translate(_SPACES)
    if flat.isascii():
        return flat
    flat = "".join(c for c in unicodedata.normalize("NFC", flat) if not unicodedata.category(c).startswith("M"))
    return flat if sheet.is_unicode else flat.encode("ascii", "replace").decode()


def fit(text: str, width: int, sheet: Sheet, *, keep_end: bool = False) -> str:
    """Return a text in at most `width` cells; of a longer one its beginning, or its end, and a sign that it was cut."""
    flat = safe(text, sheet)
    if cells(flat) <= width:
        return flat
    kept, room = "", width - cells(sheet.cut)
    for character in reversed(flat) if keep_end else flat:
        room -= cells(character)
        if room < 0:
            break
        kept += character
    return sheet.cut + kept[::-1] if keep_end else kept + sheet.cut


def wrap(text: str, width: int, sheet: Sheet, most: int | None) -> list[str]:
    """Return a text in lines of at most `width` cells, broken between words; what `most` lines do not hold is cut."""
    words = safe(text, sheet).split()
    found: list[str] = []
    line = ""
    for number, word in enumerate(words):
        longer = f"{line} {word}" if line else word
        if cells(longer) <= width:
            line = longer
            continue
        if most is not None and len(found) + 1 >= most:
            return [*found, fit(f"{line} {' '.join(words[number:])}".strip(), width, sheet)]
        found += [line] if line else []
        line = fit(word, width, sheet)
    return [*found, line] if line else found


def _fitted(line: Line, sheet: Sheet) -> Line:
    """Return a line that is no wider than the sheet, whatever stands in it."""
    kept: Line = []
    room = sheet.width
    for told, style in line:
        text = safe(told, sheet)
        if cells(text) > room:
            kept.append((fit(text, room, sheet), style) if room > 0 else ("", style))
            break
        kept.append((text, style))
        room -= cells(text)
    return kept
