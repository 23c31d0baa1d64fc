"""The command line of `resilience rehearse`; what it does to jobs is tested with real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience_sdk.cli.rehearse import main
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.rehearse.plan import FAULTS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["kil", "--", "train.py"], "unknown fault 'kil'; did you mean kill"),
        (["everything", "--", "train.py"], "unknown fault 'everything'; known: kill,"),
        (["kill"], "no script given"),
        (["kill", "--"], "no script given"),
        (["--", "train.py"], "FAULT"),
        (["kill", "--", "gone.py"], "gone.py is not there"),
        (["kill", "--nproc-per-node", "0", "--", "train.py"], "--nproc-per-node takes a whole number from 1 on"),
        (["kill", "--stuck-after", "-1", "--", __file__], "--stuck-after takes seconds, more than 0, not -1"),
        (["kill", "--limit", "inf", "--", __file__], "--limit takes seconds, more than 0, not inf"),
        (["kill", "--", "-m", "nosuchmodule.train"], "-m nosuchmodule.train: no such module is here"),
        (["kill", "--", "-m"], "-m : no such module"),
        (["kill", "--nproc-per-nod", "2", "--", "train.py"], "did you mean --nproc-per-node"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(words: list[str], complaint: str) -> None:
    """With what was meant, or the usage."""
    with pytest.raises(ConfigError) as error:
        main(words)
    assert complaint in str(error.value)


def test_a_directory_that_holds_something_is_not_taken(tmp_path: Path) -> None:
    """What lies there is the user's."""
    (tmp_path / "mine").write_text("dear")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(RunDirectoryError, match="something is there already"):
        main(["kill", "--keep", str(tmp_path), "--", str(tmp_path / "train.py")])
    assert (tmp_path / "mine").read_text() == "dear"


@pytest.mark.parametrize("place", ["/proc/nowhere/there", "{file}/there", "{file}"])
def test_a_directory_that_cannot_be_made_is_told_before_anything_runs(tmp_path: Path, place: str) -> None:
    """In one line, with its name."""
    script = tmp_path / "train.py"
    script.write_text("")
    place = place.format(file=script)
    with pytest.raises(RunDirectoryError, match=f"--keep {place}: .*name a "):
        main(["kill", "--keep", place, "--", str(script)])


def test_every_fault_is_documented() -> None:
    """In the table of faults, as it is written on the command line."""
    page = (DOCS / "rehearse.md").read_text(encoding="utf-8")
    assert [fault for fault in FAULTS if f"`{fault}`" not in page] == []
