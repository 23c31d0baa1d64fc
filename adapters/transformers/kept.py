"""Files that a checkpoint keeps beside the trainer's own files, one for each rank.

A trainer saves its weights, optimizer, schedule, generators and counts. It does not save its place in the data, the
loss that it has not logged yet, which evaluation is due, nor, where two callbacks are of one class, which state is
whose. All of that is small, and JSON.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import itertools
import json
import types
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.adapters._base import numbered
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.plain_file import read_bytes

FORMAT = 1
# Whose callbacks do not count: they begin with each training by themselves, or belong to a tracker.
_KNOWN = {"transformers", "resilience_sdk", "accelerate", "trl", "peft", "wandb", "mlflow", "sentence_transformers"}
_FIRST = 4
_DEPTH = 3  # of what is within an attribute


def file_of(directory: Path, rank: int) -> Path:
    """Return the file of one rank in a checkpoint."""
    return directory / f"resilience-rank-{rank}.json"


def write(directory: Path, rank: int, kept: Mapping[str, Any]) -> None:
    """Write the file of one rank; raises `OSError`."""
    write_whole(file_of(directory, rank), json.dumps({"format": FORMAT, **kept}))


def read(directory: Path, rank: int) -> dict[str, Any] | None:
    """Return what a rank has kept, None where the checkpoint has no such file, or one that cannot be read."""
    try:
        found = json.loads(read_bytes(file_of(directory, rank)))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


# -- how a step is made up


@attrs.frozen
class Shape:
    """What an optimizer step and a pass are made of; `length` is None for a stream."""

    ranks: int
    batch: int
    accumulation: int
    length: int | None

    @property
    def step_samples(self) -> int:
        """How many samples a full step has."""
        return self.ranks * self.batch * self.accumulation

    def words(self) -> str:
        """Return it for a person."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        return f"{ranks} x batch {self.batch} x accumulation {self.accumulation}"


def shape_of(value: Any) -> Shape | None:
    """Return the shape that a file has kept, None where it has none."""
    names = [field.name for field in attrs.fields(Shape)]
    try:
        return Shape(**{name: value[name] for name in names})
    except (KeyError, TypeError):
        return None


def batches_after(batches: int, before: Shape, now: Shape) -> tuple[int, int]:
    """Return at which batch of a pass another shape goes on, and how many samples are trained twice by that.

    Whole steps alone: a window of accumulation begins there.
    """
    samples = batches * before.ranks * before.batch
    steps = samples // now.step_samples
    return steps * now.accumulation, samples - steps * now.step_samples


# -- what is the user's


def own_attributes(trainer: Any) -> dict[str, Any]:
    """Return the attributes of a trainer that no class of a library has: those of a subclass of the user's own."""
    kind: Any = type(trainer)
    if _is_of_library(kind):
        return {}
    known = _attributes_of_libraries(kind)
    own = {name: value for name, value in vars(trainer).items() if name not in known}
    # A method that is replaced is none.
    return {name: value for name, value in own.items() if not callable(getattr(kind, name, None))}


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _KNOWN


@functools.lru_cache(maxsize=16)
def _attributes_of_libraries(kind: Any) -> frozenset[str]:
    """Return the names that methods of libraries' classes set on something, or read from `self`."""
    known = [one for one in kind.__mro__ if _is_of_library(one)]
    functions = [item for one in known for item in vars(one).values() if isinstance(item, types.FunctionType)]
    plain = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    left, found = [code for code in plain if code is not None], set[str]()
    while left:
        code = left.pop()
        left += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        before: Any = None
        for one in dis.get_instructions(code):
            is_of_self = before == "self" or (isinstance(before, tuple) and before[-1:] == ("self",))
            if one.opname == "STORE_ATTR" or (one.opname in ("LOAD_ATTR", "LOAD_METHOD") and is_of_self):
                found.add(str(one.argval))
            before = one.argval
    return frozenset(found)


def holders(trainer: Any) -> dict[str, Any]:
    """Return what may hold generators of its own, by names that are the same in each attempt."""
    own = {f"trainer.{name}": value for name, value in own_attributes(trainer).items()}
    found = {"model": trainer.model, "evaluation data": trainer.eval_dataset, **own}
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    found |= {"optimizer": getattr(optimizer, "optimizer", optimizer)}
    found |= {"scheduler": getattr(scheduler, "scheduler", scheduler)}
    handler = getattr(trainer, "callback_handler", None)
    return found | numbered(callback=getattr(handler, "callbacks", ()))


# -- callbacks


@attrs.frozen
class CallbackState:
    """What `state()` of a callback gave at a save; `changed` are the arguments that it changes itself."""

    name: str
    args: Mapping[str, Any]
    attributes: Mapping[str, Any]
    changed: tuple[str, ...] = ()


