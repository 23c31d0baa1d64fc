"""Containers of the program's own in `state`: a `collections.deque` (a replay memory, say) and a numpy array.

What they hold becomes one run of bytes and a tree of plain tuples, which `torch.load(weights_only=True)` reads. A
tensor or an array that is held twice is written once, and is one object again.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from resilience_sdk.errors import CheckpointError

# Exactly these: a subclass (an IntEnum is an int) is not loaded by weights_only.
LEAVES = frozenset(
    {str, bytes, bytearray, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size}
)
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_NAMES = {kind: name for name, kind in (*_SEQUENCES.items(), *_MAPPINGS.items())}


def is_array(item: Any) -> bool:
    """Tell whether `item` is a numpy array whose content may be written and set again; imports nothing."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(item) is numpy.ndarray and not item.dtype.hasobject and item.flags.writeable


def is_container(item: Any) -> bool:
    """Tell whether `item` is one of the containers that are saved here."""
    return type(item) is deque or is_array(item)


def pack(item: Any, place: str) -> dict[str, Any]:
    """Return the content of a container; raises `CheckpointError` naming what in it could not be loaded again."""
    packing = _Packing()
    tree = packing.node(item, place)
    return {"tree": tree, "bytes": packing.joined(), "tensors": packing.tensors}


def restore(item: Any, saved: Any) -> None:
    """Put back into a container what `pack` has returned; raises `ValueError` where it does not fit."""
    value = _Unpacking(saved["bytes"], saved["tensors"]).value(saved["tree"])
    if type(value) is not type(item):
        raise ValueError(f"a {type(value).__name__} in the checkpoint, a {type(item).__name__} here")
    if type(item) is deque:
        item.clear()
        item.extend(value)
        return
    if (item.shape, item.dtype) != (value.shape, value.dtype):
        raise ValueError(f"{value.dtype} of shape {value.shape} in the checkpoint, {item.dtype} of {item.shape} here")
    item[...] = value


