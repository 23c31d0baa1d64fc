"""The flight recorder of torch.distributed, as `_dump_fr_trace_json(True, False)` writes it.

gloo and NCCL write one format (version 2.10 in torch 2.13; keys that other versions lack count as unknown).
What differs: gloo leaves every entry's `state` at "scheduled" and says only by `retired` and by `pg_status`
what is complete, records no point-to-point operations and leaves `pg_config` empty. Process groups are
compared between ranks by *name*: their `pg_id` is an ordinal of the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.hang.states import CollectivePosition

MAX_BYTES = 64 * 1024 * 1024
MAX_ENTRIES = 4096
_MAX_SIZES = 256
_WORLD = "default_pg"

Sizes = tuple[tuple[int, ...], ...]


@attrs.frozen
class Collective:
    """One recorded operation of one rank."""

    seq: int
    op: str
    """Name without its backend, such as `all_reduce`."""
    input_sizes: Sizes = ()
    output_sizes: Sizes = ()
    dtypes: tuple[str, ...] = ()
    retired: bool = False
    state: str = ""
    timeout_s: float | None = None

    def text(self) -> str:
        """Return the operation as one reads it: `all_reduce [8] Float`."""
        sizes = " ".join(str(list(size)) for size in self.input_sizes[:4])
        return " ".join(part for part in (self.op, sizes, " ".join(self.dtypes[:1])) if part)


@attrs.frozen
class GroupRecord:
    """What one rank did in one process group. Sequence numbers count from 1; 0 means none yet."""

    name: str
    description: str
    enqueued: int
    completed: int
    started: int | None
    members: tuple[int, ...] | None
    entries: Mapping[int, Collective]

    @property
    def position(self) -> CollectivePosition:
        """How far the rank came in this group."""
        return CollectivePosition(
            enqueued=self.enqueued,
            completed=self.completed,
            started=self.started,
            members=self.members,
            is_world=self.description == _WORLD,
        )

    @property
    def label(self) -> str:
        """How people call the group."""
        return self.description if self.description not in ("", "undefined") else f"group {self.name}"


@attrs.frozen
class FlightRecord:
    """What one rank's flight recorder holds, by the name of the process group."""

    version: str
    groups: Mapping[str, GroupRecord]

    def positions(self) -> dict[str, CollectivePosition]:
        """Return how far the rank came in every group."""
        return {name: group.position for name, group in self.groups.items()}

    @property
    def shortest_timeout_s(self) -> float | None:
        """Return the smallest timeout of what is pending: after it, the backend acts by itself."""
        pending = [
            entry.timeout_s
            for group in self.groups.values()
            for seq, entry in group.entries.items()
            if seq > group.completed and entry.timeout_s
        ]
        return min(pending, default=None)


def parse_flight_record(data: object) -> FlightRecord | None:
    """Return the record in JSON text (or in what was read from it); None for what is none, or too large."""
    if isinstance(data, (str, bytes)):
        if len(data) > MAX_BYTES:
            return None
        try:
            data = json.loads(data)
        except (ValueError, RecursionError):
            return None
    if not isinstance(data, dict):
        return None
    names: dict[str, tuple[str, str]] = {}
    entries: dict[str, dict[int, Collective]] = {}
    for raw in _items(data.get("entries"))[-MAX_ENTRIES:]:
        if isinstance(raw, dict) and (group := _group_of(raw)) is not None:
            names[str(raw.get("pg_id"))] = group
            entry = _entry(raw)
            if entry is not None and not raw.get("is_p2p"):
                entries.setdefault(group[0], {})[entry.seq] = entry
    status = data.get("pg_status")
    status = status if isinstance(status, dict) else {}
    if "0" in status:
        names.setdefault("0", ("0", _WORLD))
    config = data.get("pg_config")
    groups: dict[str, GroupRecord] = {}
    for pg_id, (name, description) in names.items():
        record = _group(name, description, status.get(pg_id), entries.get(name, {}), config)
        if record is not None:
            groups[name] = record
    return FlightRecord(version=str(data.get("version", "")), groups=groups)


def _group(
    name: str, description: str, status: object, entries: dict[int, Collective], config: object
) -> GroupRecord | None:
    said = status if isinstance(status, dict) else {}
    enqueued = _integer(said.get("last_enqueued_collective"))
    completed = _integer(said.get("last_completed_collective"))
    started = _integer(said.get("last_started_collective"))
    if enqueued is None:
        if not entries:
            return None
        enqueued = max(entries)
    is_said = started is not None and started >= 0
    if completed is None or not is_said:
        completed = _completed(entries, completed)
    about = config.get(name) if isinstance(config, dict) else None
    return GroupRecord(
        name=name,
        description=description,
        enqueued=max(0, enqueued),
        completed=max(0, completed),
        started=started if is_said else None,
        members=_members(about),
        entries=entries,
    )


def _completed(entries: Mapping[int, Collective], said: int | None) -> int:
    """Return the last collective before the first one that is pending, by the entries where they tell.

    Several threads complete gloo's collectives, and each writes its own number into the status: one that is
    late writes a lower number last, and there it stays while the rank hangs.
    """
    if not any(entry.retired for entry in entries.values()):
        return said or 0
    pending = [seq for seq, entry in entries.items() if not entry.retired]
    return min(pending) - 1 if pending else max(entries)


def _group_of(raw: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return name and description of an entry's process group."""
    group = raw.get("process_group")
    if isinstance(group, list) and group and isinstance(group[0], str):
        return group[0], str(group[1]) if len(group) > 1 else ""
    return None


def _entry(raw: Mapping[str, Any]) -> Collective | None:
    seq = _integer(raw.get("collective_seq_id", raw.get("seq_id")))
    if seq is None or seq < 0:
        return None
    timeout_ms = _integer(raw.get("timeout_ms"))
    return Collective(
        seq=seq,
        op=str(raw.get("profiling_name", "")).rpartition(":")[2][:80],
        input_sizes=_sizes(raw.get("input_sizes")),
        output_sizes=_sizes(raw.get("output_sizes")),
        dtypes=tuple(str(item)[:32] for item in _items(raw.get("input_dtypes"))[:_MAX_SIZES]),
        retired=raw.get("retired") is True or raw.get("state") == "completed",
        state=str(raw.get("state", ""))[:32],
        timeout_s=timeout_ms / 1000 if timeout_ms is not None and timeout_ms > 0 else None,
    )


def _sizes(value: object) -> Sizes:
    sizes = (item for item in _items(value)[:_MAX_SIZES] if isinstance(item, list))
    return tuple(tuple(n for part in size[:16] if (n := _integer(part)) is not None) for size in sizes)


def _members(about: object) -> tuple[int, ...] | None:
    """Return the ranks of a group from its configuration, where they are a text like `[0, 1]`."""
    ranks = about.get("ranks") if isinstance(about, dict) else None
    if isinstance(ranks, str):
        try:
            ranks = json.loads(ranks)
        except ValueError:
            return None
    members = tuple(rank for item in _items(ranks) if (rank := _integer(item)) is not None)
    return members or None


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _integer(value: object) -> int | None:
    """Return an int from a number or from its text, which is how `pg_status` and `thread_id` are written."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    try:
        return int(value)
    except ValueError:
        return None
