"""State that hooks of the program on modules, parameters and optimizers keep from step to step: no `state_dict` has it.

A hook is a function or an object. It keeps numbers, arrays, tensors, and containers of these in its object, its
closure, its arguments, or in variables of the script; in one object of the program further in, too. What counts is
named by the code of the hook and of the methods that it calls, so that a hook that holds the whole program shows what
it uses alone. Hooks of libraries and of the SDK do not count, nor objects with a `state_dict`, which are saved as such.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, cast

import attrs
from torch import nn

from resilience_sdk.checkpoint.beside import (
    MAX_TEXT,
    PLAIN,
    holds_weights,
    is_installed,
    is_state,
    listed,
    sample,
    shape_of,
)
from resilience_sdk.checkpoint.digests import digests_of
from resilience_sdk.core.resume_limits import note

HOOK = "(hook) "
"""How the names of these entries begin."""
_OURS = "resilience_sdk"
_MAX_HOOKS = 256
_MAX_CODES = 64
_OF_MODULE = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZER = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Codes = tuple[types.CodeType, ...]


def hooks_of_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the hooks on these modules and on their own parameters."""
    found: list[Any] = []
    for one in modules:
        for name in _OF_MODULE:
            if hooks := one.__dict__.get(name):
                found += hooks.values()
        for weight in one._parameters.values():
            for name in _OF_TENSOR if weight is not None else ():
                if hooks := getattr(weight, name, None):
                    found += hooks.values()
    return found


def hooks_of_optimizer(optimizer: Any) -> list[Any]:
    """Return the hooks on an optimizer's steps."""
    return [hook for name in _OF_OPTIMIZER for hook in (getattr(optimizer, name, None) or {}).values()]


def beside_hooks(hooks: Iterable[Any], saved: Collection[int]) -> dict[str, str]:
    """Return what hooks keep, by names: a text that differs where the thing does. `saved`: by `id`, what is saved."""
    kept: dict[str, Any] = {}
    seen = set(saved)
    for hook in itertools.islice(hooks, _MAX_HOOKS):
        for name, value in _kept_by(hook, seen):
            place = next(each for each in _numbered(HOOK + name) if each not in kept)
            kept[place] = value
    return texts_of(kept)


def texts_of(kept: Mapping[str, Any]) -> dict[str, str]:
    """Return a text of each thing that differs where it does; none of what cannot be looked at."""
    found = {name: f"{value!r}"[:MAX_TEXT] for name, value in kept.items() if type(value) in PLAIN}
    rest = {name: value for name, value in kept.items() if name not in found}
    digests = digests_of({name: sample(value) for name, value in rest.items()})
    return found | {name: f"{shape_of(rest[name])}{digest}" for name, digest in digests.items()}


def say_beside_hooks(root: str, names: Collection[str]) -> None:
    """Say that a resume does not repeat what hooks on a module or an optimizer keep, by `note`."""
    if names:
        words = [name.removeprefix(HOOK) for name in names]
        note(
            f"hooks {root}: {','.join(words)[:MAX_TEXT]}",
            f"{listed(words)} of the hooks on {root}",
            "the training changes it, and it is in no state_dict, so that it begins as the program makes it",
            "let its object have state_dict() and load_state_dict(), and save it with the rest (an entry of state, "
            "register_for_checkpointing(), a callback), or keep it in a persistent buffer of the model",
        )


def _numbered(name: str) -> Iterator[str]:
    yield name
    for number in itertools.count(2):
        yield f"{name} ({number})"


