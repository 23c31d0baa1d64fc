"""The page of a report: facts of a run become one HTML file that needs nothing beside it. Pure.

A section is a template of its own, so that a page that lives (`live=True`, the dashboard) replaces one at a time. What
a job wrote goes through the template engine with escaping on, and its control characters are replaced: nothing that a
template prints is markup, but for pictures, which `charts` makes and escapes by itself.

A browser runs and loads what the page brings and nothing else: its policy names the hashes of its one style sheet and
of its script. There are no inline styles and handlers, so injected ones would not count either.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.console import printable
from resilience_sdk.errors import MissingExtraError
from resilience_sdk.goodput.buckets import DEFINITIONS, Bucket
from resilience_sdk.report import scales
from resilience_sdk.report.facts import AttemptTimes, CurveFacts, IncidentFacts, RunFacts, Segment

try:
    import jinja2
    from markupsafe import Markup, escape

    from resilience_sdk.report import charts, rank_charts, svg
except ImportError as error:
    raise MissingExtraError(
        f"a report needs jinja2, which cannot be imported ({error}): pip install 'resilience-sdk[report]'"
    ) from error

SECTIONS: Mapping[str, str] = {
    "summary": "Summary",
    "time": "Time",
    "incidents": "Incidents",
    "curves": "Curves",
    "step": "A step",
    "ranks": "Ranks",
    "checkpoints": "Checkpoints",
    "nodes": "Nodes",
    "events": "Events",
    "problems": "Problems",
}
"""Ids of the sections in their order, each with its name."""

_HERE = Path(__file__).parent
_TEXT_LIMITS = (4000, 1000, 250, 80)
_MOST_BYTES = 4_500_000
_ICON_COLOURS = {"running": "3b6fd4", "finished": "14805a", "ended": "c2410c", "lost": "c2182b"}
_NEWEST_OPEN = 3


def render_page(facts: RunFacts, *, live: bool = False, script: str = "") -> str:
    """Return the page as the text of a file; the same facts give the same text.

    A live one may ask the place that it came from for more, which `script` does: a part of the page's policy. Where
    texts would make the page larger than a mail takes, long ones are cut, and the page says so.
    """
    for limit in _TEXT_LIMITS:
        page = _render_page(facts, limit, live=live, script=script)
        if len(page.encode()) <= _MOST_BYTES:
            break
    return page


def render_sections(facts: RunFacts) -> dict[str, str]:
    """Return the HTML inside of each section by the section's id; empty where it has nothing to say."""
    return _render_sections(facts, _TEXT_LIMITS[0])


def allowed(script: str = "") -> dict[str, str]:
    """Return what a page with this script brings along and may use, by directive of its policy: the sums of each."""
    scripts = filter(None, (_read("page.js"), script))
    return {"style-src": _hash(_read("style.css")), "script-src": " ".join(map(_hash, scripts))}


