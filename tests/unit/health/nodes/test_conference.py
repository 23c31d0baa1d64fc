"""How nodes agree on one verdict over a store, and what happens to those that do not answer."""

import json
import threading

import pytest
from torch.distributed import HashStore

from resilience_sdk.health.nodes.conference import Conference, read_report, trial_of
from resilience_sdk.health.nodes.pairing import Trial
from resilience_sdk.health.software.shared import variables

SOUND = {"seconds": 0.02, "why": "", "rate": 50.0, "model": "EPYC", "backend": "gloo"}
CUT = {**SOUND, "seconds": None, "why": "no route"}


class GoneError(Exception):
    """A node loses its power."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Nobody is waited for as long as in a cluster."""
    monkeypatch.setattr("resilience_sdk.health.nodes.conference._TAKE_OVER_S", 0.2)
    monkeypatch.setattr("resilience_sdk.health.nodes.conference._LET_READ_S", 0.2)


def report(*, refusal=None, env=()):
    """Return what a node brings."""
    found = [finding.to_json() for finding in variables(dict(env))]
    return {"findings": found, "refusal": refusal, "devices": ["cpu"], "holds_store": False}


def hold(reports, *, cut=(), silent=(), dies=(), breaks=(), spare=1):
    """Let the nodes that bring these reports confer, each in a thread; return what each of them concludes.

    `silent` nodes never come, those in `dies` go before they tell of their first trial, those in `breaks` fail.
    """
    store, ends = HashStore(), {}

    def confer(node):
        def try_pair(_, pair, __):
            if node in dies:
                raise GoneError
            if node in breaks:
                raise RuntimeError("a mistake")
            return CUT if set(pair) & set(cut) else SOUND

        names = [f"host{number}" for number in range(len(reports))]
        limit_s = 1.0 if silent or dies else 30.0
        own = Conference(
            store, node, names, reports[node], spare=spare, try_pair=try_pair, report_s=limit_s, round_s=limit_s
        )
        try:
            end = own.hold()
        except GoneError:
            return
        except RuntimeError as error:
            end = own.give_up(str(error))
        ends[node] = end.get("verdict") or end["broken"]

    threads = [threading.Thread(target=confer, args=(n,)) for n in range(len(reports)) if n not in silent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return ends


def test_all_come_to_the_same_verdict():
    """Sound nodes are not named; a bad one is, by itself too."""
    ends = hold([report()] * 4)
    assert list(ends.values()) == [ends[0]] * 4
    assert (ends[0]["leave_out"], ends[0]["findings"], ends[0]["stop"], ends[0]["unnamed"]) == ({}, [], "", "")
    ends = hold([report()] * 5, cut={3})
    assert list(ends.values()) == [ends[0]] * 5
    assert list(ends[0]["leave_out"]) == ["3"]
    assert ends[0]["findings"][0]["evidence"].endswith(": no route")
    assert ends[0]["events"][0]["what"] == "nodes all_reduce host3"


@pytest.mark.parametrize("node", [0, 2])
def test_a_node_that_says_nothing_is_left_out(node):
    """Whoever it is: where the first one, which concludes for all, is silent, another one does."""
    ends = hold([report()] * 4, silent={node})
    assert len(ends) == 3
    assert [list(end["leave_out"]) for end in ends.values()] == [[str(node)]] * 3


@pytest.mark.parametrize("node", [0, 2])
def test_a_node_that_goes_in_the_middle_is_left_out(node):
    """Its partner is not blamed for that."""
    ends = hold([report()] * 4, dies={node})
    assert [end["leave_out"] for end in ends.values()] == [{str(node): "it stopped to answer"}] * 3


def test_a_mistake_of_ours_names_nobody():
    """All hear of it, and nothing follows."""
    ends = hold([report()] * 4, breaks={1})
    assert ends == dict.fromkeys(range(4), "host1: a mistake")


def test_the_meeting_has_one_end():
    """Who gives up after the verdict was told follows the verdict; who concludes after one has given up does not."""
    store, end = HashStore(), {"verdict": {"leave_out": {}}, "listening": []}
    one, two = (Conference(store, node, ["a", "b"], report(), spare=0, try_pair=lambda *_: SOUND) for node in (0, 1))
    store.set("end", json.dumps(end))
    assert two.give_up("a mistake") == one.hold() == end
    store.delete_key("end")
    assert two.give_up("a mistake") == {"broken": "b: a mistake"}
    for node in (0, 1):  # all is there that a verdict needs
        store.set(f"report/{node}", json.dumps(report()))
        store.set(f"trial/0/{node}", json.dumps(SOUND))
    assert one.hold() == {"broken": "b: a mistake"}


def test_a_node_that_comes_too_late_is_told_the_end():
    """At once, though nobody waits for it any more."""
    store = HashStore()
    one, late = (
        Conference(store, node, ["a", "b", "c"], report(), spare=2, try_pair=lambda *_: SOUND, report_s=0.05)
        for node in (0, 1)
    )
    end = one.hold()
    assert list(end["verdict"]["leave_out"]) == ["1", "2"]
    assert late.hold() == end


def test_nothing_is_tried_where_the_reports_are_enough():
    """One that is needed is refused by its own preflight: all hear why."""
    refusal = {"reason": "GPU 3 is lost", "of_the_node": True}
    ends = hold([report(), report(refusal=refusal), report()], spare=0, breaks={0, 1, 2})
    assert [end["leave_out"] for end in ends.values()] == [{"1": "GPU 3 is lost"}] * 3
    refusal = {"reason": "ulimit -n is 64", "of_the_node": False}
    ends = hold([report(refusal=refusal)] * 2, breaks={0, 1})
    assert {end["stop"] for end in ends.values()} == {"host0: ulimit -n is 64; host1: ulimit -n is 64"}


def test_differences_that_stop_nothing_are_told():
    """A variable that one node has and others have not."""
    ends = hold([report(), report(), report(env=[("NCCL_DEBUG", "INFO")])])
    (difference,) = ends[0]["findings"]
    assert (difference["subject"], difference["status"], ends[0]["leave_out"]) == ("NCCL_DEBUG", "degraded", {})


def test_a_trial_is_what_both_nodes_tell():
    """It took as long as for the slower of them, and failed if it did for one."""
    models = {2: "EPYC", 3: "EPYC"}
    slower, failed = {**SOUND, "seconds": 0.5}, {**CUT, "rate": None}
    assert trial_of(1, (2, 3), {2: SOUND, 3: slower}) == Trial(1, (2, 3), 0.5, "", {2: 50, 3: 50}, models)
    assert trial_of(1, (2, 3), {2: SOUND, 3: failed}) == Trial(1, (2, 3), None, "no route", {2: 50}, models)


def test_a_report_is_read_as_it_was_told():
    """With its refusal."""
    read = read_report(report(refusal={"reason": "r", "of_the_node": True}))
    assert (read.refusal.reason, read.refusal.of_the_node, read.devices) == ("r", True, ("cpu",))