def _kept_by(hook: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Return what one hook keeps; `seen`: what is saved, or was found before."""
    given: list[Any] = []
    named: dict[str, Any] = {}
    while isinstance(hook, functools.partial):
        given += hook.args
        named |= hook.keywords
        hook = hook.func
    owner: Any = None
    if isinstance(hook, types.MethodType):
        owner, hook = hook.__self__, hook.__func__
    elif not isinstance(hook, types.FunctionType):
        owner, hook = hook, inspect.getattr_static(type(hook), "__call__", None)
    function = inspect.unwrap(hook) if callable(hook) else None
    if not isinstance(function, types.FunctionType) or _is_foreign(function):
        return
    label = function.__qualname__.rpartition(".")[2] if owner is None else type(owner).__name__
    codes: Codes = (function.__code__, *_within(function.__code__))
    if owner is not None:
        yield from _of_object(label, owner, codes, seen, 1)
    used = uses(codes)
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    named |= dict(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
    named |= {**(function.__kwdefaults__ or {}), **dict(zip(parameters, given, strict=False))}
    named |= {name: value for name, value in _cells(function) if name not in named}
    known = function.__globals__
    named = {name: value for name, value in named.items() if name in used.variables}
    named |= {name: known[name] for name in sorted(used.of_script) if name in known and name not in named}
    for name, value in named.items():
        if _counts(value, name in used.set_variables, seen):
            yield f"{label}: {name}", value
        elif owner is None or value is not owner:
            yield from _of_object(f"{label}: {name}", value, codes, seen, 1)


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is empty yet
            continue


def _of_object(place: str, owner: Any, codes: Codes, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Return what an object of the program keeps of what these codes, and its methods that they call, name."""
    kind = type(owner)
    attributes = getattr(owner, "__dict__", None)
    is_theirs = not (isinstance(owner, (nn.Module, type, types.FunctionType, types.ModuleType)) or _is_foreign(kind))
    if not is_theirs or not isinstance(attributes, dict) or hasattr(kind, "state_dict") or id(owner) in seen:
        return
    seen.add(id(owner))
    codes = methods_called(cast("Hashable", kind), codes)
    used = uses(codes)
    for name, value in list(attributes.items()):
        if name not in used.attributes:
            continue
        if _counts(value, name in used.set_attributes, seen):
            yield f"{place}.{name}", value
        elif depth:
            yield from _of_object(f"{place}.{name}", value, codes, seen, depth - 1)


def _counts(value: Any, is_written: bool, seen: set[int]) -> bool:
    """Tell whether a value that is read may be a state. A number is one where the code sets it."""
    if type(value) in PLAIN:
        return is_written
    if not is_state(value, seen) or id(value) in seen or holds_weights(value, seen):
        return False
    seen.add(id(value))
    return True


def _is_foreign(one: Any) -> bool:
    """Tell whether a class or a function is a library's, of the standard library, or of the SDK."""
    first = str(one.__module__).partition(".")[0]
    return first == _OURS or first in sys.stdlib_module_names or is_installed(one)


@functools.lru_cache(maxsize=256)
def methods_called(kind: Any, codes: Codes) -> Codes:
    """Return these codes, and those of the methods of a program's class that they call, or which call one another."""
    methods: dict[str, types.CodeType] = {}
    for one in reversed(kind.__mro__):
        if not _is_foreign(one):
            methods |= {name: code for name, item in vars(one).items() if (code := _code_of(item)) is not None}
    found, left = [*codes], ["__call__"]
    left += [name for code in codes for name in code.co_names]
    asked: set[str] = set()
    while left and len(found) < _MAX_CODES:
        name = left.pop()
        if name in asked or name not in methods:
            continue
        asked.add(name)
        more = [methods[name], *_within(methods[name])]
        found += more
        left += [one for code in more for one in code.co_names]
    return tuple(found)


def _code_of(item: Any) -> types.CodeType | None:
    item = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
    function = inspect.unwrap(item) if callable(item) else None
    return function.__code__ if isinstance(function, types.FunctionType) else None


def _within(code: types.CodeType) -> list[types.CodeType]:
    """Return the codes of what is defined within one."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return [*inner, *(each for one in inner for each in _within(one))]


@attrs.frozen
class Uses:
    """The names that codes read, and those that they set."""

    attributes: frozenset[str]
    variables: frozenset[str]
    """Of the function, its arguments and its closure."""
    of_script: frozenset[str]
    set_attributes: frozenset[str]
    set_variables: frozenset[str]


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_OF_SCRIPT = ("LOAD_GLOBAL", "LOAD_NAME")


@functools.lru_cache(maxsize=256)
def uses(codes: Codes) -> Uses:
    """Return what codes use. Where an item alone is set, as of a dict of what a layer has given, its container is not
    read.
    """
    found: dict[str, set[str]] = {one.name: set() for one in attrs.fields(Uses)}
    for code in codes:
        instructions = list(dis.get_instructions(code))
        for at, one in enumerate(instructions):
            kind = ""
            if one.opname == "STORE_ATTR":
                kind = "set_attributes"
            elif one.opname in ("STORE_DEREF", "STORE_GLOBAL"):
                kind = "set_variables"
            elif one.opname.startswith("LOAD_") and one.opname != "LOAD_CONST" and not _is_set_at(instructions, at):
                is_attribute, is_of_script = one.opname in _ATTRIBUTES, one.opname in _OF_SCRIPT
                kind = "attributes" if is_attribute else "of_script" if is_of_script else "variables"
            if kind:
                found[kind] |= set(map(str, one.argval)) if isinstance(one.argval, tuple) else {str(one.argval)}
    return Uses(**{name: frozenset(names) for name, names in found.items()})


def _is_set_at(instructions: list[dis.Instruction], at: int) -> bool:
    """Tell whether what is loaded there is only the container of an item that is set."""
    for one in instructions[at + 1 :]:
        if one.opname == "STORE_SUBSCR":
            return True
        if not one.opname.startswith(("LOAD_", "BINARY_SUBSCR", "PRECALL", "CACHE")):
            return False
    return False


def saved_ids(module: nn.Module) -> frozenset[int]:
    """Return what a module saves by itself, by `id`: parameters, buffers and parts."""
    return frozenset(map(id, itertools.chain(module.parameters(), module.buffers(), module.modules())))
