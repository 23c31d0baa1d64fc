"""The looks of a rehearsal at each step of an optimizer, in any loop: rates, weights, gradients, generators, the batch.

It looks before the step is done, on the thread that trains. A real run is never looked at like this: a look costs some
milliseconds and waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import weakref
from binascii import crc32
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from resilience_sdk.rank.fingerprints import print_of_content
from resilience_sdk.rank.witness import rates_of
from resilience_sdk.system.imports import when_imported

_GROUPS = 32
_MOST = 4096
"""Of a tensor: so many of its numbers are looked at, spread over the whole."""
_FETCHES = "_BaseDataLoaderIter"


@attrs.frozen
class StepLook:
    """One step of an optimizer, before it is done."""

    at: int | None = None
    """The step of the loop that it belongs to, by its number; None: before the first."""
    rates: int | None = None
    """A number for the learning rates of all groups; None: one is on a device."""
    rate: float = 0.0
    generators: Mapping[str, int] = attrs.field(factory=dict)
    """A number for the state of those of `torch`, with its devices, of `Python` and of `NumPy`."""
    batch: int | None = None
    """A number for the newest batch that this process has fetched from a `DataLoader`; None: none was."""
    passes: int = 0
    """How many passes over a `DataLoader` that steps draw from have come to their end."""
    weights: tuple[float, ...] = ()
    """Norm and sum of each, or of some of them together."""
    gradients: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the line of a trace."""
        return {"look": attrs.asdict(self)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StepLook:
        """Return what `to_json` made; raises TypeError for anything else."""
        return cls(**{**found, "weights": tuple(found["weights"]), "gradients": tuple(found["gradients"])})


class StepLooks:
    """Looks at each optimizer step of this process, and hands it to `leave`. What it cannot look at, it leaves out."""

    def __init__(self, leave: Callable[[StepLook], None]) -> None:
        self._leave = leave
        self._batch: int | None = None
        self._source: weakref.ref[Any] | None = None  # the iterator of the newest batch
        self._drawn_from: weakref.ref[Any] | None = None  # that of the newest step
        self._passes = 0
        self.at: int | None = None
        """The number of the newest step."""

    def install(self) -> None:
        """Look from now on, or from the import of torch on."""
        when_imported("torch.optim.optimizer", self._hook)
        when_imported("torch.utils.data.dataloader", self._wrap)

    def _hook(self, module: Any) -> None:
        def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            with contextlib.suppress(Exception):  # an optimizer of somebody's own kind: its step is not compared
                self._leave(self._look(optimizer))

        module.register_optimizer_step_pre_hook(before_step)

    def _wrap(self, module: Any) -> None:
        iterator = getattr(module, _FETCHES, None)
        plain = getattr(iterator, "__next__", None)
        if plain is None:
            return

        @functools.wraps(plain)
        def fetched(batches: Any) -> Any:
            try:
                batch = plain(batches)
            except StopIteration:
                self._passes += self._drawn_from is not None and self._drawn_from() is batches
                raise
            with contextlib.suppress(Exception):
                self._source = weakref.ref(batches)
                shapes, content = print_of_content(batch)
                self._batch = shapes << 32 | content
            return batch

        iterator.__next__ = fetched  # type: ignore[union-attr]

    def _look(self, optimizer: Any) -> StepLook:
        gradients = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
        rates = rates_of((optimizer,))
        self._drawn_from = self._source
        return StepLook(
            self.at,
            None if rates is None else rates[0],
            0.0 if rates is None else rates[1],
            _generators(),
            self._batch,
            self._passes,
            weights_of(optimizer),
            _measure(gradient for gradient in gradients if gradient is not None),
        )


def weights_of(optimizer: Any) -> tuple[float, ...]:
    """Return norm and sum of the weights of an optimizer, as a look has them."""
    return _measure(weight.detach() for group in optimizer.param_groups for weight in group["params"])


def _generators() -> dict[str, int]:
    found = {"Python": crc32(repr(random.getstate()).encode())}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        _, keys, *others = numpy.random.get_state(legacy=True)
        found["NumPy"] = crc32(keys.tobytes(), crc32(repr(tuple(map(float, others))).encode()))
    if torch is not None:
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state())
        found["torch"] = 0
        for state in states:
            found["torch"] = crc32(state.numpy().tobytes() if numpy is not None else bytes(state), found["torch"])
    return found


def _measure(tensors: Iterable[Any]) -> tuple[float, ...]:
    """Return norm and sum of each, of several together where there are many."""
    found = [_norm_and_sum(tensor) for tensor in tensors]
    size = -(-len(found) // _GROUPS) or 1
    return tuple(_flat(found, size))


def _flat(found: list[tuple[float, float]], size: int) -> Iterator[float]:
    for first in range(0, len(found), size):
        some = found[first : first + size]
        yield sum(norm * norm for norm, _ in some) ** 0.5
        yield sum(total for _, total in some)


def _norm_and_sum(tensor: Any) -> tuple[float, float]:
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    flat = local.reshape(-1)
    some = flat[:: -(-len(flat) // _MOST) or 1].double()
    return float(some.norm()), float(some.sum())
