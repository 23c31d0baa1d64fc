"""Durations between events of a device that runs behind its host."""

from __future__ import annotations

from .device import Found, span


def test_a_duration_comes_when_the_device_has_come_to_its_end(device, clock):
    """Not before, in order, each once."""
    found = Found()
    for took in (5, 7, 9):
        span(device, clock, took, found)
    clock.harvest()
    assert found == []
    device.done_ms = 12
    clock.harvest()
    assert found == [5_000_000, 7_000_000]
    device.done_ms = 100
    clock.harvest()
    clock.harvest()
    assert found == [5_000_000, 7_000_000, 9_000_000]


def test_events_are_used_again(device, clock):
    """A device that keeps up needs two."""
    found = Found()
    for _ in range(1000):
        span(device, clock, 1, found)
        device.done_ms = device.now_ms
        clock.harvest()
    assert len(found) == 1000
    assert device.made == 2


def test_a_device_that_is_far_behind_costs_samples_and_no_memory(device, clock):
    """The pool has an end; what does not fit is lost and counted, and what was there still comes."""
    found = Found()
    for _ in range(10_000):
        span(device, clock, 1, found)
    assert device.made == 8192
    device.done_ms = device.now_ms
    clock.harvest()
    assert len(found) == 4096
    span(device, clock, 1, found)
    assert device.made == 8192


def test_nothing_is_recorded_into_a_graph(device, clock):
    """While one is captured there are no marks, and a half-marked span gives its event back."""
    found = Found()
    begin = clock.mark()
    device.capturing = True
    clock.measure(begin, clock.mark(), found)
    device.capturing = False
    span(device, clock, 1, found)
    device.done_ms = device.now_ms
    clock.harvest()
    assert found == [1_000_000]
    assert device.made == 2


def test_waits_are_taken_out_of_work_and_put_into_waiting(device, clock):
    """Stretches between events of their own."""
    found = Found()
    begin = clock.mark()
    device.now_ms += 2
    mark = clock.mark()
    device.now_ms += 30
    hole = clock.hole(mark)
    device.now_ms += 4
    clock.measure(begin, clock.mark(), found, holes=[hole])
    device.done_ms = device.now_ms
    clock.harvest()
    assert found == [6_000_000]
    mark = clock.mark()
    device.now_ms += 10
    earlier = clock.hole(mark)
    span(device, clock, 5, found, holes=[earlier], add_holes=True)
    device.done_ms = device.now_ms
    clock.harvest()
    assert found[1] == 15_000_000


def test_a_stretch_that_two_spans_count_is_known_to_both(device, clock):
    """The device is between the two ends when the first is handed out, and its events are used again."""
    found = Found()
    begin = clock.mark()
    mark = clock.mark()
    device.now_ms += 10
    hole = clock.hole(mark)
    device.now_ms += 5
    clock.measure(begin, clock.mark(), found, holes=[hole])
    device.done_ms = device.now_ms
    span(device, clock, 3, found, holes=[hole], add_holes=True)
    device.done_ms = 15
    clock.harvest()
    assert found == [5_000_000]
    for _ in range(4):
        span(device, clock, 100, Found())
    device.done_ms = device.now_ms
    clock.harvest()
    assert found == [5_000_000, 13_000_000]
