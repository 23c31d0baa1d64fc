"""Things that a module or an optimizer holds beside its `state_dict`: no checkpoint has them.

Of a module these are `requires_grad` of its parameters, submodules in another mode than the module itself, and
attributes that are numbers, texts, arrays, containers of these, or tensors that are no parameters and no persistent
buffers; of an optimizer such attributes, and what one within has learned.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from resilience_sdk.checkpoint.digests import digests_of
from resilience_sdk.core.resume_limits import note

GRAD, MODE = "(requires_grad)", "(mode)"
"""The entries that are no attributes."""
_MAX_MODULES = 20_000
_MAX_NAMED = 4
MAX_TEXT = 4_096
_MAX_ITEMS = 1_024
_ENDS = 16
_OF_MODULE = frozenset(vars(nn.Module()))
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = frozenset(
    (
        *("accelerate", "deepspeed", "diffusers", "lightning", "megatron", "peft", "pytorch_lightning", "timm"),
        *("torch", "torchvision", "transformer_engine", "transformers", "trl"),
    )
)
"""Those that may be on the path from elsewhere."""
_OF = "\0"
"""Behind the kind of a thing, in its text."""
_APART = ("torchmetrics", "torcheval")
"""Packages whose modules are counters of their own, which the adapters know."""
PLAIN = (bool, int, float, complex, str)

Beside = Mapping[str, str]
"""A text that differs where the thing of that name differs."""


def beside_state(module: nn.Module) -> dict[str, str]:
    """Return what a module holds beside its `state_dict`, by names. Nothing of the program's is called.

    Modes are known where the module itself is in training. Of a library's modules numbers with a fraction alone count.
    """
    named = parts_of(module)
    if len(named) > _MAX_MODULES:
        return {}
    found: dict[str, str] = {}
    known: set[int] = set()
    bits = _saved_of(named, known)
    if not any(type(one).__name__ == "FullyShardedDataParallel" for _, one in named):
        found[GRAD] = f"{len(bits)}{_OF}{int(bits or '0', 2):x}"
    if module.training:
        found[MODE] = ",".join(name for name, one in named if not one.training)
    looked_at: dict[str, Any] = {}
    for place, part in named:
        for name, value in _attributes(part, known):
            where = f"{place}.{name}" if place else name
            if isinstance(value, PLAIN):
                found[where] = f"{value!r}"[:MAX_TEXT]
            else:
                looked_at[where] = value
    for name, digest in digests_of({name: sample(value) for name, value in looked_at.items()}).items():
        found[name] = f"{shape_of(looked_at[name])}{digest}"
    return found


def beside_optimizer(optimizer: torch.optim.Optimizer, given: Collection[int] = ()) -> dict[str, str]:
    """Return what an optimizer of a program's own holds beside its `state_dict`, by names.

    `given`: what is saved apart, by `id`. One whose `state_dict` has more than torch's saves by itself what it needs.
    """
    kind = type(optimizer)
    own = None if kind.state_dict is torch.optim.Optimizer.state_dict else optimizer.state_dict()
    if _is_of_framework(kind) or (own is not None and not set(own) <= {"state", "param_groups"}):
        return {}
    weights = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    saved = {id(one) for one in (optimizer.state if own is None else own["state"]).values()}
    found: dict[str, str] = {}
    looked_at: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if name in _of_optimizer() or name.startswith("_") or name in _left_behind(kind):
            continue
        if isinstance(value, torch.optim.Optimizer):
            states = list(value.state.values())
            if id(value) not in given and (not states or not saved.issuperset(map(id, states))):
                looked_at[f"{name}.state"] = states
        elif type(value) in PLAIN:
            found[name] = f"{value!r}"[:MAX_TEXT]
        elif is_state(value, weights) and not holds_weights(value, weights):
            looked_at[name] = value
    for name, digest in digests_of({name: sample(value) for name, value in looked_at.items()}).items():
        found[name] = f"{shape_of(looked_at[name])}{digest}"
    return found


@functools.cache
def _of_optimizer() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], 0.1)))


def holds_weights(value: Any, weights: set[int], depth: int = 2) -> bool:
    """Tell whether a container holds weights that are saved with their module."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad or id(value) in weights
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ()
    return depth > 0 and any(holds_weights(one, weights, depth - 1) for one in items)


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what `named_modules()` does, in a third of its time: it is done at saves."""
    seen: set[int] = set()
    found: list[tuple[str, nn.Module]] = []
    left: list[tuple[str, nn.Module]] = [("", module)]
    while left:
        place, part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        found.append((place, part))
        prefix = f"{place}." if place else ""
        left += [(prefix + name, one) for name, one in reversed(part._modules.items()) if one is not None]
    return found


def _saved_of(named: list[tuple[str, nn.Module]], known: set[int]) -> str:
    """Add what goes into the `state_dict` to `known`, by `id`; return `requires_grad` of each parameter as 0 or 1."""
    bits = []
    for _, part in named:
        for weight in part._parameters.values():
            if weight is not None and id(weight) not in known:
                known.add(id(weight))
                bits.append("1" if weight.requires_grad else "0")
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                known.add(id(buffer))
    return "".join(bits)


def _attributes(module: nn.Module, known: set[int]) -> Iterable[tuple[str, Any]]:
    """Return what may be a state of one module; not what it puts into its `state_dict` by itself."""
    is_apart, is_installed, of_bases, no_state = _class_of(cast(Hashable, type(module)))
    if is_apart:
        return ()
    if is_installed:
        return [(name, value) for name, value in vars(module).items() if type(value) is float and name[0] != "_"]
    return _of_program(module, known, of_bases, no_state)


def _of_program(
    module: nn.Module, known: set[int], of_bases: Collection[str], no_state: Collection[str]
) -> Iterator[tuple[str, Any]]:
    late = [(name, module._buffers[name]) for name in module._non_persistent_buffers_set]
    for name, value in (*vars(module).items(), *late):
        if name in no_state or name in of_bases or name.startswith("__") or (of_bases and name.startswith("_")):
            continue
        if type(value) in PLAIN or is_state(value, known):
            yield name, value
        elif is_object_of_program(value):
            for key, one in vars(value).items():
                if type(one) in PLAIN or is_state(one, known):
                    yield f"{name}.{key}", one


@functools.lru_cache(maxsize=1024)
def _class_of(kind: Any) -> tuple[bool, bool, frozenset[str], frozenset[str]]:
    """Return whether a class of modules saves all by itself, whether it is a library's, and names that are no state.

    These are of its bases from libraries; and of every module, or what its methods set and never read.
    """
    is_apart = any(one.__module__.partition(".")[0] in _APART for one in kind.__mro__) or _saves_more(kind)
    return is_apart, is_installed(kind), _names_of_bases(kind), _OF_MODULE | _left_behind(kind)


def _left_behind(kind: type) -> frozenset[str]:
    """Return the attributes that methods set for others to read, such as the last loss: they are set again by then."""
    own = [one for one in kind.__mro__ if not is_installed(one)]
    left = [
        item.__code__
        for one in own
        for name, item in vars(one).items()
        if isinstance(item, types.FunctionType) and name != "__init__"
    ]
    read, written = set[str](), set[str]()
    while left:
        code = left.pop()
        left += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        for one in dis.get_instructions(code):
            (written if one.opname == "STORE_ATTR" else read).add(str(one.argval))
    return frozenset(written - read)


def _names_of_bases(kind: type) -> frozenset[str]:
    """Return the names in the methods of a class's bases from libraries, such as Lightning's: these are theirs."""
    bases = [one for one in kind.__mro__ if is_installed(one) and not one.__module__.startswith("torch.")]
    functions = [item for one in bases for item in vars(one).values() if isinstance(item, types.FunctionType)]
    return frozenset(name for function in functions for name in function.__code__.co_names)


def _saves_more(kind: type) -> bool:
    own = ("get_extra_state", "state_dict", "_save_to_state_dict")
    return any(getattr(kind, name, None) is not getattr(nn.Module, name) for name in own) and not is_installed(kind)


def _is_of_framework(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def is_installed(kind: type) -> bool:
    """Tell whether a class is one of a library, not of the program's own."""
    if kind.__module__ in ("builtins", "abc"):
        return False
    if _is_of_framework(kind):
        return True
    path = str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    return any(name in path for name in _INSTALLED)


