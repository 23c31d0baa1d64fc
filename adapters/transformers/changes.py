"""Lines on what another number of ranks, batch, accumulation, length or seed makes of a resume, with the cure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from resilience_sdk.adapters.transformers.kept import Shape, batches_after
from resilience_sdk.core.resume_limits import note


def say_changes(saved: Shape, now: Shape, kept: Mapping[str, Any], args: Any) -> None:
    """Say what is other now than at the save. `args` are the trainer's. On all ranks."""
    epoch, seeds = kept.get("epoch"), seeds_of(args)
    if kept.get("seeds", seeds) != seeds:
        note(
            "seed",
            f"the order of epoch {epoch}",
            f"seed and data_seed are {seeds}, and were {kept['seeds']}: samples of this epoch come twice or not at all",
            "resume with the seeds of the save",
        )
    if saved.length != now.length:
        note(
            "length",
            f"the order of epoch {epoch}",
            f"the training data have {now.length} samples, and had {saved.length}: the rest of this epoch has samples "
            "twice and leaves others out, and the schedule has another length",
            "resume with the data of the save",
        )
    if attrs.evolve(saved, length=now.length) == now:
        return
    if saved.step_samples == now.step_samples and saved.ranks == now.ranks:
        note(
            "batch",
            "how a step adds up",
            f"{now.words()} in place of {saved.words()}: the same samples, summed in another way, with other dropout",
            f"resume with {saved.words()}",
        )
        return
    what = [f"{now.words()} in place of {saved.words()}"]
    if saved.step_samples != now.step_samples:
        what.append(
            f"a step has {now.step_samples} samples in place of {saved.step_samples}, so that the number of steps and "
            "the schedule of the learning rate are others"
        )
    if twice := batches_after(int(kept.get("batches", 0)), saved, now)[1]:
        what.append(f"{twice} samples of epoch {epoch} are trained twice")
    if saved.ranks != now.ranks:
        what.append("the random numbers of each rank begin anew")
    if by := _order_by_step(args):
        what.append(f"the order of {by} depends on that, so that samples of this epoch come twice or not at all")
    cure, each = f"resume with {saved.words()}", now.ranks * now.batch
    if saved.step_samples % each == 0 and saved.step_samples != now.step_samples:
        cure += f", or keep the samples of a step: gradient_accumulation_steps={saved.step_samples // each}"
    note("ranks", "the samples of each step", "; ".join(what), cure)


def say_plain(names: Iterable[str], trainer: str) -> None:
    """Say which attributes change that no checkpoint has: `Class.attribute`, of callbacks and of the trainer."""
    changed: dict[str, list[str]] = {}
    for name in names:
        owner, _, attribute = name.partition(".")
        changed.setdefault(owner, []).append(attribute)
    for owner, attributes in changed.items():
        listed = f"attribute{'s' * (len(attributes) > 1)} {', '.join(attributes)}"
        if owner == trainer:
            note(
                f"trainer {owner}",
                f"the {listed} of {owner}",
                "the training changes that, and no checkpoint has it: a Trainer saves none of its attributes",
                "keep it in a TrainerCallback that is a transformers.trainer_callback.ExportableState, or make it "
                "anew from the step",
            )
            continue
        note(
            f"callback {owner}",
            f"the state of callback {owner}",
            f"the training changes its {listed}, and no checkpoint has that: it is no ExportableState",
            "derive it from transformers.trainer_callback.ExportableState, or save a module in its on_save() and load "
            "it in its on_train_begin()",
        )


def seeds_of(args: Any) -> list[int | None]:
    """Return the seeds by which the order of an epoch is drawn."""
    return [args.seed, args.data_seed]


def _order_by_step(args: Any) -> str | None:
    """Return what orders the samples by how many a step has, or by rank; None where nothing does."""
    strategy = getattr(args, "train_sampling_strategy", None)
    if strategy in ("group_by_length", "batch_rebalance"):
        return f"train_sampling_strategy={strategy!r}"
    if getattr(args, "group_by_length", False):
        return "group_by_length"
    config = getattr(args, "accelerator_config", None)
    return None if getattr(config, "use_seedable_sampler", True) else "use_seedable_sampler=False"
