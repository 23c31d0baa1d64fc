"""The position of a run in its data, and the way of a new process back to that place.

A loader with `state_dict` goes back by itself. One without is read again from the start of its epoch up to
the batch. For that to give the same batches, the random number generators are first set as they were when the
epoch began: the shuffled order and the seeds of the workers are drawn from them then, not later. Afterwards
they are set as they were at the save, since augmentation in this process and the model draw from them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from resilience_sdk.checkpoint.counted_passes import CountedPasses
from resilience_sdk.checkpoint.generators import find_generators, parts, restore_of_data, set_rng, take_rng
from resilience_sdk.checkpoint.orders import same_order
from resilience_sdk.checkpoint.pass_weights import CURE, PassWeights
from resilience_sdk.checkpoint.passes import draw_order, note_other_sizes, quiet_length, sizes_of, use_up
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.resume_proof import NOT_EXACT, ORDER, ResumeCheck
from resilience_sdk.rank.pass_print import PassPrint
from resilience_sdk.straggler import section

END = object()  # what `next_batch` returns after the last one


class Walk:
    """Walks through the epochs of a loader, counts batches, and can be saved and restored. One thread."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0
        self.has_tail = False
        """Whether something of the training's own stands behind the batches of each epoch (`Run.epochs`)."""
        self.owes_tail = False
        """Whether the steps of this epoch are done, at its end or where the training ends, and its tail is not."""
        self.prints = PassPrint()
        """The fingerprint of this epoch's batches."""
        self._is_read = False  # all batches of this epoch are
        self._epoch_rng: dict[str, Any] | None = None
        self._generators: dict[str, Any] = {}
        self._saved_generators: dict[str, Any] = {}
        self._saved_sizes: Mapping[str, Any] = {}
        self._loader: Any = None
        self._has_state = False
        self._is_resumed = False
        self._counted = CountedPasses()
        self._weights = PassWeights()

    # -- what a checkpoint holds of it

    def capture(self) -> dict[str, Any]:
        """Return the position as a JSON value, as of now: between two steps, or in the tail of an epoch."""
        is_quiet = self._loader is not None and self.batches == quiet_length(self._loader) and not self._generators
        if self.has_tail and (self.owes_tail or is_quiet):
            is_read = self._is_read or is_quiet
            is_begun = self._epoch_rng is not None and (self._is_resumed or not is_read)
            rng = self._epoch_rng if is_begun else take_rng(self._generators)
            return {**self._place(), "owes_tail": True, "is_read": is_read, "rng": rng}
        if is_quiet:
            # The epoch is complete, and nothing is drawn between here and the next one: so that is where we
            # are, and nobody has to read a whole epoch again to find that out.
            return {"epoch": self.epoch + 1, "batches": 0, "rng": take_rng(self._generators)}
        rng = self._epoch_rng if self._epoch_rng is not None else take_rng(self._generators)
        return {**self._place(), "rng": rng}

    def _place(self) -> dict[str, Any]:
        from resilience_sdk.checkpoint.state import capture_generators  # imports torch

        now = capture_generators(self._generators)
        sizes = self._saved_sizes if self._loader is None else sizes_of(self._loader)
        place: dict[str, Any] = {"epoch": self.epoch, "batches": self.batches}
        if now:
            place["generators"] = now
        if sizes:
            place["sizes"] = sizes
        if weights := self._weights.to_json():
            place["weights"] = weights
        found = self.prints.to_json(self.batches)
        return place if found is None else {**place, "print": found}

    def restore(self, saved: Mapping[str, Any], saved_ranks: int, ranks: int) -> None:
        """Take a saved position; with another number of ranks it is the nearest one that skips no sample."""
        self.epoch = int(saved["epoch"])
        self.batches = int(saved["batches"])
        self._epoch_rng = saved["rng"]
        self.owes_tail, self._is_read = bool(saved.get("owes_tail")), bool(saved.get("is_read"))
        self._is_resumed = True
        self._saved_generators = saved.get("generators", {})
        self.prints.resume(saved.get("print") if saved_ranks == ranks else None, self.batches)
        self._saved_sizes = saved.get("sizes") or {}
        self._weights.resume(saved.get("weights"))
        if saved_ranks != ranks:
            self.batches = self.batches * saved_ranks // ranks
            self._epoch_rng = None
            self._saved_generators = {}
            self._weights.resume(None)

    # -- walking

    def enter_window(self, first_epoch: int) -> None:
        """Go to `first_epoch` unless the walk is there or further already."""
        if self.epoch < first_epoch:
            self._to_epoch(first_epoch)

    def has_batches_before(self, epoch: int) -> bool:
        """Tell whether batches are to be had of the epochs before that one."""
        return self.epoch < epoch and not self.owes_tail

    def finish_batches(self) -> None:
        """Go behind the last batch of this epoch: before its tail, else to the start of the next one."""
        self._is_read = self.owes_tail = self.has_tail
        if not self.has_tail:
            self.finish_epoch()

    def finish_steps(self) -> None:
        """Go before the tail of this epoch, if it has one, though batches may be left of it: the training ends here."""
        self.owes_tail = self.has_tail

    def finish_tail(self) -> None:
        """Go to the start of the next epoch; where the training was to end within this one, to what is left of it."""
        if self.owes_tail and not self._is_read:
            self.owes_tail, self._is_resumed = False, True  # should it go on after all, by reading again
        else:
            self.finish_epoch()

    def finish_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self._to_epoch(self.epoch + 1)

    def _to_epoch(self, epoch: int) -> None:
        self.epoch, self.batches, self._epoch_rng, self._is_resumed = epoch, 0, None, False
        self.owes_tail = self._is_read = False
        self.prints.leave()

    def leave_tails(self) -> None:
        """Let epochs have no tail: one whose batches are all read is complete, which is where we are then."""
        self.has_tail = self.owes_tail = False
        if self._is_read:
            self.epoch, self.batches, self._is_read = self.epoch + 1, 0, False

    def is_at_length(self) -> bool:
        """Tell whether a tail is owed, and as many batches are read as the loader says that it has."""
        try:
            return self.owes_tail and self.batches == len(self._loader)
        except TypeError:
            return False

    def enter_body(self) -> None:
        """Set the generators of this process as they were at the save, where an epoch with a tail had not begun."""
        if self._is_resumed and not self.batches and not self.owes_tail and self._epoch_rng is not None:
            set_rng({}, {**self._epoch_rng, "generators": {}})

    def enter_tail(self, loader: Iterable[Any], restore_rng: Any) -> None:
        """Set the generators as they were at the save, where that was behind the last step of this epoch."""
        if not (self.owes_tail and self._is_resumed):
            return
        self._loader, self._generators, self._is_resumed = loader, find_generators(loader), False
        if self._is_read and self._epoch_rng is not None:
            set_rng(self._generators, self._epoch_rng)
        else:
            restore_rng()

    def start_epoch(self, loader: Iterable[Any], restore_rng: Any, *, is_speaker: bool) -> Iterator[Any]:
        """Return an iterator over what is left of this epoch, after going back to the saved place in it.

        `restore_rng()` sets the generators as they were at the save. Only the speaker prints.
        """
        _set_epoch(loader, self.epoch)
        self.prepare_epoch(loader)
        self.prints.begin(loader, has_state=self._has_state)
        with self.prints.tapped(loader), same_order(loader):
            batches = iter(loader)
        if self.prints.is_noted:
            batches = Noted(batches, self.prints.note)
        return self.enter_epoch(batches, restore_rng, is_speaker=is_speaker)

    def prepare_epoch(self, loader: Iterable[Any]) -> None:
        """Set the generators as they were when this epoch began, before an iterator of it is made."""
        self._loader = loader
        self._has_state = has_state(loader)
        self._counted.look(loader)
        self._generators = find_generators(loader)
        if self._is_resumed and self.batches and self._saved_sizes:
            self._fit_to(sizes_of(loader), self._saved_sizes)
        if self._is_resumed and self._epoch_rng is not None:
            # What the program has drawn in this epoch before is drawn by now (see `enter_body`).
            is_drawn = self.has_tail and not self.batches
            now = take_rng({})["process"] if is_drawn else self._epoch_rng["process"]
            use_up(loader)
            set_rng(self._generators, {**self._epoch_rng, "process": now})
            self._epoch_rng = {**self._epoch_rng, "process": now}
        else:
            self._epoch_rng = take_rng(self._generators)
        if self._is_resumed and self.batches:
            self._lend_weights(loader)
        self._weights.begins(loader)

    def _lend_weights(self, loader: Iterable[Any]) -> None:
        """Draw the order again by the weights that it was drawn by, and say where they are not known."""
        for kind in self._weights.lend(loader):
            where = f"the order of epoch {self.epoch}"
            text = f"other samples, {where}: {kind} is made of something else than when that epoch began"
            self.prints.forget_saved()
            self.prints.told(ResumeCheck(ORDER, NOT_EXACT, text, where, cure=CURE))

    def _fit_to(self, now: Mapping[str, int], saved: Mapping[str, Any]) -> None:
        """Go to the nearest batch that skips no sample where batches are others now; say what a resume makes of it."""
        note_other_sizes(now, saved, f"epoch {self.epoch}", skips=self._has_state)
        batch, before = now.get("batch"), saved.get("batch")
        if batch and before and batch != before and not self._has_state:
            self.batches = self.batches * int(before) // batch

    def enter_epoch(self, batches: Iterator[Any], restore_rng: Any, *, is_speaker: bool) -> Iterator[Any]:
        """Return that iterator, behind what was read of it before a resume; otherwise as `start_epoch`."""
        is_resumed, self._is_resumed = self._is_resumed, False
        if is_resumed and self.batches:
            if not self._has_state:
                self._fast_forward(batches, is_speaker=is_speaker)
                self.prints.compare(self.epoch, self._loader)
            else:
                draw_order(batches)
            self._counted.look(self._loader)
            # Not at the start of an epoch: there the save was before what iter() has just drawn.
            restore_rng()
            restore_of_data(self._generators, self._saved_generators)
        self._weights.give_back()
        self.prints.forget_saved()
        return batches

    def _fast_forward(self, batches: Iterator[Any], *, is_speaker: bool) -> None:
        if is_speaker and not isinstance(self._loader, Sequence):  # a list is read again in no time
            say_once(
                "fast-forward",
                f"the data loader has no state_dict(): reading its first {self.batches} batches of epoch "
                f"{self.epoch} again, to go on behind them{_better(self._loader)}",
            )
        for count in range(self.batches):
            if next_batch(batches) is END:
                say(f"epoch {self.epoch} has only {count} batches now, {self.batches} were done: it is over")
                self.batches = count
                return


class Noted:
    """An iterator that has each of its batches noted."""

    __slots__ = ("_batches", "_next", "_note")

    def __init__(self, plain: Iterator[Any], note: Callable[[Any], None]) -> None:
        """Note the batches of `plain`."""
        self._batches, self._next, self._note = plain, plain.__next__, note

    def __iter__(self) -> Noted:
        return self

    def __next__(self) -> Any:
        batch = self._next()
        self._note(batch)
        return batch


def has_state(loader: object) -> bool:
    """Tell whether a loader remembers its place by itself; Accelerate's say apart whether their `state_dict` works."""
    is_asked = getattr(loader, "use_stateful_dataloader", True)
    return bool(is_asked) and callable(getattr(loader, "state_dict", None))


def next_batch(batches: Iterator[Any]) -> Any:
    """Return the next batch or `END`; the wait is section `data`."""
    with section("data", kind="io"):
        return next(batches, END)


def _better(loader: Any) -> str:
    from torch.utils.data import DataLoader

    if not isinstance(loader, DataLoader):
        return ""
    return "; torchdata's StatefulDataLoader (pip install 'resilience-sdk[data]') remembers its place"


def _set_epoch(loader: Any, epoch: int) -> None:
    for _, part in parts(loader):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
