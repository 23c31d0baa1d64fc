"""Steps that are done twice: the witness of each is compared with what the attempt before has left of it.

Where nothing else is said, the first difference is what counts: all that follows may follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from resilience_sdk.core.resume_limits import ResumeLimit
from resilience_sdk.core.resume_proof import (
    EXACT,
    NOT_COMPARED,
    NOT_EXACT,
    NOT_PROVEN,
    STEPS,
    UNLEARNED,
    ResumeCheck,
    not_all,
)
from resilience_sdk.recorder.witness_ring import (
    CONTENT,
    FIXED,
    GENERATORS,
    LOSS,
    ORDER,
    RATES,
    UNPLACED,
    WEIGHTS,
    WitnessedStep,
    Witnesses,
)

CURES: Mapping[str, str] = {
    "samples": "the data have to come in the same order again: let samplers draw from torch's generators or from "
    "set_epoch(epoch), or give a loader with state_dict()",
    "learning rate": "give the scheduler to state, and step it at one place of the loop",
    "generators": "let nothing seed a generator behind the resume, nor draw for what is made anew in the first step",
    "loss": "look for what the step uses and state does not hold, such as a buffer, an average or a module of its own",
    "weights": "look for what the step uses and state does not hold, such as a generator in a variable of the script, "
    "a buffer, an average or a module of its own",
}
# By how many steps a loss is heard late: one on a CPU.
_LOSS_LATE = 2
_OF_KERNELS = 1e-3
"""How far, relatively, a loss may be off by kernels that add up in another order each time, and in few bits."""
LOSSES, LEARNED = "their losses, too", "their weights, too"
"""What an exact resume says where they were compared."""


def differing_part(before: WitnessedStep, now: WitnessedStep, *, compares_rates: bool = True) -> tuple[str, str] | None:
    """Return the part of a step that differs first, and how, in words; None where both are the same step. Pure.

    Content alone is none of it, unless it is the same in each pass: data may be random on purpose.
    """
    seen = before.seen & now.seen
    where = "" if seen & UNPLACED else f", the order of epoch {now.epoch}"
    if (before.epoch, before.batch) != (now.epoch, now.batch):
        return "samples", f"batch {now.batch} of epoch {now.epoch} instead of batch {before.batch} of {before.epoch}"
    if seen & ORDER and before.order != now.order:
        return "samples", f"other samples{where}"
    is_other = bool(seen & CONTENT) and (before.content, before.shapes) != (now.content, now.shapes)
    if is_other and seen & FIXED:
        place = "the batch" if seen & UNPLACED else f"batch {now.batch} of epoch {now.epoch}"
        return "samples", f"other values in {place}"
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


def _nobody_knows() -> str:
    return "nobody knows what they were made of"


@attrs.define
class Comparison:
    """The steps of this attempt against those of the one before, one after the other, until one differs or all are."""

    before: Mapping[int, WitnessedStep]
    told: Callable[[ResumeCheck], None]
    last: int = -1
    """The last step that the attempt before has left."""
    is_trusted: Callable[[], bool | None] = bool
    """Whether a loss that differs counts: an earlier resume of this run had equal ones; None: never."""
    cures: Mapping[str, str] = CURES
    """What to do about each part, where the loop is that of a framework."""
    why_unknown: Callable[[], str] = _nobody_knows
    """Why the samples of the steps are not known, where they are not."""
    not_repeated: Callable[[], Sequence[ResumeLimit]] = tuple
    """What the resume has said that it does not repeat. Equal steps prove no more than that it has not told yet, unless
    it was said of what nobody can see: then equal losses or weights prove them."""
    equal: int = 0
    random: int = 0
    """Those of them with other values of samples that are known to be the same."""
    unknown: int = 0
    """Those with other values of samples that nobody knows, in one of the two attempts."""
    _is_unknown_now: bool = False
    equal_losses: int = 0
    other_loss: tuple[int, float, float] | None = None
    """The first step with another loss, that before, and now."""
    equal_weights: int = 0
    """Steps with the same weights, where the training has changed them since the first one."""
    other_weights: int | None = None
    """The first step with others."""
    _first_weights: int | None = None
    is_first_loss_partial: bool = False
    """Whether the loss of the first step had a part that was made before the save: it is not compared."""
    _first_loss: tuple[int, float, float] | None = None
    has_other_length: bool = False
    """Whether the training was made longer or shorter, so that a schedule over it gives other learning rates."""
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
        is_other_loop = bool((before.seen ^ now.seen) & UNPLACED)
        if is_other_loop or (now.seen & UNPLACED and before.batch != now.batch):
            why = f"step {now.step} has {now.batch} batches of the loader now, {before.batch} before"
            why = "the loop is another one than before" if is_other_loop else why
            self._finish(ResumeCheck(STEPS, NOT_COMPARED, why))
            return False
        first = not self.equal
        if first and before.seen & now.seen & RATES and before.rates != now.rates:
            self._compares_rates = False  # the restored options were compared: the program itself has changed it
        found = differing_part(before, now, compares_rates=self._compares_rates and not self.has_other_length)
        if found is not None:
            part, words = found
            self._finish(
                ResumeCheck(STEPS, NOT_EXACT, f"step {now.step}: {words}", part, now.step, cure=self.cures[part])
            )
            return False
        if is_random(before, now):
            is_known = bool(before.seen & now.seen & ORDER)
            self.random += is_known
            self.unknown += not is_known
            self._is_unknown_now = self._is_unknown_now or not (is_known or now.seen & ORDER)
        self._weigh(before, now)
        self.equal += 1
        # Behind the first step it is known what the resume has lost.
        if now.step >= self.last and self.equal > 1 and not (before.seen & LOSS or self.equal_losses):
            self.close()
        return not self._is_over

    def _weigh(self, before: WitnessedStep, now: WitnessedStep) -> None:
        if not before.seen & now.seen & WEIGHTS:
            return
        if self._first_weights is None:
            self._first_weights = now.weights
        if before.weights != now.weights:
            self.other_weights = now.step if self.other_weights is None else self.other_weights
        else:
            self.equal_weights += now.weights != self._first_weights

    def hear(self, step: int, loss: float) -> None:
        """Compare the loss of a step that was begun."""
        before = self.before.get(step)
        if before is None or not before.seen & LOSS or self.other_loss is not None:
            return
        if before.loss == loss or (math.isnan(before.loss) and math.isnan(loss)):
            self.equal_losses += 1
        elif step == min(self.before):
            self._first_loss = step, before.loss, loss
        else:
            self.other_loss = step, before.loss, loss

    def close(self) -> None:
        """Say what came out of it, if that was not done: no more steps are repeated."""
        if self.equal == 0:
            self._is_over = True
        if self._is_over:
            return
        if self._first_loss is not None and not self.is_first_loss_partial:
            self.other_loss = self._first_loss
        if self.unknown:
            why = self.why_unknown() if self._is_unknown_now else "the attempt before has left no indices of them"
            which = f"{self.unknown} of {self.equal} repeated steps have other values of samples that are not known"
            self._finish(ResumeCheck(STEPS, NOT_COMPARED, f"{which}: {why}"))
            return
        is_alike = not self.random and self._compares_rates and not self.has_other_length
        if is_alike and (other := self._other_result()) is not None:
            self._finish(other)
            return
        steps = "step" if self.equal == 1 else "steps"
        has_losses = bool(self.equal_losses) and self.other_loss is None
        has_weights = is_alike and bool(self.equal_weights) and self.other_weights is None and self.other_loss is None
        text = f"{self.equal} of {self.equal} repeated {steps} equal"
        if has_losses:
            text += f", {LOSSES}"
        elif has_weights:
            text += f", {LEARNED}"
        elif self.other_loss is not None and is_alike:
            text += ", but not all losses"
        elif is_alike:
            text += f" in samples and learning rates; {UNLEARNED}"
        if self.random:
            text += (
                f"; {self.random} with other values of the same samples, as of an augmentation with numbers of its own"
            )
        if self.has_other_length:
            text += "; their learning rates not compared: the training has another length than before"
        elif not self._compares_rates:
            text += "; their learning rates not compared: the program has set others"
        check = ResumeCheck(STEPS, EXACT, text)
        is_proven = has_losses or has_weights
        things = [limit.thing for limit in self.not_repeated() if not (is_proven and limit.is_conditional)]
        self._finish(not_all(check, things))

    def _other_result(self) -> ResumeCheck | None:
        """Return what comes out of losses or weights that differ where nothing else does, if anything."""
        is_trusted = None if self.other_loss is None and self.other_weights is None else self.is_trusted()
        if is_trusted is None:
            return None
        result = NOT_EXACT if is_trusted else NOT_PROVEN
        if self.other_loss is not None:
            step, was, now = self.other_loss
            is_far = bool(self.before[step].seen & CONTENT) and not math.isclose(was, now, rel_tol=_OF_KERNELS)
            if is_trusted or is_far:
                text = f"step {step}: loss {now:.9g} instead of {was:.9g}, of the same samples and learning rate"
                return ResumeCheck(STEPS, result, text, "loss", step, cure=self.cures["loss"])
        if self.other_weights is None:
            return None
        step = self.other_weights
        text = f"step {step}: other weights than before, of the same samples and learning rate"
        return ResumeCheck(STEPS, result, text, "weights", step, cure=self.cures["weights"])

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
    is_trusted: Callable[[], bool | None] = bool,
    cures: Mapping[str, str] = CURES,
    length: int = 0,
    training: int = 0,
    why_unknown: Callable[[], str] = _nobody_knows,
    no_facts: int = 0,
    not_repeated: Callable[[], Sequence[ResumeLimit]] = tuple,
) -> Comparison | None:
    """Return the comparison from `step` on; None where nothing is repeated, or `told` hears why it is not compared.

    `length`, `training`: as those of `Witnesses`, of now; `no_facts`: what stands for `facts` where nobody knows them.
    """
    repeated = {} if found is None else {number: one for number, one in found.steps.items() if number >= step}
    if found is None or not repeated:
        return None
    why = None
    if found.world_size != world_size:
        why = f"{found.world_size} ranks were at these steps before, {world_size} are now"
    elif skipped:
        why = "the run was rolled back, and batches are left out"
    elif found.training and training and found.training != training:
        why = "these steps were those of another training before: the program has several in one process"
    elif found.facts != facts and facts == no_facts:
        why = f"a step has other batches than before, or its samples are known no more ({why_unknown()})"
    elif found.facts != facts and found.facts == no_facts:
        why = "the attempt before has left no indices of its samples"
    elif found.facts != facts:
        why = (
            "a step has other batches, or the loader other data, than in the first pass of the attempt before (one may "
            "grow from epoch to epoch)"
        )
    if why is not None:
        told(ResumeCheck(STEPS, NOT_COMPARED, why))
        return None
    has_other_length = bool(found.length and length) and found.length != length
    return Comparison(
        repeated, told, max(repeated), is_trusted, cures, why_unknown, not_repeated, has_other_length=has_other_length
    )
