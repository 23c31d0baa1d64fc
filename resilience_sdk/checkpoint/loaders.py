"""The data loaders that travel with a state: known from the start, added later, or given to `attach`."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from resilience_sdk.checkpoint.generators import parts
from resilience_sdk.checkpoint.passes import (
    PassWatch,
    PlainPasses,
    SavedGenerators,
    are_between,
    begins_as_told,
    has_epoch,
    is_loader,
)
from resilience_sdk.checkpoint.worker_draws import WatchedWorkers
from resilience_sdk.core.iterated_class import plain_class
from resilience_sdk.core.resume_limits import lift, note

if TYPE_CHECKING:
    from resilience_sdk.checkpoint.capture import Restored
    from resilience_sdk.checkpoint.state import StateMap

ATTACHED = "attached.loader"
"""The entry of a loader that `attach` was given."""
_WALKED = "walked.loader"
"""That whose batches somebody else counts."""
_CURE = (
    "give the state torchdata's StatefulDataLoader (pip install 'resilience-sdk[data]'), make its iterators behind the "
    "resume, or train by run.steps()"
)

_ONE_SHOT = (zip, map, filter, enumerate, itertools.chain, itertools.cycle, itertools.islice)

_offered: list[weakref.ref[Any]] = []
_takers: weakref.WeakSet[TravellingLoaders] = weakref.WeakSet()


def offer(loader: Any) -> None:
    """Let the loader of a loop of one's own travel with what this process saves, also what it will save later."""
    try:
        _offered.append(weakref.ref(loader))
    except TypeError:
        return
    for taker in list(_takers):
        taker.take(loader)


def note_workers(loader: Any) -> None:
    """Say what is not exact of a loader whose workers give batches in any order."""
    kind = type(loader).__name__
    if not getattr(loader, "num_workers", 0):
        return
    if not getattr(loader, "in_order", True):
        note(
            "order of workers",
            f"the order in which the workers of {kind}(in_order=False) give their batches",
            "samples of this epoch may come twice or not at all",
            "use in_order=True",
        )


def forks_anew(loader: Any) -> bool:
    """Tell whether a loader has workers whose generators a resume cannot put back, nor repeat by reading again."""
    is_persistent = bool(getattr(loader, "persistent_workers", False))
    return bool(getattr(loader, "num_workers", 0)) and (hasattr(loader, "next_iter_state") or is_persistent)


def withdraw(loader: Any) -> None:
    """Let a loader travel with nothing that will be made from now on."""
    _offered[:] = [one for one in _offered if one() is not loader]


