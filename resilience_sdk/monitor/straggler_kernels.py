"""The newest kernel times that the ranks of this node have sampled, each window told to the other nodes only twice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs

from resilience_sdk.straggler import kernels
from resilience_sdk.straggler.published import Seen, seen

_TOLD = 16  # kernels of a rank, those with the largest part of the time
_TIMES = 2  # that a window is told: one message may be overwritten before it is read


@attrs.define
class _Newest:
    seen: Seen
    window: kernels.KernelWindow
    told: int = 0


class KernelNews:
    """What is new on this node. The monitor's only thread."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._newest: dict[Path, _Newest] = {}

    def of(self, ranks: Iterable[tuple[int, Path]]) -> dict[int, kernels.KernelWindow]:
        """Return rank -> its newest window, where that has not been told often enough; `ranks` with their stems."""
        found = {}
        for rank, stem in ranks:
            newest = self._look(stem)
            if newest is not None and newest.told < _TIMES:
                newest.told += 1
                found[rank] = newest.window
        return found

    def _look(self, stem: Path) -> _Newest | None:
        path = stem.with_name(stem.name + kernels.SUFFIX)
        now, known = seen(path), self._newest.get(stem)
        if now is not None and (known is None or known.seen != now):
            window = kernels.read(path)
            if window is not None:
                window = attrs.evolve(window, kernels=window.kernels[:_TOLD])
                known = self._newest[stem] = _Newest(now, window)
        return known
