"""A stream of a device that runs behind its host, for tests without a GPU."""

from __future__ import annotations

import math

import attrs


@attrs.define
class Device:
    """A stream that comes to its events when it is told to; times in milliseconds."""

    now_ms: float = 0.0
    done_ms: float = -1.0
    made: int = 0
    capturing: bool = False
    works_for: float = math.inf

    def is_capturing(self):
        return self.capturing

    def event(self):
        self.made += 1
        return DeviceEvent(self)


@attrs.define(eq=False)
class DeviceEvent:
    """As torch.cuda.Event: unrecorded it is complete, and elapsed_time of one that is not reached is an error."""

    device: Device
    at_ms: float | None = None

    def record(self):
        self.device.works_for -= 1
        if self.device.works_for < 0:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.at_ms = self.device.now_ms

    def query(self):
        return self.at_ms is None or self.at_ms <= self.device.done_ms

    def elapsed_time(self, end):
        assert self.query()
        assert end.query()
        return end.at_ms - self.at_ms


class Found(list):
    """Keeps the durations that a clock hands out."""

    def sample(self, ns):
        self.append(ns)


def span(device, clock, took_ms, found, **options):
    begin = clock.mark()
    device.now_ms += took_ms
    clock.measure(begin, clock.mark(), found, **options)
