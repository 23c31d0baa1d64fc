"""A client in the place of NVRx's, for the sections of Megatron-LM's `ft_integration`. Duck-typed: no NVRx needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resilience_sdk.adapters.megatron.step import Span
from resilience_sdk.straggler.hooks import Guard


class MonitorClient:
    """What Megatron-LM tells of its steps and saves, told on; deadlines are learned by us, so it has none to keep."""

    def __init__(self, begin_step: Callable[[], None], spans: Mapping[str, Span], guard: Guard) -> None:
        """`begin_step` begins a step unless it has begun, and not in an evaluation, whose iterations are `step` too."""
        self.section_timeouts: dict[str, float | None] = {}
        self._begin_step = begin_step
        self._spans = spans
        self._guard = guard

    def init_workload_monitoring(self, *_: Any, **__: Any) -> None:
        """Do nothing: the monitor is there."""

    def start_section(self, name: str) -> None:
        """Begin a section of Megatron-LM: `setup`, `step` or `checkpointing`."""
        if name == "step":
            self._guard.run(self._begin_step)
        elif name == "checkpointing" and not self._spans["checkpoint"].depth:
            self._guard.run(self._spans["finalize"].begin)  # a look at saves in the background, before each step

    def end_section(self, name: str) -> None:
        """End it. A step ends with its optimizer."""
        if name == "checkpointing":
            self._guard.run(self._spans["finalize"].end)

    def calculate_and_set_section_timeouts(
        self, selected_sections: Sequence[str] | None = None, calc_out_of_section: bool = True, **_: Any
    ) -> None:
        """Do nothing: they are learned all the time."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: what is learned is in the run directory."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore what NVRx has saved."""

    def shutdown_workload_monitoring(self) -> None:
        """Do nothing: `pretrain` ends the deadlines."""
