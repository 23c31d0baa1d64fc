"""`attach()`: everything that the SDK has, for the training of one accelerator."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import straggler
from resilience_sdk.adapters._base import Late, checkpointer, framework, numbered, refuse_second
from resilience_sdk.adapters._batch_work import Turns
from resilience_sdk.adapters._proof import proof_of
from resilience_sdk.adapters._saving import SavingLoop
from resilience_sdk.adapters.accelerate.position import Position, other_state, set_other
from resilience_sdk.adapters.accelerate.saves import StateSaves, kind_of, read_file
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.held import HeldGenerators
from resilience_sdk.checkpoint.ranks import agreement, find_ranks, raise_together
from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.journal import Event
from resilience_sdk.core.resume_limits import ResumeLimit, note
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import CheckpointError, ConfigError
from resilience_sdk.preemption import listener as listening
from resilience_sdk.rank import Session
from resilience_sdk.rank.all_ranks import session_on_all_ranks
from resilience_sdk.rank.checkpoints import save_at_stop
from resilience_sdk.rank.lifecycle import has_failed_to_start
from resilience_sdk.rank.run import begin_session
from resilience_sdk.rank.schedule_length import length_of
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler import section
from resilience_sdk.straggler.callbacks import PREFIX

PERIOD_S = 1.0
"""Between two journal lines at least; what is logged more often is left out of the journal."""


def tracker() -> Any:
    """Return a tracker for `Accelerator(log_with=[tracker(), "tensorboard"])`; raises MissingExtraError.

    What `accelerator.log(values, step=...)` is given goes into the journal of the run, as `metrics` lines beside its
    events, at most one a second. Whenever there is a new straggler report, its scores go to the other trackers with
    that call. It works from `attach` on; before, and with the SDK switched off, it does nothing. Rank 0 alone.
    """
    return ResilienceTracker()


def connect(accelerator: Any, session: Session) -> None:
    """Let the trackers of ours that an accelerator has write into this session."""
    for one in getattr(accelerator, "log_with", None) or ():
        if isinstance(one, ResilienceTracker):
            one.connect(accelerator, session)


class ResilienceTracker(Late):
    """What our tracker does; a `GeneralTracker` as soon as one is made."""

    name = "resilience"
    requires_logging_directory = False
    main_process_only = True

    @classmethod
    def framework_bases(cls) -> tuple[type, ...]:
        """Return `GeneralTracker`; raises MissingExtraError without Accelerate."""
        return (framework("accelerate.tracking", "accelerate").GeneralTracker,)

    def __init__(self) -> None:
        super().__init__()
        self._accelerator: Any = None
        self._session: Session | None = None
        self._config: Mapping[str, Any] | None = None
        self._next_s = 0.0
        self._report: Any = None

    @property
    def tracker(self) -> Session | None:
        """The session that it writes into."""
        return self._session

    def connect(self, accelerator: Any, session: Session) -> None:
        """Write into this session from now on."""
        self._accelerator, self._session = accelerator, session
        self._report = straggler.report()
        if self._config is not None:
            self.store_init_configuration(dict(self._config))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Journal the configuration of the run."""
        self._config = values
        if self._session is not None:
            self._session.journal.emit(Event.METRICS, what="config", values=plain(values))

    def log(self, values: dict[str, Any], step: int | None = None, **_options: Any) -> None:
        """Journal values, and hand new scores to the other trackers."""
        session = self._session
        now = time.monotonic()
        if session is None or now < self._next_s:
            return
        self._next_s = now + PERIOD_S
        session.journal.emit(Event.METRICS, step=step, what="log", values=plain(values))
        report = straggler.report()
        if report is None or report is self._report:
            return
        self._report = report
        scores = {f"{PREFIX}{name}": value for name, value in report.summary().items()}
        for other in self._accelerator.trackers:
            if other is not self and scores:
                other.log(scores, step=step)

    def finish(self) -> None:
        """End with the training."""
        self._session = self._accelerator = None


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of these values is a number or a text, under names that are texts. Pure."""
    return {str(name): value for name, value in values.items() if isinstance(value, (bool, int, float, str))}


_SEAMS = ("_models", "_optimizers", "_dataloaders", "save_state", "load_state", "project_configuration", "state")
_BY_HAND = "write `with heartbeat():` around each step instead"
_UNSEEN = {
    "DEEPSPEED": "DeepSpeed steps and saves inside its engine, which accelerator.prepare() returns as the model: call "
    "resilience_sdk.adapters.deepspeed.attach(model, loader=loader)",
    "MEGATRON_LM": f"Megatron-LM has its own loop: see resilience_sdk.adapters.megatron, or {_BY_HAND}",
    "XLA": f"steps on XLA are traced, not run: {_BY_HAND}",
}
_FSDP = "ACCELERATE_USE_FSDP"


@attrs.frozen
class Prepared:
    """The objects of one training, as the loop uses them; `optimizer` is torch's own, inside of Accelerate's."""

    model: Any
    optimizer: Any
    loader: Any


def find_prepared(
    accelerator: Any, model: Any = None, optimizer: Any = None, loader: Any = None, *, env: Mapping[str, str]
) -> Prepared:
    """Return what is trained: what is named, else what there is one of; raises ConfigError with the cure."""
    _check_accelerator(accelerator)
    _check_kind(accelerator, env)
    optimizers = list(accelerator._optimizers)
    if not optimizers or not accelerator._models:
        raise ConfigError(
            "attach(accelerator): it has prepared no model with an optimizer yet; call attach behind "
            "`model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`"
        )
    if optimizer is None and len(optimizers) > 1:
        raise ConfigError(
            f"attach(accelerator): it has prepared {len(optimizers)} optimizers; name the one whose steps are the "
            "progress: attach(accelerator, optimizer=...)"
        )
    chosen = optimizers[0] if optimizer is None else optimizer
    chosen = getattr(chosen, "optimizer", chosen)
    loaders = list(accelerator._dataloaders)
    if loader is not None and all(loader is not one for one in loaders):
        raise ConfigError(f"attach(loader={type(loader).__name__}): pass what accelerator.prepare(loader) has returned")
    return Prepared(
        model=_model_of(chosen, accelerator._models) if model is None else model,
        optimizer=chosen,
        loader=loader if loader is not None else next(iter(loaders), None),
    )


def _check_accelerator(accelerator: Any) -> None:
    missing = [name for name in _SEAMS if not hasattr(accelerator, name)]
    if not missing:
        return
    is_one = any(base.__name__ == "Accelerator" for base in type(accelerator).__mro__)
    if not is_one:
        raise ConfigError(f"attach({type(accelerator).__name__}): expected the accelerate.Accelerator of the training")
    raise ConfigError(
        f"attach(accelerator): this version of accelerate has no Accelerator.{missing[0]}; "
        "pip install 'accelerate>=1.0', or use resilience_sdk.adapters.pytorch with the prepared objects"
    )


def _check_kind(accelerator: Any, env: Mapping[str, str]) -> None:
    kind = kind_of(accelerator)
    if kind in _UNSEEN:
        raise ConfigError(f"attach(accelerator): {kind} is not covered here: {_UNSEEN[kind]}")
    if env.get(_FSDP, "").lower() in ("true", "1") and kind != "FSDP":
        raise ConfigError(
            f"attach(accelerator): FSDP is asked for ({_FSDP}, of the --config_file or the fsdp_plugin), but {kind} is "
            "in effect, so nothing is sharded: start several processes on devices that Accelerate shards on "
            "(resilience run --accelerate-config FILE, accelerate launch --config_file FILE), or take FSDP out of the "
            "configuration"
        )


def _model_of(optimizer: Any, models: Sequence[Any]) -> Any:
    """Return the model whose parameters an optimizer has; the first where that cannot be told."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = (model for model in models if any(id(parameter) in wanted for parameter in model.parameters()))
    return next(owners, models[0])


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
    refuse_second()
    prepared = find_prepared(accelerator, model, optimizer, loader, env=environ.environment())
    session = session_on_all_ranks(lambda: begin_session("attach", run_dir, settings, overrides, resumes=save))
    if session is not None:
        session.settle()
    return Attached(accelerator, prepared, session, saves=save, resumes=resume)


