"""What the end of a probe's process says about what it looked at. Pure: what was read of it is an argument."""

from __future__ import annotations

import re
import signal

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import Probe

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
# Frames of waiting and of ourselves say nothing about what hangs.
_OURS = re.compile(r"/(threading|queue|selectors)\.py$|/health/child\.py$|^<")


def hung(probe: Probe, deadline_s: float, stderr: str, state: str) -> Finding:
    """Return the finding of a probe that did not end by its deadline; `state` is that of its process (`D state`)."""
    places = stuck_in(stderr)
    where = f", stuck in {', '.join(places)}" if places else ""
    kernel = f" ({state})" if state else ""
    return _ending(probe, f"no answer within {deadline_s:g} s{where}{kernel}", value=deadline_s, unit="s")


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
    """Return the innermost telling frame of each thread of a faulthandler dump: `file:line function`, each once."""
    places: list[str] = []
    for block in re.split(r"^(?:Current t|T)hread 0x.*$", stderr, flags=re.MULTILINE)[1:]:
        for frame in _FRAME.finditer(block):
            if not _OURS.search(frame["file"]):
                place = f"{frame['file'].rpartition('/')[2]}:{frame['line']} {frame['function']}"
                if place not in places:
                    places.append(place)
                break
    return places


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
