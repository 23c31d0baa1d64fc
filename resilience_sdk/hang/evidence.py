"""Evidence.

The flight recorder of torch.distributed and stacks as faulthandler writes them, read into values. Pure.

gloo and NCCL write one format (version 2.10 in torch 2.13; keys that other versions lack count as unknown).
What differs: gloo leaves every entry's `state` at "scheduled" and says only by `retired` and by `pg_status`
what is complete, records no point-to-point operations and leaves `pg_config` empty. Process groups are
compared between ranks by *name*: their `pg_id` is an ordinal of the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.hang.timers import CollectivePosition

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
    return Collective(
        seq=seq,
        op=str(raw.get("profiling_name", "")).rpartition(":")[2][:80],
        input_sizes=_sizes(raw.get("input_sizes")),
        output_sizes=_sizes(raw.get("output_sizes")),
        dtypes=tuple(str(item)[:32] for item in _items(raw.get("input_dtypes"))[:_MAX_SIZES]),
        retired=raw.get("retired") is True or raw.get("state") == "completed",
        state=str(raw.get("state", ""))[:32],
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


_HEADER = re.compile(
    r"(?:(?P<kind>Current thread|Thread) (?P<ident>0x[0-9a-fA-F]+)"
    r"(?: \[(?P<name>.*?)\])?(?: \[(?P<native>\d+)\])?|Stack)"
    r" \(most recent call first\):$"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_MAX_CHARACTERS = 4 * 1024 * 1024
FATAL = "Fatal Python error: "
"""How faulthandler begins what it writes of a signal that ends the process."""


@attrs.frozen
class ThreadStack:
    """One thread of a dump. `frames`: `file:line function`, innermost first."""

    ident: int
    name: str
    is_current: bool
    frames: tuple[str, ...]
    native_id: int | None = None
    """The kernel's number of it, which only a rank's helper thread writes into a dump."""


def parse_faulthandler(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads of the last complete dump in a file that dumps were appended to.

    A dump that is still being written (its last line is cut, or the thread that took the signal is missing)
    is passed over for an earlier one; where none is complete, what there is of the last one is returned.
    """
    text = text[-_MAX_CHARACTERS:]
    dumps: list[list[ThreadStack]] = []
    blank = False
    header: re.Match[str] | None = None
    frames: list[str] = []

    def close() -> None:
        if header is not None:
            current = header["kind"] != "Thread"
            native = int(header["native"]) if header["native"] else None
            dumps[-1].append(ThreadStack(_ident(header), header["name"] or "", current, tuple(frames), native))

    for line in text.split("\n"):
        found = _HEADER.match(line.rstrip("\r"))
        if found:
            close()
            # Threads of one dump are set apart by an empty line; two dumps are not, or repeat a thread.
            if not dumps or not blank or _ident(found) in {t.ident for t in dumps[-1]}:
                dumps.append([])
            header, frames = found, []
        elif frame := _FRAME.match(line.rstrip("\r")):
            frames.append(f"{frame['file']}:{frame['line']} {frame['function']}")
        blank = not line
    close()
    return _last_complete(dumps, text.endswith("\n"))


def _ident(header: re.Match[str]) -> int:
    """Return the thread's identity; 0 in a dump of one thread, which does not tell it."""
    return int(header["ident"] or "0", 16)


def _last_complete(dumps: Sequence[Sequence[ThreadStack]], ends_whole: bool) -> tuple[ThreadStack, ...]:
    for number in range(len(dumps) - 1, -1, -1):
        whole = ends_whole or number < len(dumps) - 1
        if whole and any(thread.is_current for thread in dumps[number]):
            return tuple(dumps[number])
    return tuple(dumps[-1]) if dumps else ()


def main_frames(threads: Sequence[ThreadStack]) -> tuple[str, ...]:
    """Return the frames of the main thread: the oldest one that `threading` did not start."""
    others = [t for t in threads if t.frames and not t.frames[-1].endswith(" _bootstrap")]
    if others:
        return others[-1].frames
    return next((t.frames for t in threads if t.is_current), ())


def crash_frames(text: str) -> tuple[str, ...]:
    """Return the frames of the thread that a fatal signal ended, where it ran Python; else those of the main thread.

    `text`: all dumps of one process. Those from before the signal count only where it has left none.
    """
    begin = text.rfind(FATAL)
    if begin < 0:
        return main_frames(parse_faulthandler(text))
    threads = parse_faulthandler(text[begin:])
    died_in = next((thread.frames for thread in threads if thread.is_current), ())
    return died_in or main_frames(threads)


