"""The weights that samplers draw a pass by, for loops which make one anew for each pass of what they know by then.

A resume within the pass makes its sampler of what is known at the save. So weights travel with the place in the pass,
and are the sampler's while its order is drawn again. Larger ones are only known again.
"""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from resilience_sdk.checkpoint.generators import parts

MAX_BYTES = 1 << 20
"""Of the weights of one sampler that are saved: 131,072 samples."""
CURE = (
    "keep what the sampler is made of in a tensor of state that changes behind the steps of an epoch alone, and make "
    "the sampler of that"
)


class PassWeights:
    """What the samplers of one pass were made of; of the thread that trains. Never raises."""

    def __init__(self) -> None:
        """Know of no pass."""
        self._taken: dict[str, Any] = {}
        self._encoded: dict[str, Any] | None = None
        self._lent: list[tuple[Any, Any]] = []

    def begins(self, loader: Any) -> None:
        """Note that a pass begins: what comes behind this may change the weights in place."""
        self._taken, self._encoded = {}, None
        with suppress(Exception):  # a sampler of somebody else's kind
            self._taken = {name: _taken(getattr(one, held)) for name, one, held in _made_of(loader)}

    def resume(self, saved: Any) -> None:
        """Take what `to_json` gave."""
        self._encoded = dict(saved) if isinstance(saved, Mapping) else None

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value."""
        if self._encoded is None:
            self._encoded = {name: _encoded(one) for name, one in self._taken.items()}
        return self._encoded

    def lend(self, loader: Any) -> list[str]:
        """Lend the saved weights to the samplers of a pass that goes on, until `give_back`: its order is drawn again.

        Returns the kinds of those that are made of something else than was saved, and cannot be lent it.
        """
        others: list[str] = []
        with suppress(Exception):  # as above
            for name, one, held in _made_of(loader):
                saved, own = (self._encoded or {}).get(name), getattr(one, held)
                if not isinstance(saved, Mapping) or saved.get("crc") == _crc(own):
                    continue
                found = _decoded(saved, own)
                if found is None:
                    others.append(type(one).__name__)
                else:
                    setattr(one, held, found)
                    self._lent.append((one, own))
        return others

    def give_back(self) -> None:
        """Let the samplers have their own again."""
        while self._lent:
            one, own = self._lent.pop()
            one.weights = own


def _made_of(loader: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the samplers of a loader that are made of numbers, each with its name and that of its attribute."""
    from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

    for name, part in parts(loader):
        if isinstance(part, WeightedRandomSampler) and part.weights.is_cpu:
            yield name, part, "weights"
        elif isinstance(part, SubsetRandomSampler):
            yield name, part, "indices"


def _taken(own: Any) -> Any:
    """Return a copy of what is small enough to be saved, of other things their digest."""
    is_small = hasattr(own, "element_size") and own.numel() * own.element_size() <= MAX_BYTES
    return own.detach().cpu().clone() if is_small else {"crc": _crc(own)}


def _encoded(taken: Any) -> dict[str, Any]:
    if isinstance(taken, Mapping):
        return dict(taken)
    data = base64.b64encode(zlib.compress(_bytes(taken), 1)).decode("ascii")
    return {"crc": _crc(taken), "dtype": str(taken.dtype), "data": data}


def _decoded(saved: Mapping[str, Any], own: Any) -> Any:
    """Return saved weights in the place of a sampler's own; None where they are not saved, or not of its kind."""
    import torch

    if "data" not in saved or str(getattr(own, "dtype", "")) != saved.get("dtype"):
        return None
    data = bytearray(zlib.decompress(base64.b64decode(saved["data"])))
    found = torch.frombuffer(data, dtype=own.dtype)
    return found if found.shape == own.shape else None


def _crc(own: Any) -> int:
    return zlib.crc32(_bytes(own) if hasattr(own, "element_size") else array("q", own))


def _bytes(tensor: Any) -> bytes:
    found: bytes = tensor.detach().cpu().contiguous().numpy().tobytes()
    return found
