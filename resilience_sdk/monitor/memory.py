"""The monitor's part in the memory of ranks: reads what each has, and journals it now and then and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from resilience_sdk.core import console
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.goodput.memory import MemorySamples
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.monitor.time_spent import pause_s
from resilience_sdk.system import procfs

_EVERY_NS = 1_000_000_000
_FIRST_S = 5.0
_CHANGE = 0.05  # of all memory: told at once, for it may be the last that is told


@attrs.define
class _Rank:
    """One rank as it was looked at last; bytes."""

    rank: int
    host: int | None = None
    host_peak: int = 0
    device: int | None = None
    device_peak: int = 0
    device_total: int | None = None
    is_over: bool = False
    on_host: MemorySamples = attrs.field(factory=MemorySamples)
    on_device: MemorySamples = attrs.field(factory=MemorySamples)

    def look(self, watched: WatchedRank) -> None:
        """Read what the process has now, and what its page says of its device; nothing where it is gone."""
        status = procfs.status_fields(watched.snapshot.pid)
        resident, own = _bytes(status, "VmRSS"), [_bytes(status, name) for name in ("RssAnon", "RssShmem")]
        step = watched.snapshot.beats
        if resident is not None:
            self.host, self.host_peak = resident, max(self.host_peak, resident, _bytes(status, "VmHWM") or 0)
            # Pages of files (a data set that is mapped) are given back where memory is short.
            if watched.snapshot.completed_beats > 0 and own[0] is not None:
                self.on_host.add(step, own[0] + (own[1] or 0))
        device = watched.snapshot.device
        if device is not None:
            self.device, self.device_total = device.allocated, device.total
            self.device_peak = max(self.device_peak, device.peak)
            if watched.snapshot.completed_beats > 0:
                self.on_device.add(step, device.allocated)

    def told(self) -> dict[str, object]:
        """Return it as the journal has it; what is not known is left out."""
        values = {
            "rank": self.rank,
            "host": self.host,
            "host_peak": self.host_peak or None,
            "host_growth": _whole(self.on_host.growth),
            "device": self.device,
            "device_peak": self.device_peak or None,
            "device_total": self.device_total,
            "device_growth": _whole(self.on_device.growth),
        }
        return {name: value for name, value in values.items() if value is not None}


class MemoryWatch:
    """Follows the memory of a node's ranks. The monitor's only thread."""

    def __init__(self, journal: Journal) -> None:
        """Begin with nothing."""
        self._journal = journal
        self._has_failed = False
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._ranks: dict[Path, _Rank] = {}
        self._began_ns: int | None = None
        self._looked_ns = 0
        self._told_ns: int | None = None
        self._told: dict[int, tuple[int, int]] = {}

    def look(self, ranks: Sequence[WatchedRank], now_ns: int) -> None:
        """Look at each rank, once a second at most, and tell of them where it is time.

        Never raises: a mistake here must not cost the job its watch.
        """
        if self._has_failed or not ranks:
            return
        try:
            self._look(ranks, now_ns)
        except Exception as error:  # noqa: BLE001 - see above
            self._has_failed = True
            self._journal.emit(Event.DEGRADED, what="memory", why=repr(error))
            console.say_once("memory", f"the memory of ranks is not recorded any more: {error!r}")

    def _look(self, ranks: Sequence[WatchedRank], now_ns: int) -> None:
        has_died = any(not w.alive and not (w.stem in self._ranks and self._ranks[w.stem].is_over) for w in ranks)
        if now_ns - self._looked_ns < _EVERY_NS and not has_died:
            return
        self._looked_ns = now_ns
        self._began_ns = self._began_ns or now_ns
        for watched in ranks:
            known = self._ranks.setdefault(watched.stem, _Rank(watched.rank))
            known.is_over = not watched.alive
            if watched.alive:
                known.look(watched)
        left = procfs.memory_left()
        if has_died or self._is_due(now_ns, left.total if left is not None else 0):
            self._tell(ranks, now_ns, left)

    def _is_due(self, now_ns: int, total: int) -> bool:
        assert self._began_ns is not None
        age_s = (now_ns - self._began_ns) / 1e9
        if self._told_ns is None:
            return age_s >= _FIRST_S
        if (now_ns - self._told_ns) / 1e9 >= pause_s(age_s):
            return True
        for known in self._ranks.values():
            host, device = self._told.get(known.rank, (0, 0))
            if total and abs((known.host or 0) - host) > _CHANGE * total:
                return True
            if known.device_total and abs((known.device or 0) - device) > _CHANGE * known.device_total:
                return True
        return False

    def _tell(self, ranks: Sequence[WatchedRank], now_ns: int, left: procfs.MemoryLeft | None) -> None:
        known = [self._ranks[watched.stem] for watched in ranks]
        if not any(one.host is not None for one in known):
            return
        self._told_ns = now_ns
        self._told = {one.rank: (one.host or 0, one.device or 0) for one in known}
        room = {} if left is None else {"left": left.free, "total": left.total}
        self._journal.emit(Event.MEMORY, ranks=[one.told() for one in known], **room)


def _bytes(status: dict[str, str], name: str) -> int | None:
    """Return a value of /proc/<pid>/status, which has them as `123 kB`."""
    word = status.get(name, "").partition(" ")[0]
    return 1024 * int(word) if word.isdecimal() else None


def _whole(growth: float | None) -> int | None:
    return None if growth is None else max(1, round(growth))
