"""A node's part in a trial: a process for each device, of which any may crash or hang."""

import os
import signal

import pytest

from resilience_sdk.health.nodes import reduce
from resilience_sdk.health.nodes.reduce import part_of, take_part
from resilience_sdk.health.nodes.verdict import Report

GPUS = ("cuda:0", "cuda:1")


def part(devices=("cpu",)):
    """Return a part with these devices."""
    return reduce.Part("here", 1, "place", "gloo", devices, 0, len(devices))


def test_the_slowest_device_is_what_a_node_tells():
    """Each device has a process of its own."""

    def perform(_, number):
        return {"seconds": 0.1 * (number + 1), "why": "", "rate": 9.0 - number, "model": f"model {number}"}

    told = {"seconds": 0.2, "why": "", "rate": 8.0, "model": "model 1", "backend": "gloo"}
    assert take_part(part(GPUS), perform) == told


def test_one_device_that_fails_fails_the_trial():
    """With its reason; what was measured before counts."""

    def perform(_, number):
        return {"seconds": None if number else 0.1, "why": "no route" if number else "", "rate": 9.0, "model": "m"}

    told = {"seconds": None, "why": "no route", "rate": 9.0, "model": "m", "backend": "gloo"}
    assert take_part(part(GPUS), perform) == told


@pytest.mark.parametrize(
    ("what", "limit_s", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 60.0, "its process died by signal 15"),
        (lambda: signal.pause(), 0.2, "its process did not answer in time"),
    ],
)
def test_a_process_that_crashes_or_hangs_is_told(monkeypatch, what, limit_s, told):
    """And is gone."""
    monkeypatch.setattr(reduce, "LIMIT_S", {"gloo": limit_s})
    monkeypatch.setattr(reduce, "MARGIN_S", 0.1)
    pids = []

    def fork():
        pids.append(real())
        return pids[-1]

    real = os.fork
    monkeypatch.setattr(os, "fork", fork)
    answer = {"seconds": None, "why": told, "rate": None, "model": "", "backend": "gloo"}
    assert take_part(part(), lambda *_: what()) == answer
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_the_ranks_of_a_pair():
    """The first node's devices come first; where one node has no GPU, both use their processors."""
    reports = {2: Report(devices=GPUS), 5: Report(devices=(*GPUS, "cuda:2")), 7: Report(devices=("cpu",))}
    one, other = (part_of(node, (2, 5), reports, "h", 1, "p") for node in (2, 5))
    assert (one.backend, one.devices, one.offset, one.world) == ("nccl", GPUS, 0, 5)
    assert (len(other.devices), other.offset, other.world) == (3, 2, 5)
    mixed = part_of(7, (5, 7), reports, "h", 1, "p")
    assert (mixed.backend, mixed.devices, mixed.offset, mixed.world) == ("gloo", ("cpu",), 1, 2)
