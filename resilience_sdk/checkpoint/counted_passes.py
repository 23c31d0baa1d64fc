"""Samplers that count their own passes: the number is in no state, so that a resume has the order of another pass.

They are seen by a whole number that changes as they are iterated. Whoever has `set_epoch` or a `state_dict` is told its
pass, or saves it.
"""

from __future__ import annotations

import contextlib
from typing import Any

from resilience_sdk.checkpoint.generators import parts
from resilience_sdk.core.resume_limits import note

_SAMPLERS = ("sampler", "batch_sampler", "inner_sampler")
_TELLING = ("set_epoch", "state_dict")


class CountedPasses:
    """What the samplers of a loader count; of the thread that trains."""

    def __init__(self) -> None:
        """Know of no pass yet."""
        self._before: dict[int, tuple[Any, dict[str, int]]] = {}

    def look(self, loader: Any, *more: Any) -> None:
        """Look at the numbers, before the order of a pass is drawn and behind it, and say which has changed.

        `more`: other samplers of it. Never raises.
        """
        with contextlib.suppress(Exception):  # of a loader or a sampler of somebody else's kind
            self._look([*(part for name, part in parts(loader) if name in _SAMPLERS), *more])

    def _look(self, samplers: list[Any]) -> None:
        before, self._before = self._before, {}
        for sampler in samplers:
            held = getattr(sampler, "__dict__", None)
            if not isinstance(held, dict) or any(hasattr(sampler, one) for one in _TELLING):
                continue
            numbers = {key: value for key, value in held.items() if type(value) is int}
            known, then = before.get(id(sampler), (None, {}))
            changed = [key for key, value in numbers.items() if known is sampler and then.get(key, value) != value]
            if changed:
                _note(type(sampler).__name__, changed[0])
            self._before[id(sampler)] = sampler, numbers


def _note(kind: str, name: str) -> None:
    note(
        "counted passes",
        f"the order that {kind} gives by its `{name}`",
        "it counts its passes itself and nothing saves that number, so a resume behind the first pass has the order of "
        "another one, and samples come twice or not at all (an order that does not depend on it is exact)",
        "give the sampler a set_epoch(epoch), or state_dict() and load_state_dict() with that number",
    )