class TravellingLoaders:
    """The loaders of one `Checkpointer`, and what a resume has brought for those that are not known yet."""

    def __init__(self, state: StateMap, restore_rng: Callable[[], None], is_walked: Callable[[], bool]) -> None:
        """`is_walked()`: somebody else counts the batches of its loader, and sets the generators for it."""
        self._state = state
        self._restore_rng = restore_rng
        self._is_walked = is_walked
        self._pending: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}
        self._drawn: dict[str, Any] | None = None
        """Whether workers had drawn at the save, by the names of their loaders; None: nothing was resumed."""
        self._has_epoch = False
        self._plain: dict[str, str] = {}
        """The keys of what is said of loaders without a state whose passes are watched, by their names."""
        self.generators = SavedGenerators(None, restore_rng)
        """Those of the process as of the save, which are set before the first batch."""

    def take_offered(self) -> None:
        """Take what `attach` was given, now and later."""
        _takers.add(self)
        for one in _offered:
            if (loader := one()) is not None:
                self.take(loader)

    def take(self, loader: Any) -> None:
        """Take a loader of `attach`, unless somebody counts its batches."""
        from resilience_sdk.checkpoint.state import has_state

        known = (*self._state.per_rank.values(), *self._state.counted.values())
        if self._is_walked() or any(item is loader for item in known):
            return
        asked = getattr(loader, "use_stateful_dataloader", True)
        if asked and has_state(loader):
            self._leave_attached()
            self.add(ATTACHED, loader)
        elif is_loader(loader):
            self._leave_attached()
            self._note_plain(
                ATTACHED,
                loader,
                "attached loader",
                "the place in the loader that attach() was given",
                "it has no state_dict(), so its next pass begins anew, with another order if it is shuffled",
            )

    def _leave_attached(self) -> None:
        """Leave what was attached in a loop before this one."""
        self._plain.pop(ATTACHED, None)
        if ATTACHED in self._state.passes:
            self._state.per_rank.pop(ATTACHED, None)
            self._state.passes.pop(ATTACHED).leave()

    def watch(self) -> None:
        """Watch the passes over the loaders of the state."""
        for name, item in self._state.per_rank.items():
            self._watch(name, item)
        if self._is_walked():
            return
        for name, item in self._state.counted.items():
            if name not in self._plain:
                why = f"a {plain_class(item).__name__} has no state_dict(), so nothing of it is saved"
                self._note_plain(name, item, f"state:{name}", f"the place in state[{name!r}]", why)

    def _note_plain(self, name: str, loader: Any, key: str, thing: str, means: str) -> None:
        """Say that a pass over a loader without a state is not gone on with, unless the resume was between two."""
        if begins_as_told(loader):
            with contextlib.suppress(TypeError):  # its class cannot be exchanged
                self._state.passes[name] = PlainPasses(loader)
                self._plain[name] = key
                if are_between(self._saved.pop(name, None)):
                    return
                means += " (a resume from a save behind a pass's last batch is exact)"
        note(key, thing, means, _CURE)

    def add(self, name: str, loader: Any) -> None:
        """Save the state of a loader too, and restore it if a resume brought one. One of the state is left as it is."""
        from resilience_sdk.checkpoint.state import apply

        for known, item in self._state.per_rank.items():
            if item is loader:
                if self._is_walked() and known in self._state.passes:
                    self._state.passes.pop(known).leave()
                return
        self._state.per_rank[name] = loader
        if not self._is_walked():
            self._watch(name, loader)
        if name in self._pending:
            apply(name, loader, self._pending.pop(name))
            self._go_on(name)

    def note_walked(self, loader: Any) -> None:
        """Say what is not exact where somebody counts the batches of `loader` alone."""
        note_workers(loader)
        self._watch_workers(_WALKED, loader)
        if isinstance(loader, _ONE_SHOT):
            note(
                "steps iterator",
                f"what is drawn at random inside of run.steps({type(loader).__name__}(...))",
                "a resume reads it again from its beginning, so that what the data set draws in this process, and what "
                "itertools.cycle has kept of it, is other",
                "pass one loader to run.steps(), and put a second one with a state_dict() into state, and make its "
                "iterator inside of the `with` of the run",
            )
            return
        self._note_samplers(loader)
        held = [loader, *getattr(loader, "__dict__", {}).values()]
        for name, item in self._state.counted.items():
            if all(item is not one for one in held):
                note(
                    f"state:{name}",
                    f"the place in state[{name!r}]",
                    f"run.steps() counts those of another loader, and a {type(item).__name__} has no state_dict()",
                    "use torchdata's StatefulDataLoader (pip install 'resilience-sdk[data]') for it, and make its "
                    "iterator inside of the `with` of the run",
                )

    def _note_samplers(self, loader: Any) -> None:
        """Say it where a sampler goes on from its place, and the loader reads that pass from its beginning."""
        from resilience_sdk.checkpoint.state import has_state

        if has_state(loader) and getattr(loader, "use_stateful_dataloader", True):
            return
        samplers = [part for name, part in parts(loader) if "sampler" in name]
        for name, item in (*self._state.per_rank.items(), *self._state.shared.items()):
            if any(item is one for one in samplers):
                note(
                    f"sampler:{name}",
                    f"the place of {type(item).__name__} in an epoch",
                    f"state[{name!r}] brings it back to its place, and the loader, which has no state_dict(), is read "
                    "again from the beginning besides, so that batches are left out (where the state of the sampler "
                    "has no place in a pass, the resume is exact)",
                    f"leave {name!r} out of state: what was read is read again",
                )

    def resumed(self, restored: Restored) -> None:
        """Take what a resume has brought."""
        self._pending, self._saved = restored.pending, dict(restored.passes)
        self._has_epoch = has_epoch(restored.values)
        for name, key in self._plain.items():
            if are_between(self._saved.pop(name, None)):
                lift(key)
        is_ours = not self._is_walked()
        self.generators = SavedGenerators(restored.rng if is_ours else None, self._restore_rng)
        for name in restored.loaded:
            self._go_on(name)
        self._drawn = dict(restored.drawn)
        for name, workers in self._state.workers.items():
            workers.resume(self._drawn.pop(name, None))

    def _go_on(self, name: str) -> None:
        if name not in self._state.passes:
            return
        watch, saved = self._state.passes[name], self._saved.get(name)
        # Nobody has asked for this one to be saved, so its refusal must not end the training.
        if name == ATTACHED and watch.drop_other_workers(saved):
            note(
                "attached workers",
                "the place in the loader that attach() was given",
                "its state cannot be taken with workers if it was saved without, or the other way round",
                "resume with the num_workers that it had",
            )
            return
        watch.resume(saved, self.generators, has_epoch=self._has_epoch)

    def _watch_workers(self, name: str, loader: Any) -> None:
        known = self._state.workers.get(name)
        if not forks_anew(loader) or (known is not None and known.are_of(loader)):
            return
        workers = self._state.workers[name] = WatchedWorkers(loader)
        if known is None and self._drawn is not None:  # a second loader of that name begins its passes itself
            workers.resume(self._drawn.pop(name, None))

    def _watch(self, name: str, loader: Any) -> None:
        from resilience_sdk.checkpoint.state import has_state

        if name in self._state.passes or not has_state(loader) or not is_loader(loader):
            return
        note_workers(loader)
        self._watch_workers(name, loader)
        try:
            self._state.passes[name] = PassWatch(loader)
        except TypeError:
            note(
                f"passes:{name}",
                "the random numbers behind a resume",
                f"the class of {name} ({type(loader).__name__}) cannot be watched, so what its iterator draws comes "
                "after what was restored",
                "call Checkpointer.restore_rng() before the first batch",
            )
