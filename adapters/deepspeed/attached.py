"""`attach()`: everything that the SDK has, for the training of one engine."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

from resilience_sdk.adapters._base import (
    HookedSection,
    Patches,
    checkpointer,
    errors_kept,
    refuse_second,
    say_not_copied,
)
from resilience_sdk.adapters._saving import SavingLoop
from resilience_sdk.adapters.deepspeed.engine_calls import COLLECTIVES, EngineSteps, Pending
from resilience_sdk.adapters.deepspeed.loaders import (
    TimedOwnLoader,
    counts_by_itself,
    is_own,
    is_repeating,
    note_curriculum,
    note_taken_over,
    source_of,
)
from resilience_sdk.adapters.deepspeed.place import EngineState, Place, is_window_open, note_open_window
from resilience_sdk.adapters.deepspeed.proof import (
    Onlooker,
    engine_proof,
    loader_of,
    make_pass,
    noted,
    say_not_compared,
)
from resilience_sdk.adapters.pytorch import unscaled_kept
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.manifest import SHARDED
from resilience_sdk.checkpoint.ranks import find_ranks, raise_together
from resilience_sdk.core.console import say_once
from resilience_sdk.core.resume_limits import note
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import CheckpointError, ConfigError
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.preemption import listener as listening
from resilience_sdk.rank import Session
from resilience_sdk.rank.all_ranks import session_on_all_ranks
from resilience_sdk.rank.data import has_state
from resilience_sdk.rank.lifecycle import has_failed_to_start
from resilience_sdk.rank.run import begin_session
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler import section

if TYPE_CHECKING:
    from resilience_sdk.checkpoint.capture import Staging

_SEAMS = (
    *("module", "global_steps", "backward", "step", "allreduce_gradients", "gradient_accumulation_steps"),
    *("is_gradient_accumulation_boundary", "save_checkpoint", "load_checkpoint", "checkpoint_engine"),
)
_STAGED = "TorchCheckpointEngine"
"""The writer of checkpoints whose files are whole when it returns, and which takes any thread."""


def attach(
    engine: Any,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    loader: Any = None,
    state: Mapping[str, Any] | None = None,
    save: bool = True,
    resume: bool = True,
    settings: Settings | None = None,
    **overrides: Any,
) -> Attached:
    """Watch, save, resume and end the training of an engine; on every rank, behind `deepspeed.initialize`.

    Each step by which `engine.global_steps` grows is a heartbeat, with all its micro-batches; `data`, `fwd`, `bwd`,
    `comm_wait`, `optim`, `checkpoint` and `resume` are sections. Between two steps checkpoints are saved by
    `engine.save_checkpoint` into the run directory, as a whole or not at all; the newest one is loaded here, and the
    first pass over `loader` is then what is left of its epoch. When the job is asked to leave, all ranks save behind
    the same step, and `Preempted` is raised where the next step begins. Collective; no collective and no
    synchronisation with a device in a step.

    Args:
        engine: What `deepspeed.initialize` has returned first, or `accelerator.prepare` for a model with DeepSpeed.
        run_dir: Where everything is written; without it the launcher's, the setting, or a new directory.
        loader: What each epoch iterates anew, such as a `DataLoader`, or DeepSpeed's own of `training_data=`; also in a
            `RepeatingLoader`. It stays the object that it is.
        state: What else travels with the checkpoints, by name, as in `start_run`: an average of the weights, a
            schedule of the script's own. Plain values: `handle.values`.
        save: Save checkpoints into the run directory, and resume from there. Without it the script does both.
        resume: Load the newest checkpoint of the run directory now.
        settings: All options; without it those of the launcher and the environment.
        **overrides: Single options by field name, such as `checkpoint_every="10min"`.

    Raises:
        ConfigError: It is no engine that trains, or one of a pipeline; a loop is attached already, or an option is
            wrong.
        RunDirectoryError, CheckpointError: The directory cannot be used, what is there not be resumed.

    Example:
        with attach(engine, loader=loader, checkpoint_every="10min") as handle:
            while handle.step < steps:
                for batch in loader:
                    train_step(batch)
    """
    refuse_second()
    _check(engine, saves=save)
    session = session_on_all_ranks(lambda: begin_session("attach", run_dir, settings, overrides, resumes=save))
    if session is not None:
        session.settle()
    return Attached(engine, loader, session, saves=save, resumes=resume, state=state)


def _check(engine: Any, *, saves: bool) -> None:
    kinds = {kind.__name__ for kind in type(engine).__mro__}
    if "DeepSpeedEngine" not in kinds:
        raise ConfigError(
            f"attach({type(engine).__name__}): expected the engine, which deepspeed.initialize() returns first"
        )
    if "PipelineEngine" in kinds:
        raise ConfigError(
            "attach(engine): a PipelineEngine has no forward, backward and step of its own, only train_batch(); write "
            "`with heartbeat(step=engine.global_steps): engine.train_batch(data)` and `preemption.check()` instead"
        )
    missing = [name for name in _SEAMS if not hasattr(engine, name)]
    if missing:
        raise ConfigError(
            f"attach(engine): this version of DeepSpeed has no DeepSpeedEngine.{missing[0]}; "
            "pip install 'deepspeed>=0.19', or write `with heartbeat():` around each step"
        )
    if engine.optimizer is None or type(engine.optimizer).__name__ == "DummyOptim":
        raise ConfigError("attach(engine): it has no optimizer, so that it makes no steps; give one to initialize()")
    is_late = getattr(engine.checkpoint_engine, "is_decoupled", None)
    if saves and is_late is not None and is_late():
        raise ConfigError(
            f"attach(engine): {type(engine.checkpoint_engine).__name__} writes on behind save_checkpoint(), so that no "
            "checkpoint is known to be whole; leave checkpoint.writer out of the configuration and set "
            "checkpoint_async=True, or attach(engine, save=False)"
        )
    if saves and getattr(engine, "use_node_local_storage", bool)():
        raise ConfigError(
            "attach(engine): checkpoint.use_node_local_storage is on, and the run directory is shared by all nodes; "
            "turn it off, or attach(engine, save=False)"
        )


class Attached(SavingLoop):
    """What is hung on one engine, and how far its training is; a context manager that finishes or detaches.

    For the thread that trains. What may be read counts on when the SDK is switched off.
    """

    def __init__(
        self,
        engine: Any,
        loader: Any,
        session: Session | None,
        *,
        saves: bool,
        resumes: bool,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Put everything on, and resume; use `attach`."""
        self._repeating = loader if is_repeating(loader) else None
        loader = loader.loader if self._repeating is not None else loader
        is_counted = not counts_by_itself(loader)
        self._engine, self._session, self._data = engine, session, loader if is_counted else None
        self._plain_save, self._plain_load = engine.save_checkpoint, engine.load_checkpoint
        self._source = source_of(self._data)
        self._walk, self._is_in_pass = Place(engine, self._source), False
        self._kept = EngineState(engine)
        self._is_placed = False
        """Whether the place is that of the training, and not of what the script has loaded by itself."""
        self._stagings: dict[int, Staging] = {}
        self._checkpointer: Checkpointer | None = None
        self._values: dict[str, Any] = {}
        self._is_communicating = False
        if session is not None and saves:
            is_staged = type(engine.checkpoint_engine).__name__ == _STAGED
            self._checkpointer = checkpointer(session, self._write, self._stage if is_staged else None, state)
            self._checkpointer.also_compare(self._compared)
            self._checkpointer.also_held(self._compared)
            self._values = self._checkpointer.values
            self._checkpointer.position = self._walk
            if loader is not None and has_state(loader):
                self._checkpointer.add_data("loader", loader)
        elif saves and has_failed_to_start():
            say_once("nothing saved", "attach: NOTHING IS SAVED or resumed in this run, for the reason above")
        recorder = lookup.recorder() if session is not None else None
        if recorder is not None:
            recorder.user_beats()
        if session is not None and resumes and session.may_resume:
            self._resume()
        if session is not None:
            self._note_limits(loader, saves=saves)
        self._began = int(engine.global_steps)
        self._is_placed = saves and (not self._began or self._walk.saved is not None)
        self._micro_steps_before = int(engine.micro_steps)
        if self._checkpointer is not None:
            self._checkpointer.add_data(EngineState.ENTRY, self._kept)
            self._checkpointer.begins_at(self._began)
        self._steps = EngineSteps(engine)
        super().__init__(engine.module, self._steps, self._data, self._began)
        try:
            self._prove(loader)
            self._put_on_the_rest()
        except BaseException:
            self.detach()  # so that nothing is left, and a second attach is a first one
            raise

    def _prove(self, loader: Any) -> None:
        """Leave a witness of each step, and compare those that are repeated. `loader`: what `attach` was given."""
        prints, own = self._walk.prints, self._checkpointer
        proof = engine_proof(self._session, self._engine, prints, lambda: () if own is None else own.skipped_steps)
        if proof is None:
            return
        self.proof = proof
        self.on_detach(proof.close)
        if self._data is not None:
            return
        found = None if loader is not None else loader_of(self._engine)
        if found is not None:
            Onlooker(self, found, prints)
        elif self._began:
            say_not_compared(proof, loader)

    def _put_on_the_rest(self) -> None:
        engine = self._engine
        # Also where the SDK is switched off: loops end by the number of steps.
        self.replace(engine, "step", self._steps.step)
        if self._data is not None and self._loader is None:
            self._watch_loader(self._data)
        self._take_repeating()
        if self._session is None:
            return
        self.replace(engine, "save_checkpoint", self._save_of_script)
        self.replace(engine, "load_checkpoint", self._load_of_script)
        self._watch_communication()
        listening.begin(self.expected_save_s)

    def _watch_loader(self, loader: Any) -> None:
        if is_own(loader):
            self._loader = TimedOwnLoader(loader, self)
            self.on_detach(self._loader.restore)
        else:
            super()._watch_loader(loader)

    def _take_repeating(self) -> None:
        """Have the pass counted that a `RepeatingLoader` has begun already; DeepSpeed's own loader does so itself."""
        repeating, data = self._repeating, self._data
        if repeating is None or data is None or self._loader is None or is_own(data):
            return
        begun = repeating.data_iter
        if self.takes_over(data):
            self._walk.prints.begun_before(data, begun)
            repeating.data_iter = self._loader.watch(begun)
        else:
            repeating.data_iter = iter(data)

    def takes_over(self, loader: Any) -> bool:
        """Count a pass that was begun before `attach`; False where a resume needs another one."""
        if self._walk.is_resumed:
            if self._walk.is_ahead:  # so was the pass that goes on
                note_taken_over(loader, self._source)
            return False
        self.pass_begins()
        self._walk.is_ahead = True
        self._walk.prints.begun_before(loader, None)
        note_taken_over(loader, self._source)
        return True

    def _note_limits(self, loader: Any, *, saves: bool) -> None:
        """Say what a resume will not repeat."""
        if not saves:
            note(
                "deepspeed own checkpoints",
                "the place in the data, and random numbers",
                "attach(engine, save=False) leaves checkpoints to the script, and DeepSpeed's have neither",
                "leave save=False out",
            )
            return
        self._kept.note_limits()
        if loader is None:
            note(
                "deepspeed loader",
                "the place in the data",
                "attach() was given no loader, so that a loop which does not go on behind handle.step by itself reads "
                "its data from the beginning",
                "give it loader=, what each epoch iterates",
            )
        elif self._data is None:
            note_curriculum()
        elif self._checkpointer is not None:
            self._checkpointer.note_walked(loader)

    # -- how far it is

    @property
    def epoch(self) -> int:
        """Completed passes over the loader, over all attempts; the number of the one that is under way."""
        return self._walk.epoch

    @property
    def values(self) -> dict[str, Any]:
        """Plain values that travel with the checkpoints: numbers, texts, lists and dicts of them."""
        return self._values

    def _step_ends(self, *arguments: Any) -> None:
        self._walk.step_ends()
        if self._micro_steps_before >= 0:
            self._compare_reads()
        self.step = int(self._engine.global_steps) - 1  # the script may have loaded another state
        super()._step_ends(*arguments)

    def _compare_reads(self) -> None:
        """Say at the first step where it was not made of the batches that were counted."""
        made, self._micro_steps_before = int(self._engine.micro_steps) - self._micro_steps_before, -1
        own = self._checkpointer
        if self._data is None or own is None or own.skipped_steps:
            return
        if not self._walk.read:
            note(
                "deepspeed unread",
                "the place in the data",
                "a step was made without a batch of the loader that attach() was given",
                "give it the loader that the loop iterates, and make iterators of it behind attach()",
            )
        elif made == self._engine.gradient_accumulation_steps() and self._walk.read > made:
            note(
                "deepspeed reads ahead",
                "batches that the loop has read ahead",
                f"the first step was made with {self._walk.read} batches read of {made}, and those are left out",
                "give attach() the loader that the loop itself iterates, such as the one that reads ahead",
            )

    # -- losses, and waits for other ranks

    def _watch_losses(self) -> None:
        super()._watch_losses()  # of loss.backward(), which DeepSpeed takes as well
        engine = self._engine
        self.replace(engine, "backward", self._backward_heard(engine.backward))
        if hasattr(type(engine), "scale"):
            self.replace(engine, "scale", functools.partial(unscaled_kept(type(engine).scale), engine))

    def _backward_heard(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Hear of the loss as the script has it: inside, the engine divides it by the micro-batches and scales it."""
        guard = self.guard

        @functools.wraps(plain)
        def backward(loss: Any, *args: Any, **options: Any) -> Any:
            is_ours = guard.is_on and get_ident() == self._thread
            if is_ours:
                numerics.judge_steps()  # here, since an error would not pass through a hook
            thread, self._thread = self._thread, 0
            try:
                result = plain(loss, *args, **options)
            finally:
                self._thread = thread
            self._steps.is_behind_backward = True
            if is_ours:
                guard.run(lambda: self._losses.add(loss))
            return result

        return backward

    def _watch_communication(self) -> None:
        """Tell waits for other ranks from work: ZeRO gathers and reduces within the passes."""
        engine = self._engine
        waits = HookedSection("comm_wait", "comm")
        plain = engine.allreduce_gradients

        @functools.wraps(plain)
        def allreduce_gradients(*args: Any, **options: Any) -> Any:
            self.guard.run(waits.begin)
            try:
                result = plain(*args, **options)
            except BaseException:
                waits.drop()
                raise
            self.guard.run(waits.end)
            return result

        self.replace(engine, "allreduce_gradients", allreduce_gradients)
        backend = getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None)
        for name in COLLECTIVES:
            if callable(getattr(backend, name, None)):
                self.replace(backend, name, self._bracketed(getattr(backend, name)))

    def _bracketed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        begin, end = (self.guard(call) for call in (self._sections.waits.begin, self._sections.waits.end))

        @functools.wraps(plain)
        def collective(*args: Any, **options: Any) -> Any:
            # Between two steps a rank waits as long as another one takes to write its checkpoint.
            if self._is_communicating or self._beat.beat is None:
                return plain(*args, **options)
            self._is_communicating = True
            begin()
            try:
                result = plain(*args, **options)
            finally:
                end()
                self._is_communicating = False
            return Pending(result, begin, end) if hasattr(result, "wait") else result

        uncompiled: Callable[..., Any] = torch.compiler.disable(collective)  # as DeepSpeed's own is
        return uncompiled

    # -- passes

    def pass_begins(self) -> None:
        """Set what the next iterator draws its order from: after a resume, as it was."""
        if self._is_in_pass:  # the last pass was left by a break
            self._walk.finish_epoch()
        self._is_in_pass = True
        self._walk.prepare_epoch(self._source)
        self._walk.pass_begins(is_open=is_window_open(self._engine))

    def make_pass(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return a new iterator of the loader, whose samples are known from then on."""
        return make() if self.proof is None else make_pass(self._walk.prints, self._data, make)

    def walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count the batches, and leave out those that were trained on before a resume."""
        batches = noted(self._walk.prints, batches)
        own, ranks = self._checkpointer, self._session
        is_speaker = ranks is None or ranks.identity.rank == 0
        restore_rng = _nothing if own is None else own.restore_rng
        if self._walk.is_unread:
            restore_rng()  # what follows is behind the loop
            self._walk.finish_epoch()
            self._is_in_pass = False
            return iter(())
        if self._walk.is_ahead and self._walk.is_resumed:
            self._walk.draw_as_begun()
        counted = self._counted(self._walk.enter_epoch(batches, restore_rng, is_speaker=is_speaker))
        if own is None or not own.skipped_steps:
            return counted
        per_step = int(self._engine.gradient_accumulation_steps())
        return self.without(own.skipped_steps, counted, per_step, is_speaker=is_speaker)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        walk = self._walk
        for batch in batches:
            self.batch_read(walk.epoch if self._is_placed else None, walk.batches, batch)
            walk.batches += 1
            walk.read += 1
            yield batch
        self._walk.finish_epoch()
        self._is_in_pass = False

    def leave_out_step(self) -> None:
        """Count a step that was not made, as the engine counts one whose gradients overflow."""
        engine = self._engine
        engine.global_steps += 1
        engine.skipped_steps += 1
        engine.global_samples += engine.train_batch_size()
        engine.micro_steps += engine.gradient_accumulation_steps()
        super().leave_out_step()

    # -- checkpoints

    def _write(self, directory: Path) -> frozenset[str]:
        """Let the engine save; return the names of the files that this rank has written."""
        plain, paths = self._engine.checkpoint_engine.save, list[str]()

        def save(state_dict: Any, path: str, *args: Any, **options: Any) -> Any:
            paths.append(path)
            return plain(state_dict, path, *args, **options)

        self._save_by(save, directory)
        return _names_in(directory, paths)

    def _stage(self, directory: Path) -> Callable[[], object]:
        """Take what `_write` would write, and return what writes it, for a thread; raises what taking raises."""
        plain, paths, given = self._engine.checkpoint_engine.save, list[str](), list[Callable[[], object]]()

        def keep(state_dict: Any, path: str, *args: Any, **options: Any) -> None:
            paths.append(path)
            try:
                copied = self._staging_of(len(given)).copy_all(state_dict)
            except Exception as error:  # noqa: BLE001 - what the script has in its state may be anything
                say_not_copied(error)
                plain(state_dict, path, *args, **options)
            else:
                given.append(lambda: plain(copied, path, *args, **options))

        def write() -> frozenset[str]:
            for one in given:
                one()
            return _names_in(directory, paths)

        self._save_by(keep, directory)
        return write

    def _save_by(self, save: Callable[..., Any], directory: Path) -> None:
        if self._steps.is_behind_backward or is_window_open(self._engine):
            note_open_window(goes_back=self._walk.goes_back)
        patches = Patches()
        patches.replace(self._engine.checkpoint_engine, "save", save)
        try:
            # All meet in a barrier at its end: one that has failed would leave the others waiting there.
            with errors_kept(self._engine.checkpoint_engine, "save"):
                self._plain_save(str(directory), tag=SHARDED)
        finally:
            patches.detach()

    def _staging_of(self, number: int) -> Staging:
        from resilience_sdk.checkpoint.capture import Staging

        return self._stagings.setdefault(number, Staging())

    def _compared(self) -> dict[str, Any]:
        engine = self._engine
        optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)  # of parts of the parameters, with ZeRO
        return {"model": engine.module, "optimizer": optimizer, "scheduler": engine.lr_scheduler}

    def _resume(self) -> None:
        """Load the newest checkpoint, if there is one. Collective."""
        own = self._checkpointer
        if own is None or not own.resume() or own.last_good is None:
            return
        place = own.last_good.path

        def examine() -> None:
            if not (place / SHARDED).is_dir():
                raise CheckpointError(
                    f"{place} was not saved by this adapter: give attach(..., run_dir=...) a directory of its own"
                )
            self._walk.check_ranks(place)

        raise_together(find_ranks(), examine)  # before what may be collective
        own.add_data(EngineState.ENTRY, self._kept)
        with section("resume", kind="io"):
            self._plain_load(str(place), tag=SHARDED)
        self._walk.put_back_rates()
        self._kept.put_back(is_same_job=self._walk.is_of_as_many_ranks)
        own.compare()
        own.restore_rng()
        self._walk.fit()
        if self._data is not None and self._walk.saved is None:
            note(
                "deepspeed no place",
                "the place in the data",
                "the checkpoint was saved by an earlier version and without loader=, so that it has none",
                "nothing is to be done from the next checkpoint on",
            )

    def _save_of_script(self, *args: Any, **options: Any) -> Any:
        with section("checkpoint", kind="io"):
            return self._plain_save(*args, **options)

    def _load_of_script(self, *args: Any, **options: Any) -> Any:
        before = int(self._engine.global_steps)
        with section("resume", kind="io"), self.paused():
            loaded = self._plain_load(*args, **options)
        if self._engine.global_steps != before:
            self._is_placed = False
        self.go_to(int(self._engine.global_steps))
        return loaded


def _names_in(directory: Path, paths: Iterable[str]) -> frozenset[str]:
    """Return the names of the files at these paths, relative to the directory that they are in."""
    return frozenset(Path(path).relative_to(directory).as_posix() for path in paths if os.path.isfile(path))


def _nothing() -> None:
    """Set no generators where nothing was resumed."""
