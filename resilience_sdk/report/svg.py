"""Elements of a picture: SVG as escaped text, the axis of time, and what all pictures over time have in common. Pure.

Widths are shares of the whole (`x="12.5%"`), heights pixels: a picture fills a telephone and a wide screen, and its
letters keep their size. Lines lie in a nested picture that is stretched (`preserveAspectRatio="none"`), 1000 wide.

Every text, whoever wrote it, goes through `tag`, which escapes it. Colours are classes of the style sheet. What a mark
says to whoever points at it is its `title`, which a browser shows by itself, and the page's script faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs
from markupsafe import Markup, escape

from resilience_sdk.core.console import printable
from resilience_sdk.report import scales
from resilience_sdk.report.facts import Pin

WIDTH = 1000.0
AXIS = 22
"""Pixels below a picture for the words of its axis."""
PIN_LETTERS = {"crash": "C", "hang": "H", "slow": "S", "preemption": "P", "numerics": "N"}
TIP_CHARACTERS = 240


@attrs.frozen
class TimeSpan:
    """What all time axes of a page have in common, so that a moment stands at the same place in each picture."""

    began_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.ended_at - self.began_at

    def share(self, at: float) -> float:
        """Return where a moment is, 0 to 1."""
        return scales.share_of(at, self.began_at, self.ended_at)


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """Return an element; `class_` and `data_tip` are the attributes `class` and `data-tip`, None is left out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    body = "".join(_text(part) for part in inside)
    return Markup(f"<{name}{told}>{body}</{name}>")  # noqa: S704 - both are escaped


def _text(value: object) -> Markup:
    if isinstance(value, Markup):
        return value
    return escape(digits(value) if isinstance(value, float) else printable(str(value)))


def digits(value: float) -> str:
    """Return a coordinate: two digits are a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"


def percent_at(share: float) -> str:
    """Return a share as a coordinate."""
    return f"{digits(100 * share)}%"


def tip(*parts: object) -> Markup:
    """Return the title of a mark: a few words for each part that is there."""
    return tag("title", shortened(", ".join(str(part) for part in parts if part)))


def shortened(text: str) -> str:
    """Return a text that is read beside the pointer."""
    return text if len(text) <= TIP_CHARACTERS else f"{text[: TIP_CHARACTERS - 3]}..."


def join(parts: Iterable[Markup]) -> Markup:
    """Return elements one after the other."""
    return Markup("").join(parts)


def swatch(class_: str) -> Markup:
    """Return the key of a colour."""
    return tag(
        "svg",
        tag("rect", width=12, height=12, rx=2, class_=class_),
        class_="swatch",
        width=12,
        height=12,
        aria_hidden="true",
    )


def time_axis(span: TimeSpan, top: float, bottom: float) -> Markup:
    """Return vertical lines and, below them, the time that has passed; every second label goes on a small screen."""
    drawn = []
    for index, seconds in enumerate(scales.time_ticks(span.seconds)):
        share = scales.share_of(seconds, 0, span.seconds)
        at = percent_at(share)
        anchor = "start" if share < 0.02 else "end" if share > 0.97 else "middle"
        drawn += [
            tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"),
            tag("text", scales.elapsed(seconds), x=at, y=bottom + 15, class_=f"tick a-{anchor}{' odd' * (index % 2)}"),
        ]
    return join(drawn)


def pin_lines(pins: Sequence[Pin], span: TimeSpan, bottom: float) -> Markup:
    """Return a line for each pin, from the upper edge down."""
    drawn = []
    for pin in pins:
        at, told = percent_at(span.share(pin.at)), tip(f"{pin.kind} {pin.id}", pin.label, scales.clock(pin.at))
        drawn.append(tag("line", told, x1=at, x2=at, y1=0, y2=bottom, class_=f"pin-line {kind_class(pin.kind)}"))
    return join(drawn)


def kind_class(kind: str) -> str:
    """Return the class of a kind of incident."""
    return f"k-{kind}" if kind in PIN_LETTERS else "k-other"


def plot(label: str, height: float, span: TimeSpan, *inside: Markup) -> Markup:
    """Return a picture over time, as wide as its place; the script finds the time of a pointer by its attributes."""
    return tag(
        "svg",
        *inside,
        class_="plot",
        height=height,
        role="group",
        aria_label=label,
        data_from=f"{span.began_at:.3f}",
        data_to=f"{span.ended_at:.3f}",
    )


def framed(
    label: str,
    height: float,
    span: TimeSpan,
    labels: Sequence[tuple[float, str]],
    *inside: Markup,
    after: Sequence[Markup] = (),
) -> Markup:
    """Return a picture over time with words at its left, each at its height, and the axis of time below."""
    words = [tag("text", text, x="100%", y=y + 4, class_="tick a-end") for y, text in labels]
    gutter = tag("g", *words, transform="translate(-8 0)")
    return tag(
        "div",
        tag("svg", gutter, class_="gutter", height=height + AXIS, aria_hidden="true"),
        plot(label, height + AXIS, span, *inside),
        *after,
        class_="chart",
    )


def stretched(height: float, *inside: Markup, class_: str | None = None) -> Markup:
    """Return a picture in which 1000 is the whole width."""
    return tag(
        "svg", *inside, viewBox=f"0 0 {WIDTH:.0f} {digits(height)}", preserveAspectRatio="none", width="100%",
        height=height, class_=class_,
    )  # fmt: skip
