"""Steps that are done twice: each is witnessed as it begins, and compared with what the attempt before has left of it.

Where nothing else is said, the first difference is what counts: all that follows may follow from it.
"""

from __future__ import annotations

import ctypes
import math
import random
import struct
import sys
from array import array
from binascii import crc32
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.core.journal import CURVES, Event, read_journal
from resilience_sdk.core.resume_proof import EXACT, NOT_COMPARED, NOT_EXACT, STEPS, ResumeCheck
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.rank.fingerprints import print_of_content
from resilience_sdk.recorder.witness_ring import (
    CONTENT,
    FIXED,
    GENERATORS,
    LOSS,
    ORDER,
    RATES,
    WitnessedStep,
    Witnesses,
    WitnessRing,
)

if TYPE_CHECKING:
    from resilience_sdk.rank.data import Walk
    from resilience_sdk.rank.session import Session

_CURES = {
    "samples": "the data have to come in the same order again: let samplers draw from torch's generators or from "
    "set_epoch(epoch), or give a loader with state_dict()",
    "learning rate": "give the scheduler to state, and step it at one place of the loop",
    "generators": "let nothing seed a generator behind the resume",
    "loss": "look for what the step uses and state does not hold, such as a buffer, an average or a module of its own",
}
# By how many steps a loss is heard late: one on a CPU.
_LOSS_LATE = 2
# Sums over more ranks may come in another order.
_MAX_RANKS_OF_LOSS = 2
_LOSSES = "their losses, too"


def rates_of(optimizers: Iterable[Any]) -> tuple[int, float] | None:
    """Return a number for the learning rates of all groups, and the first; None where one lies on a device."""
    rates = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr", 0.0)
            if not isinstance(rate, float):
                if getattr(rate, "is_cpu", True) is False:
                    return None
                rate = float(rate)
            rates.append(rate)
    return (crc32(struct.pack(f"<{len(rates)}d", *rates)), rates[0]) if rates else None


def differing_part(before: WitnessedStep, now: WitnessedStep, *, compares_rates: bool = True) -> tuple[str, str] | None:
    """Return the part of a step that differs first, and how, in words; None where both are the same step. Pure.

    Content alone is none of it, unless it is the same in each pass: data may be random on purpose.
    """
    seen = before.seen & now.seen
    if (before.epoch, before.batch) != (now.epoch, now.batch):
        return "samples", f"batch {now.batch} of epoch {now.epoch} instead of batch {before.batch} of {before.epoch}"
    if seen & ORDER and before.order != now.order:
        return "samples", f"other samples, the order of epoch {now.epoch}"
    is_other = bool(seen & CONTENT) and (before.content, before.shapes) != (now.content, now.shapes)
    if is_other and seen & FIXED:
        return "samples", f"other values in batch {now.batch} of epoch {now.epoch}"
    if seen & RATES and compares_rates and before.rates != now.rates:
        if before.rate != now.rate:
            return "learning rate", f"learning rate {now.rate:.6g} instead of {before.rate:.6g}"
        return "learning rate", "another learning rate of a group behind the first"
    if seen & GENERATORS and before.generators != now.generators and not is_other:
        return "generators", "random number generators in another state"
    return None


def is_random(before: WitnessedStep, now: WitnessedStep) -> bool:
    """Tell whether a step has other values than before, though nothing says that it should have the same. Pure."""
    seen = before.seen & now.seen
    return bool(seen & CONTENT) and not seen & FIXED and (before.content, before.shapes) != (now.content, now.shapes)


