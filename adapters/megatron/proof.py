"""The proof of a resume of a loop on Megatron: the batches that its steps read, and what is compared of them.

A batch belongs to a step if it is read in one of its forwards, or just before. What its sampler has drawn for it is
known where Megatron or the loop makes its iterator of a `DataLoader`; any other is compared by its content.
"""

from __future__ import annotations

import inspect
import weakref
from binascii import crc32
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from resilience_sdk.adapters._proof import proof_of
from resilience_sdk.core.iterated_class import iterated_by, set_class
from resilience_sdk.core.resume_proof import NOT_COMPARED, STEPS, ResumeCheck
from resilience_sdk.rank import Session
from resilience_sdk.rank.loop_proof import LoopProof
from resilience_sdk.rank.pass_print import PassPrint

CURES = {
    "samples": "let samplers draw by the samples that are consumed, or from set_epoch(epoch), and begin behind those "
    "of handle.step, or give state= a loader with a state_dict()",
    "learning rate": "give the OptimizerParamScheduler to sharded_state or state=, and step it at one place of the "
    "loop",
    "generators": "let nothing seed a generator behind saver.resume(), nor draw from one before the first batch: make "
    "iterators before it",
    "loss": "look for what the step uses and neither sharded_state nor state= holds",
    "weights": "look for what the step uses and neither sharded_state nor state= holds, such as a generator or an "
    "average",
}
PRETRAIN_CURES = {
    "samples": "let samplers draw by args.consumed_train_samples, as those of --dataloader-type single do",
    "learning rate": "let Megatron's OptimizerParamScheduler set the rates, and leave --override-opt_param-scheduler "
    "out unless they are to be others",
    "generators": "let nothing seed a generator behind the load of the checkpoint, and leave --no-save-rng, "
    "--no-load-rng and --dataloader-type cyclic out",
    "loss": "look for what forward_step() uses and Megatron does not save: make it a buffer of the model",
    "weights": "look for what the step uses and Megatron does not save: make it a buffer of the model",
}


class MegatronProof:
    """What a loop leaves of its steps, and compares of those that are repeated; of the thread that trains.

    Nothing of it raises.
    """

    def __init__(
        self,
        loop: LoopProof,
        prints: PassPrint,
        session: Session,
        *,
        forwards: Callable[[], tuple[int, bool]],
        only_in_forwards: bool,
    ) -> None:
        """`forwards()`: how many have begun, and whether one is under way; `only_in_forwards`: others read no batch."""
        self.loop, self.prints, self._session = loop, prints, session
        self._forwards, self._only_in_forwards = forwards, only_in_forwards
        self._seen = -1
        """How many forwards had begun when the newest batch was read outside of one; -1: it was read in one."""
        self._has_batch = False
        self._is_first = True
        self.is_known = only_in_forwards
        """Whether it is known what the loop reads: a rank that reads nothing then has its data from another one."""
        self.why = "attach() was given no loader, so that nobody knows the batches of a step"
        """Why nothing is compared where no batch is seen."""

    def took(self, batch: Any) -> None:
        """Take a batch that is read of the loader of the training."""
        self.prints.note(batch)
        self.read(batch)

    def read(self, batch: Any) -> None:
        """Take a batch whose samples nobody knows."""
        begun, is_open = self._forwards()
        if not is_open and self._only_in_forwards:
            return
        if self._seen >= 0 and begun - is_open == self._seen:
            self.loop.undo()  # no forward had it: as one that a loop reads past on its way back
        self._seen = -1 if is_open else begun
        self._has_batch = True
        self.loop.batch(None, 0, batch)

    def step(self, step: int) -> None:
        """Leave the step that is complete."""
        has_batch, self._has_batch, self._seen = self._has_batch, False, -1
        is_first, self._is_first = self._is_first, False
        if not has_batch:
            if self._session.identity.rank == 0 or not self.is_known:
                if is_first and step:
                    self.loop.tell(ResumeCheck(STEPS, NOT_COMPARED, self.why))
                return
            # A stage of a pipeline, or a rank of tensor parallelism, has its data from another rank.
            self.loop.batch(None, 0, None)
        self.loop.step(step)

    def drop(self) -> None:
        """Forget batches that make no step."""
        self._has_batch, self._seen = False, -1
        self.loop.drop()


