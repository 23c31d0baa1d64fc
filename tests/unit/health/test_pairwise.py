"""The agreement of nodes on one verdict over a store, those that do not answer, and a node's part in a trial."""

import json
import os
import signal
import threading

import attrs
import psutil
import pytest
from torch.distributed import HashStore

from resilience_sdk.health import pairwise
from resilience_sdk.health.pairwise import Conference, TrialPart, Trials, hold_trial, trial_of
from resilience_sdk.health.pairwise_verdict import NodeReport, Trial
from resilience_sdk.health.software import variables

SOUND = {"seconds": 0.02, "why": "", "rate": 50.0, "model": "EPYC", "backend": "gloo"}
CUT = {**SOUND, "seconds": None, "why": "no route"}


class GoneError(Exception):
    """A node loses its power."""


@attrs.frozen
class PlannedTrials:
    """Trials that come out as planned: on nodes in `cut` they fail, those in `dies` and `breaks` never end theirs."""

    node: int
    cut: tuple = ()
    dies: tuple = ()
    breaks: tuple = ()

    def take_part(self, _number, pair, _reports):
        """Return what came of it."""
        if self.node in self.dies:
            raise GoneError
        if self.node in self.breaks:
            raise RuntimeError("a mistake")
        return CUT if set(pair) & set(self.cut) else SOUND


def member(store, node, names, brings=None, *, trials=None, **more):
    """Return one node's part in the meeting of the nodes of these names."""
    trials = trials or PlannedTrials(node)
    return Conference(store=store, node=node, names=names, report=brings or report(), trials=trials, **more)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Nobody is waited for as long as in a cluster."""
    monkeypatch.setattr("resilience_sdk.health.pairwise._TAKE_OVER_S", 0.2)
    monkeypatch.setattr("resilience_sdk.health.pairwise._LET_READ_S", 0.2)


def report(*, refusal=None):
    """Return what a node brings."""
    found = [variables({}).to_json()]
    return {"findings": found, "refusal": refusal, "devices": ["cpu"], "holds_store": False}


def hold(reports, *, silent=(), spare=1, **planned):
    """Let the nodes that bring these reports confer, each in a thread; return what each of them concludes.

    `silent` nodes never come; `planned` are the fields of `PlannedTrials`.
    """
    store, ends = HashStore(), {}
    names = [f"host{number}" for number in range(len(reports))]
    limit_s = 1.0 if silent or "dies" in planned else 30.0

    def confer(node):
        trials = PlannedTrials(node, **planned)
        own = member(store, node, names, reports[node], trials=trials, spare=spare, report_s=limit_s, round_s=limit_s)
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
    assert ends[0]["events"][0]["what"] == "nodes all reduce host3"


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
    one, two = (member(store, node, ["a", "b"], spare=0) for node in (0, 1))
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
    one, late = (member(store, node, ["a", "b", "c"], spare=2, report_s=0.05) for node in (0, 1))
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


def test_a_trial_is_what_both_nodes_tell():
    """It took as long as for the slower of them, and failed if it did for one."""
    models = {2: "EPYC", 3: "EPYC"}
    slower, failed = {**SOUND, "seconds": 0.5}, {**CUT, "rate": None}
    assert trial_of(1, (2, 3), {2: SOUND, 3: slower}) == Trial(1, (2, 3), 0.5, "", {2: 50, 3: 50}, models)
    assert trial_of(1, (2, 3), {2: SOUND, 3: failed}) == Trial(1, (2, 3), None, "no route", {2: 50}, models)


GPUS = ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("why", "seconds", "told"), [("", [0.1, 0.2], 0.2), ("no route", [0.1, None], None)], ids=["sound", "one fails"]
)
def test_the_slowest_device_is_what_a_node_tells(monkeypatch, why, seconds, told):
    """Each device has a process of its own; one that fails fails the trial, and what was measured before counts."""

    def perform(_, number):
        failed = why if seconds[number] is None else ""
        return {"seconds": seconds[number], "why": failed, "rate": 9.0 - number, "model": f"model {number}"}

    monkeypatch.setattr(pairwise, "_perform", perform)
    answer = {"seconds": told, "why": why, "rate": 8.0, "model": "model 1", "backend": "gloo"}
    assert hold_trial(TrialPart("here", 1, "place", "gloo", GPUS, 0, 2)) == answer


@pytest.mark.parametrize(
    ("what", "limit_s", "told"),
    [
        (lambda *_: os.kill(os.getpid(), signal.SIGTERM), 60.0, "its process died by signal 15"),
        (lambda *_: signal.pause(), 0.2, "its process did not answer in time"),
    ],
)
def test_a_process_that_crashes_or_hangs_is_told(monkeypatch, what, limit_s, told):
    """And is gone."""
    monkeypatch.setattr(pairwise, "LIMIT_S", {"gloo": limit_s})
    monkeypatch.setattr(pairwise, "MARGIN_S", 0.1)
    monkeypatch.setattr(pairwise, "_perform", what)
    before = psutil.Process().children()
    answer = {"seconds": None, "why": told, "rate": None, "model": "", "backend": "gloo"}
    assert hold_trial(TrialPart("here", 1, "place", "gloo", ("cpu",), 0, 1)) == answer
    assert psutil.Process().children() == before


def test_the_ranks_of_a_pair():
    """The first node's devices come first; where one node has no GPU, both use their processors."""
    reports = {2: NodeReport(devices=GPUS), 5: NodeReport(devices=(*GPUS, "cuda:2")), 7: NodeReport(devices=("cpu",))}
    one, other = (Trials(node, "h", 1, "p").part_of(0, (2, 5), reports) for node in (2, 5))
    assert (one.backend, one.devices, one.offset, one.world) == ("nccl", GPUS, 0, 5)
    assert (len(other.devices), other.offset, other.world) == (3, 2, 5)
    assert one.prefix == other.prefix
    mixed = Trials(7, "h", 1, "p").part_of(0, (5, 7), reports)
    assert (mixed.backend, mixed.devices, mixed.offset, mixed.world) == ("gloo", ("cpu",), 1, 2)
