"""What the documentation quotes is in the repository, and what it offers to copy works."""

from __future__ import annotations

import inspect
import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from documented import PAGES, ROOT, blocks, options_used
from told_run import ToldRun

import resilience_sdk.faults
from resilience_sdk.attribution.taxonomy import causes
from resilience_sdk.cli.doctor import settings_rows
from resilience_sdk.core.settings import Settings

QUOTED = [block for page in PAGES for block in blocks(page, "python", "json", "toml") if (ROOT / block.title).is_file()]


@pytest.mark.parametrize("block", QUOTED, ids=lambda block: block.title)
def test_a_block_that_is_titled_with_a_file_stands_in_it(block: Any) -> None:
    """Word for word."""
    assert block.text.rstrip() in (ROOT / block.title).read_text(encoding="utf-8")


def test_files_are_quoted() -> None:
    """Those that somebody who adds a probe or a cause touches."""
    assert {Path(block.title).name for block in QUOTED} >= {"probes.json", "host.py", "storage.toml"}


def test_every_python_block_can_be_read() -> None:
    """On every page: a block that stands for more has `...`, which is Python too."""
    for page in PAGES:
        for block in blocks(page, "python"):
            compile(block.text, block.place, "exec")


def test_what_troubleshooting_quotes_is_said_by_the_program() -> None:
    """A cause by its name in the taxonomy, a line by words of it between numbers and what `...` stands for."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    shown = [row.split("|")[1] for row in page.splitlines() if row.startswith("| ")]
    quoted = {span for cell in shown for span in re.findall(r"`([^`]+)`", cell)}
    said = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "resilience_sdk").rglob("*.py"))
    for span in quoted:
        words = [part for part in re.split(r"\d+|\.\.\.", span) if len(part) > 5]
        assert span in causes() or span in said or any(part in said for part in words), span
    assert len(quoted & set(causes())) >= 8


def test_as_many_settings_are_shown_as_there_are() -> None:
    """In the page of `doctor`, which is no generated one."""
    (shown,) = re.findall(r"^settings: (\d+) of (\d+) at their defaults", _page("health.md"), re.MULTILINE)
    assert tuple(map(int, shown)) == (len(settings_rows(Settings())) - 1, len(settings_rows(Settings())))


def test_a_line_of_ours_that_a_page_shows_is_where_it_says() -> None:
    """A stack in a page names a function of the module of faults and a line in it."""
    shown = {
        found for page in PAGES for found in re.findall(r"resilience_sdk/faults\.py:(\d+) (\w+)", page.read_text())
    }
    assert shown
    for line, name in shown:
        source, first = inspect.getsourcelines(getattr(resilience_sdk.faults, name))
        assert first < int(line) < first + len(source), (name, line)


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_documented_sink_writes_a_line_for_each_incident(tmp_path: Path) -> None:
    """The class of the page, fed with the journal of a run with a hang."""
    (block,) = blocks(ROOT / "docs" / "extend" / "sink.md", "python")
    page: dict[str, Any] = {}
    exec(block.text, page)
    run = ToldRun.make(tmp_path)
    run.begin()
    run.fail_and_recover()
    sink = page["IncidentLog"](run.place(), str(tmp_path / "incidents.log"))
    items = deque(item for line in run.lines() for item in sink.digest(line))
    sink.open()
    sink.send(items)
    assert not items
    assert (tmp_path / "incidents.log").read_text() == "run: hang link_down\n"


def test_options_are_found_in_commands() -> None:
    """Of each command of a line, and not those of the script behind it."""
    text = "A=1 resilience run --run-dir d train.py --lr 1 || resilience why --last\ntorchrun --nnodes 2 -m x --y\n"
    text += "resilience supervise --run-dir d -- torchrun --tee 3 train.py"
    assert list(options_used(text)) == [
        ("run", "--run-dir"),
        ("why", "--last"),
        ("torchrun", "--nnodes"),
        ("supervise", "--run-dir"),
        ("torchrun", "--tee"),
    ]
