"""The generators of Python, NumPy and torch that an object of the program holds, somewhere below it.

What is looked through are plain attributes, slots, short lists and dicts, modules, hooks, arguments of a partial, and
what a function closes over or names. Nothing of the program's is called: no property, no `__getattr__`, no method.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from resilience_sdk.core.resume_limits import note

_MAX_DEPTH = 4
_MAX_LOOKED_AT = 256
_MAX_OF_MODULES = 50_000
"""Objects that are looked at below each object of a training, such as its model; some ten milliseconds."""
_MAX_MEMBERS = 16
"""Of a list or a dict: a pipeline has few, and samples are not looked through."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""What of a module's own may hold objects of the program, beside its children."""
_CLOSED = (
    *("asyncio", "comet_ml", "concurrent", "logging", "mlflow", "multiprocessing", "resilience_sdk", "socket"),
    *("tempfile", "tensorboard", "threading", "wandb"),
)
"""Packages whose objects are not looked through: what trackers and the like draw are names, and need to be new."""
_FRAMEWORKS = ("accelerate", "deepspeed", "lightning", "lightning_fabric", "pytorch_lightning")
"""Nor are objects of these below a model: a trainer leads everywhere."""
_CONTAINERS = (dict, OrderedDict, list, tuple, set, frozenset)
_VALUES = (type(None), bool, int, float, complex, str, bytes, bytearray, range, type, types.ModuleType)


