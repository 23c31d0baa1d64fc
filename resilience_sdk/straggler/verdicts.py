"""What is found about slow ranks, in a form that travels and can be printed."""

from __future__ import annotations

import attrs

FOUND, STILL, OVER = "found", "still", "over"
TRANSIENT, PERSISTENT, GLOBAL = "transient", "persistent", "global"
_SHOWN_RANKS = 8


@attrs.frozen
class Verdict:
    """Who is slow in what, since when and by how much."""

    kind: str
    """`transient`: seen, and not for long yet; `persistent`; `global`: everybody has become slower at once."""
    section: str
    section_kind: str
    """What was measured: `compute`, `io`, `comm`, or `gpu` for the time on the device."""
    role: str
    ranks: tuple[int, ...]
    """The slow ranks; empty in a global verdict, but for a job of a single rank."""
    nodes: tuple[str, ...]
    whole_node: bool
    """Whether it is the node that is slow: all its ranks are."""
    since_step: int
    """First step of the window in which it began."""
    last_step: int
    """Last step of the window in which it was seen last."""
    ratio: float = 1.0
    """How slow: 1.10 is 10 % slower than the others, or than before in a global verdict."""
    excess_s: float = 0.0
    """Seconds that this costs in each step."""
    share: float = 0.0
    """The same as a share of the median time of a step."""
    z: float = 0.0
    """Distance from the middle in standard deviations."""
    windows: int = 0
    """For how many windows it has stood."""
    confidence: float = 0.0
    """0 to 1, see `confidence()`."""
    until_step: int | None = None
    """Last step before it was over."""
    waits_least: bool | None = None
    """Whether the others wait for these ranks (True), or these wait as much as others (False); None: cannot tell."""

    @property
    def is_global(self) -> bool:
        """Whether everybody has become slower."""
        return self.kind == GLOBAL

    @property
    def where(self) -> str:
        """What was measured, in words: the section, and whether on the device."""
        return f"section {self.section}{' on the GPU' if self.section_kind in ('gpu', 'gpu_comm') else ''}"

    @property
    def who(self) -> str:
        """Who is slow, in words."""
        if self.is_global:
            return "all ranks" + (f" of role {self.role}" if self.role else "") + " together"
        if self.whole_node:
            return f"node {self.nodes[0]} ({_ranks(self.ranks)})"
        nodes = [node for node in dict.fromkeys(self.nodes) if node]
        return _ranks(self.ranks) + (f" (node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)})" if nodes else "")

    def text(self) -> str:
        """Return the verdict as one line."""
        others = "before" if self.is_global else "the others"
        is_over = self.until_step is not None
        slower = f"{'was' if is_over else 'is'} {100 * (self.ratio - 1):.0f} % slower than {others}"
        if self.ratio >= 2.0:
            slower = f"{'took' if is_over else 'takes'} {self.ratio:.1f} times as long as {others}"
        when = f"from step {self.since_step} to {self.until_step}" if is_over else f"since step {self.since_step}"
        waits = {True: ", the others wait for it", False: ", but it waits as long as the others", None: ""}
        return (
            f"{self.who}: {self.where} {slower} {when} "
            f"({1000 * self.excess_s:.3g} ms a step, {100 * self.share:.0f} % of it{waits[self.waits_least]}); "
            f"{self.kind}, confidence {self.confidence:.2f}"
        )


@attrs.frozen
class Change:
    """What has changed about a verdict."""

    what: str
    """`found`, `still` (it has become persistent, or its ranks have changed) or `over`."""
    verdict: Verdict


def confidence(*, z: float, needed_z: float, windows: int, few: bool, waits_least: bool | None) -> float:
    """Return how sure a verdict is, 0 to 1.

    0.6 for what has passed all thresholds; + 0.05 for each window more than two, up to four of them; + 0.1 when it
    is twice as far out as it needs to be; + 0.1 when the waits agree, - 0.3 when they contradict; and at most 0.7
    where there are too few ranks to know how much they differ by themselves.
    """
    sure = 0.6 + 0.05 * min(4, max(0, windows - 2))
    sure += 0.1 if z >= 2.0 * needed_z else 0.0
    sure += {True: 0.1, False: -0.3, None: 0.0}[waits_least]
    return round(min(sure, 0.7 if few else 0.99), 2)


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN_RANKS])
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"
