"""The table in `docs/settings.md`, made from the fields: `python -m resilience_sdk.settings.docs FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from resilience_sdk.settings.fields import FIELDS, shown_default
from resilience_sdk.settings.nvrx import KEYS, SECTION

BEGIN, END = "<!-- settings: generated -->", "<!-- settings: end -->"


def settings_table() -> str:
    """Return the generated part of the page: a row per field, and what NVIDIA's keys become."""
    rows = [
        f"| `{name}` | {_cell(shown_default(field))} | {_cell(field.metadata['doc'])} |"
        for name, field in FIELDS.items()
    ]
    theirs = [
        f"| `{name}` | {f'`{key.field}`' if key.field else f'no counterpart: {key.reason}'} |"
        for name, key in KEYS.items()
    ]
    return "\n".join(
        [
            BEGIN,
            "",
            "| setting | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
            f"Keys of a `{SECTION}:` section of NVIDIA's extension:",
            "",
            "| key there | becomes |",
            "|---|---|",
            *theirs,
            "",
            END,
        ]
    )


def rewrite(page: Path) -> None:
    """Replace the generated part of `page`; raise ValueError where its two marks are missing."""
    text = page.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN, 1)
    page.write_text(head + settings_table() + rest.split(END, 1)[1], encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
