"""The proof of a resume of an engine's loop: the samples of its loader, and whose batches are looked at.

What an engine has restored is compared by the checkpointer (`Checkpointer.compare`), steps by a `LoopProof`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from resilience_sdk.adapters._proof import proof_of
from resilience_sdk.adapters.deepspeed.loaders import TimedOwnLoader, counts_by_itself, is_own
from resilience_sdk.checkpoint.checkpointer import saved_objects
from resilience_sdk.core.resume_proof import NOT_COMPARED, STEPS, ResumeCheck
from resilience_sdk.rank import Session
from resilience_sdk.rank.data import Noted
from resilience_sdk.rank.fingerprints import Tap
from resilience_sdk.rank.loop_proof import LoopProof
from resilience_sdk.rank.pass_print import PassPrint
from resilience_sdk.rank.schedule_length import length_of

if TYPE_CHECKING:
    from resilience_sdk.adapters.deepspeed.attached import Attached

_CURES = {
    "samples": "let samplers draw from torch's generators or from set_epoch(handle.epoch), and give attach() the "
    "loader that the loop iterates",
    "learning rate": "give the scheduler to deepspeed.initialize(lr_scheduler=...), which steps and saves it, or to "
    "attach(state=...)",
    "generators": "let nothing seed a generator behind attach(), nor draw from one before the first batch of loader=",
    "loss": "look for what the step uses and neither the engine nor attach(state=...) holds",
    "weights": "look for what the step uses and neither the engine nor attach(state=...) holds, such as a generator, "
    "an average or a module of its own",
}


def engine_proof(
    session: Session | None, engine: Any, prints: PassPrint, skipped: Callable[[], Collection[int]]
) -> LoopProof | None:
    """Return what proves the resumes of the loop of an engine; None where nothing is recorded, or it is switched off.

    `prints`: the samples of its loader.
    """
    optimizers = [engine.optimizer] if isinstance(getattr(engine.optimizer, "param_groups", None), list) else []
    per_step = int(engine.gradient_accumulation_steps())
    return proof_of(session, prints, optimizers, skipped, _CURES, per_step, lambda: _length(engine))


def _length(engine: Any) -> int:
    asked = getattr(engine, "scheduler_params", None)  # of DeepSpeed's own schedules
    params = asked() if callable(asked) else None
    return length_of([getattr(engine, "lr_scheduler", None), *saved_objects()], repr(params) if params else None)


def say_not_compared(proof: LoopProof, loader: Any) -> None:
    """Journal at a resume why no steps are compared. `loader`: what `attach` was given."""
    why = "attach() was given no loader, so that nobody knows the batches of a step"
    if counts_by_itself(loader):
        why = "with curriculum learning DeepSpeed counts its samples itself"
    proof.tell(ResumeCheck(STEPS, NOT_COMPARED, why))


# -- samples


def make_pass(prints: PassPrint, loader: Any, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Begin a pass over a loader, also over DeepSpeed's own, and return its new iterator, which `make()` makes."""
    if not prints.is_checked:
        return make()
    if not is_own(loader):
        return prints.make(loader, make)
    tap = _tap_of_own(loader)
    prints.begin(loader, tap=tap)
    if tap is None:
        return make()
    own = vars(loader)
    plain, own["data_sampler"] = own["data_sampler"], tap
    try:
        return make()  # which makes a `DataLoader` for this pass alone
    finally:
        own["data_sampler"] = plain


def noted(prints: PassPrint, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of a pass, each of which is noted as it is read, also where a resume reads it again."""
    return Noted(batches, prints.note) if prints.is_checked else batches


def _tap_of_own(loader: Any) -> Tap | None:
    """Return a tap for what DeepSpeed's own loader makes its batches of; None where that is not known."""
    sampler, size = vars(loader).get("data_sampler"), getattr(loader, "batch_size", None)
    if not hasattr(type(sampler), "__iter__") or not isinstance(size, int) or size < 1 or counts_by_itself(loader):
        return None
    return SampleTap(sampler, size, drop_last=bool(getattr(loader, "dataloader_drop_last", False)))


class SampleTap(Tap):
    """A sampler of single samples that notes them by batches, as a `DataLoader` puts them together."""

    def __init__(self, sampler: Any, size: int, *, drop_last: bool) -> None:
        """Stand for `sampler`, of batches of that size; `drop_last`: a last one that is not full is none."""
        super().__init__(sampler)
        self._size, self._drop_last = size, drop_last

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: what `iter()` draws is to be drawn where it was.
        self.drawn.clear()
        self.is_on = True
        return _Grouping(iter(self._sampler), self.note, self._size, drop_last=self._drop_last)


class _Grouping:
    __slots__ = ("_batch", "_drop_last", "_next", "_note", "_size")

    def __init__(self, plain: Iterator[Any], note: Callable[[list[Any]], None], size: int, *, drop_last: bool) -> None:
        self._next, self._note, self._size, self._drop_last = plain.__next__, note, size, drop_last
        self._batch: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            found = self._next()
        except StopIteration:
            if self._batch and not self._drop_last:
                self._give()
            raise
        self._batch.append(found)
        if len(self._batch) == self._size:
            self._give()
        return found

    def _give(self) -> None:
        batch, self._batch = self._batch, []
        self._note(batch)


# -- the loader of an engine that `attach` was given no loader of


def loader_of(engine: Any) -> Any:
    """Return the loader that the engine has made of `training_data=`, whose place nobody counts; else None."""
    loader = getattr(engine, "training_dataloader", None)
    return loader if is_own(loader) and not counts_by_itself(loader) else None


class Onlooker:
    """Looks at the batches that a loop reads of its engine's loader, and changes nothing: its place is the loop's."""

    def __init__(self, attached: Attached, loader: Any, prints: PassPrint) -> None:
        """Look at the passes over `loader` from now on, until it is detached."""
        self._attached, self._loader, self._prints = attached, loader, prints
        attached.on_detach(TimedOwnLoader(loader, self).restore)

    def pass_begins(self) -> None:
        """Set nothing."""

    def make_pass(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return a new iterator of the loader."""
        return make_pass(self._prints, self._loader, make)

    def walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return its batches, each of which is looked at."""
        for batch in noted(self._prints, batches):
            self._attached.batch_read(None, 0, batch)
            yield batch

    def pass_ends(self) -> None:
        """Do nothing."""

    def takes_over(self, loader: Any) -> bool:
        """Look at a pass that was begun before `attach`."""
        self._prints.begun_before(loader, None)
        return True
