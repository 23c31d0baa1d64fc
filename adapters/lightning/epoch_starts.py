"""`on_train_epoch_start`, which Lightning does not call for the rest of an epoch that is resumed in its middle.

What such a hook has set is then as a new object has it. Lightning's own scheduler of the accumulation goes by the epoch
alone, and is asked again. Hooks of the user's are not called a second time, as they may count, and that is said.
"""

from __future__ import annotations

from typing import Any

from resilience_sdk.core.resume_limits import note

HOOK = "on_train_epoch_start"
_LIBRARIES = {"lightning", "pytorch_lightning", "resilience_sdk"}


def go_on(trainer: Any) -> None:
    """Set what Lightning's callbacks have set where this epoch began."""
    for one in trainer.callbacks:
        asked = getattr(one, "get_accumulate_grad_batches", None)
        if asked is not None and _is_of_library(_owner(one)):
            trainer.accumulate_grad_batches = asked(trainer.current_epoch)


def say_limits(trainer: Any) -> None:
    """Say which classes of the user's have that hook."""
    names = own_hooks([trainer.lightning_module, *trainer.callbacks])
    if names:
        note(
            "epoch starts",
            f"{HOOK} of {', '.join(names)} where it goes on in the middle of an epoch",
            "Lightning calls it at the begin of an epoch alone, so what it sets is as in a new object until the next "
            "one (where no step uses that the resume is exact)",
            "set it in on_train_batch_start, or save it by on_save_checkpoint, a buffer, or state_dict of the callback",
        )


def own_hooks(objects: list[Any]) -> list[str]:
    """Return the names of the classes among these that have that hook, and have it from no library. Pure."""
    found = [
        type(one).__name__ for one in objects if HOOK in getattr(one, "__dict__", ()) or not _is_of_library(_owner(one))
    ]
    return list(dict.fromkeys(found))


def _owner(one: Any) -> type:
    """Return the class that an object has the hook from."""
    return next((kind for kind in type(one).__mro__ if HOOK in vars(kind)), object)


def _is_of_library(kind: type) -> bool:
    return kind is object or kind.__module__.partition(".")[0] in _LIBRARIES
