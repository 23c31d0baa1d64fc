"""Two statements about one death made into one: its exit or exception, and what its log or the kernel says. Pure.

How a process ended says little about why: an abort is how many things end. What its log or the kernel says takes
its place where the taxonomy has it explain such an end, or where the end alone is a mere guess; else it is quoted
beside it, and makes it surer where both say the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from resilience_sdk.attribution.exits import Classification
from resilience_sdk.attribution.taxonomy import lookup

VAGUE = 0.5
"""Confidence up to which a cause is a guess that anything more certain replaces."""
_AGREED = 0.05
_MOST_SURE = 0.97


def weigh(own: Classification, told: Iterable[Classification]) -> Classification:
    """Return what the death of one process was, from how it ended and what others say about it.

    A process that only missed its peers (`symptom`) stays one unless something explains it otherwise.
    """
    for other in told:
        own = _weigh_one(own, other)
    return own


def _weigh_one(own: Classification, other: Classification) -> Classification:
    if other.cause == own.cause:
        sure = min(_MOST_SURE, max(own.confidence, other.confidence) + _AGREED)
        return attrs.evolve(own, confidence=sure, evidence=(*own.evidence, *other.evidence))
    explains = not other.symptom and own.cause in lookup(other.cause).explains
    guess = not own.symptom and own.confidence <= VAGUE and other.confidence > own.confidence
    if explains or guess:
        return attrs.evolve(other, evidence=(*other.evidence, *own.evidence))
    return own if other.symptom else attrs.evolve(own, evidence=(*own.evidence, *other.evidence[:1]))
