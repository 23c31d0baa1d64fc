"""The documentation is true: its commands print what it says, its programs run, and its site is whole."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import quickstart
from adapter_frameworks import require
from documented import PAGES, ROOT, blocks, options_used
from needed import library
from to_the_end import output_of

from resilience_sdk.cli.main import COMMANDS


@pytest.mark.slow
def test_the_quickstart_prints_what_it_says(tmp_path: Path) -> None:
    """Each of its commands, one after the other, but for numbers and for how often a notice comes."""
    page = quickstart.PAGE.read_text()
    printed = dict(quickstart.outputs(quickstart.replayed(page, tmp_path.resolve())))
    shown = dict(quickstart.outputs(page))
    assert len(shown) == 8
    assert printed == shown


# What a page may take as there: a user's own model, optimizer, data and words.
_OF_THE_USER = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=8)
loss_of = lambda model, batch: model(batch).square().mean()
save = lambda: None
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", ["concepts.md", "notebooks.md", "extend/sink.md", "migrate-nemo.md"])
def test_the_programs_of_a_page_run(page: str, tmp_path: Path) -> None:
    """One after the other in one process, with a model, an optimizer and a loader of the user's."""
    if page == "migrate-nemo.md":
        require("lightning.pytorch", "lightning")
    programs = [block.text for block in blocks(ROOT / "docs" / page, "python") if not block.title]
    assert programs
    (tmp_path / "page.py").write_text("\n".join([_OF_THE_USER, *programs, "print('all of it ran')"]))
    assert "all of it ran" in output_of(tmp_path, "page.py", CUDA_VISIBLE_DEVICES="")


@lru_cache
def options_of(program: str) -> frozenset[str]:
    """Return the options that a command names in its help."""
    words = ["torch.distributed.run"] if program == "torchrun" else ["resilience_sdk", program]
    texts = [
        subprocess.run([sys.executable, "-m", *words, each], capture_output=True, text=True, timeout=100).stdout
        for each in (("--help", "--help-all") if program in ("run", "doctor", "slurm") else ("--help",))
    ]
    return frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", "".join(texts)))


@pytest.mark.slow
def test_every_documented_option_is_one_of_its_command() -> None:
    """Of `resilience` and of torchrun, in each block of shell commands of each page."""
    used = {
        (program, option, block.place)
        for page in PAGES
        for block in blocks(page, "bash")
        for program, option in options_used(block.text)
    }
    assert len(used) > 30
    known = {program for program, _, _ in used} - {"torchrun"}
    assert known <= set(COMMANDS), known - set(COMMANDS)
    for program, option, place in sorted(used):
        # `slurm` takes the options of `run` and of sbatch, `run` the parameters of NVIDIA's launcher.
        told = options_of(program) | (options_of("run") if program == "slurm" else frozenset())
        assert option in told or option.startswith("--ft-param-"), f"{place}: {program} has no {option}"


class Requested(HTMLParser):
    """Collects what a browser asks for when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag != "a":
            self.addresses += [found[name] or "" for name in ("src", "href", "data") if found.get(name)]


@pytest.mark.slow
def test_the_site_is_built_strictly_and_asks_no_other_host_for_anything(tmp_path: Path) -> None:
    """Every link within it has its target, also to files of the repository outside of docs/."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        library(module, "docs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 50
    assert (tmp_path / "repository" / "SECURITY.html").exists()
    for page in pages:
        requested = Requested()
        requested.feed(shown := page.read_text(encoding="utf-8"))
        assert "sequenceDiagram" not in shown  # it is drawn
        assert requested.addresses
        elsewhere = [address for address in requested.addresses if "//" in address]
        assert not elsewhere, f"{page.relative_to(tmp_path)}: {elsewhere}"
