"""Draws the sequence diagrams of the pages as SVG: whoever shows Mermaid fetches a program from another host for it.

The part of Mermaid's language that the pages use: `participant A as words`, `A->>B: words` and `A-->>B: words`
(dashed), and `loop words` to `end`.
"""

from __future__ import annotations

import re
import textwrap
from html import escape

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_DIAGRAM = re.compile(r"^```mermaid\nsequenceDiagram\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
_MESSAGE = re.compile(r"(\w+)(-?)->>(\w+): (.+)")
_COLUMN, _LINE, _MARGIN, _CHARACTERS = 230, 16, 110, 34
_STYLE = "font:12px system-ui,sans-serif;fill:currentColor"


def drawn(text: str) -> str:
    """Return the picture of a diagram; raises ValueError for a line that it cannot draw."""
    places: dict[str, int] = {}
    parts: list[str] = []
    heads: list[str] = []
    y = 60
    for line in filter(None, map(str.strip, text.splitlines())):
        if found := _PARTICIPANT.fullmatch(line):
            x = places[found[1]] = _MARGIN + _COLUMN * len(places)
            heads.append(_words(x, 24, [found[2]], "middle", "font-weight:600"))
        elif found := _MESSAGE.fullmatch(line):
            words = textwrap.wrap(found[4], _CHARACTERS)
            parts += _message(places[found[1]], places[found[3]], y, words, dashed=bool(found[2]))
            y += _LINE * len(words) + 22
        elif line == "end" or line.startswith("loop "):
            said = [line.removeprefix("loop ")] if line != "end" else []
            parts += [
                _path(f"M12 {y - 6}H{_width(places) - 12}", "stroke-dasharray:2 4;opacity:.6"),
                _words(16, y + 8, said),
            ]
            y += 30 if said else 18
        else:
            raise ValueError(f"a line of a sequence diagram that is not drawn: {line}")
    lives = [_path(f"M{x} 34V{y}", "opacity:.35") for x in places.values()]
    box = f"0 0 {_width(places)} {y + 8}"
    return f'<svg class="sequence" viewBox="{box}" role="img">{"".join([*lives, *heads, *parts])}</svg>'


def _width(places: dict[str, int]) -> int:
    return 2 * _MARGIN + _COLUMN * (len(places) - 1)


def _message(start: int, end: int, y: int, words: list[str], *, dashed: bool) -> list[str]:
    """Return an arrow with its words above it; to oneself a mark with its words beside it."""
    if start == end:
        return [_path(f"M{start} {y}h10v{_LINE * len(words)}h-10"), _words(start + 16, y + 12, words)]
    under = y + _LINE * len(words)
    tip = 6 if start < end else -6
    dashes = "stroke-dasharray:6 4" if dashed else ""
    arrow = _path(f"M{start} {under}H{end}", dashes) + _path(f"M{end - tip} {under - 4}L{end} {under}l{-tip} 4")
    return [arrow, _words((start + end) // 2, y + 8, words, "middle")]


def _words(x: int, y: int, lines: list[str], anchor: str = "start", style: str = "") -> str:
    told = "".join(
        f'<tspan x="{x}" y="{y + _LINE * number}">{escape(each)}</tspan>' for number, each in enumerate(lines)
    )
    return f'<text text-anchor="{anchor}" style="{_STYLE};{style}">{told}</text>'


def _path(path: str, style: str = "") -> str:
    return f'<path d="{path}" style="fill:none;stroke:currentColor;{style}"/>'


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the pictures in the places of the diagrams."""
    return _DIAGRAM.sub(lambda diagram: drawn(diagram[1]), markdown)
