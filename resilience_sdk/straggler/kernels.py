"""Times of single GPU kernels, from short windows of `torch.profiler`: one step, now and then.

What runs is only sampled, because a profiler that is always on costs more than most stragglers. Kernels that
communicate are left out: on a fast rank they last longer, since they wait for the slow one. Which kernels are seen
may differ between ranks and windows; a score compares what both have.
"""

from __future__ import annotations

import inspect
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import attrs

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.console import say_once
from resilience_sdk.core.json_records import from_text, to_text
from resilience_sdk.core.plain_file import private
from resilience_sdk.recorder.page_layout import shortened
from resilience_sdk.straggler.windowing import median

SUFFIX = ".kernels.json"
"""Beside the rank's page, with its stem."""

_COMMUNICATION = (
    "nccl",
    "rccl",
    "nvshmem",
    "gloo",
    "oneccl",
    "all_reduce",
    "allreduce",
    "all_gather",
    "reduce_scatter",
)
_MOST_KERNELS = 256
_MOST_NAME = 200  # bytes; those of templates are longer, and differ at their ends
_MOST_BYTES = 1 << 20
_NANO = 1e9


@attrs.frozen
class KernelTime:
    """One kernel in one window."""

    name: str
    count: int
    median_s: float
    total_s: float


@attrs.frozen
class KernelWindow:
    """What one rank ran in one window, the kernel with the longest total first."""

    window: int  # its number in this process, from 1
    kernels: tuple[KernelTime, ...]


def is_communication(name: str) -> bool:
    """Tell whether a kernel moves data between ranks, by its name."""
    lowered = name.lower()
    return any(part in lowered for part in _COMMUNICATION)


def summarize(durations: Mapping[str, Sequence[float]], window: int) -> KernelWindow:
    """Return the window of these durations (nanoseconds by name), without communication.

    Of more than 256 kernels, those with the longest totals are kept.
    """
    kernels = [
        KernelTime(shortened(name, _MOST_NAME), len(times), median(times) / _NANO, sum(times) / _NANO)
        for name, times in durations.items()
        if times and not is_communication(name)
    ]
    kernels.sort(key=lambda kernel: (-kernel.total_s, kernel.name))
    return KernelWindow(window, tuple(kernels[:_MOST_KERNELS]))


def durations_of(events: Iterable[Any], device: str) -> dict[str, list[float]]:
    """Return the nanoseconds of each event that ran on `device` (`CUDA`, or `CPU`), by name.

    `events` are those of `torch.profiler.profile.events()`. On a CPU these are operators, outer ones included.
    """
    found: dict[str, list[float]] = {}
    for event in events:
        if event.device_type.name == device and not getattr(event, "is_user_annotation", False):
            found.setdefault(event.name, []).append(event.time_range.elapsed_us() * 1e3)
    return found


def publish(path: Path, window: KernelWindow) -> None:
    """Replace the file as a whole; raises OSError."""
    write_whole(path, to_text(window))


def read(path: Path) -> KernelWindow | None:
    """Return the newest window of a rank, or None where there is none, or none of this user's."""
    try:
        with open(path, "rb", opener=private) as file:
            info = os.fstat(file.fileno())
            is_ours = info.st_uid == os.geteuid() and not info.st_mode & 0o022
            return from_text(KernelWindow, file.read(_MOST_BYTES)) if is_ours else None
    except OSError:
        return None


_default_every_s: float | None = None


def sample_by_default(every_s: float | None) -> None:
    """Have every `attach` of this process that does not say otherwise sample kernels every so many seconds.

    0 never does, whatever an adapter proposes; None leaves it to each `attach`.
    """
    global _default_every_s
    _default_every_s = every_s


def sampling_interval(asked_s: float | None, proposed_s: float | None = None) -> float | None:
    """Return the seconds between two windows, None where there are none.

    `asked_s` is what the code says, which has precedence; the setting comes next, then what an adapter proposes.
    """
    for every_s in (asked_s, _default_every_s, proposed_s):
        if every_s is not None:
            return every_s or None
    return None


