"""Progress of a process that does not beat by itself: each step of a torch optimizer is a pulse.

The hook is global (`register_optimizer_step_post_hook`) and is installed when `torch.optim` is imported, or
at once if it is there already. A script that beats by itself takes over with its first heartbeat.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from resilience_sdk.rank.optimizer_turns import OptimizerTurns, call_place
from resilience_sdk.system.imports import when_imported

_MODULE = "torch.optim.optimizer"
_is_installed = _is_needed = False


def install(pulse: Callable[[], bool], take_back: Callable[[int], None] = lambda _: None) -> None:
    """Call `pulse()` after every step of the loop, as the optimizers tell, from now or the import of torch.optim on.

    Until it returns False, since the script beats by itself; then not before this is called again. `take_back(n)`
    comes before a pulse, where the last `n` pulses turned out to be of one step.
    """
    global _is_installed, _is_needed
    _is_needed = True
    if _is_installed:
        return
    _is_installed = True
    when_imported(_MODULE, lambda module: _register(module, pulse, take_back))


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


def _register(module: ModuleType, pulse: Callable[[], bool], take_back: Callable[[int], None]) -> None:
    turns = OptimizerTurns()
    plain, stepped = turns.plain, turns.stepped

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        global _is_needed
        if not _is_needed:
            return
        me = id(optimizer)
        if me == turns.only:  # the one that most programs have: nothing more is asked
            turns.steps += 1
        elif me in plain:  # the same as `counts`, which costs a call
            if me not in stepped:
                stepped.add(me)
                return
            stepped.clear()
            stepped.add(me)
            turns.steps += 1
        elif not turns.counts(me, call_place):
            if turns.surplus:
                take_back(turns.surplus)
                turns.surplus = 0
            return
        _is_needed = pulse()

    module.register_optimizer_step_post_hook(after_step)
