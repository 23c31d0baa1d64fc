"""What the end of a probe's process says about what it looked at. Pure: what was read of it is an argument."""

from __future__ import annotations

import re
import signal

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import Probe

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_THREAD = re.compile(r"^(?:(?P<current>Stack \(|Current thread 0x)|Thread 0x).*$", re.MULTILINE)
# A thread that waits for another, and frames that are not the probe's, say nothing about what hangs.
_WAITING = re.compile(r"/(threading|queue|selectors)\.py$")
_OURS = re.compile(r"/health/child\.py$|^<")


def hung(probe: Probe, deadline_s: float, stderr: str, state: str) -> Finding:
    """Return the finding of a probe that did not end by its deadline; `state` is that of its process (`D state`)."""
    places = stuck_in(stderr)
    where = f", stuck in {', '.join(places)}" if places else ""
    kernel = f" ({state})" if state else ""
    return _ending(probe, f"no answer within {deadline_s:g} s{where}{kernel}", value=deadline_s, unit="s")


def still_stuck(probe: Probe, pid: int, ago_s: float, state: str) -> Finding:
    """Return the finding of a probe that was not started: its process of a look `ago_s` seconds ago does not go."""
    kernel = f" ({state})" if state else ""
    return _ending(probe, f"no answer: process {pid}, which looked {ago_s:.0f} s ago, cannot be killed{kernel}")


def crashed(probe: Probe, returncode: int | None, stderr: str) -> Finding:
    """Return the finding of a probe whose process ended before it had told everything."""
    if returncode is None:
        how = "ended without a word, and its process does not go"
    elif returncode < 0:
        how = f"was killed by {_signal_name(-returncode)}"
    else:
        how = f"left with {returncode}"
    places = stuck_in(stderr)
    where = f" in {', '.join(places)}" if places else ""
    last = "" if places else _last_line(stderr)
    return _ending(probe, f"the probe {how}{where}{f': {last}' if last else ''}")


def stuck_in(stderr: str) -> list[str]:
    """Return the innermost telling frame of each thread of a faulthandler dump: `file:line function`, each once.

    Of a crash it is the frame of the thread that crashed; threads that only wait for others say nothing.
    """
    places: list[str] = []
    heads = list(_THREAD.finditer(stderr))
    ends = [*(head.start() for head in heads), len(stderr)][1:]
    for head, end in zip(heads, ends, strict=True):
        place = _telling_frame(stderr[head.end() : end])
        if head["current"] and place:
            return [place]
        if place and place not in places:
            places.append(place)
    return places


def _telling_frame(stack: str) -> str:
    frames = list(_FRAME.finditer(stack))
    if not frames or _WAITING.search(frames[0]["file"]):
        return ""
    frame = next((frame for frame in frames if not _OURS.search(frame["file"])), None)
    return f"{frame['file'].rpartition('/')[2]}:{frame['line']} {frame['function']}" if frame else ""


def _ending(probe: Probe, evidence: str, value: float | None = None, unit: str = "") -> Finding:
    return Finding(
        probe=probe.name,
        check="answers",
        subject=probe.only,
        status=Status.FAILED,
        value=value,
        unit=unit,
        threshold=value,
        evidence=evidence,
        cure=probe.cure,
        must=probe.must,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
