"""`checkpointer()`: checkpoints for a loop on `megatron.core` that has none of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resilience_sdk.adapters._base import framework
from resilience_sdk.adapters.megatron.attached import batch_ramp, global_batch_size, module
from resilience_sdk.adapters.megatron.proof import reached_by, remember
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.manifest import SHARDED
from resilience_sdk.checkpoint.memory_staging import MemoryStaging
from resilience_sdk.checkpoint.passes import is_loader
from resilience_sdk.checkpoint.ranks import find_ranks, raise_together
from resilience_sdk.core.resume_limits import note
from resilience_sdk.rank.data import has_state
from resilience_sdk.straggler import section

State = Callable[[bool], Mapping[str, Any]]


def checkpointer(
    sharded_state: State,
    load: Callable[[Mapping[str, Any]], None],
    *,
    state: Mapping[str, Any] | None = None,
    **options: Any,
) -> MegatronCheckpointer:
    """Return what saves and resumes a loop on `megatron.core`, for one that has no checkpoints of its own.

    Args:
        sharded_state: Returns the sharded state dict of this rank; `sharded_state(True)` that to load into.
        load: Takes the loaded one, of the same shape.
        state: What else travels with the checkpoints, by name, as in `start_run`: the `OptimizerParamScheduler`, a
            loader with a `state_dict()`. Plain values: `saver.values`.
        **options: Those of `Checkpointer`: `run_dir`, `every`, `keep`, `in_background`.

    Raises:
        ConfigError: An option cannot be used.
        RunDirectoryError: The run directory cannot be used, or none is named.

    Example:
        def sharded_state(is_loading):
            state = model.sharded_state_dict()
            return {"model": state, "optimizer": optimizer.sharded_state_dict(state, is_loading=is_loading)}

        saver = megatron.checkpointer(sharded_state, load, state={"schedule": opt_param_scheduler}, every=500)
        iteration = saver.resume()
    """
    return MegatronCheckpointer(sharded_state, load, state, **options)


class MegatronCheckpointer(Checkpointer):
    """A `Checkpointer` whose payload `dist_checkpointing` writes and reads."""

    def __init__(
        self,
        sharded_state: State,
        load: Callable[[Mapping[str, Any]], None],
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Prepare the run directory; use `checkpointer`."""
        given = {} if state is None else state
        super().__init__(given, writer=self._write, stager=MemoryStaging(self._write), **options)
        self._sharded_state = sharded_state
        self._load_into = load
        self._kept = TrackedState()
        self.also_held(lambda: {"sharded_state": sharded_state})  # the model is what it closes over
        self.also_compare(lambda: reached_by(sharded_state))  # it is not asked itself, which may be collective
        remember(self)

    def loaders(self) -> list[Any]:
        """Return the loaders of `state=`, and those that were added."""
        with_state = [item for item in self._state.per_rank.values() if has_state(item)]
        return [item for item in (*with_state, *self._state.counted.values()) if is_loader(item)]

    def resume(self) -> int:
        """Load the newest valid checkpoint; return the next step to run, 0 = fresh. Collective.

        Raises:
            CheckpointError: None may be trusted, see `Checkpointer.resume`; what `dist_checkpointing` raises passes.
        """
        step = super().resume()
        if not self._state.per_rank:
            note(
                "megatron loader",
                "the place in the data by itself, and what the iterator of a loader draws when it is made",
                "megatron.checkpointer() was given no loader, so that the loop goes on by its steps, or by the samples "
                "that it keeps in saver.values (where the data draw nothing the resume is exact)",
                "make iterators before saver.resume(), or give state= a loader with a state_dict()",
            )
        self.add_data(TrackedState.ENTRY, self._kept)
        good = self.last_good
        if step and good is not None:
            with section("resume", kind="io"):
                self._load_into(_framework().load(self._sharded_state(True), str(good.path / SHARDED)))
            self._kept.put_back(is_same_job=self._resumed_rng is not None)
            self.compare()
            self._set_rng()  # not for the last time: a loader that travels sets them before its first batch
        return step

    def _write(self, directory: Path) -> None:
        target = directory / SHARDED
        # Megatron asks for it on every rank. Together, since one that could not make it would be missed in the save.
        ranks = find_ranks()
        raise_together(ranks, lambda: target.mkdir(exist_ok=True))
        try:
            _framework().save(self._sharded_state(False), str(target))
        except Exception as error:
            if ranks.size == 1:
                raise
            raise _SaveLeft(f"{type(error).__name__} in dist_checkpointing.save: {error}") from error


