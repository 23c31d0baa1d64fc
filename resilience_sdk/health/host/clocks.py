"""The clock: whether it is kept right, and whether reading it is cheap."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

from resilience_sdk import kernel_files
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import judged

PROBE = "host"
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_TIMEX_BYTES = 512  # of struct timex there are 208; all zero means: change nothing, only tell
# These are read through the kernel or slow devices: a microsecond and more instead of some 20 ns.
_SLOW_SOURCES = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"})


def synchronised() -> int | None:
    """Return what adjtimex(2) says of this machine's clock, None where it cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        answer = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return answer if answer >= 0 else None


def clock(answer: int | None) -> Iterator[Finding]:
    """Yield whether the clock is synchronised; `answer` is that of adjtimex(2)."""
    if answer is None:
        yield Finding(probe=PROBE, check="clock", status=Status.UNAVAILABLE, evidence="adjtimex(2) may not be called")
        return
    is_wrong = answer == _TIME_ERROR
    yield judged(
        probe=PROBE,
        check="clock",
        status=Status.DEGRADED if is_wrong else Status.OK,
        value="not synchronised" if is_wrong else "synchronised",
        evidence="nothing keeps this machine's clock right: times of its events cannot be compared with other nodes'"
        if is_wrong
        else "the kernel's clock is kept right",
        cure="start chronyd or systemd-timesyncd on the machine (in a container: on its host)",
    )


def clock_source(root: str) -> Iterator[Finding]:
    """Yield what the kernel reads the time from."""
    place = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    source = kernel_files.text(kernel_files.below(root, place))
    if source is None:
        return
    is_slow = source in _SLOW_SOURCES
    yield judged(
        probe=PROBE,
        check="clock_source",
        status=Status.DEGRADED if is_slow else Status.OK,
        value=source,
        evidence=f"each reading of the clock goes to {source}, which takes a microsecond or more"
        if is_slow
        else source,
        cure="boot with a stable tsc (firmware update, `tsc=reliable`); see why with `dmesg | grep -i tsc`",
    )
