"""A rank is killed, restarted and resumed: what is done twice is compared, and a difference is named, nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import planted
import pytest
from adapter_frameworks import require

from resilience_sdk.core.resume_proof import NOT_EXACT

pytestmark = pytest.mark.slow

_DAILY = {("start_run", "good"), ("start_run", "order"), ("start_run", "unsaved"), ("attach", "good")}
_DAILY_RANKS = {("start_run", "seeded"), ("accelerate", "good")}


def _cases(daily: set[tuple[str, str]], ways: tuple[str, ...], kinds: tuple[str, ...] = ()) -> list[object]:
    every = [(way, kind) for way in ways for kind in kinds or planted.WAYS[way]]
    return [case if case in daily else pytest.param(*case, marks=pytest.mark.release) for case in every]


@pytest.mark.parametrize(("way", "kind"), _cases(_DAILY, ("start_run", "attach")))
def test_a_resume_is_proven_or_what_differs_is_named(tmp_path, way, kind):
    """Killed in the third step behind a save; the job finishes all the same, with no incident but the kill."""
    expected = planted.expected(way, kind)
    said = planted.strike(tmp_path, way, kind)
    planted.check(said, kind, expected)
    told = said.resume
    for command, key in (("outcome", "resume_check"), ("report", "resume")) if kind == "good" else ():
        program = [sys.executable, "-m", "resilience_sdk", command, "--json", str(said.run_dir)]
        other = json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)[key]
        assert (other["result"], other["component"], other["step"]) == (told["result"], told["component"], told["step"])
    if expected.words.startswith("batches "):
        results = {check["what"]: check["result"] for check in told["checks"]}
        assert (results["state"], results["steps"]) == ("exact", "not_compared")
    assert (said.run_dir / "witness" / "rank-00000.json").exists()


@pytest.mark.parametrize(("way", "kind"), _cases(_DAILY_RANKS, planted.WAYS_ON_RANKS, planted.ON_RANKS))
def test_so_it_is_on_two_ranks_one_of_which_finds_another_state(tmp_path, way, kind):
    """As above, with DDP. What the last rank alone finds other is named; all ranks compare what they have of it."""
    if way not in ("start_run", "attach"):
        require(way)
    said = planted.strike(tmp_path, way, kind, ranks=2)
    planted.check(said, kind, planted.expected(way, kind, 2))
    found = [check for check in said.resume["checks"] if check["result"] == NOT_EXACT]
    assert (
        not found or kind == "unsaved" or all("on rank 1" in check["text"] or check["rank"] == 1 for check in found)
    ), found
