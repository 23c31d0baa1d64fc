"""Resumption of a training beside what the trainer does: its place, its callbacks, what it still owes.

A trainer that resumes divides the number of steps to find its place, begins its callbacks and the loss that it logs
anew, and does not know of an evaluation that was due after the save. Here each of them is as it was at the save. The
methods of the trainer that this needs are private: they are looked up, and what cannot be done without one is said.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.adapters._base import Patches
from resilience_sdk.adapters.transformers import kept as files
from resilience_sdk.adapters.transformers.changes import say_changes, say_plain, seeds_of
from resilience_sdk.adapters.transformers.kept import Shape
from resilience_sdk.adapters.transformers.place import (
    LoaderPlace,
    decoded,
    encoded,
    fingerprint_of,
    has_workers,
    is_stream,
    looks_ahead,
    read_on,
    why_again,
)
from resilience_sdk.adapters.transformers.seams import callbacks_of
from resilience_sdk.checkpoint.held import HeldGenerators
from resilience_sdk.checkpoint.ranks import Alone, find_ranks, group_is_ready
from resilience_sdk.core.console import say
from resilience_sdk.core.resume_limits import note, resumed

if TYPE_CHECKING:
    from resilience_sdk.checkpoint.beside_moments import BesideState

_LOSS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")


class Resumption:
    """One training from where a checkpoint was made, or from its start; of the thread that trains, on all ranks."""

    def __init__(
        self, trainer: Any, path: str | None, *, is_chosen: bool, restores_callbacks: bool, ignored_keys: Any
    ) -> None:
        """Read what was kept in the checkpoint at `path`; collective.

        `is_chosen`: it is the SDK's choice; `ignored_keys` is what `train` was given.
        """
        self._trainer = trainer
        self._path = path
        self._restores_callbacks = restores_callbacks and is_chosen
        self._says_callbacks = restores_callbacks
        self._ignored_keys = ignored_keys
        self._patches = Patches()
        self._kept: dict[str, Any] | None = None
        self._is_own = False
        self._first_epoch: int | None = 0 if path is None else None
        self._batches = 0
        self._after_owed: dict[str, Any] | None = None
        self._is_managed = False
        self._plain_before: dict[int, dict[str, Any]] = {}
        self._held = HeldGenerators(lambda: files.holders(trainer))
        self._held_after_owed: Mapping[str, Any] | None = None
        self._beside = _beside(trainer)
        self._made_with = {id(one): files.args_of(one) for one in files.exportable(callbacks_of(trainer))}
        self._is_same_shape = self._is_logging = False
        self._step_logs: dict[str, float | None] = {}
        self._began = self._more_steps = 0
        self.place: LoaderPlace | None = None
        self.stops = False
        """Whether nothing more is trained: the checkpoint is of a training that a callback had ended, or does now."""
        if path is not None:
            resumed()
            self._read()
        self._load_rng = getattr(trainer, "_load_rng_state", None)

    def _read(self) -> None:
        """Take this rank's own file, or the first one's where there were fewer ranks; alike on all ranks."""
        directory, ranks = Path(str(self._path)), find_ranks() if group_is_ready() else Alone()
        own, first = files.read(directory, ranks.rank), files.read(directory, 0)
        if all(ranks.gather(own is not None or first is not None)):
            self._kept = first if own is None else own
            self._is_own = own is not None
        else:
            note(
                "trainer's place",
                "the place in a stream, random numbers that the data draw, a due evaluation, the loss not logged yet",
                f"{directory.name} has no file of the SDK for them, as one of an earlier version",
                "nothing to do: the next checkpoint has them",
            )

    # -- before the training begins

    def attach(self) -> None:
        """Hang on the trainer what it calls while it resumes."""
        trainer, patches = self._trainer, self._patches
        if callable(plain := getattr(trainer, "_init_training_state", None)):
            patches.replace(trainer, "_init_training_state", self._placing(plain))
        else:
            note(
                "trainer's place",
                "all of the place in the data",
                "this version of Transformers counts steps alone: the second pass of a stream, random numbers that "
                "the data draw and the end of an epoch after the save of its last step begin anew",
                "pip install 'transformers>=5'",
            )
        if self._path is None:
            return
        if callable(plain := getattr(trainer, "_load_callback_state", None)):
            patches.replace(trainer, "_load_callback_state", lambda: self._load_callbacks(plain))
        else:
            note("callbacks", "the state of callbacks", "it begins anew", "pip install 'transformers>=5'")
        if callable(self._load_rng):
            patches.replace(trainer, "_load_rng_state", self._set_generators)

    def detach(self) -> None:
        """Leave the trainer as it was."""
        self._patches.detach()

    def _placing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return what finds the pass and the batch of it at which the training begins."""

        def init_training_state(max_steps: int, steps: int, epochs: int, *rest: Any, **options: Any) -> Any:
            epoch, batches = plain(max_steps, steps, epochs, *rest, **options)
            kept, saved = self._kept, files.shape_of(self._kept and self._kept.get("shape"))
            state, args = self._trainer.state, self._trainer.args
            if kept is not None and saved is not None and not args.ignore_data_skip:
                now = self._shape_now()
                self._is_same_shape = saved == now
                if kept.get("epoch") is not None:
                    epoch, batches = int(kept["epoch"]), self._batches_in(saved, now, int(kept["batches"]))
                say_changes(saved, now, kept, args)
                self._more_steps = int(kept.get("more_steps", 0))
                if not self._is_same_shape:
                    self._more_steps = state.global_step - (epoch * steps + batches // now.accumulation)
                if args.max_steps <= 0:
                    # By epochs: what is left of them decides, not how many steps all of them would have now.
                    state.max_steps = max_steps + self._more_steps
                is_over = self.stops or state.global_step >= state.max_steps
                if is_over and kept.get("at_epoch_end"):
                    epoch = max(epoch, epochs)  # nothing of the epoch is left, not even its end
            self._first_epoch, self._batches = epoch, batches
            return epoch, batches

        return init_training_state

    def _batches_in(self, saved: Shape, now: Shape, batches: int) -> int:
        if (saved.ranks, saved.batch, saved.accumulation) == (now.ranks, now.batch, now.accumulation):
            return batches
        return files.batches_after(batches, saved, now)[0]

    def _shape_now(self) -> Shape:
        from torch.utils.data import IterableDataset

        trainer, args = self._trainer, self._trainer.args
        data = getattr(trainer, "train_dataset", None)
        try:
            length = None if isinstance(data, IterableDataset) else len(data)  # type: ignore[arg-type]
        except TypeError:
            length = None
        batch, accumulation = int(trainer._train_batch_size), int(args.gradient_accumulation_steps)
        return Shape(int(args.world_size), batch, accumulation, length)

    def _load_callbacks(self, plain: Callable[[], Any]) -> None:
        """Give the callbacks their states back, where the SDK has chosen the checkpoint; else let the trainer do so."""
        if not self._restores_callbacks:
            own = files.exportable(callbacks_of(self._trainer))
            if own and self._says_callbacks and not self._trainer.args.restore_callback_states_from_checkpoint:
                names = ", ".join(dict.fromkeys(type(one).__name__ for one in own))
                note(
                    "callbacks",
                    f"the state of {names}",
                    "it begins anew",
                    "let train() choose the checkpoint, or set TrainingArguments("
                    "restore_callback_states_from_checkpoint=True)",
                )
            plain()
            return
        self.stops = bool(self._kept and self._kept.get("ended"))
        states = files.states_of(self._kept, self._trainer.state.stateful_callbacks)
        said = files.put_back(files.exportable(callbacks_of(self._trainer)), states)
        if said:
            note(
                "callbacks",
                "the state of callbacks",
                f"{'; '.join(said)}: it begins anew",
                "resume with the callbacks of the save",
            )

    # -- when it begins

    def begins(self, loader: Any) -> LoaderPlace:
        """Be at the place that was found, with the loss that was not logged yet. After the trainer's own start."""
        if self._first_epoch is None:
            self._first_epoch, self._batches = self._find_place(loader)
        self.place = place = LoaderPlace(loader, self._first_epoch, self._batches)
        self._began = int(getattr(self._trainer, "_initial_global_step", self._trainer.state.global_step))
        kept = self._kept
        if kept is None:
            return place
        self._beside.resume(kept.get("beside"))
        say_plain(kept.get("plain") or (), type(self._trainer).__name__)
        self._say_iterators(kept.get("iterators") or ())
        self._began = int(kept.get("began", self._began))
        self._put_back_loss(kept)
        self._step_logs = dict(kept.get("step_logs") or {})
        at_begin = kept.get("at_begin")
        if self._batches and at_begin is not None:
            self._is_managed = True
            begin = decoded(at_begin)
            last = kept.get("at_last") if self._is_same_shape and self._is_own else None
            place.at_last = None if last is None else decoded(last)
            place.resume_with(functools.partial(self._read_on, place, begin, place.at_last), begin)
            place.prints.resume(kept.get("print") if self._is_same_shape and self._is_own else None, self._batches)
            place.left_out = self._batches
            if kept.get("draws"):
                place.expect_draws()
        elif not self._batches and kept.get("next_own"):
            place.generators.restore({**place.generators.capture(), "own": decoded(kept["next_own"])})
        return place

    def _find_place(self, loader: Any) -> tuple[int | None, int]:
        """Return pass and batch by the number of steps, as a trainer does whose method was not found."""
        args, step = self._trainer.args, int(self._trainer.state.global_step)
        accumulation = int(args.gradient_accumulation_steps)
        try:
            each = max(1, -(-len(loader) // accumulation))
        except TypeError:
            return None, 0
        return step // each, 0 if args.ignore_data_skip else step % each * accumulation

    def _put_back_loss(self, kept: Mapping[str, Any]) -> None:
        trainer, loss = self._trainer, kept.get("loss")
        if not isinstance(loss, Mapping):
            return
        if not all(hasattr(trainer, name) for name in _LOSS):
            note(
                "logged loss",
                "the loss that is logged next",
                "this version of Transformers keeps it where it cannot be set: it is of the steps since the resume",
                "nothing to do, or a newer Transformers",
            )
            return
        trainer._tr_loss += float(loss["since_log"])
        trainer._total_loss_scalar = float(loss["total"])
        trainer._globalstep_last_logged = int(loss["last_logged"])
        if not self._is_logging:
            self._is_logging = True
            self._patches.replace(trainer, "log", self._logging(trainer.log))

    def _logging(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return `log` such that the mean loss at the end is that of all steps, not of those since the resume."""

        def log(logs: Any, *args: Any, **options: Any) -> Any:
            if isinstance(logs, dict) and "train_loss" in logs:
                logs["train_loss"] = self.mean_loss()
            return plain(logs, *args, **options)

        return log

    @property
    def digests(self) -> tuple[Mapping[str, Any], int]:
        """What the trainer saves as it was at the save, by digests of this rank's, and how many ranks saved it."""
        found, shape = (self._kept or {}).get("digests"), files.shape_of((self._kept or {}).get("shape"))
        return (found, shape.ranks) if self._is_own and shape is not None and isinstance(found, dict) else ({}, 0)

    @property
    def evaluation_s(self) -> float | None:
        """Seconds that the last evaluation before the save took; None where that is not known."""
        found = (self._kept or {}).get("evaluation_s")
        return None if found is None else float(found)

    @property
    def extra_steps(self) -> set[int]:
        """After which steps there is a checkpoint that was made for a stop alone."""
        return {int(step) for step in (self._kept or {}).get("extra", ())}

    def mean_loss(self) -> float:
        """Return the mean loss of all steps from the first attempt on."""
        steps = int(self._trainer.state.global_step) - self._began
        return float(self._trainer._total_loss_scalar) / max(steps, 0.001)

    def corrected(self, result: Any) -> Any:
        """Return what `train` returns, with that loss."""
        is_put_back = self._kept is not None and isinstance(self._kept.get("loss"), Mapping)
        if is_put_back and all(hasattr(self._trainer, name) for name in _LOSS) and hasattr(result, "training_loss"):
            return result._replace(training_loss=self.mean_loss())
        return result

    # -- the first pass

    def _read_on(self, place: LoaderPlace, begin: Mapping[str, Any], last: Mapping[str, Any] | None) -> Iterator[Any]:
        """Return the batches from the place on, with the generators that they were read with."""
        loader, draws = place.loader, bool((self._kept or {}).get("draws"))
        # One batch: the second was read in the same breath as the first, with generators that nobody has seen.
        rereads = is_stream(loader) or (draws and (has_workers(loader) or self._batches == 1))
        if rereads and int(self._trainer.args.process_index) == 0:
            say(f"reading the first {self._batches} batches of epoch {place.epoch} again: {why_again(loader)}")
        if draws and has_workers(loader) and place.epoch and getattr(loader, "persistent_workers", False):
            note(
                "workers' generators",
                "the random numbers that the data loader's workers draw",
                "persistent workers carry their generators from epoch to epoch, and new ones begin anew",
                "TrainingArguments(dataloader_persistent_workers=False)",
            )
        again = 0

        def see(batch: Any) -> None:
            nonlocal again
            again = fingerprint_of(batch, again)

        try:
            found = read_on(
                loader,
                int(place.epoch or 0),
                self._batches,
                generators=place.generators,
                at_begin=begin,
                at_last=last,
                set_saved=functools.partial(self._set_for_next, place),
                rereads=rereads,
                seen=see,
                prints=place.prints,
            )
            before = (self._kept or {}).get("fingerprint")
            if is_stream(loader) and not draws and self._is_same_shape and before not in (None, again):
                note(
                    "stream",
                    f"the samples of epoch {place.epoch}",
                    "the stream gives others than before, so that some come twice or not at all",
                    "let each pass give the same samples, or go by set_epoch(epoch) and its own seed",
                )
            place.fingerprint = again
            return found
        except StopIteration:
            note(
                "stream",
                "where the stream goes on",
                f"it ends before its batch {self._batches}, where the checkpoint was made",
                "resume with the data of the save",
            )
            self._set_saved()
            return iter(())

    def _set_generators(self, *_: Any) -> None:
        """Set the generators as the trainer asks for it, unless they are right by now."""
        if not self._is_managed:
            self._set_saved()

    def _set_saved(self) -> None:
        """Set the generators to those of the save, or to those after what was owed; those of the data, too."""
        from resilience_sdk.checkpoint.state import restore_rng

        own, place = (self._kept or {}).get("own"), self.place
        if own and place is not None and self._is_own:
            place.generators.restore({**place.generators.capture(), "own": decoded(own)})
        self._set_held()
        if self._after_owed is not None:
            restore_rng(self._after_owed)
        elif callable(self._load_rng):
            self._load_rng(self._path)

    def _set_held(self) -> None:
        """Set the generators that the model, callbacks and the like hold."""
        saved = (self._kept or {}).get("held", {}) if self._is_own else {}
        self._held.restore(saved if self._held_after_owed is None else self._held_after_owed)

    def _set_for_next(self, place: LoaderPlace) -> None:
        """Set them, and note that what comes next is read with these."""
        self._set_saved()
        if place.at_last is not None:
            place.at_last = place.generators.capture()

    def step_ends(self) -> None:
        """Say what is lost of what modules hold beside their states, behind the first step."""
        if self._beside.is_unsure:
            self._beside.look()

    def epoch_begun(self, control: Any) -> Any:
        """Make up for the evaluation that was due at the save, after the hooks of the first epoch's begin."""
        self._beside.begin()
        self._plain_before = files.fingerprints(self._plain_objects(), self._trainer.model)
        owed = (self._kept or {}).get("owed")
        if self._path is None:
            return control
        if self._batches:
            self._set_saved()
        else:
            self._set_held()
        if not owed:
            return control
        trainer = self._trainer
        evaluate = getattr(trainer, "_maybe_log_save_evaluate", None)
        values = {
            "tr_loss": getattr(trainer, "_tr_loss", None),
            "grad_norm": None,
            "model": trainer.model_wrapped,
            "trial": None,
            "epoch": self._first_epoch,
            "ignore_keys_for_eval": self._ignored_keys,
            "start_time": None,
            "learning_rate": None,
        }
        names = _parameters(trainer, "_maybe_log_save_evaluate")
        if not callable(evaluate) or not names or not set(names) <= set(values):
            note(
                "evaluation",
                f"the evaluation of step {trainer.state.global_step}",
                "it was due when the job left, and this version of Transformers cannot make up for it",
                "evaluate the checkpoint yourself",
            )
            return control
        trainer.control = control
        control.should_log, control.should_evaluate, control.should_save = False, True, bool(owed.get("save"))
        evaluate(**{name: values[name] for name in names})
        from resilience_sdk.checkpoint.state import capture_rng

        self._after_owed, self._held_after_owed = capture_rng(), self._held.capture()
        control = trainer.control
        self.stops = self.stops or bool(control.should_training_stop)
        return control

    # -- what is kept

    def follow_logs(self, patches: Patches) -> None:
        """Know what a step has for the log, so that an epoch's end right after a resume logs the same."""
        trainer = self._trainer
        plain = getattr(trainer, "_maybe_log_save_evaluate", None)
        names = _parameters(trainer, "_maybe_log_save_evaluate")
        followed = [name for name in ("grad_norm", "learning_rate") if name in names]
        if not callable(plain) or not followed:
            return
        fills = self._kept is not None

        def maybe_log_save_evaluate(*args: Any, **options: Any) -> Any:
            nonlocal fills
            values = {**dict(zip(names, args, strict=False)), **options}
            fills = fills and all(values.get(name) is None for name in followed)
            if fills:
                values |= self._step_logs
                args = tuple(values[name] for name, _ in zip(names, args, strict=False))
                options = {name: values[name] for name in options}
            self._step_logs = {name: values.get(name) for name in followed}
            return plain(*args, **options)

        patches.replace(trainer, "_maybe_log_save_evaluate", maybe_log_save_evaluate)

    def keep(
        self,
        directory: Path,
        *,
        owed: Mapping[str, Any] | None,
        extra_steps: Iterable[int],
        is_ended: bool,
        is_at_epoch_end: bool,
        evaluation_s: float | None,
        digests: Mapping[str, str],
    ) -> None:
        """Write what this rank keeps beside a checkpoint. Raises `OSError`."""
        trainer, place = self._trainer, self.place
        if place is None:
            return
        epoch, batches = place.epoch, place.batches
        found: dict[str, Any] = {
            "shape": attrs.asdict(self._shape_now()),
            "digests": digests,
            "draws": place.draws,
            "seeds": seeds_of(trainer.args),
            "owed": owed,
            "extra": sorted(extra_steps),
            "ended": is_ended or self.stops,
            "began": self._began,
            "more_steps": self._more_steps,
            "at_epoch_end": is_at_epoch_end,
            "evaluation_s": evaluation_s,
            "held": self._held.capture(),
            "callbacks": files.take_states(files.exportable(callbacks_of(trainer)), self._made_with),
            "step_logs": {name: _number(value) for name, value in self._step_logs.items()},
        }
        if all(hasattr(trainer, name) for name in _LOSS):
            found["loss"] = {
                "since_log": trainer._tr_loss.item(),
                "total": trainer._total_loss_scalar,
                "last_logged": trainer._globalstep_last_logged,
            }
        now = encoded(place.generators.capture()["own"])
        if epoch is not None and is_at_epoch_end and not self._is_cut_short(place):
            found |= {"epoch": epoch + 1, "batches": 0, "next_own": now}
        elif epoch is not None:
            found |= {"epoch": epoch, "batches": batches, "fingerprint": place.fingerprint, "own": now}
            if known := place.prints.to_json(batches):
                found["print"] = known
            if place.at_begin is not None:
                found["at_begin"] = encoded(place.at_begin)
            is_read_here = looks_ahead(place.loader) and not has_workers(place.loader)
            if place.at_last is not None and place.draws and is_read_here:
                found["at_last"] = encoded(place.at_last)
        self._beside.look()
        if beside := self._beside.capture():
            found["beside"] = beside
        found["plain"] = files.changed_plain(self._plain_objects(), self._plain_before, trainer.model)
        found["iterators"] = files.held_iterators(self._plain_objects())
        say_plain(found["plain"], type(self._trainer).__name__)
        self._say_iterators(found["iterators"])
        files.write(directory, int(trainer.args.process_index), found)

    @staticmethod
    def _say_iterators(names: Iterable[str]) -> None:
        for name in names:
            note(
                f"iterator {name}",
                f"the place in the iterator {name}",
                "nobody but the program has it, so that a resume begins with what it gives first",
                "let the Trainer's own loader give its samples, such as by a ConcatDataset, or find its place by the "
                "step",
            )

    def _plain_objects(self) -> list[Any]:
        return [*callbacks_of(self._trainer), self._trainer]

    def _is_cut_short(self, place: LoaderPlace) -> bool:
        """Tell whether the training stops within a pass."""
        if not self._trainer.control.should_training_stop or place.is_at_end:
            return False
        try:
            return place.batches < len(place.loader)
        except TypeError:
            return True


def _beside(trainer: Any) -> BesideState:
    from resilience_sdk.checkpoint.beside_moments import BesideState
    from resilience_sdk.checkpoint.state import unwrap

    return BesideState(lambda: {"model": trainer.model}, unwrap)


def _parameters(trainer: Any, name: str) -> list[str]:
    """Return the names of the parameters of a method; of the base that it overrides, where it passes all on."""
    for kind in type(trainer).__mro__:
        method = vars(kind).get(name)
        if callable(method):
            found = list(inspect.signature(method).parameters.values())[1:]
            if not any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in found):
                return [one.name for one in found]
    return []


def _number(value: Any) -> float | None:
    if value is None:
        return None
    return float(value.item() if hasattr(value, "item") else value)
