"""Which files of tests have grown, on a machine of whatever speed, and which are to begin first."""

from __future__ import annotations

import math
from pathlib import Path

import durations
import pytest
from hypothesis import given
from hypothesis import strategies as st

FILES = {("slow", f"tests/{name}.py"): seconds for name, seconds in (("a", 100.0), ("b", 50.0), ("c", 10.0))}
SECONDS = st.dictionaries(st.sampled_from(sorted(FILES)), st.floats(0.1, 1000.0), min_size=1)


@given(SECONDS, st.floats(0.2, 5.0))
def test_a_machine_of_another_speed_is_no_growth(before: dict, times: float) -> None:
    """Where all files of a lane take longer alike."""
    now = {key: seconds * times for key, seconds in before.items()}
    assert durations.growth(before, now) == []


def test_what_has_grown_against_the_others_is_named_with_what_was_expected() -> None:
    """Also a new file that takes long; what was removed, and little things, are none."""
    now = {key: seconds * 2 for key, seconds in FILES.items()}
    now["slow", "tests/b.py"] = 400.0
    now["slow", "tests/new.py"] = 7.0
    now["slow", "tests/small.py"] = 1.0
    del now["slow", "tests/c.py"]
    pace = durations.pace(FILES, now, "slow")
    assert pace == 2.0
    one, other = durations.growth(FILES, now)
    assert one == durations.Growth("slow", "tests/b.py", 100.0, 400.0)
    assert other == durations.Growth("slow", "tests/new.py", 0.0, 7.0)
    lines = list(durations.report(FILES, now))
    assert lines[0].startswith("slow: 608 s of tests, 160 s when durations were committed")
    assert lines[1:] == [
        "  grown: tests/b.py 400.0 s (expected 100.0 s)",
        "  grown: tests/new.py 7.0 s (new)",
    ]


def test_a_lane_is_held_against_itself() -> None:
    """Another one may be slower on that day."""
    before = FILES | {("fast", "tests/a.py"): 10.0}
    now = FILES | {("fast", "tests/a.py"): 30.0}
    assert durations.growth(before, now) == []


def test_what_was_written_is_read_and_added_to(tmp_path: Path) -> None:
    """Lanes run one after another, and each adds its own."""
    path = tmp_path / "results" / "durations.tsv"
    durations.write(path, {("slow", "tests/b.py"): 2.0, ("slow", "tests/a.py"): 1.04})
    durations.write(path, {("fast", "tests/b.py"): 3.0})
    assert path.read_text().splitlines() == [
        "lane\tfile\tseconds",
        "fast\ttests/b.py\t3.0",
        "slow\ttests/a.py\t1.0",
        "slow\ttests/b.py\t2.0",
    ]
    assert durations.read(path)["slow", "tests/a.py"] == 1.0
    assert durations.read(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("expression", "lanes"),
    [
        ("", {"fast", "slow", "alone", "release"}),
        ("not slow", {"fast"}),
        ("not slow and not release", {"fast"}),
        ("slow and not alone and not release", {"slow"}),
        ("slow and alone", {"alone"}),
        ("release", {"release"}),
        ("of_somebody_else", {"fast", "slow", "alone", "release"}),
    ],
)
def test_the_lanes_of_an_expression(expression: str, lanes: set[str]) -> None:
    """As `pytest -m` chooses."""
    assert durations.lanes_of(expression) == lanes


def test_a_lane_is_found_by_marks() -> None:
    """Among all the words of a report."""
    assert durations.lane_of({"test_it": 1, "slow": 1, "alone": 1}) == "alone"
    assert durations.lane_of({"slow": 1, "release": 1}) == "release"
    assert durations.lane_of({"test_slow": 1}) == "fast"


def test_scopes_take_their_part_of_the_file() -> None:
    """By the number of their tests, in the lanes that run; what nobody has timed begins first."""
    scopes = {"one": ["tests/a.py::x", "tests/a.py::y", "tests/a.py::z"], "two": ["tests/a.py::w"], "new": ["n.py::n"]}
    found = durations.expected({**FILES, ("fast", "tests/a.py"): 1.0}, {"slow"}, scopes)
    assert found == {"one": 75.0, "two": 25.0, "new": math.inf}