def _render_page(facts: RunFacts, limit: int, *, live: bool, script: str) -> str:
    style, own_script = _read("style.css"), _read("page.js")
    scripts = [own_script, script] if script else [own_script]
    policy = [
        "default-src 'none'",
        *(f"{kind} {sums}" for kind, sums in allowed(script).items()),
        "img-src data:",
        *(["connect-src 'self'"] if live else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    sections = {name: Markup(text) for name, text in _render_sections(facts, limit).items()}  # noqa: S704 - escaped by then
    page: str = (
        _environment(limit)
        .get_template("page.html")
        .render(
            facts=facts,
            zone=scales.zone(facts.at),
            live=live,
            policy="; ".join(policy),
            icon=_ICON_COLOURS.get(facts.headline.state, "6b7280"),
            style=Markup(style),  # noqa: S704 - files of ours
            scripts=[Markup(text) for text in scripts],  # noqa: S704
            sections=sections,
            names=SECTIONS,
        )
    )
    return page


def _render_sections(facts: RunFacts, limit: int) -> dict[str, str]:
    environment = _environment(limit)
    view = _view(facts)
    if limit < _TEXT_LIMITS[0]:
        view["problems"] = (*facts.problems, f"long texts were cut after {limit} characters: the page stays small")
    return {name: environment.get_template(f"{name}.html").render(view).strip() for name in SECTIONS}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _read(name: str) -> str:
    """Return a file of the page; surrounding line breaks are its own, as a hash counts them."""
    return (_HERE / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment(limit: int) -> jinja2.Environment:
    """Return the template engine; texts have at most so many characters, but for what is to be copied."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: _printed(value, limit),
    )
    environment.filters.update(
        spoken=scales.spoken,
        percent=scales.percent,
        bytes=scales.size,
        number=scales.number,
        clock=_clock,
        whole=lambda value: escape(printable(str(value))),
        anchor=charts.name_of,
    )
    environment.globals.update(charts=charts, ranks=rank_charts, swatch=svg.swatch)
    return environment


def _printed(value: object, limit: int) -> object:
    if isinstance(value, Markup):
        return value
    text = printable(str(value))
    return text if len(text) <= limit else f"{text[:limit]} ... (cut)"


def _clock(unix_s: float | None) -> Markup:
    """Return a moment; the script adds the time of whoever reads."""
    told = "" if unix_s is None else scales.clock(unix_s)
    if unix_s is None or not told:
        return Markup("at an unknown time")
    return svg.tag("time", told, datetime=scales.iso(unix_s))


@attrs.frozen
class BucketRow:
    """A bucket with what it took and what it is; None: nobody knows."""

    name: str
    seconds: float | None
    share: float
    meaning: str


@attrs.frozen
class Tile:
    """A figure that is read at a glance."""

    name: str
    value: str
    note: str
    meaning: str


def _view(facts: RunFacts) -> dict[str, Any]:
    """Return what the templates show: the facts, and what is derived from them."""
    span = span_of(facts)
    cards = {incident.id for incident in facts.incidents} | {one.id for one in facts.standstills}
    newest_first = sorted(facts.incidents, key=lambda incident: (incident.at or 0.0, incident.id), reverse=True)
    return {
        "facts": facts,
        "has_run": bool(facts.segments or facts.attempts or facts.incidents),
        "headline": facts.headline,
        "has_jobs": facts.job_number > 1,
        "job_of": {id: one.job_number for one in facts.attempts for id in one.incidents if facts.job_number > 1},
        "span": span,
        "tiles": _tiles(facts.goodput),
        "buckets": _bucket_rows(facts.goodput, facts.segments),
        "strip": charts.time_strip(facts.segments, facts.attempts, facts.pins, span, frozenset(cards))
        if span.seconds > 0 and (facts.segments or facts.attempts)
        else None,
        "pictures": _pictures(facts, span),
        "incidents": newest_first,
        "open_cards": {
            incident.id for incident in newest_first[: _NEWEST_OPEN if len(newest_first) <= _NEWEST_OPEN else 1]
        },
        "is_guess": _is_guess,
        "problems": facts.problems,
        "patterns": charts.patterns(),
    }


def span_of(facts: RunFacts) -> svg.TimeSpan:
    """Return what the time axes show: the run, and whatever was told outside of it."""
    parts: Sequence[Segment | AttemptTimes] = (*facts.segments, *facts.attempts)
    ends = [end for part in parts for end in (part.began_at, part.ended_at)]
    told = scales.finite([facts.started_at, facts.ended_at, *ends])
    if not told:
        return svg.TimeSpan(0.0, 0.0)
    return svg.TimeSpan(min(told), max(told))


def _is_guess(incident: IncidentFacts) -> bool:
    return incident.confidence is not None and incident.confidence < 0.5


def _tiles(goodput: Mapping[str, Any]) -> list[Tile]:
    if not goodput:
        return []
    meanings = goodput.get("definitions") or {}
    low, high = goodput.get("mttf_low_s"), goodput.get("mttf_high_s")
    between = (
        ""
        if low is None
        else f"{scales.spoken(low)} to {scales.spoken(high)}"
        if high is not None
        else f"at least {scales.spoken(low)}"
    )
    faults, injected = goodput.get("faults"), goodput.get("injected")
    left_out = f"{injected} injected, not counted" if injected else ""
    bound = "at most: lost steps are not counted" if _lost(goodput)[0] == "unknown" else ""
    return [
        Tile("Goodput", scales.percent(goodput.get("goodput")), bound, meanings.get("goodput", "")),
        Tile("ETTR", scales.percent(goodput.get("ettr")), bound, meanings.get("ettr", "")),
        Tile("Faults", "-" if faults is None else str(faults), left_out, "crashes and hangs; a preemption is none"),
        Tile("MTTF", scales.spoken(goodput.get("mttf_s")), between, meanings.get("mttf_s", "")),
        Tile("MTTR", scales.spoken(goodput.get("mttr_s")), "", meanings.get("mttr_s", "")),
        Tile("Lost steps", *_lost(goodput), "steps done again, over all attempts"),
    ]


def _lost(goodput: Mapping[str, Any]) -> tuple[str, str]:
    """Return the number of lost steps, and why there is none after a fault."""
    if (goodput.get("buckets") or {}).get(Bucket.REPLAYED.value, 0.0) is None:
        return "unknown", "steps are not counted over attempts"
    lost = goodput.get("lost_steps")
    return "-" if lost is None else str(lost), ""


def _bucket_rows(goodput: Mapping[str, Any], segments: Sequence[Segment]) -> list[BucketRow]:
    """Return every bucket in its order; without an account what the segments add up to."""
    seconds: dict[str, float | None] = dict(goodput.get("buckets") or {})
    if not seconds:
        for segment in segments:
            for name, part in segment.parts.items():
                seconds[name] = (seconds.get(name) or 0.0) + part
    whole = sum(scales.finite(seconds.values()))
    if not whole:
        return []
    known = [bucket.value for bucket in Bucket]
    meanings = {bucket.value: text for bucket, text in DEFINITIONS.items()} | (goodput.get("definitions") or {})
    names = [*known, *(name for name in seconds if name not in known)]
    return [
        BucketRow(name, seconds.get(name, 0.0), (seconds.get(name) or 0.0) / whole, meanings.get(name, ""))
        for name in names
    ]


def _pictures(facts: RunFacts, span: svg.TimeSpan) -> list[tuple[str, list[CurveFacts], Markup, int, int]]:
    """Return the curves: title, lines, picture, and how many points are beyond the axis or no finite number.

    Step times share an axis where they share a unit. What a job told of its loss has no common measure: each its own.
    """
    groups: list[tuple[str, list[CurveFacts], bool]] = []
    for curve in facts.step_time:
        same = next((group for group in groups if group[1][0].unit == curve.unit and len(group[1]) < 4), None)
        if same:
            same[1].append(curve)
        else:
            groups.append(("Step time" if curve.unit == "s" else curve.name, [curve], True))
    groups += [(curve.name, [curve], False) for curve in facts.loss]
    return [
        (
            title,
            curves,
            charts.curve_chart(title, curves, facts.pins, span, from_zero=from_zero),
            _beyond(curves, charts.curve_edges(curves, from_zero=from_zero)[-1]),
            sum(len(curve.not_finite) for curve in curves),
        )
        for title, curves, from_zero in groups
        if span.seconds > 0
    ]


def _beyond(curves: Sequence[CurveFacts], high: float) -> int:
    return sum(value > high for curve in curves for value in scales.finite(curve.values))
