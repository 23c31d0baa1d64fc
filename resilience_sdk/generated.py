"""Parts of the documentation that are made from the code, each between two marks of its own."""

from __future__ import annotations

from pathlib import Path


def rewrite(page: Path, part: str) -> None:
    """Replace a part of `page` by `part`, whose first and last line are its marks.

    Raises:
        ValueError: The page lacks a mark.
    """
    begin, *_, end = part.splitlines()
    head, rest = page.read_text(encoding="utf-8").split(begin, 1)
    _, tail = rest.split(end, 1)
    page.write_text(head + part + tail, encoding="utf-8")


def cell(text: str) -> str:
    """Return a text as it stands in a cell of a Markdown table."""
    return text.replace("|", "\\|")
