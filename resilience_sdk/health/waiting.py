"""Waiting for a rendezvous that is not there yet: its node, or its name, often comes up later than this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from resilience_sdk.health.findings import Finding
from resilience_sdk.health.network.rendezvous import OWN_NAME
from resilience_sdk.health.probes import RENDEZVOUS

_AGAIN_S = 2.0


def rendezvous_there(
    findings: Sequence[Finding],
    look: Callable[[], Sequence[Finding]],
    limit_s: float,
    say: Callable[[str], None],
    *,
    again_s: float = _AGAIN_S,
) -> list[Finding]:
    """Return findings of which those of the rendezvous are as `look` finds them once it is there, or at the end.

    Waits where nothing else stops the job, `limit_s` at most, and says so once.
    """
    found, ends, said = list(findings), time.monotonic() + limit_s, False
    while missing := _missing(found):
        left_s = ends - time.monotonic()
        if left_s <= 0:
            break
        if not said:
            said = True
            say(f"preflight: {missing.subject or 'the rendezvous'} is not there yet ({missing.evidence}); "
                f"trying again for up to {left_s:.0f} s")  # fmt: skip
        time.sleep(min(again_s, left_s))
        found = [*(finding for finding in found if finding.probe != RENDEZVOUS.name), *look()]
    return found


def _missing(findings: Sequence[Finding]) -> Finding | None:
    """Return what is missing of the rendezvous; None where nothing is, or something else has to be cured first."""
    stopping = [finding for finding in findings if finding.stops]
    return stopping[0] if stopping and all(map(_may_come, stopping)) else None


def _may_come(finding: Finding) -> bool:
    """Tell whether time may cure a finding.

    Not a name that does resolve, to a loopback address; nor this machine's own, which is up.
    """
    return finding.probe == RENDEZVOUS.name and finding.check != OWN_NAME and not finding.data.get("addresses")
