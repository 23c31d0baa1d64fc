"""The witness ring: what a rank leaves of each of its last 512 steps, so that one that is done twice can be compared.

It lies beside the rank's page, is written by the thread that trains without a system call, and outlives the process.
When a rank ends, the monitor writes it into the run directory, where the next attempt finds it. Everything read is
distrusted.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.plain_file import open_plain, read_bytes, read_text
from resilience_sdk.recorder.page_directory import parse_stem

SUFFIX = ".witness"
DIRECTORY = "witness"
STEPS = 512
# Parts of a step that were looked at.
ORDER, CONTENT, RATES, GENERATORS, FIXED, LOSS, UNPLACED, WEIGHTS = 1, 2, 4, 8, 16, 32, 64, 128
"""`FIXED`: the content is the same in each pass, as that of a list, so that it decides like an order. `UNPLACED`: the
epoch is not known, and `batch` is how many the step has."""

_MAGIC = b"rslwit03"
_HEAD = struct.Struct("<8sIIII")  # magic, rank, world size, attempt, CRC of the facts
_KIND, _KIND_AT = struct.Struct("<II"), _HEAD.size  # the length of the training, and which training it is
_RECORD = struct.Struct("<QIIIIIIIIdQd")
_STEP, _COUNT, _DOUBLE = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct("<d")
_SEEN_AT, _LOSS_AT = 16, 56
_AT, _EACH = 64, 64
_BYTES = _AT + STEPS * _EACH
_MAX_TEXT = 1 << 20


@attrs.frozen
class WitnessedStep:
    """What is left of one step. A part that `seen` does not name is 0."""

    step: int
    epoch: int = 0
    batch: int = 0
    seen: int = 0
    shapes: int = 0
    order: int = 0
    content: int = 0
    rates: int = 0
    """A number for the learning rates of all groups of all optimizers."""
    weights: int = 0
    """A number for some of the weights, as they are when the step is left."""
    rate: float = 0.0
    """The first of them."""
    generators: int = 0
    loss: float = 0.0


@attrs.frozen
class Witnesses:
    """The steps of one rank in one attempt, by their numbers."""

    rank: int
    world_size: int
    attempt: int
    facts: int
    """A number for what has to be alike for two attempts to be compared: the size of a batch, of the data."""
    job: str
    steps: Mapping[int, WitnessedStep]
    length: int = 0
    """A number for what the training's schedules are stretched over; 0 where nobody knows it."""
    training: int = 0
    """A number for which training of its process it is; 0 where that is not known."""


class WitnessRing:
    """A rank's own ring, for the thread that trains."""

    def __init__(self, path: Path, *, rank: int, world_size: int, attempt: int, facts: int) -> None:
        """Make the file; raises OSError, also where there is no room: a store into it would be a SIGBUS."""
        fd = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, _BYTES)
            else:
                os.ftruncate(fd, _BYTES)
            self._bytes = mmap.mmap(fd, _BYTES)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        _HEAD.pack_into(self._bytes, 0, _MAGIC, rank, world_size, attempt, facts)

    def is_of(self, length: int, training: int) -> None:
        """Note whose steps these are, see `Witnesses`."""
        _KIND.pack_into(self._bytes, _KIND_AT, length, training)

    def put(self, step: int, *parts: float) -> None:
        """Leave what is known of a step: the fields of a `WitnessedStep`, in their order."""
        # 0 stands where nothing is.
        _RECORD.pack_into(self._bytes, _AT + step % STEPS * _EACH, step + 1, *parts)

    def add_loss(self, step: int, loss: float) -> None:
        """Leave the loss of a step that was put before, if it is still there."""
        at = _AT + step % STEPS * _EACH
        if _STEP.unpack_from(self._bytes, at)[0] == step + 1:
            _DOUBLE.pack_into(self._bytes, at + _LOSS_AT, loss)
            _COUNT.pack_into(self._bytes, at + _SEEN_AT, _COUNT.unpack_from(self._bytes, at + _SEEN_AT)[0] | LOSS)