@attrs.define
class Comparison:
    """The steps of this attempt against those of the one before, one after the other, until one differs or all are."""

    before: Mapping[int, WitnessedStep]
    told: Callable[[ResumeCheck], None]
    last: int = -1
    """The last step that the attempt before has left."""
    is_trusted: Callable[[], bool] = bool
    """Whether a loss that differs counts: an earlier resume of this run had equal ones."""
    equal: int = 0
    random: int = 0
    equal_losses: int = 0
    other_loss: tuple[int, float, float] | None = None
    """The first step with another loss, that before, and now."""
    _compares_rates: bool = True
    _is_over: bool = False

    def look(self, now: WitnessedStep) -> bool:
        """Compare a step as it begins; tell whether there are more to compare."""
        before = self.before.get(now.step)
        if before is None:
            if now.step < self.last:  # more are repeated than the ring has places, or this one was left out
                return True
            late = _LOSS_LATE if self.before[self.last].seen & LOSS or self.equal_losses else 0
            if self.last < now.step < self.last + late:
                return True
            self.close()
            return False
        first = not self.equal
        if first and before.seen & now.seen & RATES and before.rates != now.rates:
            self._compares_rates = False  # the restored options were compared: the program itself has changed it
        found = differing_part(before, now, compares_rates=self._compares_rates)
        if found is not None:
            part, words = found
            self._finish(ResumeCheck(STEPS, NOT_EXACT, f"step {now.step}: {words}", part, now.step, cure=_CURES[part]))
            return False
        self.random += is_random(before, now)
        self.equal += 1
        if now.step >= self.last and not (before.seen & LOSS or self.equal_losses):
            self.close()
        return not self._is_over

    def hear(self, step: int, loss: float) -> None:
        """Compare the loss of a step that was begun."""
        before = self.before.get(step)
        if before is None or not before.seen & LOSS or self.other_loss is not None:
            return
        if before.loss == loss or (math.isnan(before.loss) and math.isnan(loss)):
            self.equal_losses += 1
        else:
            self.other_loss = step, before.loss, loss

    def close(self) -> None:
        """Say what came out of it, if that was not done: no more steps are repeated."""
        if self.equal == 0:
            self._is_over = True
        if self._is_over:
            return
        is_known = any(one.seen & (ORDER | FIXED) for one in self.before.values())
        if self.random and not is_known:
            why = "batches that come from a stream, or in any order, are not repeatable"
            self._finish(ResumeCheck(STEPS, NOT_COMPARED, why))
            return
        if self.other_loss is not None and not self.random and self._compares_rates and self.is_trusted():
            step, was, now = self.other_loss
            text = f"step {step}: loss {now:.9g} instead of {was:.9g}, of the same samples and learning rate"
            self._finish(ResumeCheck(STEPS, NOT_EXACT, text, "loss", step, cure=_CURES["loss"]))
            return
        steps = "step" if self.equal == 1 else "steps"
        text = f"{self.equal} of {self.equal} repeated {steps} equal"
        if self.equal_losses and self.other_loss is None:
            text += f", {_LOSSES}"
        if self.random:
            text += (
                f"; {self.random} with other values of the same samples, as of an augmentation with numbers of its own"
            )
        self._finish(ResumeCheck(STEPS, EXACT, text))

    def _finish(self, check: ResumeCheck) -> None:
        self._is_over = True
        self.told(check)


def begin(
    found: Witnesses | None,
    step: int,
    world_size: int,
    facts: int,
    skipped: Collection[int],
    told: Callable[[ResumeCheck], None],
    is_trusted: Callable[[], bool] = bool,
) -> Comparison | None:
    """Return the comparison from `step` on; None where nothing is repeated, or `told` hears why it is not compared."""
    repeated = {} if found is None else {number: one for number, one in found.steps.items() if number >= step}
    if found is None or not repeated:
        return None
    why = None
    if found.world_size != world_size:
        why = f"{found.world_size} ranks were at these steps before, {world_size} are now"
    elif skipped:
        why = "the run was rolled back, and batches are left out"
    elif found.facts != facts:
        why = "the loader has other batches, or other data, than before"
    if why is not None:
        told(ResumeCheck(STEPS, NOT_COMPARED, why))
        return None
    return Comparison(repeated, told, max(repeated), is_trusted)