def sampled_device(model: Any) -> str | None:
    """Return on what device of the profiler the kernels of a model run, None where they are not sampled."""
    parameter = next(iter(model.parameters()), None)
    return "CUDA" if parameter is not None and parameter.device.type == "cuda" else None


MAX_SHARE = 0.01
"""Of the time of the thread that trains, which windows may cost; where they would cost more, they come less often."""


class KernelSampler:
    """Profiles one optimizer step every `every_s` seconds, and publishes what it saw at `path`.

    Called at the end of each step by the thread that trains. A window costs that thread the profiler's start and
    stop, which waits for the device once; the events are read in a thread of their own. What that costs is measured
    and said once (`says_cost`), and windows come less often where it would be more than one percent. A profiler of
    the user's has precedence: there is one at a time in a process. Where none can be started, that is said, and
    nothing is sampled any more.
    """

    def __init__(self, every_s: float, path: Path, device: str = "CUDA", *, says_cost: bool = False) -> None:
        self._every_s = every_s
        self._path = path
        self._device = device
        self._says_cost = says_cost
        self._profile: Any = None
        self._reader: threading.Thread | None = None
        self._windows = 0
        self._started_s = 0.0  # what the start of the open window took
        self._due_at = monotonic() + min(every_s, 30.0)  # not the first steps: they compile, tune and allocate

    def step_ends(self) -> None:
        """End the window that is open, else begin one if it is time."""
        if self._profile is not None:
            self.stop()
        elif monotonic() >= self._due_at:
            try:
                self._start()
            except Exception as error:  # noqa: BLE001 - another tool may have the device's counters: sections go on
                self._give_up(error)

    def stop(self) -> None:
        """End the open window, if there is one, and read it."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        began_s = monotonic()
        try:
            profile.stop()
        except Exception as error:  # noqa: BLE001 - see above
            self._give_up(error)
            return
        self._windows += 1
        self._wait(self._started_s + monotonic() - began_s)
        self._reader = threading.Thread(target=self._read, args=(profile,), name="resilience-kernels", daemon=True)
        self._reader.start()

    def _wait(self, cost_s: float) -> None:
        """Say when the next window is due after one that has cost the thread that trains so long."""
        # The first window of a process also loads and sets up the profiler, which tells nothing of the next.
        pause_s = self._every_s if self._windows == 1 else max(self._every_s, cost_s / MAX_SHARE)
        self._due_at = monotonic() + pause_s
        if self._windows == 2 and self._says_cost:
            say_once(
                "kernel cost",
                f"GPU kernels are timed in one step every {pause_s:.3g} s, which takes {1e3 * cost_s:.3g} ms each time "
                f"({100 * cost_s / pause_s:.2g} % of the training); kernels_every = 0 switches it off",
            )

    def _give_up(self, error: Exception) -> None:
        self._due_at = math.inf
        say_once("kernels", f"the times of GPU kernels are not known: {type(error).__name__}: {error}")

    def join(self, timeout_s: float) -> None:
        """Wait until the last window is read."""
        if self._reader is not None:
            self._reader.join(timeout_s)

    def _start(self) -> None:
        import torch

        if torch._C._autograd._profiler_enabled() or (self._reader is not None and self._reader.is_alive()):
            self._due_at = monotonic() + self._every_s
            return
        began_s = monotonic()
        activity = getattr(torch.profiler.ProfilerActivity, self._device)
        # There is one cycle: without this, versions that know it warn that the events of others would be lost.
        known = inspect.signature(torch.profiler.profile).parameters
        profile = torch.profiler.profile(activities=[activity], **{"acc_events": True} if "acc_events" in known else {})
        profile.start()
        self._profile, self._started_s = profile, monotonic() - began_s

    def _read(self, profile: Any) -> None:
        try:
            publish(self._path, summarize(durations_of(profile.events(), self._device), self._windows))
        except Exception as error:  # noqa: BLE001 - a thread of ours must not end in a traceback on the user's screen
            say_once("kernels", f"the times of GPU kernels are not known: {type(error).__name__}: {error}")
