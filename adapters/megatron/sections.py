"""Which of Megatron's timers is which section, and the sections that they begin and end."""

from __future__ import annotations

from resilience_sdk.adapters._base import HookedSection
from resilience_sdk.adapters.megatron import surroundings

STEP = "forward-backward"
OPTIMIZER = "optimizer"
DATA = "batch-generator"

_KINDS = {"data": "io", "checkpoint": "io", "finalize": "io", "resume": "io", "comm_wait": "comm"}
_NAMES = {
    "forward-compute": "fwd",
    "backward-compute": "bwd",
    DATA: "data",
    OPTIMIZER: "optim",
    "eval-time": "eval",
    "evaluate": "eval",
    "save-checkpoint": "checkpoint",
    "save-checkpoint-non-persistent": "checkpoint",
    "load-checkpoint": "resume",
}
# Where a rank waits for others: between stages of a pipeline, and for the gradients of its replicas.
_WAITS = (
    "all-grads-sync",
    "conditional-embedder-grads-all-reduce",
    "embedding-grads-all-reduce",
    "layernorm-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
    "params-all-gather",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "forward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
)
SECTION_OF = {**_NAMES, **dict.fromkeys(_WAITS, "comm_wait")}
IN_STEP = ("fwd", "bwd", "data", "optim", "comm_wait")
"""Those that are never open between two steps."""


class Span:
    """A section that several seams may begin and end, one inside the other: the outermost pair counts.

    For the thread that trains.
    """

    __slots__ = ("_depth", "_section")

    def __init__(self, name: str) -> None:
        self._section = HookedSection(name, _KINDS.get(name, "compute"))
        self._depth = 0

    @property
    def is_open(self) -> bool:
        """Whether a begin waits for its end."""
        return self._depth > 0

    def begin(self) -> None:
        """Begin, or count one more that has begun."""
        self._depth += 1
        if self._depth == 1:
            self._section.begin()

    def end(self) -> None:
        """End what began; the last one closes the section, and counts it. Nothing where none has begun."""
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._section.end()

    def pause(self) -> None:
        """Take back what has begun, for `resume` to begin it later: nothing of the time until then counts."""
        if self._depth:
            self._section.drop()

    def resume(self) -> None:
        """Begin again what was paused."""
        if self._depth:
            self._section.begin()

    def drop(self) -> None:
        """Close it without counting, after an exception."""
        if self._depth:
            self._depth = 0
            self._section.drop()


class Fetch:
    """The wait for a batch, which Megatron has inside of its forward: a rank with slow storage has no slow model."""

    __slots__ = ("_data", "_forward")

    def __init__(self, data: Span, forward: Span) -> None:
        self._data, self._forward = data, forward

    def begin(self) -> None:
        """Begin it, unless it is that of an evaluation; the forward begins anew behind it."""
        if surroundings.trains():
            self._forward.pause()
            self._data.begin()

    def end(self) -> None:
        """End it."""
        if self._data.is_open:
            self._data.end()
            self._forward.resume()


def spans() -> dict[str, Span]:
    """Return a span for each section, by name."""
    return {name: Span(name) for name in dict.fromkeys((*SECTION_OF.values(), "finalize"))}