def read_ring(data: bytes, job: str) -> Witnesses | None:
    """Return what a ring holds; None where it is none."""
    if len(data) != _BYTES or not data.startswith(_MAGIC):
        return None
    _, rank, world_size, attempt, facts = _HEAD.unpack_from(data)
    found = {}
    for number in range(STEPS):
        step, *rest = _RECORD.unpack_from(data, _AT + number * _EACH)
        if step and (step - 1) % STEPS == number:
            found[step - 1] = WitnessedStep(step - 1, *rest)
    return Witnesses(rank, world_size, attempt, facts, job, found, *_KIND.unpack_from(data, _KIND_AT))


def place_of(run_dir: Path, rank: int) -> Path:
    """Return where the steps of a rank's newest attempt are kept."""
    return run_dir / DIRECTORY / f"rank-{rank:05d}.json"


def rings_in(pages: Path) -> list[tuple[Path, int]]:
    """Return the stems of all ranks that have a ring, the oldest attempt first, each with its pid."""
    found = []
    with contextlib.suppress(OSError):
        for path in pages.glob(f"*{SUFFIX}"):
            stem = parse_stem(path.name.removesuffix(SUFFIX))
            if stem is not None:
                found.append((stem, path.with_suffix("")))
    return [(stem, pid) for (_, _, pid), stem in sorted(found)]


def keep(stem: Path, run_dir: Path, job: str) -> bool:
    """Keep the ring of a rank that has ended, by the stem of its files; tell whether there was one. Never raises."""
    with contextlib.suppress(OSError, ValueError):
        found = read_ring(read_bytes(stem.with_name(stem.name + SUFFIX)), job)
        if found is not None and found.steps:
            path = place_of(run_dir, found.rank)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_whole(path, _to_text(found))
            return True
    return False


def find(pages: Path, run_dir: Path, rank: int, attempt: int, job: str) -> Witnesses | None:
    """Return what the attempt before has left of this rank; None where nothing is known of it. Never raises.

    On its own node the ring may still be there, though nobody has kept it yet.
    """
    with contextlib.suppress(OSError, ValueError):
        there = [path for path in pages.glob(f"a*-r{rank}-*{SUFFIX}") if not path.match(f"*-{os.getpid()}{SUFFIX}")]
        for path in sorted(there, key=lambda path: path.stat().st_mtime, reverse=True):
            found = read_ring(read_bytes(path), job)
            if found is not None and found.rank == rank and (attempt == 0 or found.attempt == attempt - 1):
                return found
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        path = place_of(run_dir, rank)
        if path.stat().st_size <= _MAX_TEXT:
            kept = _from_text(read_text(path))
            # One of an older attempt is left where a node was lost, whose ranks nobody could ask. A job that is
            # requeued counts its attempts anew.
            if kept.rank == rank and (attempt == 0 or (kept.job, kept.attempt) == (job, attempt - 1)):
                return kept
    return None


def _to_text(witnesses: Witnesses) -> str:
    steps = [list(attrs.astuple(one)) for _, one in sorted(witnesses.steps.items())]
    return json.dumps({"v": 1, **attrs.asdict(attrs.evolve(witnesses, steps={})), "steps": steps}) + "\n"


def _from_text(text: str) -> Witnesses:
    """Return what `_to_text` wrote; raises ValueError, TypeError or KeyError for anything else."""
    data = json.loads(text)
    found = [_record(values) for values in data["steps"]]
    rank, size, attempt, facts = (int(data[name]) for name in ("rank", "world_size", "attempt", "facts"))
    length, training = (int(data.get(name, 0)) for name in ("length", "training"))
    return Witnesses(rank, size, attempt, facts, str(data["job"]), {one.step: one for one in found}, length, training)


def _record(values: Iterable[Any]) -> WitnessedStep:
    *counts, rate, generators, loss = values
    step, epoch, batch, seen, shapes, order, content, rates, *weights = map(int, counts)
    [of_weights] = weights or [0]  # which those of earlier versions have not
    return WitnessedStep(
        step, epoch, batch, seen, shapes, order, content, rates, of_weights, float(rate), int(generators), float(loss)
    )
