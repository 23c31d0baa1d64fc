"""The proof of a fit's resume: what Lightning has restored, and the steps that are done twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilience_sdk.adapters._base import Patches
from resilience_sdk.adapters._proof import proof_of
from resilience_sdk.adapters.lightning.saves import FitCheckpoints
from resilience_sdk.core.console import say_once
from resilience_sdk.rank import Session
from resilience_sdk.rank.pass_print import PassPrint
from resilience_sdk.rank.schedule_length import length_of

_CURES = {
    "samples": "let samplers draw from torch's generators or from set_epoch(epoch), or give a loader with state_dict()",
    "learning rate": "return the scheduler from configure_optimizers(), or keep what it counts by in the state_dict() "
    "of a callback",
    "generators": "let no hook seed a generator behind the resume",
    "loss": "look for what training_step uses and the checkpoint does not hold: give it to on_save_checkpoint() and "
    "on_load_checkpoint() of the module, or make it a buffer",
    "weights": "look for what the step uses and the checkpoint does not hold: attributes of the module or of a "
    "callback, a generator, an average; give it to state_dict() of a callback, or make it a buffer",
}


class FitProof(Patches):
    """What one fit leaves of its steps, and what is compared of its resume; of the thread that trains, on each rank."""

    def __init__(self, trainer: Any, session: Session, checkpoints: FitCheckpoints, prints: PassPrint) -> None:
        """Hang on what Lightning restores by. `prints`: the samples of the one loader of the training."""
        super().__init__()
        self._trainer = trainer
        self._prints = prints
        checkpointer = checkpoints.checkpointer
        per_step = int(getattr(trainer, "accumulate_grad_batches", 1) or 1)
        self._proof = proof_of(session, prints, (), lambda: checkpointer.skipped_steps, _CURES, per_step,
                               self._length, self._key())  # fmt: skip
        if self._proof is None:
            return
        self.on_detach(self._proof.close)
        checkpointer.also_compare(self._restored)
        connector = getattr(trainer, "_checkpoint_connector", None)
        plain = getattr(connector, "restore_training_state", None)
        if not callable(plain):
            say_once("lightning digests", "what Lightning restores is not compared: this version has another way")
            return

        def restore_training_state() -> None:
            plain()
            if checkpoints.is_resumed:  # and nothing that the user has named
                checkpointer.compare()

        self.replace(connector, "restore_training_state", restore_training_state)

    def _length(self) -> int:
        trainer = self._trainer
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        return length_of(schedulers, trainer.max_steps, trainer.max_epochs)

    def _key(self) -> str:
        module = type(getattr(self._trainer, "lightning_module", None))
        return f"{module.__qualname__} {getattr(self._trainer, 'default_root_dir', None)}"

    def _restored(self) -> Mapping[str, Any]:
        """Return what Lightning restores by itself."""
        trainer = self._trainer
        model = getattr(trainer.strategy, "model", None)
        found: dict[str, Any] = {"model": trainer.lightning_module if model is None else model}
        optimizers = list(trainer.optimizers)
        schedulers = [getattr(one, "scheduler", None) for one in getattr(trainer, "lr_scheduler_configs", ())]
        for kind, items in (("optimizer", optimizers), ("scheduler", schedulers)):
            found |= {f"{kind} {number}": item for number, item in enumerate(items) if item is not None}
        scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        return found if scaler is None else {**found, "the scaler": scaler}

    # -- steps

    def train_starts(self) -> None:
        """Know the optimizers, which are there by now."""
        if self._proof is not None:
            self._proof.watch_optimizers(getattr(one, "optimizer", one) for one in self._trainer.optimizers)

    def batch(self, batch: Any, number: int) -> None:
        """Take the batch that is about to be trained on: that of this number in its epoch."""
        if self._proof is not None:
            self._prints.note(batch)
            self._proof.batch(int(self._trainer.current_epoch), number, batch)

    def step(self, step: int) -> None:
        """Leave the step of these batches, which is complete."""
        if self._proof is not None:
            self._proof.step(step)