class _SaveLeft(BaseException):
    """This rank alone has left a save of Megatron's: the others wait for it there, and only its end lets them go.

    What fails while shards are written Megatron tells to all ranks, which go on without that save; what is common to
    all rank 0 writes without a word to the others. So this ends the rank, and the next attempt goes on from the save
    before.
    """


def _framework() -> Any:
    return framework("megatron.core.dist_checkpointing", "megatron-core")


class TrackedState:
    """What a rank has of its own in a loop on `megatron.core`, and a sharded state dict does not hold.

    The states of the tracker by which dropout draws apart in each tensor parallel rank, and the batch of a step.
    """

    ENTRY = "resilience.megatron"

    def __init__(self) -> None:
        """Have nothing."""
        self._saved: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        tracker = _tracker()
        states = {} if tracker is None else tracker.get_states()
        ranks = find_ranks().size
        kept = {name: _as_tensor(one) for name, one in states.items()}
        return {"tracker": kept, "batch": global_batch_size(), "ramp": batch_ramp(), "ranks": ranks}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Keep it until Megatron's own is loaded."""
        self._saved = saved

    def put_back(self, *, is_same_job: bool) -> None:
        """Set the tracker as it was, and say what is other than at the save. `is_same_job`: with as many ranks."""
        tracker, saved = _tracker(), self._saved
        if not is_same_job:
            note(
                "megatron ranks",
                "random numbers, and the place in the data where the loop goes on by the number of its steps",
                "another number of ranks has saved them, and a step may have another number of samples now",
                "resume with as many ranks, or keep the consumed samples in saver.values",
            )
            return
        if saved is None:
            if tracker is not None:
                note(
                    "megatron tracker",
                    "what is drawn with get_cuda_rng_tracker() (dropout inside of tensor parallel layers)",
                    "an earlier version has not saved its states",
                    "nothing is to be done from the next checkpoint on",
                )
            return
        states = saved.get("tracker") or {}
        if tracker is not None and states:
            _set_states(tracker, states)
        batch, ramp = global_batch_size(), batch_ramp()
        if ramp is not None and saved.get("ramp") in (None, ramp):
            return  # it grows with the samples, which the loop has not told the calculator yet
        if None not in (batch, saved.get("batch")) and batch != saved["batch"]:
            note(
                "megatron batch",
                f"steps of {saved['batch']} samples",
                f"the global batch size is {batch} now, so that steps and, where a schedule counts them, learning "
                "rates are other ones for each sample",
                f"resume with a global batch size of {saved['batch']}",
            )


def _tracker() -> Any:
    """Return the tracker of generators, where it was used; None where the program has none."""
    found: Any = getattr(module("core.tensor_parallel.random"), "_CUDA_RNG_STATE_TRACKER", None)
    is_used = found is not None and hasattr(found, "get_states") and hasattr(found, "set_states")
    return found if is_used and found.is_initialized() else None


def _as_tensor(state: Any) -> Any:
    return state.get_state() if hasattr(state, "get_state") else state  # a generator, with CUDA graphs


def _set_states(tracker: Any, saved: Mapping[str, Any]) -> None:
    own = tracker.get_states()
    for name, state in saved.items():
        if hasattr(own.get(name), "set_state"):
            own[name].set_state(state)
        else:
            own[name] = state
    tracker.set_states(own)
