"""The page docs/peers.md: what stands in `page.md`, and the tables of the kept results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import processes
from tests.bench.peers.watching import CAUSES, LINE, NAMES

FILE = Path(__file__).with_name("results.json")
PAGE = processes.ROOT / "docs" / "peers.md"
_FRAME = Path(__file__).with_name("page.md")
FAULTS = {
    "asleep": "A rank sleeps for ever",
    "killed": "A rank is killed by SIGKILL",
    "exception": "A rank raises an exception",
    "mismatch": "A rank calls a collective that the other does not",
}
_RANKS = ("0", "1")
_PREFIX = re.compile(r"\[rank\d+\]: ?")
_FIRST, _LAST = 12, 6
_HEAD = "| | named | its line | what happened | trained on | end |"


def keep(document: Mapping[str, Any]) -> None:
    """Keep the results of a whole run, and write the page."""
    FILE.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(text(document), encoding="utf-8")


def text(document: Mapping[str, Any]) -> str:
    """Return the page."""
    return _FRAME.read_text(encoding="utf-8").format(about=about(document), tables=tables(document))


def about(document: Mapping[str, Any]) -> str:
    """Return when and where the run was made, and who took part with which settings."""
    made = document["machine"]
    load = f"load {made['load'][0]:g} at its begin and {made['load_after'][0]:g} at its end"
    lines = [
        f"Made on {made['date']} by one `python -m tests.bench --only peers`, {_at_once(document['at_once'])}: "
        f"{made['cores']} cores ({made['cpu']}), "
        f"{load}, Python {made['python']}; each job was watched for {document['limit_s']:g} s from the fault on.",
        "",
        "| | installed | how |",
        "|---|---|---|",
    ]
    for name, system in document["systems"].items():
        versions = ", ".join(f"{package} {version}" for package, version in system.get("versions", {}).items())
        lines.append(f"| {name} | {versions or 'refused: ' + _one_line(system['refused'])} | {system['chosen']} |")
    return "\n".join(lines)


def tables(document: Mapping[str, Any]) -> str:
    """Return a table for each fault, with the lines that were printed below it."""
    parts = []
    for fault, title in FAULTS.items():
        found = {name: one["faults"][fault] for name, one in document["systems"].items() if fault in one["faults"]}
        parts += [
            f"## {title}",
            "",
            "| | named | its line | what happened | trained on | end |",
            "|---|---|---|---|---|---|",
        ]
        parts += [_row(name, seen, document["limit_s"]) for name, seen in found.items()]
        parts.append("")
        for name, seen in found.items():
            parts += [f"<details markdown><summary>{name}: what was printed</summary>", "", "```text"]
            parts += [*(f"$ {command}" for command in seen["commands"]), *_printed(seen["output"], fault), "```", ""]
            parts += ["</details>", ""]
    return "\n".join(parts).rstrip()


def _row(name: str, seen: Mapping[str, Any], limit_s: float) -> str:
    if not seen["struck"]:
        return f"| {name} | did not come to the fault: see below | | | | {end(seen, limit_s)} |"
    cells = [named(seen), _seconds(seen["line_s"]), _seconds(seen["cause_s"]), went_on(seen), end(seen, limit_s)]
    return f"| {name} | {' | '.join(cells)} |"


def _at_once(count: int) -> str:
    return "one after the other" if count == 1 else f"{count} of them at a time"


def named(seen: Mapping[str, Any]) -> str:
    """Return the ranks that were named, in the order in which they were."""
    return "; ".join(f"rank {rank}, {moment:.2f} s" for rank, moment in seen["ranks"].items()) or "nobody"


def went_on(seen: Mapping[str, Any]) -> str:
    """Return who trained on when, and how many processes it took."""
    moments = seen["went_on_s"]
    if not moments:
        return "no"
    again = {rank: count for rank, count in seen["restarts"].items() if count}
    if not again:
        who = "nobody restarted"
    elif len(set(again.values())) == 1 and set(again) == set(_RANKS):
        who = f"both restarted {_times(again['0'])}"
    else:
        who = ", ".join(f"rank {rank} restarted {_times(count)}" for rank, count in again.items())
    if set(moments) == set(_RANKS) and abs(moments["0"] - moments["1"]) < 1:
        return f"both after {max(moments.values()):.1f} s; {who}"
    return ", ".join(f"rank {rank} after {moment:.1f} s" for rank, moment in moments.items()) + f"; {who}"


def end(seen: Mapping[str, Any], limit_s: float) -> str:
    """Return how the job ended."""
    struck = f"; struck {_times(seen['struck'])}" if seen["struck"] > 1 else ""
    if seen["ended_s"] is None:
        return f"none within {limit_s:g} s{struck}"
    return f"exit code {' and '.join(map(str, seen['codes']))} after {seen['ended_s']:.0f} s{struck}"


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _seconds(value: float | None) -> str:
    return "no" if value is None else f"{value:.2f} s"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _printed(output: Sequence[Sequence[Any]], fault: str) -> list[str]:
    """Return the lines to show: without frames that say nothing, and without the middle."""
    kept = [(moment, text) for moment, text in output if not _is_frame(text, fault)]
    if len(kept) > _FIRST + _LAST + 1:
        kept = [*kept[:_FIRST], (kept[_FIRST][0], "..."), *kept[-_LAST:]]
    return [f"{moment:7.2f}  {text}" for moment, text in kept] or ["nothing"]


def _is_frame(text: str, fault: str) -> bool:
    said = _PREFIX.sub("", text)
    is_indented = said.startswith("  ")
    return is_indented and not any(pattern.search(said) for pattern in (NAMES, LINE, CAUSES[fault]))
