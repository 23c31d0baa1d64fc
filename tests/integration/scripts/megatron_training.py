"""The contract's training with megatron-core: its DDP, optimizer, schedule, timers and checkpoints.

`megatron.training`, which has the loop, is in no package; so the loop is ours.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import contract_script as contract
import cpu_megatron
import torch
import torch.distributed as dist
from megatron.core import Timers, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.utils.data import DataLoader, Subset

import resilience_sdk
from resilience_sdk import preemption
from resilience_sdk.adapters import megatron
from resilience_sdk.adapters.megatron import attached

BATCH = 4


class Model(MegatronModule):
    """The contract's network as Megatron wants a model."""

    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False
    pre_process = post_process = True

    def __init__(self, config: TransformerConfig, net: nn.Module) -> None:
        super().__init__(config)
        self.net = net

    def set_input_tensor(self, tensor: Any) -> None:
        """Take what the stage before gives: nothing, there is one stage."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the prediction."""
        return self.net(inputs)


class Training:
    """What Megatron's `train_step` does."""

    def __init__(
        self, micro_batches: int, make: Callable[[TransformerConfig], MegatronModule], stages: int = 1
    ) -> None:
        self.config = TransformerConfig(
            num_layers=stages,
            hidden_size=contract.WIDTH,
            num_attention_heads=1,
            pipeline_model_parallel_size=stages,
            pipeline_dtype=torch.float32,
            timers=Timers(log_level=0, log_option="minmax"),
            finalize_model_grads_func=finalize_model_grads,
        )
        self.model = DistributedDataParallel(self.config, DistributedDataParallelConfig(), make(self.config))
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.0), [self.model])
        self._micro_batches = micro_batches
        self._forward_backward = get_forward_backward_func()

    def forward_step(self, batches: Iterator[Any], model: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Return the output, and what makes the loss of it."""
        timers = self.config.timers
        timers("batch-generator", log_level=2).start()
        inputs, targets = next(batches)
        timers("batch-generator").stop()

        def loss_of(outputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = nn.functional.mse_loss(outputs, targets)
            return loss, {"loss": loss.detach()}

        return model(inputs), loss_of

    def step(self, batches: Iterator[Any], forward_step: Callable[..., Any] | None = None) -> None:
        """Make one step."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._forward_backward(
            forward_step_func=forward_step or self.forward_step,
            data_iterator=batches,
            model=[self.model],
            num_microbatches=self._micro_batches,
            seq_length=1,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        self.optimizer.step()

    def evaluate(self, batches: Iterator[Any]) -> None:
        """Evaluate."""
        self.model.eval()
        with torch.no_grad():
            for _ in range(contract.EVALUATED):
                self._forward_backward(
                    forward_step_func=self.forward_step,
                    data_iterator=batches,
                    model=[self.model],
                    num_microbatches=1,
                    seq_length=1,
                    micro_batch_size=BATCH,
                    forward_only=True,
                )
        self.model.train()

    def sharded_state(self, is_loading: bool = False) -> dict[str, Any]:
        """Return what `dist_checkpointing` saves, or loads into."""
        model = self.model.module.sharded_state_dict()
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading)}

    def load(self, state: dict[str, Any]) -> None:
        """Take a state."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def own_batches(first: int, accumulate: int) -> Iterator[Any]:
    """Return the batches of this rank behind so many steps."""
    ranks = parallel_state.get_data_parallel_world_size()
    done = first * accumulate * BATCH * ranks
    own = range(done + parallel_state.get_data_parallel_rank(), contract.SAMPLES, ranks)
    return iter(DataLoader(Subset(contract.Numbers(), own), batch_size=BATCH))


def start(stages: int = 1) -> None:
    """Do what Megatron's initialisation does."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    cpu_megatron.install()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


def main() -> None:
    """Train."""
    args = contract.arguments()
    if args.kernels:
        attached.kernels_device = lambda: "CPU"
    start()
    net = contract.Net(args)
    training = Training(args.accumulate, lambda config: Model(config, net))
    saver = None
    if args.save:
        run_dir = os.environ["RESILIENCE_RUN_DIR"]
        saver = megatron.checkpointer(
            training.sharded_state, training.load, run_dir=run_dir, every=args.save, in_background=args.background
        )
    first = saver.resume() if saver else 0
    steps = contract.Steps(first)
    [inner] = training.optimizer.chained_optimizers
    steps.watch(inner.optimizer)
    batches = own_batches(first, args.accumulate)

    hung = (training.config, training.optimizer, training.model)
    before = contract.traces(*hung)
    handle = megatron.attach(training.config, training.optimizer, first_step=first)
    contract.prepared()
    caught = second = None
    try:
        megatron.attach(training.config, training.optimizer)
    except resilience_sdk.ConfigError as error:
        second = f"ConfigError: {error}"
    try:
        bad_steps = saver.skipped_steps if saver else ()
        while handle.step < args.steps:
            if handle.step in bad_steps:
                for _ in range(args.accumulate):
                    next(batches)
                handle.go_to(handle.step + 1)
                continue
            training.step(batches)
            if args.evaluate and handle.step % args.evaluate == 0:
                training.evaluate(own_batches(0, 1))
            if handle.should_stop():
                if saver:
                    saver.save(handle.step)
                preemption.exit()
            if saver:
                saver.maybe_save(handle.step)
    except contract.StepError as error:
        caught = str(error)
    handle.detach()
    contract.end(steps, net, before=before, after=contract.traces(*hung), second=second, caught=caught)
    dist.destroy_process_group()