def generators_below(owner: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the generators that an object holds at most four levels down, by the way to them from `name`.

    Modules inside of modules are no further down.
    """
    yield from _Search(_MAX_LOOKED_AT, _MAX_DEPTH, (), _CLOSED).below(owner, name)


def held_generators(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generators that objects of a training hold, such as a module or a callback, each once.

    Not those of its loaders and samplers, which have a way of their own back to their place.
    """
    from torch.utils.data import DataLoader, Sampler
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    found: dict[str, Any] = {}
    search = _Search(
        _MAX_OF_MODULES, _MAX_DEPTH + 2, (DataLoader, Sampler, _BaseDataLoaderIter), (*_CLOSED, *_FRAMEWORKS)
    )
    for name, item in objects.items():
        found.update(search.below(item, name))
    for name in search.cut_short[:1]:
        note(
            "held limit",
            f"a generator that lies deep in {name}",
            f"more than {_MAX_OF_MODULES:,} objects are below it, and no more were looked at, those near the top first",
            "hold the generator in an attribute of its own there, or give it to what is saved by itself",
        )
    return found


def is_generator(value: Any) -> bool:
    """Tell whether an object is a generator with a state, and none of those of the process."""
    import torch

    return isinstance(value, (torch.Generator, *_kinds())) and not _is_of_process(value)


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy.random")
    return (random.Random,) if numpy is None else (random.Random, numpy.Generator, numpy.RandomState)


def _is_of_process(generator: Any) -> bool:
    import torch

    legacy = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    owned = (torch.default_generator, getattr(random, "_inst", None), legacy, *torch.cuda.default_generators)
    return isinstance(generator, random.SystemRandom) or any(generator is one for one in owned)


_Part = tuple[str, Any, int]
"""A way, what is there, and how far down it is."""


class _Search:
    """Looks at each object once, breadth first, and at no more than `limit` below one that it is given.

    Not through objects of classes `apart`, nor of packages `closed`.
    """

    def __init__(self, limit: int, depth: int, apart: tuple[type, ...], closed: tuple[str, ...]) -> None:
        import torch

        self._limit, self._depth, self._apart, self._closed = limit, depth, apart, closed
        self.cut_short: list[str] = []
        """What had more objects below it."""
        self._seen: dict[int, Any] = {}  # held, so that no other object has its number
        self._kinds = (torch.Generator, *_kinds())
        self._module, self._values = torch.nn.Module, (*_VALUES, torch.Tensor)
        self._of_modules = frozenset(vars(torch.nn.Module())) - {*_HOOKS}
        self._plain: dict[type, bool] = {}
        self._of_classes: dict[type, list[tuple[str, Any]]] = {}

    # By `type(value)`, not `isinstance`, which asks some objects for their `__class__`.

    def below(self, owner: Any, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the generators below `owner`, by the way to them."""
        left: deque[_Part] = deque([(name, owner, 0)])
        limit = len(self._seen) + self._limit
        while left:
            if len(self._seen) >= limit:
                self.cut_short.append(name)
                return
            place, value, depth = left.popleft()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            kind = type(value)
            if issubclass(kind, self._kinds):
                if not _is_of_process(value):
                    yield place, value
                continue
            if issubclass(kind, self._module):
                self._extend(left, place, depth, _children(value))
                self._extend(left, place, depth + 1, self._attributes(value, self._of_modules))
            elif depth < self._depth:
                self._extend(left, place, depth + 1, self._members(value))

    def _extend(self, left: deque[_Part], place: str, depth: int, parts: Iterable[tuple[Any, Any]]) -> None:
        plain = self._plain
        for part, item in parts:
            kind = type(item)
            if kind not in plain:
                plain[kind] = issubclass(kind, self._values)
            if not (plain[kind] or (kind in _CONTAINERS and not item)):
                left.append((f"{place}.{part}", item, depth))

    def _members(self, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if issubclass(kind, functools.partial):
            yield from [("func", value.func), *self._members(value.args), *self._members(value.keywords)]
        elif kind is types.MethodType:
            yield "self", value.__self__
        elif kind is types.FunctionType:
            yield from self._of_function(value)
        elif issubclass(kind, (list, tuple)):
            plain: Any = list if issubclass(kind, list) else tuple
            items = plain.__getitem__(value, slice(_MAX_MEMBERS))
            yield from ((str(number), item) for number, item in enumerate(items))
        elif issubclass(kind, dict):
            if dict.__len__(value) <= _MAX_MEMBERS:
                # Hooks have numbers of the process as their keys.
                items = enumerate(list(dict.items(value)))
                yield from ((name if type(name) is str else str(number), item) for number, (name, item) in items)
        elif str(kind.__module__).partition(".")[0] not in self._closed and not issubclass(kind, self._apart):
            yield from self._attributes(value)

    def _attributes(self, value: Any, but: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
        """Yield what an object and its class hold, as they are there: without a property, without `__getattr__`."""
        held, kind = _dict_of(value), type(value)
        for name in [name for name in held if name not in but]:
            yield name, held.get(name)
        if kind not in self._of_classes:
            self._of_classes[kind] = list(self._of_class(kind))
        for name, item in self._of_classes[kind]:
            if type(item) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # nothing is in the slot yet
                    yield name, item.__get__(value, kind)
            elif name not in held:
                yield name, item

    def _of_class(self, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield slots, the generators of a class, and those that its methods name, of classes of the program's own."""
        for one in kind.__mro__:
            if str(one.__module__).partition(".")[0] in ("builtins", "torch", "numpy", *_CLOSED, *_FRAMEWORKS):
                continue
            slots = vars(one).get("__slots__", ())
            for name, item in list(vars(one).items()):
                if issubclass(type(item), self._kinds) or (slots and type(item) is types.MemberDescriptorType):
                    yield name, item
                for part, found in self._named(_function_of(item)):
                    if issubclass(type(found), self._kinds):
                        yield f"{name}.{part}", found

    def _of_function(self, value: types.FunctionType) -> Iterator[tuple[str, Any]]:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # nothing is bound to the name yet
                yield name, cell.cell_contents
        yield from ((str(number), item) for number, item in enumerate(value.__defaults__ or ()))
        yield from (value.__kwdefaults__ or {}).items()
        for name, item in self._named(value):
            of = item.__module__ if type(item) is types.FunctionType else type(item).__module__
            is_beside = of == value.__module__ and not issubclass(type(item), self._module)
            if issubclass(type(item), self._kinds) or is_beside:
                yield name, item

    @staticmethod
    def _named(value: types.FunctionType | None) -> Iterator[tuple[str, Any]]:
        """Yield what a function, and the functions and comprehensions in it, may mean by the names of its module."""
        if value is None:
            return
        left, names = [value.__code__], dict[str, None]()
        while left:
            code = left.pop()
            names |= dict.fromkeys(code.co_names)
            left += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        globals_ = value.__globals__
        yield from ((name, globals_[name]) for name in names if name in globals_)


def _function_of(item: Any) -> types.FunctionType | None:
    """Return the function of a method in its class, below decorators that say what they wrap."""
    found = item.__func__ if type(item) in (staticmethod, classmethod) else item
    for _ in range(_MAX_DEPTH):
        if type(found) is types.FunctionType and "__wrapped__" in found.__dict__:
            found = found.__dict__["__wrapped__"]
    return found if type(found) is types.FunctionType else None


def _children(module: Any) -> list[tuple[str, Any]]:
    found = _dict_of(module).get("_modules")
    return list(found.items()) if isinstance(found, dict) else []


def _dict_of(value: Any) -> dict[Any, Any]:
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held if isinstance(held, dict) else {}