class StepWitness:
    """What a loop leaves of each step, and what it compares it with; of the thread that trains. Never raises."""

    def __init__(
        self, session: Session, walk: Walk, optimizers: Iterable[Any], skipped: Callable[[], Collection[int]]
    ) -> None:
        """Witness the steps of one loop. `skipped()`: steps whose batches are left out since a rollback."""
        self._session = session
        self._walk = walk
        self._optimizers = tuple(optimizers)
        self._skipped = skipped
        self._ring: WitnessRing | None = None
        self._comparison: Comparison | None = None
        self._is_begun = False
        self._looks_at_generators = 2

    def saved(self) -> None:
        """Look at the generators in the next two steps: those behind a save."""
        self._looks_at_generators = 2

    def note(self, step: int, batch: Any) -> None:
        """Leave a step as it begins, with its batch."""
        if self._ring is None and (self._is_begun or not self._begin(step)):
            return
        try:
            one = self._look(step, batch)
        except Exception as error:  # noqa: BLE001 - a batch or an optimizer of somebody else's kind
            self._give_up(error)
            return
        if self._ring is not None:
            self._ring.put(*one, 0.0)
        if self._comparison is not None and not self._comparison.look(WitnessedStep(*one)):
            self._comparison = None

    def close(self) -> None:
        """Say what came out of the comparison, where not all steps that were to be repeated are."""
        if self._comparison is not None:
            self._comparison.close()
            self._comparison = None

    def _begin(self, step: int) -> bool:
        self._is_begun = True
        facts = self._walk.facts
        self._ring = self._session.make_witness_ring(facts)
        if self._ring is None:
            return False
        if step:
            before, size = self._session.find_witnesses(), self._session.identity.world_size
            told = self._walk.told
            self._comparison = begin(before, step, size, facts, self._skipped(), told, self._losses_count)
        watch = numerics.watch_of_adapters()
        if watch is not None:
            watch.heard = self._hear
        return True

    def _hear(self, step: int, loss: float) -> None:
        if self._ring is not None:
            self._ring.add_loss(step, loss)
        if self._comparison is not None:
            self._comparison.hear(step, loss)

    def _losses_count(self) -> bool:
        """Tell whether this run has repeated its losses at a resume before: not every kernel gives the same twice."""
        if self._session.identity.world_size > _MAX_RANKS_OF_LOSS:
            return False
        checks = [event for event in read_journal(self._session.run_dir.journal, without=CURVES).events
                  if event.get("event") == Event.RESUME_CHECK.value]  # fmt: skip
        return any(_LOSSES in str(check.get("text")) for check in checks)

    def _look(self, step: int, batch: Any) -> tuple[int, int, int, int, int, int, int, int, float, int]:
        walk, seen, generators = self._walk, CONTENT, 0
        shapes, content = print_of_content(batch)
        if walk.newest_order is not None:
            seen |= ORDER
        elif walk.is_fixed:
            seen |= FIXED
        rates = rates_of(self._optimizers)
        if rates is not None:
            seen |= RATES
        if self._looks_at_generators:
            self._looks_at_generators -= 1
            generators, seen = _print_of_generators(), seen | GENERATORS
        rate_print, rate = rates or (0, 0.0)
        order = walk.newest_order or 0
        return step, walk.epoch, walk.batches, seen, shapes, order, content, rate_print, rate, generators

    def _give_up(self, error: Exception) -> None:
        """Witness no more steps: what cannot be looked at once cannot be in the next step."""
        self._ring = self._comparison = None
        self._session.journal.emit(Event.DEGRADED, what="witness", why=f"{type(error).__name__}: {error}")


def _print_of_generators() -> int:
    """Return a number for the generators of this process, as quick as it can be: it may be that of every step."""
    _, words, gauss = random.getstate()
    found = crc32(array("Q", words), crc32(repr(gauss).encode()))
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        _, keys, *others = numpy.random.get_state(legacy=True)
        found = crc32(keys.tobytes(), crc32(repr(tuple(map(float, others))).encode(), found))
    if torch is not None:
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state())  # kept on the host
        for state in states:
            found = crc32(ctypes.string_at(state.data_ptr(), state.numel()), found)
    return found
