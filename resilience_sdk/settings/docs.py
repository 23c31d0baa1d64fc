"""The table in `docs/settings.md`, made from the fields: `python -m resilience_sdk.settings.docs FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from resilience_sdk.generated import cell, rewrite
from resilience_sdk.settings.fields import FIELDS, shown_default
from resilience_sdk.settings.nvrx import KEYS, SECTION

BEGIN, END = "<!-- settings: generated -->", "<!-- settings: end -->"


def settings_table() -> str:
    """Return the generated part of the page: a row per field, and what NVIDIA's keys become."""
    rows = [
        f"| `{name}` | {cell(shown_default(field))} | {cell(field.metadata['doc'])} |" for name, field in FIELDS.items()
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


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]), settings_table())