def frames_of(threads: Sequence[ThreadStack], native_id: int) -> tuple[str, ...]:
    """Return the frames of the thread with this number; none where the dump does not tell which that is."""
    return next((thread.frames for thread in threads if thread.native_id == native_id), ())


# Frames that only pass a call on, and sit on top of the function that says what is being done.
_WRAPPERS = ("/torch/_ops.py:", "/torch/utils/_contextlib.py:", "/torch/_compile.py:")
_COLLECTIVE_PLACES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py:",
    "/torch/nn/modules/_functions.py:",
)
# Below torch/distributed, but about files and processes, not about peers.
_NO_COLLECTIVE = (
    "/torch/distributed/checkpoint/",
    "/torch/distributed/run.py:",
    "/torch/distributed/launcher/",
    "/torch/distributed/elastic/multiprocessing/",
)
_ENGINE = re.compile(r"/torch/autograd/(graph\.py:\S+ _engine_run_backward|__init__\.py:\S+ (backward|grad))$")
_DEVICE_WAIT = re.compile(r"/torch/(cuda|accelerator)/\w+\.py:\S+ (synchronize|wait|wait_event|wait_stream)$")


def is_in_collective(frames: Sequence[str]) -> bool:
    """Tell whether a stack (innermost first) waits for other ranks.

    True in functions of `torch.distributed` (collectives, barriers, store waits), inside the autograd engine
    (where DDP reduces gradients; a Python hook on top of it counts as itself), and in waits for a device,
    whose stream stands behind a collective. The calls themselves are C, so the innermost Python frame tells.
    """
    top = next((frame for frame in frames if not any(place in frame for place in _WRAPPERS)), "")
    if any(place in top for place in _NO_COLLECTIVE):
        return False
    if any(place in top for place in _COLLECTIVE_PLACES):
        return not top.endswith(" forward")  # DDP.forward on top computes, or waits for nobody
    return bool(_ENGINE.search(top) or _DEVICE_WAIT.search(top))


# Only on the stack while something is compiled: running compiled code does not pass through them.
_COMPILING = (
    "/torch/_dynamo/convert_frame.py:",
    "/torch/_dynamo/symbolic_convert.py:",
    "/torch/_inductor/compile_fx.py:",
    "/torch/_inductor/codecache.py:",
    "/torch/_inductor/async_compile.py:",
    "/torch/_inductor/select_algorithm.py:",
    "/torch/_inductor/scheduler.py:",
    "/torch/utils/cpp_extension.py:",
    "/triton/compiler/",
    "/triton/runtime/autotuner.py:",
)
_SAVING = ("/torch/serialization.py:", "/torch/distributed/checkpoint/", "/safetensors/")
_RUNS_COMPILED = re.compile(r"/torch/_inductor/compile_fx\.py:\S+ (run|runtime_wrapper|wrapper)$")
# A person is asked: pdb and its kin, IPython, and debuggers of editors, which need neither ptrace nor a terminal.
_PROMPT = re.compile(
    r"/(cmd\.py:\S+ cmdloop|code\.py:\S+ (raw_input|interact)|pudb/\S+ \w+"
    r"|IPython/terminal/\S+ \w+|(pydevd|_pydevd_bundle/\S+?)\.py:\S+ _?do_wait_suspend)$"
)


_IMPORTER = "<frozen importlib._bootstrap"
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")


def busy_with(frames: Sequence[str]) -> str | None:
    """Return what a stack is known to take long with: `prompt`, `compile`, `checkpoint`, `import`; else None.

    `prompt` is a debugger or shell inside the program that waits for a person.
    """
    if any(_PROMPT.search(frame) for frame in frames):
        return "prompt"
    if any(place in frame for frame in frames for place in _COMPILING if not _RUNS_COMPILED.search(frame)):
        return "compile"
    if any(place in frame for frame in frames for place in _SAVING):
        return "checkpoint"
    return "import" if _imports_library(frames) else None


def _imports_library(frames: Sequence[str]) -> bool:
    """Tell whether the innermost import is of a library: slow where many ranks read one file system.

    A user's module does not count: a whole training may run while it is imported.
    """
    place = next((number for number, frame in enumerate(frames) if frame.startswith(_IMPORTER)), None)
    return place is not None and (place == 0 or any(part in frames[place - 1] for part in _LIBRARIES))
