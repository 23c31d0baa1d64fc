"""The moments at which it is looked at what modules and optimizers hold beside their states; what is lost is said.

A program may set such a thing in each step, or behind a resume as the step has it. So what counts is how it is at one
moment alone: when the module, or a part of it, is called for the first time, or the optimizer makes its first step.
What was changed by the save and is at the first call behind a resume as it was at the first call of the training has
begun anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from resilience_sdk.checkpoint.beside import (
    GRAD,
    MODE,
    Beside,
    beside_optimizer,
    beside_state,
    changed,
    is_alike,
    parts_of,
    say_beside,
    say_beside_optimizer,
    shape_of,
)
from resilience_sdk.checkpoint.beside_hooks import (
    HOOK,
    beside_hooks,
    hooks_of_modules,
    hooks_of_optimizer,
    saved_ids,
    say_beside_hooks,
)
from resilience_sdk.checkpoint.digests import digests_of
from resilience_sdk.checkpoint.ranks import describe
from resilience_sdk.core.console import say_once


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

    def __init__(self, name: str, item: Any, module: Any, given: Collection[int] = ()) -> None:
        """`module`: what `item` wraps; `given`: what is saved apart, by `id`."""
        self.name, self.item, self.module = name, item, module
        self._given = given
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
        self.made: dict[str, str] = {}
        """How buffers were that the first call has made, when they were seen first."""
        self._hooks: list[Any] = []

    def look(self) -> dict[str, str]:
        """Return what it and its hooks hold beside its state."""
        found = beside_state(self.module)
        hooks = hooks_of_modules(one for _, one in parts_of(self.module))
        return {**found, **beside_hooks(hooks, {*saved_ids(self.module), *self._given})} if hooks else found

    def say(self, names: Mapping[str, tuple[str, str]]) -> None:
        """Say that a resume does not repeat these."""
        say_beside(self.name, _without_hooks(names), self.module)
        say_beside_hooks(self.name, [name for name in names if name.startswith(HOOK)])

    def is_lost(self, _: str, now: str | None, begun: str, saved: str) -> bool:
        """Tell whether a thing has begun anew at a resume: by how it is now, was at the first call and at the save."""
        return now == begun != saved

    def before(self, now: Beside) -> dict[str, str]:
        """Return how it all was at the first call of the training; a buffer that was made by it: as it was made."""
        before = {**(self.begun or {}), **{name: str(entry[0]) for name, entry in self.saved.items()}}
        for name, _ in self.module.named_buffers() if isinstance(self.module, nn.Module) else ():
            if name in now and not is_alike(before.get(name, ""), now[name]):
                if not is_alike(self.made.get(name, ""), now[name]):
                    self.made[name] = now[name]
                before[name] = self.made[name]
        return before

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


class _OptimizerRoot(_Root):
    """One optimizer of the training, whose call is its step, or that of one within."""

    def __init__(self, name: str, item: torch.optim.Optimizer, given: Collection[int]) -> None:
        super().__init__(name, item, item, given)
        self._work: Callable[[_Root], None] | None = None

    def look(self) -> dict[str, str]:
        """Return what it and its hooks hold beside its state."""
        found = beside_optimizer(self.item, self._given)
        if hooks := hooks_of_optimizer(self.item):
            weights = {id(weight) for group in self.item.param_groups for weight in group["params"]}
            found |= beside_hooks(hooks, {*weights, *self._given})
        return found

    def say(self, names: Mapping[str, tuple[str, str]]) -> None:
        """Say that a resume does not repeat these."""
        say_beside_optimizer(self.name, _without_hooks(names))
        say_beside_hooks(self.name, [name for name in names if name.startswith(HOOK)])

    def is_lost(self, name: str, now: str | None, begun: str, saved: str) -> bool:
        """Tell whether a thing has begun anew: such as slow weights, of other weights than at the first call."""
        is_number = is_alike(saved, "")
        return super().is_lost(name, now, begun, saved) or (not is_number and name in self.stays and now != saved)

    def await_call(self, work: Callable[[_Root], None]) -> None:
        """Call `work` once, when it makes its next step."""
        self._work = work
        if not self._hooks:
            within = [one for one in vars(self.item).values() if isinstance(one, torch.optim.Optimizer)]
            for one in (self.item, *within):
                if hasattr(one, "_optimizer_step_pre_hooks"):  # not where its base was never made
                    self._hooks.append(hook := one.register_step_pre_hook(self._called))
                    # Before the program's, which would have changed what they keep.
                    if isinstance(hooks := one._optimizer_step_pre_hooks, OrderedDict):
                        hooks.move_to_end(hook.id, last=False)

    def _called(self, *_: Any) -> None:
        # The hook stays: torch forbids to take one off while it calls them.
        work, self._work = self._work, None
        if work is not None and not torch.compiler.is_compiling():
            work(self)

    def leave(self) -> None:
        """Take the hooks off; between two steps."""
        self._work = None
        super().leave()


def _without_hooks(names: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {name: pair for name, pair in names.items() if not name.startswith(HOOK)}


def _called(item: nn.Module) -> list[nn.Module]:
    """Return what is called of a module: itself and the parts right below, which a loop may call one by one.

    Nothing within what is compiled, which would be compiled anew for a hook, nor an encoder layer of torch's, which
    leaves its fast path, and so gives other bits, where it or a part of it has one.
    """
    if hasattr(item, "_orig_mod"):
        return [item]
    if any(getattr(one, "_compiled_call_impl", None) is not None for one in item.modules()):
        return []
    inner: Any = getattr(item, "module", None)  # of DDP
    found: list[nn.Module] = []
    left = [item]
    while left:
        part = left.pop()
        if isinstance(part, nn.TransformerEncoderLayer):
            continue
        if part is item or isinstance(part, (nn.ModuleList, nn.ModuleDict)) or part is inner:
            left += list(part.children())
        found.append(part)
    return [one for one in found if not isinstance(one, torch.jit.ScriptModule)]


class BesideState:
    """What modules and optimizers of `objects()` hold beside their states; of the thread that trains.

    Nothing here raises.
    """

    def __init__(self, objects: Callable[[], Mapping[str, Any]], unwrap: Callable[[Any], Any]) -> None:
        """`unwrap` takes wrappers off a module."""
        self._objects, self._unwrap = [objects], unwrap
        self._roots: dict[str, _Root] = {}
        self._saved: Mapping[str, Any] = {}
        self._is_resumed = False
        self.apart: Callable[[], Iterable[Any]] = tuple
        """Returns what is saved beside these objects."""
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
        all_of_it = {name: item for objects in self._objects for name, item in objects().items()}
        given = frozenset(map(id, (*all_of_it.values(), *self.apart())))
        for name, item in all_of_it.items():
            if name in self._roots:
                continue
            if isinstance(item, torch.optim.Optimizer):
                root: _Root = _OptimizerRoot(name, item, given)
            elif isinstance(item, nn.Module):
                root = _Root(name, item, self._unwrap(item), given)
                if any(one.module is root.module for one in self._roots.values()):
                    continue
            else:
                continue
            self._roots[name] = root
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
        now = root.look()
        changes = changed(root.before(now), now)
        judged = root.stays | root.passes | root.moves
        asked = {name: text for name, (_, text) in changes.items() if name not in judged}
        if asked:
            root.asked = asked
            root.await_call(self._next_call)
        return {name: [*pair, name in root.stays] for name, pair in changes.items() if name not in root.passes}

    def _first_call(self, root: _Root) -> None:
        try:
            root.begun = begun = root.look()
            saved = {name: (str(one[0]), str(one[1])) for name, one in root.saved.items()}
            root.stays = {name for name, one in root.saved.items() if one[2]}
            lost = {name: pair for name, pair in saved.items() if root.is_lost(name, begun.get(name), *pair)}
            # What is of another shape is made anew by this call.
            late = root.stays - {GRAD, MODE} - lost.keys()
            lost |= {name: saved[name] for name in late if not is_alike(begun.get(name, ""), saved[name][1])}
            # Of what one call alone has shown a program may still set it in each step.
            root.unsure = {name: pair for name, pair in lost.items() if name not in root.stays}
            self.is_unsure = self.is_unsure or bool(root.unsure)
            root.say({name: pair for name, pair in lost.items() if name in root.stays})
        except Exception as error:  # noqa: BLE001 - a call of the model is not lost over it
            self._note(error)

    def look(self) -> None:
        """Say what is still as it was at the start. Behind a step."""
        self.is_unsure = False
        for root in self._roots.values():
            unsure, root.unsure = root.unsure, {}
            try:
                now = root.look() if unsure else {}
                lost = {name: pair for name, pair in unsure.items() if now.get(name, pair[1]) != pair[1]}
                root.say(lost)
            except Exception as error:  # noqa: BLE001 - as above
                self._note(error)

    def _next_call(self, root: _Root) -> None:
        """See whether what a save has found changed is still so: else the program sets it before a call."""
        try:
            now, asked, root.asked = root.look(), root.asked, {}
            stay = {name for name, text in asked.items() if now.get(name) == text}
            root.stays |= stay
            begun = {**(root.begun or {}), **root.made}
            back = {name for name in asked if now.get(name) == begun.get(name)} - stay
            root.passes |= back
            # One part after the other may be unfrozen, which is no step's.
            root.moves |= set(asked) - stay - back - {GRAD, MODE}
            own = {name: (begun[name], asked[name]) for name in asked if name in stay and name in begun}
            if own and not self._is_resumed:  # behind a resume it would be no loss of this one
                root.say(self._not_kept(root, own))
        except Exception as error:  # noqa: BLE001 - as above
            self._note(error)

    def _not_kept(self, root: _Root, found: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        """Leave out what the program saves by itself: in `values`, or in a hook of Lightning's."""
        kept = {f"{value!r}" for value in self.values.values()}
        kept |= {f"{shape_of(self.values[name])}{digest}" for name, digest in digests_of(self.values).items()}
        hook = getattr(type(root.module), "on_save_checkpoint", None)
        saves = hook is not None and "lightning" not in str(getattr(hook, "__module__", "")).partition(".")[0]
        return {name: pair for name, pair in found.items() if name in (GRAD, MODE) or not (saves or pair[1] in kept)}

    @staticmethod
    def _note(error: Exception) -> None:
        say_once("beside the state", f"what modules hold beside their states is not compared: {describe(error)}")
