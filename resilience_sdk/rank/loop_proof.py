"""The proof of one loop's resumes, whoever's it is: `Run.steps`, or that of a framework below an adapter.

It is given the batches and the steps, leaves a witness of each step, and compares those that are done twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import attrs

from resilience_sdk.checkpoint.checkpointer import follow_saves
from resilience_sdk.core.console import say
from resilience_sdk.core.journal import CURVES, Event, read_journal
from resilience_sdk.core.resume_limits import limits
from resilience_sdk.core.resume_proof import NOT_COMPARED, NOT_EXACT, NOT_PROVEN, STEPS, ResumeCheck
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.rank.pass_print import PassPrint
from resilience_sdk.rank.repeated import CURES, LEARNED, LOSSES, Comparison, begin
from resilience_sdk.rank.session import Session
from resilience_sdk.rank.witness import LOOKED_AT, StepInMaking
from resilience_sdk.recorder.witness_ring import WitnessedStep, WitnessRing

# Sums over more ranks may come in another order.
_MAX_RANKS_OF_LOSS = 2


class LoopProof:
    """What a loop leaves of each step, and what it compares it with; of the thread that trains. Never raises."""

    def __init__(
        self,
        session: Session,
        prints: PassPrint,
        optimizers: Iterable[Any],
        skipped: Callable[[], Collection[int]],
        cures: Mapping[str, str] | None = None,
        per_step: int = 1,
    ) -> None:
        """Witness the steps of one loop, and have what comes out of its passes (`prints`) said and journalled.

        `skipped()`: steps whose batches are left out since a rollback; `cures`: what to do, by the part that differs;
        `per_step`: how many batches a step has, which has to be as before.
        """
        self._session = session
        self._prints = prints
        self._step = StepInMaking(prints, optimizers)
        self._skipped = skipped
        self._per_step = per_step
        self._cures = {**CURES, **(cures or {})}
        self.length: Callable[[], int] = int
        """Gives a number for what the training's schedules are stretched over, when its first step is done."""
        self.training = 0
        """A number for which training of this process it is."""
        self._ring: WitnessRing | None = None
        self._comparison: Comparison | None = None
        self._is_begun = self._has_given_up = False
        prints.told = self.tell
        follow_saves(self)

    def watch_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Know the optimizers of the loop, where they were made later."""
        self._step.optimizers = tuple(optimizers)

    # -- what the loop tells

    def note(self, step: int, epoch: int, number: int, batch: Any) -> None:
        """Leave a step of one batch as it begins."""
        self.batch(epoch, number, batch)
        self.step(step)

    def batch(self, epoch: int | None, number: int, batch: Any) -> None:
        """Take a batch of the step that is under way: that of this number in its epoch, the newest of the pass.

        None: nobody knows the epoch, and the place is not compared.
        """
        if self._has_given_up:
            return
        try:
            self._step.add(epoch, number, batch)
        except Exception as error:  # noqa: BLE001 - a batch or an optimizer of somebody else's kind
            self._give_up(error)

    def step(self, step: int) -> None:
        """Leave the step of these batches: it is complete, or will have no more of them."""
        try:
            self._leave(step)
        except Exception as error:  # noqa: BLE001 - a proof that cannot be made ends no training
            self._give_up(error)

    def _leave(self, step: int) -> None:
        parts = self._step.take(step)
        if parts is None or self._has_given_up:
            return
        if self._ring is None and (self._is_begun or not self._begin(step)):
            self._has_given_up = True
            return
        if self._ring is not None:
            self._ring.put(*parts, 0.0)
        if self._comparison is not None and not self._comparison.look(WitnessedStep(*parts)):
            self._comparison = None

    def undo(self) -> None:
        """Leave the newest batch out: the loop has made nothing of it."""
        self._step.undo()

    def losses_begin_behind(self) -> None:
        """Know that a step's loss begins behind the step before it, so that the first one of a resume is a part."""
        if self._comparison is not None:
            self._comparison.is_first_loss_partial = True

    def drop(self) -> None:
        """Forget batches that make no step."""
        self._step.drop()

    def saved(self) -> None:
        """Look at the generators in the next two steps: those behind a save."""
        self._step.looks_at_generators = LOOKED_AT

    def close(self) -> None:
        """Say what came out of the comparison, where not all steps that were to be repeated are."""
        comparison, self._comparison = self._comparison, None
        if comparison is not None:
            try:
                comparison.close()
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(error)

    def tell(self, check: ResumeCheck) -> None:
        """Journal what comes out of a comparison on this rank, and say it: a difference by one of each node's ranks.

        That nothing differs is recorded by rank 0, that something does by whoever finds it.
        """
        me = self._session.identity
        is_other = check.result == NOT_EXACT or (check.result == NOT_PROVEN and check.component is not None)
        if me.rank == 0 or is_other:
            check = attrs.evolve(check, rank=me.rank)
            self._session.journal.emit(check.event, step=check.step, **check.facts())
            is_said = check.what == STEPS and not is_other and check.result != NOT_COMPARED
            if is_said or (is_other and self._session.says_for_node(check.what)):
                say(check.line)

    # -- within

    def _begin(self, step: int) -> bool:
        self._is_begun = True
        facts = self._prints.facts ^ (self._per_step - 1)
        self._ring = self._session.make_witness_ring(facts)
        if self._ring is None:
            return False
        length = self.length()
        self._ring.is_of(length, self.training)
        if step:
            before, size = self._session.find_witnesses(), self._session.identity.world_size
            self._comparison = begin(
                before, step, size, facts, self._skipped(), self.tell, self._losses_count, self._cures,
                length, self.training, lambda: self._prints.why, no_facts=self._per_step - 1,
                not_repeated=limits,
            )  # fmt: skip
        watch = numerics.watch_of_adapters()
        if watch is not None:
            watch.heard = self._hear
        return True

    def _hear(self, step: int, loss: float) -> None:
        try:
            if self._ring is not None:
                self._ring.add_loss(step, loss)
            if self._comparison is not None:
                self._comparison.hear(step, loss)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _losses_count(self) -> bool | None:
        """Tell whether this run has repeated its losses or weights at a resume before: not every kernel gives the same.

        None: they are of so many ranks that nobody can know.
        """
        if self._session.identity.world_size > _MAX_RANKS_OF_LOSS:
            return None
        checks = [event for event in read_journal(self._session.run_dir.journal, without=CURVES).events
                  if event.get("event") == Event.RESUME_CHECK.value]  # fmt: skip
        return any(words in str(check.get("text")) for check in checks for words in (LOSSES, LEARNED))

    def _give_up(self, error: Exception) -> None:
        """Witness no more steps: what cannot be looked at once cannot be in the next step."""
        self._ring = self._comparison = None
        self._has_given_up = True
        with contextlib.suppress(Exception):
            self._session.journal.emit(Event.DEGRADED, what="witness", why=f"{type(error).__name__}: {error}")
