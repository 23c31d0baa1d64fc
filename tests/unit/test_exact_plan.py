"""The pure parts of `tests.exact`: which cells there are, what came of one, what is kept and written into pages."""

from __future__ import annotations

import itertools
import json

import pytest
from generated_docs import TABLES
from hypothesis import given
from hypothesis import strategies as st

from tests.exact import compare, plan, results
from tests.exact.compare import Told


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 5))
def test_each_pair_that_an_allowed_row_has_is_in_a_chosen_one(sizes, forbidden):
    """None is lost, whatever is not allowed, and no row comes twice."""
    factors = [[f"{at}{value}" for value in range(size)] for at, size in enumerate(sizes)]

    def is_allowed(row):
        return sum(int(value[1]) for value in row) != forbidden

    chosen = plan.pairwise(factors, is_allowed)
    allowed = [row for row in itertools.product(*factors) if is_allowed(row)]
    assert {pair for row in chosen for pair in itertools.combinations(row, 2)} == {
        pair for row in allowed for pair in itertools.combinations(row, 2)
    }
    assert len({*chosen}) == len(chosen)
    assert {*chosen} <= {*allowed}


def test_the_plan_has_every_way_moment_fault_and_change():
    """At least 150 cells, each with a name of its own."""
    cells = plan.cells()
    assert len({cell.key for cell in cells}) == len(cells) >= 150
    for way in plan.WAYS:
        own = [cell for cell in cells if cell.loop.way == way]
        assert {cell.moment for cell in own} == {*plan.MOMENTS}
        assert {cell.fault for cell in own} == {*plan.FAULTS}
        assert {cell.change for cell in own} == {plan.SAME, *plan.CHANGES}
        for name in plan.CHANGED[way]:
            assert {cell.change for cell in own if cell.loop.name == name} == {plan.SAME, *plan.CHANGES}
    assert {cell.loop.way for cell in plan.daily()} == {*plan.WAYS}
    assert {*plan.DAILY} <= {*results.read()["cells"]}
    assert not {*plan.DAILY} & {cell.key for cell in plan.of_release(results.read()["cells"])}
    assert {cell.moment for cell in plan.daily()} == {*plan.MOMENTS}
    assert {cell.fault for cell in plan.daily()} == {*plan.FAULTS}


def told(*lines):
    return Told.of(["".join(json.dumps(line) + "\n" for line in lines)])


WHOLE = told(["samples", 0, [1, 2]], ["losses", 0, 0.5], ["samples", 1, [3, 4]], ["losses", 1, 0.25])


def test_what_is_done_twice_has_to_be_right_each_time():
    """A step that is lost was made, too. A line that a kill cut short says nothing."""
    again = told(["samples", 0, [1, 2]], ["samples", 0, [1, 2]], *[line for line in WHOLE.ranks[0][1:]])
    assert compare.differences(WHOLE, again) == {}
    wrong = told(["samples", 0, [2, 1]], *WHOLE.ranks[0])
    assert compare.differences(WHOLE, wrong) == {"samples": "rank 0, 0: is other"}
    assert compare.differences(WHOLE, told(*WHOLE.ranks[0][:3])) == {"losses": "rank 0, 1: is missing"}
    assert compare.differences(WHOLE, told(*WHOLE.ranks[0], ["losses", 2, 0.1])) == {
        "losses": "rank 0, 2: came additionally"
    }
    assert Told.of(['["losses", 0, 0.5]\n["los']).ranks == ((("losses", 0, 0.5),),)


def test_a_difference_is_said_only_where_what_was_said_makes_it():
    """Other pictures make other losses, and no other samples."""
    pictures = told(["drawn for samples", 0, "a"], ["losses", 0, 1.0])
    others = told(["drawn for samples", 0, "b"], ["losses", 0, 2.0])
    assert compare.judge(pictures, others, ["augmentation in workers"]).result == compare.SAID
    assert compare.judge(pictures, others, []).result == compare.SILENT
    assert compare.judge(pictures, others, ["something else"]).result == compare.SILENT
    order, other = (told(["samples", 0, [one]], ["drawn for samples", 0, one]) for one in (1, 2))
    assert compare.judge(order, other, ["augmentation in workers"]).result == compare.SILENT
    assert compare.judge(order, order, ["augmentation in workers"]).result == compare.EXACT


