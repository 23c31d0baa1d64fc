"""Digests of a training state: the same where two states are the same, on whatever device, in a few milliseconds.

Numbers, texts and small tensors count as a whole, of a large tensor a grid of elements, and of very many tensors some.
Nothing here changes what it looks at, or raises: what cannot be looked at has no digest, and is not compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import torch

_WHOLE_BYTES = 1024
_SAMPLED = 64
_MAX_TENSORS = 1000
_MAX_ITEMS = 4096
_SIZE = 6
UNKNOWN = ""
"""The digest of what cannot be looked at, where another one would count for it."""


class _Walk:
    """The structure of several values as bytes, each with holes for what is in its tensors."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.parts: list[bytes | int] = []  # a number is that of a tensor

    def add(self, value: Any) -> None:
        """Take a value; raises TypeError for what it holds of a kind that is not known."""
        parts = self.parts
        if isinstance(value, torch.Tensor):
            local = getattr(value, "to_local", None)
            tensor = local() if callable(local) else value
            parts.append(f"T{tensor.dtype}{tuple(tensor.shape)}".encode())
            parts.append(len(self.tensors))
            self.tensors.append(tensor.detach())
        elif isinstance(value, (bool, type(None), str, torch.dtype, torch.device)):
            parts.append(repr(value).encode(errors="replace") + b";")
        elif isinstance(value, (int, float)):
            # A state that was saved as 1 and is loaded as 1.0 is the same.
            is_whole = isinstance(value, int) or value.is_integer()
            parts.append(b"%d;" % int(value) if is_whole else struct.pack("<d", value))
        elif isinstance(value, complex):
            parts.append(struct.pack("<dd", value.real, value.imag))
        elif isinstance(value, (bytes, bytearray)):
            parts.append(hashlib.blake2b(value, digest_size=_SIZE).digest())
        elif isinstance(value, Mapping):
            parts.append(b"{%d" % len(value))
            for key in sorted(value, key=repr):
                parts.append(repr(key).encode(errors="replace") + b":")
                self.add(value[key])
        elif isinstance(value, (list, tuple)):
            parts.append(b"[%d" % len(value))
            for item in value if len(value) <= _MAX_ITEMS else value[:: len(value) // _MAX_ITEMS + 1]:
                self.add(item)
        elif isinstance(value, (set, frozenset)):
            self.add(sorted(map(repr, value)))
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            parts.append(f"N{value.dtype}{value.shape}".encode())
            self.add(value.tobytes())
        else:
            raise TypeError(type(value).__name__)


def digests_of(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each entry that can be looked at; of the tensors of all together at most 1000 are."""
    walks: dict[str, _Walk] = {}
    for name, value in entries.items():
        walk = _Walk()
        try:
            walk.add(value)
        except Exception:  # noqa: BLE001, S112 - an object of somebody else's kind
            continue
        walks[name] = walk
    step = _odd(-(-sum(len(walk.tensors) for walk in walks.values()) // _MAX_TENSORS))
    found: dict[str, str] = {}
    for name, samples in _samples({name: walk.tensors[::step] for name, walk in walks.items()}).items():
        walk, hashed = walks[name], hashlib.blake2b(digest_size=_SIZE)
        for part in walk.parts:
            if isinstance(part, bytes):
                hashed.update(part)
            elif part % step == 0:
                hashed.update(samples[part // step])
        found[name] = hashed.hexdigest()
    return found


def _samples(tensors: Mapping[str, list[torch.Tensor]]) -> dict[str, list[bytes]]:
    """Return what is looked at of the tensors of each entry: read together, or one by one where one cannot be read."""
    try:
        samples = iter(_read([one for each in tensors.values() for one in each]))
        return {name: [next(samples) for _ in each] for name, each in tensors.items()}
    except Exception:  # noqa: BLE001 - a tensor of somebody else's kind
        found = {}
        for name, each in tensors.items():
            with contextlib.suppress(Exception):
                found[name] = _read(each)
        return found


def _odd(step: int) -> int:
    """Return a distance that meets all of what comes in turn, such as the three tensors of Adam."""
    while step > 1 and (step % 2 == 0 or step % 3 == 0):
        step += 1
    return max(1, step)


def _read(tensors: list[torch.Tensor]) -> list[bytes]:
    """Return the bytes of what is looked at of each: one read per device and kind."""
    groups: dict[Any, list[int]] = {}
    views: list[torch.Tensor] = []
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
                views.append(torch.empty(0))
                continue
            views.append(_sampled(tensor))
            groups.setdefault((tensor.device, tensor.dtype), []).append(number)
        samples = [b""] * len(tensors)
        for numbers in groups.values():
            together = torch.cat([views[number] for number in numbers]).cpu()
            data = ctypes.string_at(together.data_ptr(), together.numel() * together.element_size())
            at = 0
            for number in numbers:
                size = views[number].numel() * together.element_size()
                samples[number] = data[at : at + size]
                at += size
    return samples


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.numel() * tensor.element_size() > _WHOLE_BYTES:
        per_side = max(2, round(_SAMPLED ** (1 / tensor.ndim)))
        tensor = tensor[tuple(slice(None, None, -(-size // per_side)) for size in tensor.shape)]
    return tensor.reshape(-1)


def entries_of_state(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return captured states as what is compared apart, by names for people: an optimizer's options from its rest."""
    found: dict[str, Any] = {}
    for name, state in states.items():
        if isinstance(state, Mapping) and {"state", "param_groups"} <= set(state):
            found[_OPTIONS.format(name)] = state["param_groups"]
            state = {key: value for key, value in state.items() if key != "param_groups"}
        found[f"the state of {name}"] = state
    return found


class Led:
    """A module inside of a DDP that nobody can find from it, and that hands out the buffers of rank 0 in each step."""

    broadcast_buffers = True

    def __init__(self, module: torch.nn.Module) -> None:
        """Stand for `module`."""
        self.module = module


def entries_of_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return live objects as what is compared apart, as `entries_of_state`: this rank's part, without a collective."""
    found: dict[str, Any] = {}
    for name, item in objects.items():
        is_led = _is_led(item)
        item = item.module if isinstance(item, Led) else item
        if isinstance(item, torch.nn.Module):
            buffers = (
                {}
                if is_led
                else {
                    f"{place}.{key}": module._buffers[key]
                    for place, module in item.named_modules()
                    for key in module._buffers.keys() - module._non_persistent_buffers_set
                }
            )
            found[f"the state of {name}"] = {**dict(item.named_parameters()), **buffers}
        elif isinstance(groups := getattr(item, "param_groups", None), list):
            options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            found[_OPTIONS.format(name)] = options
            states = getattr(item, "state", {})
            params = [param for group in groups for param in group["params"]]
            found[f"the state of {name}"] = [states.get(param) for param in params]
        elif callable(getattr(item, "state_dict", None)):
            found[f"the state of {name}"] = item.state_dict()
    return found


def _is_led(module: Any) -> bool:
    """Tell whether this rank's buffers are those of another one in each step, so that nobody has to restore them."""
    if not getattr(module, "broadcast_buffers", False):
        return False
    distributed = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0)


_OPTIONS = "the options of {} (learning rate and others)"
_GENERATORS = {"python": "Python", "numpy": "NumPy", "torch": "torch", "cuda_current": "the device"}


def entries_of_rng(states: Mapping[str, Any], generators: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what `capture_rng` and `capture_generators` gave as what is compared apart."""
    own = {f"the generator {name}": state for name, state in (generators or {}).items()}
    known = {words: states[name] for name, words in _GENERATORS.items() if name in states}
    return {**{f"the generator of {words}": state for words, state in known.items()}, **own}


def differing(saved: Mapping[str, str], now: Mapping[str, str]) -> tuple[list[str], int]:
    """Return the names of what differs, in the order of the saved, and how many were compared: what both have."""
    both = [name for name in saved if name in now and UNKNOWN not in (saved[name], now[name])]
    return [name for name in both if saved[name] != now[name]], len(both)


def of_rank(
    document: Mapping[str, Any], own: Mapping[str, Any], shared: Mapping[str, Any], values: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the digests of what rank 0 writes for all, and of what one rank writes for itself.

    `document` has its generators (`rng`) and its place in the data (`position`); `values` is JSON text, None
    where they are not looked at.
    """
    for_all = entries_of_state(shared)
    if values is not None:
        for_all["the values of the run"] = json.loads(values or "{}")
    mine = {
        **{f"the state of {name}": value for name, value in own.items()},
        **entries_of_rng(document["rng"], document.get("held")),
    }
    position = document.get("position")
    if isinstance(position, Mapping):
        mine["the place in the data"] = [position.get(name) for name in ("epoch", "batches")]
    # Apart: how much is looked at of what is for all is the same on all ranks.
    return digests_of(for_all), digests_of(mine)