class _Packing:
    """The tree of one container, and the bytes of what is in it."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        """Those that are not just bytes of this host: on a device, sparse, with gradients."""
        self._chunks: list[torch.Tensor] = []
        self._size = 0
        self._seen: dict[int, tuple[Any, Any]] = {}

    def joined(self) -> torch.Tensor:
        return torch.cat(self._chunks) if self._chunks else torch.empty(0, dtype=torch.uint8)

    def node(self, value: Any, place: str) -> Any:
        kind = type(value)
        if kind in (bytes, bytearray):
            return (kind.__name__, "", [], self._add(_as_bytes(value)))
        if kind in LEAVES:
            return value
        if id(value) in self._seen:
            return self._seen[id(value)][0]
        made = self._compound(value, kind, place)
        self._seen[id(value)] = (made, value)  # keeps it alive, so that the id stays its own
        return made

    def _compound(self, value: Any, kind: type, place: str) -> Any:
        if kind is deque:
            return ("deque", value.maxlen, self._nodes(value, place))
        if kind in _NAMES and issubclass(kind, dict):
            keys = self._nodes(value, f"a key of {place}")
            return (_NAMES[kind], keys, [self.node(item, f"{place}[{key!r}]") for key, item in value.items()])
        if kind in _NAMES:
            return (_NAMES[kind], self._nodes(value, place))
        fields = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
        if fields and _find(kind.__module__, kind.__qualname__) is kind:
            return ("named", kind.__module__, kind.__qualname__, list(fields), self._nodes(value, place))
        if kind is torch.Tensor:
            return self._tensor(value)
        numpy = sys.modules.get("numpy")
        is_array = numpy is not None and kind is numpy.ndarray
        if numpy is not None and (is_array or isinstance(value, numpy.generic)) and not value.dtype.hasobject:
            return self._array(value, "array" if is_array else "scalar")
        raise CheckpointError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, which could not be loaded without running code "
            "from the file: keep numbers, strings, tensors, arrays, tuples, lists and dicts there, or named tuples "
            "of a module"
        )

    def _nodes(self, values: Iterable[Any], place: str) -> list[Any]:
        return [self.node(item, f"{place}[{number}]") for number, item in enumerate(values)]

    def _tensor(self, tensor: torch.Tensor) -> Any:
        is_bytes = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
        if not is_bytes or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            self.tensors.append(tensor.detach())
            return ("raw", len(self.tensors) - 1, tensor.requires_grad)
        flat = tensor.detach().contiguous().reshape(-1)
        return ("tensor", tensor.dtype, list(tensor.shape), self._add(flat.view(torch.uint8)))

    def _array(self, array: Any, name: str) -> Any:
        import numpy

        described = json.dumps(numpy.lib.format.dtype_to_descr(array.dtype))
        return (name, described, list(array.shape), self._add(_as_bytes(array.tobytes())))

    def _add(self, chunk: torch.Tensor) -> tuple[int, int]:
        begin = self._size
        if chunk.numel():
            self._chunks.append(chunk)
            self._size += chunk.numel()
        return begin, self._size


class _Unpacking:
    """The objects of one tree."""

    def __init__(self, content: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        self._content = content
        self._tensors = tensors
        self._made: dict[Any, Any] = {}

    def value(self, node: Any) -> Any:
        if type(node) is not tuple:
            return node
        name, rest = node[0], node[1:]
        if name == "deque":
            return deque(self._values(rest[1]), rest[0])
        if name in _MAPPINGS:
            return _MAPPINGS[name](dict(zip(self._values(rest[0]), self._values(rest[1]), strict=True)))
        if name in _SEQUENCES:
            return _SEQUENCES[name](self._values(rest[0]))
        if name == "named":
            return self._named_tuple(*rest)
        if name == "raw":
            return self._tensors[rest[0]].requires_grad_(rest[1])
        key = (name, str(rest[0]), *rest[1], *rest[2])
        if key not in self._made:
            self._made[key] = self._from_bytes(name, *rest)
        return self._made[key]

    def _values(self, nodes: Iterable[Any]) -> list[Any]:
        return [self.value(node) for node in nodes]

    def _from_bytes(self, name: str, kind: Any, shape: list[int], place: tuple[int, int]) -> Any:
        content = self._content[place[0] : place[1]].clone()
        if name in ("bytes", "bytearray"):
            found = content.numpy().tobytes()
            return found if name == "bytes" else bytearray(found)
        if name == "tensor":
            return content.view(kind).reshape(shape) if content.numel() else torch.empty(shape, dtype=kind)
        import numpy

        described = json.loads(kind)
        if isinstance(described, list):
            described = _tuples(described)
        dtype = numpy.lib.format.descr_to_dtype(described)
        array = numpy.frombuffer(bytearray(content.numpy().tobytes()), dtype=dtype).reshape(shape)
        return array if name == "array" else array[()]

    def _named_tuple(self, module: str, name: str, fields: list[str], nodes: list[Any]) -> Any:
        kind = _find(module, name)
        is_it = isinstance(kind, type) and issubclass(kind, tuple) and list(getattr(kind, "_fields", ())) == fields
        if not is_it:
            raise ValueError(f"it holds {module}.{name} with the fields {', '.join(fields)}, which is not here")
        make: Callable[[Iterable[Any]], Any] = kind._make
        return make(self._values(nodes))


def _as_bytes(content: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _tuples(described: list[Any]) -> list[Any]:
    """Return a description of fields as numpy wants it: JSON has no tuples."""
    return [
        tuple(
            _tuples(part) if number == 1 and isinstance(part, list) else tuple(part) if isinstance(part, list) else part
            for number, part in enumerate(field)
        )
        for field in described
    ]


def _find(module: str, name: str) -> Any:
    """Return what a module that is imported has under that name; None where there is none. Imports nothing."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