def step(number, samples, epoch=1):
    return [["epoch", number, epoch], ["samples", number, samples]]


@pytest.mark.parametrize(
    ("second", "is_exact"),
    [([1, 2], False), ([3, 4], True), ([3], False)],
    ids=["twice", "each once", "never"],
)
def test_behind_a_change_each_sample_counts_once(second, is_exact):
    """Steps behind the one from which an attempt goes on are lost, and do not count."""
    lost = [["start", 0, 0], *step(6, [1, 2]), *step(7, [4, 3])]
    found = told(*lost, ["start", 0, 1], *step(7, second))
    verdict = compare.judge_changed(found, "accumulation", [], "", length=4, since=1, ends_by_steps=False)
    assert verdict.result == (compare.EXACT if is_exact else compare.SILENT)
    cut = compare.judge_changed(found, "accumulation", [], "", length=4, since=1, ends_by_steps=True)
    assert cut.result == (compare.SILENT if second == [1, 2] else compare.EXACT)
    line = "saved by 2 ranks, resumed by 1"
    assert compare.judge_changed(found, "ranks", [], line, 4, since=1, ends_by_steps=False).result == compare.SAID


def test_a_table_says_what_was_seen():
    """Exact where all cells are; else which loops have lines for it."""
    cells = {
        "w / one / twice / kill / same": {"result": "exact"},
        "w / two / twice / kill / same": {"result": "said", "differs": {"drawn for samples": "there"}},
        "w / two / mid-epoch / kill / batch": {"result": "said"},
    }
    loops = {"w / one": ["samples", "drawn for samples"], "w / two": ["samples", "drawn for samples"]}
    rows = results.table("w", {"cells": cells, "loops": loops}).splitlines()[2:]
    assert rows == [
        "| samples, their order, the place in an epoch | exact | 2 |",
        "| what reading a sample draws at random | exact; said: two | 2 |",
        "| resumed with other batch | said | 1 |",
    ]
    assert results.lost_by_us({"a": {"result": "said", "alone": "exact"}, "b": {"result": "exact"}}) == ["a"]


def test_a_matrix_has_a_word_for_each_way():
    """Both: exact in one loop, and said in another; what was not tried has a dash."""
    cells = {
        "start_run / one / twice / kill / same": {"result": "exact"},
        "start_run / two / twice / kill / same": {"result": "said", "differs": {"drawn for samples": "there"}},
        "start_run / one / mid-epoch / kill / batch": {"result": "refused"},
        "start_run / one / mid-epoch / kill / ranks": {"result": "refused"},
        "start_run / two / mid-epoch / kill / ranks": {"result": "said"},
        "attach / one / twice / kill / same": {"result": "exact"},
    }
    loops = {name: ["drawn for samples"] for name in ("start_run / one", "start_run / two", "attach / one")}
    head, _, *rows = results.matrix({"cells": cells, "loops": loops}).splitlines()
    at = [name.strip() for name in head.split("|")].index("attach")
    found = [[word.strip() for word in row.split("|")] for row in rows]
    assert [(row[1], row[2], row[at]) for row in found] == [
        ("what reading a sample draws at random", "both", "exact"),
        ("resumed with other ranks", "said or refused", "-"),
        ("resumed with other batch", "refused", "-"),
    ]


def test_what_is_kept_is_not_silent_and_each_way_has_its_table():
    """Pages promise nothing that was not seen."""
    document = results.read()
    ways = {name.removeprefix("exact ") for page, name in TABLES if page.startswith("adapters/")}
    assert ways == {*plan.WAYS} - {"start_run"}
    assert {cell["result"] for cell in document["cells"].values()} <= {compare.EXACT, compare.SAID, compare.REFUSED}
    assert results.lost_by_us(document["cells"]) == []
