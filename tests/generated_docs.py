"""Tables of the documentation that are made from the code: `python -m tests.generated_docs` writes all of them anew."""

from __future__ import annotations

import enum
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilience_sdk.core.settings import nvrx
from resilience_sdk.core.settings.fields import FIELDS, shown_default
from resilience_sdk.health.probes import GPU, HealthCheck
from resilience_sdk.telemetry.metrics import FAMILIES
from tests.exact import results

DOCS = Path(__file__).parent.parent / "docs"
CURE = "run: python -m tests.generated_docs"


def settings_table() -> str:
    """Return a row per setting."""
    fields = [
        f"| `{name}` | {cell(shown_default(field))} | {cell(field.metadata['doc'])} |" for name, field in FIELDS.items()
    ]
    return "\n".join(
        [
            "| setting | default | meaning |",
            "|---|---|---|",
            *fields,
        ]
    )


def nvrx_table() -> str:
    """Return a row per option of NVIDIA's launcher, those of keys of its section first."""
    becomes = {name: f"`{field}`" for name, field in {**nvrx.TRANSLATED, **nvrx.OPTIONS_TRANSLATED}.items()}
    becomes |= nvrx.OPTIONS_TAKEN
    without = {**nvrx.WITHOUT_COUNTERPART, **nvrx.OPTIONS_WITHOUT_COUNTERPART}
    becomes |= {name: f"no counterpart: {reason}" for name, reason in without.items()}
    rows = [
        f"| `{nvrx.spellings(name)[0]}` | {f'`{name}`' if name in nvrx.KEYS else ''} | {cell(becomes[name])} |"
        for name in (*nvrx.KEYS, *nvrx.OPTIONS)
    ]
    return "\n".join([f"| option | key of `{nvrx.SECTION}:` | becomes |", "|---|---|---|", *rows])


def metrics_table() -> str:
    """Return a row per metric."""
    rows = [
        f"| `{family.prometheus_name}` | `{family.otel_name}` | {family.kind} "
        f"| {', '.join(f'`{label}`' for label in family.labels)} | {family.about} |"
        for family in FAMILIES.values()
    ]
    return "\n".join(
        ["| Prometheus | OpenTelemetry | kind | labels | meaning |", "|---|---|---|---|---|", *rows],
    )


def gpu_table() -> str:
    """Return a row per check of a GPU."""
    rows = [
        f"| `{name}`{' (must)' if rule.must else ''} | {cell(rule.looks_at)} | {_limit(rule)} "
        f"| {cell(rule.cure)} | {cell(rule.source)} |"
        for name, rule in GPU.checks.items()
    ]
    return "\n".join(["| check | looks at | limit | cure | source |", "|---|---|---|---|---|", *rows])


def _limit(rule: HealthCheck) -> str:
    parts = []
    if rule.limit is not None:
        parts.append(f"{rule.limit} {rule.unit}".strip())
    if rule.growth_per_minute is not None:
        growth = "any growth" if rule.growth_per_minute == 0 else f"more than {rule.growth_per_minute:g} a minute"
        parts.append(f"{growth} during a run")
    return ", ".join(parts) or "the driver's own"


_ENTRY = re.compile(r"^::: (\S+)\n    options: \{heading: ([^,}]+)", re.MULTILINE)
_WITH_METHODS = ("Run", "checkpoint.Checkpointer")


def calls_table() -> str:
    """Return a row per call of the API, with its arguments: who reads the page as text sees no signatures else."""
    rows = []
    for place, heading in _ENTRY.findall((DOCS / "api.md").read_text(encoding="utf-8")):
        found = pkgutil.resolve_name(place)
        if not (isinstance(found, type) and issubclass(found, enum.Enum)):
            rows.append((heading, found))
        if heading in _WITH_METHODS:
            names = [name for name, one in vars(found).items() if inspect.isfunction(one) and not name.startswith("_")]
            rows += [(f"{heading.rpartition('.')[2]}.{name}", getattr(found, name)) for name in names]
    return "\n".join(["| call | |", "|---|---|", *(_call_row(heading, found) for heading, found in rows)])


def _call_row(heading: str, found: Any) -> str:
    signature = inspect.signature(found)
    kept = [one.replace(annotation=one.empty) for name, one in signature.parameters.items() if name != "self"]
    arguments = "" if heading == "Run" else signature.replace(parameters=kept, return_annotation=signature.empty)
    about = (inspect.getdoc(found) or "").partition("\n")[0]
    return f"| `{heading}{cell(str(arguments))}` | {cell(about)} |"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("settings.md", "settings"): settings_table,
    ("api.md", "calls"): calls_table,
    ("nvrx.md", "nvrx"): nvrx_table,
    ("telemetry.md", "metrics"): metrics_table,
    ("health.md", "gpu checks"): gpu_table,
    ("reliability.md", "exact resumes"): lambda: results.summary(results.read()["cells"]),
    ("checkpoints.md", "exact in each way"): results.matrix,
    ("adapters/pytorch.md", "exact attach"): lambda: results.table("attach"),
    ("adapters/transformers.md", "exact Trainer"): lambda: results.table("Trainer"),
    ("adapters/lightning.md", "exact Lightning"): lambda: results.table("Lightning"),
    ("adapters/accelerate.md", "exact Accelerate"): lambda: results.table("Accelerate"),
    ("adapters/deepspeed.md", "exact DeepSpeed"): lambda: results.table("DeepSpeed"),
    ("adapters/megatron.md", "exact Megatron"): lambda: results.table("Megatron"),
}
"""By page and name; `<!-- NAME: generated -->` and `<!-- NAME: end -->` stand around each."""


def cell(text: str) -> str:
    """Return a text as it stands in a cell of a Markdown table."""
    return text.replace("|", "\\|")


def replaced(page: str, name: str, table: str) -> str:
    """Return the text of a page with this table between the marks of that name.

    Raises:
        ValueError: The page lacks a mark.
    """
    begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
    head, rest = page.split(begin, 1)
    _, tail = rest.split(end, 1)
    return f"{head}{begin}\n\n{table}\n\n{end}{tail}"


def main() -> None:
    """Write every table into its page."""
    for (page, name), table in TABLES.items():
        file = DOCS / page
        file.write_text(replaced(file.read_text(encoding="utf-8"), name, table()), encoding="utf-8")


if __name__ == "__main__":
    main()
