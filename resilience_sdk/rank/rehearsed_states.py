"""The states of a rehearsed training: which kinds a script has written and loaded, and what its weights are called.

So that no cure is a thing that the script does already. A real run is never looked at like this.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from resilience_sdk.system.imports import when_imported

OPTIMIZER, SCHEDULER, GENERATORS, PLACE = "optimizer", "scheduler", "generators", "place"
"""Kinds of states; the place is that of a loader with a state of its own."""
_DEPTH = 4
_MOST = 400
_LOADER_KEYS = ("_snapshot", "_sampler_iter_state", "_num_yielded", "_iterator_finished")
_TORCH_STATE = 5056  # bytes of the state of torch's generator on the CPU

_LOADS = (
    ("torch.optim.optimizer", "Optimizer", "load_state_dict", OPTIMIZER),
    ("torch.optim.lr_scheduler", "LRScheduler", "load_state_dict", SCHEDULER),
    ("torch.optim.lr_scheduler", "ReduceLROnPlateau", "load_state_dict", SCHEDULER),
    ("torch.optim.lr_scheduler", "LambdaLR", "load_state_dict", SCHEDULER),
    ("torch.optim.lr_scheduler", "MultiplicativeLR", "load_state_dict", SCHEDULER),
    ("torch.optim.lr_scheduler", "SequentialLR", "load_state_dict", SCHEDULER),
    ("torch.optim.lr_scheduler", "ChainedScheduler", "load_state_dict", SCHEDULER),
    ("torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader", "load_state_dict", PLACE),
)


_MADE = (
    ("lightning", "lightning.pytorch.trainer.trainer", "Trainer"),
    ("lightning", "pytorch_lightning.trainer.trainer", "Trainer"),
    ("transformers", "transformers.trainer", "Trainer"),
    ("accelerate", "accelerate.accelerator", "Accelerator"),
    ("deepspeed", "deepspeed.runtime.engine", "DeepSpeedEngine"),
)
"""A framework is in use where one of these is made: models of transformers import Accelerate, say, and use it not."""


def kinds_of(saved: Any) -> list[str]:
    """Return the kinds of states that are in what was saved, but for weights."""
    return sorted({kind for one in _within(saved, _DEPTH) if (kind := _kind(one)) is not None})


def _within(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth and isinstance(value, (Mapping, list, tuple)) and len(value) <= _MOST and _kind(value) is None:
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _within(inner, depth - 1)


def _kind(value: Any) -> str | None:
    if isinstance(value, Mapping):
        if "param_groups" in value and "state" in value:
            return OPTIMIZER
        if "last_epoch" in value or "_step_count" in value:
            return SCHEDULER
        return PLACE if any(key in value for key in _LOADER_KEYS) else None
    if isinstance(value, tuple) and value:
        is_numpy = isinstance(value[0], str) and value[0] == "MT19937"
        is_python = len(value) == 3 and value[0] == 3 and isinstance(value[1], tuple)
        return GENERATORS if is_numpy or is_python else None
    is_torch = str(getattr(value, "dtype", "")) == "torch.uint8" and getattr(value, "shape", ()) == (_TORCH_STATE,)
    return GENERATORS if is_torch else None


def watch_loads(leave: Callable[[str], object]) -> None:
    """Have `leave` hear of each kind of state that is loaded from now on."""
    for module, owner, method, kind in _LOADS:
        when_imported(module, functools.partial(_wrap, owner, method, kind, leave))
    when_imported("torch.random", functools.partial(_wrap, None, "set_rng_state", GENERATORS, leave))


def watch_frameworks(leave: Callable[[str], object]) -> None:
    """Have `leave` hear of each framework that the script begins to train with."""
    for name, module, owner in _MADE:
        when_imported(module, functools.partial(_wrap, owner, "__init__", name, leave))


def _wrap(owner: str | None, method: str, kind: str, leave: Callable[[str], object], module: Any) -> None:
    target = module if owner is None else getattr(module, owner, None)
    plain = getattr(target, "__dict__", {}).get(method)
    if not callable(plain):
        return

    @functools.wraps(plain)
    def loaded(*args: Any, **options: Any) -> Any:
        leave(kind)
        return plain(*args, **options)

    setattr(target, method, loaded)
    torch = sys.modules.get("torch")
    if owner is None and torch is not None and getattr(torch, method, None) is plain:
        setattr(torch, method, loaded)


def names_of(optimizer: Any) -> list[str]:
    """Return what the modules of this process call the weights of an optimizer, in its order; empty where unknown."""
    weights = {id(weight): place for place, weight in enumerate(_weights(optimizer))}
    found = [""] * len(weights)
    torch_nn = sys.modules.get("torch.nn.modules.module")
    kind = getattr(torch_nn, "Module", None)
    if kind is None or not weights:
        return []
    for module in gc.get_objects():
        with contextlib.suppress(Exception):  # a proxy or half-made object of somebody's own kind
            if isinstance(type(module), type) and issubclass(type(module), kind):
                for name, weight in module.named_parameters(remove_duplicate=False):
                    place = weights.get(id(weight))
                    # The outermost module has the longest name; a wrapper's own part of it says nothing.
                    plain = name.removeprefix("module.").removeprefix("_orig_mod.")
                    if place is not None and len(plain) > len(found[place]):
                        found[place] = plain
    return found if any(found) else []


def _weights(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]
