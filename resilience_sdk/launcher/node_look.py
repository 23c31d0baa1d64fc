"""The look at this node after a program blamed it: words of a program start one, and take no node out by themselves."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.attribution.exits import classification
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.settings import Settings
from resilience_sdk.launcher.task_programs import answer_of
from resilience_sdk.postmortem import crash
from resilience_sdk.postmortem.facts import AttemptFacts, NodeLook
from resilience_sdk.system import programs

_LIMIT_S = 8.0  # of the probe; the ranks wait for it
_START_S = 4.0  # of the process that starts it
_SURE = 0.9
_KERNEL = "the kernel's log"


def look_where_blamed(facts: AttemptFacts, settings: Settings, local_ranks: int, journal: Journal) -> AttemptFacts:
    """Return the facts with what a look at this node has found, where nothing but words blames it; never raises."""
    if not crash.blames_by_words(facts):
        return facts
    began_s = time.monotonic()
    task = {"settings": settings.to_json(), "local_ranks": local_ranks, "limit_s": _LIMIT_S}
    try:
        look = _read(answer_of(programs.NODE_LOOK, task, None, _LIMIT_S + _START_S))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, subprocess.SubprocessError) as error:
        look = NodeLook((), f"the look at the node failed ({' '.join(str(error).split())[:200]})")
    took_s = round(time.monotonic() - began_s, 3)
    journal.emit(Event.HEALTH, what="node", ok=not look.found, why=look.seen, check="look", took_s=took_s)
    return attrs.evolve(facts, look=look)


def _read(answer: Mapping[str, Any]) -> NodeLook:
    found = tuple(
        classification(str(one["cause"]), _SURE, crash.looked(str(one["text"])), measured=True)
        for one in answer["found"]
    )
    return NodeLook(found, f"{answer['seen']}; {_KERNEL}: nothing of it")
