"""Progress of a process that does not beat by itself: each step of a torch optimizer is a pulse.

The hook is global (`register_optimizer_step_post_hook`) and is installed when `torch.optim` is imported, or
at once if it is there already. A script that beats by itself takes over with its first heartbeat.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_MODULE = "torch.optim.optimizer"
_is_installed = _is_needed = False


def install(pulse: Callable[[], bool]) -> None:
    """Call `pulse()` after every optimizer step of this process, from now or from the import of torch.optim on.

    Until it returns False, since the script beats by itself; then not before this is called again.
    """
    global _is_installed, _is_needed
    _is_needed = True
    if _is_installed:
        return
    _is_installed = True
    module = sys.modules.get(_MODULE)
    if module is not None:
        _register(module, pulse)
    else:
        sys.meta_path.insert(0, _Watcher(pulse))


def was_one_made() -> bool:
    """Tell whether this process has made an optimizer of torch, which wraps `step` of its class then. Any thread.

    Nothing of ours is put around anything for that: a script must find torch as it is elsewhere.
    """
    root = getattr(sys.modules.get(_MODULE), "Optimizer", None)
    classes = [] if root is None else [root]
    while classes:
        one = classes.pop()
        if getattr(vars(one).get("step"), "hooked", False):
            return True
        classes += type.__subclasses__(one)
    return False


def _register(module: ModuleType, pulse: Callable[[], bool]) -> None:
    stepped: set[int] = set()  # the optimizers since the last pulse

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        global _is_needed
        if not _is_needed:
            return
        # Of several in turn (a GAN's, one for each kind of parameters) the first alone is a step of the loop. One
        # that is new misses one pulse at most.
        me = id(optimizer)
        if stepped and me not in stepped:
            stepped.add(me)
            return
        stepped.clear()
        stepped.add(me)
        _is_needed = pulse()

    module.register_optimizer_step_post_hook(after_step)


class _Watcher(importlib.abc.MetaPathFinder):
    """Lets the import of one module go its usual way, and acts when it is done."""

    def __init__(self, pulse: Callable[[], bool]) -> None:
        self._pulse = pulse

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, pulse = spec.loader, self._pulse
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module, pulse)

        loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
