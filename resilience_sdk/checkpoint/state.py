"""The state in a checkpoint, taken from live objects and put back, and random number generators as JSON.

Reading a state consumes nothing. Only what is loaded is touched: numpy is left alone unless the program
imported it, CUDA unless the program started it.

An entry of `state` is one of

* sharded: a module, optimizer or tensor that is spread over the ranks (see `sharded`). Every rank writes its part;
* shared: a module, an optimizer, a scheduler, a scaler, anything with `state_dict` and `load_state_dict`, or
  a plain tensor. It is the same on every rank, so rank 0 writes it for all;
* per rank: a data loader or sampler with `state_dict`, a `torch.Generator`, a `collections.deque` or a numpy array (see
  `containers`). Every rank writes its own. So it does with what is shared and differs by rank all the
  same (see `by_rank`);
* a data loader without `state_dict`: nothing to save, `Run.steps` counts its batches.

Wrappers (DDP, DataParallel, torch.compile) are taken off, so that a checkpoint fits with and without them.
"""

from __future__ import annotations

import base64
import random
import reprlib
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from resilience_sdk.checkpoint import containers, sharded
from resilience_sdk.checkpoint.beside_moments import BesideState
from resilience_sdk.checkpoint.generators import capture_one, restore_one
from resilience_sdk.checkpoint.held import HeldGenerators
from resilience_sdk.checkpoint.passes import PassWatch, unused_state
from resilience_sdk.checkpoint.worker_draws import WatchedWorkers
from resilience_sdk.core.console import say_once
from resilience_sdk.core.resume_limits import note
from resilience_sdk.errors import CheckpointError, ConfigError, ResilienceError


def capture_rng() -> dict[str, Any]:
    """Return the states of all generators in use in this process as a JSON value."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": encode_tensor(torch.get_rng_state()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        states["numpy"] = [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = [encode_tensor(state) for state in torch.cuda.get_rng_state_all()]
        # Devices may be numbered differently next time; a rank's own one is what matters most.
        states["cuda_current"] = encode_tensor(torch.cuda.get_rng_state())
    return states


def restore_rng(states: Mapping[str, Any]) -> None:
    """Set every generator that `capture_rng` saw and that exists here to the state that it had then."""
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
    if "torch" in states:
        torch.set_rng_state(decode_tensor(states["torch"]))
    if "numpy" in states:
        # Imported here if need be: the program used it at the save, so it will use it again.
        import numpy

        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available():
        if len(states["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([decode_tensor(text) for text in states["cuda"]])
        torch.cuda.set_rng_state(decode_tensor(states["cuda_current"]))


def capture_generators(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of generator objects of the program's own (torch, Python, numpy) as a JSON value."""
    return {
        name: encode_tensor(one.get_state()) if isinstance(one, torch.Generator) else capture_one(one)
        for name, one in generators.items()
    }


