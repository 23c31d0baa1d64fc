"""`attach()`: everything that the SDK has, for the training of one accelerator."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from resilience_sdk import environ, lanes
from resilience_sdk.adapters import pytorch
from resilience_sdk.adapters._base import checkpointer, framework
from resilience_sdk.adapters.accelerate.own_saves import OwnSaves
from resilience_sdk.adapters.accelerate.position import Position
from resilience_sdk.adapters.accelerate.prepared import Prepared, find_prepared
from resilience_sdk.adapters.accelerate.states import States, read_file
from resilience_sdk.adapters.accelerate.tracking import connect
from resilience_sdk.adapters.accelerate.uneven import Uneven
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.ranks import find_ranks, raise_together
from resilience_sdk.console import say_once
from resilience_sdk.errors import CheckpointError
from resilience_sdk.preemption import rank as listening
from resilience_sdk.session import Session
from resilience_sdk.session.ending import finish
from resilience_sdk.session.last_save import save_at_stop
from resilience_sdk.session.lifecycle import has_failed_to_start
from resilience_sdk.session.on_all_ranks import session_on_all_ranks
from resilience_sdk.session.run_start import begin_session
from resilience_sdk.settings import Settings


def attach(
    accelerator: Any,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    loader: Any = None,
    save: bool = True,
    resume: bool = True,
    settings: Settings | None = None,
    **overrides: Any,
) -> Attached:
    """Watch, save, resume and end the training of an accelerator; on every rank, behind `accelerator.prepare`.

    Each real step of the optimizer is a heartbeat, with all its micro-batches; `data`, `fwd`, `bwd`, `comm_wait`,
    `optim` and `checkpoint` are sections. Between two steps checkpoints are saved by `accelerator.save_state` into the
    run directory, as a whole or not at all; the newest one is loaded here, and the first pass over `loader` is then
    what is left of its epoch. When the job is asked to leave, all ranks save behind the same step, and `Preempted` is
    raised where the next step begins. Meanwhile the script's own `save_state` is whole or not at all too, and its
    `load_state` takes nothing else. Collective; no collective and no synchronisation with a device in a step.

    Args:
        accelerator: The `accelerate.Accelerator`.
        run_dir: Where everything is written; without it the launcher's, the setting, or a new directory.
        model: The prepared model that is trained; without it the one that has the optimizer's parameters.
        optimizer: The prepared optimizer whose steps are the progress; needed where there are several.
        loader: The prepared loader of the training; without it the first that was prepared.
        save: Save checkpoints into the run directory, and resume from there. Without it the script does both; a stop
            then calls `save_state()` where Accelerate numbers the directories.
        resume: Load the newest checkpoint of the run directory now.
        settings: All options; without it those of the launcher and the environment.
        **overrides: Single options by field name, such as `checkpoint_every="10min"`.

    Raises:
        ConfigError: Nothing is prepared, FSDP is asked for and not in effect, a loop is attached already, or an option
            is wrong.
        RunDirectoryError, CheckpointError: The directory cannot be used, what is there not be resumed.

    Example:
        with attach(accelerator, checkpoint_every="10min") as handle:
            for epoch in range(handle.epoch, epochs):
                for batch in loader:
                    train_step(batch)
    """
    pytorch.refuse_second()
    prepared = find_prepared(accelerator, model, optimizer, loader, env=environ.environment())
    session = session_on_all_ranks(lambda: begin_session("attach", run_dir, settings, overrides, resumes=save))
    if session is not None:
        session.settle()
    return Attached(accelerator, prepared, session, saves=save, resumes=resume)


class Attached:
    """What is hung on one accelerator, and how far its training is; a context manager that finishes or detaches.

    For the thread that trains. What may be read counts on when the SDK is switched off.
    """

    def __init__(
        self, accelerator: Any, prepared: Prepared, session: Session | None, *, saves: bool, resumes: bool
    ) -> None:
        """Put everything on, and resume; use `attach`."""
        self._accelerator = accelerator
        self._session = session
        self._checkpointer: Checkpointer | None = None
        self._position: Position | None = None
        self._own: OwnSaves | None = None
        self._uneven: Uneven | None = None
        if prepared.loader is not None:
            skip = framework("accelerate", "accelerate").skip_first_batches
            self._position = Position(prepared.loader, int(accelerator.num_processes), skip)
        self._states = States(accelerator, self._describe)
        if session is not None and saves:
            self._checkpointer = checkpointer(session, self._states.write)
        elif saves and has_failed_to_start():
            say_once("nothing saved", "attach: NOTHING IS SAVED or resumed in this run, for the reason above")
        # Before the hooks: what loads the state of a sharded optimizer makes a step of its own, which is none of ours.
        recorder = lanes.recorder() if session is not None else None
        if recorder is not None:
            recorder.user_beats()
        self._began = first = self._resume() if session is not None and resumes and session.may_resume else 0
        if self._checkpointer is not None:
            self._checkpointer.begins_at(first)
        self._loop = pytorch.watch(
            lambda: pytorch.Attached(
                prepared.model,
                prepared.optimizer,
                prepared.loader,
                first,
                between_steps=self._between_steps,
                through=None if self._position is None else self._walk,
            )
        )
        try:
            self._put_on_the_rest(prepared.loader)
        except BaseException:
            self.detach()  # so that nothing is left, and a second attach is a first one
            raise

    def _put_on_the_rest(self, loader: Any) -> None:
        # Also where the SDK is switched off: loops end by the number of steps.
        if self._accelerator.num_processes > 1:
            self._uneven = Uneven(self._accelerator, self._loop, loader)
        if self._session is None:
            return
        self._own = OwnSaves(self._accelerator, self._states, self._load)
        listening.begin(self._expected_save_s)
        connect(self._accelerator, self._session)

    # -- how far it is

    @property
    def step(self) -> int:
        """Completed optimizer steps, over all attempts; the number of the next one."""
        return self._loop.step

    @property
    def epoch(self) -> int:
        """Completed passes over the loader, over all attempts; the number of the one that is under way."""
        return 0 if self._position is None else self._position.epoch

    @property
    def samples(self) -> int:
        """Samples that all ranks together were given by the loader, over all attempts."""
        return 0 if self._position is None else self._position.total

    @property
    def is_attached(self) -> bool:
        """Whether it was not detached yet, and the model is still there."""
        return self._loop.is_attached

    # -- the end

    def save(self) -> bool:
        """Save into the run directory now; tell whether a whole checkpoint of this step is there. Collective."""
        return self._checkpointer is not None and self._checkpointer.save(self.step)

    def finish(self) -> None:
        """End a training that is complete: save once more, set the finished flag, detach. Collective.

        Where ranks are at different steps, it says so, and neither saves nor sets the flag.
        """
        if not self._loop.is_attached:
            return
        is_one = self._save_the_end()
        self.detach()
        if self._session is not None:
            finish(self._session, self.step, is_complete=is_one)

    def _save_the_end(self) -> bool:
        """Save what was trained; tell whether all ranks are at one step, without which it would be no one's state."""
        if self._checkpointer is None:
            return True
        steps = find_ranks().gather(self.step)
        least, most = min(steps), max(steps)
        if least != most:
            if self._accelerator.is_main_process:
                say_once(
                    "steps differ",
                    f"the end of the training is NOT SAVED: its ranks are at different steps ({least} to {most}), as "
                    "behind a load_state of one of them; load alone only behind handle.finish()",
                )
            return False
        if most != self._began:
            self.save()
        return True

    def detach(self) -> None:
        """Leave the accelerator and what it has prepared as they were; ends the deadlines. May be repeated."""
        self._loop.detach()
        if self._uneven is not None:
            self._uneven.restore()
        if self._own is not None:
            self._own.restore()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.detach()  # no collective: the other ranks may be elsewhere

    def _walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        assert self._position is not None
        if self._uneven is not None:
            self._uneven.pass_begins()
        return self._position.walk(batches)

    # -- checkpoints

    def _resume(self) -> int:
        """Load the newest checkpoint, if there is one; return how many steps are complete. Collective."""
        own = self._checkpointer
        if own is None or not own.resume() or own.last_good is None:
            return 0
        place = own.last_good.path

        def read() -> Mapping[str, Any]:
            saved = read_file(place)
            if saved is None:
                raise CheckpointError(
                    f"{place} was not saved by this adapter: give attach(..., run_dir=...) a directory of its own"
                )
            return saved

        saved = raise_together(find_ranks(), read)  # before what may be collective
        self._states.load(place)
        self._go_to(saved)
        return int(saved["step"])

    def _load(self, directory: Path, saved: Mapping[str, Any] | None, *args: Any, **options: Any) -> None:
        """Load what the script wants, and go where that was saved."""
        with self._loop.paused():
            self._states.load(directory, *args, **options)
        if saved is not None:
            self._loop.go_to(int(saved["step"]))
            self._go_to(saved)
        elif self._accelerator.is_main_process:
            say_once(
                "old state",
                f"{directory} was saved without the SDK: steps are counted from {self.step}, and the place in the data "
                "is not known",
            )

    def _go_to(self, saved: Mapping[str, Any]) -> None:
        """Go on in the data where that was saved, with random numbers as they are now: loaded."""
        if self._position is not None and saved.get("position") is not None:
            from resilience_sdk.checkpoint.rng import capture_rng, restore_rng  # imports torch

            states = capture_rng()
            self._position.resume(saved["position"], lambda: restore_rng(states))

    def _describe(self) -> dict[str, Any]:
        return {"step": self.step, "position": None if self._position is None else self._position.state()}

    def _expected_save_s(self) -> float:
        return 0.0 if self._checkpointer is None else self._checkpointer.expected_save_s

    def _between_steps(self, is_leaving: bool) -> int:
        """Save if it is time, or the last thing before the job leaves; return behind how many steps to ask again.

        Collective: all ranks are behind one step.
        """
        if not is_leaving:
            if self._checkpointer is None:
                return sys.maxsize
            self._checkpointer.maybe_save(self.step)
            return self._checkpointer.next_due()
        if self._checkpointer is not None:
            save_at_stop(self._checkpointer, self.step, self._session)
        elif self._own is not None and self._accelerator.project_configuration.automatic_checkpoint_naming:
            save_at_stop(_Numbered(self._own), self.step, self._session)
        return self.step


class _Numbered:
    """Saves where Accelerate numbers the directories, at a stop."""

    def __init__(self, own: OwnSaves) -> None:
        self._own = own

    def save(self, step: int) -> bool:
        """Save; tell whether that worked. Collective."""
        try:
            place = self._own.save_state()
        except Exception as error:  # noqa: BLE001 - a save that fails must not hinder the stop
            say_once("last save", f"the state after step {step} could not be saved: {error}")
            return False
        say_once("last save", f"saved after step {step}: {place}; accelerator.load_state() resumes it")
        return True