_CURES = {
    "samples": "let samplers draw from torch's generators or from set_epoch(epoch), and the loader be prepared by the "
    "accelerator",
    "learning rate": "give the scheduler to accelerator.prepare(), and step it at one place of the loop",
    "generators": "let nothing seed a generator behind attach()",
    "loss": "look for what the step uses and save_state() does not save: accelerator.register_for_checkpointing()",
    "weights": "look for what the step uses and save_state() does not save, such as a generator, an average or "
    "a module of its own: accelerator.register_for_checkpointing()",
}
_MAX_JOIN_S = 7200.0
"""For the ranks that have more batches. In a pause, which has no end, it would not be found if one of them hangs."""


class Attached(SavingLoop):
    """What is hung on one accelerator, and how far its training is; a context manager that finishes or detaches.

    For the thread that trains. What may be read counts on when the SDK is switched off.
    """

    def __init__(
        self, accelerator: Any, prepared: Prepared, session: Session | None, *, saves: bool, resumes: bool
    ) -> None:
        """Put everything on, and resume; use `attach`."""
        self._accelerator = accelerator
        self._session = session
        loader = prepared.loader
        self._position = None
        if loader is not None:
            self._position = Position(
                loader,
                int(accelerator.num_processes),
                self._set_held,
                is_speaker=bool(accelerator.is_main_process),
                is_watched=session is not None,
            )
        self._state = StateSaves(accelerator, self)
        self._held = HeldGenerators(self._holders)
        self._held_of_save: Mapping[str, Any] = {}
        self._checkpointer: Checkpointer | None = None
        if session is not None and saves:
            self._checkpointer = checkpointer(session, self._state.write, self._state.stage)
            self._checkpointer.also_compare(self._compared)
            self._checkpointer.also_beside(
                lambda: {f"model {number}": model for number, model in enumerate(accelerator._models)}
            )
        elif saves and has_failed_to_start():
            say_once("nothing saved", "attach: NOTHING IS SAVED or resumed in this run, for the reason above")
        # Before the hooks: what loads the state of a sharded optimizer makes a step of its own, which is none of ours.
        recorder = lookup.recorder() if session is not None else None
        if recorder is not None:
            recorder.user_beats()
        self._began = self._resume() if session is not None and resumes and session.may_resume else 0
        if self._checkpointer is not None:
            self._checkpointer.begins_at(self._began)
        super().__init__(prepared.model, prepared.optimizer, loader, self._began)
        try:
            self._put_on_the_rest(loader)
            self._take_turns(prepared.optimizer)
            self._prove()
        except BaseException:
            self.detach()  # so that nothing is left, and a second attach is a first one
            raise

    def _put_on_the_rest(self, loader: Any) -> None:
        if self._position is not None:
            self.on_detach(self._position.leave)
        # Also where the SDK is switched off: loops end by the number of steps.
        if loader is not None and self._loader is None:
            self._watch_loader(loader)
        self._is_joined = False
        self._batches: list[int] = []
        if self._accelerator.num_processes > 1:
            self._batches = _numbers_of_batches(loader)
            self._plain_join = self._accelerator.join_uneven_inputs
            self.replace(self._accelerator, "join_uneven_inputs", self._join_uneven_inputs)
        if self._session is None:
            return
        self.replace(self._accelerator, "save_state", self._state.save_state)
        self.replace(self._accelerator, "load_state", self._state.load_state)
        listening.begin(self.expected_save_s)
        connect(self._accelerator, self._session)

    def _take_turns(self, optimizer: Any) -> None:
        """See the steps of other optimizers: what is due waits for them where no batches are seen."""
        inside = (getattr(one, "optimizer", one) for one in self._accelerator._optimizers)
        others = [one for one in inside if one is not optimizer]
        if others and self._session is not None:
            self._work.turns = Turns(optimizer, others)
            self.on_detach(self._work.turns.leave)

    def _prove(self) -> None:
        """Leave a witness of each step, and compare those that are repeated."""
        if self._position is None:
            return
        optimizers = [getattr(one, "optimizer", one) for one in self._accelerator._optimizers]
        self.proof = proof_of(
            self._session, self._position.prints, optimizers, self._skipped, _CURES, self._accumulation,
            lambda: length_of(self._accelerator._schedulers),
        )  # fmt: skip
        if self.proof is not None:
            self._position.told = self.batch_read
            self.on_detach(self.proof.close)

    def _skipped(self) -> Collection[int]:
        return () if self._checkpointer is None else self._checkpointer.skipped_steps

    # -- how far it is

    @property
    def epoch(self) -> int:
        """Completed passes over the loader, over all attempts; the number of the one that is under way."""
        if self._position is None:
            return 0
        self._position.is_asked = True
        return self._position.epoch

    @property
    def samples(self) -> int:
        """Samples that all ranks together were given by the loader, over all attempts."""
        return 0 if self._position is None else self._position.total

    # -- passes

    def walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count the batches, and leave out those that were trained on before a resume."""
        assert self._position is not None
        if len(self._batches) > 1 and not self._is_joined:
            say_once(
                "uneven",
                f"attach: ranks have different numbers of batches ({self._batches}), and will wait for one another "
                "without an end: write `with accelerator.join_uneven_inputs([model]):` around the pass, or leave out "
                "even_batches=False",
            )
        walked = self._position.walk(batches)
        bad_steps = self._skipped()
        if not bad_steps:
            return walked
        per_step = int(self._accelerator.gradient_accumulation_steps)
        return self.without(bad_steps, walked, per_step, is_speaker=bool(self._accelerator.is_main_process))

    @contextmanager
    def _join_uneven_inputs(self, *args: Any, **options: Any) -> Iterator[None]:
        """As `Accelerator.join_uneven_inputs`; at its end all ranks have taken as many steps as the one with most.

        Inside of it ranks that are through stand in for themselves in the collectives of those that are not, and in no
        others. So as long as it lasts nothing is agreed, and what is due is done together at its end.
        """
        with ExitStack() as wait, self._plain_join(*args, **options):
            self._is_joined = True
            try:
                with self.apart():
                    yield
            finally:
                self._is_joined = False
            wait.enter_context(section("join_wait", kind="comm", timeout=_MAX_JOIN_S))
        ranks = find_ranks()
        with agreement():
            newest = max(ranks.gather(self.step))
        self.meet(newest)

    # -- checkpoints

    def describe(self) -> dict[str, Any]:
        """Return what our file in a directory holds."""
        position = None if self._position is None else self._position.state()
        return {"step": self.step, "position": position, "accumulation": self._accumulation}

    @property
    def _accumulation(self) -> int:
        return int(self._accelerator.gradient_accumulation_steps)

    def describe_own(self) -> dict[str, Any]:
        """Return what the file of this rank holds."""
        position = None if self._position is None else self._position.own_state()
        others = [other_state(loader) for loader in self._others()]
        ranks = int(self._accelerator.num_processes)
        return {"ranks": ranks, "position": position, "held": self._held.capture(), "others": others}

    def _note_missing(self, place: Path | None) -> None:
        """Say it where a script has saved on one rank alone what each rank has of its own.

        Each node looks for its own ranks' on the disk that has that of the first rank: another node may have another.
        """
        accelerator = self._accelerator
        if place is None or not accelerator.is_local_main_process:
            return
        first = self._state.read_own(place, 0)
        if first is None or int(first["ranks"]) != int(accelerator.num_processes):
            return
        has_any = first["held"] or ((first["position"] or {}).get("reads") or {}).get("draws")
        each_node = accelerator.project_configuration.save_on_each_node
        if has_any and not each_node and not self._state.has_all_of_node(place):
            limit = ResumeLimit(
                "accelerate rank's own",
                "the generators that objects of ranks behind the first one hold",
                "accelerator.save_state() was called on the main process alone",
                "call it on all ranks",
            )
            if accelerator.is_main_process:
                note(*attrs.astuple(limit))
            else:  # whose disk the main process may not see
                say_once(limit.key, limit.words(at_resume=True))

    def _holders(self) -> dict[str, Any]:
        own = self._accelerator
        kinds = {kind: getattr(own, f"_{kind}s", ()) for kind in ("model", "optimizer", "scheduler", "custom_object")}
        for kind in ("optimizer", "scheduler"):  # of Accelerate's wrappers what is inside
            kinds[kind] = [getattr(item, kind, item) for item in kinds[kind]]
        return numbered(**kinds)

    def _set_held(self) -> None:
        self._held.restore(self._held_of_save)

    def _others(self) -> list[Any]:
        """Return the prepared loaders beside that of the training, such as those of evaluations."""
        own = None if self._position is None else self._position.loader
        return [loader for loader in self._accelerator._dataloaders if loader is not own]

    def _compared(self) -> dict[str, Any]:
        own = self._accelerator
        models = list(own._models)
        if kind_of(own) == "MULTI_CPU" and getattr(getattr(own, "ddp_handler", None), "broadcast_buffers", True):
            from resilience_sdk.checkpoint.digests import Led

            models = [Led(model) for model in models]  # there it keeps what is inside of DDP
        kinds = {"model": models, "optimizer": own._optimizers}
        kinds |= {kind: getattr(own, f"_{kind}s", ()) for kind in ("scheduler", "custom_object")}
        scaler = getattr(own, "scaler", None)
        found = {f"{kind} {number}": item for kind, items in kinds.items() for number, item in enumerate(items)}
        return found if scaler is None else {**found, "the scaler": scaler}

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
        with section("resume", kind="io"):
            self._state.load(place)
        own.compare()
        self._go_on_in_data(saved, self._state.read_own(place), place)
        return int(saved["step"])

    def load(self, directory: Path, saved: Mapping[str, Any] | None, *args: Any, **options: Any) -> None:
        """Load what the script wants, and go where that was saved."""
        with self.paused():
            self._state.load(directory, *args, **options)
        if saved is not None:
            self.go_to(int(saved["step"]))
            self._go_on_in_data(saved, self._state.read_own(directory), directory)
        elif self._accelerator.is_main_process:
            say_once(
                "old state",
                f"{directory} was saved without the SDK: steps are counted from {self.step}, and the place in the data "
                "is not known",
            )

    def _go_on_in_data(
        self, saved: Mapping[str, Any], own: Mapping[str, Any] | None = None, place: Path | None = None
    ) -> None:
        if own is not None and int(own["ranks"]) == int(self._accelerator.num_processes):
            self._held_of_save = own["held"]
            self._set_held()
            for loader, state in zip(self._others(), own["others"], strict=False):
                set_other(loader, state)
        else:
            own = None
        self._note_missing(place)
        before = saved.get("accumulation", self._accumulation)  # older ones do not say
        if before != self._accumulation:
            note(
                "accelerate accumulation",
                f"steps of {before} micro-batches with {self._accumulation}",
                "a step has another number of samples now, so that max_steps and a schedule by the step end elsewhere",
                f"resume with gradient_accumulation_steps={before} for the same steps",
            )
        if self._position is not None and saved.get("position") is not None:
            self._position.resume(saved["position"], None if own is None else own["position"])

    def save_before_leaving(self) -> None:
        """Save if there is time, into the run directory or where Accelerate numbers the directories. Collective."""
        super().save_before_leaving()
        numbers = self._accelerator.project_configuration.automatic_checkpoint_naming
        if self._checkpointer is None and self._session is not None and numbers:
            save_at_stop(self._state, self.step, self._session)


def _numbers_of_batches(loader: Any) -> list[int]:
    """Return which numbers of batches the ranks have in a pass, as far as that is known. Collective."""
    try:
        own: int | None = len(loader)
    except (TypeError, NotImplementedError):
        own = None
    return sorted({number for number in find_ranks().gather(own) if number is not None})