def is_state(value: Any, known: set[int]) -> bool:
    """Tell whether a value is of a kind that a state has, and not known to be saved, by `id`."""
    if isinstance(value, torch.Tensor):
        return id(value) not in known and not value.requires_grad and not value.is_inference()
    if type(value).__module__ == "numpy":
        return hasattr(value, "tobytes") and value.dtype.kind != "O"
    return isinstance(value, (list, tuple, dict, set, deque))


def sample(value: Any) -> Any:
    """Return a container as digests know it; of a large one its length and its ends."""
    if isinstance(value, (dict, set)):
        return value if len(value) <= _MAX_ITEMS else len(value)
    if not isinstance(value, (list, tuple, deque)):
        return value
    if len(value) <= _MAX_ITEMS:
        return list(value)
    return [len(value), *(value[at] for at in range(-_ENDS, _ENDS))]


def is_object_of_program(value: Any) -> bool:
    """Tell whether a value is an object of a class of the program's, with attributes and without a `state_dict`."""
    kind = type(value)
    is_plain = not isinstance(value, (nn.Module, type)) and isinstance(getattr(value, "__dict__", None), dict)
    is_of_library = is_installed(kind) or kind.__module__.partition(".")[0] in sys.stdlib_module_names
    return is_plain and not is_of_library and not callable(value) and not hasattr(kind, "state_dict")