def exportable(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks whose state a trainer saves."""
    return [one for one in callbacks if _exports(one)]


def _exports(callback: Any) -> bool:
    return any(kind.__name__ == "ExportableState" for kind in type(callback).__mro__)


def args_of(callback: Any) -> dict[str, Any]:
    """Return the arguments that a callback says it was made with, as a file has them."""
    try:
        return dict(_plain(callback.state()).get("args", {}))
    except (TypeError, ValueError):  # no JSON: the trainer will say so when it saves
        return {}


def take_states(callbacks: Sequence[Any], made_with: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the states of callbacks; `made_with`: their arguments at the start of this process, by identity."""
    states = []
    for one in callbacks:
        state = _plain(one.state())
        args, first = state.get("args", {}), made_with.get(id(one), {})
        changed = [name for name, value in args.items() if name in first and first[name] != value]
        states.append(
            {
                "name": type(one).__name__,
                "args": args,
                "attributes": state.get("attributes", {}),
                "changed": changed,
            }
        )
    return states


def states_of(kept: Mapping[str, Any] | None, trainers_own: Any) -> list[CallbackState]:
    """Return the states that a checkpoint has: by our file, else by the trainer's, whose lists grow with each save."""
    if kept is not None and isinstance(kept.get("callbacks"), list):
        ours = kept["callbacks"]
        return [CallbackState(one["name"], one["args"], one["attributes"], tuple(one["changed"])) for one in ours]
    found = []
    for name, data in (trainers_own if isinstance(trainers_own, Mapping) else {}).items():
        for one in data if isinstance(data, list) else [data]:
            if name != "TrainerControl" and isinstance(one, Mapping):
                found.append(CallbackState(name, one.get("args", {}), one.get("attributes", {})))
    return found


def put_back(callbacks: Sequence[Any], states: Sequence[CallbackState]) -> list[str]:
    """Give callbacks the states that they had, the first of a class the first; return what could not be, in words."""
    said = []
    for name in dict.fromkeys([*(type(one).__name__ for one in callbacks), *(state.name for state in states)]):
        here = [one for one in callbacks if type(one).__name__ == name]
        saved = [state for state in states if state.name == name]
        if here and len(saved) > len(here) and len(saved) % len(here) == 0:
            saved = saved[-len(here) :]  # the trainer's own list: each save has added to it
        if len(here) != len(saved):
            said.append(f"{name}: the checkpoint has {len(saved)}, the trainer {len(here)}")
            continue
        for one, state in zip(here, saved, strict=True):
            values = {**state.attributes, **{arg: state.args[arg] for arg in state.changed}}
            for attribute, value in values.items():
                if attribute in state.attributes or hasattr(one, attribute):
                    setattr(one, attribute, value)
                else:
                    said.append(f"{name}: it has no attribute {attribute!r} for the argument of that name")
    return said


def fingerprints(objects: Sequence[Any], trained: Any = None) -> dict[int, dict[str, Any]]:
    """Return what tells whether attributes change that a trainer does not save, by the identity of their objects.

    `objects` are callbacks, and the trainer itself, of which those of its user's class count; `trained` is the model
    that the trainer saves, of which nothing counts.
    """
    saved = _parts(trained)
    return {id(one): {name: _seen(value, saved) for name, value in _attributes(one).items()} for one in objects}


def changed_plain(objects: Sequence[Any], before: dict[int, dict[str, Any]], trained: Any = None) -> list[str]:
    """Return `Class.attribute` of what has changed, at most four of each object; new ones join `before`."""
    found, saved = [], _parts(trained)
    for one in objects:
        now = {name: _seen(value, saved) for name, value in _attributes(one).items()}
        was = before.setdefault(id(one), {})
        changed = [name for name, seen in now.items() if was.setdefault(name, seen) != seen]
        found += [f"{type(one).__name__}.{name}" for name in changed[:_FIRST]]
    return found


def _attributes(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback of the user's own that is no `ExportableState`, or of a trainer's class."""
    if _is_trainer(callback):
        return own_attributes(callback)
    is_theirs = not _is_of_library(type(callback))
    return dict(vars(callback)) if is_theirs and not _exports(callback) else {}


def _is_trainer(one: Any) -> bool:
    """Tell whether an object is the trainer, not one of its callbacks."""
    return "callback_handler" in vars(one)


def held_iterators(objects: Sequence[Any]) -> list[str]:
    """Return `Class.attribute` of each that is an iterator of a loader, or a generator function's: it has a place."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    kinds = (types.GeneratorType, _BaseDataLoaderIter)
    found = [(one, name) for one in objects for name, value in _attributes(one).items() if isinstance(value, kinds)]
    return [f"{type(one).__name__}.{name}" for one, name in found]


def _parts(model: Any) -> frozenset[int]:
    """Return the identities of a model's parameters."""
    return frozenset() if model is None else frozenset(map(id, model.parameters()))


def _seen(value: Any, saved: frozenset[int] = frozenset()) -> Any:
    """Return what differs where a value of the usual kinds has changed; the same for others, and what is `saved`."""
    try:
        return _seen_within(value, saved, _DEPTH)
    except Exception:  # noqa: BLE001 - a container or a module of somebody else's kind
        return None


def _seen_within(value: Any, saved: frozenset[int], depth: int) -> Any:
    import torch

    from resilience_sdk.checkpoint.digests import digests_of

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        is_known = value.is_inference() or id(value) in saved
        # Not by its version alone: what is changed by way of `.data`, as averages are, keeps that.
        return (id(value), None if is_known else (value._version, digests_of({"": value}).get("")))
    if not depth:
        return None
    if isinstance(value, torch.nn.Module):  # such as an average of the weights
        own = [*value.parameters(), *value.buffers()]
        if any(id(one) in saved for one in own):
            return None
        return (len(own), *(_seen_within(one, saved, depth - 1) for one in (*own[:_FIRST], *own[_FIRST:][-_FIRST:])))
    if isinstance(value, (list, tuple, set, dict, collections.deque)):
        items = value.values() if isinstance(value, dict) else value
        ends = itertools.islice(items, _FIRST), itertools.islice(reversed(_ordered(items)), _FIRST)
        return (len(value), *(_seen_within(one, saved, depth - 1) for one in itertools.chain(*ends)))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return zlib.crc32(value.flat[: _FIRST * 256].tobytes()) if value.dtype.kind != "O" else value.shape
    return None


def _ordered(items: Any) -> Any:
    """Return what can be read from its end."""
    return () if isinstance(items, (set, frozenset)) else items


def _plain(state: Any) -> dict[str, Any]:
    found = json.loads(json.dumps(state))
    return found if isinstance(found, dict) else {}
