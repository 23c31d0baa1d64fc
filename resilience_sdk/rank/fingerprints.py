"""Fingerprints of batches: by the indices that a sampler has drawn, where there is one, else by their content.

They cost some microseconds a batch, change nothing that a loader does, and never wait for a device. The order of the
samples is what a resume has to repeat. The content of map-style data may differ on purpose (augmentation).
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from binascii import crc32
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from resilience_sdk.core.iterated_class import plain_class
from resilience_sdk.core.resume_proof import EXACT, NOT_COMPARED, NOT_EXACT, NOT_PROVEN, ORDER, ResumeCheck

INDICES, CONTENT, UNSEEN = "indices", "content", "values"
"""`CONTENT`: of a list, whose batches are the same in each pass; `UNSEEN`: of what may be another one, as a stream."""
_MAX_INDICES = 64
_MAX_LEAVES = 8
_WHOLE_BYTES = 512
_CHUNKS, _MAX_CHUNKS, _CHUNK_BYTES = 4, 8, 96
"""Of a large tensor, and of all of a batch: each takes some tenths of a microsecond, more where memory is cold."""

# All of this process's memory: a slice of it takes a third of what `ctypes.string_at` does.
_MEMORY: Any = (ctypes.c_char * sys.maxsize).from_address(0)
_MAX_DRAWN = 1 << 20
"""Batches that may be drawn ahead of what is taken out: no loader draws so many, so nobody takes any out."""

_MAX_AROUND = 8
_MAX_ERROR = 200
_PLAIN = frozenset({int, float, str, bytes, bool})


class Tap:
    """A sampler that notes what it hands out; in all else it is the one that it stands for."""

    def __init__(self, sampler: Any) -> None:
        """Stand for `sampler`."""
        self._sampler = sampler
        self.drawn: deque[int] = deque()
        """The prints of what was drawn and not taken out yet: a loader with workers draws ahead."""
        self.is_on = True
        """Whether anybody wants to know what is drawn in this pass."""

    def stop(self) -> None:
        """Note nothing more of this pass."""
        self.is_on = False
        self.drawn.clear()

    def note(self, drawn: Any) -> None:
        """Take what was drawn for one batch."""
        if self.is_on:
            self.drawn.append(print_of_indices(drawn))
            if len(self.drawn) >= _MAX_DRAWN:
                self.stop()

    def is_of(self, loader: Any) -> bool:
        """Tell whether it stands for what this loader draws from."""
        own = vars(loader) if hasattr(loader, "__dict__") else {}
        return any(
            self._sampler is not None and self._sampler is own.get(name) for name in ("batch_sampler", "sampler")
        )

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: what `iter()` draws is to be drawn where it was.
        self.drawn.clear()
        self.is_on = True
        return _Drawing(iter(self._sampler), self.note)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":  # of one that is being copied
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _Drawing:
    __slots__ = ("_next", "_note")

    def __init__(self, plain: Iterator[Any], note: Callable[[Any], None]) -> None:
        self._next, self._note = plain.__next__, note

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        found = self._next()
        self._note(found)
        return found


@contextmanager
def tapped(loader: Any, tap: Tap | None) -> Iterator[None]:
    """Let an iterator that the loader makes in here draw from the tap; the loader is as it was afterwards."""
    own = vars(loader) if tap is not None else {}
    name = "batch_sampler" if own.get("batch_sampler") is not None else "sampler"
    plain = own.get(name)
    if tap is not None:
        own[name] = tap
    try:
        yield
    finally:
        if tap is not None:
            own[name] = plain


def tap_of(loader: Any) -> Tap | None:
    """Return a tap for what the loader draws indices from; None where none can stand for it."""
    from torch.utils.data import DataLoader, IterableDataset

    is_plain = isinstance(loader, DataLoader) and plain_class(loader).__iter__ is DataLoader.__iter__
    # One that saves its place asks its sampler for it.
    if not is_plain or callable(getattr(loader, "state_dict", None)) or isinstance(loader.dataset, IterableDataset):
        return None
    own = vars(loader)
    sampler = own.get("batch_sampler") if own.get("batch_sampler") is not None else own.get("sampler")
    return None if sampler is None else Tap(sampler)


def tap_of_iterator(batches: Any, kind: str = "_StatefulSingleProcessDataLoaderIter") -> Tap | None:
    """Return a tap for an iterator that is there, from its next batch on; None for any other, and one with workers.

    `kind`: the class that draws in this process, torchdata's or torch's.
    """
    for _ in range(_MAX_AROUND):  # who times them, or counts
        batches = batches if (inner := getattr(batches, "_batches", None)) is None else inner
    plain = getattr(batches, "_next_index", None)
    if type(batches).__name__ != kind or not callable(plain):
        return None
    from torch.utils.data import IterableDataset

    if isinstance(getattr(batches, "_dataset", None), IterableDataset):
        return None
    tap = Tap(None)

    def next_index() -> Any:
        found = plain()
        tap.note(found)
        return found

    batches._next_index = next_index
    return tap


def print_of_indices(drawn: Any) -> int:
    """Return a number for what a sampler has drawn for one batch: an index, or a list of them."""
    try:
        if isinstance(drawn, int):
            return drawn & 0xFFFFFFFF
        count = len(drawn)
        some = drawn if count <= _MAX_INDICES else drawn[:: count // _MAX_INDICES + 1]
        return crc32(array("q", some), count)
    except (TypeError, ValueError, OverflowError):
        return crc32(repr(drawn).encode(errors="replace"))


def print_of_content(batch: Any) -> tuple[int, int]:
    """Return a number for the shapes of a batch, and one for some of what its tensors hold on the CPU."""
    leaves: list[Any] = []
    _collect(batch, leaves, 3)
    content = len(leaves)
    chunks = min(_CHUNKS, max(_MAX_CHUNKS // content, 1)) if content else 0
    sizes = [content]
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if shape is None:
            if type(leaf) in _PLAIN:
                some = leaf[:_WHOLE_BYTES] if isinstance(leaf, (str, bytes)) else leaf
                content = crc32(repr(some)[:_WHOLE_BYTES].encode(errors="replace"), content)
            continue
        sizes += shape
        sizes.append(-1)
        data = bytes_of(leaf, chunks)
        if data:
            content = crc32(data, content)
    return print_of_indices(sizes), content


def _collect(value: Any, leaves: list[Any], depth: int) -> None:
    if hasattr(value, "shape") or type(value) in _PLAIN:
        leaves.append(value)
        return
    if isinstance(value, (list, tuple)):
        items: Any = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif hasattr(type(value), "__dataclass_fields__"):
        items = vars(value).values() if hasattr(value, "__dict__") else ()
    elif isinstance(getattr(value, "data", None), Mapping):  # a BatchEncoding
        items = value.data.values()
    else:
        leaves.append(value)
        return
    for item in items if depth else ():
        if len(leaves) >= _MAX_LEAVES:  # a list may have a million of them
            return
        _collect(item, leaves, depth - 1)


def bytes_of(leaf: Any, chunks: int) -> bytes | None:
    """Return some bytes of a tensor or an array that lies on the CPU in one piece; None for any other."""
    try:
        if type(leaf).__module__ == "numpy":
            if not leaf.flags.c_contiguous or leaf.dtype.hasobject:
                return None
            at, size = leaf.ctypes.data, leaf.nbytes
        elif leaf.is_cpu and leaf.is_contiguous():
            at, size = leaf.data_ptr(), leaf.nbytes
        else:
            return None
        if not at:  # its memory is given back, as that of a shard
            return None
    except (AttributeError, RuntimeError, TypeError):
        return None
    if size <= _WHOLE_BYTES or chunks == 1:
        whole: bytes = _MEMORY[at : at + min(size, _WHOLE_BYTES)]
        return whole
    far = (size - _CHUNK_BYTES) // (chunks - 1)
    starts = range(at, at + far * (chunks - 1) + 1, far)
    return b"".join([_MEMORY[start : start + _CHUNK_BYTES] for start in starts])


@attrs.define
class EpochPrint:
    """The running fingerprint of the batches of one epoch, with what it was when 1, 2, 4, 8 ... of them were read."""

    kind: str
    facts: dict[str, Any] = attrs.field(factory=dict)
    """What has to be the same for two of them to be compared: the size of a batch, of the data."""
    count: int = 0
    value: int = 0
    before: int = 0
    """The value without the newest batch, which may not be complete at a save."""
    marks: list[int] = attrs.field(factory=list)

    def add(self, number: int) -> None:
        """Take the fingerprint of the next batch."""
        self.before = self.value
        self.value = crc32(b"%d" % number, self.value)
        self.count += 1
        if not self.count & (self.count - 1):
            self.marks.append(self.value)

    def to_json(self, batches: int) -> dict[str, Any] | None:
        """Return it as of so many batches; None where that is not known."""
        if self.count not in (batches, batches + 1):
            return None
        value = self.value if self.count == batches else self.before
        return {"kind": self.kind, "facts": self.facts, "value": value, "marks": self.marks[: batches.bit_length()]}

    @classmethod
    def resumed(cls, saved: Any, batches: int) -> EpochPrint | None:
        """Return what `to_json` gave as of so many batches, to be gone on with; None for anything else."""
        if not isinstance(saved, Mapping) or not isinstance(saved.get("value"), int):
            return None
        marks, facts = saved.get("marks"), saved.get("facts")
        if not isinstance(marks, list) or not isinstance(facts, dict):
            return None
        return cls(str(saved.get("kind")), dict(facts), batches, saved["value"], 0, list(marks))


def difference(saved: EpochPrint, again: EpochPrint) -> tuple[int, int] | None:
    """Return the first and the last batch (from 0) among which the first differs that was read again; None: equal."""
    if saved.value == again.value:
        return None
    first = 0
    for power, (one, other) in enumerate(zip(saved.marks, again.marks, strict=False)):
        if one != other:
            return first, min((1 << power), saved.count) - 1
        first = 1 << power
    return first, saved.count - 1


def new_print(loader: Any, tap: Tap | None) -> EpochPrint:
    """Return the fingerprint of an epoch of this loader before its first batch."""
    facts: dict[str, Any] = {}
    if tap is not None:
        size = getattr(loader, "batch_size", None)
        sampler = getattr(loader, "batch_sampler", None)
        facts = {"batch": size if size is not None else getattr(sampler, "batch_size", None)}
        try:
            facts["samples"] = len(loader.dataset)
        except Exception:  # noqa: BLE001 - a length that nobody asks for may raise what it likes
            facts["samples"] = None
        facts = {name: value if isinstance(value, int) else None for name, value in facts.items()}
    kind = CONTENT if type(loader) in (list, tuple) else UNSEEN
    return EpochPrint(INDICES if tap is not None else kind, facts)


def order_check(
    saved: EpochPrint | None, again: EpochPrint | None, epoch: int, loader: Any, why: str = ""
) -> ResumeCheck | None:
    """Return what comes out of the batches of an epoch that were read again; None where nothing was saved of them.

    `why` there is no fingerprint of these.
    """
    if again is None or (again.kind == UNSEEN and (saved is None or saved.kind != UNSEEN)):
        return ResumeCheck(ORDER, NOT_COMPARED, why)
    if saved is None:
        return None
    if (again.kind, again.facts) != (saved.kind, saved.facts) or again.count != saved.count:
        return ResumeCheck(ORDER, NOT_COMPARED, "the loader has other batches, or other data, than before")
    found = difference(saved, again)
    if found is None:
        return ResumeCheck(ORDER, EXACT, f"{saved.count} of {saved.count} batches read again are the same")
    first, last = found
    where = f"batch {first}" if first == last else f"one of the batches {first} to {last}"
    order = f"the order of epoch {epoch}"
    if again.kind == UNSEEN:
        text = f"other samples or other values in epoch {epoch}: read again, it differs from {where} on; {why}"
        return ResumeCheck(ORDER, NOT_PROVEN, text, order, cure=_CURE_OF_STREAM)
    text = f"other samples, {order}: read again, it differs from {where} on"
    try:
        cure = _cure(loader)
    except Exception:  # noqa: BLE001 - a loader of somebody else's kind; what was found is said all the same
        cure = _CURE_OF_ANY
    return ResumeCheck(ORDER, NOT_EXACT, text, order, cure=cure)


_CURE_OF_STREAM = (
    "let it draw from the generators of Python, NumPy and torch, or from set_epoch(epoch), not by time or process, or "
    "give a loader with state_dict()"
)
_CURE_OF_ANY = "give out the same batches in each pass, or a loader with state_dict()"


def _cure(loader: Any) -> str:
    sampler = getattr(loader, "batch_sampler", None)
    while (inner := getattr(sampler, "batch_sampler", None)) is not None:  # a rank's share of all batches
        sampler = inner
    # One of batches that draws by itself: the loader's own sampler is unused then.
    sampler = getattr(sampler, "sampler", None) or sampler or getattr(loader, "sampler", None)
    if sampler is None:
        return _CURE_OF_ANY
    name = type(sampler).__name__
    if callable(getattr(sampler, "load_state_dict", None)):
        return f"if {name} is in state, leave it out: what was read is read again; or give a loader with state_dict()"
    made_of = next((held for held in ("weights", "indices") if hasattr(sampler, held)), None)
    if made_of is not None:  # it draws from torch's generators
        return f"make {name} of the same {made_of} as when that epoch began, or keep them in what is saved"
    return f"let {name} draw from torch's generators or from set_epoch(epoch), or give a loader with state_dict()"


def why_not_repeated(loader: Any, tap: Tap | None) -> str | None:
    """Return why another fingerprint of the same epoch would be no fault; None where it would be one."""
    if type(loader) in (list, tuple):
        return None
    is_known = tap is not None and not _is_stream(loader) and in_order(loader)
    return None if is_known else why_unknown(loader)


def in_order(loader: Any) -> bool:
    """Tell whether a loader gives its batches in the order in which they were asked for."""
    return bool(getattr(loader, "in_order", True))


def why_unknown(loader: Any) -> str:
    """Return why nobody sees the indices that the batches of a loader are made of."""
    if _is_stream(loader):
        return "batches of a stream are not repeatable"
    if not in_order(loader):
        return "batches in any order (in_order=False) are not repeatable"
    return f"the indices that {plain_class(loader).__name__} makes its batches of are not seen"


def _is_stream(loader: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def in_words(error: Exception) -> str:
    """Return what is said of an error of somebody else's, while something of theirs was looked at."""
    text = " ".join(str(error).split())
    return type(error).__name__ + (f": {text[:_MAX_ERROR]}" if text else "")