def shape_of(value: Any) -> str:
    """Return what is another one where a value was made from something else, and not changed."""
    return f"{tuple(value.shape) if hasattr(value, 'shape') else type(value).__name__}{_OF}"


def changed(before: Beside, now: Beside) -> dict[str, tuple[str, str]]:
    """Return what differs of things that were there before: how it was and how it is. Pure.

    A tensor or an array of another shape is none: it is what the last call has left behind.
    """
    both = [name for name in now if before.get(name, now[name]) != now[name]]
    alike = [name for name in both if name == MODE or is_alike(before[name], now[name])]
    return {name: (before[name], now[name]) for name in alike}


def is_alike(one: str, other: str) -> bool:
    """Tell whether two texts are of things of the same kind and shape."""
    return _kind(one) == _kind(other)


def _kind(text: str) -> str:
    return text.partition(_OF)[0] if _OF in text else ""


def say_beside(root: str, names: Mapping[str, tuple[str, str]], module: nn.Module) -> None:
    """Say that a resume does not repeat what differs of a module, by `note`."""
    attributes = [name for name in names if name not in (GRAD, MODE)]
    if attributes:
        buffers = {name for name, _ in module.named_buffers()}
        how = (
            "register these buffers with persistent=True"
            if buffers.issuperset(attributes)
            else "make it a persistent buffer (register_buffer(..., persistent=True))"
        )
        note(
            f"beside {root}: {','.join(attributes)[:MAX_TEXT]}",
            f"{listed(attributes)} of the module {root}",
            "the training changes it, and it is in no state_dict, so that it begins as the program makes it",
            f"{how}, or keep it in the values that are saved and set it behind the resume",
        )
    if GRAD in names:
        differing = _differing(*names[GRAD], [name for name, _ in module.named_parameters()])
        note(
            f"beside {root}: {GRAD}",
            f"requires_grad of {len(differing)} parameters of {root} ({listed(differing)})",
            "the training changes it, and it is in no state_dict: they are frozen, or trained, as at the start",
            "set it behind the resume as the step or the epoch has it, before the first batch",
        )
    if MODE in names:
        was, now = (set(text.split(",")) - {""} for text in names[MODE])
        note(
            f"beside {root}: {MODE}",
            f"the mode of {listed(sorted(was ^ now))} in {root} (train or eval)",
            "the training changes it, and it is in no state_dict: it is as at the start",
            "call eval() or train() of that part behind the resume as the step or the epoch has it",
        )


def say_beside_optimizer(root: str, names: Collection[str]) -> None:
    """Say that a resume does not repeat what differs of an optimizer, by `note`."""
    if names:
        note(
            f"beside {root}: {','.join(names)[:MAX_TEXT]}",
            f"{listed(list(names))} of the optimizer {root}",
            "the training changes it, and it is in no state_dict, so that it begins as the program makes it",
            "give an optimizer within to the state by a name of its own, and let state_dict() of the class return the "
            "rest",
        )


def _differing(before: str, now: str, parameters: list[str]) -> list[str]:
    size, flags = before.partition(_OF)[0], [int(text.partition(_OF)[2], 16) for text in (before, now)]
    bits = f"{flags[0] ^ flags[1]:0{size}b}"
    return [name for name, bit in zip(parameters, bits, strict=False) if bit == "1"]


def listed(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