def megatron_proof(
    session: Session | None,
    optimizers: Collection[Any],
    skipped: Callable[[], Collection[int]],
    cures: Mapping[str, str],
    sizes: Iterable[int | None],
    forwards: Callable[[], tuple[int, bool]],
    length: Callable[[], int],
    *,
    only_in_forwards: bool = False,
) -> MegatronProof | None:
    """Return what proves the resumes of one loop; None where nothing is recorded, or that is switched off.

    `sizes`: how many samples a step and a batch have, which have to be as before; `length`: see `proof_of`.
    """
    prints = PassPrint()
    given = [one for one in optimizers if has_rates(one)]
    loop = proof_of(session, prints, given, skipped, cures, crc32(repr(tuple(sizes)).encode()) + 1, length)
    if loop is None or session is None:
        return None
    return MegatronProof(loop, prints, session, forwards=forwards, only_in_forwards=only_in_forwards)


def has_rates(optimizer: Any) -> bool:
    """Tell whether the learning rates of an optimizer can be read."""
    return isinstance(getattr(optimizer, "param_groups", None), list)


# -- loaders


def watch_loader(loader: Any, proof: MegatronProof) -> Callable[[], None] | None:
    """Look at the batches of each pass over a loader from now on; return what ends that, None where it cannot be."""
    plain = type(loader)
    if not hasattr(plain, "__iter__") or hasattr(plain, "__next__"):
        return None
    is_on = [True]

    def iterate(self: Any) -> Iterator[Any]:
        if not is_on[0]:
            return plain.__iter__(self)  # type: ignore[no-any-return]
        return _Watched(proof.prints.make(self, lambda: plain.__iter__(self)), proof.took)

    try:
        kind = iterated_by(plain, iterate)
        set_class(loader, kind)
    except TypeError:
        return None

    def restore() -> None:
        is_on[0] = False
        if type(loader) is kind:
            set_class(loader, plain)

    return restore


class _Watched:
    """An iterator around the loader's own, which lends it all other attributes; its batches are looked at."""

    __slots__ = ("_batches", "_took")

    def __init__(self, batches: Iterator[Any], took: Callable[[Any], None]) -> None:
        self._batches, self._took = batches, took

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._took(batch)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # it is not made yet
            raise AttributeError(name)
        return getattr(self._batches, name)


def watch_iterator(batches: Any, took: Callable[[Any], None]) -> Callable[[], None] | None:
    """Look at what an iterator gives from now on; return what ends that, None where its class cannot be exchanged."""
    plain = type(batches)
    if not hasattr(plain, "__next__"):
        return None
    is_on = [True]

    def fetch(self: Any) -> Any:
        batch = plain.__next__(self)
        if is_on[0] and not getattr(self, "replaying", False):  # Megatron computes a step once more
            took(batch)
        return batch

    try:
        kind: Any = iterated_by(plain, lambda self: self)
        kind.__next__ = fetch
        if not hasattr(plain, "__iter__"):
            del kind.__iter__
        set_class(batches, kind)
    except TypeError:
        return None

    def restore() -> None:
        is_on[0] = False
        if type(batches) is kind:
            set_class(batches, plain)

    return restore


# -- what `megatron.checkpointer` knows

_newest: list[weakref.ref[Any]] = []


def remember(saver: Any) -> None:
    """Know the checkpointer of this process, whose state may hold the loader of the loop."""
    _newest[:] = [weakref.ref(saver)]


def known_saver() -> Any:
    """Return it; None where there is none."""
    return _newest[0]() if _newest else None


_MAX_PARTS = 64
"""Of a model or an optimizer that is a list."""


def reached_by(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the modules and optimizers that a function makes a sharded state of, by the names that it has.

    Of Megatron's optimizers those of whole parameters in single precision: others have more in their options behind a
    load than before. Nothing where parameters are gathered later than the step that has changed them.
    """
    import torch

    found: dict[str, Any] = dict(getattr(getattr(function, "__self__", None), "__dict__", {}))
    try:
        closure = inspect.getclosurevars(getattr(function, "__func__", function))
        found |= {**closure.globals, **closure.nonlocals}
    except TypeError:  # no function of Python's
        pass
    objects: dict[str, Any] = {}
    for name, item in found.items():
        items = item if isinstance(item, (list, tuple)) else getattr(item, "chained_optimizers", None) or [item]
        for number, one in enumerate(items[:_MAX_PARTS]):
            if any(getattr(getattr(one, options, None), _LATE, False) for options in ("config", "ddp_config")):
                return {}
            inner = getattr(one, "optimizer", None) if type(one).__name__ == "FP32Optimizer" else one
            is_part = isinstance(inner, (torch.nn.Module, torch.optim.Optimizer))
            if is_part and all(inner is not other for other in objects.values()):
                objects[f"{name} {number}" if len(items) > 1 else name] = inner
    return objects


_LATE = "overlap_param_gather"
