"""The proof of a trainer's resume: what it has restored, and the steps that are done twice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from resilience_sdk.adapters._base import Patches
from resilience_sdk.adapters._proof import proof_of
from resilience_sdk.adapters.transformers.place import LoaderPlace
from resilience_sdk.adapters.transformers.seams import torch_optimizer
from resilience_sdk.checkpoint.proof import StateProof, state_check
from resilience_sdk.checkpoint.ranks import Alone, find_ranks, group_is_ready
from resilience_sdk.core.console import say_once
from resilience_sdk.rank import Session
from resilience_sdk.rank.loop_proof import LoopProof
from resilience_sdk.rank.pass_print import PassPrint
from resilience_sdk.rank.schedule_length import length_of

_CURES = {
    "samples": "let samplers draw from torch's generators or from set_epoch(epoch)",
    "learning rate": "give the scheduler to Trainer(optimizers=...), and let it step no rate itself",
    "generators": "let no callback seed a generator behind the resume",
    "loss": "look for what compute_loss() uses and the checkpoint does not hold: make it a buffer of the model, or an "
    "ExportableState",
    "weights": "look for what the step uses and the checkpoint does not hold, such as attributes of a callback or of "
    "the trainer: make it a buffer of the model, or an ExportableState",
}
_LOADS = ("_load_scaler", "_load_optimizer_and_scheduler")
"""What a trainer calls last of these, as far as it has them."""


class TrainerProof(Patches):
    """What one training leaves of its steps, and what is compared of its resume; of the thread that trains."""

    def __init__(self, trainer: Any, session: Session, skipped: Callable[[], Collection[int]]) -> None:
        super().__init__()
        self._trainer = trainer
        self._session = session
        self._skipped = skipped
        self._loop: LoopProof | None = None
        self._prints = PassPrint()
        self._read: list[tuple[int | None, int, Any]] = []
        """The batches of the step that is about to begin."""
        self._most_read = 0

    @property
    def _is_on(self) -> bool:
        return self._session.settings.resume_check != "off"

    # -- what the trainer restores

    def digests(self) -> dict[str, str]:
        """Return the digests of what the trainer saves; a part that cannot be looked at has none."""
        from resilience_sdk.checkpoint.digests import digests_of, entries_of_objects

        trainer = self._trainer
        if not self._is_on or getattr(trainer, "is_deepspeed_enabled", False):
            return {}
        found = {"model": trainer.model_wrapped, "optimizer": torch_optimizer(trainer)}
        found |= {"scheduler": trainer.lr_scheduler, "the scaler": getattr(trainer.accelerator, "scaler", None)}
        return digests_of(entries_of_objects({name: one for name, one in found.items() if one is not None}))

    def compare_with(self, saved: Mapping[str, Any], saved_ranks: int) -> None:
        """Compare what the trainer restores with the digests of the save, as soon as it has; collective then."""
        if not self._is_on:
            return  # as on all ranks; one that has nothing to compare has its part in the gathering
        trainer = self._trainer
        name = next((one for one in _LOADS if callable(getattr(trainer, one, None))), None)
        if name is None:
            say_once("trainer digests", "what the trainer restores is not compared: this version has another way")
            return
        plain = getattr(trainer, name)

        def load(*args: Any, **options: Any) -> Any:
            result = plain(*args, **options)
            self._compare(saved, saved_ranks)
            return result

        self.replace(trainer, name, load)

    def _compare(self, saved: Mapping[str, Any], saved_ranks: int) -> None:
        ranks = find_ranks() if group_is_ready() else Alone()
        own = {"ranks": [saved] * ranks.size} if saved else {}
        answers = ranks.gather(StateProof(own, saved_ranks, ranks).compare(lambda: ({}, self.digests())))
        if ranks.rank == 0:
            self._teller().tell(state_check(answers, saved_ranks))

    def _teller(self) -> LoopProof:
        return self._loop or LoopProof(self._session, self._prints, (), self._skipped)

    # -- steps

    def begins(self, place: LoaderPlace) -> None:
        """Know the samples of each batch from now on."""
        trainer = self._trainer
        self._prints, self._read = place.prints, []
        per_step = int(trainer.args.gradient_accumulation_steps)
        optimizer = torch_optimizer(trainer)
        optimizers = [] if optimizer is None else [optimizer]
        self._loop = proof_of(
            self._session, place.prints, optimizers, self._skipped, _CURES, per_step,
            lambda: length_of([trainer.lr_scheduler], int(trainer.state.max_steps)), str(trainer.args.output_dir),
        )  # fmt: skip
        self._most_read = 2 * per_step
        if self._loop is not None:
            self.on_detach(self._loop.close)
            place.told = self._take

    def _take(self, epoch: int | None, number: int, batch: Any) -> None:
        if len(self._read) > self._most_read:  # no step begins: the hooks are off
            self._read.clear()
        self._read.append((epoch, number, batch))

    def step_begins(self) -> None:
        """Look at the batches of a step: a trainer reads them first, and then sets its generators."""
        read, self._read = self._read, []
        if self._loop is not None:
            for epoch, number, batch in read:
                self._prints.note(batch)
                self._loop.batch(epoch, number, batch)

    def step_ends(self, step: int) -> None:
        """Leave the step, which is complete."""
        if self._loop is not None:
            self._loop.step(step)

    def saved(self) -> None:
        """Know of a save."""
        if self._loop is not None:
            self._loop.saved()
