"""Random numbers that reading a batch draws: whether it draws, and generators as they were when it was read.

Accelerate's loaders fetch one batch ahead: the batch that is trained next was read before the save, with generators
that have gone on since. So a resume reads that batch with the generators that it was read with before.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from resilience_sdk.checkpoint.generators_below import generators_below

States = Mapping[str, Any]
"""The states of generators by their names, as a JSON value."""

_MAX_DEPTH = 5
_WAYS = {"base_dataloader", "batch_sampler", "sampler", "data_source"}
_OF_BATCHES = {"dataset", "transform", "collate_fn"}


class Generators:
    """The generators that reading a batch may draw from: those of the process, and what the data hold themselves."""

    def __init__(self, loader: Any = None) -> None:
        """Find those of a loader; `None`: those of the process alone."""
        self.own: dict[str, Any] = {} if loader is None else dict(_find(loader))

    def capture(self) -> dict[str, Any]:
        """Return their states, as they are in memory: quick, and for `restore` alone."""
        import numpy as np
        import torch

        own = {name: _get(one) for name, one in self.own.items()}
        # One by one, not for CUDA: a device draws nothing for data, and to ask it would wait for it.
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "own": own,
        }

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set them to states from `capture` or `decoded`; those that are not here any more are left out."""
        import numpy as np
        import torch

        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        for name, state in states["own"].items():
            if name in self.own:
                _set(self.own[name], state)


def encoded(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return states of `Generators` as a JSON value."""
    return {name: _encode(value) for name, value in states.items()}


def decoded(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `encoded` was given; raises `ValueError`, `KeyError` or `TypeError` for something else."""
    return {name: _decode(one) for name, one in value.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"map": {name: _encode(one) for name, one in value.items()}}
    if isinstance(value, (tuple, list)):
        if all(type(one) is int for one in value):
            return {"ints": list(value)}
        return {"tuple": [_encode(one) for one in value]}
    if hasattr(value, "numpy"):
        return {"tensor": base64.b64encode(value.cpu().numpy().tobytes()).decode("ascii")}
    if hasattr(value, "dtype") and getattr(value, "shape", None):
        return {"array": [str(value.dtype), base64.b64encode(value.tobytes()).decode("ascii")]}
    if hasattr(value, "item"):
        return value.item()
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "map":
        return {name: _decode(one) for name, one in inner.items()}
    if kind == "ints":
        return tuple(inner)
    if kind == "tuple":
        return tuple(_decode(one) for one in inner)
    if kind == "array":
        import numpy as np

        return np.frombuffer(base64.b64decode(inner[1]), dtype=inner[0]).copy()
    if kind == "tensor":
        import torch

        return torch.frombuffer(bytearray(base64.b64decode(inner)), dtype=torch.uint8).clone()
    raise ValueError(f"{kind!r} is no kind of state")


def _find(owner: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the generators that an object holds, by the way to them."""
    if depth > _MAX_DEPTH or owner is None:
        return
    held = getattr(owner, "__dict__", None)
    if not isinstance(held, dict):
        return
    for name, value in list(held.items()):
        where = f"{path}.{name}" if path else name
        if _is_generator(value):
            yield where, value
        elif name in _OF_BATCHES:
            yield from generators_below(value, where)
        elif name in _WAYS:
            yield from _find(value, where, depth + 1)


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    torch, np = sys.modules["torch"], sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return True
    return np is not None and isinstance(value, (np.random.Generator, np.random.RandomState))


def _get(one: Any) -> Any:
    if isinstance(one, random.Random):
        return one.getstate()
    if hasattr(one, "bit_generator"):
        return one.bit_generator.state
    return one.get_state(legacy=False) if hasattr(one, "randint") else one.get_state()


def _set(one: Any, state: Any) -> None:
    if isinstance(one, random.Random):
        one.setstate(state)
    elif hasattr(one, "bit_generator"):
        one.bit_generator.state = state
    else:
        one.set_state(state)


def looks_ahead(loader: Any) -> bool:
    """Tell whether a loader reads one batch ahead of the one that it gives, as those of Accelerate do."""
    return any(kind.__name__ in ("DataLoaderShard", "DataLoaderDispatcher") for kind in type(loader).__mro__)


def has_workers(loader: Any) -> bool:
    """Tell whether other processes read for a loader."""
    return bool(getattr(loader, "num_workers", 0))


def differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether generators of the process are other ones of two captures; those of the data are not looked at."""
    import torch

    if one["python"] != other["python"] or not torch.equal(one["torch"], other["torch"]):
        return True
    first, second = one["numpy"]["state"], other["numpy"]["state"]
    return bool(first["pos"] != second["pos"] or (first["key"] != second["key"]).any())


class Announced:
    """A batch sampler that calls something before it gives a batch of some number."""

    def __init__(self, inner: Any, steps: Mapping[int, Callable[[], object]]) -> None:
        self._inner, self._steps = inner, steps
        self.is_past = False
        """Whether the last one was called."""

    @classmethod
    def put_in(cls, rest: Any, steps: Mapping[int, Callable[[], object]]) -> Announced | None:
        """Put it around the sampler of what `skip_first_batches` returned; None where that has none of its kind."""
        for name in ("batch_sampler", "sampler"):
            skipping: Any = getattr(rest, name, None)
            if type(skipping).__name__ == "SkipBatchSampler" and hasattr(skipping, "batch_sampler"):
                skipping.batch_sampler = announced = cls(skipping.batch_sampler, steps)
                return announced
        return None

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        last, number, batches = max(self._steps), 0, iter(self._inner)
        while True:
            # Before the sampler is asked: it may draw, too.
            if number in self._steps:
                self._steps[number]()
                self.is_past = self.is_past or number == last
            try:
                indices = next(batches)
            except StopIteration:
                return
            yield indices
            number += 1
