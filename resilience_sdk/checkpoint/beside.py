"""Things that a module holds beside its `state_dict`: no checkpoint has them, so what changes of them is said.

These are `requires_grad` of its parameters, submodules in another mode than the module itself, and attributes that are
numbers, texts, arrays, containers of these, or tensors that are no parameters and no persistent buffers.

A program may set such a thing in each step, or behind a resume as the step has it. So what counts is how it is at one
moment alone: when the module, or a part of it, is called for the first time. What was changed by the save and is at
the first call behind a resume as it was at the first call of the training has begun anew.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from resilience_sdk.checkpoint.digests import digests_of
from resilience_sdk.checkpoint.ranks import describe
from resilience_sdk.core.console import say_once
from resilience_sdk.core.resume_limits import note

GRAD, MODE = "(requires_grad)", "(mode)"
"""The entries that are no attributes."""
_MAX_MODULES = 20_000
_MAX_NAMED = 4
_MAX_TEXT = 4_096
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
_PLAIN = (bool, int, float, complex, str)

Beside = Mapping[str, str]
"""A text that differs where the thing of that name differs."""


def beside_state(module: nn.Module) -> dict[str, str]:
    """Return what a module holds beside its `state_dict`, by names. Nothing of the program's is called.

    Modes are known where the module itself is in training. Of a library's modules numbers with a fraction alone count.
    """
    named = list(module.named_modules())
    if len(named) > _MAX_MODULES:
        return {}
    found: dict[str, str] = {}
    if not any(type(one).__name__ == "FullyShardedDataParallel" for _, one in named):
        bits = "".join("01"[param.requires_grad] for param in module.parameters())
        found[GRAD] = f"{len(bits)}{_OF}{int(bits or '0', 2):x}"
    if module.training:
        found[MODE] = ",".join(name for name, one in named if not one.training)
    known = {id(one) for one in module.parameters()}
    known |= {id(one) for _, part in named for one in _persistent(part)}
    looked_at: dict[str, Any] = {}
    for place, part in named:
        for name, value in _attributes(part, known):
            where = f"{place}.{name}" if place else name
            if isinstance(value, _PLAIN):
                found[where] = f"{value!r}"[:_MAX_TEXT]
            else:
                looked_at[where] = value
    for name, digest in digests_of({name: _sample(value) for name, value in looked_at.items()}).items():
        found[name] = f"{_shape(looked_at[name])}{digest}"
    return found


def _persistent(module: nn.Module) -> Iterator[torch.Tensor]:
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield buffer


def _attributes(module: nn.Module, known: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield what may be a state of one module; not what it puts into its `state_dict` by itself."""
    is_apart, is_installed, of_bases, no_state = _class_of(cast(Hashable, type(module)))
    if is_apart:
        return
    held = {name: value for name, value in vars(module).items() if name not in no_state}
    held |= {name: module._buffers[name] for name in module._non_persistent_buffers_set}
    for name, value in held.items():
        if is_installed:
            if type(value) is float and not name.startswith("_"):
                yield name, value
        elif not name.startswith("__") and not (of_bases and name.startswith("_")) and name not in of_bases:
            if type(value) in _PLAIN or _is_state(value, known):
                yield name, value
            elif _is_object_of_program(value):
                for key, one in vars(value).items():
                    if type(one) in _PLAIN or _is_state(one, known):
                        yield f"{name}.{key}", one


@functools.lru_cache(maxsize=1024)
def _class_of(kind: Any) -> tuple[bool, bool, frozenset[str], frozenset[str]]:
    """Return whether a class of modules saves all by itself, whether it is a library's, and names that are no state.

    These are of its bases from libraries; and of every module, or what its methods set and never read.
    """
    is_apart = any(one.__module__.partition(".")[0] in _APART for one in kind.__mro__) or _saves_more(kind)
    return is_apart, _is_installed(kind), _names_of_bases(kind), _OF_MODULE | _left_behind(kind)


def _left_behind(kind: type) -> frozenset[str]:
    """Return the attributes that methods set for others to read, such as the last loss: they are set again by then."""
    own = [one for one in kind.__mro__ if not _is_installed(one)]
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
    bases = [one for one in kind.__mro__ if _is_installed(one) and not one.__module__.startswith("torch.")]
    functions = [item for one in bases for item in vars(one).values() if isinstance(item, types.FunctionType)]
    return frozenset(name for function in functions for name in function.__code__.co_names)


