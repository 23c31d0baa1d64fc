"""Trains a small GPT-2 with the Trainer; what the arguments say happens to its saves."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import time
from typing import Any

import contract_script as contract
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType

from resilience_sdk import preemption
from resilience_sdk.adapters.transformers import ResilienceCallback
from resilience_sdk.recorder import lookup

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--save", type=int, default=3)
parser.add_argument("--eval", type=int, default=0, help="evaluate every so many steps")
parser.add_argument("--jit", action="store_true", help="with Transformers' own checkpoint at SIGTERM")
parser.add_argument("--fsdp", action="store_true", help="shard the model")
parser.add_argument("--shard-on-cpu", action="store_true", help="and tell Accelerate that these are accelerators")
parser.add_argument("--die-in-save", type=int, default=-1, help="rank 1 of the first attempt is killed in this save")
parser.add_argument("--asked-at", type=int, default=-1, help="wait behind this step until the job is asked to leave")
parser.add_argument("--no-room-at", type=int, default=-1, help="rank 0 has no room for this save")
args = parser.parse_args()
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
torch.manual_seed(0)

LENGTH, LETTERS = 8, 32
ASKED_AT = args.asked_at
text = torch.randint(LETTERS, (4096,), generator=torch.Generator().manual_seed(1))
pieces = [{"input_ids": piece, "labels": piece} for piece in text.unfold(0, LENGTH, 4)]


class Trainer(transformers.Trainer):
    """A trainer to whose saves something happens."""

    def _save_rng_state(self, output_dir: str) -> None:
        if contract.attempt == 0 and contract.rank() == 1 and self.state.global_step == args.die_in_save:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)

    def _save(self, *given: Any, **options: Any) -> None:
        if self.state.global_step == args.no_room_at:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
            try:
                super()._save(*given, **options)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        else:
            super()._save(*given, **options)


class Tells(transformers.TrainerCallback):
    """Tells where an attempt begins, and each step; all ranks wait for the request to leave before they go on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell where it begins."""
        contract.tell("start", step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell how many steps are complete."""
        contract.tell("step", step=state.global_step)
        while state.global_step == ASKED_AT and preemption.time_left() is None:
            time.sleep(0.01)


config = transformers.GPT2Config(
    vocab_size=LETTERS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=False
)
arguments = transformers.TrainingArguments(
    output_dir=os.environ["RESILIENCE_RUN_DIR"] + "/trainer",
    max_steps=args.steps,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    save_steps=args.save,
    save_total_limit=1,
    eval_strategy="steps" if args.eval else "no",
    eval_steps=args.eval or None,
    enable_jit_checkpoint=args.jit,
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    fsdp="full_shard" if args.fsdp else None,
    fsdp_config={"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"} if args.fsdp else None,
)
if args.shard_on_cpu and arguments.device:  # which makes the state that is changed here
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
trainer = Trainer(
    transformers.GPT2LMHeadModel(config),
    arguments,
    train_dataset=pieces,
    eval_dataset=pieces[:16],
    callbacks=[Tells(), ResilienceCallback()],
)
trainer.train()
kinds = sorted({type(parameter).__name__ for parameter in trainer.model_wrapped.parameters()})
recorder = lookup.recorder()
passes = {} if recorder is None else {name: count for (name, _), count in contract._counts(recorder).items()}
contract.tell(
    "end",
    step=trainer.state.global_step,
    digest=None if args.fsdp else contract.digest(trainer.model),
    passes=passes,
    kinds=kinds,
)
