"""The place of a training with DeepSpeed in its data, and what else of its engine a resume needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilience_sdk.checkpoint.generators import set_rng
from resilience_sdk.core.resume_limits import note
from resilience_sdk.errors import CheckpointError
from resilience_sdk.rank.data import Walk

_RATES = ("lr", "betas", "momentum", "weight_decay")
"""Options of an optimizer that a schedule changes."""


class Place(Walk):
    """The place in the batches of one loader; of the thread that trains.

    It is that of the last step: batches which were read since, for a window of gradients that is open or by a loop that
    reads ahead, are read again. At the end of an epoch it is behind its batches and before what the script does then
    (an evaluation, a step of a scheduler): the first pass of a resume is empty there, and the rest of the body is run.
    """

    def __init__(self, engine: Any, loader: Any) -> None:
        """`loader` is what the order is drawn by; None where nobody counts."""
        super().__init__()
        self._engine, self._source = engine, loader
        self.read = 0
        """Batches in this process."""
        self.is_ahead = False
        """Whether the iterator of this pass was made before `attach`."""
        self.saved: Mapping[str, Any] | None = None
        """What a resume has brought."""
        self._trained = 0, 0
        self._ranks = self._saved_ranks = 0

    # -- what a checkpoint holds of it

    def capture(self) -> dict[str, Any]:
        """Return the place as a JSON value."""
        now, epoch, self.has_tail = self.batches, self.epoch, True
        try:
            if self._trained[0] == epoch and not self._has_state:  # which goes on where it is
                self.batches = self._trained[1]
            place = super().capture()
        finally:
            self.batches, self.has_tail = now, False
        return {**place, "is_ahead": self.is_ahead, "engine": self._facts()}

    def restore(self, saved: Mapping[str, Any], saved_ranks: int, ranks: int) -> None:
        """Take it as it was saved; `fit` makes of it what it is here."""
        super().restore(saved, saved_ranks, saved_ranks)
        self.saved, self._saved_ranks, self._ranks = saved, saved_ranks, ranks
        self.is_ahead = bool(saved.get("is_ahead"))
        self._trained = self.epoch, self.batches

    @property
    def is_of_as_many_ranks(self) -> bool:
        """Whether as many ranks have saved what was resumed."""
        return self._saved_ranks == self._ranks

    def check_ranks(self, place: Path) -> None:
        """Raise `CheckpointError` where DeepSpeed would refuse what is there for its number of ranks."""
        engine, before, now = self._engine, self._before["replicas"], self._facts()["replicas"]
        if self.saved is None or before == now or not _is_set(engine, "zero_optimization"):
            return
        if not _is_set(engine, "load_universal_checkpoint"):
            raise CheckpointError(
                f"{place} was saved by {_ranks_words(before)}, and is resumed by {_ranks_words(now)}: with ZeRO each "
                f"has a part of the optimizer, which DeepSpeed loads with as many ranks alone; start {before}, or "
                "begin in another run directory with the weights of zero_to_fp32.py"
            )

    def fit(self) -> None:
        """Go to the nearest place here that leaves nothing out, and say what is other than at the save."""
        if self.saved is None:
            return
        before, now = self._before, self._facts()
        if self._saved_ranks != self._ranks:
            self._epoch_rng, self._saved_generators = None, {}
            self.prints.forget_saved()
        self._saved_sizes = {}  # it is done here, with all that the engine knows of it
        reads = [facts["micro"] * facts["replicas"] for facts in (before, now)]
        self.batches = self.batches * reads[0] // max(reads[1], 1)
        self._trained = self.epoch, self.batches
        self._note_limits(before, now)

    @property
    def _before(self) -> dict[str, Any]:
        now = self._facts()
        saved = (self.saved or {}).get("engine")
        if isinstance(saved, Mapping):
            return {**now, **saved}
        replicas = now["replicas"] * self._saved_ranks // max(self._ranks, 1) or self._saved_ranks
        return {**now, "replicas": replicas, "is_old": True}

    def _facts(self) -> dict[str, Any]:
        engine, source = self._engine, self._source
        micro = getattr(source, "batch_size", None)
        if micro is None:
            micro = getattr(getattr(source, "batch_sampler", None), "batch_size", None)
        return {
            "counts": source is not None,
            "micro": micro if isinstance(micro, int) else _asked(engine, "train_micro_batch_size_per_gpu") or 1,
            "accumulation": _asked(engine, "gradient_accumulation_steps") or 1,
            "per_step": _asked(engine, "train_batch_size"),
            "replicas": getattr(engine, "dp_world_size", None) or self._ranks or 1,
            "length": _length(source),
            "groups": rates_of(engine),
        }

    def _note_limits(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        if before["replicas"] != now["replicas"] or before["per_step"] != now["per_step"]:
            note(
                "deepspeed batch",
                f"the steps of train_batch_size {before['per_step']} on {_ranks_words(before['replicas'])}",
                f"a step has {now['per_step']} samples on {_ranks_words(now['replicas'])} now, so that steps, random "
                "numbers and, where a schedule counts steps, learning rates are other ones for each sample",
                "resume with as many ranks and samples in a batch for the same steps",
            )
        elif before["accumulation"] != now["accumulation"]:
            note(
                "deepspeed accumulation",
                f"micro-batches of steps with gradient_accumulation_steps={before['accumulation']}",
                f"it is {now['accumulation']} now, so that sums of gradients and random numbers are other ones",
                f"resume with gradient_accumulation_steps={before['accumulation']} for the same steps",
            )
        if before["counts"] != now["counts"]:
            note(
                "deepspeed counted",
                "the place in the data",
                "the checkpoint was saved without loader= and has none, so that the epoch begins anew"
                if now["counts"]
                else "attach() was given no loader, though the checkpoint has a place in one",
                "give attach() the same loader as before",
            )
        is_same = before["replicas"] == now["replicas"]
        if is_same and None not in (before["length"], now["length"]) and before["length"] != now["length"]:
            note(
                "deepspeed length",
                f"the order of epoch {self.epoch}",
                f"the data set has {now['length']} samples now, {before['length']} before, so that some samples of "
                "this epoch are used twice or never",
                "resume with the data that it had",
            )
        if not is_same and self.batches and not is_ordered_by_number(self._source):
            note(
                "deepspeed order",
                f"the order of epoch {self.epoch}",
                "it is drawn from random numbers of each rank, so that some samples are used twice or never",
                "use torch's DistributedSampler, whose order is that of its seed and epoch",
            )

    # -- what the engine does not put back

    def put_back_rates(self) -> None:
        """Set the options of the optimizer as they were saved, where DeepSpeed has not."""
        saved, groups = self._before.get("groups"), _groups(self._engine)
        if self.saved is None or not isinstance(saved, list) or len(saved) != len(groups):
            return
        for group, options in zip(groups, saved, strict=True):
            for name, value in options.items():
                now = group.get(name)
                kept = type(now)(value) if isinstance(now, (list, tuple)) and isinstance(value, list) else value
                if now is not None and now != kept:
                    group[name] = kept

    # -- passes

    def step_ends(self) -> None:
        """Note that all batches which were read so far are trained on."""
        self._trained = self.epoch, self.batches

    def pass_begins(self, *, is_open: bool) -> None:
        """Note that a pass begins; `is_open`: gradients are added up over its begin."""
        if not self._is_resumed:
            self.is_ahead = False
        if not is_open:
            self._trained = self.epoch, self.batches

    @property
    def goes_back(self) -> bool:
        """Whether a resume begins with the first batch behind the last step."""
        return self._source is not None and self._trained[0] == self.epoch and not self._has_state

    @property
    def is_unread(self) -> bool:
        """Whether the pass that goes on behind a resume has no batches left: only what is behind them is to be done."""
        return self._is_resumed and self.owes_tail and self._is_read

    @property
    def is_resumed(self) -> bool:
        """Whether the next pass is that of a resume."""
        return self._is_resumed

    def draw_as_begun(self) -> None:
        """Set the generators as they were when a pass was taken over whose iterator had been made before."""
        if self._epoch_rng is not None and self.batches:
            set_rng(self._generators, self._epoch_rng)


class EngineState:
    """What each rank has of its own, and DeepSpeed does not save: buffers of the module, and a scaler of gradients.

    DeepSpeed saves the buffers of one rank for all, and keeps them apart in the training (running averages of a norm).
    """

    ENTRY = "resilience.deepspeed"
    MAX_BYTES = 64 << 20
    """Of all buffers of a rank together: with more, those of one rank count for all."""

    def __init__(self, engine: Any) -> None:
        """Read and write what that engine has."""
        self._engine = engine
        self._saved: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return it by reference."""
        scaler = getattr(self._engine, "torch_autocast_z0_gradscaler", None)
        return {"buffers": self._buffers(), "scaler": None if scaler is None else scaler.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Keep it until the engine has loaded its own."""
        self._saved = saved

    def put_back(self, *, is_same_job: bool) -> None:
        """Set it behind what the engine has loaded; say what is not there."""
        import torch

        saved, own = self._saved, self._buffers()
        if saved is None:
            why = "an earlier version has not saved them" if is_same_job else "another number of ranks has saved them"
            self._note_missing(own, why)
            return
        with torch.no_grad():
            for name, buffer in own.items():
                kept = saved["buffers"].get(name)
                if kept is not None and kept.shape == buffer.shape:
                    buffer.copy_(kept)
        scaler = getattr(self._engine, "torch_autocast_z0_gradscaler", None)
        if scaler is not None and saved.get("scaler"):
            scaler.load_state_dict(saved["scaler"])

    def note_limits(self) -> None:
        """Say what is never exact."""
        if not self._is_small(_buffers_of(self._engine)):
            note(
                "deepspeed buffers",
                "buffers that differ by rank",
                f"all together have more than {self.MAX_BYTES >> 20} MB, so that those of one rank are saved for all",
                "register what is the same on all ranks with persistent=False",
            )
        kind = type(getattr(self._engine, "basic_optimizer", None) or self._engine.optimizer).__name__
        if kind.lower().startswith(("onebit", "zeroone")):
            note(
                "deepspeed compression",
                f"what {kind} has left of gradients that it compressed",
                "DeepSpeed begins its errors of compression anew at each load",
                "use an optimizer that does not compress for steps that are the same",
            )

    def _note_missing(self, buffers: Mapping[str, Any], why: str) -> None:
        averaged = [name for name, buffer in buffers.items() if buffer.is_floating_point()]
        if averaged and _has_several_ranks():
            note(
                "deepspeed buffers of ranks",
                f"buffers that differ by rank ({averaged[0]})",
                f"{why}, so that those of one rank count for all",
                "nothing is to be done from the next checkpoint on",
            )
        if getattr(self._engine, "torch_autocast_z0_gradscaler", None) is not None:
            note(
                "deepspeed scaler",
                "the scale of the gradients (torch_autocast)",
                f"DeepSpeed does not save it, and {why}".replace("them", "it"),
                "nothing is to be done from the next checkpoint on",
            )

    def _buffers(self) -> dict[str, Any]:
        found = _buffers_of(self._engine) if _has_several_ranks() else {}
        return found if self._is_small(found) else {}

    def _is_small(self, buffers: Mapping[str, Any]) -> bool:
        return bool(sum(one.numel() * one.element_size() for one in buffers.values()) <= self.MAX_BYTES)


def is_window_open(engine: Any) -> bool:
    """Tell whether gradients are added up that no step has used."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    if managed is not None and not managed():
        return bool(getattr(engine, "_unmanaged_backward_count", 0))
    if getattr(engine, "_is_gradient_accumulation_boundary", None) is not None:
        return False  # the script says which backward is the last: how many there are is not known
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


def note_open_window(*, goes_back: bool) -> None:
    """Say that a checkpoint is of an open window, whose gradients are in none."""
    note(
        "deepspeed window",
        "gradients that were added up since the last step",
        "the checkpoint was saved within a step, behind a backward, so that a resume begins that step anew, with "
        + ("other random numbers" if goes_back else "other micro-batches"),
        "call handle.save() where engine.is_gradient_accumulation_boundary() was true before engine.step()",
    )


def rates_of(engine: Any) -> list[dict[str, Any]]:
    """Return what a schedule changes of each group of parameters, as a JSON value."""
    return [
        {name: list(group[name]) if isinstance(group[name], tuple) else group[name] for name in _RATES if name in group}
        for group in _groups(engine)
    ]


def _groups(engine: Any) -> list[dict[str, Any]]:
    groups = list(getattr(engine.optimizer, "param_groups", None) or ())
    return groups if all(_is_plain(group.get(name, 0)) for group in groups for name in _RATES) else []


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))


def _buffers_of(engine: Any) -> dict[str, Any]:
    import torch

    found = {}
    for path, part in engine.module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and type(buffer) is torch.Tensor:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def _has_several_ranks() -> bool:
    from torch import distributed

    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)


def _asked(engine: Any, name: str) -> int | None:
    found = getattr(engine, name, None)
    return int(found()) if callable(found) else None


def _is_set(engine: Any, name: str) -> bool:
    found = getattr(engine, name, None)
    return bool(callable(found) and found())


def _length(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def is_ordered_by_number(loader: Any) -> bool:
    """Tell whether an order is drawn from numbers that all processes have alike."""
    from torch.utils.data import DistributedSampler, SequentialSampler

    return isinstance(getattr(loader, "sampler", None), (DistributedSampler, SequentialSampler))


def _ranks_words(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