def restore_generators(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Set those of `generators` that `capture_generators` saw to the state that they had then."""
    for name, generator in generators.items():
        if name not in states:
            continue
        if not isinstance(generator, torch.Generator):
            restore_one(generator, states[name])
        elif isinstance(states[name], str):
            generator.set_state(decode_tensor(states[name]))


def encode_tensor(state: torch.Tensor) -> str:
    """Return a byte tensor as text (base64), which `decode_tensor` reads."""
    return base64.b64encode(bytes(state.cpu().tolist())).decode("ascii")


def decode_tensor(text: str) -> torch.Tensor:
    """Return the byte tensor that `text` (base64) holds."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).clone()


_MAX_NAMED = 4
Kind = Literal["shared", "rank", "counted"]

_MAPPINGS = (dict, OrderedDict, Counter)
_TENSORS = (torch.Tensor, nn.Parameter, getattr(nn, "Buffer", nn.Parameter))
_ACCEPTED = "an object with state_dict() and load_state_dict(), a tensor, a deque, a numpy array, or a data loader"


class StateMap:
    """The entries of `state`, sorted by who writes them. Objects are referenced, not copied."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Sort the entries; raises `ConfigError` naming the one that cannot be saved, and the cure."""
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise ConfigError(
                f"state must be a mapping from names to objects, such as "
                f'{{"model": model, "optimizer": optimizer}}, not {reprlib.repr(state)}'
            )
        self.shared: dict[str, Any] = {}
        self._names: dict[str, frozenset[str]] = {}
        """Those in the `state_dict` of each module, at the start."""
        self.per_rank: dict[str, Any] = {}
        self.counted: dict[str, Any] = {}
        """Loaders of which nothing is saved."""
        self.passes: dict[str, PassWatch] = {}
        """Those over loaders of `per_rank`, by the same names."""
        self.workers: dict[str, WatchedWorkers] = {}
        """Those of loaders whose workers are new ones at a resume."""
        self.held = HeldGenerators(lambda: self.shared)
        """Generators in attributes of the shared entries."""
        self.beside = BesideState(self.held.objects, unwrap)
        """What modules among these hold that is in no `state_dict`."""
        self.beside.apart = lambda: [*self.per_rank.values(), *self.counted.values()]
        for name, item in state.items():
            kind = classify(name, item)
            if kind == "shared":
                self.shared[name] = item
            else:
                (self.per_rank if kind == "rank" else self.counted)[name] = item

    def capture_shared(self) -> dict[str, Any]:
        """Return what rank 0 writes for all; raises `CheckpointError` for what could not be loaded again."""
        spread = self.sharded
        found = {name: capture(name, item) for name, item in self.shared.items() if name not in spread}
        for name in self.modules.keys() & found.keys():
            self._compare_names(name, frozenset(found[name]))
        return found

    def _compare_names(self, entry: str, names: frozenset[str]) -> None:
        """Say it where a module has other names in its `state_dict` than at the start: it cannot be loaded there."""
        first = self._names.setdefault(entry, names)
        if names == first:
            return
        others = sorted(names ^ first)
        note(
            f"names of {entry}",
            f"state[{entry!r}] in a program that makes it as at its start",
            f"the training has changed the names of its state_dict ({_listed(others[:_MAX_NAMED])}"
            f"{' and others' if len(others) > _MAX_NAMED else ''}), so that a resume is refused",
            "do before the resume what changes them, such as pruning, by a value that is saved",
        )

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules among the shared entries, without wrappers."""
        return {name: unwrap(item) for name, item in self.shared.items() if isinstance(item, nn.Module)}

    @property
    def sharded_names(self) -> set[str]:
        """The names of the entries of which each rank has a part."""
        return sharded.find_sharded(self.shared)

    @property
    def sharded(self) -> dict[str, Any]:
        """The entries of which each rank has a part, without wrappers; raises `ConfigError` for an optimizer alone.

        An optimizer that has taken no step has no state yet, and its options are the same on all ranks.
        """
        found = {}
        for name in sorted(self.sharded_names):
            item = unwrap(self.shared[name])
            if isinstance(item, torch.optim.Optimizer):
                sharded.find_owner(name, item, self.modules)
            if not isinstance(item, torch.optim.Optimizer) or item.state:
                found[name] = item
        return found

    def check(self) -> None:
        """Raise `CheckpointError` or `ConfigError` for what could not be saved or loaded again; changes nothing."""
        self.capture_shared()
        self.capture_rank()

    def capture_rank(self) -> dict[str, Any]:
        """Return what this rank writes; raises `CheckpointError` as `capture_shared`."""
        return {name: capture(name, item) for name, item in self.per_rank.items()}

    def size(self) -> int:
        """Return about how many bytes rank 0 would write; 0 when the state cannot be taken."""
        try:
            return tensor_bytes(self.capture_shared())
        except Exception:  # noqa: BLE001 - a guess; the save itself reports what is wrong
            return 0

    def apply_shared(self, saved: Mapping[str, Any], spread: Collection[str] = ()) -> tuple[str, ...]:
        """Put back what `capture_shared` returned; return saved names that nobody asks for.

        `spread` names what the checkpoint has in parts; it is left alone here. Raises `CheckpointError` when an
        entry is not in the checkpoint or does not fit.
        """
        missing = [name for name in self.shared if name not in saved and name not in spread]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no {_listed(missing)}, only {_listed([*saved, *spread])}: resume with the same "
                f"names in state, or start over in another run directory"
            )
        here_sharded = self.sharded_names
        for name, item in self.shared.items():
            if name in spread:
                continue
            if name in here_sharded:
                with fitting(name):
                    sharded.apply_whole(name, unwrap(item), saved[name], self.modules)
            else:
                apply(name, item, saved[name])
        return tuple(name for name in [*saved, *spread] if name not in self.shared)


def classify(name: str, item: Any) -> Kind:
    """Return who writes `item`; raises `ConfigError` when it cannot be saved, with the cure."""
    if isinstance(item, torch.Generator) or containers.is_container(item):
        return "rank"
    if isinstance(item, (torch.Tensor, nn.Module, torch.optim.Optimizer)):
        return "shared"
    # An iterable that is no module gives out data, and every rank has a part of the data for itself.
    gives_data = hasattr(item, "__iter__") and not isinstance(item, (Mapping, str, bytes, list, tuple, set))
    if has_state(item):
        return "rank" if gives_data else "shared"
    if gives_data and not _is_collection(item):
        return "counted"
    is_array = type(item).__module__.partition(".")[0] == "numpy"
    cure = (
        "a numpy array is saved if it is a plain one that may be written to and holds no objects"
        if is_array
        else 'put its items in one by one, such as "name.key": item'
        if isinstance(item, (Mapping, list, tuple))
        else "plain values travel in run.values (or Checkpointer.values)"
    )
    raise ConfigError(f"state[{name!r}] is {reprlib.repr(item)}, which is not {_ACCEPTED}: {cure}")


def _is_collection(item: Any) -> bool:
    """Tell whether what may be iterated is known to hold values, and not to read data."""
    kind = type(item)
    is_array = kind.__module__.partition(".")[0] == "numpy" and kind.__name__ != "memmap"
    return is_array or kind.__module__ in ("collections", "array") or kind in (bytearray, frozenset, memoryview)


def has_state(item: Any) -> bool:
    """Tell whether `item` can give and take its state by the usual two methods."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def unwrap(item: Any) -> Any:
    """Return the module inside DDP, DataParallel and torch.compile wrappers; anything else as it is."""
    while isinstance(item, nn.Module):
        if isinstance(item, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            item = item.module
        elif isinstance(inner := getattr(item, "_orig_mod", None), nn.Module):
            item = inner  # what torch.compile(module) returns
        else:
            break
    return item


def capture(name: str, item: Any) -> Any:
    """Return the state of one entry, checked to be loadable by `torch.load(weights_only=True)`."""
    if isinstance(item, torch.Generator):
        return item.get_state()
    if containers.is_container(item):
        return containers.pack(item, name)
    if isinstance(item, torch.Tensor):
        state: Any = item.detach()
    elif (unused := unused_state(item)) is not None:
        state = unused
    else:
        state = _given(unwrap(item), name)
    return _loadable(state, name)


def _given(item: Any, name: str) -> Any:
    try:
        return item.state_dict()
    except ResilienceError:
        raise
    except Exception as error:
        cure = "give an object whose state_dict() can be called at any step, or leave it out"
        if hasattr(item, _CONSOLIDATES):
            cure = "give its attribute `optim`, which is what this rank has of it: each rank saves its own"
        raise ConfigError(
            f"state[{name!r}]: {type(item).__name__}.state_dict() raised {type(error).__name__}: {error}; {cure}"
        ) from error


_CONSOLIDATES = "consolidate_state_dict"  # of torch's ZeroRedundancyOptimizer: its state is in parts until it is asked


def apply(name: str, item: Any, saved: Any) -> None:
    """Put the state of one entry back; raises `CheckpointError` naming it when it does not fit."""
    with fitting(name):
        if isinstance(item, torch.Generator):
            item.set_state(saved)
        elif containers.is_container(item):
            containers.restore(item, saved)
        elif isinstance(item, torch.Tensor):
            if item.shape != saved.shape:
                raise ValueError(f"shape {tuple(saved.shape)} in the checkpoint, {tuple(item.shape)} here")
            with torch.no_grad():
                item.copy_(saved)
        else:
            unwrap(item).load_state_dict(saved)


class fitting:  # noqa: N801 - used like a function
    """Turns what an object raises on a state that does not fit into a `CheckpointError` that names the entry."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Watch the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Raise the `CheckpointError`."""
        if isinstance(error, (RuntimeError, ValueError, KeyError, TypeError, AttributeError)):
            raise CheckpointError(
                f"the checkpoint does not fit state[{self._name!r}]: {error}\n"
                f"Resume with the program that wrote it, or start over in another run directory."
            ) from error


def _loadable(value: Any, place: str) -> Any:
    """Return `value` with numpy scalars as Python's; raise `CheckpointError` for what could not be loaded."""
    kind = type(value)
    if kind in _TENSORS or kind in containers.LEAVES:
        return value
    if kind in _MAPPINGS:
        changed = {
            _loadable(key, f"a key of {place}"): _loadable(item, f"{place}[{key!r}]") for key, item in value.items()
        }
        is_same = _same_items(changed, value) and _same_items(changed.values(), value.values())
        return value if is_same else kind(changed)
    if kind in (list, tuple, set):
        items = [_loadable(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return value if _same_items(items, value) else kind(items)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    if isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"{place} is a {kind.__name__}: such tensors are saved only as parameters of a "
            f"module, in the state of its optimizer, or as an entry of state themselves"
        )
    raise CheckpointError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which could not be loaded without running "
        f"code from the file: let its state_dict() return numbers, strings, tensors, lists and dicts"
    )


def _same_items(new: Iterable[Any], old: Iterable[Any]) -> bool:
    # By identity: what needed no change is handed on as it is, with its attributes (state_dict's _metadata).
    return all(a is b for a, b in zip(new, old, strict=True))


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a captured state."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    if isinstance(value, Mapping):
        return sum(tensor_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(item) for item in value)
    return 0


def find_nan(value: Any, place: str = "") -> str | None:
    """Return the name of the first tensor of a captured state that holds a NaN, such as `model.0.weight`; None: none.

    Of what is spread over ranks this rank's part is looked at. Infinities are no fault: masks are made of them. Waits
    for a device once. Never raises: a save is not lost over it.
    """
    try:
        return _first_nan(value, place)
    except Exception as error:  # noqa: BLE001 - tensors of somebody else's kind
        say_once("looked for NaN", f"checkpoints are not looked at for NaN: {type(error).__name__}: {error}")
        return None


def _first_nan(value: Any, place: str) -> str | None:
    names: dict[torch.device, list[str]] = {}
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in _floating(value, place):
        flag = tensor.amax().isnan()  # the maximum of what holds a NaN is one; no mask is made of the whole tensor
        names.setdefault(flag.device, []).append(name)
        flags.setdefault(flag.device, []).append(flag)
    for device, found in flags.items():
        for name, is_bad in zip(names[device], torch.stack(found).tolist(), strict=True):
            if is_bad:
                return name
    return None


def _floating(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _floating(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _floating(item, f"{place}.{number}")
    elif hasattr(value, "local_shards"):  # FSDP's older kind
        yield from _floating([shard.tensor for shard in value.local_shards()], place)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        local = local.detach()
        local = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
        has_maximum = (
            local.is_floating_point() and torch.finfo(local.dtype).bits > 8
        )  # of 8 bits and less none is taken
        if has_maximum and local.layout is torch.strided and local.numel():
            yield place, local


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