def _saves_more(kind: type) -> bool:
    own = ("get_extra_state", "state_dict", "_save_to_state_dict")
    return any(getattr(kind, name, None) is not getattr(nn.Module, name) for name in own) and not _is_installed(kind)


def _is_installed(kind: type) -> bool:
    """Tell whether a class is one of a library, not of the program's own."""
    if kind.__module__ in ("builtins", "abc"):
        return False
    if kind.__module__.partition(".")[0] in _LIBRARIES:
        return True
    path = str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    return any(name in path for name in _INSTALLED)


def _is_state(value: Any, known: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return id(value) not in known and not value.requires_grad and not value.is_inference()
    if type(value).__module__ == "numpy":
        return hasattr(value, "tobytes") and value.dtype.kind != "O"
    return isinstance(value, (list, tuple, dict, set, deque))


def _sample(value: Any) -> Any:
    """Return a container as digests know it; of a large one its length and its ends."""
    if isinstance(value, (dict, set)):
        return value if len(value) <= _MAX_ITEMS else len(value)
    if not isinstance(value, (list, tuple, deque)):
        return value
    if len(value) <= _MAX_ITEMS:
        return list(value)
    return [len(value), *(value[at] for at in range(-_ENDS, _ENDS))]


def _is_object_of_program(value: Any) -> bool:
    kind = type(value)
    is_plain = not isinstance(value, (nn.Module, type)) and isinstance(getattr(value, "__dict__", None), dict)
    is_of_library = _is_installed(kind) or kind.__module__.partition(".")[0] in sys.stdlib_module_names
    return is_plain and not is_of_library and not callable(value) and not hasattr(kind, "state_dict")


def _shape(value: Any) -> str:
    """Return what is another one where a value was made from something else, and not changed."""
    return f"{tuple(value.shape) if hasattr(value, 'shape') else type(value).__name__}{_OF}"


def changed(before: Beside, now: Beside) -> dict[str, tuple[str, str]]:
    """Return what differs of things that were there before: how it was and how it is. Pure.

    A tensor or an array of another shape is none: it is what the last call has left behind.
    """
    both = [name for name in now if before.get(name, now[name]) != now[name]]
    alike = [name for name in both if name == MODE or _kind(before[name]) == _kind(now[name])]
    return {name: (before[name], now[name]) for name in alike}


def _kind(text: str) -> str:
    return text.partition(_OF)[0] if _OF in text else ""


def say_beside(root: str, names: Mapping[str, tuple[str, str]], parameters: list[str]) -> None:
    """Say that a resume does not repeat what differs, by `note`. `parameters`: the names of the module's."""
    attributes = [name for name in names if name not in (GRAD, MODE)]
    if attributes:
        note(
            f"beside {root}: {','.join(attributes)[:_MAX_TEXT]}",
            f"{_listed(attributes)} of the module {root}",
            "the training changes it, and it is in no state_dict, so that it begins as the program makes it",
            "make it a buffer (register_buffer), or keep it in the values that are saved and set it behind the resume",
        )
    if GRAD in names:
        differing = _differing(*names[GRAD], parameters)
        note(
            f"beside {root}: {GRAD}",
            f"requires_grad of {len(differing)} parameters of {root} ({_listed(differing)})",
            "the training changes it, and it is in no state_dict: they are frozen, or trained, as at the start",
            "set it behind the resume as the step or the epoch has it, before the first batch",
        )
    if MODE in names:
        was, now = (set(text.split(",")) - {""} for text in names[MODE])
        note(
            f"beside {root}: {MODE}",
            f"the mode of {_listed(sorted(was ^ now))} in {root} (train or eval)",
            "the training changes it, and it is in no state_dict: it is as at the start",
            "call eval() or train() of that part behind the resume as the step or the epoch has it",
        )


def _differing(before: str, now: str, parameters: list[str]) -> list[str]:
    size, flags = before.partition(_OF)[0], [int(text.partition(_OF)[2], 16) for text in (before, now)]
    bits = f"{flags[0] ^ flags[1]:0{size}b}"
    return [name for name, bit in zip(parameters, bits, strict=False) if bit == "1"]


def _listed(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _inert(*_: Any) -> None:
    """Stand for the hook in a copy of the module."""


def _make_inert() -> Callable[..., None]:
    return _inert


class _FirstCall:
    """A hook that calls something when a module is called in training; a copy of the module has none."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not torch.is_grad_enabled():
            return
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):  # which forbids to read
            self._work()

    def __deepcopy__(self, _: Any) -> Callable[..., None]:
        return _inert

    def __reduce__(self) -> Any:
        return _make_inert, ()


class _Root:
    """One module of the training."""

    def __init__(self, name: str, item: nn.Module, module: nn.Module) -> None:
        self.name, self.item, self.module = name, item, module
        self.begun: dict[str, str] | None = None
        """How it was at the first call of this process."""
        self.saved: dict[str, list[Any]] = {}
        """Of the checkpoint that was resumed: at the first call of the training, at the save, whether it stays."""
        self.asked: dict[str, str] = {}
        """What was changed by a save of this process, until the next call tells whether it stays."""
        self.stays: set[str] = set()
        self.passes: set[str] = set()
        """What is at each call as it was at the first: the program changes it in the midst of a step."""
        self.moves: set[str] = set()
        """What the program has set anew before the next call: whether it would do so behind a resume is not known."""
        self.unsure: dict[str, tuple[str, str]] = {}
        """What may be lost, until a step is complete."""
        self._hooks: list[Any] = []

    def await_call(self, work: Callable[[_Root], None]) -> None:
        """Call `work` once, when the module, or a part of it, is called next in training."""

        def called() -> None:
            if self.module.training:
                self.leave()
                work(self)

        if not self._hooks:
            hook = _FirstCall(called)
            self._hooks = [one.register_forward_pre_hook(hook, prepend=True) for one in _called(self.item)]

    def leave(self) -> None:
        """Take the hooks off."""
        for one in self._hooks:
            one.remove()
        self._hooks = []

    @property
    def parameters(self) -> list[str]:
        return [name for name, _ in self.module.named_parameters()]


def _called(item: nn.Module) -> list[nn.Module]:
    """Return what is called of a module: itself and the parts right below, which a loop may call one by one.

    Nothing within what is compiled, which would be compiled anew for a hook.
    """
    if hasattr(item, "_orig_mod"):
        return [item]
    if any(getattr(one, "_compiled_call_impl", None) is not None for one in item.modules()):
        return []
    inner: Any = getattr(item, "module", None)  # of DDP
    found, left = [item], list(item.children())
    while left:
        part = left.pop()
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)) or part is inner:
            left += list(part.children())
        found.append(part)
    return [one for one in found if not isinstance(one, torch.jit.ScriptModule)]


class BesideState:
    """What the modules of `objects()` hold beside their states; of the thread that trains. Nothing here raises."""

    def __init__(self, objects: Callable[[], Mapping[str, Any]], unwrap: Callable[[Any], Any]) -> None:
        """`unwrap` takes wrappers off a module."""
        self._objects, self._unwrap = [objects], unwrap
        self._roots: dict[str, _Root] = {}
        self._saved: Mapping[str, Any] = {}
        self._is_resumed = False
        self.values: Mapping[str, Any] = {}
        """What the program saves of its own: what is in there as well is not lost."""
        self.is_unsure = False
        """Whether `look` has something to do."""

    def also(self, objects: Callable[[], Mapping[str, Any]]) -> None:
        """Look at these modules, too."""
        self._objects.append(objects)

    def begin(self) -> None:
        """Look at each module when it is called for the first time from now on. May be repeated."""
        try:
            self._find()
        except Exception as error:  # noqa: BLE001 - modules of somebody else's kind
            self._note(error)

    def _find(self) -> None:
        for name, item in [named for objects in self._objects for named in objects().items()]:
            if isinstance(item, nn.Module) and name not in self._roots:
                module = self._unwrap(item)
                if any(one.module is module for one in self._roots.values()):
                    continue
                self._roots[name] = root = _Root(name, item, module)
                saved = self._saved.get(name)
                root.saved = dict(saved) if isinstance(saved, Mapping) else {}
                root.await_call(self._first_call)

    def resume(self, saved: Any) -> None:
        """Take what `capture` gave at the save, before `begin`. Anything, for it comes from a file."""
        for root in self._roots.values():  # of the part of a training that was taken back
            root.leave()
        self._is_resumed, self._roots = True, {}
        self._saved = saved if isinstance(saved, Mapping) else {}

    def capture(self) -> dict[str, Any]:
        """Return what has changed since the start of the training, as a JSON value."""
        found: dict[str, Any] = {}
        try:
            self._find()
            for root in self._roots.values():
                if changes := self._changes(root):
                    found[root.name] = changes
        except Exception as error:  # noqa: BLE001 - a save is not lost over it
            self._note(error)
        return found

    def _changes(self, root: _Root) -> dict[str, list[Any]]:
        if root.begun is None:
            return root.saved  # it was not called: as it was
        now = beside_state(root.module)
        before = {**root.begun, **{name: str(entry[0]) for name, entry in root.saved.items()}}
        changes = changed(before, now)
        judged = root.stays | root.passes | root.moves
        asked = {name: text for name, (_, text) in changes.items() if name not in judged}
        if asked:
            root.asked = asked
            root.await_call(self._next_call)
        return {name: [*pair, name in root.stays] for name, pair in changes.items() if name not in root.passes}

    def _first_call(self, root: _Root) -> None:
        try:
            root.begun = beside_state(root.module)
            saved = {name: (str(one[0]), str(one[1])) for name, one in root.saved.items()}
            lost = {name: pair for name, pair in saved.items() if root.begun.get(name) == pair[0] != pair[1]}
            root.stays = {name for name, one in root.saved.items() if one[2]}
            # Of what one call alone has shown a program may still set it in each step.
            root.unsure = {name: pair for name, pair in lost.items() if name not in root.stays}
            self.is_unsure = self.is_unsure or bool(root.unsure)
            say_beside(root.name, {name: pair for name, pair in lost.items() if name in root.stays}, root.parameters)
        except Exception as error:  # noqa: BLE001 - a call of the model is not lost over it
            self._note(error)

    def look(self) -> None:
        """Say what is still as it was at the start. Behind a step."""
        self.is_unsure = False
        for root in self._roots.values():
            unsure, root.unsure = root.unsure, {}
            try:
                now = beside_state(root.module) if unsure else {}
                lost = {name: pair for name, pair in unsure.items() if now.get(name, pair[1]) != pair[1]}
                say_beside(root.name, lost, root.parameters)
            except Exception as error:  # noqa: BLE001 - as above
                self._note(error)

    def _next_call(self, root: _Root) -> None:
        """See whether what a save has found changed is still so: else the program sets it before a call."""
        try:
            now, asked, root.asked = beside_state(root.module), root.asked, {}
            stay = {name for name, text in asked.items() if now.get(name) == text}
            root.stays |= stay
            begun = root.begun or {}
            back = {name for name in asked if now.get(name) == begun.get(name)} - stay
            root.passes |= back
            # One part after the other may be unfrozen, which is no step's.
            root.moves |= set(asked) - stay - back - {GRAD, MODE}
            own = {name: (begun[name], asked[name]) for name in asked if name in stay and name in begun}
            if own and not self._is_resumed:  # behind a resume it would be no loss of this one
                say_beside(root.name, self._not_kept(root, own), root.parameters)
        except Exception as error:  # noqa: BLE001 - as above
            self._note(error)

    def _not_kept(self, root: _Root, found: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        """Leave out what the program saves by itself: in `values`, or in a hook of Lightning's."""
        kept = {f"{value!r}" for value in self.values.values()}
        kept |= {f"{_shape(self.values[name])}{digest}" for name, digest in digests_of(self.values).items()}
        hook = getattr(type(root.module), "on_save_checkpoint", None)
        saves = hook is not None and "lightning" not in str(getattr(hook, "__module__", "")).partition(".")[0]
        return {name: pair for name, pair in found.items() if name in (GRAD, MODE) or not (saves or pair[1] in kept)}

    @staticmethod
    def _note(error: Exception) -> None:
        say_once("beside the state", f"what modules hold beside their states is not compared: {describe(error)}")
