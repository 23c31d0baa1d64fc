"""Which nodes are suspect, which failures say something about a node, and what announces one."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.history.suspects import Failure, NodeRecord, hostlist, independent, judge_nodes, omens

HOUR, DAY = 3600.0, 86400.0


def failure(
    node: str = "n1",
    at: float = 0.0,
    run: str = "r",
    *,
    category: str = "hardware",
    action: str = "restart",
    nodes: int = 8,
) -> Failure:
    """A failure of which one node of a job of eight is the culprit."""
    return Failure(run, f"{run}-{at}", at, category, "cause", action, "cause", (node,), of_nodes=nodes)


def suspects(records: list[NodeRecord]) -> list[str]:
    """Return the names of the suspects."""
    return [record.name for record in records if record.suspect]


@pytest.mark.parametrize(
    ("category", "action", "blame", "counts"),
    [
        ("hardware", "exclude_node", "infrastructure", True),
        ("process", "restart", "infrastructure", True),
        ("storage", "wait", "infrastructure", False),
        ("unknown", "restart", "unknown", False),
        ("user", "restart", "user", False),
        ("process", "stop", "user", False),
        ("scheduler", "restart", "nobody", False),
    ],
)
def test_what_says_something_about_a_node(category: str, action: str, blame: str, counts: bool) -> None:
    """Hardware does, and a process that dies; not a program, nor what nobody knows, nor what no node has."""
    one = failure(category=category, action=action)
    assert (one.blame, one.blames_nodes) == (blame, counts)
    told = [failure(at=at, run=f"r{at}", category=category, action=action) for at in (0.0, DAY)]
    assert suspects(judge_nodes({"n1": DAY, "n2": DAY}, {}, told)) == (["n1"] if counts else [])


def test_most_of_a_job_is_no_culprit() -> None:
    """Half of it may be."""
    some = Failure("r", "1", 0.0, "network", "cause", "restart", "cause", ("a", "b"), of_nodes=4)
    most = Failure("r", "1", 0.0, "network", "cause", "restart", "cause", ("a", "b", "c"), of_nodes=4)
    assert (some.blames_nodes, most.blames_nodes) == (True, False)


def test_failures_that_follow_from_one_another_are_one() -> None:
    """Those of one run within an hour of the one before, and those of several runs that one fault has ended."""
    loop = [failure(at=minutes * 60.0) for minutes in range(0, 600, 30)]
    assert len(independent(loop)) == 1
    assert len(independent([failure(at=0), failure(at=HOUR)])) == 2
    shared = [attrs.evolve(failure(at=at, run=run), began_at=-100.0) for run, at in (("a", 0), ("b", 5), ("c", 20))]
    assert len(independent(shared)) == 1
    assert not suspects(judge_nodes({"n1": DAY, "n2": DAY}, {}, shared))
    eats_jobs = [
        attrs.evolve(failure(at=60.0 * number, run=f"r{number}"), began_at=60.0 * number - 30) for number in range(10)
    ]
    assert len(independent(eats_jobs)) == 10


def test_a_large_fleet_has_no_suspects_by_chance() -> None:
    """Of 1,000 nodes that all fail alike hardly any is named; one that fails twenty times as often is."""
    draw = random.Random(0)
    rate = 1 / (30 * DAY)

    def failures_of(node: str, times: float) -> list[Failure]:
        found, at = [], draw.expovariate(rate * times)
        while at < 28 * DAY:
            found.append(failure(node, at, f"r{len(found)}-{node}"))
            at += draw.expovariate(rate * times)
        return found

    nodes = [f"n{number}" for number in range(1000)]
    told = [one for node in nodes for one in failures_of(node, 20 if node == "n7" else 1)]
    found = suspects(judge_nodes(dict.fromkeys(nodes, 28 * DAY), {}, told))
    assert "n7" in found
    assert len(found) <= 2


def test_one_failure_names_nobody() -> None:
    """Not even where everybody else has never failed; a higher number may be asked for."""
    told = [failure(at=at, run=f"r{at}") for at in (0.0, DAY)]
    worked_s = {"n1": DAY, "n2": DAY}
    assert suspects(judge_nodes(worked_s, {}, told[:1])) == []
    assert suspects(judge_nodes(worked_s, {}, told)) == ["n1"]
    assert suspects(judge_nodes(worked_s, {}, told, least=3)) == []


def test_a_finding_that_precedes_failures_is_told_with_how_often_it_was_right() -> None:
    """Of those that are over; one that was wrong more often than not, or is as frequent as chance, is not."""
    records = [NodeRecord("n1", 100 * DAY, 3, tuple(failure("n1", at * DAY + HOUR) for at in (1, 5, 9)))]
    seen = [("ecc", "n1", at * DAY, "3 errors") for at in (1, 5, 9, 13)] + [("ecc", "n2", 20 * DAY, "7 errors")]
    seen += [("disk", "n2", at * DAY, "slow") for at in (1, 5, 9, 20)]
    (omen,) = omens(seen, records, 20 * DAY + HOUR)
    assert (omen.check, omen.node, omen.right, omen.seen) == ("ecc", "n2", 3, 4)
    assert omen.text == "node n2: ecc (7 errors); a node with it failed within 24 h 3 of 4 times"
    assert omens(seen[1:3] + seen[4:5], records, 20 * DAY + HOUR) == []
    always = [NodeRecord("n1", 100 * DAY, 3, tuple(failure("n1", at * HOUR) for at in range(0, 2400, 6)))]
    assert omens(seen, always, 20 * DAY + HOUR) == []


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["n3", "n1", "n4", "n5", "other"], "n[1,3-5],other"),
        (["gpu009", "gpu010", "gpu1"], "gpu1,gpu[009-010]"),
        (["n1", "n2,ALL", "n3 n4", "n\x1b[2J", "$(id)", "-h", "host#1", ""], "n1"),
    ],
)
def test_a_list_has_the_form_that_slurm_takes(names: list[str], told: str) -> None:
    """What no node can be called does not reach it, whoever has written it into a journal."""
    assert hostlist(names) == told


@given(st.sets(st.from_regex(r"[a-c]{1,2}[0-9]{1,3}", fullmatch=True), max_size=30))
def test_a_list_names_each_node_once(names: set[str]) -> None:
    """As `scontrol show hostnames` reads it."""
    found = []
    for part in hostlist(names).replace("],", "]\n").split("\n"):
        head, _, inner = part.partition("[")
        if not inner:
            found += [name for name in part.split(",") if name]
            continue
        *plain, head = head.split(",")
        found += plain
        for numbers in inner.rstrip("]").split(","):
            low, _, high = numbers.partition("-")
            found += [f"{head}{number:0{len(low)}}" for number in range(int(low), int(high or low) + 1)]
    assert sorted(found) == sorted(names)
