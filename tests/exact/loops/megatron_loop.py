"""The training of `loop_megatron.py`: Megatron's DDP, optimizer and checkpoints, samples by the step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "integration" / "scripts"))
import cpu_megatron
import telling as t
import torch
import torch.distributed as dist
from megatron.core import Timers, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from resilience_sdk import preemption
from resilience_sdk.adapters import megatron

o = t.options


class Model(MegatronModule):
    """The network as Megatron wants a model."""

    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False
    pre_process = post_process = True

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.net = t.same_net()

    def set_input_tensor(self, tensor: Any) -> None:
        """Take what the stage before gives: nothing, there is one stage."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the prediction."""
        return self.net(batch)


def batches_from(step: int) -> Iterator[torch.Tensor]:
    """Return the micro-batches of this rank from that step on: an order for each epoch, by its number."""
    per_step = t.BATCH * t.ACCUMULATE * t.ranks
    done = step * per_step
    while True:
        epoch, place = divmod(done, t.LENGTH)
        order = torch.randperm(t.LENGTH, generator=torch.Generator().manual_seed(epoch)).tolist()
        own = order[place + t.rank * t.BATCH : place + (t.rank + 1) * t.BATCH]
        yield torch.stack([t.noisy(index) for index in own])
        done += t.BATCH * t.ranks


def main() -> None:
    """Train."""
    logging.disable(logging.WARNING)
    cpu_megatron.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        timers=Timers(log_level=0, log_option="minmax"),
        finalize_model_grads_func=finalize_model_grads,
    )
    net = Model(config)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), net)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.02, clip_grad=0.0), [model])
    schedule = OptimizerParamScheduler(
        optimizer, 0.0, 0.02, 0.002, 2, 18, "cosine", 0.0, 0.0, 18, "constant", use_checkpoint_opt_param_scheduler=True
    )
    forward_backward = get_forward_backward_func()
    t.seed()

    def state(is_loading: bool = False) -> dict[str, Any]:
        sharded = net.sharded_state_dict()
        own = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=is_loading)}
        return {**own, "schedule": schedule.state_dict()}

    def load(found: dict[str, Any]) -> None:
        net.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])

    saver = megatron.checkpointer(state, load, every=t.EVERY)
    first = saver.resume()
    handle = megatron.attach(config, optimizer, first_step=first)
    batches = batches_from(first)
    [inner] = optimizer.chained_optimizers
    micro = 0

    def forward_step(given: Iterator[torch.Tensor], module: Any) -> Any:
        nonlocal micro
        batch = next(given)
        number = handle.step * t.ACCUMULATE + micro
        if micro == 1:
            t.reach("window", handle.step)
        micro += 1
        t.tell("epoch", handle.step, handle.step * t.ACCUMULATE * t.BATCH * t.ranks // t.LENGTH)
        t.tell_batch(number, batch)

        def loss_of(outputs: torch.Tensor) -> Any:
            loss = torch.nn.functional.mse_loss(outputs, batch.mean(1, keepdim=True) / 5)
            t.tell("losses", number, loss.item())
            return loss, {"loss": loss.detach()}

        return module(batch), loss_of

    per_epoch = t.LENGTH // (t.BATCH * t.ACCUMULATE * t.ranks)
    while handle.step < t.EPOCHS * per_epoch:
        step, micro = handle.step, 0
        t.at_step(step)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=[model],
            num_microbatches=t.ACCUMULATE,
            seq_length=1,
            micro_batch_size=t.BATCH,
            forward_only=False,
        )
        optimizer.step()
        schedule.step(increment=1)
        t.tell("learning rates", step, inner.optimizer.param_groups[0]["lr"])
        t.tell("weights", step, t.digest(list(net.parameters())))
        t.tell_generators(step)
        if (step + 1) % per_epoch == 0:
            evaluate(net, step // per_epoch)
        if handle.should_stop():
            saver.save(handle.step)
            preemption.exit()
        saver.maybe_save(handle.step)
    handle.detach()
    t.tell("end", "draw", [torch.rand(()).item(), t.digest(list(net.parameters()))])
    dist.destroy_process_group()


def evaluate(net: Any, epoch: int) -> None:
    """Evaluate, with random numbers."""
    net.eval()
    total = torch.zeros(())
    with torch.no_grad():
        for index in range(3):
            if index == 1:
                t.reach("evaluation", epoch)
            total += net(torch.stack([t.noisy(200 + index)])).mean()
    net.train()
    t.tell("evaluations", epoch, total.item())
    t.reach("behind", epoch)
