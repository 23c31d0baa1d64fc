"""The limits of a resume by `pretrain()` of Megatron-LM, as its arguments tell them."""

from __future__ import annotations

import os
from typing import Any

from resilience_sdk.core.resume_limits import note


def note_arguments(args: Any) -> None:
    """Say what follows from the arguments alone."""
    save, load = getattr(args, "save", None), getattr(args, "load", None)
    if not save:
        return  # which is said, and what is loaded then is the start of each attempt
    if getattr(args, "finetune", False):
        note(
            "megatron finetune",
            "iterations of this training",
            "--finetune loads weights alone, and each start begins at iteration 0",
            f"start it again without --finetune and with --load {save}",
        )
    elif hasattr(args, "load") and not _is_same(load, save):
        note(
            "megatron load",
            f"what --save {save} has",
            f"--load is {load}, so that each start begins there",
            f"start it with --load {save}: where nothing is there yet, Megatron begins from nothing, or from "
            "--pretrained-checkpoint",
        )
    for name, thing in (("optim", "the optimizer and its schedule"), ("rng", "random numbers")):
        options = [f"--no-{verb}-{name}" for verb in ("save", "load") if getattr(args, f"no_{verb}_{name}", False)]
        if options:
            note(f"megatron {name}", thing, f"{' and '.join(options)} leaves them out", f"leave {options[0]} out")
    kind = getattr(args, "dataloader_type", None)
    if kind == "external" and not getattr(args, "dataloader_save", None):
        note(
            "megatron external",
            "the place in the data",
            "with --dataloader-type external the script makes its iterator, and Megatron saves nothing of it",
            "begin it behind args.consumed_train_samples, or give --dataloader-save where its iterator can save itself",
        )
    elif kind == "cyclic":
        note(
            "megatron cyclic",
            "random numbers that the script draws on the CPU",
            "samples are the same, but with --dataloader-type cyclic Megatron makes an iterator in the first step, "
            "which draws one",
            "use --dataloader-type single, or draw from a generator that is seeded by the iteration",
        )
    if _data_parallel(args) > 1 and not getattr(args, "data_parallel_random_init", True):
        note(
            "megatron random numbers of ranks",
            "random numbers that the ranks of a data parallel group draw apart from one another",
            "Megatron saves those of the first of them for all",
            "nothing is to be done where all draw alike; else give --data-parallel-random-init",
        )


def note_batch(args: Any) -> None:
    """Say that steps have other samples than before, as the samples that are consumed tell."""
    batch, consumed = getattr(args, "global_batch_size", None), getattr(args, "consumed_train_samples", None)
    iteration = args.iteration
    is_plain = isinstance(batch, int) and isinstance(consumed, int) and consumed > 0
    if not is_plain or getattr(args, "rampup_batch_size", None) or getattr(args, "perform_rl_step", False):
        return
    if consumed != iteration * batch:
        note(
            "megatron batch",
            f"steps of {round(consumed / iteration)} samples",
            f"--global-batch-size is {batch} now and {consumed} samples were consumed in {iteration} iterations: each "
            "sample is used once, but steps and, by iterations, learning rates are other ones for it",
            "resume with the global batch size that it had",
        )


def _data_parallel(args: Any) -> int:
    found = getattr(args, "data_parallel_size", 1)
    return found if isinstance(found, int) else 1


def _is_same(load: Any, save: Any) -> bool:
    return bool(load) and os.path.realpath(str(load)) == os.path.realpath(str(save))
