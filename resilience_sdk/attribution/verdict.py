"""The answer of `diagnose`: what it was, who, what to do, and the lines that say so. Plain values."""

from __future__ import annotations

from typing import Any

import attrs

from resilience_sdk.attribution.taxonomy import lookup, meaning


@attrs.frozen
class Suspect:
    """Whom the evidence names: a rank, a node, or both. `stack`: `file:line function`, innermost first."""

    rank: int | None = None
    node: str | None = None
    step: int | None = None
    section: str | None = None
    stack: tuple[str, ...] = ()


@attrs.frozen
class Quote:
    """One line of the evidence: the file it is from, its number (from 1; None where there are none), its words."""

    source: str
    line: int | None
    text: str


@attrs.frozen
class Verdict:
    """Cause, place in the taxonomy, next action, confidence of 0 to 1, whom it names and why.

    `culprits` may be empty: that nobody can be named is an answer, as is the cause `unknown`.
    """

    category: str
    cause: str
    action: str
    confidence: float
    culprits: tuple[Suspect, ...] = ()
    evidence: tuple[Quote, ...] = ()

    @property
    def meaning(self) -> str:
        """The sentence of the taxonomy."""
        return meaning(self.cause)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values: every key of the documented schema, null for what is not known."""
        data = attrs.asdict(self)
        data["confidence"] = round(self.confidence, 3)
        data["culprits"] = [{**culprit, "stack": list(culprit["stack"])} for culprit in data["culprits"]]
        data["evidence"] = list(data["evidence"])
        return data


def verdict(
    cause: str, confidence: float, culprits: tuple[Suspect, ...] = (), evidence: tuple[Quote, ...] = ()
) -> Verdict:
    """Build a verdict with the taxonomy's category and default action of `cause`."""
    entry = lookup(cause)
    return Verdict(entry.category, entry.cause, entry.action, confidence, culprits, evidence)
